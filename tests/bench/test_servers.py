"""`bench servers` run small: a real daemon beside small servers of the same static model, over real sockets."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from bench import peer_servers, report, servers, weights
from bench.peer_servers import ARROW, BASE64, FLOAT, MUX, ONE
from tests.bench import openai_server

_ROOT = Path(__file__).resolve().parents[2]
_RUN = """
import sys
from pathlib import Path
from bench import __main__, report
report.RESULTS = Path(sys.argv[1])
sys.exit(__main__._run("servers", sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weights.random_static(tmp_path_factory.mktemp("models") / "static", weights.minilm(), width=32)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server as a program that finds its libraries without a variable of the environment."""
    file = tmp_path_factory.mktemp("programs") / "server"
    file.write_text(f"#!{sys.executable}\n{Path(openai_server.__file__).read_text()}")
    file.chmod(0o755)
    return file


@pytest.mark.long
def test_peers_are_compared_where_they_start_and_answer(
    model: Path, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    command = argparse.ArgumentParser()
    servers.arguments(command)
    peers = ["--infinity", str(program), "--vllm", str(program), "--tei", str(tmp_path / "none")]
    small = ["--rounds", "2", "--seconds", "0.2", "--bulk-seconds", "0.2", "--callers", "1", "8"]
    others = ["--vllm-arguments=--no-base64 --turned", "--model", str(model)]

    assert servers.run(command.parse_args([*peers, *small, *others])) == 0

    (file,) = tmp_path.glob("servers-20*.json")
    document = json.loads(file.read_text())
    rows = {(row["load"], row["callers"], row["peer"]): row for row in document["rows"]}
    assert set(rows) == {
        *((load, callers, peer) for load, callers in ((ONE, 1), (ONE, 8), (FLOAT, 8)) for peer in ("infinity", "vllm")),
        (BASE64, 8, "infinity"),
        (f"{ARROW} ÷ {BASE64}", 8, "infinity"),
        (f"{ARROW} ÷ {FLOAT}", 8, "vllm"),
    }
    for row in rows.values():
        assert len(row["own"]) == len(row["theirs"]) == 2
        assert all(each["calls"] == each["all_calls"] >= row["callers"] for each in (*row["own"], *row["theirs"]))
        assert all(each["server_cpu_s"] > 0 for each in (*row["own"], *row["theirs"]))
        assert row["least"] <= row["times"] <= row["most"]
        assert (row["lowest_cosine"] > 0.9999) is (row["peer"] == "infinity")
    assert "no bfloat16 here" in document["facts"]["infinity, bfloat16 did not start"]
    assert "No such file" in document["facts"]["tei did not start"]
    assert not [each for each in psutil.Process().children(recursive=True) if str(program) in each.cmdline()]


@pytest.mark.long
def test_an_interrupt_ends_every_server_and_keeps_what_was_measured(model: Path, program: Path, tmp_path: Path) -> None:
    options = ["--infinity", str(program), "--model", str(model), "--callers", "1", "8", "--seconds", "1"]
    command = [sys.executable, "-c", _RUN, str(tmp_path), *options]
    with subprocess.Popen(command, cwd=_ROOT, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if f"infinity, {ONE}, 1 callers" in line:
                break
        family = psutil.Process(process.pid).children(recursive=True)
        commands = [each.cmdline() for each in family]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)

    assert process.returncode == 130, "".join(seen)
    assert any(str(program) in each for each in commands)
    assert psutil.wait_procs(family, timeout=30)[1] == []
    (file,) = tmp_path.glob("*.json")
    assert file.name.startswith("partial-servers-")
    assert [(row["load"], row["callers"]) for row in json.loads(file.read_text())["rows"]] == [(ONE, 1)]


@pytest.mark.long
def test_tei_manager_is_measured_through_its_multiplexer_alone(model: Path, tmp_path: Path) -> None:
    """By a stand-in that reads its variables and has its routes: this daemon."""
    manager = tmp_path / "tei-manager"
    manager.write_text(f'#!/bin/sh\nexec {sys.executable} -m teimgr serve "$@"\n')
    manager.chmod(0o755)

    with peer_servers.launched("tei-manager", manager, (), model, tmp_path, None) as ready:
        server = ready(["one text", "another"], 100)
        answered = server.cpu_s()

    assert server.tasks.keys() == {MUX, ARROW}
    assert server.vectors.shape == (2, 32)
    assert answered > 0
    assert not psutil.pid_exists(server.process.pid)


def test_without_a_peer_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    command = argparse.ArgumentParser()
    servers.arguments(command)

    assert servers.run(command.parse_args([])) == 2
    assert list(tmp_path.iterdir()) == []


def test_every_program_has_a_peer() -> None:
    assert {peer.option for peer in peer_servers.PEERS.values()} == peer_servers.PROGRAMS.keys()
