"""The switch interval is short within blocks, and as before when the last of them ends."""

from __future__ import annotations

import sys

import pytest

from teimgr.wire.gil_turns import short_turns


def test_turns_are_short_until_the_last_block_ends() -> None:
    before = sys.getswitchinterval()
    with short_turns():
        with pytest.raises(KeyError), short_turns():
            raise KeyError
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before
