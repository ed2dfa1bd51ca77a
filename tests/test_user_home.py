"""Users without an entry in the system's list, as in containers: a daemon serves, and `~` is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from teimgr.errors import InvalidConfig
from teimgr.files import ensure_home, expanded
from tests.support.daemon_process import DaemonProcess

# Imported by every Python process of the daemon at its start.
_NO_ENTRY = """
import pwd

def getpwuid(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")

pwd.getpwuid = getpwuid
"""


class HomelessDaemon(DaemonProcess):
    """As `docker run --user 12345` without HOME."""

    def _launch(self, environ: object) -> None:
        site = self.folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(_NO_ENTRY)
        kept = {name: value for name, value in os.environ.items() if name not in ("HOME", "LOGNAME", "USER")}
        self.within = ("env", "-i", *(f"{name}={value}" for name, value in kept.items() if "\n" not in value))
        self.within += (f"PYTHONPATH={site}", "HF_HUB_OFFLINE=1")
        super()._launch(None)


def test_a_daemon_without_a_home_directory_serves() -> None:
    with HomelessDaemon() as daemon, daemon.client() as client:
        client.create("minilm", "sentence-transformers/all-MiniLM-L6-v2")
        for model in ("~/models/x", "~nobody-of-this-name/x"):
            with pytest.raises(InvalidConfig, match=f"no such directory: {model}"):
                client.create("other", model)
        client.wait_until_running("minilm", deadline_s=90)
        assert client.embed("text", instance="minilm").shape == (1, 384)


def test_a_tilde_without_a_home_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfig, match="no home directory for `~nobody-of-this-name`"):
        expanded("~nobody-of-this-name/key")
    monkeypatch.setenv("HOME", "/somewhere")
    assert expanded("~/key") == Path("/somewhere/key")


def test_home_is_set_where_nothing_else_says_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "")  # which are restored after the test

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert ensure_home(tmp_path)
    assert expanded("~") == tmp_path
    assert os.environ["LOGNAME"] == str(os.getuid())
    assert not ensure_home(tmp_path / "other")
