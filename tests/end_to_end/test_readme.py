"""The README's commands do what it says: its fenced blocks of `bash` and `python` run, in order, on a real daemon."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LIMIT_S = 120


def test_the_commands_of_the_readme_work(tmp_path: Path) -> None:
    text = README.read_text().replace("/tmp/", f"{tmp_path}/")
    with WarmDaemonProcess() as daemon:
        outputs = [run(language, code, daemon) for language, code in BLOCK.findall(text)]

    text = "\n".join(outputs)
    assert '"status":"running"' in text
    assert "(1, 384) (5000, 384) {}" in text
    assert '"failed": 0' in text
    assert "tei_manager_instances_count" in text


def test_the_two_commands_are_those_of_the_gate() -> None:
    gate = (README.parent / ".ci" / "run").read_text()

    for verb in ("run", "test"):
        assert f"python3.11 dev.py {verb}\n" in README.read_text()
        assert f'"$python" dev.py {verb}' in gate


def run(language: str, code: str, daemon: DaemonProcess) -> str:
    """The output of one block, with this daemon's ports in the place of the usual ones."""
    ports = {"9000": daemon.api_port, "9001": daemon.grpc_port, "8080": daemon.settings["instance_port_start"]}
    code = re.sub(r"\b(9000|9001|8080)\b", lambda match: str(ports[match[0]]), code)
    code = code.replace(".venv/bin/", shlex.quote(str(Path(sys.executable).parent)) + "/")
    command = (
        [sys.executable, "-W", "error", "-c", code]
        if language == "python"
        else ["bash", "-euo", "pipefail", "-c", code]
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return done.stdout
