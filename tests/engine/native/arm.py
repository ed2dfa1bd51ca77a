"""The C library for 64-bit Arm: a wheel by a cross compiler, its kernels compared with plain loops under an emulator.

`python3.11 -m tests.engine.native.arm [FOLDER]` needs Debian's packages gcc-aarch64-linux-gnu and qemu-user, and
setuptools; the wheel is left in FOLDER. The emulator shows that results are right and that each processor gets its
instruction set; how fast they are it cannot show. Everything happens in a copy of the sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
COMPILER, EMULATOR, LIBRARIES = "aarch64-linux-gnu-gcc", "qemu-aarch64", "/usr/aarch64-linux-gnu"
PACKAGES = "gcc-aarch64-linux-gnu and qemu-user"
# A processor that the emulator knows, and the best level that the library has for it (library.h).
PROCESSORS = {"cortex-a72": 1, "neoverse-n1": 2, "max": 3}
BUILD = "import setuptools.build_meta; setuptools.build_meta.build_wheel('dist')"  # as pip does
LIMIT_S = 600


def main(arguments: list[str]) -> int:
    """Build and compare; 1 if a number is wrong."""
    if missing := [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]:
        print(f"{', '.join(missing)}: not found; Debian's packages are {PACKAGES}")
        return 1
    with tempfile.TemporaryDirectory() as place:
        wheel = built(Path(place))
        with zipfile.ZipFile(wheel) as content:
            libraries = [name for name in content.namelist() if name.endswith(".so")]
            content.extractall(place, libraries)
        print(f"{wheel.name}: {', '.join(libraries)}", flush=True)
        if arguments:
            shutil.copy(wheel, Path(arguments[0]))
        (native,) = (Path(place) / name for name in libraries if "_native" in name)
        program = compared_with(native, Path(place) / "compare", COMPILER)
        return max(status_on(program, native.parent, *each) for each in PROCESSORS.items())


def built(folder: Path) -> Path:
    """The wheel for 64-bit Arm of a copy of the checkout in `folder`."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    suffix = f".cpython-{sys.version_info.major}{sys.version_info.minor}-aarch64-linux-gnu.so"
    environ = os.environ | {
        "CC": COMPILER,
        "LDSHARED": f"{COMPILER} -shared",
        "CFLAGS": "",  # those of this machine's Python may be of its processor
        "SETUPTOOLS_EXT_SUFFIX": suffix,
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
    }
    subprocess.run(
        [sys.executable, "-c", BUILD], cwd=folder, env=environ, check=True, timeout=LIMIT_S, capture_output=True
    )
    (wheel,) = (folder / "dist").glob("*-linux_aarch64.whl")
    return wheel


def compared_with(library: Path, program: Path, compiler: str) -> Path:
    """`compare.c` as a program that calls this library."""
    sources = [ROOT / "tests" / "engine" / "native" / "compare.c", library]
    headers = ROOT / "src" / "teimgr" / "engine" / "native"
    command = [
        compiler,
        "-O1",
        "-std=gnu11",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{headers}",
        *sources,
        "-lm",
        "-o",
        program,
    ]
    subprocess.run([*map(str, command)], check=True, timeout=LIMIT_S)
    return program


def status_on(program: Path, libraries: Path, processor: str, level: int) -> int:
    """The status of the comparison on a processor that has `level`."""
    command = [
        EMULATOR,
        "-cpu",
        processor,
        "-L",
        LIBRARIES,
        "-E",
        f"LD_LIBRARY_PATH={libraries}",
        str(program),
        str(level),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
    for line in done.stdout.splitlines():
        print(f"{processor}: {line}", flush=True)
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
