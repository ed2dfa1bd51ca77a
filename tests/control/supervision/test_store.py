"""The state file: its form, its durability, damage to it; what is written of the wanted state, and when."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from tests.support.polling import eventually

from teimgr.config.settings import Settings
from teimgr.control.supervision import store as store_module
from teimgr.control.supervision.store import (
    SET_ASIDE_KEPT,
    Store,
    Unreadable,
    WantedState,
    parse,
    render,
    wanted_at_boot,
)
from teimgr.errors import InvalidConfig, StateNotSaved, UpdateFailed, UpdateInProgress
from teimgr.spec import InstanceSpec

FULL = InstanceSpec(
    name="bge",
    model_id="BAAI/bge-small-en-v1.5",
    port=8080,
    pooling="cls",
    gpu_id=0,
    prometheus_port=9100,
    startup_timeout_secs=20,
    extra_args=("--dtype", "float16"),
    created_at="2026-03-04T11:59:58.000000001Z",
    dtype="float32",
    revision="main",
    threads=3,
    kind="reranker",
    trust_remote_code=True,
    replicas="per-gpu",
    tags={"team": "search"},
    wanted_running=False,
    seeded=True,
)
PLAIN = InstanceSpec(name="plain", model_id="m", port=8081, prometheus_port=9101)

# As tei-manager 0.12 writes it.
UPSTREAM = b"""\
last_updated = "2026-03-04T12:00:00.123456789Z"

[[instances]]
name = "bge-small"
model_id = "BAAI/bge-small-en-v1.5"
port = 8080
max_batch_tokens = 16384
max_concurrent_requests = 512
gpu_id = 0
prometheus_port = 9100
extra_args = [
    "--dtype",
    "float16",
]
created_at = "2026-03-04T11:59:58.000000001Z"
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state.toml")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state.toml"


@pytest.mark.clause("M4-configuration-only")
def test_what_is_saved_is_loaded(store: Store) -> None:
    store.save([FULL, PLAIN])

    assert store.load().specs == (FULL, PLAIN)
    assert store.load().alarm is None


@given(
    st.lists(
        st.builds(
            InstanceSpec,
            name=st.text(min_size=1),
            model_id=st.text(),
            port=st.integers(0, 65535),
            gpu_id=st.none() | st.integers(0, 9),
            extra_args=st.lists(st.text()).map(tuple),
            wanted_running=st.booleans(),
        )
    )
)
def test_any_text_survives_the_form(specs: list[InstanceSpec]) -> None:
    assert parse(render(specs)).specs == tuple(specs)


@pytest.mark.clause("M4-read")
def test_a_file_of_tei_manager_is_read_as_it_is() -> None:
    (spec,) = parse(UPSTREAM).specs

    assert (spec.name, spec.port, spec.gpu_id, spec.extra_args) == ("bge-small", 8080, 0, ("--dtype", "float16"))
    assert spec.created_at == "2026-03-04T11:59:58.000000001Z"
    assert spec.wanted_running


def test_who_had_an_instance_made_survives_the_form_whatever_its_tags_are() -> None:
    tags = {"made_by": "call", "made_for": "other"}
    specs = (
        InstanceSpec(name="user", model_id="m", tags=tags),
        InstanceSpec(name="call", model_id="m", tags=tags, by_call=True, by_key="one"),
        InstanceSpec(name="untagged", model_id="m", by_call=True),
    )
    assert parse(render(specs)).specs == specs


def test_in_a_file_of_0_1_0_the_tags_tell_who_had_an_instance_made() -> None:
    made = InstanceSpec(
        name="call", model_id="m", tags={"made_by": "call", "made_for": "one"}, by_call=True, by_key="one"
    )
    entry = {"name": "call", "model_id": "m", "tags": made.tags}
    old = tomli_w.dumps({"last_updated": "2026-03-04T12:00:00Z", "instances": [entry]})

    assert parse(old.encode()).specs == (made,)


@pytest.mark.clause("M4-form")
def test_the_file_has_tei_managers_keys_and_further_ones_where_they_say_more(store: Store, file: Path) -> None:
    store.save([PLAIN])

    table = tomllib.loads(file.read_text())
    assert list(table) == ["last_updated", "sha256", "instances"]
    assert list(table["instances"][0]) == [
        "name",
        "model_id",
        "port",
        "max_batch_tokens",
        "max_concurrent_requests",
        "prometheus_port",
        "extra_args",
    ]


@pytest.mark.clause("M4-form")
def test_an_empty_state_is_a_state(store: Store, file: Path) -> None:
    store.save([])

    assert "instances = []" in file.read_text()
    assert store.load() == parse(file.read_bytes())


@pytest.mark.clause("M4-missing")
def test_a_missing_file_is_an_empty_state_without_alarm(store: Store) -> None:
    assert (store.load().specs, store.load().alarm) == ((), None)


@pytest.mark.clause("M4-atomic")
def test_nothing_but_the_two_generations_lies_beside_the_file(store: Store, tmp_path: Path) -> None:
    store.save([PLAIN])
    store.save([FULL])

    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.toml", "state.toml.prev"]
    assert parse((tmp_path / "state.toml.prev").read_bytes()).specs == (PLAIN,)


def test_the_file_is_for_its_owner_alone(store: Store, file: Path) -> None:
    store.save([PLAIN])

    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.clause("M4-corrupt")
@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"[[instances", b"instances = []", b'last_updated = "x"'])
def test_a_corrupt_file_is_kept_aside_and_the_generation_before_is_loaded(
    store: Store, file: Path, damage: bytes
) -> None:
    store.save([PLAIN])
    store.save([FULL])
    file.unlink()
    file.write_bytes(damage)

    loaded = store.load()

    (aside,) = file.parent.glob("state.toml.corrupt-*")
    assert aside.read_bytes() == damage
    assert loaded.specs == (PLAIN,)
    assert loaded.alarm is not None
    assert aside.name in loaded.alarm
    assert store.load().specs == (PLAIN,), "a crash before the next save loses nothing"


@pytest.mark.clause("M4-corrupt")
def test_a_file_cut_short_at_any_byte_is_never_taken_for_a_state(store: Store, file: Path) -> None:
    store.save([FULL, replace(FULL, name="second", wanted_running=False)])
    content = file.read_bytes()

    for length in range(len(content)):
        with pytest.raises(Unreadable):
            parse(content[:length])


def test_the_generation_before_outlives_a_file_cut_short(store: Store, file: Path) -> None:
    store.save([PLAIN])
    store.save([replace(FULL, wanted_running=False), PLAIN])
    file.write_bytes(file.read_bytes()[: file.read_bytes().index(b"wanted_running")])

    loaded = store.load()
    store.save(loaded.specs)

    assert loaded.specs == (PLAIN,)
    assert "sha256" in str(loaded.alarm)
    assert parse((file.parent / "state.toml.prev").read_bytes()).specs == (PLAIN,)


def test_an_edited_file_is_taken_without_its_digest(store: Store, file: Path) -> None:
    store.save([PLAIN])
    lines = file.read_text().replace("8081", "9000").splitlines(keepends=True)
    file.write_text("".join(line for line in lines if not line.startswith("sha256")))

    assert [spec.port for spec in store.load().specs] == [9000]


def test_a_missing_file_beside_its_previous_generation_is_an_alarm(store: Store, file: Path) -> None:
    store.save([PLAIN])
    store.save([FULL])
    file.unlink()

    loaded = store.load()
    store.save([])
    store.save([])

    (kept,) = file.parent.glob("state.toml.backup-*")
    assert loaded.specs == ()
    assert kept.name in str(loaded.alarm)
    assert parse(kept.read_bytes()).specs == (PLAIN,)


def test_a_link_to_a_missing_file_is_an_alarm(tmp_path: Path) -> None:
    link = tmp_path / "state.toml"
    link.symlink_to(tmp_path / "target.toml")

    assert "target.toml is missing, to which" in str(Store(link).load().alarm)


def test_a_link_into_a_missing_folder_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "state.toml"
    link.symlink_to(tmp_path / "not-mounted" / "state.toml")

    with pytest.raises(InvalidConfig, match=r"state_file: .*not-mounted/state.toml, whose folder does not exist"):
        Store(link).open()
    assert not (tmp_path / "not-mounted").exists()


def test_a_second_daemon_is_refused_by_the_lock_beside_the_file(store: Store, file: Path) -> None:
    store.open()
    link = file.parent / "link.toml"
    link.symlink_to(file)

    for path in (file, link):
        with pytest.raises(InvalidConfig, match=r"state_file: another daemon uses .*state\.toml"):
            Store(path).open()
    store.close()
    Store(link).open()


def test_a_generation_before_that_cannot_be_copied_is_loaded_with_an_alarm(store: Store, file: Path) -> None:
    previous = file.parent / "state.toml.prev"
    store.save([PLAIN])
    store.save([FULL])
    file.unlink()
    file.write_bytes(b"junk")
    (file.parent / ".state.toml.prev.link").mkdir()  # in the way of the copy

    loaded = store.load()
    store.save([FULL, PLAIN])

    assert loaded.specs == (PLAIN,)
    assert "but could not copy it to" in str(loaded.alarm)
    assert parse(previous.read_bytes()).specs == (PLAIN,), "damage never replaces the generation before"
    store.save([FULL])
    assert parse(previous.read_bytes()).specs == (FULL, PLAIN)


def test_with_both_generations_corrupt_the_daemon_still_starts_and_says_so(store: Store, file: Path) -> None:
    file.write_bytes(b"junk")
    (file.parent / "state.toml.prev").write_bytes(b"junk")

    loaded = store.load()

    assert loaded.specs == ()
    assert "no instance was restored" in str(loaded.alarm)


@pytest.mark.clause("M4-restore")
def test_a_bad_entry_is_left_out_and_the_whole_file_is_kept(store: Store, file: Path) -> None:
    file.write_text('last_updated = "x"\n[[instances]]\nname = "a"\nmodel_id = "m"\n[[instances]]\nport = "no"\n')

    loaded = store.load()

    assert [spec.name for spec in loaded.specs] == ["a"]
    assert "instances[1]" in str(loaded.alarm)
    assert len(list(file.parent.glob("state.toml.corrupt-*"))) == 1


def test_values_nested_too_deep_are_refused_like_any_damage() -> None:
    with pytest.raises(Unreadable, match="not TOML"):
        parse(b"last_updated = 1\ninstances = " + b"[" * 3000)
    loaded = parse(b"last_updated = 1\n[[instances]]\ntags." + b"a." * 3000 + b"b = 1\n")
    assert not loaded.specs
    assert loaded.alarm


def test_a_key_of_a_later_version_is_passed_over() -> None:
    (spec,) = parse(b'last_updated = "x"\n[[instances]]\nname = "a"\nmodel_id = "m"\nfuture = 1\n').specs

    assert spec.name == "a"


def test_only_a_few_files_are_kept_aside(store: Store, file: Path) -> None:
    store.save([PLAIN])
    for _ in range(SET_ASIDE_KEPT + 3):
        store.set_aside("backup")

    assert len(list(file.parent.glob("state.toml.backup-*"))) == SET_ASIDE_KEPT


def test_a_refused_write_leaves_the_file_as_it_was(store: Store, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save([PLAIN])

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        store.save([FULL])

    assert store.load().specs == (PLAIN,)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_a_file_system_without_hard_links_keeps_two_generations_too(
    store: Store, file: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(link: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    store.save([PLAIN])
    store.save([FULL])
    assert store.load().specs == (FULL,)

    file.write_bytes(b"torn")
    assert store.load().specs == (PLAIN,)


_WRITER = """
import itertools, sys
from pathlib import Path
from teimgr.control.supervision.store import Store
from teimgr.spec import InstanceSpec
store = Store(Path(sys.argv[1]))
print("go", flush=True)
for turn in itertools.count():
    size = 1 + turn % 40
    store.save([InstanceSpec(name=f"n{i}", model_id=f"generation-of-{size}", port=1024 + i) for i in range(size)])
"""


@pytest.mark.clause("M4-atomic")
def test_a_writer_killed_at_any_moment_leaves_a_whole_generation(file: Path) -> None:
    """Twenty writers are killed after a random number of writes seen from outside."""
    choose = random.Random(4)
    for _ in range(20):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(file)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"go\n"
        for _ in range(choose.randrange(1, 4000)):
            file.exists()  # a stretch of real time whose end falls anywhere in a write
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()

        loaded = Store(file).load()
        assert loaded.alarm is None
        assert {spec.model_id for spec in loaded.specs} in ({f"generation-of-{len(loaded.specs)}"}, set())
        Store(file).save(loaded.specs)


@pytest.mark.clause("M4-atomic")
def test_a_writer_killed_at_any_system_call_leaves_the_old_or_the_new_generation(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.control.supervision.kill_points", str(tmp_path)]

    outcomes = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    old, new = {"names": ["old"], "alarm": None}, {"names": ["new", "newer"], "alarm": None}
    switch = outcomes.index(new)
    assert outcomes == [old] * switch + [new] * (len(outcomes) - switch)
    assert switch > 10
    assert len(outcomes) - switch > 2, "killed after the replacement too"


# What is wanted at boot


def settings(file: Path, *, restore: bool) -> Settings:
    seeds = (InstanceSpec(name="bge", model_id="seeded"), InstanceSpec(name="new", model_id="seeded"))
    return Settings(state_file=file, instances=seeds, auto_restore_on_restart=restore)


@pytest.mark.clause("M4-seeds")
def test_the_state_wins_over_a_seed_of_the_same_name(store: Store, file: Path) -> None:
    store.save([FULL])

    wanted = wanted_at_boot(settings(file, restore=True), store)

    assert [(spec.name, spec.model_id) for spec in wanted.specs] == [("bge", FULL.model_id), ("new", "seeded")]
    assert not wanted.specs[0].wanted_running


@pytest.mark.clause("M4-seeds")
def test_without_restore_the_seeds_alone_count_and_the_state_is_backed_up(store: Store, file: Path) -> None:
    store.save([FULL, PLAIN])

    wanted = wanted_at_boot(settings(file, restore=False), store)

    assert [(spec.name, spec.model_id, spec.port) for spec in wanted.specs] == [
        ("bge", "seeded", FULL.port),
        ("new", "seeded", 0),
    ]
    (backup,) = file.parent.glob("state.toml.backup-*")
    assert parse(backup.read_bytes()).specs == (FULL, PLAIN)


# The wanted state

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
    async with kept.state.planning("a", lambda spec: OTHER):
        assert kept.written() == [OTHER]
        kept.specs = [OTHER]
    async with kept.state.creating(replace(SPEC, name="b")):
        assert [spec.name for spec in kept.written()] == ["a", "b"] == [spec.name for spec in kept.state.specs()]
    async with kept.state.planning("a", lambda spec: None):
        assert kept.written() == []

    assert kept.written() == [OTHER], "what the body did not change is written again"


async def test_a_refused_change_does_not_begin(kept: Fixture) -> None:
    await kept.state.write()
    kept.obstacle.mkdir()

    with pytest.raises(StateNotSaved, match="cannot be saved"):
        async with kept.state.planning("a", lambda spec: None):
            pytest.fail("the body ran")
    with pytest.raises(StateNotSaved):
        await kept.state.begin_update("a", {}, recreate=False)

    assert kept.written() == [SPEC]
    assert kept.state.is_refused
    kept.obstacle.rmdir()
    await kept.state.close()


async def test_what_was_refused_is_written_when_the_disk_heals(kept: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_RETRY_S", 0.01)
    kept.obstacle.mkdir()
    await kept.state.write_quietly()
    assert "cannot be saved" in str(kept.state.alarm_text)

    kept.obstacle.rmdir()

    await eventually(lambda: kept.state.alarm_text is None)
    assert kept.written() == [SPEC]
    await kept.state.close()


async def test_a_write_whose_caller_is_cancelled_is_completed_before_the_next(
    kept: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kept.state.write()
    write, may_write = store_module.write_atomically, threading.Event()
    writers: list[str] = []

    def write_slowly(*arguments: Any, **options: Any) -> None:
        writers.append("begins")
        may_write.wait(10)
        write(*arguments, **options)
        writers.append("ends")

    monkeypatch.setattr(store_module, "write_atomically", write_slowly)

    async def plan() -> None:
        async with kept.state.planning("a", lambda spec: None):
            pytest.fail("the body ran")

    planning = asyncio.create_task(plan())
    await eventually(lambda: writers)
    planning.cancel()
    await asyncio.sleep(0)  # the cancellation arrives
    may_write.set()
    with pytest.raises(asyncio.CancelledError):
        await planning
    await kept.state.close()

    assert writers == ["begins", "ends"] * 2
    assert kept.written() == [SPEC], "a change that was not made is not left on disk"


async def test_a_disk_that_does_not_answer_refuses_changes_in_time_and_is_followed_by_what_is_wanted_then(
    kept: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_WRITE_LIMIT_S", 0.05)
    await kept.state.load(kept.settings)
    await kept.state.write()
    write, answers, writers = store_module.write_atomically, threading.Event(), 0

    def write_late(*arguments: Any, **options: Any) -> None:
        nonlocal writers
        writers += 1
        answers.wait(60)
        write(*arguments, **options)

    monkeypatch.setattr(store_module, "write_atomically", write_late)
    for _ in range(3):
        with pytest.raises(StateNotSaved, match=r"has not answered for 0\.05 s"):
            async with kept.state.planning("a", lambda spec: None):
                pytest.fail("the body ran")
    await asyncio.gather(*(kept.state.write_quietly() for _ in range(20)))
    assert "has not answered" in str(kept.state.alarm_text)
    await kept.state.close(limit_s=0.05)
    with pytest.raises(InvalidConfig, match="another"):  # the write may still replace the file
        Store(kept.path).open()

    answers.set()
    await eventually(lambda: kept.state.alarm_text is None and kept.written() == [SPEC])
    assert writers == 2, "one that did not answer, and one for all that came meanwhile"


async def test_closing_tries_a_last_time(kept: Fixture) -> None:
    kept.obstacle.mkdir()
    await kept.state.write_quietly()
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
        record = await later.state.begin_update("a", changes, recreate=recreate)
        assert json.loads(str(later.written()[0].pending_update))["tries"] == 2
    await later.state.end_update("a", "of another update")
    assert later.written()[0].pending_update == record
    await later.state.end_update("a", record)
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
