"""`[on_demand]`: models that calls may have loaded although no instance was declared for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from teimgr.models.source import is_hub_id
from teimgr.spec import U32, key


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDemandSettings:
    """A call that names a model id of `models` gets an instance made for it, with `load = "on_demand"`."""

    models: tuple[str, ...] = key((), "patterns of hub ids, such as 'BAAI/bge-*', that calls may load; none: no model")
    idle_timeout_secs: int = key(600, "idle_timeout_secs of the instances that calls make", low=0, high=U32)
    max_instances: int = key(100, "instances that calls may have made at a time", low=1, high=10_000)


def allows(patterns: Sequence[str], model_id: str) -> bool:
    """True if a call may have a model loaded: it is a hub id, and one of the patterns fits."""
    return bool(patterns) and is_hub_id(model_id) and any(fnmatchcase(model_id, each) for each in patterns)
