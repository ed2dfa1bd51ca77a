"""The wanted state: what is written, when, and what a disk that refuses does to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.polling import eventually

from teimgr.config.settings import Settings
from teimgr.errors import StateNotSaved, UpdateFailed, UpdateInProgress
from teimgr.spec import InstanceSpec
from teimgr.supervision import wanted_state
from teimgr.supervision.store import Store, parse
from teimgr.supervision.wanted_state import WantedState

SPEC = InstanceSpec(name="a", model_id="small", port=8080)
OTHER = replace(SPEC, model_id="large")


class Fixture:
    """A wanted state of the instances in `specs`, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state.toml"
        self.settings = Settings(state_file=self.path)
        self.specs = [SPEC]
        self.state = WantedState(Store(self.path), lambda: self.specs)
        self.obstacle = folder / "state.toml.tmp"  # a folder in the place of the temporary file: every save fails

    def written(self) -> list[InstanceSpec]:
        return list(parse(self.path.read_bytes()).specs)


@pytest.fixture
def kept(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path)


async def test_a_change_is_on_disk_before_it_is_made(kept: Fixture) -> None:
    async with kept.state.planning("a", OTHER):
        assert kept.written() == [OTHER]
        kept.specs = [OTHER]
    async with kept.state.planning("b", replace(SPEC, name="b")):
        assert [spec.name for spec in kept.written()] == ["a", "b"] == [spec.name for spec in kept.state.specs()]
    async with kept.state.planning("a", None):
        assert kept.written() == []

    assert kept.written() == [OTHER], "what the body did not change is written again"


async def test_a_refused_change_does_not_begin(kept: Fixture) -> None:
    await kept.state.write()
    kept.obstacle.mkdir()

    with pytest.raises(StateNotSaved, match="cannot be saved"):
        async with kept.state.planning("a", None):
            pytest.fail("the body ran")
    with pytest.raises(StateNotSaved):
        await kept.state.begin_update("a", {}, recreate=False)

    assert kept.written() == [SPEC]
    assert kept.state.is_refused
    kept.obstacle.rmdir()
    await kept.state.close()


async def test_what_was_refused_is_written_when_the_disk_heals(kept: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wanted_state, "_RETRY_S", 0.01)
    kept.obstacle.mkdir()
    await kept.state.settle()
    assert "cannot be saved" in str(kept.state.alarms)

    kept.obstacle.rmdir()

    await eventually(lambda: kept.state.alarms is None)
    assert kept.written() == [SPEC]
    await kept.state.close()


async def test_closing_tries_a_last_time(kept: Fixture) -> None:
    kept.obstacle.mkdir()
    await kept.state.settle()
    kept.obstacle.rmdir()

    await kept.state.close()

    assert kept.written() == [SPEC]


async def test_an_update_under_way_is_read_by_the_next_daemon(kept: Fixture) -> None:
    await kept.state.load(kept.settings)
    await kept.state.begin_update("a", {"extra_args": ("--dtype", "float16")}, recreate=True)
    with pytest.raises(UpdateInProgress):
        await kept.state.begin_update("a", {}, recreate=False)
    await kept.state.close()

    later = Fixture(kept.path.parent)
    assert await later.state.load(later.settings) == [SPEC]
    assert later.state.unfinished == ("a",)
    async with later.state.resuming("a") as (changes, recreate):
        assert (changes, recreate) == ({"extra_args": ("--dtype", "float16")}, True)
        await later.state.begin_update("a", changes, recreate=recreate)
        record = json.loads(str(later.written()[0].pending_update))
    assert record["tries"] == 2
    await later.state.end_update("a")
    assert later.written() == [SPEC]
    await later.state.close()


@pytest.mark.parametrize("record", ['{"changes": {}, "recreate": false, "tries": 5}', "no JSON", "[]"])
async def test_an_update_that_cannot_go_on_is_given_up(kept: Fixture, record: str) -> None:
    Store(kept.path).save([replace(SPEC, pending_update=record)])
    await kept.state.load(kept.settings)

    with pytest.raises(UpdateFailed):
        async with kept.state.resuming("a"):
            pytest.fail("it was begun again")

    assert kept.written() == [SPEC]
    await kept.state.close()
