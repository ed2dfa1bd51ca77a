"""Configuration of one mux process: a JSON file that the daemon writes before it launches the process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from teimgr.auth.tls_files import TlsFiles
from teimgr.errors import InvalidConfig
from teimgr.observability.telemetry import Exporting


@dataclass(frozen=True, slots=True, kw_only=True)
class MuxTls:
    """Paths of PEM files; with `ca`, clients must show a certificate signed by it."""

    cert: str
    key: str
    ca: str | None = None

    @classmethod
    def of(cls, files: TlsFiles) -> MuxTls:
        """These files, for JSON."""
        return cls(cert=str(files.cert), key=str(files.key), ca=None if files.ca is None else str(files.ca))

    def files(self) -> TlsFiles:
        """The same as paths."""
        return TlsFiles(Path(self.cert), Path(self.key), None if self.ca is None else Path(self.ca))


@dataclass(frozen=True, slots=True, kw_only=True)
class MuxConfig:
    """One mux process.

    Attributes:
        host: Address to listen on.
        port: gRPC port; 0 lets the system choose, `stats` says which.
        control_socket: Path of the unix socket for the daemon; it exists once the gRPC port is bound, which
            serves from the first snapshot on.
        max_message_bytes: Limit of one message in either direction.
        max_parallel_streams: Messages of one stream that may be in flight.
        request_timeout_s: Limit of a single call; 0 for none. Batches and streams have none.
        orphan_grace_s: Time without any daemon connection after which the process stops.
        run_dir: Directory of the run files, mode 0700.
        tls: Certificates, or None for plain text.
        reuse_port: Whether several muxes share the port.
        log_level: As in the settings.
        log_format: As in the settings.
        otel: Where traces go, or None for nowhere.
    """

    host: str
    port: int
    control_socket: str
    max_message_bytes: int = 40 * 1024 * 1024
    max_parallel_streams: int = 1024
    request_timeout_s: float = 30.0
    orphan_grace_s: float = 300.0
    run_dir: str = ""
    tls: MuxTls | None = None
    reuse_port: bool = False
    log_level: str = "info"
    log_format: str = "json"
    otel: Exporting | None = None

    def to_json(self) -> str:
        """The object as one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> MuxConfig:
        """The inverse of `to_json`.

        Raises:
            InvalidConfig: no JSON object, or not one of these keys.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            tls, otel = values.pop("tls", None), values.pop("otel", None)
            return cls(**values, tls=MuxTls(**tls) if tls else None, otel=Exporting(**otel) if otel else None)
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
