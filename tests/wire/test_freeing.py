"""Large values are freed in parts, and only what nothing else refers to."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from pydantic import BaseModel

from teimgr.wire import freeing
from teimgr.wire.freeing import free, freed


class Holder(BaseModel):
    values: list[Any]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (b"[" + b'"text",' * 99 + b"0]", 100),
        (b'{"input":[[' + b"0," * 99 + b"1]]}", 1 + 1 + 100),
        (b'{"a":{"b":{"c":' + b"[" * 900 + b"]" * 900 + b"}}}", 3 + 899),
        (b'["a"]', 1),
        (b"[]", 0),
        (b'"text"', 0),
    ],
)
def test_one_step_frees_few_values(text: bytes, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freeing, "_AT_ONCE", 1)
    assert sum(1 for _ in freed(orjson.loads(text))) == steps


def test_values_of_objects_are_freed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freeing, "_AT_ONCE", 1)
    body = [Holder(values=[1, 2, 3]), Holder(values=[4])]
    assert sum(1 for _ in freed(body)) == 2 + 2 + 4


def test_what_another_holds_stays_as_it_is() -> None:
    shared: dict[str, Any] = {"inner": [1, [2]]}
    kept = shared["inner"]
    value = {"shared": shared, "own": [kept, "a"], "rows": [[shared], Holder(values=[kept])]}
    holder = value["rows"][1]
    free(value)
    assert value == {}
    assert shared == {"inner": [1, [2]]}
    assert holder.values == [[1, [2]]]
