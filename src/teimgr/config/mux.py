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


@dataclass(frozen=True, slots=True, kw_only=True)
class MuxConfig:
    """One mux process; `port` 0 is a free one, which `stats` reports. It serves from the first snapshot on."""

    host: str
    port: int
    control_socket: str  # for the daemon; it exists once the gRPC port is bound
    max_message_bytes: int = 40 * 1024 * 1024  # in either direction
    max_parallel_streams: int = 1024  # messages of one stream that may be in flight
    request_timeout_s: float = 30.0  # of a single call, 0 for none; batches and streams have none
    max_connection_age_s: float = 0.0  # after which clients are asked to reconnect, 0 for never
    connection_grace_s: float = 300.0  # for the calls that are open then
    orphan_grace_s: float = 300.0  # without any daemon connection; then the process stops
    run_dir: str = ""  # of the run files, mode 0700
    tls: TlsFiles | None = None
    processes: int = 1  # that share the port; each has its part of the limits on memory and open calls
    socket: str = ""  # Unix socket of gRPC, an absolute path; empty: none
    socket_mode: int = 0o600  # its permissions
    on_demand_models: tuple[str, ...] = ()  # patterns of model ids that calls may have loaded
    worker_wait_s: float = 0.0  # how long a call waits for a worker that restarts
    log_level: str = "info"
    log_format: str = "json"
    otel: Exporting | None = None
    node: str = ""  # in a fleet of several hosts this one's name, and the folder of its certificate
    identity_dir: str = ""
    # Of a mux that the daemon controls from another host: its name for this life of the process, the descriptor of the
    # socket on which it listens for the daemon, and whether that sends the certificates of the gRPC port.
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
