"""Sections of the settings: `[cluster]` (several hosts with Ray), `[batches]`, `[on_demand]`."""

# ruff: noqa: RUF009  `key` is dataclasses.field with metadata; it makes a new field at every call

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from teimgr.config.schema import ConfigFault
from teimgr.models.hub import ModelsFrom
from teimgr.models.source import is_hub_id
from teimgr.spec import U16, U32, UNPRIVILEGED_PORT, key

MAX_LABELS = 64
MIN_RAY_PORTS = 16
"""Minimum: Ray's servers need six, each worker and each process of Ray one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Times are in seconds. Without an address the fleet has one host, and Ray is neither imported nor started."""

    address: str = key("", "ADDRESS:PORT of this host for Ray and for hosts that join; empty: a fleet of one host")
    node: str = key("", "name of this host in the fleet; empty: its host name")
    labels: Mapping[str, str] = key(dict, "labels of this host that instances can require: {zone: a}")
    enrolment_port: int = key(
        0, "port where hosts join and renew certificates; 0: the port after that of `address`", 0, U16
    )
    token_file: Path | None = key(
        None,
        "file of Ray's token, created if absent and sent to hosts that join; default: ray-token beside the state file",
    )
    ray_dir: Path | None = key(
        None, "folder of Ray's sessions, at most 40 bytes long; default: ray/ in run_dir, or one in /tmp"
    )
    ray_port_start: int = key(0, "first port of Ray besides that of address, for firewalls; 0: any free port", 0, U16)
    ray_port_end: int = key(0, "port after the last one of Ray", 0, U16 + 1)
    mux_per_host: bool = key(False, "run a multiplexer on grpc_port of every host; false: only on this host")
    models_from: ModelsFrom = key(
        "hub-first",
        "where a host looks for a model that its cache lacks; neighbours are the other hosts, asked at once where the "
        "hub is offline",
    )
    models_mb_per_sec: int = key(200, "MiB per second of model files that each host sends to others", 1, U16)
    store: Literal["memory", "rocksdb"] = key(
        "memory", "storage of Ray's tables; rocksdb survives a restart of Ray, and is alpha in Ray 2.60"
    )
    placement_timeout_secs: float = key(30.0, "time limit for Ray to place a worker", 1, 3600)
    health_check_period_secs: float = key(1.0, "interval of Ray's checks of a host", 0.1, 600)
    health_check_timeout_secs: float = key(1.0, "time limit of a check of a host", 0.1, 600)
    health_check_failures: int = key(3, "failed checks in a row after which a host is lost", 1, 100)
    head_outage_secs: int = key(
        600, "hosts end their workers after this time without a connection to Ray's head", 1, U32
    )
    object_store_mb: int = key(
        80, "shared memory of Ray's object store on each host, MiB; vectors never use it", 76, U32
    )

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def ray_ports(self) -> range:
        return range(self.ray_port_start, self.ray_port_end)

    @property
    def enrolment(self) -> int:
        """The port of enrolment."""
        return self.enrolment_port or self.port + 1


def faults(cluster: ClusterSettings) -> Iterator[ConfigFault]:
    """Rules beyond types and limits."""
    if cluster.address and (problem := address_problem(cluster.address)):
        yield ConfigFault("cluster.address", problem)
    elif cluster.address and not cluster.port != cluster.enrolment <= U16:
        yield ConfigFault("cluster.enrolment_port", f"must be another port than that of address, of 1 to {U16}")
    elif cluster.address and cluster.port in cluster.ray_ports:
        yield ConfigFault("cluster.ray_port_start", f"the ports contain that of cluster.address, {cluster.port}")
    elif cluster.address and cluster.enrolment in cluster.ray_ports:
        yield ConfigFault("cluster.ray_port_start", f"the ports contain that of enrolment, {cluster.enrolment}")
    if problem := ray_ports_problem(cluster.ray_ports):
        yield ConfigFault("cluster.ray_port_end", problem)
    if len(cluster.labels) > MAX_LABELS:
        yield ConfigFault("cluster.labels", f"has {len(cluster.labels)} labels, over {MAX_LABELS}")


def ray_ports_problem(ports: range) -> str | None:
    """The sentence that refuses ports which are too few, or privileged; none at all mean any that are free."""
    if ports.start == ports.stop == 0:
        return None
    if ports.start < UNPRIVILEGED_PORT:
        return f"ray_port_start must be at least {UNPRIVILEGED_PORT} (got {ports.start})"
    if len(ports) < MIN_RAY_PORTS:
        return f"must be at least {MIN_RAY_PORTS} above ray_port_start (got {ports.start} and {ports.stop})"
    return None


def address_problem(address: str) -> str | None:
    """The sentence that refuses an address which is not a numeric one with a port."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 1 <= int(port) <= U16:
        return f"must be ADDRESS:PORT with a port of 1 to {U16} (got {address!r})"
    try:
        numeric = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return f"must have a numeric address, by which other hosts reach this one (got {host!r})"
    if numeric.is_unspecified or numeric in (ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")):
        return f"must be an address by which other hosts reach this one (got {host!r})"
    return None


def address_on_host(host: str, head: str, own: str) -> str:
    """Where another host of the fleet listens for what the head has at `host`: on the same where that is loopback, all,
    or a name that each host resolves, but not the head's address in the fleet; else on its `own`.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return host if host != head and (address.is_loopback or address.is_unspecified) else own


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Limits of `/v1/files` and `/v1/batches`, which use the folder `batches` beside the state file."""

    enabled: bool = key(True, "serve /v1/files and /v1/batches")
    max_file_mb: int = key(200, "largest uploaded file, MiB", low=1, high=U32)
    max_key_mb: int = key(4096, "files of one API key, including results of its batches, MiB", low=1, high=U32)
    max_total_mb: int = key(16384, "files of all keys, MiB", low=1, high=U32)
    max_files: int = key(1000, "files of one API key", low=1, high=100_000)
    max_batches: int = key(100, "unfinished batches of one API key", low=1, high=10_000)
    max_lines: int = key(50_000, "requests of one batch", low=1, high=1_000_000)
    max_line_kb: int = key(
        2048, "largest line of an input file, KiB; at most inference_max_body_mb counts", low=1, high=16384
    )
    concurrency: int = key(64, "requests of all batches in the workers at a time", low=1, high=1024)
    retention_days: int = key(
        30, "days until ended batches, and files without expires_after, are deleted", low=1, high=3650
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDemandSettings:
    """A call with a model id in `models` creates an instance of it, with `load = "on_demand"`."""

    models: tuple[str, ...] = key((), "patterns of hub ids, such as 'BAAI/bge-*', that calls may load; empty: no model")
    idle_timeout_secs: int = key(600, "idle_timeout_secs of instances created by calls", low=0, high=U32)
    max_instances: int = key(100, "maximum number of instances created by calls", low=1, high=10_000)


def allows(patterns: Sequence[str], model_id: str) -> bool:
    """True if a call may have a model loaded: it is a hub id, and one of the patterns fits."""
    return bool(patterns) and is_hub_id(model_id) and any(fnmatchcase(model_id, each) for each in patterns)
