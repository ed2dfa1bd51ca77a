"""`teimgr node join`: a host of the cluster besides the head: Ray's node, and the agent that forks workers here.

The process stays in the foreground. SIGINT, SIGTERM or `teimgr node leave` make the host leave: the daemon moves its
workers elsewhere, and what is left after the grace is stopped. Killed, it leaves Ray and the workers running, and the
next one takes them over.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from teimgr.cluster.agent import Agent
from teimgr.cluster.host_facts import HostDescription, own_versions
from teimgr.cluster.messages import (
    LINE_LIMIT_BYTES,
    NodeFacts,
    Versions,
    agent_socket,
    read_message,
    write_message,
)
from teimgr.cluster.ray_process import RayHost, RayProcess, check_token, ray_folder
from teimgr.config.cluster import ClusterSettings, address_problem
from teimgr.errors import InvalidConfig, TeimgrError, Unavailable
from teimgr.launch.launcher import LocalLauncher, LocalOptions
from teimgr.launch.process_handle import LaunchFailed
from teimgr.observability import logs
from teimgr.observability.memory import raise_file_limit
from teimgr.placement.planner import GpuInventory, usable_cores

EXIT_REFUSED = 1
VERSIONS_LIMIT_S = 60.0
_STOP_GRACE_S = 5.0
_CONNECT_LIMIT_S = 5.0

_DEFAULTS = ClusterSettings()

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What a host joins with. `head` is `[cluster] address` of the daemon; `address` is this host's, empty: chosen.

    `token_file` is a copy of the head's. `grace_s` limits the move of workers elsewhere when it leaves, in seconds.
    """

    head: str
    state_dir: Path
    token_file: Path
    address: str = ""
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    ray_dir: Path | None = None
    grace_s: float = 120.0
    object_store_mb: int = _DEFAULTS.object_store_mb

    @property
    def run_dir(self) -> Path:
        return self.state_dir.absolute() / "run"


def main(options: NodeOptions) -> int:
    """Be a host of the cluster until a signal or `teimgr node leave`; the result is the exit status."""
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
        own_versions()
        self._options = options
        run_dir = options.run_dir
        self._local = LocalLauncher(LocalOptions(run_dir=run_dir, log_dir=options.state_dir.absolute() / "logs"))
        self._host = HostDescription(options.name, options.labels, GpuInventory())
        self._agent = Agent(self._local, run_dir, self._facts)

    async def run(self) -> None:
        """Join, and return when the host has left.

        Raises:
            InvalidConfig: the versions differ from the daemon's, or a file or folder cannot be used.
            Unavailable: the head does not answer.
        """
        options, run_dir = self._options, self._options.run_dir
        check_token(options.token_file)
        await self._local.start()  # makes the run directory, and locks it
        try:
            host = RayHost(
                node_ip=options.address or _address_towards(options.head),
                ray_dir=ray_folder(options.ray_dir, run_dir),
                token_file=options.token_file,
                agent_socket=self._agent.socket,
                cores=usable_cores(),
            )
            await self._check_versions(host)
            await self._agent.start()
            command = host.node_command(options.head, options.object_store_mb)
            ray = RayProcess(command, host.environ(), run_dir, run_dir / "ray.log")
            try:
                ray.start()
                log.info("host joins", extra={"node": self._host.name, "head": options.head, "address": host.node_ip})
                await self._until_left()
            except LaunchFailed as error:
                raise Unavailable(str(error)) from error
            finally:
                await ray.stop()
        finally:
            await self._agent.close()
            await self._local.close()
        log.info("host left", extra={"node": self._host.name})

    async def _until_left(self) -> None:
        """Return when the host is to leave and has no workers any more, or the grace is over."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._agent.leaving.set)
        await self._agent.leaving.wait()
        log.info("host leaves", extra={"workers": self._agent.workers, "grace_s": self._options.grace_s})
        if not await self._agent.emptied(self._options.grace_s):
            log.warning("workers are stopped with their host", extra={"workers": self._agent.workers})
            await self._agent.stop_workers(_STOP_GRACE_S)

    async def _facts(self) -> NodeFacts:
        return await self._host.facts(self._agent.workers, draining=self._agent.leaving.is_set())

    async def _check_versions(self, host: RayHost) -> None:
        """Compare the versions here with those that the daemon has published in the cluster."""
        head, own = self._options.head, own_versions()
        ends = asyncio.get_running_loop().time() + VERSIONS_LIMIT_S
        while (published := await _published(head, host)) is None:
            if asyncio.get_running_loop().time() > ends:
                raise Unavailable(f"no daemon of teimgr at {head}: Ray answers there, and has no versions of one")
            await asyncio.sleep(1)
        if different := published.differences(own):
            raise InvalidConfig(f"versions differ from the daemon's: {different}; install the same on this host")


async def _published(head: str, host: RayHost) -> Versions | None:
    """The daemon's versions, by a process of its own, as Ray's library may end the one that uses it.

    Raises:
        Unavailable: Ray does not answer there, or refuses the token.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "teimgr.cluster.bridge_process", "versions", head),
        env=host.environ(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(VERSIONS_LIMIT_S):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise Unavailable(f"Ray does not answer at {head} within {VERSIONS_LIMIT_S:g} s") from None
    if process.returncode:
        reason = errors.decode(errors="replace").strip().splitlines()
        raise Unavailable(f"Ray does not answer at {head}: {reason[-1] if reason else 'no message'}")
    text = output.decode().strip()
    return Versions(**json.loads(text)) if text else None


async def leave(state_dir: Path) -> AsyncIterator[int]:
    """Have the host of `state_dir` leave; yields the number of its workers as they become fewer, 0 at last.

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
        write_message(writer, op="leave")
        while (message := await read_message(reader)) is not None:
            if "left" in message:
                return
            yield int(message["workers"])
        raise Unavailable("the host stopped before its workers were moved")
    finally:
        writer.close()


def _address_towards(head: str) -> str:
    """The address of this host from which it reaches the head. Raises Unavailable."""
    host, _, port = head.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host.strip("[]"), int(port)))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Unavailable(f"no route to {head}: {error.strerror}") from error
