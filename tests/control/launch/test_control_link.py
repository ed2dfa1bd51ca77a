"""The control link of a worker: calls, errors, and another process on its socket."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from tests.support.fakes.worker import fake_id
from tests.support.fleet import LIMIT_S

from teimgr.control.launch.control_link import ControlLink, identify
from teimgr.control.launch.launcher import LocalLauncher
from teimgr.spec import WorkerSpec
from teimgr.wire.frames import Method


def spec(flags: str = "", name: str = "a", **values: object) -> WorkerSpec:
    return WorkerSpec(name=name, model_id=fake_id(flags), **values)  # type: ignore[arg-type]


async def test_the_control_link_carries_calls_and_errors(launcher: LocalLauncher) -> None:
    handle = await launcher.launch(spec())
    said: list[str] = []
    link = await ControlLink.open(handle.socket, lambda status: said.append(status.state), lambda: said.append("lost"))

    assert json.loads(await link.call(Method.STATS, timeout_s=LIMIT_S))["batches"] == 0

    await handle.stop(0)
    assert said[-1] == "lost"


async def test_a_stranger_on_the_socket_is_no_worker(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "s"))
        listener.listen()

        assert await identify(folder / "s", 0.05) is None
    assert await identify(folder / "absent", 0.05) is None
