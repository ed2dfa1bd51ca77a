"""How far a change of an instance reaches: whether its workers are to be told something else. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from teimgr.control.workerspec import worker_spec
from teimgr.settings import Settings
from teimgr.spec import InstanceSpec


class Reach(Enum):
    """What a change needs."""

    IN_PLACE = "the daemon alone knows of it"
    SCALE = "other workers of the same kind come or go"
    REPLACE = "every worker gives way to another"


def changed(spec: InstanceSpec, changes: Mapping[str, Any]) -> InstanceSpec:
    """`spec` with `changes`; a key that is None goes back to its default."""
    blank = InstanceSpec(name=spec.name, model_id=spec.model_id)
    values = {key: getattr(blank, key) if value is None else value for key, value in changes.items()}
    return replace(spec, **values)


def reach(old: InstanceSpec, new: InstanceSpec, settings: Settings) -> Reach:
    """What it takes to get from one to the other.

    Raises:
        InvalidConfig: an extra argument of `new` cannot be understood.
    """

    def told(spec: InstanceSpec) -> str:
        return worker_spec(spec, settings, gpu_uuid=None, threads=1).hash

    if told(old) != told(new) or old.gpu_id != new.gpu_id:
        return Reach.REPLACE
    return Reach.IN_PLACE if old.replicas == new.replicas else Reach.SCALE
