"""The faults, each a coroutine that breaks something and may put it right again; the run waits for the healing."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import aiohttp
import psutil

from teimgr.client import AsyncClient
from teimgr.control.launch.nursery import NAME, STANDBY_NAME
from teimgr.control.launch.process_handle import look_up
from teimgr.errors import StateNotSaved, TeimgrError, TryLater
from teimgr.spec import State
from tests.faults.world import MINILM, MODELS, Wanted, World
from tests.support.polling import eventually

_TARGETS = ("pair", "single")
_ON_DEMAND = 8  # with what always runs more than `MEMORY_MIB` holds
_ATTEMPTS = 100
_MOST_TOKENS = 200  # no text has as many

Fault = Callable[[World], Awaitable[None]]
WorldT = TypeVar("WorldT", bound=World)


@dataclass(frozen=True)
class Kind(Generic[WorldT]):
    """A fault. `spares_neighbour`: calls on an instance that it is not aimed at must all succeed; `spares_all`: so must
    those on every instance. `heals_within_s` bounds the time until everything is as wanted, `takes_at_most_s` that of
    the injection, `served_within_s` that until every caller is served after the healing: its connection may wait out a
    backoff of gRPC."""

    inject: Callable[[WorldT], Awaitable[None]]
    spares_neighbour: bool = True
    heals_within_s: float = 60.0
    weight: int = 1
    spares_all: bool = False
    takes_at_most_s: float = 120.0
    served_within_s: float = 20.0


KINDS: dict[str, Kind[World]] = {}


def fault(*, spares_neighbour: bool = True, heals_within_s: float = 60.0, weight: int = 1) -> Callable[[Fault], Fault]:
    """Enter a fault into the catalogue under its function's name."""

    def enter(inject: Fault) -> Fault:
        KINDS[inject.__name__] = Kind(inject, spares_neighbour, heals_within_s, weight)
        return inject

    return enter


async def _moment(world: World, most_s: float = 0.5) -> None:
    await asyncio.sleep(world.random.uniform(0.0, most_s))


async def _worker(world: World) -> int | None:
    pids = await world.worker_pids(world.random.choice(_TARGETS))
    return world.random.choice(pids) if pids else None


def _send(world: World, pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        if number in (signal.SIGKILL, signal.SIGTERM):
            world.end(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, number)


# Workers


@fault(weight=4)
async def worker_killed(world: World) -> None:
    _send(world, await _worker(world), signal.SIGKILL)


@fault(weight=2)
async def worker_terminated(world: World) -> None:
    _send(world, await _worker(world), signal.SIGTERM)


@fault(weight=2)
async def worker_paused(world: World) -> None:
    pid = await _worker(world)
    _send(world, pid, signal.SIGSTOP)
    await asyncio.sleep(world.random.uniform(0.05, 0.9))
    _send(world, pid, signal.SIGCONT)


@fault()
async def worker_hung(world: World) -> None:
    """Stopped for good: it must be replaced."""
    pid = await _worker(world)
    if pid is None:
        return
    _send(world, pid, signal.SIGSTOP)
    await eventually(lambda: look_up(pid) is None)


@fault(weight=8)
async def minilm_worker_killed(world: World) -> None:
    for pid in await world.worker_pids(MINILM):
        _send(world, pid, signal.SIGKILL)


@fault(weight=6)
async def minilm_worker_hung(world: World) -> None:
    """Its healing is counted from the moment it hangs, and so has the time until it is noticed."""
    for pid in await world.worker_pids(MINILM):
        world.end(pid)
        os.kill(pid, signal.SIGSTOP)


@fault()
async def both_replicas_killed(world: World) -> None:
    for pid in await world.worker_pids("pair"):
        _send(world, pid, signal.SIGKILL)


# Other processes


@fault(spares_neighbour=False, weight=2)
async def mux_killed(world: World) -> None:
    if mux := world.process("teimgr.mux.process"):
        mux.kill()


@fault(spares_neighbour=False)
async def mux_paused(world: World) -> None:
    if mux := world.process("teimgr.mux.process"):
        mux.suspend()
        await asyncio.sleep(world.random.uniform(0.05, 1.0))
        mux.resume()


@fault()
async def nursery_killed(world: World) -> None:
    """Then a worker, which its standby has to fork."""
    if nursery := world.process(NAME):
        nursery.kill()
    await _moment(world, 0.1)
    _send(world, await _worker(world), signal.SIGKILL)


@fault(heals_within_s=180.0)
async def nursery_and_standby_killed(world: World) -> None:
    """Then a worker, which needs a new nursery: that imports torch, for over a minute on a machine with other load."""
    both = [world.process(name) for name in (NAME, STANDBY_NAME)]
    for process in both:  # at once, before the standby has one of its own
        if process is not None:
            process.kill()
    _send(world, await _worker(world), signal.SIGKILL)


@fault()
async def nursery_paused(world: World) -> None:
    """While a worker has to be forked."""
    if nursery := world.process(NAME):
        nursery.suspend()
        _send(world, await _worker(world), signal.SIGKILL)
        await asyncio.sleep(world.random.uniform(0.1, 2.0))
        with suppress(psutil.NoSuchProcess):
            nursery.resume()


@fault(spares_neighbour=False, weight=2)
async def daemon_killed(world: World) -> None:
    world.daemon.kill()
    await _moment(world)
    await asyncio.to_thread(world.daemon.start)


@fault(spares_neighbour=False)
async def daemon_killed_with_a_worker(world: World) -> None:
    """The worker dies while no daemon watches."""
    pid = await _worker(world)
    world.daemon.kill()
    _send(world, pid, signal.SIGKILL)
    await _moment(world)
    await asyncio.to_thread(world.daemon.start)


@fault(spares_neighbour=False)
async def daemon_stopped(world: World) -> None:
    await asyncio.to_thread(world.daemon.stop)
    await asyncio.to_thread(world.daemon.start)


# Changes of wanted state


@fault(weight=2)
async def created_and_deleted(world: World) -> None:
    await world.create("extra", world.random.choice(list(MODELS)))
    await _moment(world, 1.0)
    await world.delete("extra")


@fault()
async def stopped_and_started(world: World) -> None:
    name = world.random.choice(_TARGETS)
    await world.set_running(name, False)
    await _moment(world)
    await world.set_running(name, True)


@fault(weight=2)
async def model_switched(world: World) -> None:
    await world.switch_model(world.random.choice(_TARGETS))


@fault()
async def worker_killed_in_a_switch(world: World) -> None:
    """The change succeeds or is refused as a whole."""
    name = world.random.choice(_TARGETS)
    switching = asyncio.create_task(world.switch_model(name))
    await _moment(world)
    _send(world, await _worker(world), signal.SIGKILL)
    with suppress(TeimgrError):
        await switching


@fault(spares_neighbour=False)
async def daemon_killed_in_a_change(world: World) -> None:
    """A change that was not acknowledged happened as a whole or not at all."""
    changes: list[Fault] = [
        lambda world: world.create("extra", "red"),
        lambda world: world.switch_model("single"),
        lambda world: world.set_running("pair", False),
    ]
    change = asyncio.ensure_future(world.random.choice(changes)(world))
    await _moment(world, 0.3)
    world.daemon.kill()
    with suppress(TeimgrError, OSError):
        await change
    await asyncio.to_thread(world.daemon.start)
    await eventually(lambda: not any(spec.pending_update for spec in world.saved()))  # one is begun again
    _accept_saved(world)
    if not world.wanted["pair"].is_running:
        await world.set_running("pair", True)
    if "extra" in world.wanted:
        await world.delete("extra")


def _accept_saved(world: World) -> None:
    """Take what the state file has for wanted, where the change in between was not acknowledged."""
    for spec in world.saved():
        name = spec.name
        known = world.wanted.get(name)
        model = Path(spec.model_id).name
        if known is None:
            world.wanted[name] = Wanted(model, int(spec.replicas), spec.wanted_running)
            world.ports[name] = spec.port
        else:
            world.wanted[name] = replace(known, model=model, is_running=spec.wanted_running)


@fault()
async def scaled_up_and_down(world: World) -> None:
    """Replicas come and go while calls run."""
    for replicas in (3, 1):
        async with world.client(60.0) as client:
            await client.update("single", replicas=replicas, wait=True)
        world.wanted["single"] = replace(world.wanted["single"], replicas=replicas)


# Models on demand


@asynccontextmanager
async def _declared(world: World, names: Sequence[str]) -> AsyncIterator[AsyncClient]:
    """Instances on demand, each of the one or the other model, that are there within the block."""
    async with world.client(60.0) as client:
        for number, name in enumerate(names):
            model = [*MODELS][number % len(MODELS)]
            world.allowed[name] = {model}
            await client.create(name, str(world.folder / model), dtype="float32", load="on_demand")
        try:
            yield client
        finally:
            for name in names:
                await client.delete(name)


async def _answered(world: World, client: AsyncClient, name: str) -> None:
    """Have a text embedded, and compare."""
    row = world.random.randrange(len(world.texts))
    vector = await client.embed(world.texts[row], instance=name)
    world.check_vectors(f"{name}, on demand", [row], vector, world.allowed[name])


@fault()
async def worker_killed_in_a_load_on_demand(world: World) -> None:
    """Calls that wait for the load are answered by the next one, or refused with a reason."""
    async with _declared(world, ["lazy"]) as client:
        calls = [asyncio.create_task(_answered(world, client, "lazy")) for _ in range(8)]
        await _moment(world)
        for pid in await world.worker_pids("lazy"):
            _send(world, pid, signal.SIGKILL)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, TryLater):
                raise result
        async for attempt in _attempts():
            with suppress(TryLater):
                await _answered(world, client, "lazy")
                break
            assert attempt < _ATTEMPTS, "it is not loaded again"


@fault()
async def unloaded_under_calls(world: World) -> None:
    """A model that is told to go whenever it has no calls loses none of them."""
    async with _declared(world, ["lazy"]) as client, world.http() as http:
        for _ in range(4):
            calls = [asyncio.create_task(_answered(world, client, "lazy")) for _ in range(4)]
            await _moment(world, 0.2)
            async with http.post(f"{world.daemon.api}/api/generate", json={"model": "lazy", "keep_alive": 0}) as reply:
                assert reply.status == 200, await reply.text()
            await asyncio.gather(*calls)


@fault(heals_within_s=120.0)
async def evicted_for_each_other(world: World) -> None:
    """More models on demand than the memory budget holds: each call is answered, and some have others evicted."""
    names = [f"lazy-{number}" for number in range(_ON_DEMAND)]
    async with _declared(world, names) as client:
        async with asyncio.timeout(100.0):
            for _ in range(2):
                world.random.shuffle(names)
                await asyncio.gather(*(_answered(world, client, name) for name in names))
        async with world.http() as http, http.get(f"{world.daemon.api}/events?event=evicted") as reply:
            evicted = await reply.json()
        if not any(event["instance"] in names for event in evicted):
            world.breaches.append(f"none of {len(names)} models was evicted: the budget is too large for this fault")


async def _attempts() -> AsyncIterator[int]:
    for number in range(1, _ATTEMPTS + 1):
        yield number
        await asyncio.sleep(0.2)


# Tenants


@fault()
async def quotas_changed(world: World) -> None:
    """A quota comes, rises while it is used up, and goes: not a token is admitted beyond it, and what is left is given.

    `GET /usage` has what the key's calls have counted.
    """
    key = f"metered-{world.random.getrandbits(48):012x}"
    used = 0
    async with world.http(key) as http, world.http() as operator:
        for tokens in (600, 1200):
            await world.set_keys(**{key: {"tokens_per_day": tokens}})
            found = await asyncio.gather(*(_tokens_of_a_call(world, http) for _ in range(64)))
            used += sum(found)
            if not tokens - _MOST_TOKENS < used <= tokens or 0 not in found:
                world.breaches.append(f"{used} tokens admitted of {tokens} a day, in calls of {sorted(found)}")
        async with operator.get(f"{world.daemon.api}/usage?by=key") as reply:
            rows = {row["key"]: row["tokens"] for row in (await reply.json())["usage"]}
        if rows.get(key) != used:
            world.breaches.append(f"/usage has {rows.get(key)} tokens of {key}, and its calls had {used}")
        await world.set_keys(**{key: {}})
        if not all(await asyncio.gather(*(_tokens_of_a_call(world, http) for _ in range(8)))):
            world.breaches.append("a call is refused for a quota that is gone")
        await world.set_keys()


async def _tokens_of_a_call(world: World, http: aiohttp.ClientSession) -> int:
    """Have a text embedded, and compare; the tokens of the call, 0 where a quota refuses it."""
    row = world.random.randrange(len(world.texts))
    body = {"input": world.texts[row], "model": "single"}
    async with http.post(f"{world.daemon.api}/v1/embeddings", json=body) as reply:
        content = await reply.json()
        if reply.status == 429 and reply.headers["x-teimgr-code"] == "DAILY_TOKENS_EXCEEDED":
            return 0
        assert reply.status == 200, content
    world.check_vectors("single, metered", [row], [content["data"][0]["embedding"]], world.allowed["single"])
    return int(content["usage"]["total_tokens"])


# Disk


@fault()
async def disk_refused(world: World) -> None:
    """While the state cannot be written, changes are refused and nothing changes."""
    block = world.daemon.folder / "state.toml.tmp"
    with suppress(FileExistsError):
        block.mkdir()
    for change in (
        lambda: world.create("extra", "red"),
        lambda: world.delete("single"),
        lambda: world.set_running("pair", False),
    ):
        try:
            await change()
        except StateNotSaved:
            continue
        world.breaches.append("a change was acknowledged while the state could not be saved")
    block.rmdir()


@fault(spares_neighbour=False)
async def state_file_cut_short(world: World) -> None:
    """Two saves of one fleet, a kill, and the file cut at any byte: the generation before has the same instances."""
    async with world.client() as client:
        for value in ("one", "two"):
            await client.update("single", tags={"generation": f"{value} {world.random.random()}"}, wait=True)
    world.daemon.kill()
    file = world.daemon.folder / "state.toml"
    content = file.read_bytes()
    file.unlink()  # the generation before may be a link to the same file
    file.write_bytes(content[: world.random.randrange(len(content))])
    await asyncio.to_thread(world.daemon.start)


@fault()
async def model_file_cut_short(world: World) -> None:
    """The instance fails with a reason, and can be deleted."""
    folder = world.folder / "cut"
    shutil.copytree(world.folder / "red", folder, dirs_exist_ok=True)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: world.random.randrange(1, weights.stat().st_size)])
    async with world.client(60.0) as client:
        with suppress(TeimgrError):  # refused at creation where the damage shows in the file's head
            await client.create("cut", str(folder))

            async def has_failed() -> bool:
                return (await client.get("cut")).status is State.FAILED

            await eventually(has_failed)
            await client.delete("cut")
    shutil.rmtree(folder)


# Ports and clients


@fault()
async def port_taken(world: World) -> None:
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        thief.listen()
        async with world.client(60.0) as client:
            try:
                await client.create("robbed", str(world.folder / "red"), port=thief.getsockname()[1])
            except TeimgrError:
                return
            world.breaches.append("an instance was created on a port that is taken")
            await client.delete("robbed")


@fault()
async def clients_vanished(world: World) -> None:
    """Half a request on each port, calls cancelled in flight, then every connection is cut."""
    halves = (
        (world.daemon.api_port, b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n{"),
        (world.ports["pair"], b"POST /embed HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n"),
        (world.daemon.grpc_port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00"),
        (world.ports["single"], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x10\x04"),
    )
    sockets = []
    for port, data in halves * 8:
        connection = socket.create_connection(("127.0.0.1", port), timeout=5)
        connection.sendall(data)
        sockets.append(connection)
    async with world.client() as client:
        texts = list(world.texts) * 20
        calls = [asyncio.create_task(client.embed_arrow(texts, instance=name)) for name in _TARGETS for _ in range(4)]
        await _moment(world, 0.2)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    for connection in sockets:
        connection.close()


@fault()
async def answers_unread(world: World) -> None:
    """Clients that ask for much and read nothing."""
    async with world.http() as http:
        url = f"{world.daemon.api}/v1/embeddings"
        body = {"input": list(world.texts) * 4, "model": "single"}
        replies = await asyncio.gather(*(http.post(url, json=body) for _ in range(8)), return_exceptions=True)
        await _moment(world)
        for reply in replies:
            if isinstance(reply, aiohttp.ClientResponse):
                reply.close()
