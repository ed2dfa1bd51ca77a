"""docs/mtls.md and docs/api-keys.md do what they say: their blocks run, in order, on a real daemon."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(bash|python|toml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LIMIT_S = 60

pytestmark = pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("curl")), reason="the commands are openssl and curl"
)


def test_the_commands_of_mtls(tmp_path: Path) -> None:
    blocks = blocks_of("mtls.md")
    at = next(index for index, (language, _) in enumerate(blocks) if language == "toml")
    for language, code in blocks[:at]:
        run(language, code, tmp_path)
    with daemon(blocks[at][1], tmp_path) as teimgr:
        answers = [run(language, code, tmp_path, teimgr) for language, code in blocks[at + 1 :]]
    assert answers[0] == "[]"
    assert "tei_multiplexer.v1.TeiMultiplexer" in answers[1]
    assert '"code":"UNAUTHENTICATED"' in answers[2]
    assert '"status":"healthy"' in answers[2]


def test_the_commands_of_api_keys(tmp_path: Path) -> None:
    blocks = blocks_of("api-keys.md")
    at = next(index for index, (_, code) in enumerate(blocks) if code.startswith("KEY="))
    for language, code in blocks[:at]:
        if language != "toml":
            run(language, code, tmp_path)
    shown = next(code for language, code in blocks if language == "toml")
    told = shown.partition("# Here")[0] + "".join(
        (tmp_path / f"{name}.toml").read_text() for name in ("operator", "search")
    )
    assert without_hashes(told) == without_hashes(shown)
    with daemon(told, tmp_path) as teimgr:
        answers = [run(language, code, tmp_path, teimgr) for language, code in blocks[at:]]
        log = (teimgr.folder / "daemon.log").read_text() + (teimgr.folder / "logs" / "_mux-0.log").read_text()
    assert answers[0] == "[][]"
    assert "tei_multiplexer.v1.TeiMultiplexer" in answers[1]
    assert re.findall("UNAUTHENTICATED|invalid_api_key|FORBIDDEN", answers[2]) == [
        "UNAUTHENTICATED",
        "invalid_api_key",
        "FORBIDDEN",
    ]
    keys = re.findall("teimgr_[A-Za-z0-9_-]{20,}", told)
    assert len(keys) == 2
    assert not any(key in log for key in keys)


def test_a_daemon_with_a_bad_certificate_says_so_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "certs").mkdir()
    for name in ("server.pem", "server.key"):
        (tmp_path / "certs" / name).write_text("nothing")
    teimgr = daemon(next(code for language, code in blocks_of("api-keys.md") if language == "toml"), tmp_path)
    teimgr.settings["auth"]["api_keys"] = [{"name": "a", "key": "k" * 20, "rights": ["read"]}]
    try:
        with pytest.raises(AssertionError, match=r"server\.key: not a PEM file of a certificate or key"):
            teimgr.start()
        assert teimgr.process is not None
        assert teimgr.process.wait() == 1
        assert "Traceback" not in teimgr.log()
    finally:
        teimgr.close()


def blocks_of(name: str) -> list[tuple[str, str]]:
    found = BLOCK.findall((DOCS / name).read_text())
    assert found
    return found


def daemon(config: str, folder: Path) -> DaemonProcess:
    """A daemon with this configuration, whose paths are taken from `folder`."""
    auth = tomllib.loads(config.replace('"certs/', f'"{folder}/certs/'))["auth"]
    return WarmDaemonProcess(auth=auth)


def without_hashes(config: str) -> dict[str, Any]:
    auth: dict[str, Any] = tomllib.loads(config)["auth"]
    for key in auth["api_keys"]:
        del key["key_sha256"]
    return auth


def run(language: str, code: str, folder: Path, teimgr: DaemonProcess | None = None) -> str:
    """The output of one block in `folder`, with the daemon's ports in the place of the usual ones."""
    if teimgr is not None:
        code = code.replace(":9000", f":{teimgr.api_port}").replace(":9001", f":{teimgr.grpc_port}")
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-euo", "pipefail", "-c", code]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ | {"PATH": path}
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return done.stdout
