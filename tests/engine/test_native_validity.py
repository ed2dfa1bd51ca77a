"""Sizes from a model's files on their way to the C library: refused, or computed by torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tests.engine.conftest import Served
from tests.fuzz import native
from tests.support.models import build, edit
from tests.support.native import needs_native_forward

from teimgr.engine.native_forward.kernel import forward_kernel
from teimgr.engine.native_forward.program import CannotLowerError
from teimgr.engine.text.tokenizer import TextTokenizer, TokenizeOptions
from teimgr.models.reading import read_layout

TEXTS = ["rain on the harbour", "one", "a longer text about boats and the harbour in the rain"]


@needs_native_forward
@pytest.mark.parametrize("size", [1040, 2048])
def test_heads_beyond_the_buffers_are_computed_by_torch(
    size: int, tmp_path: Path, serve: Callable[..., Served]
) -> None:
    """Such a model overwrote the stack of its worker, with what its value weights said."""
    folder = build("bert", tmp_path / "model")
    config = transformers.BertConfig.from_pretrained(folder)
    config.hidden_size, config.num_attention_heads, config.num_hidden_layers, config.intermediate_size = size, 1, 1, 64
    torch.manual_seed(0)
    module = transformers.BertModel(config, add_pooling_layer=False).eval()
    module.save_pretrained(folder)
    edit(folder / "1_Pooling" / "config.json", word_embedding_dimension=size)
    with pytest.raises(CannotLowerError, match=f"1 heads of {size} columns"):
        forward_kernel(module, {}, torch.float32)

    served = serve(folder, dtype="float32")

    assert served.engine.info.forward == "library"
    found = served.embed(TEXTS).vectors
    tokenizer = TextTokenizer(read_layout(folder), 128)
    for row, encoded in zip(found, tokenizer.encode(TEXTS, TokenizeOptions()), strict=True):
        assert not isinstance(encoded, Exception)
        with torch.inference_mode():
            hidden = module(torch.tensor([list(encoded.ids)])).last_hidden_state[0]
        expected = torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy()
        np.testing.assert_allclose(row, expected, atol=2e-5)


@pytest.mark.skipif(native.compiler_runtime() is None, reason="there is no compiler with sanitizers")
@pytest.mark.skipif(platform.machine() != "x86_64" or "LD_PRELOAD" in os.environ, reason="another runtime")
@pytest.mark.timeout(480)  # the sanitised library takes a core ten seconds to build
def test_random_programs_touch_no_foreign_memory() -> None:
    """A short part of `dev.py soak fuzz --only native`."""
    done = native.run_cases(40, seed=1)

    assert done.returncode == 0, done.stderr[-3000:]
    for status in ("forward 0", "forward 4", "attention 0", "attention 4"):  # done, and refused
        assert status in done.stdout
