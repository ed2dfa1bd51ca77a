"""Launcher of a cluster: each worker is owned by a detached, named actor of Ray on the host that it was placed on.

The name of the actor is the mutex of a replica: whoever wants to start the same one, such as a second daemon, finds it
taken. A replica has two names, because in an update the new worker starts beside the old one.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from teimgr.cluster.bridge import ActorAbsent, ActorExists, ActorLost, AnswerLate, Bridge, BridgeLost, RayRefused
from teimgr.cluster.head import ClusterHead
from teimgr.cluster.messages import HeldWorker, exit_from_dict
from teimgr.errors import Code, NoHost
from teimgr.launch.control_link import ControlLink, WorkerStatus
from teimgr.launch.launcher import Adopted, EndedWorker, FoundWorkers, LocalLauncher, WorkerHandle
from teimgr.launch.nursery_link import FORK_LIMIT_S, IMPORT_LIMIT_S
from teimgr.launch.process_handle import KILL_LIMIT_S, Exit, ExitReport, LaunchFailed
from teimgr.spec import WorkerSpec

_PREFIX = "worker/"
_SLOTS = (0, 1)
_DESCRIBE_LIMIT_S = 10.0
_ASK_LIMIT_S = 5.0
_RETRY_PAUSE_S = 0.25
_LOST = (ActorLost, ActorAbsent)
_NO_ANSWER = (AnswerLate, BridgeLost, RayRefused)

log = logging.getLogger(__name__)


class RayWorker:
    """`WorkerHandle` of a worker on some host of the cluster, by its actor `name`."""

    def __init__(self, bridge: Bridge, name: str, spec: WorkerSpec, held: HeldWorker) -> None:
        self.spec = spec
        self.incarnation = held.incarnation
        self.pid = held.pid
        self.socket = Path(held.socket)
        self.started_at = held.started_at
        self.name = name
        self._bridge = bridge
        self._tasks: set[asyncio.Task[Any]] = set()
        self._exit = asyncio.create_task(self._watch(), name=f"exit of {name}")

    async def connect(self, on_status: Callable[[WorkerStatus], None], on_lost: Callable[[], None]) -> ControlLink:
        return await ControlLink.open(self.socket, on_status, on_lost)

    async def wait(self) -> Exit:
        return await asyncio.shield(self._exit)

    async def stop(self, grace_s: float, *, sigterm: bool = True) -> Exit:
        """As the protocol; an actor that does not answer is killed, and its agent then kills the worker."""
        asking = self._ask("stop", grace_s, sigterm, limit_s=grace_s + KILL_LIMIT_S + _ASK_LIMIT_S)
        problem = await self._unless_ended(asking)
        if problem:
            raise LaunchFailed(problem)
        done, _ = await asyncio.wait({self._exit}, timeout=_ASK_LIMIT_S)
        if not done:
            await self._unless_ended(self._bridge.call("end", name=self.name))
            done, _ = await asyncio.wait({self._exit}, timeout=KILL_LIMIT_S)
        if not done:
            raise LaunchFailed(f"the actor of worker {self.pid} on host {self.spec.host} does not end")
        return self._exit.result()

    def send_signal(self, number: signal.Signals) -> None:
        sending = asyncio.create_task(self._unless_ended(self._ask("signal", int(number), limit_s=_ASK_LIMIT_S)))
        self._tasks.add(sending)
        sending.add_done_callback(self._tasks.discard)

    async def release(self) -> None:
        """Forget the worker, which continues."""
        tasks = [self._exit, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    def on_gone(self, call: Callable[[RayWorker], None]) -> None:
        self._exit.add_done_callback(lambda _: call(self))

    async def _ask(self, method: str, *arguments: object, limit_s: float | None) -> Any:
        return await self._bridge.call("ask", name=self.name, method=method, arguments=arguments, limit_s=limit_s)

    async def _unless_ended(self, asking: Coroutine[Any, Any, Any]) -> Any:
        """The answer; None when the worker ends first, or there is none."""
        task = asyncio.ensure_future(asking)
        await asyncio.wait({task, self._exit}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            return None
        try:
            return task.result()
        except (*_LOST, *_NO_ANSWER) as error:
            log.warning("no answer of a worker's actor", extra={"instance": self.spec.name, "reason": str(error)})
            return None

    async def _watch(self) -> Exit:
        """Wait for the end of the worker, over losses of the connection to Ray."""
        while True:
            try:
                exit = exit_from_dict(await self._ask("wait", limit_s=None))
                break
            except _LOST as error:
                log.warning("worker lost", extra={"instance": self.spec.name, "node": self.spec.host})
                text = f"it was lost with its actor on host {self.spec.host}: {error}"
                return Exit(None, ExitReport(Code.BACKEND_UNAVAILABLE, text, permanent=False))
            except _NO_ANSWER:
                await self._bridge.connected.wait()
                await asyncio.sleep(_RETRY_PAUSE_S)
        with suppress(*_LOST, *_NO_ANSWER):
            await self._bridge.call("end", name=self.name)
        return exit


class RayLauncher:
    """`Launcher` for all hosts of a cluster. `local` is the one of the head's host, which its agent uses."""

    def __init__(self, head: ClusterHead, local: LocalLauncher, placement_limit_s: float) -> None:
        self._head = head
        self._local = local
        self._placement_limit_s = placement_limit_s
        self._workers: set[RayWorker] = set()

    async def start(self) -> None:
        """Start the launcher of this host, and the head, once; Ray comes up in the background."""
        await self._local.start()
        await self._head.start()

    async def launch(self, spec: WorkerSpec) -> RayWorker:
        """Have Ray place an actor on the host `spec.host`, and that one fork the worker.

        Raises:
            NoHost: the host is not in the cluster or takes no workers, or Ray did not place the actor in time.
            Unavailable: there is no connection to Ray.
            LaunchFailed: the worker could not be started there.
        """
        name = await self._place(spec)
        try:
            return await self._launch(name, spec)
        except BaseException:
            with suppress(*_LOST, *_NO_ANSWER):
                await asyncio.shield(self._head.bridge.call("end", name=name))
            raise

    async def _place(self, spec: WorkerSpec) -> str:
        """Create the actor of a replica; the result is its name."""
        member = self._head.members.get(spec.host)
        if member is None or member.problem:
            reason = member.problem if member else "it is not in the cluster"
            raise NoHost(f"host {spec.host!r} takes no workers: {reason}")
        for slot in _SLOTS:
            name = f"{_PREFIX}{spec.name}/{spec.replica}/{slot}"
            try:
                await self._head.bridge.call("place", name=name, node=member.ray_id, limit_s=self._placement_limit_s)
            except ActorExists:
                continue
            except AnswerLate:
                text = f"Ray placed no actor on host {spec.host!r} within {self._placement_limit_s:g} s"
                raise NoHost(f"{text} (cluster.placement_timeout_secs)") from None
            except (ActorLost, RayRefused) as error:
                raise NoHost(f"Ray cannot place an actor on host {spec.host!r}: {error}") from error
            return name
        raise LaunchFailed(f"replica {spec.replica} of {spec.name} runs twice in the cluster already")

    async def _launch(self, name: str, spec: WorkerSpec) -> RayWorker:
        limit_s = IMPORT_LIMIT_S + FORK_LIMIT_S
        call = self._head.bridge.call("ask", name=name, method="launch", arguments=[spec.to_json()], limit_s=limit_s)
        try:
            answer = await call
        except ActorLost as error:
            raise LaunchFailed(f"the actor on host {spec.host!r} was lost: {error}") from error
        except (AnswerLate, ActorAbsent, BridgeLost, RayRefused) as error:
            raise LaunchFailed(f"no worker from host {spec.host!r}: {error}") from error
        if "error" in answer:
            raise LaunchFailed(f"host {spec.host!r}: {answer['error']}")
        return self._keep(RayWorker(self._head.bridge, name, spec, HeldWorker.from_dict(answer["worker"])))

    async def find(self) -> FoundWorkers:
        """As the protocol; waits until Ray answers.

        Raises:
            Unavailable: Ray does not answer in time.
        """
        await self._head.connected()
        names = await self._head.bridge.call("names", prefix=_PREFIX)
        found = await asyncio.gather(*map(self._described, names))
        alive: list[WorkerHandle] = []
        ended: list[EndedWorker] = []
        for name, answer in zip(names, found, strict=True):
            held = HeldWorker.from_dict(answer["worker"]) if answer else None
            if held is None or answer["exit"] is not None:
                with suppress(*_LOST, *_NO_ANSWER):
                    await self._head.bridge.call("end", name=name)
            if held is None:
                continue
            spec = _spec_of(held)
            if answer["exit"] is None:
                alive.append(self._keep(RayWorker(self._head.bridge, name, spec, held)))
            else:
                exit = exit_from_dict(answer["exit"])
                ended.append(EndedWorker(spec.name, spec, held.pid, held.started_at, exit))
        return FoundWorkers(alive, ended)

    async def adopt(self, workers: Sequence[WorkerHandle], accepts: Callable[[WorkerSpec], bool]) -> list[Adopted]:
        return await self._local.adopt(workers, accepts)

    async def close(self) -> None:
        """Release the workers, end Ray's head, close the launcher of this host."""
        await self.release()
        await self._head.close()

    async def release(self) -> None:
        """As `close`, but Ray goes on."""
        for worker in tuple(self._workers):
            await worker.release()
        self._workers.clear()
        await self._head.release()
        await self._local.close()

    async def _described(self, name: str) -> Mapping[str, Any]:
        """`WorkerActor.describe`; empty where the actor does not answer or has no worker yet."""
        try:
            answer: Mapping[str, Any] = await self._head.bridge.call(
                "ask", name=name, method="describe", arguments=[], limit_s=_DESCRIBE_LIMIT_S
            )
        except (*_LOST, *_NO_ANSWER) as error:
            log.warning("no answer of a worker's actor", extra={"actor": name, "reason": str(error)})
            return {}
        return answer

    def _keep(self, worker: RayWorker) -> RayWorker:
        self._workers.add(worker)
        worker.on_gone(self._workers.discard)
        return worker


def _spec_of(held: HeldWorker) -> WorkerSpec:
    """The spec; one of another version of teimgr becomes one that nothing accepts."""
    try:
        return WorkerSpec.from_json(held.spec)
    except (ValueError, TypeError):
        return WorkerSpec(name="", model_id="")
