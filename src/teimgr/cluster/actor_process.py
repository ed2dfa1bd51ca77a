"""A process on a host of a cluster, owned by a named actor of Ray."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from itertools import cycle
from typing import Any, Self

from teimgr.cluster.bridge import ActorAbsent, ActorExists, ActorLost, AnswerLate, Bridge, BridgeLost, RayRefused
from teimgr.cluster.head import ClusterHead
from teimgr.cluster.messages import HeldWorker, exit_from_dict
from teimgr.control.launch.process_handle import KILL_LIMIT_S, Exit, ExitReport, LaunchFailed
from teimgr.errors import Code, NoHost, Unavailable

SLOTS = (0, 1)
"""Ends of the names of a replica's two actors: a successor starts beside its predecessor."""
LOST = (ActorLost, ActorAbsent)
NO_ANSWER = (AnswerLate, BridgeLost, RayRefused)
ANSWER_LIMIT_S = 60.0
"""How long a starting daemon repeats a question to Ray or an actor that does not answer."""
_DESCRIBE_LIMIT_S = 10.0
_ASK_LIMIT_S = 5.0
_ACTIVITY_LIMIT_S = 2.0
_RETRY_PAUSE_S = 0.25
_LEFT_TO_RAY = 2 / 3
"""Unreachable actors of the replica are removed in this last part of the placement's time limit. Before it, Ray may
notice by itself that their host is gone."""

log = logging.getLogger(__name__)


class ActorProcess:
    """One process by its actor `name` on `host`; `pid` and `started_at` are the agent's."""

    def __init__(self, bridge: Bridge, name: str, host: str, held: HeldWorker) -> None:
        self.name = name
        self.host = host
        self.incarnation = held.incarnation
        self.pid = held.pid
        self.started_at = held.started_at
        self._bridge = bridge
        self._tasks: set[asyncio.Task[Any]] = set()
        self._exit = asyncio.create_task(self._watch(), name=f"exit of {name}")

    async def wait(self) -> Exit:
        return await asyncio.shield(self._exit)

    async def stop(self, grace_s: float, *, sigterm: bool = True) -> Exit:
        """As the protocol; an actor that does not answer is killed, and its agent then kills the process."""
        if problem := await self._unless_ended(self._asked_to_stop(grace_s, sigterm)):
            raise LaunchFailed(problem)
        done, _ = await asyncio.wait({self._exit}, timeout=_ASK_LIMIT_S)
        if not done:
            await self._unless_ended(self._bridge.call("end", name=self.name))
            done, _ = await asyncio.wait({self._exit}, timeout=KILL_LIMIT_S)
        if not done:
            raise LaunchFailed(f"the actor of process {self.pid} on host {self.host} did not end")
        return self._exit.result()

    async def _asked_to_stop(self, grace_s: float, sigterm: bool) -> Any:
        """Return the answer of `WorkerActor.stop`. Losing the connection to Ray does not shorten the grace."""
        clock = asyncio.get_running_loop().time
        ends = clock() + grace_s
        while True:
            left_s, was_connected = max(0.0, ends - clock()), self._bridge.connected.is_set()
            try:
                return await self._ask("stop", left_s, sigterm, limit_s=left_s + KILL_LIMIT_S + _ASK_LIMIT_S)
            except NO_ANSWER:
                if clock() >= ends + KILL_LIMIT_S:
                    raise
            sigterm = sigterm and not was_connected  # a second SIGTERM would abort its calls
            await _reconnected(self._bridge, ends + KILL_LIMIT_S)

    def send_signal(self, number: signal.Signals) -> None:
        sending = asyncio.create_task(self._unless_ended(self._ask("signal", int(number), limit_s=_ASK_LIMIT_S)))
        self._tasks.add(sending)
        sending.add_done_callback(self._tasks.discard)

    async def activity_s(self) -> float | None:
        """Like the protocol, from the host of the process; None if the host does not answer soon."""
        try:
            found: float | None = await self._ask("activity_s", limit_s=_ACTIVITY_LIMIT_S)
        except (*LOST, *NO_ANSWER):
            return None
        return found

    async def release(self) -> None:
        """Stop tracking the process, which keeps running."""
        tasks = [self._exit, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    def on_gone(self, call: Callable[[Self], None]) -> None:
        self._exit.add_done_callback(lambda _: call(self))

    async def _ask(self, method: str, *arguments: object, limit_s: float | None) -> Any:
        return await self._bridge.call("ask", name=self.name, method=method, arguments=arguments, limit_s=limit_s)

    async def _unless_ended(self, asking: Coroutine[Any, Any, Any]) -> Any:
        """Return the answer; None if the process ends first or does not answer."""
        task = asyncio.ensure_future(asking)
        await asyncio.wait({task, self._exit}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            return None
        try:
            return task.result()
        except (*LOST, *NO_ANSWER) as error:
            log.warning("no answer from a process's actor", extra={"actor": self.name, "reason": str(error)})
            return None

    async def _watch(self) -> Exit:
        """Wait for the end of the process, reconnecting to Ray if the connection is lost."""
        while True:
            try:
                exit = exit_from_dict(await self._ask("wait", limit_s=None))
                break
            except LOST as error:
                log.warning("process lost", extra={"actor": self.name, "node": self.host})
                text = f"the process was lost with its actor on host {self.host}: {error}"
                return Exit(None, ExitReport(Code.BACKEND_UNAVAILABLE, text, permanent=False))
            except NO_ANSWER:
                await self._bridge.connected.wait()
                await asyncio.sleep(_RETRY_PAUSE_S)
        with suppress(*LOST, *NO_ANSWER):
            await self._bridge.call("end", name=self.name)
        return exit


async def place(head: ClusterHead, replica: str, host: str, limit_s: float) -> str:
    """Create the actor of a replica on a host, and return its name.

    If both actor names of the replica are taken, this waits for one to end: a process replaced by a rolling change
    finishes its calls first, and the next change may begin before that. An unreachable actor is removed, since after a
    restart Ray may list dead actors for ever.

    Raises:
        NoHost: the host is not in the cluster or takes no workers, or Ray did not place the actor in time.
        Unavailable: Ray is not connected.
        LaunchFailed: none of the replica's actors has ended in time.
    """
    member = head.members.get(host)
    if member is None or member.problem:
        reason = member.problem if member else "it is not in the cluster"
        raise NoHost(f"host {host!r} takes no workers: {reason}")
    clock = asyncio.get_running_loop().time
    ends = clock() + limit_s
    for slot in cycle(SLOTS):
        name = f"{replica}/{slot}"
        try:
            await head.bridge.call("place", name=name, node=member.ray_id, limit_s=limit_s)
        except ActorExists:
            if clock() > ends - limit_s * _LEFT_TO_RAY:
                await _remove_unreachable(head, name)
            if slot == SLOTS[-1]:
                if clock() > ends:
                    break
                await asyncio.sleep(_RETRY_PAUSE_S)
        except AnswerLate:
            text = f"Ray placed no actor on host {host!r} within {limit_s:g} s"
            raise NoHost(f"{text} (cluster.placement_timeout_secs)") from None
        except (ActorLost, RayRefused) as error:
            raise NoHost(f"Ray cannot place an actor on host {host!r}: {error}") from error
        else:
            return name
    raise LaunchFailed(f"two copies of {replica} are still running after {limit_s:g} s")


async def _remove_unreachable(head: ClusterHead, name: str) -> None:
    """Remove an actor that Ray lists but cannot reach. An actor that is slow to answer stays."""
    try:
        await head.bridge.call("ask", name=name, method="describe", arguments=[], limit_s=_ASK_LIMIT_S)
    except ActorLost as error:
        log.warning("removing an actor that cannot be reached", extra={"actor": name, "reason": str(error)})
        with suppress(*LOST, *NO_ANSWER):
            await end(head, name)
    except (*LOST, *NO_ANSWER):
        return


async def launch(head: ClusterHead, name: str, host: str, arguments: Sequence[str], limit_s: float) -> HeldWorker:
    """Have a placed actor start its process from the values of `WorkerActor.launch`. A failed actor is removed.

    Raises:
        LaunchFailed: the process could not be started there.
    """
    try:
        answer = await head.bridge.call("ask", name=name, method="launch", arguments=arguments, limit_s=limit_s)
        if "error" in answer:
            raise LaunchFailed(f"host {host!r}: {answer['error']}")
        return HeldWorker.from_dict(answer["worker"])
    except BaseException as error:
        with suppress(*LOST, *NO_ANSWER):
            await asyncio.shield(end(head, name))
        if isinstance(error, ActorLost):
            raise LaunchFailed(f"the actor on host {host!r} was lost: {error}") from error
        if isinstance(error, (*LOST, *NO_ANSWER)):
            raise LaunchFailed(f"no process from host {host!r}: {error}") from error
        raise


async def names(bridge: Bridge, prefix: str, limit_s: float = ANSWER_LIMIT_S) -> list[str]:
    """Return the names of the existing actors. Retries until Ray answers.

    Raises:
        Unavailable: Ray does not answer within the limit.
    """
    try:
        found: list[str] = await _answer(bridge, limit_s, "names", prefix=prefix)
    except NO_ANSWER as error:
        raise Unavailable(f"the actors of Ray cannot be listed: {error}") from error
    return found


async def described(bridge: Bridge, name: str, limit_s: float = ANSWER_LIMIT_S) -> Mapping[str, Any] | None:
    """Return `WorkerActor.describe`; empty if the actor does not have a process yet, or is lost together with its
    process.

    None if it does not answer in time: its process may be alive and healthy.
    """
    asked = {"name": name, "method": "describe", "arguments": [], "limit_s": _DESCRIBE_LIMIT_S}
    try:
        answer: Mapping[str, Any] = await _answer(bridge, limit_s, "ask", **asked)
    except LOST as error:
        log.warning("a process's actor is lost", extra={"actor": name, "reason": str(error)})
        return {}
    except NO_ANSWER as error:
        log.error("no answer from a process's actor; it is not removed", extra={"actor": name, "reason": str(error)})
        return None
    return answer


async def _answer(bridge: Bridge, within_s: float, op: str, **arguments: object) -> Any:
    """Return the result of `Bridge.call`, retried until there is an answer. Raises the last error at the time limit."""
    clock = asyncio.get_running_loop().time
    ends = clock() + within_s
    while True:
        try:
            return await bridge.call(op, **arguments)
        except NO_ANSWER as error:
            if clock() >= ends:
                raise
            asked = arguments.get("name", arguments.get("prefix"))
            log.warning("no answer from Ray yet, retrying", extra={"actor": asked, "reason": str(error)})
        await _reconnected(bridge, ends)


async def _reconnected(bridge: Bridge, limit: float) -> None:
    """Wait until the next attempt: a pause and a connection to Ray, at most until the time limit."""
    with suppress(TimeoutError):
        async with asyncio.timeout_at(limit):
            await bridge.connected.wait()
    await asyncio.sleep(_RETRY_PAUSE_S)


async def end(head: ClusterHead, name: str) -> None:
    """Kill an actor, and with it its process. Raises like `Bridge.call`."""
    await head.bridge.call("end", name=name)
