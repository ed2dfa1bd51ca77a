"""`teimgr up` ends with an embedding and three commands that work as they are printed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from teimgr.cli.quickstart import free_port

LIMIT_S = 90


@pytest.fixture(scope="module")
def greeting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, int]]:
    """What it prints until it says how to stop it, its folder and its port; stopped by an interrupt afterwards."""
    folder, port = tmp_path_factory.mktemp("q"), free_port(0)
    process = subprocess.Popen(
        [sys.executable, "-m", "teimgr", "up", "--port", str(port)],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "Ctrl-C" in line:
            break
    yield "".join(lines), folder, port
    process.send_signal(signal.SIGTERM)
    process.stdout.close()
    assert process.wait(LIMIT_S) == 0


def test_it_prints_its_address_and_an_embedding(greeting: tuple[str, Path, int]) -> None:
    assert f"REST http://127.0.0.1:{greeting[2]}, gRPC" in greeting[0]
    assert f"The page: http://127.0.0.1:{greeting[2]}/\n" in greeting[0]
    assert re.search(r"→ 384 values: \[-?0\.\d{6}, ", greeting[0])


def test_the_three_commands_work_as_they_are_printed(greeting: tuple[str, Path, int]) -> None:
    text, folder, _ = greeting
    commands = [line.strip() for line in text.splitlines() if line.startswith("  ") and "weights" not in line]
    assert len(commands) == 3
    commands[2] = commands[2].replace("--num-texts 2000", "--num-texts 100")

    outputs = [
        subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
        for command in commands
    ]

    assert [done.returncode for done in outputs] == [0, 0, 0], outputs
    assert outputs[0].stdout.startswith("minilm\trunning\t")
    assert outputs[1].stdout.count(",") == 383
    assert '"failed": 0' in outputs[2].stdout
    assert '"successful": 100' in outputs[2].stdout
