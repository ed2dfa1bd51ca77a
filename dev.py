#!/usr/bin/env python3
"""Set-up and the project's verbs, with the standard library alone.

    python3.11 dev.py run      make .venv, install, start a ready fleet of one real model
    python3.11 dev.py test     make .venv and .venv-clients, install, run the tests (-m long: those left out)
    python3.11 dev.py check    format, lint, types, import layers, freshness of generated code, figures of tests.house
    python3.11 dev.py fix      format and safe fixes
    python3.11 dev.py proto    regenerate src/teimgr/wire/pb
    python3.11 dev.py bench X  run the benchmark X; `bench guard` is that of the gate, `bench all` makes the report
    python3.11 dev.py gpu      all about a card in ten minutes (bench/card.py), with torch's own interpreter where this
                               is one; `gpu --carry DIR` packs what a machine without a network lacks
    python3.11 dev.py arm      the C library for 64-bit Arm: a wheel by a cross compiler, its kernels under an emulator
    python3.11 dev.py audit    bandit, pip-audit, and a bill of materials (sbom.json)
    python3.11 dev.py soak     1,000 random faults under load (python -m tests.faults); or `soak saturation`,
                               `soak overload`, `soak incident`, `soak fleet`, `soak hosts`, `soak cluster`,
                               `soak fuzz`, `soak fuzz --victim`
    python3.11 dev.py setup    make .venv and install, nothing else
    python3.11 dev.py clients  make .venv-clients and install, nothing else
    python3.11 dev.py docs     build the documents' site in build/site; `docs serve` shows it while it is edited

Arguments after the verb go to what it runs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
PYTHON = BIN / "python"
CLIENTS = ROOT / ".venv-clients"
SITE = ROOT / ".venv-docs"
PROTOS = (
    "tei/v1/tei.proto",
    "tei_multiplexer/v1/multiplexer.proto",
    "teimgr/v1/arrow.proto",
    "teimgr/v1/frames.proto",
)
SOAKS = {
    "saturation": "tests.faults.saturation",
    "overload": "tests.faults.overload",
    "incident": "tests.faults.incident",
    "fleet": "tests.faults.fleet",
    "hosts": "tests.faults.hosts",
    "cluster": "tests.faults.cluster",
    "fuzz": "tests.fuzz",
}
# A change of one of these is installed anew: what the project needs, and what is compiled.
INSTALLED_FROM = (
    ROOT / "pyproject.toml",
    *sorted((ROOT / "src" / "teimgr" / "engine" / "native").iterdir()),
    *sorted((ROOT / "src" / "teimgr" / "cluster" / "native").iterdir()),
)
RAY_LIMIT_S = 90
PYTHON_TREES = ("src", "tests", "bench", "docsite", "dev.py")


def main(argv: list[str]) -> int:
    """Carry out the verb; the exit status is that of what it ran."""
    verbs = {
        "run": run,
        "test": test,
        "check": check,
        "fix": fix,
        "proto": proto,
        "bench": bench,
        "gpu": gpu,
        "arm": arm,
        "audit": audit,
        "soak": soak,
        "setup": lambda _: install("test", "check"),
        "clients": lambda _: clients(),
        "docs": docs,
    }
    if len(argv) < 2 or argv[1] not in verbs:
        print(__doc__)
        return 2
    return verbs[argv[1]](argv[2:])


def run(arguments: list[str]) -> int:
    """A daemon with one ready instance of the real all-MiniLM-L6-v2."""
    return install("demo") or call(BIN / "teimgr", "up", *arguments)


def test(arguments: list[str]) -> int:
    """The suite but for what is marked `long`, or the part that the arguments name."""
    command = ["pytest", *arguments] if arguments else ["tests"]
    return install("test", "check") or ray() or clients() or call(PYTHON, "-m", *command)


def check(arguments: list[str]) -> int:
    """Format, lint, types, import layers, generated code, figures of the structure; the result is the worst status."""
    if status := install("test", "check"):
        return status
    steps = [
        (BIN / "ruff", "format", "--check", *PYTHON_TREES),
        (BIN / "ruff", "check", *PYTHON_TREES),
        (PYTHON, "-m", "mypy"),
        (BIN / "lint-imports",),
        (PYTHON, __file__, "proto", "--check"),
        (PYTHON, "-m", "tests.house", "--check"),
    ]
    running = [subprocess.Popen([str(part) for part in step], cwd=ROOT, stdout=subprocess.PIPE) for step in steps]
    statuses = []
    for process in running:  # all at once, their output in order
        output, _ = process.communicate()
        print(output.decode(), end="", flush=True)
        statuses.append(process.returncode)
    return max(statuses)


def fix(arguments: list[str]) -> int:
    """Format, and the fixes ruff calls safe."""
    return (
        install("test", "check")
        or call(BIN / "ruff", "check", "--fix", *PYTHON_TREES)
        or call(BIN / "ruff", "format", *PYTHON_TREES)
    )


def bench(arguments: list[str]) -> int:
    """One named scenario of bench/."""
    return install("test", "check") or call(PYTHON, "-m", "bench", *arguments)


def gpu(arguments: list[str]) -> int:
    """`bench card` with the interpreter of TEIMGR_PYTHON, or this one where it has torch, or that of .venv."""
    python = os.environ.get("TEIMGR_PYTHON")
    if python is None and importlib.util.find_spec("torch") is not None:
        python = sys.executable
    if python is None:
        if status := install("test", "check"):
            return status
        python = str(PYTHON)
    os.environ["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    return call(python, "-m", "bench", "card", *arguments)


def arm(arguments: list[str]) -> int:
    """The wheel for 64-bit Arm, left in the folder that the argument names, and its kernels under an emulator."""
    return install("test", "check") or call(PYTHON, "-m", "tests.engine.native.arm", *arguments)


def audit(arguments: list[str]) -> int:
    """Static security checks, known vulnerabilities of what is installed, and a bill of materials in sbom.json."""
    if status := install("test", "check", "audit"):
        return status
    return max(
        call(BIN / "bandit", "-q", "-c", "pyproject.toml", "-r", "src"),
        call(BIN / "pip-audit", "--local", "--skip-editable", *arguments),
        call(BIN / "cyclonedx-py", "environment", PYTHON, "--output-format", "JSON", "--output-file", "sbom.json"),
    )


def docs(arguments: list[str]) -> int:
    """The documents' site, warnings as errors, in an environment of its own; other commands of mkdocs by argument."""
    requirements = ROOT / "docsite" / "requirements.txt"
    command = arguments or ["build", "--strict", "--quiet"]
    os.environ["NO_MKDOCS_2_WARNING"] = "1"  # an advertisement in every output
    return environment(SITE, requirements, "what builds the documents") or call(SITE / "bin" / "mkdocs", *command)


def soak(arguments: list[str]) -> int:
    """Random faults under load, or the long run that the first argument names; the other arguments go to it."""
    module = SOAKS.get(arguments[0]) if arguments else None
    command = [module, *arguments[1:]] if module else ["tests.faults", *arguments]
    return install("test", "check") or call(PYTHON, "-m", *command)


def proto(arguments: list[str]) -> int:
    """Generate `src/teimgr/wire/pb`; with --check, only report whether it is stale."""
    target = ROOT / "src" / "teimgr" / "wire" / "pb"
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        outputs = [f"--python_out={fresh}", f"--pyi_out={fresh}", f"--grpc_python_out={fresh}"]
        if status := call(PYTHON, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", *outputs, *PROTOS):
            return status
        stale = False
        (fresh / "teimgr/v1/frames_pb2_grpc.py").unlink()  # it has no service
        for file in sorted(fresh.rglob("*_pb2*.py*")):
            text = relocate(file.read_text())
            kept = target / file.relative_to(fresh)
            if "--check" in arguments:
                stale |= not kept.exists() or kept.read_text() != text
                continue
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(text)
    if stale:
        print("src/teimgr/wire/pb is stale: run `just proto`")
    return int(stale)


def relocate(code: str) -> str:
    """Generated imports name the proto's folder; here that folder lies under teimgr.wire.pb."""
    return re.sub(
        r"^from (tei(?:_multiplexer|mgr)?)\.v1 import", r"from teimgr.wire.pb.\1.v1 import", code, flags=re.MULTILINE
    )


def install(*extras: str) -> int:
    """Make .venv and install the project with `extras`, unless that is already so."""
    stamp, project = VENV / f".installed-{'-'.join(extras)}", VENV / ".installed"
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in INSTALLED_FROM)).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return 0
    if sys.version_info < (3, 11):  # noqa: UP036  a newcomer may start this with an older interpreter
        print(f"teimgr needs Python 3.11 or newer; this is {sys.version.split()[0]}")
        return 1
    if not PYTHON.exists():
        venv.create(VENV, with_pip=True)
    print(f"Installing teimgr[{','.join(extras)}] into {VENV.name} …", flush=True)
    named = requirements(*extras)
    torch = next(each for each in named if each.startswith("torch=="))
    status = call(*pip_install(PYTHON), torch)  # pip may be set up to find a build for CPUs, which uv would not see
    status = status or add_packages(PYTHON, *named)
    if status == 0 and not (project.exists() and project.read_text() == wanted):
        status = call(*pip_install(PYTHON), "--no-deps", "--editable", ROOT)  # uv would not see that C has changed
    if status == 0:
        project.write_text(wanted)
        stamp.write_text(wanted)
    return status


def requirements(*extras: str) -> list[str]:
    """What the project needs, with what it needs for `extras`."""
    import tomllib  # not in Python 3.10, which is told above that it is too old

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = list(project["dependencies"])
    pending = [f"teimgr[{','.join(extras)}]"]
    for each in pending:
        if own := re.fullmatch(r"teimgr\[(.+)\]", each):
            pending += [inner for extra in own[1].split(",") for inner in project["optional-dependencies"][extra]]
        else:
            found.append(each)
    return found


def pip_install(python: Path) -> list[str | Path]:
    """`pip install`, which tells people its progress and logs its errors only.

    Most of what is installed is never imported: what is, is compiled when it is.
    """
    return [python, "-m", "pip", "install", *([] if sys.stdout.isatty() else ["-qq"]), "--no-compile"]


def add_packages(python: Path, *wanted: str | Path) -> int:
    """Install by uv, which takes a tenth of the processor time; by pip where that fails or has an index of its own."""
    listed = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False).stdout
    uv = python.with_name("uv")
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    if not re.search(r"[.:]index-url=", listed) and (uv.exists() or call(*pip_install(python), "uv") == 0):
        if call(uv, "pip", "install", *quiet, "--python", python, *wanted) == 0:
            return 0
        print("Once more, by pip …", flush=True)
    return call(*pip_install(python), *wanted)


def ray() -> int:
    """Install Ray, for the tests of several hosts, where it can be had in time; else they are skipped. Always 0."""
    wanted = re.search(r'"(ray==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert wanted is not None
    stamp = VENV / ".installed-ray"
    if stamp.exists() and stamp.read_text() == wanted[1]:
        return 0
    print(f"Installing {wanted[1]} …", flush=True)
    pip = (str(PYTHON), "-m", "pip", "--disable-pip-version-check")
    with tempfile.TemporaryDirectory() as folder:
        # Only the download has a limit: an installation that is cut off would leave half a package.
        options = ("-qq", "--no-deps", "--only-binary=ray", "--retries=1", f"--dest={folder}")
        try:
            done = subprocess.run((*pip, "download", *options, wanted[1]), cwd=ROOT, timeout=RAY_LIMIT_S, check=False)
            status = done.returncode or call(*pip, "install", "-qq", "--no-compile", *Path(folder).iterdir())
            problem = f"pip ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"the download took more than {RAY_LIMIT_S} s"
    if problem:
        print(f"not installed: {wanted[1]} ({problem}); the tests that need it are skipped", flush=True)
    else:
        stamp.write_text(wanted[1])
    return 0


def clients() -> int:
    """Make .venv-clients, where outside clients live whose pins exclude ours."""
    requirements = ROOT / "tests" / "outside_clients" / "requirements.txt"
    return environment(CLIENTS, requirements, "outside clients", "--no-deps")  # the file names everything


def environment(folder: Path, named: Path, what: str, *options: str) -> int:
    """Make an environment of what a requirements file names; nothing where it is of today."""
    stamp = folder / ".installed"
    wanted = hashlib.sha256(named.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return 0
    print(f"Installing {what} into {folder.name} …", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    status = add_packages(folder / "bin" / "python", *options, "--requirement", named)
    if status == 0:
        stamp.write_text(wanted)
    return status


def call(*command: str | Path) -> int:
    """Run a command from the checkout; an interrupt is the command's to answer."""
    # The tests start some hundred processes: without cached bytecode each would compile what it imports.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen([str(part) for part in command], cwd=ROOT, env=environ)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv))
