"""POST /hosts/tokens and DELETE /hosts/{name}: who may join a cluster, and who may not stay."""

from __future__ import annotations

from typing import Annotated, Protocol

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from teimgr.api.rest.schemas import ANY_FAILURE, Failure, StrictQueryRoute, Text, answer, read_json
from teimgr.errors import ObjectNotFound, Unsupported

router = APIRouter(tags=["hosts"], responses=ANY_FAILURE, route_class=StrictQueryRoute)

LIFE_SECS = 3600.0


class HostEnrolment(Protocol):
    """Who may join the cluster."""

    def join_token(self, node: str | None, life_s: float) -> str:
        """A token by which one host may join, once; only under the name `node`, if that is given.

        Raises:
            ValidationError: the name, the life, or the number of unused tokens exceeds its limit.
        """

    def remove_host(self, name: str) -> bool:
        """Revoke a host's certificates; False where it is not in the fleet."""


class JoinTokenRequest(BaseModel):
    """Body of POST /hosts/tokens."""

    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra={"examples": [{"node": "two"}]})

    node: Text | None = Field(None, description="the only name that it admits; such a token may replace a host")
    life_secs: float = Field(LIFE_SECS, description="within which it is to be used, at most 7 days")


class JoinTokenInfo(BaseModel):
    """A token for `teimgr node join`; it is stored nowhere."""

    token: str
    node: str | None
    life_secs: float


class RemovedHost(BaseModel):
    """A host that is not in the fleet any more."""

    name: str


def _enrolment_of(request: Request) -> HostEnrolment | None:
    enrolment: HostEnrolment | None = request.app.state.enrolment
    return enrolment


EnrolmentDep = Annotated[HostEnrolment | None, Depends(_enrolment_of)]


@router.post("/hosts/tokens", response_model=JoinTokenInfo, status_code=201)
async def create_join_token(request: Request, enrolment: EnrolmentDep) -> Response:
    """A token by which one host may join the cluster, once."""
    body = await read_json(request, JoinTokenRequest)
    token = _present(enrolment).join_token(body.node, body.life_secs)
    return answer({"token": token, "node": body.node, "life_secs": body.life_secs}, 201)


@router.delete("/hosts/{name}", response_model=RemovedHost, responses={404: {"model": Failure}})
async def remove_host(name: str, enrolment: EnrolmentDep) -> Response:
    """Revoke a host's certificates. It takes no more workers, and those of other hosts refuse it; its own are moved,
    where they can run elsewhere.
    """
    if not _present(enrolment).remove_host(name):
        raise ObjectNotFound("host", name)
    return answer({"name": name})


def _present(enrolment: HostEnrolment | None) -> HostEnrolment:
    if enrolment is None:
        raise Unsupported("This fleet has one host: the daemon has no [cluster] address")
    return enrolment
