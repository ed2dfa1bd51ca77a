"""Secrets show up nowhere: markers in every kind of key, then a look at all that the daemon writes and answers."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.daemon_process import DaemonProcess
from tests.support.models import build
from tests.support.polling import until

from teimgr.errors import TeimgrError
from teimgr.spec import State

# Without a word in common, so that a hit tells which one it was.
OPERATOR, INSTANCE = "quagga-of-the-operator", "okapi-of-the-instance"
WEBHOOK, HUB = "ibex-of-the-webhook", "gnu-of-the-model-hub"
HIDDEN = (OPERATOR, WEBHOOK, HUB)
READ = (
    "instances/tiny/events",
    "instances",
    "instances/tiny",
    "config",
    "metrics",
    "events",
    "health",
    "health/all",
    "ready",
    "models",
)
READ += ("instances/tiny/logs", "templates", "gpus", "openapi.json", "v1/models")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """With an API key, a webhook's secret, a hub token, and an instance that has a key of its own."""
    model = tmp_path_factory.mktemp("models")
    build("bert", model / "tiny")
    keys = [{"name": "operator", "key": OPERATOR, "rights": ["admin", "read", "inference"]}]
    daemon = DaemonProcess(
        auth={"enabled": True, "providers": ["api_keys"], "api_keys": keys},
        webhooks=[{"url": "http://127.0.0.1:9/hook", "secret": WEBHOOK, "max_attempts": 1}],
        log_level="debug",
    )
    daemon.start({"HF_TOKEN": HUB})
    try:
        with daemon.client(api_key=OPERATOR) as client:
            client.create("tiny", str(model / "tiny"), extra_args=["--api-key", INSTANCE])
            client.wait_until_running("tiny", deadline_s=60)
            client.embed("with a key of the operator", instance="tiny")
            with pytest.raises(TeimgrError):
                client.create("tiny", str(model / "tiny"), extra_args=["--api-key", INSTANCE])
            with pytest.raises(TeimgrError):
                client.create("bad", str(model / "tiny"), extra_args=["--api-key", INSTANCE, "--pooling", "none"])
            first = client.get("tiny").pid
            assert first is not None
            os.kill(first, signal.SIGABRT)  # a crash, with its report
            until(
                lambda: client.get("tiny").status is State.RUNNING and client.get("tiny").pid != first, "a new worker"
            )
        yield daemon
    finally:
        daemon.close()


def get(daemon: DaemonProcess, path: str) -> str:
    request = urllib.request.Request(f"{daemon.api}/{path}", headers={"authorization": f"Bearer {OPERATOR}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()


@pytest.mark.parametrize("path", READ)
def test_no_answer_has_a_secret(daemon: DaemonProcess, path: str) -> None:
    text = get(daemon, path)

    assert text
    assert not [marker for marker in (*HIDDEN, INSTANCE) if marker in text]


def test_no_log_has_a_secret(daemon: DaemonProcess) -> None:
    logs = [path for path in daemon.folder.rglob("*.log*") if path.is_file()]

    assert {"daemon.log", "tiny.log"} <= {path.name for path in logs}
    assert not [path for path in logs if any(marker in path.read_text() for marker in (*HIDDEN, INSTANCE))]


def test_no_crash_report_has_a_secret(daemon: DaemonProcess) -> None:
    (report,) = (daemon.folder / "logs" / "crashes").iterdir()
    text = report.read_text()

    assert "SIGABRT" in text
    assert not [marker for marker in (*HIDDEN, INSTANCE) if marker in text]


def test_no_command_line_has_a_secret(daemon: DaemonProcess) -> None:
    processes = daemon.processes()

    assert len(processes) >= 3
    assert not [each for each in processes if any(m in " ".join(each.cmdline()) for m in (*HIDDEN, INSTANCE))]


def test_only_files_of_their_owner_have_the_key_of_an_instance(daemon: DaemonProcess) -> None:
    """It is wanted state, in tei-manager's format, and part of what a worker is started with."""
    kept: list[Path] = []
    for path in daemon.folder.rglob("*"):
        if path.is_file() and path.name != "teimgr.toml":
            content = path.read_text(errors="replace")
            assert not any(marker in content for marker in HIDDEN), path
            kept += [path] if INSTANCE in content else []

    assert daemon.folder / "state.toml" in kept
    for path in kept:
        assert path.stat().st_mode & 0o077 == 0 or (path.parent.stat().st_mode & 0o077) == 0, path
        assert path.parent.name == "run" or path.name.startswith("state.toml"), path


def test_the_key_of_an_instance_is_shown_redacted(daemon: DaemonProcess) -> None:
    shown = json.loads(get(daemon, "instances/tiny"))

    assert shown["extra_args"][0] == "--api-key"
    assert shown["extra_args"][1] != INSTANCE
