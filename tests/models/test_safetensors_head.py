"""The head of a safetensors file: sizes that no tensor has are refused before anything is calculated with them."""

from __future__ import annotations

import json
import re
import struct
import time
from pathlib import Path

import pytest

from teimgr.errors import ModelLoadFailed
from teimgr.models.safetensors_head import read_head


def file_of(folder: Path, shape: str, dtype: str = "F32", size: int = 64) -> Path:
    head = f'{{"embeddings":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{size}]}}}}'.encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(head)) + head + b"\0" * 64)
    return file


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (json.dumps([1 << 63]), "tensor embeddings has a size of 9,223,372,036,854,775,808"),
        (json.dumps([2**62] * 8), "tensor embeddings of 64 bytes has the shape"),
        (json.dumps([513]), "tensor embeddings of 64 bytes has the shape"),
        (json.dumps([1] * 400_000), "tensor embeddings has 400,000 dimensions"),
        ("[" + ",".join(["9" * 4300] * 3600) + "]", "has a number of 4,300 digits"),
        ("[" + "9" * 5000 + "]", "has a number of 5,000 digits"),
        (json.dumps([4, True]), "tensor embeddings"),
        (json.dumps([-16]), "tensor embeddings"),
    ],
    ids=lambda value: value[:20],
)
def test_a_shape_that_no_tensor_has_is_refused_by_name_in_little_time(tmp_path: Path, shape: str, message: str) -> None:
    file = file_of(tmp_path, shape)
    begun = time.thread_time()
    with pytest.raises(ModelLoadFailed, match=re.escape(message)):
        read_head(file)
    assert time.thread_time() - begun < 3  # squared in the sizes it was 11 s for 400,000, and hours for 3,600 numbers


def test_sizes_that_a_tensor_has_are_read(tmp_path: Path) -> None:
    assert read_head(file_of(tmp_path, "[2,1,4,2]"))[0].elements == 16
    assert read_head(file_of(tmp_path, "[]", size=4))[0].elements == 1
    assert read_head(file_of(tmp_path, "[0,9]", size=0))[0].elements == 0
    assert read_head(file_of(tmp_path, "[128]", "F4"))[0].elements == 128
