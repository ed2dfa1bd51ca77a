"""What must hold between settings: ports that do not meet, names that differ, certificates that exist.

Each function here is one rule. A message starts with the path of the key and keeps tei-manager's words, which its
users' scripts look for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from teimgr import logs
from teimgr.errors import InvalidConfig, InvalidInstanceName
from teimgr.spec import SPEC_WORDS, InstanceSpec, check_name

if TYPE_CHECKING:
    from teimgr.settings import Auth, Mtls, Settings

PROVIDERS = ("mtls",)


def check(settings: Settings) -> None:
    """Apply every rule.

    Raises:
        InvalidConfig: the first one that is broken.
    """
    _listeners_differ(settings)
    _port_range(settings)
    _backoff(settings)
    logs.parse_levels(settings.log_level)
    for index, seed in enumerate(settings.instances):
        _seed(settings, seed, f"instances[{index}]", settings.instances[:index])
    _aliases(settings)
    if settings.auth is not None and settings.auth.enabled:
        _auth(settings.auth)


def _listeners_differ(settings: Settings) -> None:
    if settings.grpc_enabled and settings.api_port == settings.grpc_port:
        raise InvalidConfig(f"grpc_port: {settings.grpc_port} is the API port too")


def _port_range(settings: Settings) -> None:
    first, end = settings.instance_port_start, settings.instance_port_end
    if end <= first:
        raise InvalidConfig(
            f"instance_port_end: instance_port_end ({end}) must be greater than instance_port_start ({first})"
        )
    most = settings.max_instances
    if most is not None and end - first < most:
        room = f"Port range [{first}, {end}) only has {end - first} ports but max_instances is {most}"
        raise InvalidConfig(f"max_instances: {room}")


def _backoff(settings: Settings) -> None:
    if settings.restart_backoff_max_secs < settings.restart_backoff_secs:
        raise InvalidConfig(
            f"restart_backoff_max_secs: must be >= restart_backoff_secs "
            f"({settings.restart_backoff_max_secs} < {settings.restart_backoff_secs})"
        )


def _seed(settings: Settings, seed: InstanceSpec, path: str, before: tuple[InstanceSpec, ...]) -> None:
    if seed.port:
        _seed_port(settings, seed, f"{path}.port", before)
    try:
        check_name(seed.name)
    except InvalidInstanceName as error:
        raise InvalidConfig(f"{path}.name: {error.message}") from error
    if any(other.name == seed.name for other in before):
        raise InvalidConfig(f"{path}.name: Duplicate instance name: {seed.name}")
    if not seed.model_id:
        raise InvalidConfig(f"{path}.model_id: cannot be empty")
    for key, allowed in SPEC_WORDS.items():
        if (value := getattr(seed, key)) is not None and value not in allowed:
            raise InvalidConfig(f"{path}.{key}: must be one of {', '.join(allowed)} (got {value!r})")


def _seed_port(settings: Settings, seed: InstanceSpec, path: str, before: tuple[InstanceSpec, ...]) -> None:
    who = f"Instance '{seed.name}' port"
    if seed.port < 1024:
        raise InvalidConfig(f"{path}: {who} must be >= 1024 (got {seed.port})")
    if seed.port == settings.api_port:
        raise InvalidConfig(f"{path}: {who} {seed.port} conflicts with API port")
    if settings.grpc_enabled and seed.port == settings.grpc_port:
        raise InvalidConfig(f"{path}: {who} {seed.port} conflicts with gRPC port")
    if any(other.port == seed.port for other in before):
        raise InvalidConfig(f"{path}: Duplicate port {seed.port} in instance configs")


def _aliases(settings: Settings) -> None:
    """An alias leads to a name in one step, and hides no instance of its own name."""
    seeds = {seed.name for seed in settings.instances}
    for alias, target in settings.aliases.items():
        path = f"aliases.{alias}"
        if not alias or not target:
            raise InvalidConfig(f"{path}: neither an alias nor what it stands for may be empty")
        if alias in seeds:
            raise InvalidConfig(f"{path}: is the name of an instance")
        if target in settings.aliases:
            raise InvalidConfig(f"{path}: {target!r} is an alias itself")


def _auth(auth: Auth) -> None:
    if not auth.providers:
        raise InvalidConfig("auth.providers: Authentication is enabled but no providers are configured")
    for index, name in enumerate(auth.providers):
        if name not in PROVIDERS:
            raise InvalidConfig(f"auth.providers[{index}]: unknown provider {name!r}; known: {', '.join(PROVIDERS)}")
    if auth.require_cert_headers:
        raise InvalidConfig(
            "auth.require_cert_headers: must be false: the certificate of the TLS connection itself is verified, "
            "a header that anybody can write is not"
        )
    if auth.mtls is None:
        raise InvalidConfig("auth.mtls: mTLS provider enabled but mtls config missing")
    _certificates(auth.mtls)


def _certificates(mtls: Mtls) -> None:
    files: tuple[tuple[str, str, Path], ...] = (
        ("ca_cert", "CA certificate", mtls.ca_cert),
        ("server_cert", "server certificate", mtls.server_cert),
        ("server_key", "server key", mtls.server_key),
    )
    for key, noun, file in files:
        if not file.is_file():
            raise InvalidConfig(f"auth.mtls.{key}: mTLS {noun} not found: {file}")
