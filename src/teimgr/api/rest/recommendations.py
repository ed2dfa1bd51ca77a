"""GET /recommendations lists changes of instances with evidence; POST /recommendations/{id}/apply applies one."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from teimgr.api.rest.instances import REFUSED, UNKNOWN, ManagerDep, changed
from teimgr.api.rest.schemas import ANY_FAILURE, StrictQueryRoute, answer
from teimgr.control.capacity.advisor import DEFAULT_WINDOW_S, MAX_WINDOW_S, Advisor, Applied
from teimgr.control.capacity.autoscaler import KNOWN_FOR_S, Autoscaler
from teimgr.control.capacity.recommendations import Recommendation
from teimgr.errors import ValidationError
from teimgr.http.auth.policy import caller_of
from teimgr.http.turns import LISTING
from teimgr.spec import now_rfc3339

router = APIRouter(tags=["fleet"], responses=ANY_FAILURE, route_class=StrictQueryRoute)

Window = Annotated[
    int,
    Query(
        ge=1,
        le=MAX_WINDOW_S,
        description="seconds of the observed window, and of the one after which an applied change is judged",
    ),
]


class Expected(BaseModel):
    """The expected effect by which a change is judged."""

    metric: Literal["tokens_per_second", "waiting_seconds", "held_bytes", "known_share"]
    relation: Literal["at_least", "at_most"]
    value: float


class RecommendationInfo(BaseModel):
    """One change of one instance. `patch` is the body of its PATCH; null if no key helps."""

    id: str = Field(description="kind and instance")
    kind: Literal["idle", "replicas", "batch_tokens", "dtype", "truncated", "duplicates", "device"]
    instance: str
    finding: str
    evidence: dict[str, float]
    effect: str
    risk: str
    patch: dict[str, Any] | None
    expects: Expected | None


class AppliedInfo(BaseModel):
    """An applied recommendation; `before` are the old values of its keys, `result` the reason of its state."""

    id: str
    instance: str
    finding: str
    patch: dict[str, Any]
    before: dict[str, Any]
    expects: Expected
    applied_at: str
    window_secs: float
    until: float = Field(description="time of the judgement, in Unix time")
    extensions: int = Field(description="windows added because there was too little work to judge")
    state: Literal["watched", "kept", "taken_back", "refused", "superseded"]
    result: str | None


class Recommendations(BaseModel):
    """`applied` are the last 100, newest last."""

    timestamp: str
    window_secs: int
    recommendations: list[RecommendationInfo]
    applied: list[AppliedInfo]


@router.get("/recommendations", response_model=Recommendations)
async def recommendations(request: Request, window_secs: Window = DEFAULT_WINDOW_S) -> Response:
    """What to change about the instances that the caller may see, by the figures of the last seconds.

    An instance whose keys have just been changed, or whose last recommendation is still watched, has none; one that was
    taken back is not recommended for a day.
    """
    advisor: Advisor = request.app.state.advisor
    covers = caller_of(request.scope).covers
    found = await advisor.recommendations(window_secs, covers)
    return answer(
        {
            "timestamp": now_rfc3339(),
            "window_secs": window_secs,
            "recommendations": [_info(each) for each in found],
            "applied": [each.to_dict() for each in advisor.applied() if covers(each.instance)],
        }
    )


@router.post("/recommendations/{id}/apply", status_code=202, response_model=AppliedInfo, responses=UNKNOWN | REFUSED)
async def apply_recommendation(
    request: Request, id: str, manager: ManagerDep, window_secs: Window = DEFAULT_WINDOW_S
) -> Response:
    """Send the PATCH of a recommendation. It is judged after `window_secs`, and taken back where it brought nothing.

    The event `taken_back` then has the figures. The answer does not wait for the change: the event `refused`, and the
    state in GET /recommendations, tell of one whose workers did not start.
    """
    if instance := id.partition(".")[2]:
        caller_of(request.scope).require_instance(instance)
    advisor: Advisor = request.app.state.advisor
    found = await advisor.find(id, window_secs)
    if found.patch is None:
        raise ValidationError(f"{id}: has no PATCH; {found.effect}")
    before = manager.get(found.instance).spec
    await changed(request, found.instance, dict(found.patch))
    record: Applied = advisor.watch(found, before, window_secs)
    return answer(record.to_dict(), 202)


def _info(found: Recommendation) -> dict[str, Any]:
    return {
        "id": found.id,
        "kind": found.kind,
        "instance": found.instance,
        "finding": found.finding,
        "evidence": dict(found.evidence),
        "effect": found.effect,
        "risk": found.risk,
        "patch": None if found.patch is None else dict(found.patch),
        "expects": None if found.expects is None else found.expects._asdict(),
    }


scaling_router = APIRouter(tags=["probes"], responses=ANY_FAILURE, route_class=StrictQueryRoute)


class ScalingFigures(BaseModel):
    """The load of one instance."""

    queued_tokens: int = Field(description="tokens waiting in its workers; the last report of silent ones")
    waiting_seconds: float = Field(description="time for its replicas to compute them")
    tokens_per_second: float = Field(description="measured rate of one replica; 0: not measured yet")
    refused_per_second: float = Field(description="calls refused by full replicas, over the last minute")
    replicas: int = Field(description="those that serve")
    silent_replicas: int = Field(
        description=f"replicas without an answer; their last figures count for {KNOWN_FOR_S:g} s"
    )
    wanted: int = Field(description="desired number of replicas; equals `replicas` without max_replicas")
    reason: str


class Scaling(BaseModel):
    """`instances` by name; `flat`: the same with dots and hyphens in names replaced by underscores, for GJSON paths."""

    timestamp: str
    instances: dict[str, ScalingFigures]
    flat: dict[str, ScalingFigures]


@scaling_router.get("/metrics/scaling", response_model=Scaling)
async def scaling(request: Request) -> Response:
    """What the number of replicas depends on; an instance without a replica is there too, with zeros."""
    autoscaler: Autoscaler = request.app.state.autoscaler
    figures = await autoscaler.figures()
    rows = await LISTING.listed(orjson.dumps(each._asdict()) for each in figures.values())
    found = dict(zip(figures, map(orjson.Fragment, rows), strict=True))
    aliases = dict(zip(found, await LISTING.listed(map(scaling_alias, found)), strict=True))
    flat = {aliases[name]: each for name, each in reversed(found.items())}
    flat |= {name: found[name] for name, other in aliases.items() if name == other}
    return answer({"timestamp": now_rfc3339(), "instances": found, "flat": flat})


def scaling_alias(name: str) -> str:
    """Return a name without characters that a path in GJSON has to escape."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name)
