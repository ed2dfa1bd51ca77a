"""`teimgr node join`: a host of the cluster besides the head: Ray's node, and the agent that forks workers here.

It is admitted by the daemon's port of enrolment, where it gets its certificate in the fleet and Ray's token, and renews
the certificate while it runs.

The process stays in the foreground. SIGINT, SIGTERM or `teimgr node leave` make the host leave: the daemon moves its
workers elsewhere, and what is left after the grace, or at a second signal, is stopped. Killed, it leaves Ray and the
workers running, and the next one takes them over.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from teimgr.cluster.agent import Agent, NodeMuxes
from teimgr.cluster.authority import fingerprint, new_request, utc_now
from teimgr.cluster.enrolment import JoinToken
from teimgr.cluster.enrolment_server import MAX_LINE_BYTES
from teimgr.cluster.host_facts import HostDescription, own_versions
from teimgr.cluster.host_models import HostModels
from teimgr.cluster.host_service import HostListener, HostService
from teimgr.cluster.messages import LINE_LIMIT_BYTES, NodeFacts, Versions, agent_socket, read_message
from teimgr.cluster.ray_process import UNRESTRICTED, RayHost, RayProcess, library, ray_folder
from teimgr.config.sections import ClusterSettings, address_problem, ray_ports_problem
from teimgr.control.launch.launcher import LocalLauncher, LocalOptions
from teimgr.control.launch.process_handle import LaunchFailed
from teimgr.control.placement.hosts import GpuInventory
from teimgr.control.placement.planner import usable_cores
from teimgr.errors import Forbidden, InvalidConfig, TeimgrError, Unauthenticated, Unavailable, error_from_code
from teimgr.files import write_atomically
from teimgr.observability import logs
from teimgr.observability.log_source import LocalLogs
from teimgr.observability.memory import raise_file_limit
from teimgr.wire.fleet_tls import (
    IDENTITY_FILE,
    FleetIdentity,
    FleetName,
    check_node_name,
    new_context,
    peer_of,
    write_identity,
)
from teimgr.wire.json_messages import read_line, write_line

_LIMIT_S = 15.0
_RENEW_AT = 1 / 3
"""The part of a certificate's life after which it is renewed."""
_RETRY_S = 60.0
_NOT_VALID_NOW = (9, 10)
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL's x509_vfy.h; `ssl` does not name them."""
_MIN_PAUSE_S = 60.0
"""Minimum time between two renewals, for a host whose clock is so far ahead that each certificate looks expired."""


async def admission(host: str, port: int, identity: FleetIdentity, token: str, versions: Versions) -> str:
    """Be admitted to the fleet by the certificate that this node has, else by a join token; return Ray's token.

    With a certificate a token is not needed, and tried only if the certificate is refused, as after a removal.

    Raises:
        InvalidConfig: there is neither. For others see `join`.
    """
    if has_certificate(identity):
        try:
            return await enter(host, port, identity, versions)
        except (Unauthenticated, Forbidden) as error:
            if not token:
                raise
            log.warning("this node's certificate was refused, trying its token", extra={"reason": error.message})
    if not token:
        raise InvalidConfig(
            f"node '{identity.node}' has no valid certificate of the fleet in {identity.folder}: join with a token, "
            "which `teimgr cluster token` on the daemon's host makes"
        )
    return await join(host, port, token, identity, versions)


async def join(host: str, port: int, token: str, identity: FleetIdentity, versions: Versions) -> str:
    """Get a certificate from the daemon at an address, for the node and the folder of `identity`; returns Ray's token.

    The private key is made here. The daemon is recognised by the authority whose fingerprint the token has.

    Raises:
        ValidationError: the token or the name is malformed.
        InvalidConfig: the versions differ from the daemon's, or this host's clock is too late for its certificates.
        Unauthenticated, Forbidden: the daemon refuses the token, or is not the one that made it; or its certificate is
            not valid by this host's clock.
        Unavailable: the daemon cannot be reached.
        OSError: the files cannot be written.
    """
    parsed = JoinToken.parse(token)
    check_node_name(identity.node)
    blind = new_context(ssl.PROTOCOL_TLS_CLIENT)
    blind.verify_mode = ssl.CERT_NONE  # the answer is compared with the token, and nothing secret is sent
    offered = await _ask(host, port, blind, {"op": "authorities"})
    pinned = _pinned(offered.get("authorities"), parsed.fingerprint)
    context = new_context(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=pinned)
    message = {"op": "join", "token": str(parsed), "node": identity.node, **_about_this_host(versions)}
    answer = await _take(host, port, context, message, identity.folder)
    log.info("joined the fleet", extra={"node": identity.node})
    return _ray_token(answer)


async def enter(host: str, port: int, identity: FleetIdentity, versions: Versions) -> str:
    """Like `join`, authenticated by the present certificate."""
    message = {"op": "enter", **_about_this_host(versions)}
    return _ray_token(await _take(host, port, identity.client_context(), message, identity.folder))


async def renew(host: str, port: int, identity: FleetIdentity) -> None:
    """Replace the node's key and certificate, authenticated by the present one.

    Raises:
        InvalidConfig: the identity is missing. Others as `join`.
    """
    await _take(host, port, identity.client_context(), {"op": "renew"}, identity.folder)


async def keep_renewed(host: str, port: int, identity: FleetIdentity) -> None:
    """Renew the certificate after a third of its life, and every minute while that fails, until cancelled."""
    while True:
        try:
            if (pause_s := seconds_to_renewal(identity.folder)) <= 0:
                await renew(host, port, identity)
                pause_s = _MIN_PAUSE_S
        except (TeimgrError, OSError, ValueError) as error:  # ValueError: the file is being written
            log.warning("the node's certificate was not renewed", extra={"reason": str(error)})
            pause_s = _RETRY_S
        await asyncio.sleep(pause_s)


def has_certificate(identity: FleetIdentity) -> bool:
    """True if the identity's folder has a certificate of its node that has not expired."""
    try:
        certificate = x509.load_pem_x509_certificate((identity.folder / IDENTITY_FILE).read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return uris == [FleetName(identity.node).uri] and utc_now() < certificate.not_valid_after_utc


def seconds_to_renewal(folder: Path) -> float:
    """Until the certificate in `folder` is to be renewed; 0 or less if it is due. Raises OSError, ValueError."""
    certificate = x509.load_pem_x509_certificate((folder / IDENTITY_FILE).read_bytes())
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return (begins + (ends - begins) * _RENEW_AT - utc_now()).total_seconds()


def _pinned(authorities: Any, expected: str) -> str:
    """The certificate among `authorities`, PEM, that has the expected fingerprint."""
    try:
        offered = x509.load_pem_x509_certificates(str(authorities).encode())
    except ValueError:
        offered = []
    for certificate in offered:
        if fingerprint(certificate) == expected:
            return certificate.public_bytes(Encoding.PEM).decode()
    raise Unauthenticated("what listens at this address is not the daemon that made the join token")


async def _take(host: str, port: int, context: ssl.SSLContext, message: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Send a request for a certificate of a new key, write the identity that the daemon answers with; returns all."""
    key, request = new_request()
    answer = await _ask(host, port, context, message | {"request": request.decode()})
    try:
        certificate, authorities = answer["certificate"].encode(), answer["authorities"].encode()
    except (KeyError, AttributeError) as error:
        raise Unavailable(f"the daemon's answer has no certificate: {error!r}") from error
    await asyncio.to_thread(write_identity, folder, key, certificate, authorities)
    return answer


def _about_this_host(versions: Versions) -> dict[str, Any]:
    """What the daemon compares with its own before it admits a node."""
    return {"versions": asdict(versions), "clock": utc_now().timestamp()}


def _ray_token(answer: dict[str, Any]) -> str:
    if not isinstance(token := answer.get("ray_token"), str):
        raise Unavailable("the daemon's answer lacks Ray's token")
    return token


async def _ask(host: str, port: int, context: ssl.SSLContext, message: dict[str, Any]) -> dict[str, Any]:
    """Send one request to the enrolment port; the result is its answer."""
    writer = None
    try:
        async with asyncio.timeout(_LIMIT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=MAX_LINE_BYTES)
            if (
                context.verify_mode is ssl.CERT_REQUIRED
                and not peer_of(writer.get_extra_info("ssl_object")).name.is_daemon
            ):
                raise Unauthenticated(f"{host}:{port} is not the daemon of the fleet")
            write_line(writer, **message)
            await writer.drain()
            answer = await read_line(reader)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _NOT_VALID_NOW:
            raise Unauthenticated(
                f"{host}:{port}: {error.verify_message} by this host's clock, {utc_now():%Y-%m-%d %H:%M:%S} UTC: set it"
            ) from error
        raise Unauthenticated(f"{host}:{port} is not of this fleet: {error.verify_message}") from error
    except (OSError, ValueError) as error:  # TimeoutError is an OSError
        raise Unavailable(f"{host}:{port}: {error or 'no answer'}") from error
    finally:
        if writer is not None:
            writer.close()
    if answer is None:
        raise Unavailable(f"{host}:{port}: no answer")
    if "error" in answer:
        raise error_from_code(int(answer["error"]["code"]), str(answer["error"]["message"]))
    return answer


EXIT_REFUSED = 1
ADMISSION_LIMIT_S = 60.0
_RETRY_PAUSE_S = 1.0
_STOP_GRACE_S = 5.0
_CONNECT_LIMIT_S = 5.0

_DEFAULTS = ClusterSettings()

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What a host joins with. `head` is `[cluster] address` of the daemon; `address` is this host's, empty: chosen.

    `token` is a join token, needed while the host has no certificate; `enrolment_port` is the head's, 0: the one after
    that of `head`. `grace_s` limits the move of workers elsewhere when it leaves, in seconds.
    """

    head: str
    state_dir: Path
    token: str = ""
    enrolment_port: int = 0
    address: str = ""
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    ray_dir: Path | None = None
    grace_s: float = 120.0
    ray_ports: range = range(0)
    object_store_mb: int = _DEFAULTS.object_store_mb

    @property
    def run_dir(self) -> Path:
        return self.state_dir.absolute() / "run"


def main(options: NodeOptions) -> int:
    """Run a host of the cluster until a signal or `teimgr node leave`; return the exit status."""
    logs.setup("info", "json")
    raise_file_limit()
    try:
        uvloop.run(Node(options).run())
    except TeimgrError as error:
        log.critical("cannot join: %s", error.message, extra={"code": error.code.name})
        return EXIT_REFUSED
    return 0


class Node:
    """The parts of a host, started and stopped in order."""

    def __init__(self, options: NodeOptions) -> None:
        if problem := address_problem(options.head):
            raise InvalidConfig(f"address: {problem}")
        if options.address and (problem := address_problem(f"{options.address}:1")):
            raise InvalidConfig(f"host_address: {problem}")
        if problem := ray_ports_problem(options.ray_ports):
            raise InvalidConfig(f"ray_port_end: {problem}")
        self._versions = own_versions()
        self._options = options
        run_dir, state_dir = options.run_dir, options.state_dir.absolute()
        self._node_ip = options.address or _address_towards(options.head)
        self._local = LocalLauncher(LocalOptions(run_dir=run_dir, log_dir=state_dir / "logs"))
        folders = (run_dir, state_dir / "logs")
        self._host = HostDescription(options.name, options.labels, GpuInventory(), folders)
        self._identity = FleetIdentity(state_dir / "identity", self._host.name)
        self._token_file = state_dir / "ray-token"
        self._listener: HostListener | None = None
        muxes = NodeMuxes(run_dir, state_dir / "logs", self._host.name, self._node_ip, self._identity.folder)
        head_address = options.head.rpartition(":")[0].strip("[]")
        self._agent = Agent(
            self._local, run_dir, self._facts, self._node_ip, self._identity.folder, muxes, head_address
        )
        models = HostModels(lambda: self._agent.models_bytes_per_s)
        self._service = HostService(LocalLogs(state_dir / "logs", self._host.name), models, self._agent.port_of)

    async def run(self) -> None:
        """Join, and return when the host has left.

        Raises:
            InvalidConfig: the versions differ from the daemon's, or a file or folder cannot be used.
            Unauthenticated, Forbidden: the daemon does not admit this host.
            Unavailable: the daemon does not answer.
        """
        options, run_dir = self._options, self._options.run_dir
        await self._local.start()  # makes the run directory, and locks it
        renewal: asyncio.Task[None] | None = None
        try:
            host = RayHost(
                node_ip=self._node_ip,
                ray_dir=ray_folder(options.ray_dir, run_dir),
                token_file=self._token_file,
                agent_socket=self._agent.socket,
                cores=usable_cores(),
                ports=options.ray_ports,
            )
            if library() is None:
                log.warning(UNRESTRICTED)
            await self._be_admitted()
            renewal = asyncio.create_task(keep_renewed(*self._enrolment, self._identity), name="renewal")
            self._listener = HostListener(self._service, self._identity, self._node_ip)
            self._listener.start()
            await self._agent.start()
            command = host.node_command(options.head, options.object_store_mb)
            ray = RayProcess(command, host.environ(), run_dir, host.ray_dir, run_dir / "ray.log", options.head)
            try:
                await ray.start()
                log.info("host joins", extra={"node": self._host.name, "head": options.head, "address": host.node_ip})
                serving = asyncio.create_task(self._tell_that_it_serves(), name="until the host serves")
                try:
                    await self._until_left()
                finally:
                    serving.cancel()
            except LaunchFailed as error:
                raise Unavailable(str(error)) from error
            finally:
                await ray.stop()
        finally:
            if renewal is not None:
                renewal.cancel()
                await asyncio.wait({renewal})
            if self._listener is not None:
                await self._listener.close()
            await self._agent.close()
            await self._local.close()
        log.info("host left", extra={"node": self._host.name})

    async def _tell_that_it_serves(self) -> None:
        await self._agent.listed(self._host.name)
        if problem := (await self._facts()).problem:
            log.warning("host %s takes no workers", self._host.name, extra={"reason": problem})
        else:
            log.info("host %s serves", self._host.name, extra={"head": self._options.head})

    async def _until_left(self) -> None:
        """Wait until the host is leaving and has no workers, or the grace is over."""
        loop, leaving, second_signal = asyncio.get_running_loop(), self._agent.leaving, asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: (second_signal if leaving.is_set() else leaving).set())
        await leaving.wait()
        log.info("host leaves", extra={"workers": self._agent.workers, "grace_s": self._options.grace_s})
        emptied = asyncio.ensure_future(self._agent.emptied(self._options.grace_s))
        hurried = asyncio.ensure_future(second_signal.wait())
        try:
            await asyncio.wait({emptied, hurried}, return_when=asyncio.FIRST_COMPLETED)
            is_empty = emptied.done() and emptied.result()
        finally:
            emptied.cancel()
            hurried.cancel()
            await asyncio.wait({emptied, hurried})
        if not is_empty:
            log.warning("workers are stopped with their host", extra={"workers": self._agent.workers})
            await self._agent.stop_workers(_STOP_GRACE_S)

    async def _facts(self) -> NodeFacts:
        agent, service = self._agent, self._listener.address if self._listener else ""
        return await self._host.facts(agent.workers, draining=agent.leaving.is_set(), service=service)

    @property
    def _enrolment(self) -> tuple[str, int]:
        """Return host and port of the daemon's enrolment."""
        host, _, port = self._options.head.rpartition(":")
        return host.strip("[]"), self._options.enrolment_port or int(port) + 1

    async def _be_admitted(self) -> None:
        """Get or renew the certificate, and write Ray's token; wait for a daemon that is being started."""
        ends = asyncio.get_running_loop().time() + ADMISSION_LIMIT_S
        while True:
            try:
                token = await admission(*self._enrolment, self._identity, self._options.token, self._versions)
                break
            except Unavailable as error:
                if asyncio.get_running_loop().time() > ends:
                    raise
                log.warning("the daemon does not answer yet", extra={"reason": error.message})
                await asyncio.sleep(_RETRY_PAUSE_S)
        try:
            write_atomically(self._token_file, token.encode(), mode=0o600, durable=True)
        except OSError as error:
            raise InvalidConfig(f"{self._token_file}: {error.strerror}") from error


async def leave(state_dir: Path) -> AsyncIterator[int]:
    """Make the host of `state_dir` leave; yields the number of its workers as they become fewer, 0 at last.

    Raises:
        Unavailable: no `teimgr node join` runs with this folder, or it ended.
    """
    path = agent_socket(state_dir.absolute() / "run")
    try:
        async with asyncio.timeout(_CONNECT_LIMIT_S):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=LINE_LIMIT_BYTES)
    except OSError as error:
        raise Unavailable(f"no host runs with the folder {state_dir}: {str(error) or 'timeout'}") from error
    try:
        write_line(writer, op="leave")
        while (message := await read_message(reader)) is not None:
            if "left" in message:
                return
            yield int(message["workers"])
        raise Unavailable("the host stopped before its workers were moved")
    finally:
        writer.close()


def _address_towards(head: str) -> str:
    """Return the address of this host from which it reaches the head. Raises Unavailable."""
    host, _, port = head.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host.strip("[]"), int(port)))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Unavailable(f"no route to {head}: {error.strerror}") from error
