"""Which instances a caller means: by tags, status and model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from fastapi import Query

from teimgr.spec import InstanceView, State

Tags = Annotated[
    list[str] | None,
    Query(alias="tag", description="team:search, or team for any value; several must all fit", max_length=64),
]
Statuses = Annotated[list[State] | None, Query(alias="status", description="several: any of them")]
ModelIds = Annotated[list[str] | None, Query(alias="model_id", description="several: any of them")]


def chosen(
    views: Iterable[InstanceView],
    tags: Sequence[str] | None = None,
    statuses: Sequence[State] | None = None,
    models: Sequence[str] | None = None,
) -> list[InstanceView]:
    """Those that fit everything that is asked for."""
    return [
        view
        for view in views
        if all(has_tag(view, tag) for tag in tags or ())
        and (not statuses or view.state in statuses)
        and (not models or view.spec.model_id in models)
    ]


def has_tag(view: InstanceView, wanted: str) -> bool:
    """Whether the instance has the tag `name:value`, or `name` with any value."""
    name, colon, value = wanted.partition(":")
    found = view.spec.tags.get(name)
    return found is not None and (not colon or found == value)
