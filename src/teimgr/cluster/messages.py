"""Messages between daemon, bridge, node agents and actors: the values in their JSON lines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from teimgr.control.launch.process_handle import Exit, ExitReport, ProcessId
from teimgr.models.hub import ModelsFrom
from teimgr.observability.logs import LogLines
from teimgr.spec import known
from teimgr.wire.json_messages import read_line

LINE_LIMIT_BYTES = 1 << 20
_LOG_BYTES = 64 << 10

AGENT_SOCKET = "agent.sock"
"""Name of the node agent's socket in the run directory."""
AGENT_VARIABLE = "TEIMGR_AGENT"
"""Environment variable of Ray's processes on a host: the path of the agent's socket."""
NAMESPACE = "teimgr"
"""Ray's namespace of all our actors."""


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message; None at the end of the stream, or if it is broken."""
    try:
        return await read_line(reader)
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWorker:
    """A worker or mux process on some host. `spec` is JSON, `started_at` epoch seconds, `start_time` that of
    `ProcessId`. `address` is where a mux listens for the daemon; a worker's is in its spec.
    """

    spec: str
    incarnation: str
    pid: int
    start_time: int
    socket: str
    run_dir: str
    log_path: str
    started_at: float
    address: str = ""

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.start_time)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**known(cls, values))


def exit_to_dict(exit: Exit) -> dict[str, Any]:
    """Return an exit as plain values, with the last lines of its log: the file is on the worker's host."""
    return {
        "status": exit.status,
        "report": asdict(exit.report) if exit.report else None,
        "log_tail": exit.log_tail,
        "log": exit.log.read(_LOG_BYTES) if exit.log else [],
    }


def exit_from_dict(values: Mapping[str, Any]) -> Exit:
    report = ExitReport(**known(ExitReport, values["report"])) if values["report"] else None
    return Exit(values["status"], report, values["log_tail"], LogLines(tuple(values["log"])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Versions that must be equal on all hosts of a fleet."""

    teimgr: str
    ray: str
    python: str
    torch: str

    def differences(self, other: Versions) -> str:
        """Return `teimgr 0.2 (here 0.3)` for each version that differs from `other`, the daemon's; empty if all are
        equal."""
        ours, theirs = asdict(other), asdict(self)
        return ", ".join(f"{name} {theirs[name]} (here {ours[name]})" for name in ours if ours[name] != theirs[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One host, as its agent describes it. `cards` are those of `placement.gpus.Gpu` as plain values.

    `draining` is set where the host is about to leave, `workers` counts its live workers. `service` is the address
    (`host:port`) of its service for other hosts. `disk_free_bytes` are free in its folder for models; `clock` is its
    own, in seconds since the epoch. `problem` is why it can start no workers, empty where it can.
    """

    name: str
    versions: Versions
    labels: Mapping[str, str]
    cores: int
    memory_total_bytes: int
    memory_free_bytes: int
    cards: list[dict[str, Any]] = field(default_factory=list)
    no_cards_reason: str = ""
    workers: int = 0
    draining: bool = False
    service: str = ""
    disk_free_bytes: int | None = None
    clock: float = 0.0
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**{**known(cls, values), "versions": Versions(**known(Versions, values["versions"]))})


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    """What the daemon sends to every host with each question for its facts.

    `removed` is as `fleet_tls.REMOVED_FILE` has it. `services` are the hosts with the addresses of their services, the
    daemon's own first; None while the daemon does not know them. `models_from` and `models_mb_per_sec` are those of
    `[cluster]`.
    """

    removed: Mapping[str, float] = field(default_factory=dict)
    services: Sequence[tuple[str, str]] | None = None
    models_from: ModelsFrom = "hub-first"
    models_mb_per_sec: int = 200

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        services = values["services"]
        addresses = None if services is None else tuple((str(name), str(address)) for name, address in services)
        return cls(**{**known(cls, values), "services": addresses})


def agent_socket(run_dir: Path) -> Path:
    return run_dir / AGENT_SOCKET
