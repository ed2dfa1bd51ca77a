"""The pack for a bare machine with a card: MiniLM in half precision, the native library, the daemon's wheels.

All of it travels together with the checkout, 64 MiB at most. Wheels are taken while they fit: first what the card's
image lacks, the smallest first, then what it has in another version, the smallest first; pyarrow is the last, and
larger than all the others together. `pack.json` names what was left out.
"""

from __future__ import annotations

import gzip
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PYTHON = "3.12"
"""The version of Python on the lent cards' image."""
MAX_BYTES = 60_000_000
"""Of a pack; less where the checkout leaves less of what travels."""
_TRAVELS_BYTES = (64 << 20) - (256 << 10)  # the limit, and what archives add
_TAR_BLOCK = 512
# What computes is the card's own: another torch would not fit, and the others fit that one.
_COMPUTES = frozenset({"torch", "transformers", "tokenizers", "safetensors", "numpy", "huggingface-hub"})
# In the image too, in versions of its own; not grpcio and protobuf, whose generated code refuses older ones.
# fmt: off
_IN_IMAGE = frozenset((
    "aiohappyeyeballs", "aiohttp", "aiosignal", "annotated-doc", "anyio", "attrs", "certifi", "click", "frozenlist",
    "h11", "idna", "iniconfig", "jinja2", "markdown-it-py", "markupsafe", "mdurl", "msgpack", "multidict",
    "nvidia-ml-py", "packaging", "pluggy", "prometheus-client", "propcache", "pyarrow", "pygments", "pytest",
    "pyyaml", "rich", "shellingham", "typer", "typing-extensions", "uvloop", "yarl",
))
# fmt: on
_FOR_TESTS = ("pytest-asyncio",)
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
# Not read by the engine; the pooler's weights neither.
_LEFT_OUT = ("*.bin", "*.onnx", "*.h5", "*.ot", "*.safetensors", "*.md", "data_config.json", "vocab.txt", ".*")
_NATIVE, _WEIGHTS = "native.so", "model.safetensors"
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


class Wheel(NamedTuple):
    """A file and the normalised name of its package."""

    package: str
    file: str
    size: int


def make(folder: Path, model: Path, python: str = PYTHON) -> dict[str, Any]:
    """Write the pack for another machine's `python` to `folder`; returns what pack.json says.

    Raises:
        RuntimeError: the model alone does not fit, or pip cannot download.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _write_half(model, folder / "minilm")
    has_native = _write_native(folder / _NATIVE)
    used, most = _size(folder), min(MAX_BYTES, _TRAVELS_BYTES - _tree_size())
    if used > most:
        raise RuntimeError(f"{used / 1e6:.1f} MB without wheels are more than the {most / 1e6:.1f} MB that travel")
    with tempfile.TemporaryDirectory() as fetched:
        _download(requirements(), python, Path(fetched))
        found = [Wheel(package_of(each.name), each.name, each.stat().st_size) for each in Path(fetched).iterdir()]
        taken, left_out = chosen(found, most - used)
        (folder / "wheels").mkdir()
        for wheel in taken:
            shutil.move(Path(fetched) / wheel.file, folder / "wheels" / wheel.file)
    said = {
        "python": python,
        "bytes": _size(folder),
        "most bytes": most,
        "native library": has_native,
        "wheels": {wheel.package: wheel.size for wheel in taken},
        "left out": {
            wheel.package: f"{wheel.size} bytes, {'the image has it' if wheel.package in _IN_IMAGE else 'NEEDED'}"
            for wheel in left_out
        },
    }
    (folder / "pack.json").write_text(json.dumps(said, indent=1) + "\n")
    return said


def requirements() -> list[str]:
    """What pyproject.toml says that the daemon needs, without what computes; and what the tests need beside pytest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [each for each in project["dependencies"] if package_of(each) not in _COMPUTES] + [*_FOR_TESTS]


def package_of(name: str) -> str:
    """The normalised name of the package in a requirement or the name of a wheel."""
    found = re.match(r"[^-]+" if name.endswith(".whl") else r"[\w.-]+", name)
    assert found is not None
    given = found[0]
    return re.sub(r"[-_.]+", "-", given).lower()


def chosen(wheels: Iterable[Wheel], room: int) -> tuple[list[Wheel], list[Wheel]]:
    """The wheels that fit in so many bytes, and those that do not, in the order of the module's description."""
    taken: list[Wheel] = []
    left_out: list[Wheel] = []
    for wheel in sorted(wheels, key=lambda each: (each.package in _IN_IMAGE, each.size)):
        fits = wheel.size <= room
        (taken if fits else left_out).append(wheel)
        room -= wheel.size if fits else 0
    return taken, left_out


def unpacked_model(pack: Path, target: Path) -> Path | None:
    """The carried model as the engine reads it, in `target`; None where there is none."""
    if not (packed := pack / "minilm" / f"{_WEIGHTS}.gz").exists():
        return None
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(pack / "minilm", target, ignore=shutil.ignore_patterns("*.gz"))
    with gzip.open(packed, "rb") as source, (target / _WEIGHTS).open("wb") as plain:
        shutil.copyfileobj(source, plain)
    return target


def install(pack: Path, target: Path) -> dict[str, Any]:
    """Install the wheels of a pack into `target`, a folder for PYTHONPATH, without a network; and the native library
    into the checkout, where it has none. Returns what was done.

    A folder and no virtual environment: the card's own interpreter is one already, and another one on top of it would
    see the packages of the system alone.

    Raises:
        RuntimeError: pip failed.
    """
    shutil.rmtree(target, ignore_errors=True)
    said: dict[str, Any] = {"python": platform.python_version(), "native library": _install_native(pack / _NATIVE)}
    if (pack / "pack.json").exists():
        said["left out"] = json.loads((pack / "pack.json").read_text())["left out"]
    wheels = sorted((pack / "wheels").glob("*.whl"))
    said["wheels"] = len(wheels)
    if wheels:
        where = ["--no-index", "--find-links", pack / "wheels", "--target", target]
        _call([*_PIP, "install", "-q", "--no-deps", "--no-compile", *where, *wheels])
    return said


def _write_half(model: Path, target: Path) -> None:
    """MiniLM with weights of half precision, compressed: some 34 MB.

    Matrices are rounded to eight significant bits, which compress better; what is measured is compared with these very
    weights.
    """
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, target, ignore=shutil.ignore_patterns(*_LEFT_OUT, "onnx", "openvino"))
    weights = load_file(model / _WEIGHTS)
    kept = {name: each.half().contiguous() for name, each in weights.items() if not name.startswith("pooler.")}
    for name in kept:
        if kept[name].ndim > 1:
            kept[name] = ((kept[name].view(torch.int16) + 4) & -8).view(torch.float16)
    save_file(kept, target / _WEIGHTS, metadata={"format": "pt"})
    with (target / _WEIGHTS).open("rb") as plain, gzip.open(target / f"{_WEIGHTS}.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    (target / _WEIGHTS).unlink()


def _write_native(target: Path) -> bool:
    """The compiled library of this checkout, without symbols; False where there is none. It needs no Python."""
    built = sorted((ROOT / "src" / "teimgr" / "engine").glob("_native*.so"))
    if not built:
        return False
    shutil.copy(built[0], target)
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-unneeded", target], check=True)
    return True


def _install_native(source: Path) -> str:
    folder = ROOT / "src" / "teimgr" / "engine"
    if any(folder.glob("_native*.so")):
        return "was there"
    if not source.exists():
        return "not carried"
    shutil.copy(source, folder / "_native.so")
    return "installed"


def _download(wanted: Sequence[str], python: str, target: Path) -> None:
    """Wheels of `wanted` and of what they need, but for what computes: nothing of it needs that."""
    platforms = [part for name in _PLATFORMS for part in ("--platform", f"{name}_x86_64")]
    of = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    _call([*_PIP, "download", "-q", *of, "--dest", target, *wanted])


def _call(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    print(done.stdout, done.stderr, flush=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise RuntimeError(f"pip ended with status {done.returncode}: {last}")


def _tree_size() -> int:
    """Bytes of the files that travel with every checkout; 0 where git cannot say."""
    try:
        command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    files = [ROOT / name for name in listed.split("\0") if name]
    return sum(_packed_size(file) for file in files if file.is_file())


def _size(folder: Path) -> int:
    return sum(_packed_size(file) for file in folder.rglob("*") if file.is_file())


def _packed_size(file: Path) -> int:
    """Bytes of a file in a tar archive: a header, and its content in blocks."""
    return _TAR_BLOCK + -(-file.stat().st_size // _TAR_BLOCK) * _TAR_BLOCK
