"""Who gets a place for an instance that a call makes, and whose goes for it."""

from __future__ import annotations

import random
from collections import Counter

from teimgr.control.sharing.places import Made, grant


def held(*keys: str) -> list[Made]:
    """An instance of each key, those named later of a higher value."""
    return [Made(f"{key}{number}", key, float(number)) for number, key in enumerate(keys)]


def test_a_key_that_is_alone_may_have_all_places_and_no_more() -> None:
    assert grant(held("a", "a"), "a", 3) == (True, (), "")
    assert not grant(held("a", "a", "a"), "a", 3).is_given


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
                assert before[key] >= limit // len(before.keys() | {key})
            assert len(made) <= limit
