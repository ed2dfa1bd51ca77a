"""API keys on REST: the right that each route needs, the form of a refusal, secrecy of keys."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import h2.events
import pytest
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send
from tests.api.nginx import below, needs_nginx, nginx
from tests.api.page_parts import parts
from tests.support.credentials import AUTH, KEYS, SECRETS
from tests.support.http_peers import Peer, connecting, request
from tests.support.rest_listener import Fleet, Front, listening

from teimgr.api.gateway.gateway import Gateway
from teimgr.api.gateway.routes import paths
from teimgr.api.page.page import Page
from teimgr.api.rest.access import ADMIN_ALL, PERMISSIONS, Permission, RoutePermissions
from teimgr.api.rest.app import create_app
from teimgr.api.rest.middleware import MAX_PARAMETERS, LimitQuery, ProxyHeaders, TrustedProxies
from teimgr.config.auth import Auth, policy_of
from teimgr.config.settings import Settings, faults
from teimgr.control.events.fleet_events import EventLog
from teimgr.errors import Unauthenticated
from teimgr.http.auth.policy import NO_CERTIFICATE, Policy, PolicyInForce, digest
from teimgr.http.http2.requests import protocol
from teimgr.http.server import bind, serving
from teimgr.observability.metrics import DaemonMetrics
from teimgr.spec import InstanceSpec, RouteEntry, State, WorkerEndpoint
from teimgr.wire.routing.directory import Directory


@asynccontextmanager
async def asking(settings: Settings, auth: Auth = AUTH) -> AsyncIterator[Front]:
    async with listening(replace(settings, auth=auth)) as front, aiohttp.ClientSession(front.url) as front.http:
        yield front


def bearer(name: str) -> dict[str, dict[str, str]]:
    return {"headers": {"Authorization": f"Bearer {SECRETS[name]}"}}


class Anything:
    """Stands behind routes whose answers do not matter."""

    def __getattr__(self, name: str) -> Any:
        return Anything()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return Anything()


@dataclass
class Everything:
    """A listener with every route of the daemon's application."""

    url: str
    routes: list[Route]


@pytest.fixture
async def everything(settings: Settings) -> AsyncIterator[Everything]:
    settings = replace(settings, auth=AUTH)
    inference = Gateway(settings, Directory(), DaemonMetrics())
    behind: Any = Anything()
    page = Page(settings, behind, behind, behind).routes()
    app = create_app(
        Fleet(settings),
        settings,
        DaemonMetrics(),
        registry=behind,
        gateway=inference,
        gpu_report=behind,
        tenants=behind,
        autoscaler=behind,
        advisor=behind,
        page=page,
        batches=behind,
    )
    sock = bind("127.0.0.1", 0)
    async with serving(app, sock, direct=app.state.direct):
        routes = [route for route in app.router.routes if isinstance(route, Route)]
        yield Everything(f"http://127.0.0.1:{sock.getsockname()[1]}", routes)
    await inference.close()


def verbs(route: Route) -> list[str]:
    return sorted((route.methods or set()) - {"HEAD", "OPTIONS"})


# Routes that an application without event log and reloader has not.
NEEDS_TOOLS = {"GET /events", "GET /instances/{name}/events", "GET /config", "POST /config/reload"}
NEEDS_TOOLS |= {"GET /daemon", "POST /daemon/restart"}


async def test_every_route_says_what_it_asks_for(everything: Everything) -> None:
    there = {f"{verb} {route.path}" for route in everything.routes for verb in verbs(route)}
    assert there ^ PERMISSIONS.keys() <= NEEDS_TOOLS
    assert {path.path for path in paths()} <= {route.path for route in everything.routes}


async def test_a_route_that_nobody_thought_of_is_closed(everything: Everything) -> None:
    forgotten = Route("/forgotten/{name}", lambda request: None, methods=["GET"])
    assert (
        RoutePermissions([*everything.routes, forgotten]).of("GET", "/forgotten/a", Policy(keys=())).permission
        == ADMIN_ALL
    )


@pytest.mark.clause("M6-keys")
async def test_the_rights_matrix(everything: Everything) -> None:
    """Each route with each key: served or refused by its row of the table alone."""
    # Sign-in and sign-out have answers of their own (tests/api/page/test_page.py).
    rows = [(route, verb) for route in everything.routes for verb in verbs(route) if route.path[:8] != "/ui/sign"]
    alone = aiohttp.TCPConnector(force_close=True)  # an answer 500 ends its connection
    async with aiohttp.ClientSession(everything.url, connector=alone) as http:
        for route, verb in rows:
            path, need = re.sub(r"{\w+(:\w+)?}", "theirs", route.path), PERMISSIONS[f"{verb} {route.path}"]
            for name in SECRETS:
                async with http.request(verb, path, **bearer(name)) as reply:
                    assert (reply.status in (401, 403)) is not lets_in(need, name, route.path), (verb, path, name)
            async with http.request(verb, path) as reply:
                assert (reply.status == 401) is not need.is_public, (verb, path)


async def test_inference_is_refused_in_the_words_of_its_dialect(everything: Everything) -> None:
    async with aiohttp.ClientSession(everything.url) as http:
        async with http.post("/v1/embeddings", json={"model": "a", "input": "x"}) as reply:
            assert reply.status == 401
            assert (await reply.json())["error"]["code"] == "invalid_api_key"
        async with http.post("/v1/embeddings", json={"model": "a", "input": "x"}, **bearer("read")) as reply:
            assert reply.status == 403
            assert (await reply.json())["error"]["message"] == "The key 'read' lacks the right inference"
        async with http.post("/v1/embeddings", json={"model": "theirs", "input": "x"}, **bearer("team")) as reply:
            assert "error" in await reply.json()
        async with http.post("/instances/a/embed", json={"inputs": "x"}) as reply:
            assert (reply.status, await reply.read()) == (401, b"")
        async with http.post("/instances/a/embed", json={"inputs": "x"}, **bearer("team")) as reply:
            assert reply.status == 403
            assert (await reply.json())["error"] == "The key 'team' is not for instance 'a'; it is for mine, team-*"


def lets_in(need: Permission, name: str, template: str) -> bool:
    """What the table means for the keys of this file, and an instance `theirs`."""
    if need.is_public:
        return True
    if name == "team":
        return not need.is_fleet_wide and "{name}" not in template
    return not need.rights or name in {right.value for right in need.rights}


async def test_the_words_of_a_refusal(settings: Settings) -> None:
    async with asking(settings) as front:
        told = await front.call("GET", "/instances", 401)
        assert told.keys() == {"error", "code", "timestamp"}
        assert (told["code"], told["error"]) == (
            "UNAUTHENTICATED",
            "Authentication required: send a valid API key, `Authorization: Bearer KEY`",
        )
        told = await front.call("POST", "/instances", 403, **bearer("read"), json={})
        assert (told["code"], told["error"]) == ("FORBIDDEN", "The key 'read' lacks the right admin")
        async with front.http.get("/instances", headers={"Authorization": "Bearer wrong"}) as reply:
            assert reply.status == 401
            assert reply.headers["WWW-Authenticate"] == "Bearer"
        await front.call("GET", "/nowhere", 401)
        await front.call("GET", "/nowhere", 404, **bearer("read"))


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": SECRETS["read"]},
        {"authorization": f"bearer  {SECRETS['read']} "},
        {"Authorization": "Basic dXNlcg==", "X-API-Key": SECRETS["read"]},
    ],
)
async def test_other_ways_to_send_a_key(settings: Settings, headers: dict[str, str]) -> None:
    async with asking(settings) as front:
        await front.call("GET", "/instances", 200, headers=headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": SECRETS["read"]},
        {"Authorization": f"Basic {SECRETS['read']}"},
        {"Authorization": f"Bearer {SECRETS['read']}x"},
        {"Authorization": f"Bearer {SECRETS['read'][:-1]}"},
        {"Authorization": f"Bearer {digest(SECRETS['read'])}"},
        {"Authorization": "Bearer "},
        {"x-api-key": ""},
        {"Authorization": "Bearer \xff"},
    ],
)
async def test_what_is_no_key(settings: Settings, headers: dict[str, str]) -> None:
    async with asking(settings) as front:
        await front.call("GET", "/instances", 401, headers=headers)


@pytest.mark.clause("M6-keys")
async def test_a_key_for_some_instances(settings: Settings) -> None:
    async with asking(settings) as front:
        for name in ("mine", "theirs", "team-1"):
            await front.call("POST", "/instances", 201, json={"name": name, "model_id": "tiny"}, **bearer("admin"))
        seen = await front.call("GET", "/instances", 200, **bearer("team"))
        assert [each["name"] for each in seen] == ["mine", "team-1"]
        assert len(await front.call("GET", "/instances", 200, **bearer("read"))) == 3
        await front.call("GET", "/instances/mine", 200, **bearer("team"))
        await front.call("GET", "/instances/theirs", 403, **bearer("team"))
        await front.call("GET", "/instances/nowhere", 403, **bearer("team"))
        await front.call("DELETE", "/instances/theirs", 403, **bearer("team"))
        body = {"model_id": "tiny"}
        await front.call("POST", "/instances", 201, json={"name": "team-2", **body}, **bearer("team"))
        refused = await front.call("POST", "/instances", 403, json={"name": "other", **body}, **bearer("team"))
        assert refused["error"] == "The key 'team' is not for instance 'other'; it is for mine, team-*"
        assert "other" not in [view.spec.name for view in front.fleet.list()]


async def test_every_change_is_a_line_of_the_log_with_who_made_it(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "teimgr.audit")
    async with asking(settings) as front:
        await front.call("POST", "/instances", 201, json={"name": "mine", "model_id": "tiny"}, **bearer("team"))
        await front.call("GET", "/instances", 200, **bearer("read"))
        await front.call("DELETE", "/instances/theirs", 403, **bearer("team"))
    async with listening(settings) as front, aiohttp.ClientSession(front.url) as front.http:
        await front.call("DELETE", "/instances/nowhere", 404)

    lines = [vars(each) for each in caplog.records if each.name == "teimgr.audit"]
    assert [(each["method"], each["path"], each["status"], each["by"]) for each in lines] == [
        ("POST", "/instances", 201, "key team"),
        ("DELETE", "/instances/nowhere", 404, "local"),
    ]


async def test_keys_are_swapped_at_once_and_nowhere_shown(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    settings = replace(settings, auth=AUTH)
    policy = PolicyInForce(policy_of(AUTH))
    rights = RoutePermissions(())
    assert policy.now.authenticate(NO_CERTIFICATE, SECRETS["read"]).name == "read"
    policy.swap(policy_of(replace(AUTH, api_keys=KEYS[:1])))
    with pytest.raises(Unauthenticated):
        policy.now.authenticate(NO_CERTIFICATE, SECRETS["read"])
    assert rights.of("GET", "/nowhere", policy.now).permission.rights == frozenset()
    async with asking(settings) as front:
        await front.call("POST", "/instances", 201, json={"name": "a", "model_id": "tiny"}, **bearer("admin"))
        shown = [
            json.dumps(await front.call("GET", path, 200, **bearer("read"))) for path in ("/instances", "/openapi.json")
        ]
        async with front.http.get("/metrics", **bearer("read")) as reply:
            shown.append(await reply.text())
        await front.call("GET", "/instances", 401, headers={"x-api-key": SECRETS["read"] + "x"})
    shown += [repr(settings), policy_of(AUTH).to_json(), *caplog.messages, *map(str, caplog.records)]
    assert not any(secret in text for secret in SECRETS.values() for text in shown)
    assert digest(SECRETS["read"]) not in repr(settings)


# Web pages: which get an answer, where no key is required.

PAGES = [
    ({"Origin": "https://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": "http://127.0.0.1:1"}, 403),
    ({"Origin": "http://rebound.example:9000", "Host": "rebound.example:9000"}, 403),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    ({"Origin": "https://evil.example", "Host": "ui.example"}, 403),
    ({"Host": "teimgr.internal:80"}, 201),
    ({"Host": "rebound.example:9000"}, 201),  # not a browser: those name the page's origin with every POST
    ({"Sec-Fetch-Mode": "cors"}, 201),  # Node's fetch
    ({"Origin": "http://127.0.0.1:9000", "Host": "127.0.0.1:9000"}, 201),
    ({"Origin": "https://[::1]:9000", "Host": "[::1]:9000"}, 201),
    ({"Origin": "http://localhost", "Host": "localhost"}, 201),
    ({"Origin": "https://app.example"}, 201),
    ({"Origin": "https://ops.example", "Host": "OPS.example"}, 201),
]


@pytest.mark.parametrize(("headers", "status"), PAGES)
async def test_a_page_of_another_origin_creates_no_instance(
    settings: Settings, headers: dict[str, str], status: int
) -> None:
    settings = replace(settings, allowed_origins=("https://app.example",), allowed_hosts=("ops.example",))
    async with listening(settings) as front, aiohttp.ClientSession(front.url) as front.http:
        told = await front.call("POST", "/instances", status, json={"name": "a", "model_id": "tiny"}, headers=headers)
        assert len(front.fleet.list()) == (status == 201)
        if status == 403:
            assert (told["code"], "allowed_origins" in told["error"]) == ("FORBIDDEN", True)
        await front.call("GET", "/instances", 200 if status == 201 else 403, headers=headers)
        assert len(await front.call("GET", "/instances", 200)) == (status == 201)


BROWSER = {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64) Firefox/140.0", "Accept-Language": "en"}
LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
READING = [
    ({"Origin": "https://evil.example"}, 403),
    ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"}, 403),
    (LINK, 200),  # no page sees the answer
    (LINK | {"Sec-Fetch-Dest": "iframe"}, 403),
    (BROWSER | LINK | {"Host": "rebound.example"}, 403),
    (BROWSER | {"Host": "rebound.example:9000"}, 403),  # a read of the same origin has no Origin
    ({"Accept-Language": "*", "User-Agent": "curl/8", "Host": "rebound.example"}, 403),  # as its script may set them
    ({"Referer": "http://rebound.example/", "Host": "rebound.example"}, 403),
    ({"Accept": "text/html", "Host": "rebound.example"}, 403),
    (BROWSER | {"Host": "ops.example:9000"}, 200),
    (BROWSER | {"Host": "127.0.0.1:9000", "Sec-Fetch-Site": "same-origin"}, 200),
    ({"Host": "teimgr.prod.svc.cluster.local"}, 200),  # programs, behind whatever name
    ({"Host": "embed.example", "Sec-Fetch-Mode": "cors", "Accept-Language": "*"}, 200),  # Node's fetch
    ({"Origin": "https://app.example"}, 200),
]


@pytest.mark.parametrize(("headers", "status"), READING)
async def test_a_page_of_another_origin_reads_nothing_of_callers_and_operators(
    settings: Settings, headers: dict[str, str], status: int
) -> None:
    settings = replace(settings, allowed_origins=("https://app.example",), allowed_hosts=("ops.example",))
    async with listening(settings) as front, aiohttp.ClientSession(front.url) as front.http:
        for path in ("/instances", "/config", "/events", "/metrics", "/openapi.json"):
            async with front.http.get(path, headers=headers) as reply:
                assert (reply.status == 403) == (status == 403), path
        async with front.http.get("/health", headers=headers) as reply:
            assert reply.status == 200


async def test_over_http2_pages_and_keys_are_judged_as_over_http1(settings: Settings) -> None:
    pages = replace(settings, allowed_origins=("https://app.example",), allowed_hosts=("ops.example",))
    async with over_http2(pages) as peer:
        for number, (headers, status) in enumerate(PAGES):
            given = {name.lower(): value for name, value in headers.items()}
            head = dict(request("/instances", "POST", **JSON)) | {":authority": given.pop("host", "x")} | given
            body = json.dumps({"name": f"i{number}", "model_id": "tiny"}).encode()
            assert (await peer.ask(list(head.items()), body))[0] == status, headers
    async with over_http2(replace(settings, auth=AUTH)) as peer:
        body = b'{"model": "a", "input": "x"}'
        for name, status in ((None, 401), ("read", 403), ("inference", 404)):
            given = JSON | ({} if name is None else {"authorization": f"Bearer {SECRETS[name]}"})
            assert (await peer.ask(request("/v1/embeddings", "POST", **given), body))[0] == status, name
            assert (await peer.ask(request("/instances", **given)))[0] == {401: 401, 403: 200, 404: 403}[status], name


async def test_followed_events_end_when_a_reload_removes_their_key(settings: Settings) -> None:
    log = EventLog()
    async with listening(replace(settings, auth=AUTH), parts=lambda fleet: {"event_log": log}) as front:
        headers = bearer("read")["headers"] | {"Accept": "text/event-stream"}
        async with aiohttp.ClientSession(front.url) as http, http.get("/events", headers=headers) as stream:
            assert stream.status == 200
            policy = front.app.state.policy
            policy.swap(policy.now)  # a reload that leaves the key
            policy.swap(Policy(keys=()))
            assert await asyncio.wait_for(stream.content.read(), 20) == b""


async def test_a_followed_log_ends_when_a_reload_removes_its_key(settings: Settings, tmp_path: Path) -> None:
    settings = replace(settings, auth=AUTH, log_dir=tmp_path)
    team, kept = KEYS[-1], KEYS[:-1]
    elsewhere = replace(team, instances=("other",))
    for after in (kept, (*kept, replace(team, rights=("inference",))), (*kept, elsewhere)):
        (tmp_path / "mine.log").write_text("one\n")
        async with (
            listening(settings) as front,
            aiohttp.ClientSession(front.url) as http,
            http.get("/instances/mine/logs?follow=true", **bearer("team")) as stream,
        ):
            assert stream.status == 200
            assert b"one" in await asyncio.wait_for(stream.content.readuntil(b"\n\n"), 20)
            front.app.state.policy.swap(policy_of(AUTH))  # a reload that leaves the key
            with (tmp_path / "mine.log").open("a") as log:
                log.write("two\n")
            assert b"two" in await asyncio.wait_for(stream.content.readuntil(b"\n\n"), 20)
            front.app.state.policy.swap(policy_of(replace(AUTH, api_keys=after)))
            assert b"line" not in await asyncio.wait_for(stream.content.read(), 20)


async def test_over_http2_a_followed_log_ends_with_its_key(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "mine.log").write_text("one\n")
    fleet = Fleet(settings)
    app = create_app(fleet, replace(settings, auth=AUTH, log_dir=tmp_path), DaemonMetrics())
    sock = bind("127.0.0.1", 0)
    async with serving(app, sock, protocol), connecting(*sock.getsockname()) as connect:
        peer = await connect()
        head = request("/instances/mine/logs?follow=true", authorization=f"Bearer {SECRETS['team']}")
        peer.open(head, end=True)
        peer.flush()
        async with asyncio.timeout(20):
            begun = await peer.until(h2.events.ResponseReceived)
            assert dict(begun.headers)[":status"] == "200"
            app.state.policy.swap(policy_of(replace(AUTH, api_keys=KEYS[:-1])))
            await peer.until(h2.events.StreamEnded)


JSON = {"content-type": "application/json"}


@asynccontextmanager
async def over_http2(settings: Settings) -> AsyncIterator[Peer]:
    """A connection to the application with instances and inference."""
    inference = Gateway(settings, Directory(), DaemonMetrics())
    app = create_app(Fleet(settings), settings, DaemonMetrics(), gateway=inference)
    sock = bind("127.0.0.1", 0)
    async with serving(app, sock, protocol, app.state.direct), connecting(*sock.getsockname()) as connect:
        yield await connect()
    await inference.close()


async def test_a_post_that_needs_no_preflight_stops_no_instance(front: Front) -> None:
    await front.create("a")
    page = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    await front.call("POST", "/instances/a/stop", 403, headers=page)
    await front.call("DELETE", "/instances/a", 403, headers=page)


async def test_a_page_that_has_a_key_may_do_what_the_key_may(settings: Settings) -> None:
    async with asking(settings) as front:
        headers = bearer("admin")["headers"] | {"Origin": "https://app.example"}
        await front.call("POST", "/instances", 201, headers=headers, json={"name": "a", "model_id": "tiny"})
        headers = {"Origin": "https://app.example"}
        await front.call("POST", "/instances", 401, headers=headers, json={"name": "b", "model_id": "tiny"})


async def test_a_page_gets_no_inference_and_the_dialect_tells_it(settings: Settings) -> None:
    inference = Gateway(settings, Directory(), DaemonMetrics())
    async with (
        listening(settings, parts=lambda fleet: {"gateway": inference}) as front,
        aiohttp.ClientSession(front.url) as http,
        http.post("/v1/embeddings", json={"model": "a"}, headers={"Origin": "https://evil.example"}) as reply,
    ):
        assert reply.status == 403
        assert "allowed_origins" in (await reply.json())["error"]["message"]
    await inference.close()


# Keys for some instances: what only an operator may let a worker run or read.

THEIRS = {"name": "mine", "model_id": "org/tiny"}


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"extra_args": ["--trust-remote-code"]}, "trust_remote_code"),
        ({"template": "coded"}, "trust_remote_code"),
        ({"model_id": "/etc"}, "directory"),
        ({"model_id": "{roots}/../etc"}, "directory"),
        ({"model_id": "{roots}/link"}, "directory"),
        ({"model_id": "src"}, "directory"),
        ({"model_id": "~root/model"}, "directory"),
        ({"safetensors_only": False}, "pickled weights"),
        ({"safetensors_only": None}, "pickled weights"),
    ],
)
async def test_a_restricted_key_brings_no_code_and_no_files_into_a_worker(
    settings: Settings, tmp_path: Path, more: dict[str, Any], problem: str
) -> None:
    roots = tmp_path / "models"
    roots.mkdir()
    (roots / "link").symlink_to("/etc")
    settings = replace(settings, local_model_roots=(str(roots),), templates={"coded": {"trust_remote_code": True}})
    body = THEIRS | more
    body["model_id"] = body["model_id"].replace("{roots}", str(roots))
    async with asking(settings) as front:
        told = await front.call("POST", "/instances", 403, json=body, **bearer("team"))
        assert (told["code"], problem in told["error"]) == ("FORBIDDEN", True)
        assert front.fleet.list() == []

        await front.call("POST", "/instances", 201, json=THEIRS, **bearer("team"))
        change = {key: value for key, value in body.items() if key not in ("name", "template") and body != THEIRS}
        if "template" not in more:
            await front.call("PATCH", "/instances/mine", 403, json=change, **bearer("team"))
        assert front.fleet.get("mine").spec.safetensors_only


async def test_a_restricted_key_may_name_what_lies_below_the_roots(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "models" / "a").mkdir(parents=True)
    settings = replace(settings, local_model_roots=(str(tmp_path / "models"),))
    async with asking(settings) as front:
        body = THEIRS | {"model_id": str(tmp_path / "models" / "a")}
        made = await front.call("POST", "/instances", 201, json=body, **bearer("team"))
        assert made["safetensors_only"]


async def test_an_unrestricted_key_may_bring_code_and_files(settings: Settings, tmp_path: Path) -> None:
    async with asking(settings) as front:
        body = {"name": "a", "model_id": str(tmp_path), "trust_remote_code": True}
        made = await front.call("POST", "/instances", 201, json=body, **bearer("admin"))
        assert (made["trust_remote_code"], made["safetensors_only"]) == (True, False)


async def test_requests_at_the_same_time_pass_no_limit_of_workers(settings: Settings) -> None:
    async with asking(settings) as front:
        for name in ("mine", "team-1", "other"):
            body = {"name": name, "model_id": "org/tiny"}
            await front.call("POST", "/instances", 201, json=body, **bearer("admin"))
        fleet, turn, waiting = front.fleet, asyncio.Event(), asyncio.Semaphore(0)
        update, create = fleet.update, fleet.create

        async def slow_update(*given: Any, **more: Any) -> Any:
            waiting.release()
            await turn.wait()
            return await update(*given, **more)

        async def slow_create(request: Any) -> Any:
            waiting.release()
            await turn.wait()
            return await create(request)

        fleet.update, fleet.create = slow_update, slow_create  # type: ignore[method-assign]
        ten = {"json": {"replicas": 10}} | bearer("team")
        first = asyncio.create_task(front.call("PATCH", "/instances/mine", 202, **ten))
        await waiting.acquire()
        five = {"name": "team-2", "model_id": "org/tiny", "replicas": 5}
        second = asyncio.create_task(front.call("POST", "/instances", 201, json=five, **bearer("team")))
        await waiting.acquire()  # 10 + 5 + 1 = 16 workers

        told = await front.call("PATCH", "/instances/team-1", 403, json={"replicas": 2}, **bearer("team"))
        assert told["error"].endswith("would be more than its max_workers = 16")
        more = {"name": "team-3", "model_id": "org/tiny"}
        await front.call("POST", "/instances", 403, json=more, **bearer("team"))
        others = asyncio.create_task(front.call("PATCH", "/instances/other", 202, **(ten | bearer("admin"))))
        turn.set()
        await asyncio.gather(first, second, others)

        await front.call("PATCH", "/instances/team-1", 403, json={"replicas": 2}, **bearer("team"))
        await front.call("PATCH", "/instances/mine", 202, json={"replicas": 9}, **bearer("team"))
        await front.call("PATCH", "/instances/team-1", 202, json={"replicas": 2}, **bearer("team"))


async def test_replicas_that_the_load_may_set_count_as_workers(settings: Settings) -> None:
    async with asking(settings) as front:
        many = {"min_replicas": 17, "max_replicas": 17}
        told = await front.call("POST", "/instances", 403, json=THEIRS | many, **bearer("team"))
        assert told["error"].endswith("would be more than its max_workers = 16")
        await front.call("POST", "/instances", 201, json=THEIRS | {"max_replicas": 10}, **bearer("team"))
        await front.call("PATCH", f"/instances/{THEIRS['name']}", 403, json=many, **bearer("team"))
        await front.call("PATCH", f"/instances/{THEIRS['name']}", 403, json={"max_replicas": 17}, **bearer("team"))
        other = {"name": "team-1", "model_id": "org/tiny", "replicas": 7}
        await front.call("POST", "/instances", 403, json=other, **bearer("team"))
        await front.call("POST", "/instances", 201, json=other | {"replicas": 6}, **bearer("team"))


async def test_a_refused_request_leaves_its_room_to_others(settings: Settings) -> None:
    async with asking(settings) as front:
        full = {"name": "mine", "model_id": "org/tiny", "replicas": 16}
        await front.call("POST", "/instances", 201, json=THEIRS, **bearer("team"))
        await front.call("POST", "/instances", 409, json=full, **bearer("team"))
        await front.call("PATCH", "/instances/mine", 202, json={"replicas": 15}, **bearer("team"))
        await front.call("POST", "/instances", 201, json=full | {"name": "team-1", "replicas": 1}, **bearer("team"))


@pytest.mark.parametrize("key", ["port", "prometheus_port"])
async def test_a_restricted_key_gets_no_port_outside_of_the_ranges(settings: Settings, key: str) -> None:
    settings = replace(settings, instance_port_start=8080, instance_port_end=8180, prometheus_port_start=9200)
    async with asking(settings) as front:
        for port in (22, 80, 1023, settings.api_port, settings.grpc_port, 8079 if key == "port" else 9199):
            await front.call("POST", "/instances", 403, json=THEIRS | {key: port}, **bearer("team"))
        assert front.fleet.list() == []
        await front.call("POST", "/instances", 201, json=THEIRS | {"port": 8081}, **bearer("team"))


async def test_a_restricted_key_is_told_no_names_of_others(settings: Settings) -> None:
    settings = replace(settings, auth=AUTH, worker_wait_secs=0)  # no worker is behind the routes, nor will be
    directory, log = Directory(), EventLog()
    fleet = Fleet(settings)
    inference = Gateway(settings, directory, DaemonMetrics(), views=fleet.list)
    for name, model in (("theirs-hidden", "org/theirs-hidden"), ("mine", "org/tiny")):
        await fleet.create(InstanceSpec(name=name, model_id=model))
        fleet.ready(name)
        directory.publish(RouteEntry(name, model, State.RUNNING, endpoints=(WorkerEndpoint("/none", f"{name}-1"),)))
    app = create_app(fleet, settings, DaemonMetrics(), gateway=inference, event_log=log)
    routes = [route for route in app.router.routes if isinstance(route, Route)]
    sock = bind("127.0.0.1", 0)
    asked = 0
    async with (
        serving(app, sock, direct=app.state.direct),
        aiohttp.ClientSession(f"http://127.0.0.1:{sock.getsockname()[1]}") as http,
    ):
        for route in routes:
            for name in ("mine", "theirs-hidde"):
                path = re.sub(r"{\w+(:\w+)?}", name, route.path)
                for verb in {"GET", "POST"} & set(route.methods or ()):
                    if verb == "POST" and path.rpartition("/")[2] in ("start", "stop", "restart", "reload"):
                        continue
                    body = {"json": {"model": "theirs-hidde", "input": "x", "inputs": "x"}} if verb == "POST" else {}
                    async with http.request(verb, path, **(bearer("team") | body)) as reply:
                        text = await reply.content.read(1 << 20)
                    assert b"theirs-hidden" not in text, (verb, path, text[:500])
                    asked += reply.status != 403
    assert asked > 30
    await inference.close()


async def _served(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _answer(query: bytes) -> tuple[int, bytes]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/health", "headers": [], "query_string": query}
    await LimitQuery(_served)(scope, receive, send)
    return sent[0]["status"], sent[1]["body"]


@pytest.mark.parametrize("parameter", [b"a", b"", b"%41=%42"])
async def test_a_query_of_too_many_parameters_is_refused_before_it_is_parsed(parameter: bytes) -> None:
    assert await _answer(b"&".join([parameter] * MAX_PARAMETERS)) == (200, b"")
    status, body = await _answer(b"&".join([parameter] * (MAX_PARAMETERS + 1)))
    assert status == 400
    assert b"Validation error: Invalid URL: its query has more than 1000 parameters" in body


PREFIX = "/tools/teimgr"
HTML = {"Accept": "text/html"}
VIEWS = ("/", "/ui/fleet", "/ui/instances/a", "/ui/create", "/ui/models", "/ui/devices", "/ui/alarms", "/ui/playground")


@asynccontextmanager
async def behind_proxies(settings: Settings, **more: Any) -> AsyncIterator[Front]:
    settings = replace(settings, **more)
    async with listening(settings, parts=parts(settings)) as front, aiohttp.ClientSession(front.url) as front.http:
        yield front


def prefixed(value: str) -> dict[str, str]:
    return {"X-Forwarded-Prefix": value}


async def answered(front: Front, path: str, **how: Any) -> tuple[int, Any, str]:
    async with front.http.get(path, allow_redirects=False, **how) as reply:
        return reply.status, reply.headers, await reply.text()


async def every_url(front: Front, **how: Any) -> set[str]:
    """The URLs in all views, documents and headers."""
    found = set()
    for view in VIEWS:
        status, _, text = await answered(front, view, **how)
        assert status == 200, text
        found |= set(re.findall(r"""\s(?:src|href|action)=["']([^"'#][^"']*)""", text))
    status, headers, _ = await answered(front, "/instances/nowhere", **how)
    assert status == 404
    found.add(re.findall("<(.*?)>", headers["Link"])[0])
    _, headers, text = await answered(front, "/docs", **how)
    assert "X-Forwarded-Prefix" in headers["Vary"]
    found |= set(re.findall(r'href="([^"#][^"]*)"', text))
    return found


@pytest.mark.parametrize("by", ["header", "setting"])
async def test_every_link_follows_the_prefix(settings: Settings, by: str) -> None:
    more: dict[str, Any] = {"root_path": f"{PREFIX}/"} if by == "setting" else {}
    how: dict[str, Any] = {"headers": prefixed(PREFIX)} if by == "header" else {}
    async with behind_proxies(settings, **more) as front:
        await front.create("a")
        found = await every_url(front, **how)
        assert len(found) > 20
        assert [url for url in found if not url.startswith(f"{PREFIX}/")] == []
        for url in found:  # the proxy strips it
            status, _, text = await answered(front, url.removeprefix(PREFIX).partition("#")[0], **how)
            assert status in (200, 405), (url, text)
        _, _, text = await answered(front, "/ui/fleet", **how)
        assert f'data-prefix="{PREFIX}"' in text  # where the scripts find it
        async with front.http.get("/openapi.json", **how) as reply:
            document = await reply.json()
        assert document["servers"] == [{"url": PREFIX}]
        assert "/instances" in document["paths"]


async def test_without_a_prefix_nothing_changes(settings: Settings) -> None:
    async with behind_proxies(settings) as front:
        await front.create("a")
        assert [url for url in await every_url(front) if PREFIX in url or not url.startswith("/")] == []
        async with front.http.get("/openapi.json") as reply:
            assert "servers" not in await reply.json()


async def test_redirects_and_the_session_follow_the_prefix(settings: Settings) -> None:
    async with behind_proxies(settings, auth=AUTH) as front:
        how = prefixed("/teimgr") | {"X-Forwarded-Proto": "https"}
        status, headers, _ = await answered(front, "/ui/models?x=1", headers=how | HTML)
        assert (status, headers["Location"]) == (303, "/teimgr/ui/sign-in?next=/ui/models%3Fx%3D1")
        form = {"key": SECRETS["admin"], "next": "/ui/create"}
        origin = {"Origin": front.url}
        async with front.http.post("/ui/sign-in", data=form, headers=how | origin, allow_redirects=False) as reply:
            assert reply.headers["Location"] == "/teimgr/ui/create"
            cookie = reply.headers["Set-Cookie"]
        assert "Path=/teimgr;" in cookie
        assert cookie.startswith("__Secure-teimgr-session-")
        session = how | {"Cookie": cookie.partition(";")[0]}
        assert (await answered(front, "/ui/create", headers=session))[0] == 200
        # What changes something still needs this page's own Origin.
        for foreign in ({}, {"Origin": "https://evil.example"}):
            async with front.http.post("/instances", json={}, headers=session | foreign) as reply:
                assert reply.status == 403
        async with front.http.post("/instances", json={}, headers=session | origin) as reply:
            assert reply.status == 422
        async with front.http.post("/ui/sign-in", data=form, headers=how | {"Origin": "https://evil.example"}) as reply:
            assert (reply.status, "Set-Cookie" in reply.headers) == (403, False)


@pytest.mark.parametrize(
    "value",
    [
        *(
            "https://evil.example",
            "//evil.example",
            "/a//b",
            "/..",
            "/a/../b",
            "/.",
            "teimgr",
            "/a b",
            "/a%2fb",
            "/a?b",
        ),
        *(
            "/a#b",
            '/"><script>',
            "/a'b",
            "/a;b",
            "/a\\b",
            "/\u00e9",
            "/a" * 200,
            "/a, https://evil.example",
            "/a:b",
            "/<b>",
        ),
    ],
)
async def test_what_is_no_path_of_plain_segments_is_refused_by_name(settings: Settings, value: str) -> None:
    async with behind_proxies(settings) as front:
        status, headers, text = await answered(front, "/ui/fleet", headers=prefixed(value))
        assert status == 400
        assert headers["Content-Type"] == "application/json"
        assert "X-Forwarded-Prefix: must be a path such as /teimgr" in text
    assert [fault.path for fault in faults(replace(settings, root_path=value))] == ["root_path"]


@pytest.mark.parametrize(
    ("value", "found"), [("/", ""), ("", ""), ("/a/", "/a"), ("/a, /b/", "/a/b"), ("/A-1_2~3.4/v1", "/A-1_2~3.4/v1")]
)
async def test_prefixes_of_proxies_in_a_row_are_joined(settings: Settings, value: str, found: str) -> None:
    async with behind_proxies(settings) as front:
        _, _, text = await answered(front, "/ui/fleet", headers=prefixed(value))
        assert f'data-prefix="{found}"' in text


async def test_only_trusted_proxies_are_believed(settings: Settings) -> None:
    async with behind_proxies(settings, trusted_proxies=("10.0.0.0/8",), root_path="/ours") as front:
        for value in ("/theirs", "https://evil.example"):
            _, _, text = await answered(front, "/ui/fleet", headers=prefixed(value))
            assert 'data-prefix="/ours"' in text
            assert "theirs" not in text
        front.app.state.settings = replace(front.app.state.settings, trusted_proxies=("127.0.0.0/8",))  # a reload
        _, _, text = await answered(front, "/ui/fleet", headers=prefixed("/theirs"))
        assert 'data-prefix="/theirs"' in text
    broken = replace(settings, trusted_proxies=("10.0.0.1", "10.0.0.1/8", "proxy.example", "unix", "*", "::/0"))
    assert [fault.path for fault in faults(broken)] == ["trusted_proxies[1]", "trusted_proxies[2]"]


@pytest.mark.parametrize(
    ("trusted", "client", "server", "is_trusted"),
    [
        (("10.0.0.0/8",), ("::ffff:10.1.2.3", 1), ("::", 9000), True),
        (("10.0.0.0/8",), ("::ffff:11.1.2.3", 1), ("::", 9000), False),
        (("unix",), None, ("/run/api.sock", None), True),
        (("unix",), None, ("127.0.0.1", 9000), False),  # a client that has gone already
        (("127.0.0.1",), None, ("/run/api.sock", None), False),
        (("*",), ("192.0.2.1", 1), ("::", 9000), True),
    ],
)
async def test_addresses_as_sockets_show_them(
    settings: Settings, trusted: tuple[str, ...], client: Any, server: Any, is_trusted: bool
) -> None:
    seen: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    settings = replace(settings, trusted_proxies=trusted)
    state = type("App", (), {"state": type("State", (), {"settings": settings})})
    headers = [(b"x-forwarded-prefix", b"/teimgr"), (b"x-forwarded-proto", b"https")]
    scope = {"type": "http", "app": state, "scheme": "http", "client": client, "server": server, "headers": headers}
    await ProxyHeaders(app, TrustedProxies(lambda: settings))(scope, None, None)  # type: ignore[arg-type]
    assert (seen[0]["teimgr.path_prefix"], seen[0]["scheme"]) == (("/teimgr", "https") if is_trusted else ("", "http"))


@needs_nginx
async def test_behind_nginx_every_link_leads_somewhere(settings: Settings, tmp_path: Path) -> None:
    async with behind_proxies(settings) as front:
        await front.create("a")
        with nginx(tmp_path, below(PREFIX, front.url)) as url:
            async with aiohttp.ClientSession() as outside:
                for view in VIEWS:
                    async with outside.get(f"{url}{PREFIX}{view}") as reply:
                        assert reply.status == 200, view
                        text = await reply.text()
                    for link in set(re.findall(r"""\s(?:src|href)=["']([^"'#][^"']*)""", text)):
                        async with outside.get(url + link) as reply:
                            assert reply.status == 200, (view, link)
                async with outside.get(f"{url}{PREFIX}/ui/fleet/live") as reply:
                    assert await reply.content.readline() == b"event: fleet\n"  # not held back
                async with outside.get(f"{url}{PREFIX}", allow_redirects=False) as reply:
                    assert reply.headers["Location"] == f"{url}{PREFIX}/"
                for origin, status in (("http://evil.example", 403), (url, 200)):
                    headers = {"Origin": origin}
                    async with outside.delete(f"{url}{PREFIX}/instances/a", headers=headers) as reply:
                        assert reply.status == status


class Leaving:
    """The succession of a daemon; once it is taking over, this one accepts no commands."""

    is_taking_over = False


async def test_a_daemon_that_is_being_replaced_refuses_commands_also_where_their_body_came_late(
    settings: Settings,
) -> None:
    """They were answered 200 or 201, after the next daemon had read the state, and so lost: a revocation among them."""
    leaving, behind = Leaving(), Anything()
    batches = SimpleNamespace(files=SimpleNamespace(upload=lambda owner: nullcontext(behind)))
    parts = {"restarter": leaving, "batches": batches, "enrolment": behind, "reloader": behind}
    late = {
        "/hosts/tokens": "application/json",
        "/instances": "application/json",
        "/v1/files": "multipart/form-data; boundary=xyz",
    }
    async with (
        listening(settings, lambda fleet, metrics: behind, lambda fleet: parts) as front,
        aiohttp.ClientSession(front.url) as http,
    ):
        begun = []
        for path, kind in late.items():
            reader, writer = await asyncio.open_connection("127.0.0.1", int(front.url.rpartition(":")[2]))
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: {kind}\r\n"
            writer.write(f"{head}content-length: 2\r\n\r\n{{".encode())
            begun.append((reader, writer))
        async with http.get("/instances"):  # after it the heads above are read too
            pass
        leaving.is_taking_over = True
        for reader, writer in begun:
            writer.write(b"}")
            reply = await reader.read()
            assert reply.startswith(b"HTTP/1.1 503 "), reply
            assert b"retry-after: 2\r\n" in reply.lower()
            assert b"is being replaced" in reply
            writer.close()
        for verb, path in (("DELETE", "/hosts/two"), ("DELETE", "/models/a/b"), ("POST", "/config/reload")):
            async with http.request(verb, path) as answer:
                assert (answer.status, answer.headers["retry-after"]) == (503, "2"), path
        async with http.get("/instances") as read:
            assert read.status == 200
    assert front.fleet.list() == []
