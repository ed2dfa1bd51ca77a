"""The muxes on a host of a cluster, for its agent: started, and found again after a restart of the agent.

The daemon sends a mux's configuration without what belongs to the host: folder, certificate, and the socket on which it
listens for the daemon.
"""

from __future__ import annotations

import json
import logging
import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from teimgr.config.mux import MuxConfig
from teimgr.control.launch.mux_launcher import BESIDE, LocalMux, MuxPaths, MuxRunFile, spawn_mux
from teimgr.control.launch.process_handle import Exit, new_incarnation
from teimgr.files import write_atomically
from teimgr.http.server import address_of, bind
from teimgr.spec import known

log = logging.getLogger(__name__)

_BACKLOG = 16
_LOG_MAX_BYTES, _LOG_KEEP = 10 << 20, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MuxFacts:
    """A mux in the list of its agent: `spec` as the daemon sent it, `address` where it listens for the daemon."""

    name: str
    incarnation: str
    address: str
    spec: str


class NodeMux:
    """One mux on this host, by its process."""

    def __init__(self, process: LocalMux, paths: MuxPaths, facts: MuxFacts) -> None:
        self.name = facts.name
        self.incarnation = facts.incarnation
        self.address = facts.address
        self.spec_json = facts.spec
        self.pid = process.pid
        self.socket = process.socket
        self.log_path = process.log_path
        self.started_at = process.started_at
        self._process = process
        self._paths = paths

    async def wait(self) -> Exit:
        """Return when the process is gone and its files are removed."""
        exit = await self._process.wait()
        self._paths.remove()
        _facts_file(self._paths).unlink(missing_ok=True)
        return exit

    async def stop(self, grace_s: float, *, sigterm: bool = True) -> Exit:
        """Like `ProcessHandle.stop`."""
        await self._process.stop(grace_s, sigterm=sigterm)
        return await self.wait()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


class NodeMuxes:
    """Starts muxes here. They listen for the daemon on `link_address`, with the certificate in `identity_dir`."""

    def __init__(self, run_dir: Path, log_dir: Path, node: str, link_address: str, identity_dir: Path) -> None:
        self._run_dir = run_dir
        self._log_dir = log_dir
        self._node = node
        self._link_address = link_address
        self._identity_dir = str(identity_dir)

    def launch(self, spec: str, *, beside: bool = False) -> NodeMux:
        """Start a mux of a spec, `mux_spec`; `beside` another one, which has its port.

        Raises:
            OSError: it cannot be started.
            TeimgrError, ValueError, KeyError, TypeError: the spec is not one, or the address is not of this host.
        """
        values = json.loads(spec)
        name, known_by, incarnation = str(values["name"]), str(values["known_by"]), new_incarnation()
        paths = MuxPaths(self._run_dir, f"{name}-{incarnation}")
        with bind(self._link_address, 0, "link_address") as listener:
            listener.listen(_BACKLOG)
            config = replace(
                MuxConfig.from_json(values["config"]),
                run_dir=str(self._run_dir),
                control_socket=str(paths.socket),
                node=self._node,
                identity_dir=self._identity_dir,
                incarnation=incarnation,
                control_fd=listener.fileno(),
            )
            facts = MuxFacts(name=name, incarnation=incarnation, address=address_of(listener), spec=spec)
            write_atomically(_facts_file(paths), json.dumps(asdict(facts)).encode())
            more = (BESIDE,) if beside else ()
            log_path = self._log_path(name)
            process = spawn_mux(paths, config, known_by, log_path, _LOG_MAX_BYTES, _LOG_KEEP, more=more)
        return NodeMux(process, paths, facts)

    def find(self) -> list[NodeMux]:
        """The live muxes of an earlier agent; the files of others are removed. Raises OSError."""
        found = []
        for path in self._run_dir.glob("mux-*.json"):
            paths = MuxPaths(self._run_dir, path.stem)
            run_file = MuxRunFile.read(paths.run_file)
            pidfd = run_file.open_pidfd() if run_file else None
            if run_file is None or pidfd is None:
                paths.remove()
                path.unlink(missing_ok=True)
                continue
            facts = MuxFacts(**known(MuxFacts, json.loads(path.read_text())))
            log_path, started_at = self._log_path(facts.name), run_file.process.started_at
            process = LocalMux(run_file.pid, pidfd, None, paths.socket, log_path, 0, started_at, True)
            found.append(NodeMux(process, paths, facts))
        return found

    def _log_path(self, name: str) -> Path:
        return self._log_dir / f"_{name}.log"


def mux_spec(name: str, known_by: str, config: MuxConfig) -> str:
    """What the daemon sends to start a mux; a running one with another spec has to be replaced."""
    return json.dumps({"name": name, "known_by": known_by, "config": config.to_json()})


def _facts_file(paths: MuxPaths) -> Path:
    return paths.folder / f"{paths.name}.json"
