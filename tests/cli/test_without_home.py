"""Every command under a user id without an entry and without HOME, as containers have: an answer in words."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest
from tests.support.daemon_process import free_ports

from teimgr.cli.main import COMMANDS, main

# What a command cannot do without; none of them reaches a daemon.
ARGUMENTS = {
    "create": ["a", "somebody/model"],
    "edit": ["a", "--tag", "b"],
    "rm": ["a", "--yes"],
    "start": ["a"],
    "stop": ["a"],
    "restart": ["a"],
    "wait": ["a"],
    "show": ["a"],
    "logs": ["a"],
    "embed": ["text", "-i", "a"],
    "rerank": ["query", "text", "-i", "a"],
    "classify": ["text", "-i", "a"],
    "similarity": ["text", "other", "-i", "a"],
    "explain": ["instance_not_found"],
    "models pull": ["somebody/model"],
    "models check": ["somebody/model"],
    "models rm": ["somebody/model"],
    "cluster remove": ["host"],
    "node join": ["tmt1.x"],
    "import": ["~/compose.yaml"],
    "config check": ["~/teimgr.toml"],
    "config show": ["~/teimgr.toml"],
    "key new": ["me"],
    "context add": ["here", "http://127.0.0.1:1"],
    "context use": ["here"],
    "context rm": ["here"],
}
# They begin what goes on: a daemon (`tests/test_user_home.py` has it), or one with a model.
OF_OTHER_TESTS = {"serve", "up"}


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - OF_OTHER_TESTS))
def test_a_command_without_a_home_ends_in_words(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for variable in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(variable, "x")  # so that it is restored
        monkeypatch.delenv(variable)
    monkeypatch.setenv("TEIMGR_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # `context add` writes
    monkeypatch.chdir(tmp_path)

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)

    status = main([*name.split(), *ARGUMENTS.get(name, [])])

    output = "".join(capfd.readouterr())
    assert output.strip(), "it says nothing"
    assert "Traceback" not in output
    assert status in (0, *range(1, 10)), output
    assert "no such option" not in output.lower(), "the test's own arguments are wrong"
