"""Pieces of a text, one for each token, of every kind of tokenizer."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.models import build

from teimgr.engine.text.tokenizer import TextTokenizer
from teimgr.errors import TooLarge
from teimgr.models.reading import read_layout
from teimgr.spec import WorkerSpec
from teimgr.wire.frames import HttpRequest
from teimgr.wire.json_scan import completed
from teimgr.worker import http_inference as http
from teimgr.worker.dialects.tokens import COHERE_ROUTES, VLLM_ROUTES, pieces
from teimgr.worker.dispatcher import Dispatcher

TEXTS = [
    "Hello world",
    "  two  spaces,\ttabs\nand lines  ",
    "naïve café — “quoted” 東京タワー",
    "an emoji 🦊 and a family 👩‍👩‍👧‍👦!",
    "e\u0301 combining, \u200bzero width, \x07bell",
    "ﬁ ligature ① ﷺ",
]


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "xlm_roberta", "gemma3", "t5", "qwen2", "llama"])
def test_joined_pieces_are_the_text(family: str, tmp_path: Path) -> None:
    tokenizer = TextTokenizer(read_layout(build(family, tmp_path)), 512)
    for text in TEXTS:
        tokens = tokenizer.tokenize(text, False, "")
        parts = completed(pieces(text, tokens))
        assert len(parts) == len(tokens)
        framed = tokenizer.tokenize(text, True, "")
        named = zip(framed, completed(pieces(text, framed)), strict=True)
        assert [part for token, part in named if not token.special] == parts
        assert "".join(parts) == text


def test_a_text_without_tokens_is_one_piece(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(read_layout(build("bert", tmp_path)), 512)
    for text in (" ", " \n\t", "\x07", "\u200b\u200d"):
        tokens = tokenizer.tokenize(text, False, "")
        assert not tokens
        assert completed(pieces(text, tokens)) == [text]


@pytest.mark.parametrize(
    ("routes", "path", "body"),
    [
        (VLLM_ROUTES, "/tokenize", {"prompt": "fog " * 400, "return_token_strs": True}),
        (VLLM_ROUTES, "/detokenize", {"tokens": [9] * 400}),
        (COHERE_ROUTES, "/v1/tokenize", {"text": "fog " * 400}),
        (COHERE_ROUTES, "/v1/detokenize", {"tokens": [9] * 400}),
    ],
)
async def test_an_answer_is_written_on_a_thread_and_within_the_limit_of_replies(
    routes: http.RouteTable, path: str, body: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SimpleNamespace(
        tokenizer=TextTokenizer(read_layout(build("bert", tmp_path)), 512), info=SimpleNamespace(max_input_length=512)
    )
    dispatcher = Dispatcher(WorkerSpec(name="i", model_id="m", port=1))
    monkeypatch.setattr(Dispatcher, "engine", engine)
    written_by: list[int] = []

    def to_json(value: object) -> bytes:
        written_by.append(threading.get_ident())
        return json.dumps(value).encode()

    monkeypatch.setattr(http, "to_json", to_json)
    request = HttpRequest(
        "vllm", "POST", path, headers={"content-type": "application/json"}, body=json.dumps(body).encode()
    )
    inference = http.HttpInference(dispatcher)
    assert (await routes["POST", path](inference, request)).status == 200
    assert written_by != [threading.get_ident()]
    dispatcher.spec = replace(dispatcher.spec, max_message_bytes=100)
    with pytest.raises(TooLarge):
        await routes["POST", path](inference, request)
