"""The declaration of an instance's keys, and every place that follows from it; a new key is covered by each test."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args, get_type_hints

import orjson
import pytest
import tomli_w

import teimgr
from teimgr.api.batches.batch_record import Batch, RowSet
from teimgr.api.rest.schemas import CreateInstance, InstanceInfo, UpdateInstance, instance_info
from teimgr.client import AsyncClient, Instance
from teimgr.client.rest import InstanceKeys, NewInstanceKeys
from teimgr.cluster.messages import FleetFacts, HeldWorker, NodeFacts
from teimgr.config.instance_keys import FLAGS, parse
from teimgr.config.settings import Settings
from teimgr.control.launch.control_link import WorkerStatus
from teimgr.control.launch.process_handle import RunFile
from teimgr.control.placement.hosts import GpuInventory
from teimgr.control.placement.planner import Planner
from teimgr.control.supervision.store import parse as parse_state
from teimgr.control.supervision.store import render
from teimgr.errors import InvalidConfig, ValidationError
from teimgr.spec import (
    KEYS,
    WORKER_KEYS,
    Change,
    InstanceSpec,
    InstanceView,
    LoadedModel,
    RouteEntry,
    State,
    WorkerSpec,
    now_rfc3339,
    rfc3339,
    updatable,
)
from tests.config.loaded_settings import load
from tests.support.rest_listener import listening

# The declared keys: every place that has them follows from `InstanceSpec`, and each test covers a new key by itself.

GIVEN = [name for name, key in KEYS.items() if key.in_rest and name != "name"]


def sample(name: str) -> Any:
    """A valid value of the key, other than its default, as JSON and TOML have it."""
    if name == "scale_up_wait_ms":
        return 3000  # above scale_down_wait_ms
    key, default = KEYS[name], {item.name: item.default for item in fields(InstanceSpec)}[name]
    if key.words:
        launched = {item.name: item.default for item in fields(WorkerSpec)}.get(name)
        return next(word for word in key.words if word not in (default, launched))
    kind = {"tags": dict, "labels": dict, "extra_args": list}.get(name) or next(
        kind for kind in (bool, int, str) if kind in (hint := HINTS[name], *get_args(hint))
    )
    values = {dict: {"team": "search"}, list: ["--auto-truncate"], bool: not default, str: "sample"}
    return values[kind] if kind in values else int(max(key.low or 0, 1024 if "port" in name else 2))


HINTS = get_type_hints(InstanceSpec)
SAMPLES = {name: sample(name) for name in KEYS}
"""One value for each key; with `name` and `model_id` a valid instance."""


def spec_of(values: dict[str, Any]) -> InstanceSpec:
    return InstanceSpec(**{name: tuple(value) if name == "extra_args" else value for name, value in values.items()})


def test_no_sample_is_a_default_so_that_a_key_that_gets_lost_is_seen() -> None:
    default = InstanceSpec(name="", model_id="")
    assert [name for name in KEYS if getattr(default, name) == getattr(spec_of(SAMPLES), name)] == []


@pytest.mark.parametrize("name", KEYS)
def test_a_key_says_what_it_means_and_has_limits_where_it_is_a_number(name: str) -> None:
    key, kinds = KEYS[name], {HINTS[name], *get_args(HINTS[name])}
    assert key.meaning
    assert int not in kinds or (key.low is not None and key.high is not None)
    assert (key.most is not None) == (name in ("tags", "labels", "extra_args"))


@pytest.mark.parametrize("name", KEYS)
def test_a_key_survives_the_state_file(name: str) -> None:
    spec = spec_of({"name": "a", "model_id": "m"} | {name: SAMPLES[name]})
    assert parse_state(render([spec])).specs == (spec,)


@pytest.mark.parametrize("name", [name for name in KEYS if KEYS[name].in_config])
def test_a_key_is_taken_from_a_seed(name: str, tmp_path: Path) -> None:
    values = {"name": "a", "model_id": "m"} | {name: SAMPLES[name]}
    file = tmp_path / "t.toml"
    file.write_text(tomli_w.dumps({"instances": [values]}))
    assert load(file, {}).instances == (replace(spec_of(values), seeded=True),)


@pytest.mark.parametrize("name", KEYS)
def test_a_template_has_the_keys_that_can_be_updated(name: str, tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    seed = {"name": "a", "template": "t"} | ({"model_id": "m"} if name != "model_id" else {})
    file.write_text(tomli_w.dumps({"templates": {"t": {name: SAMPLES[name]}}, "instances": [seed]}))
    if updatable(name):
        assert getattr(load(file, {}).instances[0], name) == getattr(spec_of(SAMPLES), name)
    else:
        with pytest.raises(InvalidConfig, match=f"unknown key '{name}'"):
            load(file, {})


def test_a_flag_sets_the_field_of_its_key() -> None:
    flags = {name: f"--{name.replace('_', '-')}" for name, key in KEYS.items() if key.flag}
    assert {name: FLAGS[flag].field for name, flag in flags.items()} == {name: name for name in flags}
    assert set(flags) <= set(WORKER_KEYS)
    for name, flag in flags.items():
        assert parse([f"{flag}={str(SAMPLES[name]).lower()}"]) == {name: SAMPLES[name]}


@pytest.mark.parametrize("name", KEYS)
def test_what_a_worker_is_launched_with_needs_another_worker(name: str) -> None:
    old = InstanceSpec(name="a", model_id="m")
    new = replace(old, **{name: getattr(spec_of(SAMPLES), name)})
    wanted = Change.REPLACE if name in (*WORKER_KEYS, "extra_args") else KEYS[name].change
    assert wanted is KEYS[name].change or KEYS[name].change is Change.FIXED
    if name == "extra_args":
        new = replace(old, extra_args=("--dtype", "float16"))
    assert Planner(Settings(), GpuInventory({}), cores=1).change_needed(old, new) is wanted


async def test_every_key_goes_from_the_client_through_rest_to_the_state_file_and_back(tmp_path: Path) -> None:
    settings = Settings(state_file=tmp_path / "state.toml")
    async with listening(settings, gpus=(SAMPLES["gpu_id"],)) as front, AsyncClient(front.url) as client:
        made = await client.create(**{name: SAMPLES[name] for name in ("name", *GIVEN)})
        (stored,) = parse_state(render([front.fleet.get(made.name).spec])).specs
        shown = instance_info(InstanceView(spec=stored, state=State.STARTING))

    assert {name: getattr(made, name) for name in GIVEN if name != "threads"} == {
        name: SAMPLES[name]
        for name in GIVEN
        if name != "threads"  # what is shown is the share in use
    }
    assert stored == front.fleet.get(made.name).spec
    assert stored.threads == SAMPLES["threads"]
    visible = [name for name, key in KEYS.items() if not key.secret]
    assert {name: shown[name] for name in visible} == {name: made.details[name] for name in visible}
    assert not (KEYS.keys() - visible) & (shown.keys() | made.details.keys())


@pytest.mark.parametrize("name", [name for name in KEYS if updatable(name)])
async def test_a_key_is_updated_by_the_client_and_set_back(name: str, tmp_path: Path) -> None:
    settings = Settings(state_file=tmp_path / "state.toml")
    async with listening(settings) as front, AsyncClient(front.url) as client:
        before = front.fleet.put(InstanceView(spec=InstanceSpec(name="a", model_id="m"), state=State.RUNNING)).spec
        await client.update("a", **{name: SAMPLES[name]}, wait=True)
        after = front.fleet.get("a").spec
        assert after == replace(before, **{name: getattr(spec_of(SAMPLES), name)})
        if name != "model_id":
            await client.update("a", **{name: None})
            assert front.fleet.get("a").spec == before


def test_rest_and_the_client_have_every_key() -> None:
    updates = {name for name in KEYS if updatable(name)}
    assert set(CreateInstance.model_fields) == {"name", "template", *GIVEN}
    assert set(UpdateInstance.model_fields) == {"strategy", *updates}
    assert set(InstanceInfo.model_fields) >= {name for name, key in KEYS.items() if not key.secret}
    assert set(get_type_hints(InstanceKeys)) | {"model_id"} == updates
    assert set(get_type_hints(NewInstanceKeys)) | {"model_id"} == {"template", *GIVEN}
    assert {item.name for item in fields(Instance)} >= {name for name, key in KEYS.items() if not key.secret}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"prot": 1}, "unknown key 'prot'; did you mean 'port'?"),
        ({"port": "8080"}, "port: must be an integer (got text '8080')"),
        ({"port": 65536}, "port: must be <= 65535 (got 65536)"),
        ({"dtype": "int3"}, "dtype: must be one of auto, float32"),
        ({"replicas": "two"}, "replicas: must be one of 'per-gpu'"),
        ({"extra_args": "--dtype"}, "extra_args: must be a list"),
        ({"tags": {"a": 1}}, "tags.a: must be text"),
        ({"wanted_running": False}, "unknown key 'wanted_running'"),
    ],
)
async def test_the_client_checks_keys_by_their_declaration(keys: dict[str, Any], says: str) -> None:
    async with AsyncClient("http://127.0.0.1:1") as client:
        with pytest.raises(ValidationError) as caught:
            await client.create("a", "m", **keys)
        assert says in caught.value.message
        with pytest.raises(ValidationError):
            await client.update("a", **keys)


async def test_auto_is_rests_word_for_zero(tmp_path: Path) -> None:
    settings = Settings(state_file=tmp_path / "state.toml")
    async with listening(settings) as front, AsyncClient(front.url) as client:
        await client.create("a", "m", max_batch_tokens="auto")
        assert front.fleet.get("a").spec.max_batch_tokens == 0
        with pytest.raises(ValidationError, match="must be >= 1, or auto"):
            await client.create("b", "m", max_batch_tokens=0)


async def test_a_template_of_the_daemon_completes_what_the_client_creates(tmp_path: Path) -> None:
    settings = Settings(state_file=tmp_path / "state.toml", templates={"t": {"model_id": "m", "tags": {"a": "1"}}})
    async with listening(settings) as front, AsyncClient(front.url) as client:
        made = await client.create("a", template="t", tags={"b": "2"})
        assert (made.model_id, made.tags) == ("m", {"a": "1", "b": "2"})
        rolled = await client.restart("a", rolling=True, wait=True)
        assert rolled.details["update"]["state"] == "done"


AFTER = "    seeded: bool = "
USE = """
import sys
from pathlib import Path
from teimgr.client.checks import checked_keys
from teimgr.config.sources import Source, read
from teimgr.api.rest.schemas import CreateInstance, InstanceInfo, UpdateInstance, instance_info
from teimgr.spec import KEYS, InstanceView, State
from teimgr.control.supervision.store import parse, render

body = checked_keys({"name": "a", "model_id": "m", "shelf": 7}, KEYS)
made = CreateInstance.model_validate(body).spec()
(stored,) = parse(render([made])).specs
assert stored.shelf == 7
assert instance_info(InstanceView(spec=stored, state=State.RUNNING))["shelf"] == 7
assert UpdateInstance.model_validate({"shelf": 8}).changes() == {"shelf": 8}
for kind in (CreateInstance, UpdateInstance, InstanceInfo):
    assert kind.model_json_schema()["properties"]["shelf"]["description"].startswith("where it stands")
for bad in (0, 10, "7"):
    try:
        CreateInstance.model_validate(body | {"shelf": bad})
    except ValueError:
        continue
    raise AssertionError(bad)
file = Path(sys.argv[1])
file.write_text('[templates.t]\\nshelf = 5\\n[[instances]]\\nname = "a"\\nmodel_id = "m"\\ntemplate = "t"\\n')
assert read(Source(file=file, environ={})).settings.instances[0].shelf == 5
"""


def test_adding_a_key_is_one_line(tmp_path: Path) -> None:
    """A package whose `spec.py` has one more line has the key in every place."""
    source, package = Path(teimgr.__file__).parent, tmp_path / "teimgr"
    package.mkdir()
    for each in source.iterdir():
        (package / each.name).symlink_to(each)
    (package / "spec.py").unlink()
    text = (source / "spec.py").read_text()
    line = '    shelf: int | None = _key(None, "where it stands", 1, 9)\n'
    (package / "spec.py").write_text(text.replace(AFTER, line + AFTER))
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", USE, str(tmp_path / "t.toml")]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


LATER = {"of_a_later_version": {"x": 1}}


def _with_more(values: Any) -> Any:
    """A message in which each object that has keys has one more."""
    if isinstance(values, list):
        return [_with_more(each) for each in values]
    return (
        {name: _with_more(each) for name, each in values.items()} | LATER
        if values and isinstance(values, dict)
        else values
    )


EARLIER = {
    RouteEntry: {"name": "a", "model_id": "m", "state": "running", "endpoints": [{"socket": "s", "incarnation": "i"}]},
    WorkerStatus: {"state": "loading", "pid": 1, "incarnation": "i", "spec_hash": "h"},
    LoadedModel: {
        **dict.fromkeys(("model_id", "dtype", "device", "kind", "pooling", "batching"), "x"),
        **{"model_sha": None, "dimension": 2, "max_input_length": 3, "max_batch_tokens": 4},
    },
    HeldWorker: {
        **dict.fromkeys(("spec", "incarnation", "socket", "run_dir", "log_path"), "x"),
        **{"pid": 1, "start_time": 2, "started_at": 3.0},
    },
    NodeFacts: {
        "name": "n",
        "versions": dict.fromkeys(("teimgr", "ray", "python", "torch"), "1"),
        **{"labels": {}, "cores": 1, "memory_total_bytes": 2, "memory_free_bytes": 1},
    },
    FleetFacts: {"services": None},
    Batch: {
        **dict.fromkeys(("id", "owner", "endpoint", "input_file_id", "completion_window"), "x"),
        **{"version": 1, "created": 1.0, "expires": 2.0, "status": "validating", "faults": []},
        "progress": {"output": {"id": "o"}, "error": {"id": "e"}, "done": RowSet().to_text(), "tokens": 0},
    },
}
"""The least that a process of the baseline tells, by what it is read into."""


@pytest.mark.parametrize("kind", EARLIER, ids=lambda kind: str(kind.__name__))
def test_what_crosses_between_versions_may_have_more_keys_or_fewer(kind: Any) -> None:
    """A mux of an earlier version raised TypeError on a route with a new key, and was killed with its calls."""

    def read(values: Any) -> Any:
        if kind is WorkerStatus:
            return kind.from_json(orjson.dumps(values))
        if kind is Batch:
            return kind.from_record(orjson.dumps(values)).to_record()
        return kind.from_dict(values)

    assert read(_with_more(EARLIER[kind])) == read(EARLIER[kind])


def test_an_order_with_a_key_that_cannot_be_carried_out_is_refused() -> None:
    order = orjson.loads(WorkerSpec(name="a", model_id="m").to_json())
    with pytest.raises(TypeError, match="of_a_later_version"):
        WorkerSpec.from_json(orjson.dumps(order | LATER).decode())


def test_a_run_file_of_a_later_version_identifies_its_process(tmp_path: Path) -> None:
    """One that was not read left a live process that nobody owned."""
    of_ours = RunFile.of(os.getpid())
    assert of_ours is not None
    of_ours.write(path := tmp_path / "a.run")
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | LATER))
    assert RunFile.read(path) == of_ours


def test_a_time_is_utc_with_microseconds() -> None:
    noon = datetime(2026, 3, 4, 12, tzinfo=UTC)
    assert rfc3339(noon) == "2026-03-04T12:00:00.000000Z"
    assert rfc3339(noon, "auto") == "2026-03-04T12:00:00Z"


def test_now_can_be_read_back() -> None:
    assert abs((datetime.now(UTC) - datetime.fromisoformat(now_rfc3339())).total_seconds()) < 60
