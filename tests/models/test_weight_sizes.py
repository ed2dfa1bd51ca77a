"""What the heads of a model's files say of its size, whatever they and its configuration say."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from teimgr.errors import ModelLoadFailed
from teimgr.models import weight_sizes as weight_sizes_module
from teimgr.models.reading import read_layout
from teimgr.models.weight_sizes import weight_sizes
from tests.support.models import build


def test_weights_whose_head_announces_more_than_the_file_has_count_by_its_size(tmp_path: Path) -> None:
    model = build("bert", tmp_path / "model")
    tensor = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
    head = json.dumps({"a": tensor, "b": tensor}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"\0" * 4000)

    sizes = weight_sizes(read_layout(model))

    assert sizes.parameters == sizes.file_bytes // 4


def test_more_tensors_than_are_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = read_layout(build("bert", tmp_path / "model"))
    monkeypatch.setattr(weight_sizes_module, "MAX_TENSORS", 3)
    with pytest.raises(ModelLoadFailed, match="the files of weights have more than 3 tensors"):
        weight_sizes(layout)
