"""Validation of an instance's keys: on their own, and by the limits of the settings and of the caller's API key.

`extra_args` are flags of TEI's router (1.x), parsed into fields of `WorkerSpec`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from teimgr.config.schema import ConfigFault, join
from teimgr.errors import Forbidden, InvalidConfig, ValidationError
from teimgr.models import source as model_source
from teimgr.observability.shown_text import has_controls
from teimgr.spec import KEYS, InstanceKey, InstanceSpec, check_name

if TYPE_CHECKING:
    from teimgr.config.settings import Settings

REDACTED = "***"
LENGTH_LIMIT_CHARS = 16 * 1024
API_KEY_FLAG = "--api-key"
_HINTS = get_type_hints(InstanceSpec)


def _secret(value: str) -> str:
    if value == REDACTED:
        raise ValueError("must be the key itself, not what is shown in its place")
    return value


def _boolean(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError("must be true or false")
    return value == "true"


def _count(value: str) -> int:
    number = int(value) if value.isascii() and value.isdecimal() else 0
    if not 1 <= number < 2**32:
        raise ValueError("must be a positive number")
    return number


@dataclass(frozen=True, slots=True)
class TeiFlag:
    """`read` converts the text. `field` is a field of WorkerSpec, or None for a flag without effect; `why` explains it.

    A boolean without a value is true; the values of a flag that `repeats` are a tuple.
    """

    read: Callable[[str], Any] = str
    field: str | None = None
    repeats: bool = False
    why: str = ""

    def has_value(self, following: Sequence[str]) -> bool:
        """True if the first of the words behind the flag is its value, or has to be."""
        return self.read is not _boolean or bool(following and following[0] in ("true", "false"))


def _flag_of(name: str, key: InstanceKey) -> TeiFlag:
    def word(value: str) -> str:
        if problem := key.not_a_word(value):
            raise ValueError(problem.partition(" (got")[0])
        return value

    kinds = {_HINTS[name], *get_args(_HINTS[name])}
    return TeiFlag(word if key.words else _boolean if bool in kinds else _count if int in kinds else str, name)


FLAGS: dict[str, TeiFlag] = {
    **{f"--{name.replace('_', '-')}": _flag_of(name, key) for name, key in KEYS.items() if key.flag},
    "--served-model-name": TeiFlag(str, "served_model_name"),
    "--max-batch-requests": TeiFlag(_count, "max_batch_requests"),
    "--max-client-batch-size": TeiFlag(_count, "max_client_batch_size"),
    "--auto-truncate": TeiFlag(_boolean, "auto_truncate"),
    "--default-prompt-name": TeiFlag(str, "default_prompt_name"),
    "--default-prompt": TeiFlag(str, "default_prompt"),
    "--payload-limit": TeiFlag(_count, "payload_limit_bytes"),
    API_KEY_FLAG: TeiFlag(_secret, "api_key"),
    "--cors-allow-origin": TeiFlag(str, "cors_allow_origin", repeats=True),
    # Accepted without effect.
    "--tokenization-workers": TeiFlag(_count, why="the tokenizer runs on the worker's own threads: key threads"),
    "--prometheus-port": TeiFlag(why="use the instance's key prometheus_port"),
    "--hostname": TeiFlag(why="use the setting instance_host, which applies to all instances"),
    "--uds-path": TeiFlag(why="there is no backend process with a socket"),
    "--otlp-endpoint": TeiFlag(why="use [otel] endpoint, which applies to the daemon and all workers"),
    "--otlp-service-name": TeiFlag(why="use [otel] service_name, which applies to the daemon and all workers"),
    "--json-output": TeiFlag(_boolean, why="logs are always JSON; log_format sets the format of the daemon's stdout"),
    "--disable-spans": TeiFlag(_boolean, why="log lines of a trace have trace_id and span_id"),
}

# Refused, since ignoring these would change results or access.
REFUSED: dict[str, str] = {
    "--model-id": "the model is the instance's own field model_id",
    "--port": "the port is the instance's own field port",
    "-p": "the port is the instance's own field port",
    "--dense-path": "the Dense modules are those of the model's modules.json: name another one there",
    "--hf-token": "set HF_TOKEN in the daemon's environment; arguments are stored and shown",
    "--hf-api-token": "set HF_TOKEN in the daemon's environment; arguments are stored and shown",
    "--huggingface-hub-cache": "set HF_HUB_CACHE in the daemon's environment",
}


def parse(extra_args: Sequence[str]) -> dict[str, Any]:
    """The fields of WorkerSpec that the flags set; both `--flag value` and `--flag=value`.

    Raises:
        InvalidConfig: A flag is unknown, refused, given twice, or has an invalid value; the message names it.
    """
    if sum(map(len, extra_args)) > LENGTH_LIMIT_CHARS:
        raise InvalidConfig(f"extra_args: longer than {LENGTH_LIMIT_CHARS} characters in all")
    overrides: dict[str, Any] = {}
    seen: set[str] = set()
    rest = list(extra_args)
    while rest:
        name, flag, value = _take(rest)
        if name in seen and flag.field is not None and not flag.repeats:
            raise InvalidConfig(f"extra_args: {name} is given twice")
        seen.add(name)
        try:
            parsed = flag.read(value)
        except ValueError as error:
            raise InvalidConfig(f"extra_args: {name} {error} (got {value!r})") from error
        if flag.field is not None:
            overrides[flag.field] = (*overrides.get(flag.field, ()), parsed) if flag.repeats else parsed
    if problem := model_source.revision_problem(overrides.get("revision")):
        raise InvalidConfig(f"extra_args: --revision {problem}")
    if overrides.keys() >= {"default_prompt", "default_prompt_name"}:
        raise InvalidConfig("extra_args: --default-prompt and --default-prompt-name exclude each other")
    return overrides


def _take(rest: list[str]) -> tuple[str, TeiFlag, str]:
    """Remove the next flag and its value from `rest`."""
    name, equals, value = rest.pop(0).partition("=")
    if name in REFUSED:
        raise InvalidConfig(f"extra_args: {name} is not supported: {REFUSED[name]}")
    if name not in FLAGS:
        near = get_close_matches(name, [*FLAGS, *REFUSED], n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(FLAGS)}"
        raise InvalidConfig(f"extra_args: unknown flag {name!r}; {hint}")
    flag = FLAGS[name]
    if not equals:
        if not flag.has_value(rest):
            value = "true"
        elif rest:
            value = rest.pop(0)
        else:
            raise InvalidConfig(f"extra_args: {name} needs a value")
    return name, flag, value


def shown_args(extra_args: Sequence[str]) -> list[str]:
    """`extra_args` with `REDACTED` in place of the instance's API key."""
    words: list[str] = []
    is_key = False
    for word in extra_args:
        name, equals, _ = word.partition("=")
        if is_key:
            words.append(REDACTED)
        else:
            words.append(f"{name}={REDACTED}" if name == API_KEY_FLAG and equals else word)
        is_key = not is_key and word == API_KEY_FLAG
    return words


def check_instance(spec: InstanceSpec) -> None:
    """Validate the keys of one instance: the check of REST, of updates, of seeds and of the state file.

    Raises:
        InvalidInstanceName, ValidationError, InvalidConfig: The first fault.
    """
    check_name(spec.name)
    for fault in key_faults(spec):
        raise ValidationError(str(fault))
    parse(spec.extra_args)


_DEFAULTS = InstanceSpec(name="", model_id="")


def key_faults(spec: InstanceSpec, path: str = "") -> Iterator[ConfigFault]:
    """Keys with a value that they cannot have, or not together."""
    given = {name: value for name in KEYS if (value := getattr(spec, name)) is not getattr(_DEFAULTS, name)}
    for name, value in given.items():
        allowed = "\n\t" if name == "extra_args" else ""  # prompts may have several lines
        if any(has_controls(text, allowed) for text in _texts(value)):
            yield ConfigFault(join(path, name), "cannot have control characters")
    if not spec.model_id:
        yield ConfigFault(join(path, "model_id"), "cannot be empty")
    for name, value in given.items():
        if problem := KEYS[name].not_a_word(value) or KEYS[name].out_of_range(value):
            yield ConfigFault(join(path, name), problem)
    for name in ("revision", "code_revision"):
        if problem := model_source.revision_problem(getattr(spec, name)):
            yield ConfigFault(join(path, name), problem)
    if spec.replicas == "per-gpu" and spec.gpu_id is not None:
        yield ConfigFault(join(path, "replicas"), "'per-gpu' and a gpu_id exclude each other")
    for name, problem in _scaling_faults(spec):
        yield ConfigFault(join(path, name), problem)


def _scaling_faults(spec: InstanceSpec) -> Iterator[tuple[str, str]]:
    """Keys of autoscaling that contradict each other, with the reason."""
    if spec.max_replicas and spec.replicas == "per-gpu":
        yield "replicas", "'per-gpu' and max_replicas exclude each other"
    if spec.max_replicas and spec.min_replicas > spec.max_replicas:
        yield "min_replicas", f"must be <= max_replicas, {spec.max_replicas} (got {spec.min_replicas})"
    if spec.min_replicas == 0 and spec.load != "on_demand":
        yield "min_replicas", "0 needs load = 'on_demand', since calls do not start an eager instance"
    if spec.scale_down_wait_ms >= spec.scale_up_wait_ms:
        crossed = f"must be below scale_up_wait_ms, {spec.scale_up_wait_ms} (got {spec.scale_down_wait_ms})"
        yield "scale_down_wait_ms", f"{crossed}: otherwise replicas would be added and removed alternately"


def _texts(value: object) -> Iterator[str]:
    """The strings of a key's value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from (str(name), str(each))
    elif isinstance(value, tuple | list):
        yield from map(str, value)


RESTRICTED_BATCH_TOKENS = 131_072
"""Limit for restricted keys; four times the largest default of a card."""


def check_allowed(spec: InstanceSpec, settings: Settings) -> None:
    """Check what the settings allow instances to be.

    Raises:
        ValidationError: code of the model's repository, or a directory outside of `local_model_roots`.
    """
    if runs_remote_code(spec) and not settings.allow_remote_code:
        raise ValidationError(
            "trust_remote_code: code of models is disabled; the setting allow_remote_code = true enables it"
        )
    if problem := _outside(spec, settings):
        raise ValidationError(f"model_id: {problem}")


def check_restricted(spec: InstanceSpec, settings: Settings) -> None:
    """Check what a key for some instances only may make of them: its code and files would reach the others'.

    Raises:
        Forbidden: code of the model's repository, a directory outside of `local_model_roots`, or pickled weights.
    """
    if runs_remote_code(spec):
        raise Forbidden("trust_remote_code needs a key that is for all instances")
    if _outside(replace(spec, confined=True), settings):
        raise Forbidden("a model_id that is a directory outside of local_model_roots needs a key for all instances")
    if not spec.safetensors_only:
        raise Forbidden("pickled weights (safetensors_only = false) need a key that is for all instances")


def check_bounds(spec: InstanceSpec, settings: Settings) -> None:
    """Check how much of the machine a key for some instances only may take with one of them.

    Raises:
        Forbidden: a port outside of the settings' ranges, or more threads or tokens than the machine has use for.
    """
    ports = range(settings.instance_port_start, settings.instance_port_end)
    if spec.port and spec.port not in ports:
        raise Forbidden(f"port {spec.port} is outside of {ports.start} to {ports.stop - 1}: it needs a key for all")
    if spec.prometheus_port and spec.prometheus_port < settings.prometheus_port_start:
        least = settings.prometheus_port_start
        raise Forbidden(f"prometheus_port {spec.prometheus_port} is below {least}: it needs a key for all instances")
    given = parse(spec.extra_args)
    cores = len(os.sched_getaffinity(0))
    if (threads := given.get("threads", spec.threads)) and threads > cores:
        raise Forbidden(f"threads = {threads} is more than the {cores} cores: it needs a key for all instances")
    tokens = given.get("max_batch_tokens", spec.max_batch_tokens)
    if tokens and tokens > RESTRICTED_BATCH_TOKENS:
        text = f"max_batch_tokens = {tokens} is more than {RESTRICTED_BATCH_TOKENS}"
        raise Forbidden(f"{text}: it needs a key for all instances")


def runs_remote_code(spec: InstanceSpec) -> bool:
    return bool(parse(spec.extra_args).get("trust_remote_code", spec.trust_remote_code))


def model_roots(spec: InstanceSpec, settings: Settings) -> tuple[str, ...] | None:
    """The directories below which the model may be one; None for any directory, () for none."""
    return settings.local_model_roots if spec.confined or settings.local_model_roots else None


def _outside(spec: InstanceSpec, settings: Settings) -> str | None:
    """Why the model is a directory that the instance may not have; None if it may, or if that is only known later."""
    try:
        model_source.decide(spec.model_id, spec.revision, model_roots(spec, settings))
    except model_source.WrongSourceError as error:
        return error.problem if error.is_outside else None
    except InvalidConfig:  # `~` of a user who may exist on another host
        return None
    return None
