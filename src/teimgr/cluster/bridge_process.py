"""The bridge: a process that is connected to Ray, and carries out the daemon's requests there.

    python -m teimgr.cluster.bridge_process CONTROL_FD ADDRESS NODE_IP

Ray's client library may end its process when the head is lost; it also handles signals and starts threads. Here that
does not affect the daemon, which starts another bridge (`bridge.py`). Actors are detached, so they keep running.

Messages are lines of JSON: {"id", "op", …}, answered by {"id", "value"} or {"id", "error": [kind, text]} unless
{"cancel": id} comes before; first of all {"ready": version of ray}. The process ends when the control socket closes.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError, ActorDiedError, ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from teimgr.cluster.actors import HostActor, WorkerActor
from teimgr.cluster.messages import LINE_LIMIT_BYTES, NAMESPACE, read_message
from teimgr.wire.json_messages import write_line

_HOST = "host/"
_FACTS_LIMIT_S = 5.0
_END_LIMIT_S = 2.0
_LISTENER_LIMIT_S = 40.0
_LISTENER_PAUSE_S = 0.1


class BridgeError(Exception):
    """An error for the daemon: `kind` is one of `exists`, `timeout`, `lost`, `absent`, `ray`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class BridgeProcess:
    """Answers requests, each in its own task."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._actors: dict[str, Any] = {}
        self._worker_class = ray.remote(WorkerActor)
        self._host_class = ray.remote(HostActor)
        self._operations: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
            "place": self._place,
            "ask": self._ask,
            "end": self._end,
            "names": self._names,
            "hosts": self._hosts,
        }

    async def run(self) -> None:
        """Serve until the daemon closes the socket."""
        write_line(self._writer, ready=ray.__version__)
        while (request := await read_message(self._reader)) is not None:
            if "cancel" in request:
                if (task := self._tasks.get(request["cancel"])) is not None:
                    task.cancel()
                continue
            id = request.pop("id")
            task = self._tasks[id] = asyncio.create_task(self._serve(id, request))
            task.add_done_callback(partial(self._forget, id))
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_LIMIT_S)

    def _forget(self, id: int, task: asyncio.Task[None]) -> None:
        del self._tasks[id]

    async def _serve(self, id: int, request: dict[str, Any]) -> None:
        operation = self._operations[request.pop("op")]
        try:
            write_line(self._writer, id=id, value=await operation(**request))
        except BridgeError as error:
            write_line(self._writer, id=id, error=[error.kind, str(error)])
        except (ActorDiedError, ActorUnavailableError, RayActorError) as error:
            write_line(self._writer, id=id, error=["lost", _first_line(error)])
        except TimeoutError:
            write_line(self._writer, id=id, error=["timeout", "no answer in time"])
        except (RayError, ValueError, RuntimeError, OSError) as error:
            write_line(self._writer, id=id, error=["ray", _first_line(error)])

    # Workers

    async def _place(self, name: str, node: str, limit_s: float) -> None:
        """Create the actor `name` on a host and wait until it runs. If it is late, it is removed."""
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": 0, "num_cpus": 0}

        def create() -> Any:
            return self._worker_class.options(**options, scheduling_strategy=strategy).remote()

        creating = asyncio.ensure_future(asyncio.to_thread(create))
        try:
            actor = await asyncio.shield(creating)
            async with asyncio.timeout(limit_s):
                await actor.ready.remote()
        except ActorAlreadyExistsError as error:
            raise BridgeError("exists", _first_line(error)) from error
        except BaseException:
            with suppress(ValueError, RayError):  # it was not created
                ray.kill(await creating, no_restart=True)
            raise
        self._actors[name] = actor

    async def _ask(self, name: str, method: str, arguments: Sequence[Any], limit_s: float | None) -> Any:
        actor = await self._actor(name)
        try:
            async with asyncio.timeout(limit_s):
                return await getattr(actor, method).remote(*arguments)
        except RayActorError:
            self._actors.pop(name, None)
            raise

    async def _end(self, name: str) -> None:
        """Kill an actor, if it exists; its agent then kills the worker."""
        try:
            actor = await self._actor(name)
        except BridgeError:
            return
        self._actors.pop(name, None)
        await asyncio.to_thread(ray.kill, actor, no_restart=True)

    async def _names(self, prefix: str) -> list[str]:
        """Return the names of the actors that are alive or being created."""
        names = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        return sorted(
            each["name"] for each in names if each["namespace"] == NAMESPACE and each["name"].startswith(prefix)
        )

    async def _actor(self, name: str) -> Any:
        if (actor := self._actors.get(name)) is None:
            try:
                actor = self._actors[name] = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
            except ValueError as error:
                raise BridgeError("absent", _first_line(error)) from error
        return actor

    # Hosts

    async def _hosts(self, fleet: dict[str, Any]) -> list[dict[str, Any]]:
        """Each host that Ray has, dead ones excepted: its id, address, and facts or an error. They learn of the fleet,
        as `FleetFacts` has it.
        """
        nodes = [each for each in await asyncio.to_thread(ray.nodes) if each["Alive"]]
        return await asyncio.gather(*(self._host(node, fleet) for node in nodes))

    async def _host(self, node: dict[str, Any], fleet: dict[str, Any]) -> dict[str, Any]:
        known = {"id": node["NodeID"], "address": node["NodeManagerAddress"]}
        try:
            async with asyncio.timeout(_FACTS_LIMIT_S):
                return known | await self._facts(node["NodeID"], fleet)
        except TimeoutError:
            return known | {"error": "no answer in time"}
        except (RayError, ValueError) as error:
            return known | {"error": _first_line(error)}

    async def _facts(self, node: str, fleet: dict[str, Any]) -> dict[str, Any]:
        name = _HOST + node
        if (actor := self._actors.get(name)) is None:
            options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)

            def create() -> Any:
                return self._host_class.options(**options, scheduling_strategy=strategy, get_if_exists=True).remote()

            actor = self._actors[name] = await asyncio.to_thread(create)
        asked_at = time.time()
        try:
            found: dict[str, Any] = await actor.facts.remote(fleet)
            return found | _clock_of(found, asked_at, time.time())
        except RayActorError:
            self._actors.pop(name, None)
            raise


def _clock_of(found: Mapping[str, Any], asked_at: float, answered_at: float) -> dict[str, float]:
    """Return by how many seconds a host's clock is ahead of this one's; 0 if that is within the time of the answer."""
    clock = found.get("facts", {}).get("clock")
    if not clock:
        return {}
    ahead = clock - (asked_at + answered_at) / 2
    return {"clock_ahead_s": round(ahead, 3) if abs(ahead) > (answered_at - asked_at) / 2 else 0.0}


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else type(error).__name__


def _await_listener(address: str) -> None:
    """Wait for a listener at `address`, for a limited time. Ray's own attempts are seconds apart."""
    host, _, port = address.rpartition(":")
    ends = time.monotonic() + _LISTENER_LIMIT_S
    while time.monotonic() < ends:
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=1):
            return
        time.sleep(_LISTENER_PAUSE_S)


async def _main(control: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=control, limit=LINE_LIMIT_BYTES)
    await BridgeProcess(reader, writer).run()


def main(arguments: Sequence[str]) -> int:
    control, address, node_ip = arguments
    _await_listener(address)
    ray.init(
        address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False, _node_ip_address=node_ip
    )
    asyncio.run(_main(socket.socket(fileno=int(control))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
