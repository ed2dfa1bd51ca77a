"""Instance ports on the head for replicas on other hosts: connections are forwarded, as bytes, over mutual TLS.

A connection goes to the host with the fewest for each of its replicas, by its service (`host_service.py`), which
connects to the port there; that is before a byte was sent, so a host that does not answer costs a try of the next one.
TLS, keys and limits of the port stay with the worker, which sees a client on its own host.

The head listens as one more worker of the instance would (`LocalLauncher.join_port`): it accepts while no replica is
here, and those that start here share its socket, so no connection is lost where one takes the place of the other.

A client speaks first on these ports, so a connection costs other hosts nothing before its first byte. Until then it is
in the phase HEAD, or IDLE if a worker passed it on; while bytes are forwarded it is in ANSWER.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from functools import partial

from teimgr.cluster.host_link import STREAM_BYTES, HostLink, HostServices, NearEnd, connect, most_forwarded
from teimgr.control.launch.launcher import LocalLauncher
from teimgr.control.launch.process_handle import LaunchFailed
from teimgr.control.launch.shared_ports import JoinedPort
from teimgr.errors import TeimgrError, Unavailable
from teimgr.http.acceptor import Acceptor, GatedStream
from teimgr.http.connection_gate import STALL_S, ConnectionGate, Phase, SharedLimit, Ticket
from teimgr.http.server import address_of_peer
from teimgr.observability import catalogue
from teimgr.observability.exposition import Page, add
from teimgr.spec import RouteEntry, State, WorkerSpec
from teimgr.wire.fleet_tls import FleetIdentity
from teimgr.wire.routing.directory import Directory

MAX_OF_INSTANCE = 1024
"""Limit on the connections to one instance; `most_forwarded` limits those of all instances."""
CONNECT_LIMIT_S = 3.0
"""Time limit for a host to answer, and the same again to connect to the port there."""
_TRIES_LIMIT_S = 10.0
_AVOIDED_S = 5.0  # a host that failed is tried last for this long
_FIRST_RETRY_S = 0.1
_RETRY_S = 5.0
_INHERITED = "forwarded "
_INHERITED_S = 30.0  # until then the hosts should be known again
_ENDED = (State.STOPPED, State.FAILED, State.UNLOADED)

log = logging.getLogger(__name__)

Replicas = Mapping[str, Sequence[str]]
"""The incarnations of an instance's replicas on each other host, by the host's name."""


class PortForwarding:
    """Follows the routes of `directory`, from `start` to `close`.

    `node` is this host's name, `identity` the daemon's. `local` is the launcher of this host, `instance_host` where its
    ports listen. `spec_of` has the spec of a worker by its incarnation. `hosts` are the services of the other hosts, of
    none whose ports are those of this one.
    """

    def __init__(
        self,
        directory: Directory,
        node: str,
        identity: FleetIdentity,
        local: LocalLauncher,
        instance_host: str,
        spec_of: Callable[[str], WorkerSpec | None],
        hosts: HostServices,
    ) -> None:
        self.identity = identity
        self.local = local
        self.instance_host = instance_host
        self.hosts = hosts
        self.shared_limit = SharedLimit(most_forwarded())
        self._directory = directory
        self._node = node
        self._spec_of = spec_of
        self._ports: dict[str, _Port] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._unsubscribe: Callable[[], None] | None = None
        hosts.subscribe(self._hosts_changed)

    @property
    def connections(self) -> int:
        """The number of connections under way, of all instances."""
        return sum(port.connections for port in self._ports.values())

    def start(self) -> None:
        self._unsubscribe = self._directory.subscribe(self._follow)
        self._hosts_changed()

    # From one daemon to the next

    def listeners(self) -> dict[str, socket.socket]:
        """The sockets on which this daemon listens, by names for `inherit`."""
        return {f"{_INHERITED}{name}": sock for name, sock in self.local.joined_ports().items()}

    def inherit(self, take_all: Callable[[str], Mapping[str, socket.socket]]) -> None:
        """Keep the sockets of the daemon before, in whose backlogs clients wait; those not used soon are closed."""
        inherited = take_all(_INHERITED)
        for name, listener in inherited.items():
            if listener.getsockname()[0] == self.instance_host:
                self.local.inherit_port(name, listener)
            else:  # of another `instance_host`
                listener.close()
        asyncio.get_running_loop().call_later(_INHERITED_S, self._leave_unused, tuple(inherited))

    def _leave_unused(self, names: Sequence[str]) -> None:
        for name in names:
            if (port := self._ports.get(name)) is None or not port.is_joined:
                self.local.leave_port(name)

    def hand_over(self) -> None:
        """Stop accepting, since the successor accepts. Open connections are forwarded as before."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        for port in self._ports.values():
            port.hand_over()

    async def finished(self, limit_s: float) -> None:
        """Return once the connections have ended, or after `limit_s`."""
        if tasks := [task for port in self._ports.values() for task in port.tasks]:
            await asyncio.wait(tasks, timeout=max(0.0, limit_s))

    def _hosts_changed(self) -> None:
        """Listen for instances whose hosts are now known, and end connections to lost hosts."""
        if self._unsubscribe is not None:
            for entry in self._directory.snapshot().entries:
                self._follow(entry.name, entry)

    def leave(self) -> None:
        """Stop listening. Open connections last until their workers end them."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        for port in self._ports.values():
            port.follow({}, 0, has_local=False)

    async def close(self) -> None:
        """End everything."""
        self.leave()
        for name in tuple(self._ports):
            self._remove(name)
        if self._closing:
            await asyncio.wait(self._closing)

    async def page(self) -> Page:
        """The gauge of the metrics page."""
        page: Page = {}
        for name, port in self._ports.items():
            add(page, catalogue.FORWARDED, port.connections, instance=name)
        return page

    def _follow(self, name: str, entry: RouteEntry | None) -> None:
        if entry is None:
            self._remove(name)
            return
        number, replicas = 0, dict[str, list[str]]()
        hosts = self.hosts.now
        for endpoint in entry.endpoints:
            if endpoint.node in hosts and (spec := self._spec_of(endpoint.incarnation)) is not None:
                number = spec.port
                replicas.setdefault(endpoint.node, []).append(endpoint.incarnation)
        port = self._ports.get(name)
        if port is None:
            if not number:
                return
            port = self._ports[name] = _Port(name, self)
        port.follow(replicas, number, has_local=any(each.is_on(self._node) for each in entry.endpoints))
        # A host that is lost ends nothing itself. While Ray is restarted none is known, and its replicas are routed.
        alive = hosts.keys() | {each.node for each in entry.endpoints}
        port.end_connections(set() if entry.state in _ENDED else alive)

    def _remove(self, name: str) -> None:
        if (port := self._ports.pop(name, None)) is not None:
            for task in port.end():
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)


class _Port:
    """The port of one instance, and its connections."""

    def __init__(self, name: str, owner: PortForwarding) -> None:
        self._name = name
        self._owner = owner
        self._replicas: Replicas = {}
        self._number = 0
        self._has_local = False
        self._joined: JoinedPort | None = None
        self._gate = ConnectionGate(min(MAX_OF_INSTANCE, owner.shared_limit.connections), shared=owner.shared_limit)
        self._acceptor: Acceptor | None = None
        self._is_over = False
        self._changed = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], str] = {}  # with the name of the host, empty before there is one
        self._taken: Counter[str] = Counter()
        self._failed_at: dict[str, float] = {}
        self._is_full = False
        # A new context, so that logs do not name the request that started the task.
        self._joining = asyncio.create_task(self._join(), name=f"port of {name}", context=Context())

    @property
    def connections(self) -> int:
        return self._gate.count

    @property
    def tasks(self) -> Sequence[asyncio.Task[None]]:
        """One for each connection that is forwarded."""
        return [*self._tasks]

    @property
    def is_joined(self) -> bool:
        return self._joined is not None

    def hand_over(self) -> None:
        """Accept no more; the socket and the replicas stay, for connections that were accepted."""
        self._joining.cancel()
        self._stop_accepting()

    def follow(self, replicas: Replicas, number: int, *, has_local: bool) -> None:
        """Forward to these replicas from now on; to none while a replica is here, and without any stop listening."""
        self._replicas, self._has_local = replicas, has_local
        if number != self._number or not replicas:
            self._leave()
        self._number = number
        self._accept_or_not()
        self._changed.set()

    def end_connections(self, alive: Collection[str]) -> None:
        """End the connections to hosts that are not among these."""
        for task, host in tuple(self._tasks.items()):
            if host and host not in alive:
                task.cancel()

    def end(self) -> list[asyncio.Task[None]]:
        """Stop listening, and end the connections by these tasks."""
        self._is_over = True
        arrivals = () if self._acceptor is None else self._acceptor.arrivals
        arriving = [each.task for each in arrivals if each.task is not None]
        self.follow({}, 0, has_local=False)
        tasks = [self._joining, *self._tasks]
        for task in tasks:
            task.cancel()
        return tasks + arriving

    async def _join(self) -> None:
        """Listen once there is a replica elsewhere; try again while the port is another's."""
        pause_s, problem = _FIRST_RETRY_S, ""
        while True:
            self._changed.clear()
            if self._joined is None and self._replicas:
                number = self._number
                try:
                    joined = await self._owner.local.join_port(self._name, self._owner.instance_host, number)
                except (TeimgrError, LaunchFailed) as error:
                    if str(error) != problem:
                        problem = str(error)
                        log.warning("the port is not forwarded", extra={"instance": self._name, "reason": problem})
                    await _any_change(self._changed, pause_s)
                    pause_s = min(2 * pause_s, _RETRY_S)
                    continue
                self._joined = joined
                pause_s, problem = _FIRST_RETRY_S, ""
                if number != self._number or not self._replicas:  # it was changed meanwhile
                    self._leave()
                    continue
                self._accept_or_not()
            await self._changed.wait()

    def _leave(self) -> None:
        self._stop_accepting()
        if self._joined is not None:
            self._joined = None
            self._owner.local.leave_port(self._name)
            log.info("the port is no longer forwarded", extra={"instance": self._name, "port": self._number})

    def _accept_or_not(self) -> None:
        if self._joined is None or self._has_local or not self._replicas:
            self._stop_accepting()
        elif self._acceptor is None:
            log.info("the port is forwarded", extra={"instance": self._name, "hosts": sorted(self._replicas)})
            self._acceptor = Acceptor(self._joined.listener, self._gate, self._stream, on_failure=self._on_refused)
            self._joined.queue.serve(self._on_passed_on)
            self._acceptor.start()

    def _stop_accepting(self) -> None:
        if self._acceptor is not None and self._joined is not None:
            self._acceptor.close()
            self._acceptor = None
            self._joined.queue.leave()

    def _on_passed_on(self, number: int, client: socket.socket) -> None:
        """Take a connection of a worker here that ends, and has answered all its requests."""
        if number == self._number and self._acceptor is not None:
            self._acceptor.take(client, address_of_peer(client), Phase.IDLE)
        else:
            client.close()

    def _on_refused(self, client: str, error: Exception) -> None:
        if not self._is_full:
            self._is_full = True
            numbers = {"of_instance": self.connections, "of_all": self._owner.connections}
            log.warning("too many connections, new ones are refused", extra={"instance": self._name, **numbers})

    def _stream(self, ticket: Ticket) -> asyncio.BaseProtocol:
        return GatedStream(ticket, partial(self._connected, ticket), STREAM_BYTES)

    def _connected(self, ticket: Ticket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near = NearEnd(reader, writer, STALL_S)
        self._is_full = False
        if self._is_over:
            near.reset()
            return
        task = asyncio.create_task(self._forward(near, ticket), context=Context())
        self._tasks[task] = ""
        task.add_done_callback(self._tasks.pop)

    async def _forward(self, near: NearEnd, ticket: Ticket) -> None:
        try:
            if not await near.begun():
                near.close()
                return
            ticket.enter(Phase.ANSWER)
            link = await self._connect()
        except (OSError, Unavailable) as error:
            log.debug("a connection was refused", extra={"instance": self._name, "reason": str(error)})
            near.reset()
            return
        except BaseException:
            near.reset()
            raise
        try:
            await near.relay(link, is_worker=False)
            near.close()
            await link.finish(STALL_S)
        except (OSError, Unavailable) as error:
            near.reset()
            reason = str(error) or type(error).__name__
            log.debug("a connection broke", extra={"instance": self._name, "node": link.host, "reason": reason})
        except BaseException:
            near.reset()
            raise
        finally:
            await link.close()

    async def _connect(self) -> HostLink:
        """A link to a host that is connected to the port there. Raises Unavailable."""
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(_TRIES_LIMIT_S):
                for host in self._by_load():
                    self._tasks[task] = host
                    self._taken[host] += 1
                    try:
                        link = await self._connect_by(host)
                    except TeimgrError as error:
                        self._note_failure(host, error.message)
                        continue
                    self._failed_at.pop(host, None)
                    return link
        except TimeoutError:
            raise Unavailable(f"no host answered within {_TRIES_LIMIT_S:g} s") from None
        raise Unavailable("no host answered")

    async def _connect_by(self, host: str) -> HostLink:
        address, workers = self._owner.hosts.now.get(host), self._replicas.get(host)
        if address is None or not workers:
            raise Unavailable(f"{host}: no longer has a replica")
        link = await connect(address, self._owner.identity, CONNECT_LIMIT_S)
        try:
            await link.send(op="forward", workers=list(workers))
            await link.receive(CONNECT_LIMIT_S)
        except BaseException:
            await link.close()
            raise
        return link

    def _by_load(self) -> list[str]:
        """The hosts: those last that just failed; the fewest connections for each replica first, equal ones in turn."""
        under_way, failed_since = Counter(self._tasks.values()), asyncio.get_running_loop().time() - _AVOIDED_S

        def load(host: str) -> tuple[bool, float, int]:
            has_failed = self._failed_at.get(host, failed_since) > failed_since
            return has_failed, under_way[host] / len(self._replicas[host]), self._taken[host]

        return sorted(self._replicas, key=load)

    def _note_failure(self, host: str, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._failed_at.get(host, -_AVOIDED_S) >= _AVOIDED_S:  # a repeated failure was logged before
            self._failed_at[host] = now
            log.warning("connections are not forwarded", extra={"instance": self._name, "node": host, "reason": reason})


async def _any_change(changed: asyncio.Event, limit_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await changed.wait()
