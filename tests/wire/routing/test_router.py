"""The replica that a target gets, or the error. Links are opened in tests/wire/routing/test_links.py."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from teimgr.errors import InstanceNotFound, InvalidInput, ModelNotFound, NotLoaded, TeimgrError, Unavailable
from teimgr.http.auth.policy import Caller, Right
from teimgr.spec import RouteEntry, RoutingSnapshot, State, WorkerEndpoint
from teimgr.wire.frames import Method
from teimgr.wire.protobuf import Target
from teimgr.wire.routing.router import Lease, Router


def entry(
    name: str, *endpoints: str, model_id: str = "m", state: State = State.RUNNING, reason: str | None = None
) -> RouteEntry:
    return RouteEntry(
        name, model_id, state, reason, 4, tuple(WorkerEndpoint(f"/nowhere/{each}", each) for each in endpoints)
    )


def router(*entries: RouteEntry) -> Router:
    made = Router()
    made.update(RoutingSnapshot(entries))
    return made


def served_by(lease: Lease) -> str:
    return lease._replica.endpoint.incarnation


@pytest.mark.clause("M1.5-not-running")
@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        (Target(), InvalidInput, "No routing specified"),
        (Target(instance_name=""), InvalidInput, "Instance name cannot be empty"),
        (Target(model_id=""), InvalidInput, "Model id cannot be empty"),
        (Target(instance_name="A"), InstanceNotFound, "Instance 'A' not found"),
        (Target(model_id="other"), ModelNotFound, "No running instance of model 'other' found"),
        (Target(model_id="stopped-model"), ModelNotFound, "No running instance of model 'stopped-model' found"),
        (Target(instance_index=9), InstanceNotFound, "Instance index 9 not found: there are 4 instances"),
        (Target(instance_name="off"), Unavailable, "Instance 'off' is not running (status: stopped)"),
        (Target(instance_index=1), Unavailable, "Instance 'off' is not running (status: stopped)"),
        (Target(instance_name="bad"), Unavailable, "Instance 'bad' is not running (status: failed): no such model"),
    ],
)
def test_a_target_without_a_worker_is_told_why(target: Target, kind: type[TeimgrError], message: str) -> None:
    fleet = router(
        entry("a", "1"),
        entry("off", state=State.STOPPED, model_id="stopped-model"),
        entry("bad", state=State.FAILED, reason="no such model"),
        entry("b", "2"),
    )

    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        fleet.lease(target)


@pytest.mark.clause("M1.5-model-and-index")
def test_name_and_index_lead_to_the_instance() -> None:
    fleet = router(entry("a", "1"), entry("b", "2"))

    assert served_by(fleet.lease(Target(instance_name="b"))) == "2"
    assert served_by(fleet.lease(Target(instance_index=0))) == "1"


@pytest.mark.clause("M1.5-model-and-index", "N-model-id")
def test_a_model_id_leads_to_any_running_instance_of_it() -> None:
    fleet = router(entry("a", "1"), entry("b", state=State.STARTING), entry("c", "3"), entry("d", "4", model_id="n"))

    with fleet.lease(Target(model_id="m")) as first, fleet.lease(Target(model_id="m")) as second:
        assert {served_by(first), served_by(second)} == {"1", "3"}
        assert {first.instance, second.instance} == {"a", "c"}


def in_space(name: str, space: str, *, settings: str = "", state: State = State.RUNNING, **more: bool) -> RouteEntry:
    endpoints = (WorkerEndpoint(f"/nowhere/{name}", name, space=space),) if state is State.RUNNING else ()
    return RouteEntry(name, "m", state, endpoints=endpoints, space_settings=settings, **more)


def all_served_by(fleet: Router, covers: Callable[[str], bool] = lambda name: True) -> set[str]:
    leases = [fleet.lease(Target(model_id="m"), covers) for _ in range(4)]
    for lease in leases:
        lease.__enter__()
    return {served_by(lease) for lease in leases} | {name for lease in leases for name, _ in lease._candidates}


def test_a_model_id_means_one_space_that_of_its_first_instance_that_runs() -> None:
    fleet = router(
        in_space("off", "z", state=State.STOPPED), in_space("b", "x"), in_space("a", "y"), in_space("c", "x")
    )

    assert all_served_by(fleet) == {"b", "c"}
    assert all_served_by(fleet, lambda name: name in ("a", "off")) == {"a"}
    assert served_by(fleet.lease(Target(instance_name="a"))) == "a"
    fleet.apply("b", None)
    assert all_served_by(fleet) == {"a"}
    fleet.update(RoutingSnapshot((in_space("c", "x"), in_space("a", "y"))))
    assert all_served_by(fleet) == {"c"}


def test_a_restart_does_not_change_the_space_that_a_model_id_means() -> None:
    fleet = router(in_space("a", "x"), in_space("b", "y", settings="cls"))
    fleet.apply("a", in_space("a", "", state=State.STARTING))
    with pytest.raises(Unavailable) as failure:
        fleet.lease(Target(model_id="m"))
    assert failure.value.message.startswith("Instance 'a' is not running (status: starting); other instances of")
    fleet.apply("c", in_space("c", "x", settings="mean"))
    assert all_served_by(fleet) == {"c"}
    fleet.apply("a", in_space("a", "y"))  # as its revision is a branch, which has moved
    assert all_served_by(fleet) == {"a", "b"}


@pytest.mark.parametrize(("settings", "served"), [("", {"b"}), ("cls", None)])
def test_a_space_that_is_not_known_yet_is_told_by_the_settings(settings: str, served: set[str] | None) -> None:
    fleet = router(in_space("a", "", state=State.STARTING), in_space("b", "y", settings=settings))
    if served is not None:
        assert all_served_by(fleet) == served
        return
    with pytest.raises(Unavailable, match="'a' is not running"):
        fleet.lease(Target(model_id="m"))
    fleet.apply("a", in_space("a", "", state=State.FAILED))
    assert all_served_by(fleet) == {"b"}


def test_an_unloaded_model_is_loaded_for_its_space() -> None:
    fleet = router(in_space("a", "x", on_demand=True), in_space("b", "y", settings="cls"), in_space("c", "x"))
    fleet.apply("a", in_space("a", "", state=State.UNLOADED, on_demand=True))
    assert all_served_by(fleet) == {"c"}
    fleet.apply("c", None)
    with pytest.raises(NotLoaded) as failure:
        fleet.lease(Target(model_id="m"))
    assert failure.value.instance == "a"


@pytest.mark.parametrize(("names", "kind"), [(("m", "team-*"), ModelNotFound), (("m", "org-*"), NotLoaded)])
def test_a_key_has_no_model_loaded_of_which_others_have_the_only_instance(
    names: tuple[str, ...], kind: type[TeimgrError]
) -> None:
    fleet = Router(may_load=lambda model_id: True)
    fleet.update(RoutingSnapshot((entry("org-1", state=State.STOPPED),)))

    with pytest.raises(kind):
        fleet.lease(Target(model_id="m"), Caller("k", frozenset(Right), names).covers)
    with pytest.raises(NotLoaded):
        fleet.lease(Target(model_id="m2"), Caller("k", frozenset(Right), ("m2",)).covers)


@pytest.mark.clause("D-replicas")
def test_the_replica_with_the_fewest_bytes_under_way_wins() -> None:
    fleet = router(entry("a", "1", "2", "3"))
    busy = dict(zip("123", (300, 20, 100), strict=True))
    for replica in next(iter(fleet._by_name.values())).replicas:
        replica.outstanding_bytes = busy[replica.endpoint.incarnation]

    assert served_by(fleet.lease(Target(instance_name="a"))) == "2"


def test_open_leases_spread_over_replicas_at_rest() -> None:
    fleet = router(entry("a", "1", "2"))

    with fleet.lease(Target(instance_name="a")) as first, fleet.lease(Target(instance_name="a")) as second:
        assert served_by(first) != served_by(second)
        with fleet.lease(Target(instance_name="a")):
            pass

    assert served_by(fleet.lease(Target(instance_name="a"))) == "1"


def test_a_worker_that_stays_in_the_directory_keeps_its_links() -> None:
    fleet = router(entry("a", "1"))
    before = fleet.lease(Target(instance_name="a"))

    fleet.update(RoutingSnapshot((entry("new", "9"), entry("a", "1", "2"))))

    assert not before.is_over
    assert fleet.lease(Target(instance_index=0)).instance == "new"


def test_the_figures_of_links_name_the_instances_that_have_or_had_one() -> None:
    """A pass over thousands that are declared held the loop of a mux for 60 ms."""
    fleet = router(entry("loaded", "1"), entry("rests", state=State.UNLOADED), entry("rested", "2"))
    fleet._stats["rested"].connects = 1
    fleet.update(RoutingSnapshot((entry("loaded", "1"), entry("rests"), entry("rested", state=State.UNLOADED))))
    assert [row["instance"] for row in fleet.link_stats()] == ["loaded", "rested"]


def test_the_list_of_what_a_caller_covers_is_kept_until_a_route_changes() -> None:
    fleet = router(entry("a-1", "1"), entry("b", "2"))
    caller = Caller("k", frozenset({Right.INFERENCE}), instances=("a-*",))
    covered = fleet.covered(caller)
    assert [each.name for each in covered.entries] == ["a-1"]
    assert fleet.covered(caller) is covered
    fleet.apply("a-2", entry("a-2", "3"))
    assert [each.name for each in fleet.covered(caller).entries] == ["a-1", "a-2"]


def test_a_lease_is_over_when_its_worker_leaves_the_directory() -> None:
    fleet = router(entry("a", "1"))
    lease = fleet.lease(Target(instance_name="a"))

    fleet.update(RoutingSnapshot((entry("a", "2"),)))

    assert lease.is_over
    assert served_by(fleet.lease(Target(instance_name="a"))) == "2"


async def test_an_instance_whose_every_worker_was_lost_is_unavailable_until_another_incarnation_comes() -> None:
    fleet = router(entry("a", "1"))
    next(iter(fleet._by_name.values())).replicas[0].lost = True

    fleet.update(RoutingSnapshot((entry("a", "1"), entry("b", "5"))))
    with pytest.raises(Unavailable, match=r"^Instance 'a' is not running \(status: restarting\): its worker is gone$"):
        fleet.lease(Target(instance_name="a"))

    fleet.update(RoutingSnapshot((entry("a", "2"),)))
    assert served_by(fleet.lease(Target(instance_name="a"))) == "2"
    await fleet.close()


async def test_a_worker_that_nobody_can_reach_is_taken_out() -> None:
    fleet = router(entry("a", "1"))
    lease = fleet.lease(Target(instance_name="a"))

    with pytest.raises(Unavailable, match=r"^Failed to connect to backend: "):
        await lease.call(2, b"")  # type: ignore[arg-type]

    assert lease.is_over
    await fleet.close()


class Payload(bytearray):
    """Bytes to which a weak reference can be made."""


async def test_a_failed_call_frees_its_payload_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error was in a reference cycle with the frames of the call, and kept 40 MiB until a collection."""

    async def start(*_: object) -> Any:
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(InvalidInput("no"))
        return SimpleNamespace(answer=answer, cancel=lambda: None)

    lease = router(entry("a", "1")).lease(Target(instance_name="a"))
    monkeypatch.setattr(lease._replica, "start", start)
    payload = Payload(10)
    is_kept = weakref.ref(payload)
    gc.disable()
    try:
        with pytest.raises(InvalidInput) as raised:
            await lease.call(Method.EMBED, payload, timeout_s=None)
        del payload, raised
        assert is_kept() is None
    finally:
        gc.enable()
