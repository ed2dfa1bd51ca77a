"""Lifecycle calls against a real HTTP server with the daemon's routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.rest_listener import Fleet, listening
from tests.support.small_servers import Daemon

from teimgr.client import AsyncClient, Tls
from teimgr.config.settings import Settings
from teimgr.control.events.fleet_events import EventLog
from teimgr.errors import (
    DeadlineExceeded,
    InstanceExists,
    InstanceNotFound,
    InvalidConfig,
    InvalidInstanceName,
    ModelGated,
    ModelLoadFailed,
    ModelNotFound,
    NotRunning,
    TeimgrError,
    Unavailable,
    ValidationError,
)
from teimgr.spec import State


async def test_create_sends_only_what_was_wished(client: AsyncClient, daemon: Daemon) -> None:
    made = await client.create("mini", "org/model", max_batch_tokens=512, extra_args=["--dtype", "float32"])
    assert made.status is State.STARTING
    assert made.details["newer_key"] == [1]
    sent = daemon.instances["mini"]
    assert (sent["max_batch_tokens"], sent["extra_args"]) == (512, ["--dtype", "float32"])
    assert "pooling" not in sent


async def test_wait_until_running_returns_the_running_instance(client: AsyncClient) -> None:
    await client.create("mini", "org/model")
    instance = await client.wait_until_running("mini", deadline_s=20)
    assert (instance.status, instance.pid) == (State.RUNNING, 7)


async def test_wait_until_running_raises_the_reason_of_a_failed_instance(client: AsyncClient) -> None:
    await client.create("mini", "broken")
    with pytest.raises(ModelLoadFailed, match="Instance 'mini' failed: no weights"):
        await client.wait_until_running("mini", deadline_s=20)


async def test_wait_until_running_does_not_wait_for_a_stopped_instance(client: AsyncClient) -> None:
    await client.create("mini", "org/model")
    await client.stop("mini")
    with pytest.raises(NotRunning):
        await client.wait_until_running("mini", deadline_s=20)


async def test_wait_until_running_ends_at_its_deadline(client: AsyncClient, daemon: Daemon) -> None:
    daemon.polls_to_run = 1_000_000
    await client.create("mini", "org/model")
    with pytest.raises(DeadlineExceeded, match=r"'mini' is starting after 0\.1 s"):
        await client.wait_until_running("mini", deadline_s=0.1)


async def test_verbs_and_views(client: AsyncClient) -> None:
    await client.create("mini", "org/model")
    assert [instance.name for instance in await client.list()] == ["mini"]
    assert (await client.stop("mini")).status is State.STOPPED
    assert (await client.start("mini")).status is State.STARTING
    assert (await client.restart("mini")).status is State.STARTING
    gone = await client.delete("mini")
    assert gone is not None
    assert gone.name == "mini"
    assert await client.list() == []


async def test_errors_are_the_ones_the_daemon_named(client: AsyncClient) -> None:
    with pytest.raises(InstanceNotFound, match="Instance 'nope' not found"):
        await client.get("nope")
    await client.create("mini", "org/model")
    with pytest.raises(InstanceExists):
        await client.create("mini", "org/model")


async def test_logs_are_sliced(client: AsyncClient) -> None:
    logs = await client.logs("mini", start=-2)
    assert (logs.lines, logs.start, logs.end, logs.total_lines) == (("b", "c"), 1, 3, 3)


async def test_health_and_ready(client: AsyncClient, daemon: Daemon) -> None:
    assert (await client.health()).status == "healthy"
    assert await client.ready() is True
    daemon.is_ready = False
    assert await client.ready() is False


def test_half_a_key_pair_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="together"):
        Tls(cert="client.pem")


@pytest.mark.parametrize("name", ["", "..", ".", "../health", "mini\n", "mini?x"])
async def test_a_name_that_would_reach_another_route_is_refused_before_anything_is_sent(
    client: AsyncClient, name: str
) -> None:
    calls = (client.get, client.start, client.stop, client.restart, client.delete, client.logs)
    for call in (*calls, client.wait_until_running):
        with pytest.raises(InvalidInstanceName):
            await call(name)


async def test_a_name_that_is_no_text_is_refused(client: AsyncClient) -> None:
    with pytest.raises(ValidationError, match="name must be a string, not integer 5"):
        await client.get(5)


async def test_a_wish_that_is_no_json_is_refused(client: AsyncClient) -> None:
    with pytest.raises(ValidationError, match="PosixPath"):
        await client.create("mini", Path("models/mini"))


async def test_models_are_added_listed_tried_and_deleted(client: AsyncClient) -> None:
    assert await client.add_model("org/model", revision="main") == {"model_id": "org/model", "revision": "main"}
    assert [model["model_id"] for model in await client.models()] == ["org/model"]
    tried = await client.try_model("org/model", device="cpu")
    assert tried == {"model_id": "org/model", "status": "verified", "device": "cpu"}
    assert (await client.delete_model("org/model"))["model_id"] == "org/model"
    assert await client.models() == []


async def test_a_download_is_progress_and_then_the_model(client: AsyncClient, daemon: Daemon) -> None:
    events = [event async for event in client.download_model("org/model", update=True)]
    assert events == [("progress", {"bytes_done": 1}, None), ("done", {"model_id": "org/model"}, "2")]
    assert daemon.models["org/model"] == {"update": True}


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        ("no/such", ModelNotFound, "is not on the hub"),
        ("org/gated", ModelGated, "accept it first"),
        ("org/cut", Unavailable, "before the download was done"),
    ],
)
async def test_a_download_that_fails_raises(
    client: AsyncClient, model: str, error: type[TeimgrError], says: str
) -> None:
    with pytest.raises(error, match=says):
        async for _ in client.download_model(model):
            pass


async def test_events_are_listed_and_followed_and_resumed(tmp_path: Path) -> None:
    log = EventLog(kept=4)
    log.note([])

    def parts(fleet: Fleet) -> dict[str, Any]:
        fleet.on_views_changed = log.note
        return {"event_log": log}

    settings = Settings(state_file=tmp_path / "state.toml")
    async with listening(settings, parts=parts) as front, AsyncClient(front.url) as client:
        await client.create("a", "m", tags={"team": "search"})
        await client.create("b", "m")
        listed = [each async for each in client.events(last=100, follow=False)]
        assert [(each.event, each.instance) for each in listed] == [
            (event, name) for name in "ab" for event in ("created", "starting")
        ]
        assert (listed[0].id, listed[0].status, listed[0].tags) == (1, "starting", {"team": "search"})
        only = [each.id async for each in client.events(["b"], ["starting"], last=9, follow=False)]
        assert only == [4]

        stream = client.events(["a"], last=1)
        assert (await anext(stream)).event == "starting"
        front.fleet.ready("a")
        assert (await anext(stream)).event == "running"
        await stream.aclose()

        front.fleet.fail("a", "broken")
        stream = client.events(after=1)
        missed = await anext(stream)
        assert (missed.event, missed.id, missed.details) == ("missed", None, {"missed": 1})
        assert [(await anext(stream)).id for _ in range(4)] == [3, 4, 5, 6]
        await stream.aclose()
        log.close()
