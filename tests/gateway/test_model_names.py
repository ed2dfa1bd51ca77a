"""Resolving the `model` of a request, and the errors for unknown names."""

from __future__ import annotations

import time

import pytest

from teimgr.auth.policy import Caller, Right
from teimgr.errors import ModelNotFound, Unavailable
from teimgr.gateway.model_names import ModelNames
from teimgr.routing.router import Router, router_view
from teimgr.spec import RouteEntry, RoutingSnapshot, State, WorkerEndpoint


def naming(*instances: str, caller: str = "*", **aliases: str) -> ModelNames:
    """Instances given as `name=model`, each with a worker, unless it is `name=model=lost`."""
    entries = []
    for given in instances:
        name, model_id, *lost = given.split("=")
        endpoints = () if lost else (WorkerEndpoint(f"/nowhere/{name}", name),)
        entries.append(RouteEntry(name, model_id, State.RUNNING, None, 4, endpoints))
    router = Router()
    router.update(RoutingSnapshot(tuple(entries)))
    return ModelNames(router, lambda: aliases).restricted(router_view(Caller("k", frozenset(Right), (caller,)), router))


def test_an_instance_goes_before_an_alias_and_that_before_a_model() -> None:
    names = naming("a=m", "b=n", "m=o", a="b", n="a")
    assert names.lease("a").instance == "a"  # the instance, not the alias
    assert names.lease("n").instance == "a"  # the alias, not the model
    assert names.lease("m").instance == "m"
    assert names.lease("o").instance == "m"


@pytest.mark.parametrize("caller", ["*", "a"])
def test_a_model_whose_workers_are_lost_is_unavailable_and_not_unknown(caller: str) -> None:
    with pytest.raises(Unavailable, match="No instance of the model 'm' takes calls now: 'a' is running"):
        naming("a=m=lost", caller=caller).lease("m")


def test_what_a_caller_may_not_use_is_not_told() -> None:
    names = naming("mine=m", "theirs=x", caller="mine", secret="theirs")
    assert names.names() == ["m", "mine"]
    for hidden in ("theirs", "x", "secret"):
        with pytest.raises(ModelNotFound, match=r"does not exist; there are 'm', 'mine'$"):
            names.lease(hidden)


def test_a_name_of_megabytes_costs_nothing_and_is_not_said_again() -> None:
    began = time.process_time()
    with pytest.raises(ModelNotFound) as caught:
        naming("a=m").lease("x" * 10_000_000)
    assert len(caught.value.message) < 400
    assert time.process_time() - began < 0.5
