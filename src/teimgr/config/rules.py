"""What must hold between settings: ports that do not meet, names that differ, certificates that exist.

Each function here is one rule, and yields what breaks it. The messages keep tei-manager's words, which its users'
scripts look for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from teimgr.config import auth
from teimgr.config.schema import Fault, unknown_word
from teimgr.errors import InvalidConfig, InvalidInstanceName
from teimgr.observability import logs
from teimgr.spec import EVENTS, SPEC_WORDS, InstanceSpec, check_name

if TYPE_CHECKING:
    from teimgr.config.settings import Settings


def faults(settings: Settings) -> Iterator[Fault]:
    """Every rule that is broken."""
    yield from _listeners_differ(settings)
    yield from _port_range(settings)
    yield from _backoff(settings)
    yield from _log_level(settings)
    for index, seed in enumerate(settings.instances):
        yield from _seed(settings, seed, f"instances[{index}]", settings.instances[:index])
    yield from _aliases(settings)
    yield from _webhooks(settings)
    if settings.auth is not None:
        yield from auth.faults(settings.auth)


def _listeners_differ(settings: Settings) -> Iterator[Fault]:
    if settings.grpc_enabled and settings.api_port == settings.grpc_port:
        yield Fault("grpc_port", f"{settings.grpc_port} is the API port too")


def _port_range(settings: Settings) -> Iterator[Fault]:
    first, end, most = settings.instance_port_start, settings.instance_port_end, settings.max_instances
    if end <= first:
        yield Fault(
            "instance_port_end", f"instance_port_end ({end}) must be greater than instance_port_start ({first})"
        )
    elif most is not None and end - first < most:
        room = f"Port range [{first}, {end}) only has {end - first} ports but max_instances is {most}"
        yield Fault("max_instances", room)


def _backoff(settings: Settings) -> Iterator[Fault]:
    first, longest = settings.restart_backoff_secs, settings.restart_backoff_max_secs
    if longest < first:
        yield Fault("restart_backoff_max_secs", f"must be >= restart_backoff_secs ({longest} < {first})")


def _log_level(settings: Settings) -> Iterator[Fault]:
    try:
        logs.parse_levels(settings.log_level)
    except InvalidConfig as error:
        yield Fault("log_level", error.message.removeprefix("log_level: "))


def _seed(settings: Settings, seed: InstanceSpec, path: str, before: tuple[InstanceSpec, ...]) -> Iterator[Fault]:
    if seed.port:
        yield from _seed_port(settings, seed, f"{path}.port", before)
    try:
        check_name(seed.name)
    except InvalidInstanceName as error:
        yield Fault(f"{path}.name", error.message)
    if any(other.name == seed.name for other in before):
        yield Fault(f"{path}.name", f"Duplicate instance name: {seed.name}")
    if not seed.model_id:
        yield Fault(f"{path}.model_id", "cannot be empty")
    for key, allowed in SPEC_WORDS.items():
        if (value := getattr(seed, key)) is not None and value not in allowed:
            yield Fault(f"{path}.{key}", f"must be one of {', '.join(allowed)} (got {value!r})")


def _seed_port(settings: Settings, seed: InstanceSpec, path: str, before: tuple[InstanceSpec, ...]) -> Iterator[Fault]:
    who = f"Instance '{seed.name}' port"
    if seed.port < 1024:
        yield Fault(path, f"{who} must be >= 1024 (got {seed.port})")
    if seed.port == settings.api_port:
        yield Fault(path, f"{who} {seed.port} conflicts with API port")
    if settings.grpc_enabled and seed.port == settings.grpc_port:
        yield Fault(path, f"{who} {seed.port} conflicts with gRPC port")
    if any(other.port == seed.port for other in before):
        yield Fault(path, f"Duplicate port {seed.port} in instance configs")


def _aliases(settings: Settings) -> Iterator[Fault]:
    """An alias leads to a name in one step, and hides no instance of its own name."""
    seeds = {seed.name for seed in settings.instances}
    for alias, target in settings.aliases.items():
        path = f"aliases.{alias}"
        if not alias or not target:
            yield Fault(path, "neither an alias nor what it stands for may be empty")
        if alias in seeds:
            yield Fault(path, "is the name of an instance")
        if target in settings.aliases:
            yield Fault(path, f"{target!r} is an alias itself")


def _webhooks(settings: Settings) -> Iterator[Fault]:
    for index, webhook in enumerate(settings.webhooks):
        path = f"webhooks[{index}]"
        if not webhook.url.startswith(("http://", "https://")):
            yield Fault(f"{path}.url", f"must begin with http:// or https:// (got {webhook.url!r})")
        for place, name in enumerate(webhook.events):
            if name not in EVENTS:
                yield Fault(f"{path}.events[{place}]", unknown_word(name, EVENTS))
