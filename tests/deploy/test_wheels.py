"""Wheels built from a copy of the checkout: with the compiled libraries, and without a compiler without them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tests.support.daemon_process import MINILM, DaemonProcess

ROOT = Path(__file__).parents[2]
LIBRARIES = ("teimgr/engine/_native.", "teimgr/cluster/_listen_address.")
BUILD = "import setuptools.build_meta; print(setuptools.build_meta.build_wheel('dist'))"  # as pip does
# Of all-MiniLM-L6-v2 for "test" at 128 dimensions, as published with text-embeddings-inference.
PUBLISHED = [0.020964134, 0.04565805, -0.066505864, 0.10739273, -0.013054413, -0.07467599, 0.13989426, 0.06780755]


def built(folder: Path, **environ: str) -> tuple[Path, str]:
    """A wheel of a copy of the checkout without compiled files, and what its build has said."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    compiled = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=compiled)
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        cwd=folder,
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel, done.stdout


def unpack(wheel: Path, folder: Path) -> None:
    """Its files with the times of the checkout's, and what Python has compiled of these, to be compiled no more."""
    zipfile.ZipFile(wheel).extractall(folder)
    for path in folder.rglob("*.py"):
        shutil.copystat(ROOT / "src" / path.relative_to(folder), path)
    for compiled in (ROOT / "src" / "teimgr").rglob("*.pyc"):
        target = folder / compiled.relative_to(ROOT / "src")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(compiled, target)


def libraries(wheel: Path) -> list[str]:
    return sorted(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".so", ".pyd", ".dylib")))


@pytest.fixture(scope="module")
def without_compiler(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return built(tmp_path_factory.mktemp("without"), CC="/bin/false")


def test_a_wheel_has_the_compiled_libraries(tmp_path: Path) -> None:
    """By a compiler that writes empty files: the installation that runs this suite has compiled the sources."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" != -o ] || : > "$2"; shift; done\n')
    compiler.chmod(0o755)
    wheel, _ = built(tmp_path, CC=str(compiler))

    found = libraries(wheel)
    assert len(found) == len(LIBRARIES)
    assert all(any(name.startswith(library) for name in found) for library in LIBRARIES)


def test_a_build_without_a_compiler_warns_and_makes_a_wheel_without_them(without_compiler: tuple[Path, str]) -> None:
    wheel, output = without_compiler

    assert libraries(wheel) == []
    assert "teimgr/engine/native_library.py" in zipfile.ZipFile(wheel).namelist()
    for module in ("teimgr.engine._native", "teimgr.cluster._listen_address"):
        assert f'warning: build_ext: building extension "{module}" failed' in output


@pytest.mark.slow
def test_a_daemon_of_that_wheel_serves_by_torchs_operators_and_says_so(
    without_compiler: tuple[Path, str], tmp_path: Path
) -> None:
    unpack(without_compiler[0], tmp_path)
    daemon = DaemonProcess()
    try:
        daemon.start({"PYTHONPATH": str(tmp_path), "TEIMGR_NATIVE": ""})
        with daemon.client() as client:
            client.create("m", MINILM, dtype="float32")
            client.wait_until_running("m", deadline_s=60)
            url = f"http://127.0.0.1:{client.get('m').port}"
            vectors = client.embed("test", instance="m")
        with urllib.request.urlopen(f"{url}/info", timeout=30) as reply:
            info = json.loads(reply.read())
    finally:
        daemon.close()

    assert (info["forward"], info["attention"], info["batching"]) == ("library", "by-run", "packed")
    assert info["fidelity"]["min_cosine"] > 0.99999
    first = np.asarray(vectors)[0, :128]
    np.testing.assert_allclose(first[:8] / np.linalg.norm(first), PUBLISHED, atol=2e-3)


def test_every_pattern_of_the_packages_data_has_files() -> None:
    """A pattern without files is no error for setuptools: what it named would be missing in an installed package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["teimgr"]

    assert [pattern for pattern in patterns if not any((ROOT / "src" / "teimgr").glob(pattern))] == []
