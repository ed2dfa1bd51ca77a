"""Configuration of one mux process: a JSON file that the daemon writes before it launches the process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from teimgr.errors import InvalidConfig
from teimgr.http.auth.tls_files import TlsFiles
from teimgr.observability.telemetry import Exporting

DRAIN_S = 10.0  # for the calls of a mux that got SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class MuxConfig:
    """One mux process, which serves after the first snapshot. `port` 0: a free port, which `stats` reports."""

    host: str
    port: int
    control_socket: str  # for the daemon; created after the gRPC port is bound
    max_message_bytes: int = 40 * 1024 * 1024  # in either direction
    max_parallel_streams: int = 1024  # messages of one stream in flight
    request_timeout_s: float = 30.0  # of a unary call; 0: unlimited. Batches and streams have no limit
    max_connection_age_s: float = 0.0  # after which clients are asked to reconnect, 0 for never
    connection_grace_s: float = 300.0  # for open calls
    orphan_grace_s: float = 300.0  # without any daemon connection; then the process stops
    run_dir: str = ""  # of the run files, mode 0700
    tls: TlsFiles | None = None
    processes: int = 1  # share the port, and the limits of memory and open calls
    socket: str = ""  # absolute path of the Unix socket of gRPC; empty: none
    socket_mode: int = 0o600  # its permissions
    on_demand_models: tuple[str, ...] = ()  # patterns of model ids that calls may load
    worker_wait_s: float = 0.0  # how long a call waits for a worker that restarts
    log_level: str = "info"
    log_format: str = "json"
    otel: Exporting | None = None
    node: str = ""  # this host's name in a cluster
    identity_dir: str = ""
    # For a mux controlled by a daemon on another host: the incarnation of the process, the descriptor of its listener
    # for the daemon, and whether the daemon sends the certificates of the gRPC port.
    incarnation: str = ""
    control_fd: int = -1
    tls_from_daemon: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, default=str)

    @classmethod
    def from_json(cls, text: str) -> MuxConfig:
        """The inverse of `to_json`.

        Raises:
            InvalidConfig: It is no JSON object, or has other keys.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            tls, otel = values.pop("tls", None), values.pop("otel", None)
            values["on_demand_models"] = tuple(values.get("on_demand_models", ()))
            files = TlsFiles(**{name: path and Path(path) for name, path in tls.items()}) if tls else None
            return cls(**values, tls=files, otel=Exporting(**otel) if otel else None)
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidConfig(f"mux config: {error}") from error

    @classmethod
    def read(cls, path: Path) -> MuxConfig:
        """The config in the file at `path`; errors as `from_json`, and OSError."""
        return cls.from_json(path.read_text())

    @property
    def hash(self) -> str:
        """Sixteen hex digits; a running mux with another hash has to be replaced."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]
