"""Qwen3 embedding models of which there is a GGUF file alone: their weights, tokens and vectors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.engine.conftest import Served
from tests.support.models import TEXTS, build
from tests.support.models.other_forms import move_to_gguf

from teimgr.engine.library_reference import NoReferenceError, load_reference
from teimgr.engine.text.tokenizer_library import PROBES, load_tokenizer
from teimgr.engine.weights.own import gguf_weights
from teimgr.models import gguf_head
from teimgr.models.directory import missing_file
from teimgr.models.reading import read_layout


def _both(folder: Path, form: str) -> tuple[Path, Path]:
    plain = build("qwen3_128", folder / "plain")
    return plain, move_to_gguf(shutil.copytree(plain, folder / "gguf"), form)


@pytest.mark.parametrize(("form", "least"), [("F32", 0.9999999), ("F16", 0.99999), ("BF16", 0.999), ("Q8_0", 0.999)])
def test_a_file_is_the_model_that_it_was_made_of(
    form: str, least: float, tmp_path: Path, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, alone = _both(tmp_path, form)
    parse, parsed = gguf_head._head, list[int]()
    monkeypatch.setattr(gguf_head, "_head", lambda reader, size: parsed.append(size) or parse(reader, size))
    truth, served = serve(plain).embed(TEXTS).vectors, serve(alone, safetensors_only=True)

    assert len(parsed) == 1  # for its configuration, tokenizer, weights and space
    with pytest.raises(NoReferenceError, match="loads a GGUF file alone"):
        load_reference(served.engine.layout)
    assert missing_file(alone) is None
    assert (served.engine.info.forward, served.engine.info.pooling) == ("native", "last_token")
    assert served.engine.info.warnings == ()
    assert (served.embed(TEXTS).vectors * truth).sum(axis=1).min() >= least


@pytest.mark.parametrize("form", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_weights_are_those_that_transformers_reads(form: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    from transformers import AutoConfig, AutoModel
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    _, alone = _both(tmp_path, form)
    config = AutoConfig.from_pretrained(alone, gguf_file="model.gguf")
    model = AutoModel.from_config(config)
    theirs = load_gguf_checkpoint(str(alone / "model.gguf"), return_tensors=True, model_to_load=model)["tensors"]
    ours = gguf_weights(alone / "model.gguf")

    assert ours.keys() == theirs.keys() == model.state_dict().keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    mine = read_layout(alone).config
    names = mine.keys() - {"rope_theta", "architectures"}
    assert {name: getattr(config, name) for name in names} == {name: mine[name] for name in names}
    assert config.rope_parameters["rope_theta"] == mine["rope_theta"]


def test_texts_are_cut_into_the_tokens_of_the_safetensors_release(tmp_path: Path) -> None:
    plain, alone = (load_tokenizer(read_layout(folder)) for folder in _both(tmp_path, "F16"))

    for text in (*PROBES, *TEXTS, "a</s>b <mask>", "12345\n\n  x", "e\u0301"):
        assert alone.encode(text).ids == plain.encode(text).ids
        assert alone.encode(text).special_tokens_mask == plain.encode(text).special_tokens_mask
