"""GritLM: a Mistral whose tokens attend to all others, and the mean behind its instruction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from tests.engine.conftest import Served, serve  # noqa: F401  a fixture
from tests.support import plain_forwards
from tests.support.models import TEXTS
from tests.support.models.own_code import build_gritlm

LONG = " ".join(TEXTS) * 20
ASKED = "<|user|>\nfind the fox\n<|embed|>\n"


def test_no_token_of_an_instruction_is_pooled(tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    """As `gritlm` of its authors: sent as a prompt or within the text, alone and in a batch, and cut at the length."""
    weights, config = build_gritlm(tmp_path)
    served = serve(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(served.engine.info.max_input_length)

    def truth(instruction: str, text: str) -> np.ndarray:
        ids = tokenizer.encode(instruction + text).ids
        behind = 0
        if instruction:
            encoded = tokenizer.encode(instruction)
            behind = len(encoded.ids) - encoded.special_tokens_mask[-1]
        hidden = plain_forwards.causal(weights, config, torch.tensor(ids), both_ways=True)[behind:].mean(0)
        return torch.nn.functional.normalize(hidden, dim=0).numpy()

    texts = [*TEXTS[:4], LONG]
    plain = served.embed(texts).vectors
    documents = served.embed(texts, prompt_name="document").vectors
    queries = served.embed(texts, prompt=ASKED).vectors
    within = served.embed([ASKED + texts[0], texts[1], "<|embed|>\n" + texts[2]]).vectors

    assert (served.engine.info.warnings, served.engine.info.forward) == ((), "native")
    for row, text in enumerate(texts):
        np.testing.assert_allclose(plain[row], truth("", text), atol=3e-5)
        np.testing.assert_allclose(documents[row], truth("<|embed|>\n", text), atol=3e-5)
        np.testing.assert_allclose(queries[row], truth(ASKED, text), atol=3e-5)
    expected = [truth(ASKED, texts[0]), truth("", texts[1]), truth("<|embed|>\n", texts[2])]
    np.testing.assert_allclose(within, expected, atol=3e-5)
    alone = served.embed(["<|embed|>\n" + LONG]).vectors[0]
    np.testing.assert_allclose(alone, truth("<|embed|>\n", LONG), atol=3e-5)
