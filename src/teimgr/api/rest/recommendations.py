"""GET /recommendations: what to change about instances, with evidence; POST /recommendations/{id}/apply does it."""

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
        description="how many of the last seconds are looked at, and after how many an applied change is judged",
    ),
]


class Expected(BaseModel):
    """The expected effect of a change, by which it is judged."""

    metric: Literal["tokens_per_second", "waiting_seconds", "held_bytes", "known_share"]
    relation: Literal["at_least", "at_most"]
    value: float


class RecommendationInfo(BaseModel):
    """One change of one instance. `patch` is the body of its PATCH; null where no key can do it."""

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
    """A recommendation that was applied; `before` has the keys as they were, `result` why its state is what it is."""

    id: str
    instance: str
    finding: str
    patch: dict[str, Any]
    before: dict[str, Any]
    expects: Expected
    applied_at: str
    window_secs: float
    until: float = Field(description="when it is judged, in Unix time")
    extensions: int = Field(description="windows that were added as too little was computed")
    state: Literal["watched", "kept", "taken_back", "refused", "superseded"]
    result: str | None


class Recommendations(BaseModel):
    """`applied` has the last hundred, the latest last."""

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

    queued_tokens: int = Field(description="tokens that wait in its workers; of silent ones, as last reported")
    waiting_seconds: float = Field(description="how long its replicas take to compute them")
    tokens_per_second: float = Field(description="what one replica computes, as measured; 0: not yet")
    refused_per_second: float = Field(description="calls that full replicas refused, over the last minute")
    replicas: int = Field(description="those that serve")
    silent_replicas: int = Field(
        description=f"those that gave no figures now; their last ones count for {KNOWN_FOR_S:g} s, then nothing"
    )
    wanted: int = Field(description="those that there should be; as `replicas` without max_replicas")
    reason: str


class Scaling(BaseModel):
    """`instances` by name; `flat` the same by names whose dots and hyphens are underscores, for a path in GJSON."""

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
