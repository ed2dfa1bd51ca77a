"""Who gets a place for an instance that a call makes, and whose goes for it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from teimgr.control.sharing import places
from teimgr.control.sharing.places import FAILED_KEPT, MAX_TRIES, REFUSED_S, Made, Tries, grant, left_for_calls
from teimgr.errors import Code, ModelNotFound, Overloaded


def held(*keys: str) -> list[Made]:
    """An instance of each key, those named later of a higher value."""
    return [Made(f"{key}{number}", key, float(number)) for number, key in enumerate(keys)]


def test_a_key_that_is_alone_may_have_all_places_and_no_more() -> None:
    assert grant(held("a", "a"), "a", 3) == (True, (), "")
    assert not grant(held("a", "a", "a"), "a", 3).is_given


def test_a_key_has_three_quarters_at_most_and_callers_without_one_have_all() -> None:
    assert grant(held("a", "a"), "a", 4).is_given
    assert not grant(held("a", "a", "a"), "a", 4).is_given
    assert grant(held("a", "a", "a"), "b", 4) == (True, (), "")
    assert grant(held("", "", ""), "", 4) == (True, (), "")


def test_a_key_that_has_three_quarters_gives_one_of_its_own() -> None:
    made = held("a", "a", "a", "a", "a", "a", "b")
    assert [each.name for each in grant(made, "a", 8).instead] == ["a0", "a1", "a2", "a3", "a4", "a5"]
    made[3], made[6] = (made[number]._replace(has_failed=True) for number in (3, 6))
    assert [each.name for each in grant(made, "a", 8).instead] == ["a3"]


def test_of_those_that_have_failed_a_few_stay_though_places_are_free() -> None:
    failed = [each._replace(has_failed=True) for each in held(*["a"] * FAILED_KEPT)]
    assert grant(failed[1:], "b", 100) == (True, (), "")
    assert grant(failed, "b", 100).instead == tuple(failed)


def test_calls_leave_an_operator_a_quarter() -> None:
    found = {size: left_for_calls(size, 0) for size in (1, 2, 4, 100)}
    assert found == {1: 1, 2: 1, 4: 3, 100: 75}
    assert left_for_calls(100, 20) == 75
    assert left_for_calls(100, 40) == 60


def test_without_a_place_none_is_given() -> None:
    assert not grant([], "a", 0).is_given


def test_a_key_above_its_share_loses_its_least_valuable_one_to_another() -> None:
    found = grant(held("a", "a", "a", "a"), "b", 4)
    assert (found.is_given, [each.name for each in found.instead]) == (True, ["a0", "a1", "a2", "a3"])
    assert found.reason == "its key has 4 of 4 places, and 2 are its share"


def test_a_key_above_its_share_loses_its_own_for_one_more() -> None:
    found = grant(held("b", "a", "a", "a"), "a", 4)
    assert [each.name for each in found.instead] == ["a1", "a2", "a3"]


def test_a_key_at_its_share_takes_none_of_another() -> None:
    for key in ("a", "b"):
        assert not grant(held("a", "b", "a", "b"), key, 4).is_given


def test_what_may_not_go_now_stays() -> None:
    busy = [each._replace(value=None) for each in held("a", "a", "a")]
    assert not grant(busy, "b", 3).is_given
    assert [each.name for each in grant([*busy[:2], *held("b", "a")[1:]], "b", 3).instead] == ["a1"]


def test_one_that_has_failed_goes_first() -> None:
    made = held("a", "b", "b")
    made[1] = made[1]._replace(has_failed=True, value=None)
    assert [each.name for each in grant(made, "a", 3).instead] == ["b1"]


def test_each_key_gets_its_share_whatever_the_others_have() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        limit, keys = draw.randint(1, 12), "abc"[: draw.randint(1, 3)]
        made: list[Made] = []
        for number in range(100):
            key = draw.choice(keys)
            before = Counter(each.key for each in made)
            found = grant(made, key, limit)
            if found.instead:
                assert before[found.instead[0].key] > limit // len(before.keys() | {key})
                made.remove(found.instead[0])
            if found.is_given:
                made.append(Made(str(number), key, draw.random()))
            else:
                assert before[key] >= min(limit - limit // 4, limit // len(before.keys() | {key}))
            assert len(made) <= limit


def test_a_model_that_was_refused_is_refused_again_for_a_while_in_a_bounded_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(places, "_REFUSED_KEPT", 2)
    tries = Tries()
    for number in range(3):
        tries.refuse(f"org/{number}", Code.MODEL_NOT_FOUND, f"no {number}", float(number))
    for number in (1, 2):
        with pytest.raises(ModelNotFound, match=f"no {number}"):
            tries.check(f"org/{number}", "one", number + REFUSED_S - 0.1)
    tries.check("org/0", "one", 2.0)
    tries.check("org/2", "one", 2 + REFUSED_S)
    tries.loaded("org/1")  # for an operator, who has put it on this host
    tries.check("org/1", "one", 2.0)


def test_a_key_has_so_many_models_tried_that_were_not_loaded() -> None:
    tries = Tries()
    for number in range(MAX_TRIES):
        tries.check(f"org/{number}", "one", float(number))
        tries.begin(f"org/{number}", "one", float(number))
    now = float(MAX_TRIES)
    with pytest.raises(Overloaded) as refused:
        tries.check("org/more", "one", now)
    assert refused.value.retry_after_s == REFUSED_S - MAX_TRIES
    tries.check("org/more", "two", now)
    tries.check("org/0", "one", now)  # as it is among them
    tries.loaded("org/5")
    tries.check("org/more", "one", now)
    tries.begin("org/more", "one", now)
    tries.check("org/other", "one", REFUSED_S)
