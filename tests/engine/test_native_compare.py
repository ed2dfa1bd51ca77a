"""The kernels of the installed C library beside plain loops in C; `dev.py arm` does the same for 64-bit Arm."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.engine.native.arm import compared_with
from tests.support.native import LIBRARY, needs_native_library

from teimgr.engine.native_library import LEVELS

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


@needs_native_library
@pytest.mark.skipif(COMPILER is None or "LD_PRELOAD" in os.environ, reason="no C compiler, or another runtime")
def test_kernels_of_every_instruction_set_agree_with_plain_loops(tmp_path: Path) -> None:
    assert COMPILER is not None
    assert LIBRARY is not None
    library = Path(LIBRARY.path)
    program = compared_with(library, tmp_path / "compare", COMPILER)
    environ = os.environ | {"LD_LIBRARY_PATH": str(library.parent)}

    done = subprocess.run(
        [program, str(LIBRARY.level)], env=environ, capture_output=True, text=True, timeout=100, check=False
    )

    assert done.returncode == 0, done.stdout
    for level in range(1, LIBRARY.level + 1):
        assert f"linear, level {level}, float32" in done.stdout, LEVELS[level]
