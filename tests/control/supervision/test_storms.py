"""Storms of commands on few names: whatever their interleaving, exactly the wanted workers live afterwards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.control.supervision.storm_fleet import StormFleet, StormLauncher, StormStore, Turns

from teimgr.control.supervision.manager import Manager
from teimgr.errors import TeimgrError
from teimgr.spec import InstanceSpec

NAMES = ("a", "b")
SEEDS = 100
LIMIT_S = 60.0  # of one that takes a tenth of a second, where other processes have the cores for long
LONG_SEEDS = 12_000
FOUND = (6809,)  # seeds of the long run: an instance is created while the daemon ends


def draw(manager: Manager, rng: random.Random) -> Coroutine[Any, Any, Any]:
    """One command."""
    name = rng.choice((*NAMES, NAMES[0]))
    kind = rng.choice(("create", "create", "delete", "delete", "start", "stop", "restart", "roll", "scale", "replace"))
    wait = rng.random() < 0.5
    match kind:
        case "create":
            return manager.create(InstanceSpec(name=name, model_id="fake", replicas=rng.choice((1, 1, 2))))
        case "delete":
            return manager.delete(name)
        case "start":
            return manager.start(name)
        case "stop":
            return manager.stop(name)
        case "restart":
            return manager.restart(name)
        case "roll":
            return manager.restart(name, rolling=True, wait=wait)
        case "scale":
            return manager.update(name, {"replicas": rng.choice((1, 2, 3))}, wait=wait)
        case _:
            changes = {"dtype": rng.choice(("float32", "bfloat16"))}
            return manager.update(name, changes, recreate=rng.random() < 0.3, wait=wait)


async def storm(fleet: StormFleet, rng: random.Random, commands: int) -> None:
    """Draw commands, several under way at a time; some callers leave before the answer."""
    calls: list[asyncio.Task[Any]] = []
    for _ in range(commands):
        call = asyncio.ensure_future(draw(fleet.manager, rng))
        calls.append(call)
        if rng.random() < 0.08:
            await fleet.turns.some(20)
            call.cancel()
        await fleet.turns.some(25)
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, TeimgrError | asyncio.CancelledError):
            raise outcome


@pytest.fixture
def in_turns(monkeypatch: pytest.MonkeyPatch) -> Callable[[Turns], None]:
    """Has what takes a thread take a drawn number of turns of the event loop."""

    def patch(turns: Turns) -> None:
        async def to_thread(work: Callable[..., Any], *arguments: Any, **values: Any) -> Any:
            await turns.some()
            return work(*arguments, **values)

        monkeypatch.setattr(asyncio, "to_thread", to_thread)
        monkeypatch.setattr("teimgr.control.supervision.validation.is_free", lambda host, port: True)
        monkeypatch.setattr("teimgr.control.supervision.manager.check_model", lambda spec: None)

    return patch


async def one_storm(folder: Path, seed: int, in_turns: Callable[[Turns], None]) -> list[str]:
    """A storm, and in some seeds a daemon that dies in it and another one; what is wrong after it."""
    rng = random.Random(seed)
    launcher = StormLauncher(rng, fails=rng.choice((0, 0, 0.2)), crashes=rng.choice((0, 0, 0.2)))
    in_turns(launcher.turns)
    store = StormStore(rng, refuses=rng.choice((0, 0, 0, 0.1)))
    fleet = StormFleet(folder, rng, launcher, store)
    await fleet.manager.boot()
    await storm(fleet, rng, rng.randrange(4, 16))
    if rng.random() < 0.3:
        fleet = await fleet.killed()
        booting = asyncio.ensure_future(fleet.manager.boot())
        await storm(fleet, rng, rng.randrange(1, 8))
        await booting
    problems = await fleet.rest()
    late = asyncio.ensure_future(storm(fleet, rng, rng.randrange(3)))
    await fleet.turns.some()
    await fleet.manager.shutdown(at_once=rng.random() < 0.5)
    await late
    return problems + [f"worker {each.pid} of {each.spec.name} outlives the daemon" for each in launcher.workers]


async def test_exactly_the_wanted_workers_live_after_a_storm(tmp_path: Path, in_turns: Callable[[Turns], None]) -> None:
    for seed in (*range(SEEDS), *FOUND):
        async with asyncio.timeout(LIMIT_S):
            assert not await one_storm(tmp_path, seed, in_turns), f"seed {seed}"


@pytest.mark.long
async def test_exactly_the_wanted_workers_live_after_each_of_many_storms(
    tmp_path: Path, in_turns: Callable[[Turns], None]
) -> None:
    for seed in range(SEEDS, SEEDS + LONG_SEEDS):
        async with asyncio.timeout(LIMIT_S):
            assert not await one_storm(tmp_path, seed, in_turns), f"seed {seed}"
