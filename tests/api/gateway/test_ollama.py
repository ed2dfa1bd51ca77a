from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from teimgr.api.gateway.gateway import ModelNames
from teimgr.api.gateway.ollama import OllamaRoutes
from teimgr.http.auth.policy import CALLER, Caller, Right
from teimgr.spec import InstanceSpec, InstanceView, RouteEntry, RoutingSnapshot, State
from teimgr.wire.routing.router import Router, router_view

MODEL = "org/shared"
TEAM = Caller("team", frozenset({Right.INFERENCE}), ("team-a-*",), tenant=3)


class _Loads:
    def __init__(self) -> None:
        self.kept: list[tuple[str, float, int]] = []

    def keep(self, name: str, seconds: float, key: int) -> None:
        self.kept.append((name, seconds, key))

    def left_s(self, name: str) -> float:
        return 77.0


class _As:
    """Middleware: each request is of `caller`."""

    def __init__(self, app: ASGIApp, caller: Caller) -> None:
        self._app, self._caller = app, caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[CALLER] = self._caller
        await self._app(scope, receive, send)


@pytest.fixture
def loads() -> _Loads:
    return _Loads()


@pytest.fixture
async def team(loads: _Loads) -> TestClient:
    """A client of a key for its own instance, unloaded; that of another team runs with the same model."""
    states = {"team-a-m": State.UNLOADED, "team-b-secret": State.RUNNING}
    router = Router()
    router.update(
        RoutingSnapshot(tuple(RouteEntry(name, MODEL, state, on_demand=True) for name, state in states.items()))
    )
    views = [
        InstanceView(spec=InstanceSpec(name=name, model_id=MODEL, load="on_demand"), state=state)
        for name, state in states.items()
    ]
    names = ModelNames(router, dict)
    routes = OllamaRoutes(
        lambda caller: names.restricted(router_view(caller, router), caller.is_operator), lambda: views, 0, loads
    )
    return TestClient(_As(Starlette(routes=routes.routes()), TEAM))


async def test_a_restricted_key_unloads_and_sees_its_own_instance_alone(team: TestClient, loads: _Loads) -> None:
    ended = team.post("/api/generate", json={"model": MODEL, "keep_alive": 0})
    assert ended.json()["done_reason"] == "unload"
    assert loads.kept == [("team-a-m", 0.0, 3)]
    assert team.get("/api/ps").json()["models"] == []  # its own is not loaded
