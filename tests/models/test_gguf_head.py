"""What is read of a GGUF file before its weights, and what is refused by name: other models, and hostile heads."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.models import gguf_head
from teimgr.models.gguf_head import HEADS, MAX_HEAD_BYTES, leading_facts, read_gguf, weight_sizes
from teimgr.models.reading import read_layout
from tests.support.models import MAX_LENGTH, build
from tests.support.models.other_forms import move_to_gguf


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"general.architecture": "nomic-bert"}, r"of a 'nomic-bert' model.*use the original model, BAAI/bge-m3"),
        ({"split.count": 2}, "one of 2 parts"),
        ({"qwen3.attention.key_length": None}, r"qwen3\.attention\.key_length = None"),
        ({"qwen3.attention.head_count": [4, 4]}, r"qwen3\.attention\.head_count = \(4, 4\)"),
        ({"qwen3.rope.freq_base": float("nan")}, r"qwen3\.rope\.freq_base = nan"),
        ({"qwen3.block_count": 1 << 20}, "model.gguf has num_hidden_layers = 1048576"),
        ({"qwen3.attention.value_length": 64}, r"qwen3\.attention\.value_length = 64, which is not served"),
        ({"qwen3.rope.scaling.type": "yarn"}, r"qwen3\.rope\.scaling\.type = 'yarn', which is not served"),
        ({"qwen3.attention.sliding_window": 12}, r"qwen3\.attention\.sliding_window = 12"),
        ({"qwen3.pooling_type": 4}, r"qwen3\.pooling_type = 4, which is not served"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "unlike Qwen's"),
        ({"tokenizer.ggml.add_bos_token": True}, "puts a token before texts"),
        ({"tokenizer.ggml.add_eos_token": None}, "converted since August 2025"),
        ({"tokenizer.ggml.eos_token_id": 1 << 20}, r"eos_token_id = 1048576"),
        ({"tokenizer.ggml.tokens": None}, "unlike Qwen's"),
        ({"general.alignment": 0}, r"general\.alignment = 0"),
    ],
)
def test_metadata_that_are_not_served_are_named(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = move_to_gguf(build("qwen3_128", tmp_path / "model"), changes=changes)
    (folder / "README.md").write_text("---\nbase_model: BAAI/bge-m3\n---\n")

    with pytest.raises(ModelLoadFailed, match=reason):
        read_layout(folder)


def test_a_file_without_a_pooling_asks_for_one(tmp_path: Path) -> None:
    changes = {"qwen3.pooling_type": None, "tokenizer.ggml.add_eos_token": False}
    folder = move_to_gguf(build("qwen3_128", tmp_path / "model"), changes=changes)

    with pytest.raises(InvalidConfig, match="set the pooling explicitly"):
        read_layout(folder)
    layout = read_layout(folder, "mean")
    assert (layout.poolings, layout.end_token, layout.max_length) == (("mean",), None, MAX_LENGTH)


def test_other_types_need_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"Q4_0": "weights in Q4_0: install teimgr with the extra `gguf`", "MXFP4": "has the type 39 of ggml"}
    folders = {form: move_to_gguf(build("qwen3_128", tmp_path / form), form) for form in reasons}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for form, reason in reasons.items():
        with pytest.raises(ModelLoadFailed, match=reason):
            read_gguf(folders[form] / "model.gguf")


def test_sizes_are_those_of_the_head(tmp_path: Path) -> None:
    plain = weight_sizes(read_layout(build("qwen3_128", tmp_path / "model")))
    sizes = weight_sizes(read_layout(move_to_gguf(tmp_path / "model", "Q8_0")))

    assert (sizes.parameters, sizes.tables, sizes.hidden) == (plain.parameters, plain.tables, plain.hidden)
    assert sizes.tokenizer_bytes > 1000
    assert not sizes.is_wide


def test_a_head_is_kept_where_that_is_wanted_and_as_long(tmp_path: Path) -> None:
    file = move_to_gguf(build("qwen3_128", tmp_path / "model")) / "model.gguf"
    with HEADS.kept():
        first = read_gguf(file)
        with HEADS.kept():
            assert read_gguf(file) is first
        assert read_gguf(file) is first
        file.write_bytes(file.read_bytes() + bytes(32))
        assert read_gguf(file) is not first
    assert read_gguf(file) is not read_gguf(file)


def test_a_list_of_models_reads_what_stands_before_the_tokens(tmp_path: Path) -> None:
    folder = build("qwen3_128", tmp_path / "model")
    config = read_layout(folder).config
    changes = {"tokenizer.ggml.tokens": None, "qwen3.rope.freq_base": None}  # with which no model is read
    found = leading_facts(move_to_gguf(folder, changes=changes) / "model.gguf")

    assert found["model_type"] == "qwen3"
    assert found["hidden_size"] == config["hidden_size"]
    move_to_gguf(build("qwen3_128", folder), changes={"general.architecture": "bert"})
    assert leading_facts(folder / "model.gguf")["model_type"] == "bert"
    (folder / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="ends too soon"):
        leading_facts(folder / "model.gguf")


def test_hostile_heads_are_refused_before_anything_is_made_of_them(tmp_path: Path) -> None:
    file = move_to_gguf(build("qwen3_128", tmp_path / "model")) / "model.gguf"
    whole, many, key = file.read_bytes(), struct.pack("<Q", 1 << 62), struct.pack("<Q", 1) + b"k"
    begin = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    data = min(tensor.begin for tensor in read_gguf(file).tensors)
    heads = [whole[:end] for end in (*range(0, data, 97), len(whole) - 64)]
    heads += [b"GGUF" + struct.pack("<IQQ", *counts) for counts in ((3, 1 << 62, 1), (3, 1, 1 << 62), (1 << 24, 1, 1))]
    heads += [begin + many + b"k", begin + key + struct.pack("<IQ", 8, MAX_HEAD_BYTES) + bytes(MAX_HEAD_BYTES)]
    heads += [begin + key + struct.pack("<IIQ", 9, kind, n) for kind in (0, 8, 9, 12, 99) for n in (3_000_000, 1 << 62)]
    table = whole.index(b"token_embd.weight") + len(b"token_embd.weight")
    heads += [whole[: table + 4] + many + many + whole[table + 20 :], whole[:table] + b"\xff" * 4 + whole[table + 4 :]]
    heads += [whole.replace(b"token_embd", b"token_\xff\xffbd"), whole.replace(b"ffn_up", b"ffn_xx")]

    for head in heads:
        file.write_bytes(head)
        with pytest.raises(ModelLoadFailed, match=r"model\.gguf cannot be read as GGUF"):
            read_gguf(file)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ModelLoadFailed, match="is a FIFO, not a file"):
        read_gguf(file)


def test_weights_whose_head_announces_more_than_the_file_has_count_by_its_size(tmp_path: Path) -> None:
    model = build("bert", tmp_path / "model")
    tensor = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
    head = json.dumps({"a": tensor, "b": tensor}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"\0" * 4000)

    sizes = weight_sizes(read_layout(model))

    assert sizes.parameters == sizes.file_bytes // 4


def test_more_tensors_than_are_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = read_layout(build("bert", tmp_path / "model"))
    monkeypatch.setattr(gguf_head, "MAX_TENSORS", 3)
    with pytest.raises(ModelLoadFailed, match="the files of weights have more than 3 tensors"):
        weight_sizes(layout)
