"""Every setting of the daemon, in one screen each: name, default, meaning, limits.

Precedence: built-in default < TOML file < environment < command line. A scalar key `k` is read from the environment
as `TEIMGR_K`, and under the name tei-manager gave it where it had one; `TEIMGR_` wins. Nothing changes after the start.
Times are seconds, sizes bytes unless the name says otherwise; relative paths are taken from the working directory.
"""

# ruff: noqa: RUF009  `key` is dataclasses.field with a meaning; it makes a new field at every call

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from teimgr import rules, typed
from teimgr.errors import InvalidConfig
from teimgr.spec import InstanceSpec

U16 = 2**16 - 1
U32 = 2**32 - 1
I64 = 2**63 - 1  # what TOML can say
UNPRIVILEGED_PORT = 1024
TEI_BINARY = "text-embeddings-router"

SPEC_RULES: Mapping[str, typed.Rule] = {
    "port": typed.Rule("port of the instance; 0 or absent: a free one of the range", 0, U16),
    "max_batch_tokens": typed.Rule("token budget of one batch", 1, U32),
    "max_concurrent_requests": typed.Rule(
        "calls inside a worker; four times as many wait before one is refused", 1, U32
    ),
    "gpu_id": typed.Rule("index of the GPU; absent: the one with most free memory, or the CPU", 0, U32),
    "prometheus_port": typed.Rule("port of the instance's te_* metrics; absent: a free one from 9100", 0, U16),
    "startup_timeout_secs": typed.Rule("limit of a start; absent: the daemon's", 1, I64),
    "threads": typed.Rule("CPU threads of the worker; absent: a fair share", 1, 4096),
}


def key(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    label: str = "",
    also: str = "",
) -> Any:
    """A dataclass field that carries its meaning and limits; `also` is tei-manager's environment variable for it.

    `default` may be a type, such as dict, that makes a new value each time.
    """
    metadata = {"rule": typed.Rule(meaning, low, high, label), "also": also}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtls:
    """`[auth.mtls]`: PEM files of the two TLS listeners, and whom they let in."""

    ca_cert: Path = field(metadata={"rule": typed.Rule("certificate authority of the clients")})
    server_cert: Path = field(metadata={"rule": typed.Rule("certificate of this server")})
    server_key: Path = field(metadata={"rule": typed.Rule("private key of this server")})
    allow_self_signed: bool = key(False, "accepted and ignored: a client's chain to ca_cert is always verified")
    verify_subject: bool = key(True, "let in only the subjects of allowed_subjects, where that list is not empty")
    allowed_subjects: tuple[str, ...] = key((), "parts of a subject such as 'CN=indexer'; one must occur in it")
    verify_san: bool = key(False, "let in only the names of allowed_sans, where that list is not empty")
    allowed_sans: tuple[str, ...] = key((), "subject alternative names, 'indexer.local' or 'DNS:indexer.local'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Auth:
    """`[auth]`: who may call. Off by default."""

    enabled: bool = key(False, "verify callers by the providers below")
    providers: tuple[str, ...] = key((), "the only provider is 'mtls'")
    require_cert_headers: bool = key(False, "must stay false: a certificate in a header proves nothing")
    mtls: Mtls | None = key(None, "the table of the provider mtls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Otel:
    """`[otel]`: where traces go. Trace context is passed on to the workers whether or not any are exported."""

    endpoint: str = key("", "collector of OTLP, http://host:4317; empty: no export", also="TEI_MANAGER_OTEL_ENDPOINT")
    service_name: str = key("tei-manager", "service.name of the traces")
    sample_ratio: float = key(1.0, "share of the traces begun here that is kept", low=0, high=1)
    deployment_environment: str = key("", "deployment.environment.name of the traces; empty: none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The daemon's settings. `run_dir` and `log_dir` lie beside the state file unless given."""

    api_host: str = key("127.0.0.1", "address of the REST listener")
    api_port: int = key(
        9000,
        "port of the REST listener",
        low=UNPRIVILEGED_PORT,
        high=U16,
        label="API port",
        also="TEI_MANAGER_API_PORT",
    )
    grpc_enabled: bool = key(True, "run the gRPC multiplexer", also="TEI_MANAGER_GRPC_ENABLED")
    grpc_host: str = key("127.0.0.1", "address of the gRPC listener")
    grpc_port: int = key(9001, "port of the gRPC listener", low=1, high=U16, also="TEI_MANAGER_GRPC_PORT")
    grpc_max_message_size_mb: int = key(40, "largest gRPC message either way, MiB", low=1, high=2047)
    grpc_max_parallel_streams: int = key(1024, "messages of one stream in flight", low=1, high=U32)
    grpc_request_timeout_secs: int = key(30, "limit of a unary call; 0: none", low=0, high=I64)
    mux_processes: int = key(1, "multiplexer processes that share the gRPC port", low=1, high=256)
    arrow_output_dtype: Literal["f32", "f16"] = key("f32", "element type of Arrow replies that ask for none")

    instance_host: str = key("127.0.0.1", "address of the instances' own ports")
    instance_port_start: int = key(
        8080, "first port for instances", low=UNPRIVILEGED_PORT, high=U16, label="instance_port_start"
    )
    instance_port_end: int = key(8180, "port after the last one for instances", low=1, high=U16 + 1)
    max_instances: int | None = key(None, "most instances at a time; absent: no limit", low=1, high=U32)
    max_client_batch_size: int = key(32, "most texts of one HTTP call on the TEI routes", low=1, high=U32)

    state_file: Path = key(
        Path("state/state.toml"), "wanted instances, written at every change", also="TEI_MANAGER_STATE_FILE"
    )
    run_dir: Path = key(None, "sockets and run files of live workers; default: run/ beside the state file")
    log_dir: Path = key(
        None, "one log file per instance; default: logs/ beside the state file", also="TEI_MANAGER_LOG_DIR"
    )
    log_level: str = key("info", "level, with exceptions: 'warn,teimgr.mux=debug'")
    log_format: Literal["json", "pretty"] = key("json", "one JSON object per event, or lines for people")
    log_max_bytes: int = key(10 * 2**20, "an instance's log file is rotated at this size", low=4096, high=I64)
    log_keep: int = key(3, "rotated log files kept per instance", low=0, high=100)

    auto_restore_on_restart: bool = key(True, "start with the instances of the state file; false: with the seeds alone")
    startup_timeout_secs: int = key(300, "a start that takes longer has failed", low=1, high=I64)
    graceful_shutdown_timeout_secs: int = key(30, "time to finish accepted calls before a kill", low=0, high=I64)
    orphan_grace_secs: int = key(300, "a worker or mux that sees no daemon for so long stops", low=0, high=I64)
    health_check_interval_secs: int = key(
        10, "time between two probes of an instance", low=1, high=I64, also="TEI_MANAGER_HEALTH_CHECK_INTERVAL"
    )
    health_probe_timeout_secs: int = key(10, "a probe that takes longer has failed", low=1, high=I64)
    max_failures_before_restart: int = key(
        3, "failed probes in a row before a restart; 0: never restart for a probe", low=0, high=U32
    )
    restart_backoff_secs: float = key(0.2, "wait before the first restart; doubles each time", low=0, high=86400)
    restart_backoff_max_secs: float = key(30.0, "longest wait between two restarts", low=0, high=86400)
    cpu_worker_nice: int = key(10, "niceness of CPU workers, below the multiplexer", low=0, high=19)
    tei_binary_path: str = key(
        TEI_BINARY, "accepted and ignored: teimgr's workers run the model, no binary is started", also="TEI_BINARY_PATH"
    )

    models: tuple[str, ...] = key((), "models that the registry knows from the start: hub ids or directories")
    model_downloads: int = key(2, "downloads of the registry at a time; others wait", low=1, high=64)
    instances: tuple[InstanceSpec, ...] = key((), "seeds: instances created where the state does not know their name")
    aliases: Mapping[str, str] = key(dict, "further names in requests: alias to instance name or model id")
    auth: Auth | None = key(None, "who may call; absent: everybody")
    otel: Otel = key(Otel, "where traces go")

    def __post_init__(self) -> None:
        for name, folder in (("run_dir", "run"), ("log_dir", "logs")):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.state_file.parent / folder)

    @property
    def mtls(self) -> Mtls | None:
        """The certificates of both listeners, where mutual TLS is on."""
        return self.auth.mtls if self.auth and self.auth.enabled else None

    @property
    def grpc_max_message_bytes(self) -> int:
        """`grpc_max_message_size_mb` in bytes."""
        return self.grpc_max_message_size_mb * 2**20

    def warnings(self) -> Iterator[str]:
        """What is allowed and should be said loudly at the start."""
        if self.tei_binary_path != TEI_BINARY:
            yield "tei_binary_path is ignored: teimgr runs the models in its own workers and starts no TEI binary"
        if self.auth and self.auth.mtls and self.auth.mtls.allow_self_signed:
            yield "auth.mtls.allow_self_signed is ignored: clients must present a chain to ca_cert"
        if self.grpc_enabled and self.mtls and (self.mtls.allowed_subjects or self.mtls.allowed_sans):
            yield "auth.mtls.allowed_…: REST asks for them; gRPC lets in whom ca_cert certified"
        for name in ("api_host", "grpc_host", "instance_host"):
            host = getattr(self, name)
            # TLS covers the two shared listeners, never the instances' own ports.
            if not is_loopback(host) and (self.mtls is None or name == "instance_host"):
                yield f"{name} = {host!r}: anybody who reaches this address may call, nothing verifies them"

    def prepare_folders(self) -> None:
        """Make the folders of state, logs and run files; the last is for this user alone.

        Raises:
            InvalidConfig: one cannot be made.
        """
        for noun, folder, mode in (
            ("state file", self.state_file.parent, 0o777),
            ("log", self.log_dir, 0o777),
            ("run", self.run_dir, 0o700),
        ):
            try:
                folder.mkdir(mode=mode, parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidConfig(f"Cannot create {noun} directory: {folder}: {error.strerror}") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a listener bound to `host`; a name other than localhost counts as no."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def load(
    config_path: str | Path | None = None,
    environ: Mapping[str, str] = os.environ,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """The settings that file, environment and command line say together, checked.

    `overrides` are keys from the command line; those that are None were not given.

    Raises:
        InvalidConfig: the message names the file or variable, the key's path, and what is wrong with it.
    """
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    values = _from_file(config_path)
    for (*table, name), value in _from_environment(environ):
        # The one table with variables is [otel], and one that is given whole in the file is changed in a key.
        values |= {table[0]: replace(values.get(table[0], Otel()), **{name: value})} if table else {name: value}
    settings = Settings(**values | typed.read(Settings, given))
    with _naming(config_path):
        rules.check(settings)
    return settings


class Scalar(NamedTuple):
    """One key that an environment variable can say; of the `variables` the last one wins."""

    path: tuple[str, ...]
    annotation: Any
    variables: tuple[str, ...]


def scalars() -> Iterator[Scalar]:
    """Each key that one environment variable can say: those of the top level, and those of `[otel]`."""
    yield from _scalars(Settings, ())
    yield from _scalars(Otel, ("otel",))


def _scalars(kind: type[Any], table: tuple[str, ...]) -> Iterator[Scalar]:
    hints = get_type_hints(kind)
    for item in fields(kind):
        annotation = hints[item.name]
        if get_origin(annotation) in (tuple, Mapping) or any(map(is_dataclass, (annotation, *get_args(annotation)))):
            continue
        path = (*table, item.name)
        names = (item.metadata["also"], f"TEIMGR_{'_'.join(path).upper()}")
        yield Scalar(path, annotation, tuple(filter(None, names)))


def unheard(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """A sentence for each `TEIMGR_…` variable that no key reads, most likely a slip of the pen."""
    known = [variable for scalar in scalars() for variable in scalar.variables]
    for variable in sorted(environ):
        if variable.startswith("TEIMGR_") and variable not in known:
            yield f"the environment variable {variable} is not read; {typed.nearest(variable, known)}"


def _from_file(path: str | Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # TOML syntax, or bytes that are no UTF-8
        raise InvalidConfig(f"{path}: {error}") from error
    with _naming(path):
        seeds = table.pop("instances", [])
        return typed.read(Settings, table) | {"instances": _seeds(seeds)}


def _seeds(tables: object) -> tuple[InstanceSpec, ...]:
    if not isinstance(tables, list):
        raise InvalidConfig(f"instances: must be a list of tables, [[instances]] (got {typed.said(tables)})")
    return tuple(seed(table, f"instances[{index}]") for index, table in enumerate(tables))


def seed(table: object, path: str) -> InstanceSpec:
    """The spec that one `[[instances]]` table asks for.

    Raises:
        InvalidConfig: a key is unknown, missing, of a wrong type or out of its limits; the message starts with `path`.
    """
    return typed.build(InstanceSpec, table, path, rules=SPEC_RULES, hidden=("wanted_running", "seeded"))


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for scalar in scalars():
        for variable in scalar.variables:
            if variable in environ:
                yield scalar.path, _variable(variable, environ[variable], scalar)


def _variable(variable: str, text: str, scalar: Scalar) -> Any:
    kind = Otel if len(scalar.path) > 1 else Settings
    name = scalar.path[-1]
    try:
        plain = typed.from_text(text, scalar.annotation)
        return typed.read(kind, {name: plain})[name]
    except ValueError as error:
        raise InvalidConfig(f"Invalid {variable} value {text!r}: {error}") from error
    except InvalidConfig as error:
        raise InvalidConfig(f"Invalid {variable} value {text!r}: {error.message}") from error


@contextmanager
def _naming(path: str | Path | None) -> Iterator[None]:
    """Put the file's name before what is wrong in it."""
    try:
        yield
    except InvalidConfig as error:
        if path is None:
            raise
        raise InvalidConfig(f"{path}: {error.message}") from error
