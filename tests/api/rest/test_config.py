"""From one configuration to another through REST: the plan, the moves, what is refused; and the events of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support.rest_listener import Front, listening

from teimgr.config.auth import Auth, Mtls
from teimgr.config.settings import Settings
from teimgr.config.sources import Configuration, Source, read
from teimgr.control.events.fleet_events import KEPT, EventLog
from teimgr.control.supervision.reload import LIVE, Reloader, live_keys
from teimgr.control.supervision.worker_run import FleetProber
from teimgr.daemon.process import Daemon
from teimgr.errors import InvalidConfig
from teimgr.observability import logs
from teimgr.spec import InstanceSpec, InstanceView, RouteEntry, State
from teimgr.wire.routing.directory import Directory

SEEDS = """
api_port = 9100
[[instances]]
name = "a"
model_id = "m"
[[instances]]
name = "b"
model_id = "m"
"""
LIMIT_S = 10.0


class Moving:
    """A front whose fleet came from a configuration file that the test changes."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.front: Front = None  # type: ignore[assignment]
        self.reloader: Reloader = None  # type: ignore[assignment]
        self.events = EventLog()
        self.applied: list[Settings] = []

    def parts(self, fleet: Any) -> dict[str, Any]:
        self.reloader = Reloader(Source(file=self.file, environ={}), self.said, fleet, self.applied.append, self.events)
        self.events.note(fleet.list())
        fleet.on_views_changed = self.events.note
        return {"event_log": self.events, "live_probe": FleetProber(Directory(), 1.0), "reloader": self.reloader}

    @property
    def said(self) -> Configuration:
        return read(Source(file=self.file, environ={}))

    async def reload(self, text: str | None = None, query: str = "", status: int = 200) -> Any:
        if text is not None:
            self.file.write_text(text)
        return await self.front.call("POST", f"/config/reload{query}", status)

    def names(self) -> str:
        return "".join(view.spec.name for view in self.front.fleet.list())


@pytest.fixture
async def moving(tmp_path: Path) -> AsyncIterator[Moving]:
    moving = Moving(tmp_path / "t.toml")
    moving.file.write_text(SEEDS)
    async with (
        listening(moving.said.settings, parts=moving.parts) as front,
        aiohttp.ClientSession(front.url) as front.http,
    ):
        moving.front = front
        for seed in moving.said.settings.instances:
            await front.fleet.create(seed)
        await front.create("mine")
        yield moving


async def test_the_same_configuration_changes_nothing(moving: Moving) -> None:
    done = await moving.reload()
    nothing = {"settings": [], "create": [], "update": {}, "recreate": [], "remove": [], "left": []}
    assert done == {"dry_run": False, "plan": nothing, "steps": [], "failed": 0}


@pytest.mark.clause("D-reload")
async def test_a_dry_run_shows_the_plan_and_moves_nothing(moving: Moving) -> None:
    text = SEEDS.replace("9100", "9200").replace('name = "b"', 'name = "c"\nport = 8100')
    text = text.replace('model_id = "m"\n', 'model_id = "n"\n', 1) + "[aliases]\nx = 'a'\n"
    plan = (await moving.reload(text, "?dry_run=true"))["plan"]
    file = moving.file
    assert plan["settings"] == [
        {"key": "api_port", "before": 9100, "after": 9200, "source": f"{file}:2", "applies": "at the next start"},
        {"key": "aliases.x", "before": None, "after": "a", "source": f"{file}:11", "applies": "at once"},
    ]
    assert plan["create"] == ["c"]
    assert plan["update"] == {"a": {"model_id": "n"}}
    assert (plan["remove"], plan["left"], plan["recreate"]) == ([], ["b"], [])
    assert moving.names() == "abmine"
    assert moving.applied == []
    assert moving.front.fleet.get("a").spec.model_id == "m"


@pytest.mark.clause("D-reload")
async def test_a_reload_moves_the_fleet(moving: Moving) -> None:
    text = (
        SEEDS.replace('model_id = "m"\n', 'model_id = "n"\ntags = {t = "1"}\n', 1)
        + "[[instances]]\nname='c'\nmodel_id='m'\n"
    )
    done = await moving.reload(text)
    assert [(step["action"], step["instance"], step["ok"]) for step in done["steps"]] == [
        ("update", "a", True),
        ("create", "c", True),
    ]
    spec = moving.front.fleet.get("a").spec
    assert (spec.model_id, spec.tags, spec.seeded) == ("n", {"t": "1"}, True)
    assert moving.front.fleet.get("c").spec.seeded
    assert not moving.front.fleet.get("mine").spec.seeded
    assert (await moving.reload())["steps"] == []


async def test_the_file_wins_over_what_rest_changed_and_health_says_that_it_would(moving: Moving) -> None:
    await moving.front.fleet.update("a", {"max_batch_tokens": 5})
    health = await moving.front.call("GET", "/health", 200)
    assert health["notices"] == ["instance 'a' differs from the configuration in max_batch_tokens; a reload moves it"]
    assert health["alarms"] == []
    done = await moving.reload()
    assert done["plan"]["update"] == {"a": {"max_batch_tokens": 16384}}
    assert (await moving.front.call("GET", "/health", 200))["notices"] == []


async def test_a_stopped_instance_stays_stopped(moving: Moving) -> None:
    await moving.front.fleet.stop("a")
    assert (await moving.reload())["plan"]["update"] == {}


@pytest.mark.parametrize(
    ("key", "query", "removed"),
    [
        ("", "", False),
        ("prune_seeds = true\n", "", True),
        ("", "?prune=true", True),
        ("prune_seeds = true\n", "?prune=false", False),
    ],
)
async def test_what_the_file_made_and_names_no_more_is_removed_where_pruning_is_on(
    moving: Moving, key: str, query: str, removed: bool
) -> None:
    done = await moving.reload(f"{key}api_port = 9100\n", query)
    assert moving.names() == ("mine" if removed else "abmine")
    assert done["plan"]["remove" if removed else "left"] == ["a", "b"]


async def test_another_port_is_another_instance(moving: Moving) -> None:
    done = await moving.reload(SEEDS.replace('name = "b"', 'name = "b"\nport = 8150'))
    assert done["plan"]["recreate"] == ["b"]
    assert moving.front.fleet.get("b").spec.port == 8150


async def test_a_wrong_file_changes_nothing_and_is_an_alarm_until_it_is_mended(moving: Moving) -> None:
    bad = SEEDS.replace("api_port", "api_prot") + "port = 80\n[[instances]]\nname='c'\nmodel_id='m'\n"
    dry = await moving.reload(bad, "?dry_run=true", 400)
    assert "did you mean 'dry_run'?" in (await moving.reload(bad, "?dryrun=true", 400))["error"]
    assert moving.reloader.alarms() == []
    refused = await moving.reload(bad, "", 400)
    assert refused["code"] == dry["code"] == "INVALID_CONFIG"
    assert f"{moving.file}:2: api_prot: unknown key 'api_prot'; did you mean 'api_port'?" in refused["error"]
    assert moving.names() == "abmine"
    assert "the configuration was not reloaded" in moving.reloader.alarms()[0]
    await moving.reload(SEEDS)
    assert moving.reloader.alarms() == []


async def test_settings_that_cannot_be_taken_change_nothing_and_are_an_alarm(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(settings: Settings) -> None:
        raise InvalidConfig("key_file: it is gone")

    before = moving.reloader.configuration
    monkeypatch.setattr(moving.reloader, "_apply", refuse)

    refused = await moving.reload(SEEDS.replace('"b"', '"c"') + "[aliases]\nx = 'a'\n", "", 400)

    assert (refused["code"], moving.names()) == ("INVALID_CONFIG", "abmine")
    assert moving.reloader.configuration is before
    assert moving.reloader.alarms() == ["the configuration was not reloaded: key_file: it is gone"]


async def test_a_move_that_fails_is_told_and_the_others_are_made(moving: Moving) -> None:
    done = await moving.reload(
        SEEDS + "[[instances]]\nname='c'\nmodel_id='m'\ngpu_id=7\n[[instances]]\nname='d'\nmodel_id='m'\n"
    )
    assert [(step["instance"], step["ok"], step["code"]) for step in done["steps"]] == [
        ("c", False, "INVALID_GPU_ID"),
        ("d", True, None),
    ]
    assert done["failed"] == 1
    assert "create of 'c'" in moving.reloader.alarms()[0]


async def test_only_live_keys_are_taken_up(moving: Moving) -> None:
    await moving.reload(
        "api_port = 9200\nlog_level = 'debug'\n[[webhooks]]\nurl='http://h'\nsecret='hush'\n" + SEEDS[16:]
    )
    (settings,) = moving.applied
    assert (settings.api_port, settings.log_level, settings.webhooks[0].secret) == (9100, "debug", "hush")
    shown = {each["key"]: each for each in await moving.front.call("GET", "/config", 200)}
    assert (shown["api_port"]["value"], shown["log_level"]["value"]) == (9100, "debug")
    assert shown["api_port"]["source"] == f"{moving.file}:2"  # of the start
    assert shown["log_level"]["source"] == f"{moving.file}:2"
    assert shown["webhooks[0].secret"]["value"] == "***"
    waits = (await moving.reload(query="?dry_run=true"))["plan"]["settings"]
    assert [(each["key"], each["applies"]) for each in waits] == [("api_port", "at the next start")]


async def test_what_changes_at_once_reaches_who_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "setup", lambda *levels: None)  # those of the tests stay
    file = tmp_path / "config.toml"
    file.write_text(f"state_file = '{tmp_path}/state.toml'\n")
    source = Source(file=file, environ={})
    configuration = read(source)
    daemon = Daemon(configuration, source)

    defaults = {"reranker": "a"}
    daemon._apply(
        replace(configuration.settings, aliases={"x": "a"}, default_instances=defaults, auto_max_batch_tokens_per_gib=5)
    )
    daemon.directory.publish(RouteEntry("a", "m", State.STOPPED))

    assert (daemon.gateway.aliases, daemon.manager.tokens_per_gib) == ({"x": "a"}, 5)
    assert [entry.default_for for entry in daemon.directory.snapshot().entries] == [("reranker",)]
    await daemon.gateway.close()


@pytest.mark.clause("N-events")
async def test_events_are_listed_and_filtered(moving: Moving) -> None:
    await moving.front.fleet.stop("a")
    listed = await moving.front.call("GET", "/events", 200)
    assert [(each["instance"], each["event"]) for each in listed] == [
        ("a", "created"),
        ("a", "starting"),
        ("b", "created"),
        ("b", "starting"),
        ("mine", "created"),
        ("mine", "starting"),
        ("a", "stopped"),
    ]
    assert [each["id"] for each in listed] == list(range(1, 8))
    assert len(await moving.front.call("GET", "/events?instance=a&instance=b", 200)) == 5
    assert len(await moving.front.call("GET", "/events?event=created", 200)) == 3
    assert [each["id"] for each in await moving.front.call("GET", "/events?last=2", 200)] == [6, 7]
    assert await moving.front.call("GET", "/events?last=0", 200) == []


async def test_an_instance_keeps_its_own_events_whatever_happens_to_others(moving: Moving) -> None:
    noisy = InstanceView(spec=InstanceSpec(name="noisy", model_id="m"), state=State.STARTING)
    for _ in range(KEPT):
        moving.events.note_one("noisy", None)
        moving.events.note_one("noisy", noisy)
    await moving.front.fleet.stop("a")

    listed = await moving.front.call("GET", "/instances/a/events", 200)
    assert [each["event"] for each in listed] == ["created", "starting", "stopped"]
    assert [each["event"] for each in await moving.front.call("GET", "/instances/a/events?last=1", 200)] == ["stopped"]
    assert await moving.front.call("GET", "/instances/b/events?last=0", 200) == []
    await moving.front.call("GET", "/instances/nobody/events", 404)
    await moving.front.call("GET", "/instances/a/events?last=101", 400)


async def streamed(moving: Moving, query: str = "", **headers: str) -> AsyncIterator[tuple[str, str]]:
    """The id and the name of each event of a stream."""
    accept = {"Accept": "text/event-stream"} | {name.replace("_", "-"): value for name, value in headers.items()}
    async with moving.front.http.get(f"/events{query}", headers=accept) as reply:
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        block: dict[str, str] = {}
        async for line in reply.content:
            name, _, value = line.decode().strip().partition(": ")
            if value:
                block[name] = value
            elif block:
                yield block["id"], block["event"]
                block = {}


async def test_a_stream_begins_with_the_latest_goes_on_and_ends_with_the_daemon(moving: Moving) -> None:
    heard = []
    async with asyncio.timeout(LIMIT_S):
        async for each in streamed(moving, "?last=1&instance=mine"):
            heard.append(each)
            if len(heard) == 1:
                await moving.front.fleet.stop("a")
                await moving.front.fleet.stop("mine")
            else:
                moving.events.close()
    assert heard == [("6", "starting"), ("8", "stopped")]


async def test_a_stream_that_was_cut_goes_on_where_it_was(moving: Moving) -> None:
    moving.events.close()
    assert [id async for id, _ in streamed(moving, Last_Event_ID="4")] == ["5", "6"]
    assert [id async for id, _ in streamed(moving, "?last=1", Last_Event_ID="999")] == ["6"]


def test_a_change_of_the_certificates_path_waits_for_a_start(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("ca_cert", "server_cert", "server_key")}
    settings = Settings(auth=Auth(enabled=True, providers=("mtls",), mtls=Mtls(**files)))
    assert live_keys(settings, settings) == LIVE
    assert "auth" in LIVE
    assert "auth" not in live_keys(Settings(), settings)
    assert "auth" in live_keys(
        settings, replace(settings, auth=replace(settings.auth, mtls=Mtls(**files, verify_san=True)))
    )
