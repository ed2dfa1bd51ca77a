"""Token ids of another tokenizer: read by tiktoken, or refused, with the index of the input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support import models
from tests.support.worker_process import WorkerProcess
from tests.worker.tei_client import TeiClient

from teimgr.engine.job import Input
from teimgr.errors import InvalidConfig, InvalidInput
from teimgr.spec import WorkerSpec
from teimgr.wire.frames import Method
from teimgr.worker import token_ids

# An encoding of bytes alone, as a plug-in of tiktoken has it.
PLUG_IN = """
def letters():
    ranks = {bytes([each]): each for each in range(256)} | {b"fo": 256, b"fog": 257}
    return {"name": "letters", "pat_str": r"\\S+|\\s+", "mergeable_ranks": ranks, "special_tokens": {}}

ENCODING_CONSTRUCTORS = {"letters": letters}
"""


@pytest.fixture
def letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    registry = pytest.importorskip("tiktoken.registry")
    (tmp_path / "tiktoken_ext").mkdir()
    (tmp_path / "tiktoken_ext" / "of_tests.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "ENCODING_CONSTRUCTORS", None)
    registry._available_plugin_modules.cache_clear()
    token_ids._encoding.cache_clear()
    yield "letters"
    registry._available_plugin_modules.cache_clear()
    token_ids._encoding.cache_clear()


def spec(mode: str, encoding: str = "letters") -> WorkerSpec:
    return WorkerSpec(name="mini", model_id="m", token_inputs=mode, token_encoding=encoding)


def ids(*numbers: int) -> Input:
    return np.array(numbers, np.uint32).view(np.int32)


def test_ids_are_read_as_their_text(letters: str) -> None:
    token_ids.check(spec(token_ids.TIKTOKEN))
    cut = "\u6771".encode()[:2]  # a chunk ends within a character
    given: list[Input] = ["a text", ids(257, 32, *b"rain"), ids(*b"a", *cut), None, ids()]

    found = token_ids.read(given, spec(token_ids.TIKTOKEN))

    assert found[:4] == ["a text", "fog rain", "a\ufffd", None]
    assert isinstance(found[4], np.ndarray)  # of no ids: refused as empty


def test_an_id_that_the_encoding_lacks_is_refused_with_its_input(letters: str) -> None:
    with pytest.raises(InvalidInput, match="has a token id that letters does not have") as caught:
        token_ids.read(["a", ids(257), ids(5, 2**32 - 1)], spec(token_ids.TIKTOKEN))
    assert caught.value.input_index == 2


def test_refused_ids_are_named_and_texts_are_left_alone() -> None:
    refusing = spec(token_ids.REFUSE)
    assert token_ids.read(["a", "b"], refusing) == ["a", "b"]
    with pytest.raises(InvalidInput, match="token ids are refused here") as caught:
        token_ids.read(["a", ids(5)], refusing)
    assert caught.value.input_index == 1


def test_an_encoding_that_cannot_be_loaded_fails_the_start() -> None:
    pytest.importorskip("tiktoken")
    token_ids.check(spec(token_ids.ACCEPT, "nothing"))
    with pytest.raises(InvalidConfig, match="token_encoding: tiktoken cannot load 'nothing'"):
        token_ids.check(spec(token_ids.TIKTOKEN, "nothing"))


async def test_an_instance_refuses_ids_on_every_route_of_inputs(tmp_path: Path) -> None:
    """LangChain and LibreChat send the ids of OpenAI's tokenizer, which would be those of other words here."""
    with WorkerProcess(models.build("bert", tmp_path), token_inputs=token_ids.REFUSE) as worker:
        link = await worker.link()
        await link.state(link.post(Method.WATCH), "ready")
        link.close()
        await link.closed()
        client = TeiClient(worker)
        for path, field in (("/v1/embeddings", "input"), ("/embed", "inputs"), ("/embed_all", "inputs")):
            for given in ([5, 6], [[5, 6], [7]], ["fog", [7]]):
                told = await client.post(path, {field: given})
                assert told.status == 422
                assert "token ids are refused here" in told.text
            assert (await client.post(path, {field: ["fog", "rain"]})).status == 200
        assert (await client.post("/decode", {"ids": [5, 6]})).status == 200
        await client.session.close()
