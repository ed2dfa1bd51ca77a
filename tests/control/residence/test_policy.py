"""The policy of residence: the published failures of other servers, one by one, and random interleavings of events."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

import pytest

from teimgr.control.residence.events import (
    Busy,
    CallAsked,
    Decision,
    Declared,
    Event,
    Held,
    Kept,
    Left,
    Load,
    Loaded,
    LoadFailed,
    Loading,
    NoRoom,
    Notice,
    Outgrown,
    Refusal,
    Refuse,
    Removed,
    Serve,
    Terms,
    Tick,
    Unload,
    Unloaded,
    Unloading,
    Used,
    UserStopped,
)
from teimgr.control.residence.model import Fleet, Phase
from teimgr.control.residence.policy import MAX_WAITING, Rehearsal, Relief, decide
from teimgr.control.residence.room import MAX_STAY_S, UNUSED

MIB = 2**20


class Room:
    """A fleet whose models take what they are declared with, of a budget: what the daemon does, without processes.

    A load ends when `loaded` is called, an unload at once, or with `Busy` where the model has calls that the policy has
    not seen yet.
    """

    def __init__(self, budget: int = 100, sizes: Sequence[int] = (50, 50, 50), load_s: float | None = 2.0) -> None:
        self.fleet = Fleet()
        self.now = 100.0
        self.budget = budget * MIB
        self.sizes: dict[str, int] = {}
        self.started: set[str] = set()  # by the owner, without memory yet
        self.held: dict[str, int] = {}
        self.unseen: set[str] = set()  # models with a call that the policy has not seen yet
        self.served: dict[int, None] = {}
        self.refused: dict[int, Refuse] = {}
        self.loads: list[str] = []
        self.unloads: list[Unload] = []
        self.notices: list[Notice] = []
        self.made: list[Decision] = []
        self.grown: list[str] = []  # loaded models whose next worker has got its room
        for name, size in zip("abcdefgh", sizes, strict=False):
            self.sizes[name] = size * MIB
            self.tell(Declared(name, Terms(load_s=load_s)), Unloaded(name))

    def declare(self, name: str, **terms: object) -> None:
        values = {"load_s": 2.0} | terms
        self.sizes.setdefault(name, 50 * MIB)
        self.tell(Declared(name, Terms(**values)))  # type: ignore[arg-type]

    def tell(self, *events: Event) -> list[Decision]:
        made: list[Decision] = []
        for event in events:
            made += decide(self.fleet, event, self.now)
        self.made += made
        for decision in made:
            self._carry_out(decision)
        return made

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Serve(call):
                self.served[call] = None
            case Refuse(call):
                self.refused[call] = decision
            case Load(name):
                self._load(name)
            case Unload(name):
                self._unload(decision)
            case Notice():
                self.notices.append(decision)

    def _load(self, name: str) -> None:
        if self.phase(name) is Phase.LOADED:
            self.grown.append(name)
            return
        assert name not in self.held, f"{name} is loaded twice"
        if name not in self.started:
            self.started.add(name)
            self.tell(Loading(name))
        needed, free = self.sizes[name], self.budget - sum(self.held.values())
        if needed > free:
            self.tell(NoRoom(name, needed, free, dict(self.held)))
            return
        self.started.discard(name)
        self.held[name] = needed
        self.loads.append(name)

    def _unload(self, decision: Unload) -> None:
        name = decision.model
        if name in self.unseen and name in self.held:
            self.tell(Unloading(name), Loaded(name), Busy(name))
            return
        self.tell(Unloading(name))
        if name in self.held:
            self.unloads.append(decision)
            del self.held[name]
        self.started.discard(name)
        self.tell(Unloaded(name))

    def loaded(self, name: str, after_s: float = 2.0) -> None:
        self.now += after_s
        self.tell(Loaded(name))

    def ask(self, call: int, name: str, within_s: float | None = None, key: int = 0) -> None:
        self.tell(CallAsked(call, name, None if within_s is None else self.now + within_s, key=key))

    def phase(self, name: str) -> Phase:
        return self.fleet.models[name].phase

    def resident(self, *names: str, for_s: float = 100.0) -> None:
        """Have models loaded, whose calls have left, some time ago."""
        for number, name in enumerate(names, 9000 + 100 * len(self.loads)):
            self.ask(number, name)
            self.loaded(name)
            self.tell(Left(number))
        self.now += for_s


def test_the_first_call_loads_and_all_share_one_load() -> None:
    room = Room()
    for call in range(5):
        room.ask(call, "a")
    assert room.loads == ["a"]
    room.loaded("a")
    assert [*room.served] == [0, 1, 2, 3, 4]


def test_an_eviction_that_only_half_succeeds_is_judged_by_what_it_has_freed() -> None:
    """Of two victims one has a call: what the other has freed counts when room is looked for again."""
    room = Room(budget=100, sizes=(50, 50, 100))
    room.resident("a", "b")
    room.unseen = {"b"}
    room.ask(1, "c")
    assert [each.model for each in room.unloads] == ["a"]
    assert room.phase("c") is Phase.ROOM
    room.unseen.clear()
    room.tell(Used("b", 1, 0))  # its call has ended
    room.now += 100.0
    room.tell(Tick())
    assert [each.model for each in room.unloads] == ["a", "b"]
    room.loaded("c")
    assert 1 in room.served


def test_room_that_another_eviction_has_left_is_used_though_a_second_victim_stays() -> None:
    room = Room(budget=120, sizes=(40, 40, 40, 60))
    room.resident("a", "b", "c")
    room.unseen = {"b"}
    room.ask(1, "d")  # has two of them evicted, of which one stays
    assert [each.model for each in room.unloads] == ["a", "c"]
    room.loaded("d")
    assert 1 in room.served


def test_a_model_that_answers_a_call_is_not_evicted() -> None:  # 1
    room = Room(budget=100)
    room.resident("a", "b")
    room.tell(Used("a", 1, 1), Used("b", 1, 1))
    room.ask(1, "c")
    assert not room.unloads
    room.tell(Used("b", 0, 0))  # its call has ended
    assert [each.model for each in room.unloads] == ["b"]
    assert room.loads[-1] == "c"


def test_a_call_that_the_policy_has_not_seen_keeps_its_model() -> None:  # 1, by the owner's own count
    room = Room(budget=50)
    room.resident("a")
    room.unseen.add("a")
    room.ask(1, "b")
    assert room.phase("a") is Phase.LOADED
    assert room.phase("b") is Phase.ROOM
    room.unseen.clear()
    room.now += 10
    room.tell(Used("a", 0, 0))
    assert room.loads == ["a", "b"]


def test_a_model_that_is_pinned_no_more_makes_room_at_once() -> None:
    room = Room(budget=100)
    room.declare("a", pinned=True)
    room.resident("a", "b")
    room.tell(Used("b", 1, 1))
    room.ask(1, "c")  # waits for the end of b's call
    assert room.phase("c") is Phase.ROOM
    assert not room.unloads
    room.declare("a", pinned=False)
    assert [each.model for each in room.unloads] == ["a"]


def test_a_loading_model_is_not_evicted() -> None:  # 2
    room = Room(budget=50)
    room.ask(1, "a")
    room.ask(2, "b")
    room.now += 60
    room.tell(Tick())
    assert room.phase("a") is Phase.LOADING
    assert not room.unloads


def test_a_model_just_loaded_stays_until_its_call_is_over_and_for_its_load_time() -> None:  # 3
    room = Room(budget=50)
    room.ask(1, "a")
    room.ask(2, "b")
    room.loaded("a", after_s=4.0)
    room.now += 60
    room.tell(Tick())
    assert not room.unloads, "its first call is not over"
    room = Room(budget=50)
    room.ask(1, "a")
    room.loaded("a", after_s=2.0)
    room.tell(Left(1))
    room.ask(2, "b")
    room.tell(Used("a", 1, 0))  # the call that it was loaded for
    room.now += 0.1
    room.tell(Used("a", 1, 0))
    room.now += 1.8  # one further call is enough, however long ago
    room.tell(Tick())
    assert not room.unloads
    room.now += 15.0
    room.tell(Tick())
    assert [each.model for each in room.unloads] == ["a"]


def test_a_model_that_nobody_uses_goes_before_its_minimum_stay_is_over() -> None:
    room = Room(budget=50, load_s=2.0)
    room.ask(1, "a")
    room.loaded("a", after_s=2.0)
    room.tell(Left(1), Used("a", 1, 0))
    room.ask(2, "b")
    room.now += 2.0 * UNUSED - 0.01
    room.tell(Tick())
    assert not room.unloads
    room.now += 0.02
    room.tell(Tick())
    assert [each.model for each in room.unloads] == ["a"]


def test_a_first_load_that_took_a_minute_protects_its_model_for_no_longer_than_that() -> None:
    room = Room(budget=50, load_s=None)
    room.ask(1, "a")
    room.loaded("a", after_s=60.0)
    room.tell(Left(1), Used("a", 1000, 0))
    room.ask(2, "b")
    room.now += 60.1
    room.tell(Tick())
    assert [each.model for each in room.unloads] == ["a"]


def test_a_war_of_two_models_is_named_and_ended() -> None:  # 4
    room = Room(budget=50)
    numbers, waiting = count(1), {"a": 0, "b": 0}
    for name in waiting:
        room.ask(waiting.setdefault(name, 0) or next(numbers), name)
    calls = dict(zip(waiting, (1, 2), strict=True))
    for _ in range(200):  # two callers, each of whom asks again as soon as it is answered
        room.now += 0.25
        room.tell(Tick())
        for name, call in calls.items():
            if room.phase(name) is Phase.LOADING and room.now - room.fleet.models[name].since >= 2.0:
                room.tell(Loaded(name))
            if call in room.served:
                room.tell(Left(call))
                calls[name] = next(numbers) + 100
                room.ask(calls[name], name)
        if room.notices:
            break
    assert " evicted each other " in room.notices[0].reason
    loser = room.notices[0].model
    winner = "ab".replace(loser, "")
    switches = len(room.unloads)
    for _ in range(40):
        room.now += 0.25
        room.tell(Tick())
        for name, call in calls.items():
            if room.phase(name) is Phase.LOADING and room.now - room.fleet.models[name].since >= 2.0:
                room.tell(Loaded(name))
            if call in room.served or call in room.refused:
                room.tell(Left(call))
                calls[name] = next(numbers) + 1000
                room.ask(calls[name], name)
    assert len(room.unloads) <= switches + 1
    refused = [each for each in room.refused.values() if each.why is Refusal.WAR]
    assert refused
    assert all(each.retry_after_s and each.retry_after_s > 0 for each in refused)
    assert all(f"'{winner}'" not in each.reason for each in refused)
    assert f"'{winner}'" in room.notices[0].reason
    assert f"'{loser}' and another instance keep evicting each other" in refused[0].reason


def test_alternating_calls_of_one_caller_are_no_war() -> None:
    room = Room(budget=50)
    for number in range(40):
        name = "ab"[number % 2]
        room.ask(number, name)
        while number not in room.served:
            room.now += 0.5
            room.tell(Tick())
            if room.phase(name) is Phase.LOADING and room.now - room.fleet.models[name].since >= 2.0:
                room.tell(Loaded(name))
        room.tell(Left(number))
    assert not room.notices
    assert not room.refused
    assert len(room.unloads) == 39


def test_memory_limits_and_no_count() -> None:  # 5
    room = Room(budget=300, sizes=(10,) * 8)
    room.resident(*"abcdefgh")
    assert len(room.held) == 8
    assert not room.unloads
    room = Room(budget=100, sizes=(90, 20))
    room.resident("a")
    room.ask(1, "b")
    assert [each.model for each in room.unloads] == ["a"]


def test_a_slow_load_blocks_no_other() -> None:  # 6
    room = Room(budget=150)
    room.ask(1, "a")
    room.ask(2, "b")
    assert room.loads == ["a", "b"]
    room.loaded("b", after_s=0.5)
    assert [*room.served] == [2]
    assert room.phase("a") is Phase.LOADING


def test_an_eviction_holds_up_no_load_on_another_device() -> None:  # 6
    room = Room(budget=0, sizes=())
    for name in "auvwz":
        room.declare(name)
        room.tell(Unloaded(name))
    for name in "uv":
        room.tell(Loading(name), Loaded(name))
    room.now += 100.0
    fleet, held = room.fleet, {"v": 50 * MIB}

    def made(*events: Event) -> list[str]:
        found = [each for event in events for each in decide(fleet, event, room.now)]
        return [f"{type(each).__name__} {each.model}" for each in found if isinstance(each, Load | Unload)]

    assert made(CallAsked(1, "w")) == ["Load w"]
    assert made(Loading("w"), NoRoom("w", 50 * MIB, 0, held, "A")) == ["Unload v"]
    assert made(CallAsked(2, "a", None, ("A",))) == []
    assert made(CallAsked(3, "z", None, ("GPU", "B"))) == ["Load z"]
    held = {"u": 50 * MIB}
    assert made(Loading("z"), NoRoom("z", 50 * MIB, 0, held, "B")) == ["Unload u"]
    assert made(Unloading("u"), Unloaded("u")) == ["Load z"], "though v is ending on the other device"
    assert made(Unloading("v"), Unloaded("v")) == ["Load w", "Load a"]


def test_a_call_that_comes_while_the_model_is_unloaded_loads_it_again() -> None:  # 7
    room = Room()
    room.resident("a")
    room.tell(Unloading("a"))
    room.ask(1, "a")
    del room.held["a"]
    room.tell(Unloaded("a"))
    assert room.loads == ["a", "a"]
    room.loaded("a")
    assert [*room.served][-1] == 1


@pytest.mark.parametrize("when", ["waiting", "served"])
def test_a_caller_who_has_left_pins_nothing(when: str) -> None:  # 8
    room = Room(budget=50)
    room.ask(1, "a")
    if when == "waiting":
        room.tell(Left(1))
        room.loaded("a")
    else:
        room.loaded("a")
        room.tell(Left(1))
    room.now += 10
    room.ask(2, "b")
    assert [each.model for each in room.unloads] == ["a"]


def test_a_caller_who_left_before_room_was_found_has_nothing_loaded() -> None:  # 8
    room = Room(budget=50)
    room.resident("a")
    room.tell(Used("a", 1, 1))
    room.ask(1, "b")
    room.tell(Left(1), Used("a", 0, 0))
    assert room.phase("b") is Phase.UNLOADED
    assert not room.unloads


def test_a_model_that_fails_at_run_time_is_loaded_anew() -> None:  # 9
    room = Room()
    room.resident("a")
    room.tell(Loading("a"))  # its owner replaces the worker
    room.ask(1, "a")
    assert [*room.served] == [9000]
    room.loaded("a")
    assert [*room.served][-1] == 1


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (Removed("a"), Refusal.UNKNOWN),
        (UserStopped("a"), Refusal.STOPPED),
        (LoadFailed("a", "no such file"), Refusal.FAILED),
    ],
    ids=["removed", "stopped", "failed"],
)
def test_calls_that_wait_for_a_model_that_goes_are_refused(event: Event, why: Refusal) -> None:  # 10, 11
    room = Room()
    room.ask(1, "a")
    room.ask(2, "a", within_s=100)
    room.tell(event)
    assert {call: refusal.why for call, refusal in room.refused.items()} == {1: why, 2: why}
    assert all(refusal.retry_after_s is None for refusal in room.refused.values())
    room.ask(3, "a")
    assert room.refused[3].why is why


def test_queued_calls_of_an_evicted_model_are_served_by_its_next_load() -> None:  # 10
    room = Room(budget=50)
    room.resident("a")
    room.ask(1, "b")
    room.ask(2, "a")
    room.loaded("b")
    room.tell(Left(1))
    room.now += 20
    room.tell(Tick())
    assert room.loads == ["a", "b", "a"]
    room.loaded("a")
    assert [*room.served][-1] == 2


def test_every_use_counts_whatever_the_method() -> None:  # 13
    room = Room(budget=100)
    room.resident("a", "b")
    for _ in range(5):
        room.now += 5
        room.tell(Used("a", 3, 0))
    room.ask(1, "c")
    assert [each.model for each in room.unloads] == ["b"]
    assert room.unloads[0].reason.startswith("evicted b: value ")


def test_a_call_for_which_the_load_takes_too_long_is_refused_with_what_is_left() -> None:
    room = Room(load_s=10.0)
    room.ask(1, "a", within_s=60)
    room.now += 4
    room.ask(2, "a", within_s=3)
    room.ask(3, "a", within_s=7)
    assert room.refused[2].retry_after_s == pytest.approx(6.0)
    assert room.refused[2].why is Refusal.LATE
    assert 3 not in room.refused
    room.now += 3
    room.ask(4, "a", within_s=1)
    assert room.refused[4].retry_after_s == pytest.approx(3.0)


def test_a_refused_call_finds_its_model_when_it_comes_again() -> None:
    room = Room(load_s=10.0)
    room.ask(1, "a", within_s=1)
    assert room.loads == ["a"]
    room.loaded("a", after_s=10)
    room.ask(2, "a", within_s=1)
    assert [*room.served] == [2]


def test_a_model_that_can_never_fit_is_refused_for_good() -> None:
    room = Room(budget=100, sizes=(80, 120))
    room.declare("a", pinned=True)
    room.resident("a")
    room.ask(1, "b")
    assert room.refused[1].why is Refusal.NO_ROOM
    assert room.refused[1].retry_after_s is None
    assert "120 MiB and 20 MiB are free" in room.refused[1].reason


@pytest.mark.parametrize(
    ("is_loaded", "reason"),
    [
        (True, "needs 120 MiB and 20 MiB are free; at most 100 MiB can be"),
        (False, "needs 120 MiB and 100 MiB are free; no more can be: no other instance holds any"),
    ],
)
def test_a_model_beyond_the_whole_budget_is_told_what_others_could_leave_to_it(is_loaded: bool, reason: str) -> None:
    """It was told that no other instance held any beside one that may go, and of which no more was than of none."""
    room = Room(budget=100, sizes=(80, 120))
    if is_loaded:
        room.resident("a")
    room.ask(1, "b")
    assert room.refused[1].why is Refusal.NO_ROOM
    assert room.refused[1].reason.endswith(reason)
    assert room.unloads == []


def test_a_caller_is_not_told_which_models_hold_the_memory_and_the_log_is() -> None:
    room = Room(budget=100, sizes=(30, 50, 120))
    for name, size in {"secret-1": 30, "secret-2": 50}.items():
        room.sizes[name] = size * MIB
        room.declare(name, pinned=True)
        room.resident(name)
    room.made.clear()
    room.ask(1, "c")
    assert room.refused[1].why is Refusal.NO_ROOM
    assert "80 MiB are held by 2 other instances, which stay" in room.refused[1].reason
    # Nor has the reason of its end, which its event and its view have.
    assert "secret" not in repr([each for each in room.made if not isinstance(each, Held)])
    assert [each.holders for each in room.made if isinstance(each, Held)] == [("secret-2", "secret-1")]


def test_pinned_and_eager_models_are_never_evicted() -> None:
    room = Room(budget=150)
    room.declare("a", pinned=True)
    room.resident("a", "b")
    room.declare("c", on_demand=False)
    room.held["c"] = 50 * MIB
    room.tell(Loading("c"), Loaded("c"))
    room.now += 100
    room.declare("d")
    room.ask(1, "d")
    assert [each.model for each in room.unloads] == ["b"]


def test_idle_models_are_unloaded_after_their_time() -> None:
    room = Room()
    room.declare("a", idle_timeout_s=30.0)
    room.resident("a", for_s=0.0)
    assert room.fleet.due() == pytest.approx(room.now + 30)
    room.now += 20
    room.tell(Used("a", 1, 0))
    room.now += 29
    room.tell(Tick())
    assert not room.unloads
    room.now += 1
    room.tell(Tick())
    assert [each.reason for each in room.unloads] == ["idle for 30 s"]


def test_a_more_valuable_model_stays_longer_but_not_for_ever() -> None:
    room = Room(budget=50)
    room.resident("a", for_s=0.0)
    room.tell(Used("a", 1000, 0))
    room.ask(1, "b")
    room.now += MAX_STAY_S - 0.1
    room.tell(Tick())
    assert not room.unloads
    room.now += 0.2
    room.tell(Tick())
    assert [each.model for each in room.unloads] == ["a"]
    assert " > " in room.unloads[0].reason


def test_no_more_is_evicted_than_needed() -> None:
    room = Room(budget=100, sizes=(20, 80, 90))
    room.resident("a", "b")
    room.tell(Used("b", 5, 0))
    room.now += 30
    room.ask(1, "c")
    assert sorted(each.model for each in room.unloads) == ["a", "b"]
    room = Room(budget=100, sizes=(20, 80, 60))
    room.resident("a", "b")
    room.tell(Used("b", 5, 0))
    room.now += 30
    room.ask(1, "c")
    assert [each.model for each in room.unloads] == ["b"]


def test_models_that_outgrow_the_budget_have_idle_ones_evicted_at_once() -> None:
    room = Room(200, (50, 40, 40, 40))
    room.declare("e", pinned=True)
    room.resident("a", "b", "c", "e", for_s=0.0)
    room.ask(1, "b")  # busy
    room.tell(Outgrown("a", 12 * MIB, dict(room.held)))
    assert [(each.model, each.evicted_for) for each in room.unloads] == [("c", "a")]
    assert room.unloads[0].reason == (
        "evicted c: all models exceed the budget by 12 MiB, value 0.168 > 0.133, resident 2 s"
    )
    room.tell(Outgrown("a", 99 * MIB, dict(room.held)))
    assert len(room.unloads) == 1, "none is left that may go"
    room.tell(Left(1), Outgrown("a", 99 * MIB, dict(room.held)))
    assert [each.model for each in room.unloads] == ["c", "b"]


def test_one_more_worker_of_a_loaded_model_has_room_made_while_it_serves_on() -> None:
    room = Room(budget=100)
    room.resident("a", "b")
    [made] = room.tell(NoRoom("a", 50 * MIB, 0, dict(room.held)))
    assert isinstance(made, Unload)
    assert (made.model, made.evicted_for) == ("b", "a")
    assert room.phase("a") is Phase.LOADED
    assert room.unloads == [made]
    assert room.grown == ["a"]


def test_a_worker_that_waits_for_room_waits_on_when_another_one_of_its_model_is_ready() -> None:
    room = Room(budget=100)
    room.declare("c", on_demand=False)
    room.resident("a", for_s=0.0)
    room.tell(Used("a", 1, 1), Loading("c"), NoRoom("c", 80 * MIB, 50 * MIB, dict(room.held)), Loaded("c"))
    assert (room.phase("c"), room.fleet.models["c"].is_growing) == (Phase.LOADED, True)
    room.now += 1000
    room.tell(Used("a", 0, 0))
    assert room.phase("c") is Phase.LOADED
    assert [each.model for each in room.unloads] == ["a"]
    assert room.grown == ["c"]


def test_a_model_that_waits_for_room_of_its_own_is_due_when_a_victim_may_go_and_not_before() -> None:
    room = Room(budget=50)
    room.declare("c", on_demand=False)
    room.resident("a", for_s=0.0)
    room.tell(Loading("c"), NoRoom("c", 50 * MIB, 0, dict(room.held)))
    due = room.fleet.due()
    assert due is not None
    assert due > room.now


def test_a_rehearsal_says_what_then_happens_and_changes_nothing() -> None:
    room = Room(budget=100)
    room.resident("a", "b", for_s=0.0)
    rehearsal = Rehearsal(room.fleet, room.now)
    rehearsal.begin("c", Terms(on_demand=False))
    relief = rehearsal.relieve("c", 50 * MIB, 0, dict(room.held))
    assert (relief.again, [each.model for each in relief.unloaded]) == (True, ["a"])
    assert rehearsal.relieve("c", 200 * MIB, 50 * MIB, {"b": 50 * MIB}) == Relief(again=False)
    assert (room.phase("a"), room.phase("b"), room.unloads) == (Phase.LOADED, Phase.LOADED, [])

    room.tell(Used("a", 1, 1), Used("b", 1, 1))
    rehearsal = Rehearsal(room.fleet, room.now)
    rehearsal.begin("c", Terms(on_demand=False))
    assert rehearsal.relieve("c", 50 * MIB, 0, dict(room.held)) == Relief(again=False, waits_for=("a", "b"))


def test_the_fleet_of_a_rehearsal_is_the_same_and_shares_nothing_that_changes() -> None:
    room = Room(budget=100)
    room.ask(1, "waits")
    room.resident("a", for_s=0.0)
    room.tell(*(Declared(f"rests-{number}", Terms()) for number in range(3)))
    copied = Rehearsal(room.fleet, room.now)._fleet
    assert copied == room.fleet
    assert list(copied.models) == list(room.fleet.models)
    for name, model in copied.models.items():
        own = room.fleet.models[name]
        assert (model is own, model.waiting is own.waiting, model.wishes is own.wishes) == (False, False, False)
        assert copied.active.get(name, model) is model


def test_too_many_calls_for_one_model_are_refused() -> None:
    room = Room()
    for call in range(MAX_WAITING + 1):
        room.ask(call, "a")
    assert [(call, each.why) for call, each in room.refused.items()] == [(MAX_WAITING, Refusal.QUEUE)]


def test_calls_of_one_key_leave_room_for_those_of_others() -> None:
    room = Room()
    for key in range(1, 9):  # each has more calls than may wait
        for call in range(MAX_WAITING + 1):
            room.ask(key * 10_000 + call, "a", key=key)
    waiting = room.fleet.models["a"].waiting.values()
    found = [sum(call.key == key for call in waiting) for key in range(1, 9)]
    assert found == [512, 256, 128, 64, 32, 16, 8, 4]
    assert {each.why for each in room.refused.values()} == {Refusal.QUEUE}
    room.ask(1, "a", key=9)
    assert 1 not in room.refused
    room.loaded("a")
    assert room.phase("a") is Phase.LOADED


def interleave(seed: int, steps: int) -> int:
    """Random calls, loads, failures and uses in a room for some of the models; the number of events.

    Raises:
        AssertionError: an invariant is broken.
    """
    chance = random.Random(seed)
    sizes = [chance.choice((10, 20, 40, 60)) for _ in range(chance.randint(2, 8))]
    room = Room(chance.choice((60, 100, 150)), sizes, chance.choice((None, 0.5, 5.0)))
    names = "abcdefgh"[: len(sizes)]
    numbers, open_calls, busy = count(), dict[int, str](), set[str]()
    seen_unloads, loaded_at = 0, dict[str, float]()

    def check() -> None:
        nonlocal seen_unloads
        assert sum(room.held.values()) <= room.budget
        for unload in room.unloads[seen_unloads:]:
            name = unload.model
            assert name not in busy, f"{name} had calls: {unload}"
            assert not any(of == name and call in room.served for call, of in open_calls.items()), (
                f"{name} served a call: {unload}"
            )
            model = room.fleet.models[name]
            if unload.evicted_for is not None and "exceed the budget" not in unload.reason:
                part = 1.0 if model.is_used_again else UNUSED
                assert room.now - loaded_at[name] >= part * model.load_s - 1e-9, f"{name} was just loaded: {unload}"
        seen_unloads = len(room.unloads)
        for call, name in open_calls.items():
            answered = call in room.served or call in room.refused
            waits = call in room.fleet.models[name].waiting
            assert answered or waits, f"call {call} for {name} is lost"
            assert not (answered and waits), f"call {call} for {name} is answered and waits"
        for name, model in room.fleet.models.items():
            if model.phase is Phase.LOADED:
                assert name in room.held
            if model.waiting and model.phase is Phase.UNLOADED:
                raise AssertionError(f"calls wait for {name}, which nothing loads")

    for _ in range(steps):
        room.now += chance.choice((0.0, 0.01, 0.3, 2.0))
        name = chance.choice(names)
        choice = chance.random()
        if choice < 0.35:
            call = next(numbers)
            open_calls[call] = name
            room.ask(call, name, chance.choice((None, 0.1, 3.0, 60.0)))
        elif choice < 0.6 and open_calls:
            call = chance.choice([*open_calls])
            del open_calls[call]
            room.tell(Left(call))
        elif choice < 0.8:
            for each in names:
                if room.phase(each) is Phase.LOADING and each in room.held and chance.random() < 0.7:
                    loaded_at[each] = room.now
                    room.tell(Loaded(each))
        elif choice < 0.84 and room.phase(name) is Phase.LOADING and name in room.held:
            del room.held[name]
            room.tell(LoadFailed(name, "broken", chance.choice((None, 5.0))))
        elif choice < 0.86 and room.phase(name) is Phase.FAILED:
            room.tell(Unloaded(name))
        elif choice < 0.93 and room.phase(name) is Phase.LOADED:
            under_way = chance.randint(0, 1)
            busy.add(name) if under_way else busy.discard(name)
            room.tell(Used(name, chance.randint(0, 3), under_way))
        elif choice < 0.95:
            room.unseen ^= {name}
        elif choice < 0.96 and room.phase(name) is Phase.LOADED:
            free = room.budget - sum(room.held.values())
            room.tell(NoRoom(name, free + 10 * MIB, free, dict(room.held)))
        elif choice < 0.965 and room.phase(name) is Phase.LOADED:
            room.tell(Outgrown(name, chance.randint(1, 50) * MIB, dict(room.held)))
        else:
            room.tell(Tick())
        busy &= {each for each in names if room.phase(each) is Phase.LOADED}
        check()
    # When the calls that were served are over, every other one is answered.
    room.unseen.clear()
    for _ in range(2 * len(names)):
        for call in [call for call in open_calls if call in room.served]:
            del open_calls[call]
            room.tell(Left(call))
        for each in names:
            if room.phase(each) is Phase.LOADED:
                room.tell(Used(each, 0, 0))
            elif room.phase(each) is Phase.FAILED:
                room.tell(Unloaded(each))
        busy.clear()
        room.now += 100
        room.tell(Tick())
        for each in names:
            if room.phase(each) is Phase.LOADING and each in room.held:
                loaded_at[each] = room.now
                room.tell(Loaded(each))
        check()
    assert not any(model.waiting for model in room.fleet.models.values()), "a call waits for ever"
    # At the end every caller leaves, and everything that is wanted by nobody is at rest.
    for call in [*open_calls]:
        room.tell(Left(call))
    open_calls.clear()
    room.now += 100
    room.tell(Tick())
    assert not any(model.waiting or model.serving for model in room.fleet.models.values())
    assert not any(model.phase is Phase.ROOM for model in room.fleet.models.values())
    assert not room.started
    assert not room.fleet.calls
    return steps


def test_random_interleavings_break_no_invariant() -> None:
    assert sum(interleave(seed, 100) for seed in range(100)) == 10_000


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million_random_interleavings_break_no_invariant() -> None:
    assert sum(interleave(seed, 1000) for seed in range(1000, 2000)) == 1_000_000


def test_a_call_may_ask_how_long_its_model_stays() -> None:
    room = Room()
    room.declare("a", idle_timeout_s=10.0)
    room.declare("b", idle_timeout_s=10.0)
    room.resident("a", "b", for_s=0.0)
    room.tell(Kept("a", 100.0))
    room.now += 20.0
    room.tell(Tick())
    assert [room.phase(name) for name in "ab"] == [Phase.LOADED, Phase.UNLOADED]
    room.tell(Kept("a", 0.0), Tick())
    assert room.unloads[-1].reason == "idle for 0 s, kept for 0 s as requested by a call"

    room.resident("a", for_s=20.0)
    room.tell(Tick())
    assert room.phase("a") is Phase.UNLOADED  # what was asked was for its last stay


def idle_for_ten_seconds() -> Room:
    """A room in which the model `a` has just been loaded, and goes after ten seconds without calls."""
    room = Room()
    room.declare("a", idle_timeout_s=10.0)
    room.resident("a", for_s=0.0)
    return room


def test_a_model_stays_as_long_as_the_longest_of_what_its_keys_want() -> None:
    room = idle_for_ten_seconds()
    room.tell(Kept("a", 100.0, key=1))
    room.now += 20.0
    room.tell(Kept("a", 0.0, key=2), Tick())
    assert room.phase("a") is Phase.LOADED
    assert room.fleet.due() == room.now + 80.0  # since the first key's call, whatever the second one asks
    room.tell(Kept("a", 30.0, key=1))  # its own wish, not another's
    assert room.fleet.due() == room.now + 30.0
    room.now += 30.0
    room.tell(Tick())
    assert room.unloads[-1].reason == "idle for 30 s, kept for 30 s as requested by a call"


def test_a_key_shortens_no_stay_of_keys_that_have_asked_for_none() -> None:
    room = idle_for_ten_seconds()
    room.tell(Kept("a", 0.0, key=2), Used("a", 3, 0, keys=(1, 2)), Tick())
    assert (room.phase("a"), room.fleet.due()) == (Phase.LOADED, room.now + 10.0)
    room.now += 5.0
    room.tell(Used("a", 1, 0, keys=(2,)), Kept("a", 2.0, key=2))
    assert room.fleet.due() == room.now + 5.0
    room.now += 5.0
    room.tell(Tick())
    assert room.unloads[-1].reason == "idle for 5 s"


def test_a_key_that_is_gone_keeps_a_model_no_longer_than_it_asked() -> None:
    room = idle_for_ten_seconds()
    room.tell(Kept("a", 60.0, key=1))
    for _ in range(8):
        room.now += 10.0
        room.tell(Used("a", 1, 0, keys=(2,)), Kept("a", 5.0, key=2))
    assert room.fleet.due() == room.now + 5.0


def test_what_a_call_asks_for_unloads_no_busy_and_no_pinned_model_and_holds_off_no_eviction() -> None:
    room = Room(budget=50)
    room.declare("a", pinned=True)
    room.resident("a", for_s=0.0)
    room.tell(Kept("a", 0.0), Tick())
    assert room.phase("a") is Phase.LOADED
    room.declare("a", pinned=False)
    room.tell(Used("a", 1, 1), Kept("a", 0.0), Tick())
    assert room.phase("a") is Phase.LOADED
    room.tell(Used("a", 0, 0), Kept("a", float("inf")), Tick())
    room.now += 1000.0
    room.tell(Tick())
    assert room.phase("a") is Phase.LOADED
    room.ask(1, "b")
    assert (room.phase("a"), room.phase("b")) == (Phase.UNLOADED, Phase.LOADING)
