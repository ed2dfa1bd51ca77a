"""The task of residence over a scripted owner: calls wait, are answered or refused, and nothing waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from types import MappingProxyType

import pytest
from tests.support.polling import eventually

from teimgr.control.residence import residence as module
from teimgr.control.residence.events import Refusal, Refuse
from teimgr.control.residence.mux_calls import LoadsForMux
from teimgr.control.residence.residence import Residence, error_of
from teimgr.errors import (
    Code,
    FailedToLoad,
    InstanceNotFound,
    ModelLoadFailed,
    ModelNotFound,
    Stopped,
    TeimgrError,
    Unavailable,
)
from teimgr.spec import Incident, InstanceSpec, RouteEntry, State
from teimgr.wire.routing.directory import Directory
from teimgr.wire.status import retry_after_s


class ScriptedOwner:
    """Starts and ends workers when it is told to; the directory says what became of them."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.specs: dict[str, InstanceSpec] = {}
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.notes: list[Incident] = []
        self.asked: list[tuple[str, dict[str, float | None]]] = []
        self.busy: set[str] = set()
        self.failed: dict[str, tuple[str, float | None]] = {}
        self.loaded = asyncio.Event()
        self.load_times: dict[str, float] = {}
        self.counts: dict[str, dict[str, tuple[int, int] | None]] = {}
        self.count_begun, self.may_count = asyncio.Event(), asyncio.Event()
        self.may_count.set()
        self.may_unload = asyncio.Event()
        self.may_unload.set()
        self.refused_loads: list[Exception] = []
        self.refused_unloads: list[Exception] = []
        self.failed_code: Code | None = None
        self.given_up: list[str] = []
        self.lost_places = 0  # how many instances go before the call that they are made for

    def declare_instance(self, name: str, state: State = State.UNLOADED, **keys: object) -> None:
        self.specs[name] = InstanceSpec(name=name, model_id=name, load="on_demand", **keys)  # type: ignore[arg-type]
        self.publish(name, state)

    def publish(self, name: str, state: State) -> None:
        self.directory.publish(RouteEntry(name, name, state, on_demand=True))

    async def declare(self, model_id: str, key: str, value: Callable[[str], float | None]) -> str | None:
        self.asked.append((key, {name: value(name) for name in self.specs}))
        if model_id != "owner/model":
            return None
        self.declare_instance("made")
        if self.lost_places:
            self.lost_places -= 1
            self.remove("made")
        return "made"

    def remove(self, name: str) -> None:
        del self.specs[name]
        self.directory.remove(name)

    def spec(self, name: str) -> InstanceSpec | None:
        return self.specs.get(name)

    def load_seconds(self, name: str) -> float | None:
        return self.load_times.get(name)

    def learn_load(self, name: str, seconds: float) -> None:
        self.load_times[name] = seconds

    def failure(self, name: str) -> tuple[str, float | None, Code | None]:
        return (*self.failed[name], self.failed_code)

    async def give_up(self, name: str) -> None:
        self.given_up.append(name)
        self.remove(name)

    def devices(self, name: str) -> tuple[str, ...]:
        return ("B",)

    async def load(self, name: str) -> None:
        if self.refused_loads:
            raise self.refused_loads.pop()
        self.loads.append(name)
        self.publish(name, State.STARTING)
        self.loaded.set()

    async def unload(self, name: str, reason: str, incident: Incident | None) -> bool:
        if self.refused_unloads:
            raise self.refused_unloads.pop()
        if name in self.busy:
            return False
        self.unloads.append(name)
        self.publish(name, State.STOPPING)
        await self.may_unload.wait()
        self.publish(name, State.UNLOADED)
        return True

    async def usage(self, name: str) -> Mapping[str, tuple[int, int] | None]:
        self.count_begun.set()
        await self.may_count.wait()
        return self.counts.get(name, {"w": (1, int(name in self.busy))})

    def note(self, name: str, incident: Incident) -> None:
        self.notes.append(incident)


class ScriptedTenants:
    """`tokens` of each tenant by instance."""

    def __init__(self, tokens: Mapping[str, Mapping[int, int]]) -> None:
        self._tokens = tokens

    def callers(self, instance: str) -> Mapping[int, int]:
        return dict(self._tokens.get(instance, {}))

    def badge(self, tenant: int) -> str:
        return f"key-{tenant}" if tenant else ""


@asynccontextmanager
async def running(
    tokens: Mapping[str, Mapping[int, int]] = MappingProxyType({}),
) -> AsyncIterator[tuple[ScriptedOwner, Residence]]:
    directory = Directory()
    owner = ScriptedOwner(directory)
    residence = Residence(owner, directory, ScriptedTenants(tokens))
    task = asyncio.create_task(residence.run())
    try:
        yield owner, residence
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def call(residence: Residence, name: str, timeout_s: float | None = 10.0) -> str:
    async with residence.loaded(name, timeout_s):
        return name


async def test_calls_share_a_load_and_are_answered() -> None:
    async with running() as (owner, residence):
        owner.declare_instance("a")
        calls = [asyncio.create_task(call(residence, "a")) for _ in range(5)]
        await owner.loaded.wait()
        owner.publish("a", State.RUNNING)
        assert await asyncio.gather(*calls) == ["a"] * 5
        assert owner.loads == ["a"]
        assert await call(residence, "a") == "a"


@pytest.mark.parametrize(
    ("state", "failure", "error"),
    [
        (State.STOPPED, None, Stopped),
        (State.FAILED, ("no such file", None), ModelLoadFailed),
        (State.FAILED, ("the card is full", 25.0), FailedToLoad),
        (None, None, InstanceNotFound),
    ],
    ids=["stopped", "failed for good", "failed for now", "deleted"],
)
async def test_calls_that_wait_are_refused_when_their_model_goes(
    state: State | None, failure: tuple[str, float | None] | None, error: type[TeimgrError]
) -> None:
    async with running() as (owner, residence):
        owner.declare_instance("a")
        waiting = asyncio.create_task(call(residence, "a"))
        await owner.loaded.wait()
        if state is None:
            owner.remove("a")
        else:
            owner.failed = {"a": failure} if failure else {}
            owner.publish("a", state)
        with pytest.raises(error) as refused:
            await waiting
        told = TeimgrError.UNTOLD if state is State.STOPPED else None
        assert refused.value.retry_after_s == (failure[1] if failure else told)


async def test_a_call_waits_no_longer_than_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as (owner, residence):
        owner.load_times["a"] = 0.01
        owner.declare_instance("a")
        with pytest.raises(Unavailable, match=r"was not loaded within 0\.05 s"):
            await call(residence, "a", 0.05)
        monkeypatch.setattr(module, "WAIT_LIMIT_S", 0.05)
        with pytest.raises(Unavailable, match=r"was not loaded within 0\.05 s") as refused:
            await call(residence, "a", None)
        assert refused.value.retry_after_s == 0.0  # the load is overdue
    assert error_of(Refuse(1, Refusal.NO_ROOM, "no more can be")).retry_after_s == TeimgrError.UNTOLD
    assert retry_after_s(error_of(Refuse(1, Refusal.QUEUE, "too many wait", 95.5))) == 96


async def test_a_call_that_names_an_allowed_model_has_an_instance_made() -> None:
    async with running() as (owner, residence):
        waiting = asyncio.create_task(call(residence, "owner/model"))
        await owner.loaded.wait()
        assert owner.loads == ["made"]
        owner.publish("made", State.RUNNING)
        await waiting
        with pytest.raises(InstanceNotFound):
            await call(residence, "owner/other")


async def test_a_call_whose_instance_gave_its_place_to_another_model_has_one_made_again() -> None:
    async with running() as (owner, residence):
        owner.lost_places = 1
        waiting = asyncio.create_task(call(residence, "owner/model"))
        await owner.loaded.wait()
        owner.publish("made", State.RUNNING)
        await waiting
        assert len(owner.asked) == 2


async def test_an_instance_that_a_call_makes_is_that_of_its_key_whose_idle_ones_have_a_value() -> None:
    async with running() as (owner, residence):
        for name in ("idle", "loading", "busy"):
            owner.declare_instance(name)
        owner.publish("loading", State.STARTING)
        owner.publish("busy", State.RUNNING)
        async with residence.loaded("busy", 10.0):
            line = Line()
            calls = LoadsForMux(line, residence, owner.loaded.wait)
            calls.take({"load": [1, "owner/model", 10.0], "tenant": 3})
            await owner.loaded.wait()
        assert owner.asked == [("key-3", {"idle": 0.0, "loading": None, "busy": None})]
        calls.close()


async def test_the_end_of_the_daemon_answers_every_call() -> None:
    async with running() as (owner, residence):
        owner.declare_instance("a")
        waiting = asyncio.create_task(call(residence, "a"))
        await owner.loaded.wait()
    with pytest.raises(Unavailable, match="the daemon is ending"):
        await waiting


async def test_a_daemon_that_leaves_its_loads_to_the_next_one_tells_when_to_come_again() -> None:
    async with running() as (owner, residence):
        owner.load_times["a"] = 20.0
        owner.declare_instance("a")
        waiting = asyncio.create_task(call(residence, "a", 60.0))
        await owner.loaded.wait()
        residence.leave_to_next()
    with pytest.raises(Unavailable, match="the next one continues the load") as refused:
        await waiting
    assert 0 < (refused.value.retry_after_s or 0) <= 20


async def test_an_idle_model_is_unloaded_and_a_busy_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COUNT_INTERVAL_S", 0.01)
    async with running() as (owner, _):
        for name in ("a", "b"):
            owner.declare_instance(name, idle_timeout_secs=1)
            owner.publish(name, State.RUNNING)
        owner.busy.add("b")
        await eventually(lambda: owner.unloads == ["a"])
        owner.busy.clear()
        await eventually(lambda: owner.unloads == ["a", "b"])


async def test_calls_count_by_worker_so_that_one_which_leaves_or_misses_an_answer_makes_no_model_hot() -> None:
    async with running() as (owner, residence):
        owner.counts["a"] = {"u": (100_000, 0), "v": (200_000, 0)}  # of an earlier daemon
        owner.declare_instance("a")
        owner.publish("a", State.RUNNING)
        await eventually(lambda: residence.phases() == {"a": "loaded"})
        model = residence._fleet.models["a"]
        for counts, calls in (
            ({"u": (100_000, 0), "v": (200_000, 0)}, 0),
            ({"u": None, "v": (200_001, 0)}, 1),
            ({"u": (100_000, 0), "v": (200_001, 0)}, 1),
            ({"u": (100_000, 0), "v": (200_000, 0)}, 1),  # a count that was overtaken by the one before
            ({"u": (100_002, 0), "v": (200_001, 0)}, 3),
            ({"v": (200_001, 0)}, 3),
            ({"v": (200_001, 0), "w": (5, 0)}, 8),
        ):
            owner.counts["a"] = counts  # type: ignore[assignment]
            await residence.rehearsal()
            assert model.calls == calls


async def test_the_calls_of_a_load_count_from_its_start() -> None:
    async with running() as (owner, residence):
        owner.declare_instance("a")
        owner.publish("a", State.STARTING)
        owner.publish("a", State.RUNNING)
        await eventually(lambda: residence.phases() == {"a": "loaded"})
        owner.counts["a"] = {"w": (4, 0)}
        await residence.rehearsal()
        assert residence._fleet.models["a"].calls == 4


async def test_the_calls_of_adopted_workers_came_before() -> None:
    """The instance is starting until they are taken over."""
    async with running() as (owner, residence):
        owner.counts["a"] = {"w": (100_000, 0)}
        owner.declare_instance("a", state=State.STARTING)
        owner.publish("a", State.RUNNING)
        await eventually(lambda: residence.phases() == {"a": "loaded"})
        for counts, calls in (({"w": (100_000, 0)}, 0), ({"w": (100_001, 0)}, 1)):
            owner.counts["a"] = counts
            await residence.rehearsal()
            assert residence._fleet.models["a"].calls == calls


async def test_a_deleted_instance_whose_name_could_be_a_models_id_is_not_made_again() -> None:
    async with running() as (owner, residence):
        owner.declare_instance("owner/model")
        waiting = asyncio.create_task(call(residence, "owner/model"))
        await owner.loaded.wait()
        owner.remove("owner/model")
        with pytest.raises(InstanceNotFound):
            await waiting
        assert not owner.asked


@pytest.mark.parametrize("state", [None, State.STOPPED], ids=["deleted", "stopped"])
async def test_a_model_that_goes_while_its_calls_are_counted_is_left_out(state: State | None) -> None:
    async with running() as (owner, residence):
        owner.declare_instance("a")
        owner.publish("a", State.RUNNING)
        await eventually(lambda: residence.phases() == {"a": "loaded"})
        owner.busy.add("a")
        owner.count_begun.clear()
        owner.may_count.clear()
        relieving = asyncio.create_task(residence.relieve("b", 50, 10, {"a": 50}))
        planning = asyncio.create_task(residence.rehearsal())
        await owner.count_begun.wait()
        if state is None:
            owner.remove("a")
        else:
            owner.publish("a", state)
        await eventually(lambda: residence.phases() != {"a": "loaded"})
        owner.may_count.set()
        assert not await asyncio.wait_for(relieving, 30)
        await planning
        assert not any(model.is_busy for model in residence._fleet.models.values())


async def test_a_worker_that_does_not_answer_holds_up_no_call() -> None:
    async with running() as (owner, residence):
        owner.may_count.clear()
        owner.declare_instance("a")
        owner.publish("a", State.RUNNING)
        owner.declare_instance("b")
        await owner.count_begun.wait()
        waiting = asyncio.create_task(call(residence, "b"))
        await asyncio.wait_for(owner.loaded.wait(), 30)
        owner.publish("b", State.RUNNING)
        assert await asyncio.wait_for(waiting, 30) == "b"
        assert not owner.may_count.is_set()


async def test_what_a_key_asks_for_shortens_no_stay_of_the_other_keys_that_have_called() -> None:
    tokens = {"a": {1: 10, 2: 10}, "b": {2: 10}}
    async with running(tokens) as (owner, residence):
        for name in tokens:
            owner.declare_instance(name)
            owner.publish(name, State.RUNNING)
        for name in tokens:
            residence.keep(name, 0.0, key=2)
        await eventually(lambda: owner.unloads == ["b"])
        assert residence.left_s("a") is None  # as it is declared, for the first key


async def loading_b_beside_a(owner: ScriptedOwner, residence: Residence) -> asyncio.Task[str]:
    """Begin to load `b` for a call while `a` is loaded; returns the call."""
    for name in ("a", "b"):
        owner.declare_instance(name)
    owner.publish("a", State.RUNNING)
    waiting = asyncio.create_task(call(residence, "b"))
    await owner.loaded.wait()
    return waiting


async def test_a_load_without_memory_has_an_idle_model_evicted_and_is_judged_again() -> None:
    async with running() as (owner, residence):
        waiting = await loading_b_beside_a(owner, residence)
        again = await asyncio.wait_for(residence.relieve("b", 50, 10, {"a": 50}), 30)
        assert again
        assert owner.unloads == ["a"]
        owner.publish("b", State.RUNNING)
        assert await waiting == "b"


async def test_a_model_that_is_pinned_while_it_is_loaded_is_not_evicted(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as (owner, residence):
        waiting = await loading_b_beside_a(owner, residence)
        owner.specs["a"] = replace(owner.specs["a"], pinned=True)
        residence.on_change("a")
        residence.on_change("unknown")
        assert not await asyncio.wait_for(residence.relieve("b", 50, 10, {"a": 50}), 30)
        assert "a" not in owner.unloads
        assert [vars(each).get("held_by") for each in caplog.records if each.levelname == "WARNING"] == ["a"]
        owner.remove("b")
        with pytest.raises(TeimgrError):
            await waiting


async def test_a_model_whose_unloading_fails_by_a_defect_serves_on() -> None:
    async with running() as (owner, residence):
        waiting = await loading_b_beside_a(owner, residence)
        owner.refused_unloads = [KeyError("a defect")]
        relieved = asyncio.create_task(residence.relieve("b", 50, 10, {"a": 50}))
        await eventually(lambda: not owner.refused_unloads)
        await eventually(lambda: residence.phases()["a"] == "loaded")
        assert await asyncio.wait_for(call(residence, "a"), 30) == "a"
        owner.remove("b")
        assert not await asyncio.wait_for(relieved, 30)
        with pytest.raises(TeimgrError):
            await waiting


async def test_a_load_that_is_not_given_up_after_all_is_not_taken_for_a_loaded_model() -> None:
    async with running() as (owner, residence):
        owner.declare_instance("a")
        waiting = asyncio.create_task(call(residence, "a"))
        await owner.loaded.wait()
        owner.busy.add("a")  # as while it is updated
        relieved = asyncio.create_task(residence.relieve("a", 50, 10, {"other": 50}))
        with pytest.raises(Unavailable):
            await waiting
        assert not await asyncio.wait_for(relieved, 30)
        await eventually(lambda: residence.phases()["a"] in ("loading", "loaded"))
        assert residence.phases()["a"] == "loading"


@pytest.mark.parametrize("error", [Unavailable("not now"), KeyError("a defect")], ids=["refused", "defect"])
async def test_a_load_that_was_refused_before_a_worker_started_is_tried_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOAD_AGAIN_S", 0.05)
    async with running() as (owner, residence):
        owner.declare_instance("a")
        owner.refused_loads = [error]
        with pytest.raises(FailedToLoad) as refused:
            await call(residence, "a")
        assert refused.value.retry_after_s == 0.05
        await eventually(lambda: residence.phases() == {"a": "unloaded"})
        waiting = asyncio.create_task(call(residence, "a"))
        await owner.loaded.wait()
        owner.publish("a", State.RUNNING)
        assert await waiting == "a"


async def test_a_call_for_a_model_that_does_not_exist_is_told_so_and_has_it_tried_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as (owner, residence):
        owner.failed["made"], owner.failed_code = ("no such model", None), Code.MODEL_NOT_FOUND
        waiting = asyncio.create_task(call(residence, "owner/model"))
        await owner.loaded.wait()
        owner.specs["made"] = replace(owner.specs["made"], model_id="owner/model", by_call=True)
        owner.publish("made", State.FAILED)
        for calling in (waiting, call(residence, "made")):
            with pytest.raises(ModelNotFound) as refused:
                await calling
            assert refused.value.message == "no such model"
        assert (owner.loads, owner.given_up) == (["made"], [])

        # One that is tried again by itself keeps its pauses, which grow.
        for failed, refusal in ((("a full disk", 600.0), FailedToLoad), (("no such model", None), ModelNotFound)):
            owner.failed["made"], owner.failed_code = failed, None if failed[1] else Code.MODEL_NOT_FOUND
            owner.publish("made", State.STARTING)
            owner.publish("made", State.FAILED)
            for seconds in (60.0, 0.0) if failed[1] else (60.0,):
                monkeypatch.setattr(module, "REFUSED_S", seconds)
                with pytest.raises(refusal, match=failed[0]):
                    await call(residence, "made")
        assert owner.given_up == []

        monkeypatch.setattr(module, "REFUSED_S", 0.0)
        waiting = asyncio.create_task(call(residence, "made"))
        await eventually(lambda: owner.loads == ["made", "made"])
        owner.publish("made", State.RUNNING)
        await waiting
        assert owner.given_up == ["made"]


async def test_a_load_on_another_device_does_not_wait_for_an_eviction() -> None:
    async with running() as (owner, residence):
        for name in ("a", "b", "c"):
            owner.declare_instance(name)
        owner.publish("a", State.RUNNING)
        owner.may_unload.clear()
        waiting = [asyncio.create_task(call(residence, "b"))]
        await owner.loaded.wait()
        relieving = asyncio.create_task(residence.relieve("b", 50, 10, {"a": 50}, "A"))
        await eventually(lambda: residence.phases()["a"] == "unloading")
        waiting += [asyncio.create_task(call(residence, "c"))]
        await eventually(lambda: owner.loads == ["b", "c"])
        owner.may_unload.set()
        assert await asyncio.wait_for(relieving, 30)
        for name in ("b", "c"):
            owner.publish(name, State.RUNNING)
        assert await asyncio.gather(*waiting) == ["b", "c"]


async def test_the_load_time_of_an_earlier_daemon_counts_and_a_load_is_measured() -> None:
    async with running() as (owner, residence):
        owner.load_times["a"] = 30.0
        owner.declare_instance("a")
        with pytest.raises(Unavailable) as refused:
            await call(residence, "a", 1.0)
        assert refused.value.retry_after_s == pytest.approx(30.0, abs=1.0)
        await owner.loaded.wait()
        owner.publish("a", State.RUNNING)
        assert await call(residence, "a", 60.0) == "a"
        assert owner.load_times["a"] < 30.0


async def test_a_load_that_the_policy_does_not_know_is_not_relieved() -> None:
    async with running() as (owner, residence):
        owner.declare_instance("a")
        owner.publish("a", State.RUNNING)
        assert not await asyncio.wait_for(residence.relieve("a", 50, 10, {"a": 50}), 30)
        assert not await asyncio.wait_for(residence.relieve("unknown", 50, 10, {"a": 50}), 30)


class Line:
    """A control link of a mux that keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Mapping[str, str]] = []
        self.changed = asyncio.Event()

    def send(self, **values: str) -> None:
        self.sent.append(values)
        self.changed.set()


async def test_a_mux_gets_its_answer_once_it_has_the_routes_and_a_call_that_left_pins_nothing() -> None:
    async with running() as (owner, residence):
        owner.declare_instance("a", idle_timeout_secs=0)
        line, asked, confirmed = Line(), asyncio.Event(), asyncio.Event()

        async def routes() -> None:
            asked.set()
            await confirmed.wait()

        calls = LoadsForMux(line, residence, routes)
        calls.take({"load": [7, "a", 10.0]})
        calls.take({"load": [8, "unknown", None]})
        await line.changed.wait()
        assert "unknown" in line.sent[0]["refused"]
        await owner.loaded.wait()
        owner.publish("a", State.RUNNING)
        line.changed.clear()
        await asked.wait()
        assert len(line.sent) == 1
        confirmed.set()
        await line.changed.wait()
        assert line.sent[1] == {"ready": "7"}
        model = residence._fleet.models["a"]
        assert model.is_busy
        calls.take({"left": 7})
        await eventually(lambda: not model.is_busy)
        calls.close()
