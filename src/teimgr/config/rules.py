"""Rules that a key alone cannot express: distinct ports and names, port ranges, valid seeds, aliases and webhooks.

Each function is one rule and yields its faults. The messages keep tei-manager's words, which scripts look for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from teimgr.config import auth, extra_args
from teimgr.config.schema import ConfigFault, join, unknown_word
from teimgr.errors import TeimgrError, ValidationError
from teimgr.observability import logs
from teimgr.spec import EVENTS, KEYS, InstanceSpec, check_name

if TYPE_CHECKING:
    from teimgr.config.settings import Settings


def check_instance(spec: InstanceSpec) -> None:
    """Validate the keys of one instance: the check of REST, of updates, of seeds and of the state file.

    Raises:
        InvalidInstanceName, ValidationError, InvalidConfig: The first fault.
    """
    check_name(spec.name)
    for fault in key_faults(spec):
        raise ValidationError(str(fault))
    extra_args.parse(spec.extra_args)


def key_faults(spec: InstanceSpec, path: str = "") -> Iterator[ConfigFault]:
    """Keys with a value that they cannot have, or not together."""
    if not spec.model_id:
        yield ConfigFault(join(path, "model_id"), "cannot be empty")
    for name, key in KEYS.items():
        value = getattr(spec, name)
        if problem := key.not_a_word(value) or key.out_of_range(value):
            yield ConfigFault(join(path, name), problem)
    if spec.replicas == "per-gpu" and spec.gpu_id is not None:
        yield ConfigFault(join(path, "replicas"), "'per-gpu' and a gpu_id exclude each other")


def faults(settings: Settings) -> Iterator[ConfigFault]:
    """Every rule that is broken."""
    yield from _listeners_and_ranges(settings)
    yield from _caught("log_level", logs.parse_levels, settings.log_level)
    for index, seed in enumerate(settings.instances):
        yield from _seed(settings, seed, f"instances[{index}]", settings.instances[:index])
    if settings.max_instances is not None and len(settings.instances) > settings.max_instances:
        yield ConfigFault(
            "instances", f"{len(settings.instances)} seeds, but max_instances is {settings.max_instances}"
        )
    yield from _aliases(settings)
    yield from _webhooks(settings)
    if settings.auth is not None:
        yield from auth.faults(settings.auth)


def _listeners_and_ranges(settings: Settings) -> Iterator[ConfigFault]:
    if settings.grpc_enabled and settings.api_port == settings.grpc_port:
        yield ConfigFault("grpc_port", f"{settings.grpc_port} is the API port too")
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


def _caught(path: str, check: Callable[[Any], object], value: object) -> Iterator[ConfigFault]:
    """The fault that `check` raises."""
    try:
        check(value)
    except TeimgrError as error:
        yield ConfigFault(path, error.message.removeprefix(f"{path.rpartition('.')[2]}: "))


def _seed(settings: Settings, seed: InstanceSpec, path: str, before: tuple[InstanceSpec, ...]) -> Iterator[ConfigFault]:
    if seed.port:
        yield from _seed_port(settings, seed, f"{path}.port", before)
    yield from _caught(f"{path}.name", check_name, seed.name)
    if any(other.name == seed.name for other in before):
        yield ConfigFault(f"{path}.name", f"Duplicate instance name: {seed.name}")
    yield from key_faults(seed, path)
    yield from _caught(f"{path}.extra_args", extra_args.parse, seed.extra_args)


def _seed_port(
    settings: Settings, seed: InstanceSpec, path: str, before: tuple[InstanceSpec, ...]
) -> Iterator[ConfigFault]:
    who = f"Instance '{seed.name}' port"
    if seed.port < 1024:
        yield ConfigFault(path, f"{who} must be >= 1024 (got {seed.port})")
    if seed.port == settings.api_port:
        yield ConfigFault(path, f"{who} {seed.port} conflicts with API port")
    if settings.grpc_enabled and seed.port == settings.grpc_port:
        yield ConfigFault(path, f"{who} {seed.port} conflicts with gRPC port")
    if any(other.port == seed.port for other in before):
        yield ConfigFault(path, f"Duplicate port {seed.port} in instance configs")


def _aliases(settings: Settings) -> Iterator[ConfigFault]:
    """An alias leads to a name in one step, and is not the name of an instance."""
    seeds = {seed.name for seed in settings.instances}
    for alias, target in settings.aliases.items():
        path = f"aliases.{alias}"
        if not alias or not target:
            yield ConfigFault(path, "neither an alias nor what it stands for may be empty")
        if alias in seeds:
            yield ConfigFault(path, "is the name of an instance")
        if target in settings.aliases:
            yield ConfigFault(path, f"{target!r} is an alias itself")


def _webhooks(settings: Settings) -> Iterator[ConfigFault]:
    for index, webhook in enumerate(settings.webhooks):
        path = f"webhooks[{index}]"
        if not webhook.url.startswith(("http://", "https://")):
            yield ConfigFault(f"{path}.url", f"must begin with http:// or https:// (got {webhook.url!r})")
        for place, name in enumerate(webhook.events):
            if name not in EVENTS:
                yield ConfigFault(f"{path}.events[{place}]", unknown_word(name, EVENTS))
