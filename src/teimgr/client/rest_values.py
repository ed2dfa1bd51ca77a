"""Results of REST calls: frozen values read from JSON; unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from teimgr.spec import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One instance as REST shows it; keys that a server does not send are None. Timestamps are RFC 3339 in UTC.

    `details` is the whole JSON object, for keys that have no attribute here.
    """

    name: str
    model_id: str
    port: int
    status: State
    pid: int | None = None
    uptime_secs: int | None = None
    restarts: int = 0
    health_check_failures: int = 0
    last_health_check: str | None = None
    reason: str | None = None
    max_batch_tokens: int | None = None
    max_concurrent_requests: int | None = None
    max_waiting: int | None = None
    max_queue_wait_secs: int | None = None
    max_queued_tokens: int | None = None
    cache_bytes: int | None = None
    token_inputs: str | None = None
    token_encoding: str | None = None
    pooling: str | None = None
    gpu_id: int | None = None
    prometheus_port: int | None = None
    startup_timeout_secs: int | None = None
    extra_args: Sequence[str] | None = None
    created_at: str | None = None
    dtype: str | None = None
    revision: str | None = None
    threads: int | None = None
    max_rss_mib: int | None = None
    kind: str | None = None
    trust_remote_code: bool | None = None
    code_revision: str | None = None
    safetensors_only: bool | None = None
    replicas: int | Literal["per-gpu"] | None = None
    node: str | None = None
    labels: Mapping[str, str] | None = None
    placement: str | None = None
    load: str | None = None
    idle_timeout_secs: int | None = None
    pinned: bool | None = None
    max_replicas: int | None = None
    min_replicas: int | None = None
    scale_up_wait_ms: int | None = None
    scale_down_wait_ms: int | None = None
    scale_down_delay_secs: int | None = None
    tags: Mapping[str, str] | None = None
    wanted_running: bool | None = None
    seeded: bool | None = None
    details: Mapping[str, Any]

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Instance:
        known = {item.name: body[item.name] for item in fields(cls) if item.name in body}
        return cls(**known | {"status": State(body["status"]), "details": dict(body)})


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceEvent:
    """One fleet event; `event` is one of `spec.EVENTS` or "missed", `id` counts from 1 over all lives of the daemon."""

    event: str
    id: int | None = None
    timestamp: str | None = None
    instance: str | None = None
    model_id: str | None = None
    status: str | None = None
    reason: str | None = None
    tags: Mapping[str, str] | None = None
    crash_report: str | None = None
    nodes: Sequence[str] = ()
    count: int = 1
    first_timestamp: str | None = None
    replaces: int | None = None
    by: str | None = None
    details: Mapping[str, Any]

    @classmethod
    def from_json(cls, event: str, body: Mapping[str, Any]) -> InstanceEvent:
        known = {item.name: body[item.name] for item in fields(cls) if item.name in body}
        return cls(**known | {"event": event, "details": dict(body)})


@dataclass(frozen=True, slots=True)
class Health:
    """`status` is "healthy" while the daemon answers; `details` is the whole JSON object."""

    status: str
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Logs:
    """Lines `[start, end)` of `total_lines` in the log of an instance."""

    lines: tuple[str, ...]
    start: int
    end: int
    total_lines: int
