"""`teimgr serve` on a terminal of its own."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from teimgr.cli.quickstart import free_port
from teimgr.errors import Code
from teimgr.observability.troubleshooting import ADVICE, meaning, repetition


def test_serve_names_a_new_folder_logs_readably_and_ends_with_its_terminal(tmp_path: Path) -> None:
    ports = ["--port", str(free_port(0)), "--grpc-port", str(free_port(0))]
    command = [sys.executable, "-m", "teimgr", "serve", *ports, "--state-dir", str(tmp_path / "new")]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, command)
    shown = b""
    while b"daemon ready" not in shown:
        shown += os.read(terminal, 65536)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)

    assert os.WIFEXITED(status), status
    assert f"new state folder {tmp_path / 'new'}" in shown.decode()
    assert b'{"ts"' not in shown


def explain(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "teimgr", "explain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_code_has_causes_and_remedies() -> None:
    assert set(ADVICE) == set(Code)
    for code, advice in ADVICE.items():
        assert advice.causes, code
        assert advice.remedies, code
        assert all(sentence.endswith(".") for sentence in (*advice.causes, *advice.remedies)), code
        assert meaning(code), code
        assert repetition(code), code


def test_a_code_is_explained_whatever_its_case() -> None:
    done = explain("overloaded")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("OVERLOADED: A bounded queue is full")
    assert "Remedies:" in done.stdout
    assert json.loads(explain("OVERLOADED", "--json").stdout)["causes"] == list(ADVICE[Code.OVERLOADED].causes)


def test_without_a_code_all_are_listed() -> None:
    rows = [line.split("\t")[0] for line in explain().stdout.splitlines()]
    assert rows == [code.name for code in Code]


@pytest.mark.parametrize("word", ["OVERLOADE", "nothing-like-it"])
def test_an_unknown_code_is_a_wrong_command_line(word: str) -> None:
    done = explain(word)
    assert done.returncode == 2
    assert f"CODE: unknown '{word.upper()}'" in done.stderr
