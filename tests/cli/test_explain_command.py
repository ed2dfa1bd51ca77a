"""`teimgr explain`, and that each error code has advice."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from teimgr.errors import Code
from teimgr.observability.troubleshooting import ADVICE, meaning, repetition


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
