"""Ray's process over the ends of who keeps it: adopted by the next one, unless that one has another head."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.polling import eventually

from teimgr.cluster.ray_process import RayProcess
from teimgr.control.launch.process_handle import look_up

COMMAND = (sys.executable, "-c", "import time; time.sleep(600)")  # in the place of `ray start --block`
HEAD = "10.0.0.1:6379"


def keeper(folder: Path, head: str = HEAD) -> RayProcess:
    return RayProcess(COMMAND, os.environ, folder, folder, folder / "ray.log", head)


@pytest.fixture
async def first(tmp_path: Path) -> AsyncIterator[RayProcess]:
    """That of a process that was killed: nobody watches it."""
    made = keeper(tmp_path)
    await made.start()
    await made.release()
    yield made
    await made.stop()


async def test_the_next_one_adopts_it(first: RayProcess, tmp_path: Path) -> None:
    after = keeper(tmp_path)
    await after.start()

    assert after.pid == first.pid
    await after.stop()
    assert first.pid is not None
    assert not look_up(first.pid)


async def test_one_of_another_head_is_ended_and_replaced(first: RayProcess, tmp_path: Path) -> None:
    after = keeper(tmp_path, "10.0.0.9:6379")
    await after.start()

    assert first.pid is not None
    assert not look_up(first.pid)
    assert after.pid is not None
    assert look_up(after.pid)
    assert json.loads((tmp_path / "ray.run").read_text())["head"] == "10.0.0.9:6379"
    await after.stop()


async def test_a_run_file_of_an_earlier_version_without_a_head_is_adopted(first: RayProcess, tmp_path: Path) -> None:
    run_file = tmp_path / "ray.run"
    facts = json.loads(run_file.read_text())
    del facts["head"]
    run_file.write_text(json.dumps(facts))

    after = keeper(tmp_path)
    await after.start()

    assert after.pid == first.pid
    await after.stop()


async def test_it_is_started_again_when_it_ends(tmp_path: Path) -> None:
    ray = keeper(tmp_path)
    await ray.start()
    before = ray.pid
    assert before is not None

    os.kill(before, 9)

    await eventually(lambda: ray.pid != before and look_up(ray.pid or 0))
    await ray.stop()
