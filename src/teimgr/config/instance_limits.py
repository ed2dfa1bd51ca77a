"""Limits that the settings and the caller's API key set for an instance: code, files, ports, threads and tokens."""

from __future__ import annotations

import os
from dataclasses import replace

from teimgr.config.instance_keys import parse
from teimgr.config.settings import Settings
from teimgr.errors import Forbidden, InvalidConfig, ValidationError
from teimgr.models import source as model_source
from teimgr.spec import InstanceSpec

RESTRICTED_BATCH_TOKENS = 131_072
"""The most that a key for some instances may ask for; four times what a card is given by default."""


def check_allowed(spec: InstanceSpec, settings: Settings) -> None:
    """Check what the settings allow instances to be.

    Raises:
        ValidationError: code of the model's repository, or a directory outside of `local_model_roots`.
    """
    if runs_remote_code(spec) and not settings.allow_remote_code:
        raise ValidationError(
            "trust_remote_code: code of models is off; allow_remote_code = true in the settings allows it"
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
