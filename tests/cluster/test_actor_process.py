"""A process of another host by its actor, over a bridge in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, cast

import pytest
from tests.support.polling import eventually

from teimgr.cluster import ray_launcher
from teimgr.cluster.actor_process import ActorProcess, described
from teimgr.cluster.bridge import ActorAbsent, ActorLost, AnswerLate, Bridge, BridgeLost, RayRefused
from teimgr.cluster.head import ClusterHead
from teimgr.cluster.messages import HeldWorker, exit_to_dict
from teimgr.cluster.ray_launcher import RayLauncher, RayMuxLauncher
from teimgr.config.mux import MuxConfig
from teimgr.control.launch.launcher import LocalLauncher
from teimgr.control.launch.process_handle import Exit, WorkMeter
from teimgr.errors import Unavailable


class MemoryBridge:
    """Answers with `activity`, an error or seconds of the process; the process does not end."""

    def __init__(self) -> None:
        self.activity: list[float | Exception] = []
        self.answers: dict[str, list[Any]] = {}
        """Of other operations and methods, one after the other."""
        self.asked: list[tuple[str, Any]] = []
        self.ended = asyncio.Event()
        self.connected = asyncio.Event()
        self.connected.set()

    async def call(
        self, op: str, *, name: str = "", prefix: str = "", method: str = "", arguments: Any = (), limit_s: Any = None
    ) -> Any:
        if method == "wait":
            await self.ended.wait()
            return exit_to_dict(Exit(0))
        asked = method or op
        self.asked.append((asked, [*arguments] or name))
        found = self.activity.pop(0) if asked == "activity_s" else self.answers[asked].pop(0)
        if isinstance(found, BridgeLost):
            self.connected.clear()
            asyncio.get_running_loop().call_soon(self.connected.set)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
async def bridge() -> MemoryBridge:
    return MemoryBridge()


@pytest.fixture
async def process(bridge: MemoryBridge) -> AsyncIterator[ActorProcess]:
    facts = {"spec": "{}", "incarnation": "0123456789ab", "pid": 1, "start_time": 0, "started_at": 0.0}
    held = HeldWorker(**facts, socket="/socket", run_dir="/run", log_path="/log")  # type: ignore[arg-type]
    made = ActorProcess(cast(Bridge, bridge), "a/0", "other", held)
    yield made
    await made.release()


async def test_its_host_tells_whether_it_works(bridge: MemoryBridge, process: ActorProcess) -> None:
    bridge.activity = [10.0, 4_000.0, 4_000.0]
    async with WorkMeter(process) as meter:
        assert await meter.has_worked()
        assert not await meter.has_worked()


@pytest.mark.parametrize(
    "error", [ActorLost("x"), ActorAbsent("x"), AnswerLate("x"), BridgeLost("x"), RayRefused("no such method")]
)
async def test_without_an_answer_of_its_host_nothing_tells_that_it_works(
    bridge: MemoryBridge, process: ActorProcess, error: Exception
) -> None:
    bridge.activity = [10.0, error]
    async with WorkMeter(process) as meter:
        assert not await meter.has_worked()


@pytest.mark.parametrize("was_sent", [False, True])
async def test_a_grace_is_kept_over_a_loss_of_the_connection_to_ray(
    bridge: MemoryBridge, process: ActorProcess, was_sent: bool
) -> None:
    """The actor was killed after 5 s, and its worker with it, which was finishing its calls."""
    if not was_sent:
        bridge.connected.clear()
    bridge.answers["stop"] = [BridgeLost("lost"), AnswerLate("late"), None]
    bridge.answers["end"] = [None]  # of the actor, once its process is gone

    stopping = asyncio.create_task(process.stop(30.0))
    await eventually(lambda: not bridge.answers["stop"])
    bridge.ended.set()

    assert (await stopping).status == 0
    graces = [arguments[0] for method, arguments in bridge.asked if method == "stop"]
    assert 25 < graces[2] < graces[1] < graces[0] <= 30
    assert [arguments[1] for method, arguments in bridge.asked if method == "stop"] == [True, not was_sent, False]
    assert bridge.asked[-1] == ("end", "a/0")
    assert len(bridge.asked) == 4


class MemoryHead:
    """The part of a head by which actors are found."""

    def __init__(self, bridge: MemoryBridge) -> None:
        self.bridge = bridge

    async def connected(self) -> None:
        """It is."""


LATE = [BridgeLost("lost"), AnswerLate("late")]


async def test_an_actor_that_answers_late_is_asked_again_and_its_process_left_alone(bridge: MemoryBridge) -> None:
    """A daemon that started ended the healthy worker, as if it had never been launched."""
    bridge.answers = {"names": [*LATE, ["worker/a/0/0"]], "describe": [*LATE, {}], "end": [None]}
    launcher = RayLauncher(cast(ClusterHead, MemoryHead(bridge)), cast(LocalLauncher, None), 1.0)
    assert (await launcher.find()).alive == []
    assert bridge.asked[-1] == ("end", "worker/a/0/0"), "it has answered that it has no process"


async def test_an_actor_that_does_not_answer_at_all_is_left_alone(
    bridge: MemoryBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_launcher, "described", partial(described, limit_s=0.0))
    bridge.answers = {"names": [["worker/a/0/0"]], "describe": [AnswerLate("late")]}
    launcher = RayLauncher(cast(ClusterHead, MemoryHead(bridge)), cast(LocalLauncher, None), 1.0)
    assert (await launcher.find()).alive == []
    assert [asked for asked, _ in bridge.asked] == ["names", "describe"]


async def test_a_mux_whose_actor_answers_late_is_not_ended_and_looked_for_again(
    bridge: MemoryBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_launcher, "described", partial(described, limit_s=0.0))
    head = cast(ClusterHead, MemoryHead(bridge))
    launcher = RayMuxLauncher(head, "two", 0, MuxConfig(host="0.0.0.0", port=9001, control_socket=""), None, 1.0)
    bridge.answers = {"names": [["mux/two/0/0"]], "describe": [AnswerLate("late")]}

    with pytest.raises(Unavailable, match="mux/two/0/0"):
        await launcher.adopt()
