"""Settings of the daemon: name, default, meaning and limits of every key, and the rules between them (`faults`).

`sources.py` reads them. Times are seconds, sizes bytes unless the name states otherwise; relative paths are taken from
the working directory.
"""

# ruff: noqa: RUF009  `key` is dataclasses.field with metadata; it makes a new field at every call

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from teimgr.config.auth import MTLS, PROVIDERS, Auth, Mtls
from teimgr.config.auth import faults as auth_faults
from teimgr.config.instance_keys import key_faults, parse
from teimgr.config.schema import ConfigFault, unknown_word
from teimgr.config.sections import BatchSettings, ClusterSettings, OnDemandSettings
from teimgr.config.sections import faults as cluster_faults
from teimgr.errors import InvalidConfig, ModelNotFound, TeimgrError
from teimgr.http.auth.tls_files import TlsFiles
from teimgr.http.unix_listener import SOCKET_PATH_BYTES
from teimgr.models import hub
from teimgr.observability import logs
from teimgr.spec import (
    EVENTS,
    I64,
    KINDS,
    TOKEN_ENCODING,
    U16,
    U32,
    UNPRIVILEGED_PORT,
    InstanceSpec,
    check_name,
    declared,
    key,
    path_prefix,
)

# A mux binds its socket with its process id appended to the name, then renames it.
GRPC_SOCKET_BYTES = SOCKET_PATH_BYTES - len(".4194304")
# A browser's Origin header has no path and no default port.
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/]+", re.IGNORECASE)
_HOST = re.compile(r"[^\s/:]+")
_MEDIA_HOST = re.compile(r"([a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
TEI_BINARY = "text-embeddings-router"


@dataclass(frozen=True, slots=True, kw_only=True)
class Otel:
    """`[otel]`: export of traces. Workers get the trace context even without export."""

    endpoint: str = key("", "OTLP collector, http://host:4317; empty: no export", also="TEI_MANAGER_OTEL_ENDPOINT")
    service_name: str = key("tei-manager", "service.name of the traces")
    sample_ratio: float = key(1.0, "fraction of the traces started here that is kept", low=0, high=1)
    deployment_environment: str = key("", "deployment.environment.name of the traces; empty: none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """`[[webhooks]]`: receivers of fleet events, by POST."""

    url: str = field(metadata=declared("URL to which events are posted"))
    events: tuple[str, ...] = key((), "kinds of events to send; empty: all")
    secret: str = key("", "signs each body with HMAC-SHA256 in X-Teimgr-Signature; empty: unsigned", secret=True)
    timeout_secs: float = key(10.0, "limit of one POST", low=0.1, high=600)
    max_attempts: int = key(5, "attempts to deliver an event, with growing pauses", low=1, high=100)


class Listener(NamedTuple):
    """A TCP port of the daemon: its key, its description, its address."""

    key: str
    noun: str
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The daemon's settings. `run_dir` and `log_dir` are beside the state file unless given."""

    api_host: str = key("127.0.0.1", "address of the REST listener")
    api_port: int = key(
        9000,
        "port of the REST listener",
        low=UNPRIVILEGED_PORT,
        high=U16,
        label="API port",
        also="TEI_MANAGER_API_PORT",
    )
    ollama_port: int | None = key(
        None,
        "a second REST port for Ollama's clients, such as 11434, with inference only; default: none",
        low=UNPRIVILEGED_PORT,
        high=U16,
        label="Ollama port",
    )
    health_port: int | None = key(
        None,
        "a port for probes at the REST address, without key or TLS: /livez and /readyz; default: none",
        low=UNPRIVILEGED_PORT,
        high=U16,
        label="health port",
    )
    grpc_enabled: bool = key(True, "run the gRPC multiplexer", also="TEI_MANAGER_GRPC_ENABLED")
    grpc_host: str = key("127.0.0.1", "address of the gRPC listener")
    grpc_port: int = key(9001, "port of the gRPC listener", low=1, high=U16, also="TEI_MANAGER_GRPC_PORT")
    grpc_max_message_size_mb: int = key(40, "largest gRPC message either way, MiB", low=1, high=2047)
    grpc_max_parallel_streams: int = key(
        1024, "messages of one stream in flight", low=1, high=U32, also="TEI_MANAGER_GRPC_MAX_STREAMS"
    )
    grpc_request_timeout_secs: int = key(
        30,
        "limit of a unary call, and of the wait for each message of RerankStream; 0: no limit, and 120 s",
        low=0,
        high=I64,
    )
    grpc_max_connection_age_secs: int = key(
        0,
        "age, plus or minus a tenth, at which a gRPC connection gets GOAWAY, so that its client reconnects and reaches "
        "other servers behind the name; no call fails; 0: never",
        low=0,
        high=I64,
    )
    grpc_max_connection_age_grace_secs: int = key(
        300, "time for open calls to finish before such a connection is closed", low=1, high=I64
    )
    api_socket: Path | None = key(None, f"Unix socket of REST beside the port, at most {SOCKET_PATH_BYTES} bytes")
    grpc_socket: Path | None = key(
        None,
        f"Unix socket of gRPC beside the port, at most {GRPC_SOCKET_BYTES} bytes; of several multiplexer processes the "
        "first one serves it",
    )
    socket_mode: Literal["0600", "0660", "0666"] = key("0600", "permissions of both Unix sockets")
    mux_processes: int = key(1, "multiplexer processes that share the gRPC port", low=1, high=256)
    arrow_output_dtype: Literal["f32", "f16"] = key("f32", "element type of Arrow replies, unless the request sets it")

    inference_max_body_mb: int = key(
        32, "largest body of an inference request over HTTP, MiB; the gRPC limit also applies", low=1, high=2047
    )
    inference_timeout_secs: int = key(300, "limit of an inference request over HTTP; 0: none", low=0, high=I64)

    page: bool = key(True, "serve the web page at / of the REST port")
    allowed_origins: tuple[str, ...] = key(
        (),
        "origins of other web pages, 'https://app.example', that may do more than read without an API key; '*': all",
        live=True,
    )
    allowed_hosts: tuple[str, ...] = key(
        (), "host names, in addition to this host's own, under which this server's web pages are reached", live=True
    )
    root_path: str = key(
        "",
        "path prefix that a proxy strips, '/teimgr': links of the page, of /docs and of replies begin with it",
        live=True,
    )
    trusted_proxies: tuple[str, ...] = key(
        ("127.0.0.1", "::1"),
        "addresses and networks of proxies whose X-Forwarded-For, -Proto and -Prefix are believed; 'unix': anyone who "
        "connects to api_socket; '*': everyone",
        live=True,
    )

    instance_host: str = key("127.0.0.1", "address of the instances' own ports")
    instance_port_start: int = key(
        8080, "first port for instances", low=UNPRIVILEGED_PORT, high=U16, label="instance_port_start"
    )
    instance_port_end: int = key(8180, "port after the last one for instances", low=1, high=U16 + 1)
    prometheus_port_start: int = key(
        9100,
        "first port for the instances' te_* metrics; a second daemon on this host needs another",
        low=UNPRIVILEGED_PORT,
        high=U16,
    )
    max_instances: int | None = key(None, "maximum number of instances; default: no limit", low=1, high=U32)
    host_memory_budget_mib: int | None = key(
        None,
        "memory of each host for workers, MiB; default: limit of the system or cgroup",
        low=1,
        high=U32,
    )
    gpu_memory_budget_mib: int | None = key(
        None, "memory of each GPU for workers, MiB; default: as reported by the driver", low=1, high=U32
    )
    memory_check: bool = key(
        True,
        "refuse to start a worker that does not fit into the free memory of the ledger; false: start it anyway",
    )
    max_client_batch_size: int = key(32, "maximum texts of one HTTP call on the TEI routes", low=1, high=U32)

    token_inputs: Literal["accept", "refuse", "tiktoken"] = key(
        "accept",
        "token ids in requests, unless the instance sets it: accept the model's, refuse all, or decode tiktoken's",
    )
    token_encoding: str = key(TOKEN_ENCODING, "encoding for tiktoken, unless the instance sets it")

    media_url_hosts: tuple[str, ...] = key(
        (),
        "hosts, 'images.example' or 'minio:9000', whose files requests may link to; empty: links are refused",
    )
    media_url_networks: tuple[str, ...] = key(
        (), "networks such as 10.0.0.0/8 allowed for these hosts, in addition to public addresses"
    )

    state_dir: Path = key(Path("state"), "folder of the state file, logs and run files, unless those are given")
    state_file: Path = key(
        None,
        "desired instances, written at every change; default: state.toml in state_dir",
        also="TEI_MANAGER_STATE_FILE",
    )
    run_dir: Path = key(None, "sockets and run files of live workers; default: run/ beside the state file")
    log_dir: Path = key(
        None, "one log file per instance; default: logs/ beside the state file", also="TEI_MANAGER_LOG_DIR"
    )
    log_level: str = key(
        "info", "level, with exceptions: 'warn,teimgr.mux=debug'; a reload changes the daemon's own", live=True
    )
    log_format: Literal["json", "pretty"] = key(
        "json", "format of the daemon's stdout: JSON objects or readable lines; log files are always JSON"
    )
    log_max_bytes: int = key(10 * 2**20, "an instance's log file is rotated at this size", low=4096, high=I64)
    log_keep: int = key(3, "rotated log files kept per instance", low=0, high=100)

    config_watch_secs: int = key(
        0,
        "interval of checks of the configuration file, which is reloaded after a change; 0: never",
        low=0,
        high=86400,
    )
    auto_restore_on_restart: bool = key(True, "start with the instances of the state file; false: only with the seeds")
    startup_timeout_secs: int = key(300, "time limit of a start", low=1, high=I64)
    graceful_shutdown_timeout_secs: int = key(
        30, "time to finish accepted calls before a kill; shared by all processes when the daemon ends", low=0, high=I64
    )
    orphan_grace_secs: int = key(300, "a worker or mux stops after this time without a daemon", low=0, high=I64)
    health_check_interval_secs: int = key(
        10, "interval of probes of an instance", low=1, high=I64, also="TEI_MANAGER_HEALTH_CHECK_INTERVAL"
    )
    health_probe_timeout_secs: int = key(10, "time limit of a probe", low=1, high=I64)
    max_failures_before_restart: int = key(
        3, "failed probes in a row before a restart; 0: never restart for a probe", low=0, high=U32
    )
    restart_backoff_secs: float = key(
        0.05,
        "wait before a restart; doubles with each failure, minus up to half at random; no wait after 30 s of service",
        low=0,
        high=86400,
    )
    worker_wait_secs: float = key(
        5.0,
        "how long a call waits, within its deadline, for a worker that restarts; 0: not at all",
        low=0,
        high=86400,
    )
    restart_backoff_max_secs: float = key(30.0, "longest wait between two restarts", low=0, high=86400)
    auto_max_batch_tokens_per_gib: int = key(
        2048,
        'tokens per GiB of free GPU memory, if max_batch_tokens is "auto" (or 0)',
        low=1,
        high=U32,
        live=True,
    )
    gpu_preflight: Literal["warn", "fail"] = key("warn", "reaction to a GPU that this build of torch does not support")
    cpu_worker_nice: int = key(
        10, "niceness of CPU workers, so that the multiplexer has priority; bulk work gets six more", low=0, high=13
    )
    tei_binary_path: str = key(
        TEI_BINARY, "accepted and ignored: teimgr's workers run the model, no binary is started", also="TEI_BINARY_PATH"
    )

    allow_remote_code: bool = key(False, "instances may set trust_remote_code, to run code of a model's repository")
    allow_pickled_weights: bool = key(True, "instances may load weights from pickled files; false: only safetensors")
    strict_model_files: bool = key(False, "refuse a model whose files have unknown or contradictory keys; false: warn")
    local_model_roots: tuple[str, ...] = key(
        (), "directories below which a model_id may be a path; empty: anywhere, for keys without restriction"
    )
    models: tuple[str, ...] = key((), "models that the registry lists from the start: hub ids or directories")
    model_downloads: int = key(2, "concurrent downloads of the registry; others wait", low=1, high=64)
    templates: Mapping[str, Mapping[str, Any]] = key(
        dict, "keys of instances by name, for seeds and requests that name one", live=True
    )
    instances: tuple[InstanceSpec, ...] = key(
        (), "seeds: instances created if the state has no instance of that name", live=True
    )
    prune_seeds: bool = key(False, "a reload deletes instances that only an earlier configuration listed", live=True)
    aliases: Mapping[str, str] = key(dict, "further names in requests: alias to instance name or model id", live=True)
    default_instances: Mapping[str, str] = key(
        dict, "instance that gets requests without a model, by kind: {reranker: my-reranker}", live=True
    )
    webhooks: tuple[Webhook, ...] = key((), "receivers of fleet events", live=True)
    auth: Auth | None = key(None, "authentication; default: off", live=True)
    batches: BatchSettings = key(BatchSettings, "OpenAI's files and batches")
    on_demand: OnDemandSettings = key(OnDemandSettings, "models that calls may load without a declared instance")
    cluster: ClusterSettings = key(ClusterSettings, "several hosts, with Ray")
    otel: Otel = key(Otel, "export of traces")

    def __post_init__(self) -> None:
        if self.state_file is None:
            object.__setattr__(self, "state_file", self.state_dir / "state.toml")
        for name, folder in (("run_dir", "run"), ("log_dir", "logs")):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.state_file.parent / folder)

    def listeners(self) -> Iterator[Listener]:
        """The TCP ports on which clients reach the daemon and its muxes."""
        yield Listener("api_port", "API", self.api_host, self.api_port)
        if self.grpc_enabled:
            yield Listener("grpc_port", "gRPC", self.grpc_host, self.grpc_port)
        if self.ollama_port is not None:
            yield Listener("ollama_port", "Ollama", self.api_host, self.ollama_port)
        if self.health_port is not None:
            yield Listener("health_port", "health", self.api_host, self.health_port)

    @property
    def socket_permissions(self) -> int:
        return int(self.socket_mode, 8)

    @property
    def mtls(self) -> Mtls | None:
        return self.auth.mtls if self.auth and self.auth.requires(MTLS) else None

    @property
    def tls_files(self) -> TlsFiles | None:
        return self.auth.files() if self.auth else None

    def warnings(self) -> Iterator[str]:
        """Warnings for the log at the start: ignored keys, and listeners without authentication."""
        if self.tei_binary_path != TEI_BINARY:
            yield "tei_binary_path is ignored: teimgr runs the models in its own workers and starts no TEI binary"
        if self.auth:
            yield from self.auth.warnings()
        verified = self.auth is not None and any(map(self.auth.requires, PROVIDERS))
        for name in ("api_host", "grpc_host", "instance_host"):
            host = getattr(self, name)
            # TLS covers the two shared listeners, never the instances' own ports.
            if not is_loopback(host) and (not verified or name == "instance_host"):
                yield f"{name} = {host!r}: anyone who can connect to this address may call without authentication"
            elif not is_loopback(host) and self.tls_files is None:
                yield f"{name} = {host!r}: API keys are sent unencrypted; configure [auth.tls] or a TLS proxy"

    def missing_models(self) -> Iterator[ConfigFault]:
        """Seeds whose model can only be a directory, which is missing: a fault now, though it may be mounted later."""
        for index, seed in enumerate(self.instances):
            try:
                hub.check_directory(seed.model_id)
            except ModelNotFound as error:
                yield ConfigFault(f"instances[{index}].model_id", error.message)

    def prepare_folders(self) -> None:
        """Create the folders of state, logs and run files; the last is private to this user.

        Raises:
            InvalidConfig: One cannot be created.
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
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# Rules between keys; each function yields the faults of one rule. Scripts match tei-manager's messages, which are kept.


def faults(settings: Settings) -> Iterator[ConfigFault]:
    yield from _listeners_and_ranges(settings)
    yield from _sockets(settings)
    yield from _caught("log_level", logs.parse_levels, settings.log_level)
    for index, seed in enumerate(settings.instances):
        yield from _seed(settings, seed, f"instances[{index}]", settings.instances[:index])
    if settings.max_instances is not None and len(settings.instances) > settings.max_instances:
        yield ConfigFault(
            "instances", f"{len(settings.instances)} seeds, but max_instances is {settings.max_instances}"
        )
    for index, origin in enumerate(settings.allowed_origins):
        if not _ORIGIN.fullmatch(origin):
            text = f"must be an origin such as https://app.example:8443, null, or * (got {origin!r})"
            yield ConfigFault(f"allowed_origins[{index}]", text)
    for index, host in enumerate(settings.allowed_hosts):
        if not _HOST.fullmatch(host):
            yield ConfigFault(f"allowed_hosts[{index}]", f"must be a host name without scheme and port (got {host!r})")
    yield from _caught("root_path", path_prefix, settings.root_path)
    for index, proxy in enumerate(settings.trusted_proxies):
        yield from _caught(f"trusted_proxies[{index}]", _check_proxy, proxy)
    yield from _media_urls(settings)
    yield from _aliases(settings)
    yield from _default_instances(settings)
    yield from _webhooks(settings)
    yield from cluster_faults(settings.cluster)
    if settings.auth is not None:
        yield from auth_faults(settings.auth)


def _listeners_and_ranges(settings: Settings) -> Iterator[ConfigFault]:
    nouns: dict[int, str] = {}
    for listener in settings.listeners():
        noun = nouns.setdefault(listener.port, listener.noun)
        if noun != listener.noun:
            yield ConfigFault(listener.key, f"{listener.port} is the {noun} port too")
    first, end, most = settings.instance_port_start, settings.instance_port_end, settings.max_instances
    if end <= first:
        yield ConfigFault(
            "instance_port_end", f"instance_port_end ({end}) must be greater than instance_port_start ({first})"
        )
    elif most is not None and end - first < most:
        room = f"Port range [{first}, {end}) only has {end - first} ports but max_instances is {most}"
        yield ConfigFault("max_instances", room)
    shortest, longest = settings.restart_backoff_secs, settings.restart_backoff_max_secs
    if longest < shortest:
        yield ConfigFault("restart_backoff_max_secs", f"must be >= restart_backoff_secs ({longest} < {shortest})")


def _sockets(settings: Settings) -> Iterator[ConfigFault]:
    for name, most in (("api_socket", SOCKET_PATH_BYTES), ("grpc_socket", GRPC_SOCKET_BYTES)):
        path = getattr(settings, name)
        if path is None:
            continue
        if "\0" in str(path):
            yield ConfigFault(name, "must not contain a zero byte")
        elif (size := len(os.fsencode(path.absolute()))) > most:
            yield ConfigFault(name, f"must be a path of at most {most} bytes (got {size}, as an absolute path)")
    rest, grpc = settings.api_socket, settings.grpc_socket
    if rest is not None and grpc is not None and rest.absolute() == grpc.absolute():
        yield ConfigFault("grpc_socket", f"{grpc} is also the api_socket")


def _caught(path: str, check: Callable[[Any], object], value: object) -> Iterator[ConfigFault]:
    try:
        check(value)
    except TeimgrError as error:
        yield ConfigFault(path, error.message.removeprefix(f"{path.rpartition('.')[2]}: "))


def _media_urls(settings: Settings) -> Iterator[ConfigFault]:
    for index, host in enumerate(settings.media_url_hosts):
        if not _MEDIA_HOST.fullmatch(host):
            text = f"must be a host in lower case, with a port or without, such as minio:9000 (got {host!r})"
            yield ConfigFault(f"media_url_hosts[{index}]", text)
    for index, network in enumerate(settings.media_url_networks):
        yield from _caught(f"media_url_networks[{index}]", _check_network, network)


def _check_proxy(entry: str) -> None:
    """Raises InvalidConfig: neither an address, a network, `unix` nor `*`."""
    if entry not in ("unix", "*"):
        _check_network(entry, ", 'unix' or '*'")


def _check_network(entry: str, others: str = "") -> None:
    try:
        ipaddress.ip_network(entry)
    except ValueError as error:
        raise InvalidConfig(f"must be an address, a network such as 10.0.0.0/8{others}: {error}") from error


def _seed(settings: Settings, seed: InstanceSpec, path: str, before: tuple[InstanceSpec, ...]) -> Iterator[ConfigFault]:
    if seed.port:
        yield from _seed_port(settings, seed, f"{path}.port", before)
    yield from _caught(f"{path}.name", check_name, seed.name)
    if any(other.name == seed.name for other in before):
        yield ConfigFault(f"{path}.name", f"Duplicate instance name: {seed.name}")
    yield from key_faults(seed, path)
    yield from _caught(f"{path}.extra_args", parse, seed.extra_args)


def _seed_port(
    settings: Settings, seed: InstanceSpec, path: str, before: tuple[InstanceSpec, ...]
) -> Iterator[ConfigFault]:
    who = f"Instance '{seed.name}' port"
    if seed.port < UNPRIVILEGED_PORT:
        yield ConfigFault(path, f"{who} must be >= {UNPRIVILEGED_PORT} (got {seed.port})")
    for listener in settings.listeners():
        if seed.port == listener.port:
            yield ConfigFault(path, f"{who} {seed.port} conflicts with {listener.noun} port")
    if any(other.port == seed.port for other in before):
        yield ConfigFault(path, f"Duplicate port {seed.port} in instance configs")


def _aliases(settings: Settings) -> Iterator[ConfigFault]:
    """An alias leads to a name in one step, and is not the name of an instance."""
    seeds = {seed.name for seed in settings.instances}
    for alias, target in settings.aliases.items():
        path = f"aliases.{alias}"
        if not alias or not target:
            yield ConfigFault(path, "neither an alias nor its target may be empty")
        if alias in seeds:
            yield ConfigFault(path, "is the name of an instance")
        if target in settings.aliases:
            yield ConfigFault(path, f"{target!r} is an alias itself")


def _default_instances(settings: Settings) -> Iterator[ConfigFault]:
    for kind, name in settings.default_instances.items():
        path = f"default_instances.{kind}"
        if kind not in KINDS:
            yield ConfigFault(path, unknown_word(kind, KINDS))
        yield from _caught(path, check_name, name)


def _webhooks(settings: Settings) -> Iterator[ConfigFault]:
    for index, webhook in enumerate(settings.webhooks):
        path = f"webhooks[{index}]"
        if not webhook.url.startswith(("http://", "https://")):
            yield ConfigFault(f"{path}.url", f"must begin with http:// or https:// (got {webhook.url!r})")
        for place, name in enumerate(webhook.events):
            if name not in EVENTS:
                yield ConfigFault(f"{path}.events[{place}]", unknown_word(name, EVENTS))
