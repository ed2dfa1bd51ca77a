"""The page over HTTP: views, headers, weight, sessions, and what a key's rights and instances show and allow."""

from __future__ import annotations

import asyncio
import gzip
import html
import json
import re
import ssl
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.api.page.conftest import Serving
from tests.support.credentials import AUTH, SECRETS, Authority, needs_openssl
from tests.support.measures import watch_turns
from tests.support.polling import on_uvloop
from tests.support.rest_listener import Front, listening

from teimgr.config.auth import Auth, Mtls, policy_of
from teimgr.config.settings import Settings
from teimgr.control.capacity.advisor import Applied
from teimgr.control.capacity.recommendations import Expectation, Recommendation
from teimgr.control.placement.hosts import Gpu
from teimgr.spec import Incident, InstanceSpec, State, UpdateView, WorkerView

CARD = Gpu(index=0, uuid="GPU-a", memory_free_bytes=0, name="a card")
VIEWS = ("/", "/ui/fleet", "/ui/create", "/ui/models", "/ui/devices", "/ui/scaling", "/ui/alarms", "/ui/playground")
HTML = {"Accept": "text/html,*/*"}


async def text_of(front: Front, path: str, status: int = 200, **how: Any) -> str:
    async with front.http.get(path, **how) as reply:
        text = await reply.text()
        assert reply.status == status, text
        return text


async def sign_in(front: Front, name: str, path: str = "/") -> aiohttp.ClientResponse:
    form = {"key": SECRETS.get(name, name), "next": path}
    own = {"Origin": front.url}
    return await front.http.post("/ui/sign-in", data=form, headers=own, allow_redirects=False)


async def put(front: Front, *names: str) -> None:
    """Instances without a caller's rights."""
    for name in names:
        await front.fleet.create(InstanceSpec(name=name, model_id=f"org/{name}"))


# Views


@pytest.mark.parametrize("path", ["/", "/ui/playground"])
@on_uvloop
async def test_views_of_thousands_of_instances_hold_the_loop_for_some_turns_only(serving: Serving, path: str) -> None:
    """Rendered in one go they would hold it for 0.6 s, and compressed for 0.1 s."""
    held = [0.0]
    async with serving() as front:
        front.fleet.declare(3000, tags={"team": "search"})
        await front.create("a")
        front.fleet.ready("a")
        request = urllib.request.Request(front.url + path, headers=HTML | {"Accept-Encoding": "gzip"})
        watching = asyncio.create_task(watch_turns(held))
        answer = await asyncio.to_thread(lambda: urllib.request.urlopen(request).read())
        watching.cancel()
    assert gzip.decompress(answer).endswith(b"</html>")
    assert max(held) < 0.03


async def test_every_view_is_whole_and_asks_no_other_host(serving: Serving) -> None:
    async with serving() as front:
        await front.create("a", tags={"team": "<b>&"})
        front.fleet.ready("a")
        await front.create("broken")
        front.fleet.fail("broken", "no such model <script>")
        for path in (*VIEWS, "/ui/instances/a", "/ui/instances/broken"):
            async with front.http.get(path) as reply:
                text = await reply.text()
                assert reply.status == 200, (path, text)
                assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
                policy = reply.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert reply.headers["Cache-Control"] == "no-store"
            assert text.rstrip().endswith("</html>"), path
            assert not re.findall(r"""\s(?:src|href|action)=["'](?!/|#)""", text), path  # no other host, no script: URL
            assert not re.findall(r"<style|style=|\son\w+=|<script(?![^>]*(?:src=|application/json))", text), path
            assert "<b>&" not in text
            assert "model <script>" not in text
            for asset in set(re.findall(r'(?:src|href)="(/ui/static/[^"]+)"', text)):
                async with front.http.get(asset) as reply:
                    assert reply.status == 200, asset
                    assert "immutable" in reply.headers["Cache-Control"]


@pytest.mark.parametrize("update", [None, UpdateView(state="rolling"), UpdateView(state="failed", reason="no memory")])
async def test_every_view_is_drawn_in_every_state_without_figures(serving: Serving, update: UpdateView | None) -> None:
    async with serving(cards=(CARD, replace(CARD, index=1, uuid="GPU-b"))) as front:
        for state in State:
            for number, card in enumerate((CARD.uuid, CARD.uuid, None, None)):  # two on each
                worker = WorkerView(replica=0, role="serving", state=state, pid=4242, gpu=card, gpu_id=card and 0)
                view = await front.fleet.create(InstanceSpec(name=f"{state.value}-{number}", model_id="org/model"))
                front.fleet.put(replace(view, state=state, reason="no reason", workers=(worker,), update=update))
        for path in (*VIEWS, *(f"/ui/instances/{state.value}-0" for state in State)):
            assert (await text_of(front, path)).rstrip().endswith("</html>"), path


async def test_the_fleet_shows_states_reasons_and_alarms(serving: Serving) -> None:
    async with serving() as front:
        assert "No instance yet" in await text_of(front, "/")
        await front.create("a")
        front.fleet.ready("a")
        await front.create("broken")
        front.fleet.fail("broken", "it has no weights")
        front.alarms += ["the disk is full", "broken: failed: it has no weights"]
        text = await text_of(front, "/")
        assert re.search(r"<span id=\"alarm-count\">2</span> alarms", text)
        assert "the disk is full" in text
        assert text.count("it has no weights") == 3  # alarm, cell, its title
        assert 'class="state running"' in text


async def test_the_fleet_may_be_grouped_by_the_tags_that_it_has(serving: Serving) -> None:
    async with serving() as front:
        await front.create("a")
        assert re.search('<label id="grouping" hidden>', await text_of(front, "/"))
        await front.create("b", tags={"team": "it's", "<i>": ""})
        text = await text_of(front, "/")
        assert re.findall("<option>(.*?)</option>", text) == ["&lt;i&gt;", "team"]
        tags = [json.loads(html.unescape(each)) for each in re.findall("data-tags='(.*?)'", text)]
        assert tags == [{}, {"team": "it's", "<i>": ""}]
        text = await text_of(front, "/ui/instances/b")
        assert ">team=it&#39;s<" in text
        assert "data-keys" not in text, "a call needs no key here"


async def test_a_start_that_repeats_shows_its_number_and_its_events_are_counted(serving: Serving) -> None:
    async with serving() as front:
        view = await front.fleet.create(InstanceSpec(name="a", model_id="org/model"))
        worker = WorkerView(replica=0, role="serving", state=State.STARTING, attempt=6, next_attempt_secs=20)
        for number in range(3):
            crash = Incident(event="crashed", reason=f"worker {number} was killed", at=str(number))
            front.fleet.put(replace(view, workers=(worker,), incident=crash))
        for path in ("/", "/ui/instances/a"):
            assert ">attempt 6, next in 20 s<" in await text_of(front, path)
        for path in ("/ui/alarms", "/ui/instances/a"):
            text = await text_of(front, path)
            assert text.count("was killed") == 1
            assert ">3 times<" in text


async def test_an_instance_that_is_not_there_is_a_page_too(serving: Serving) -> None:
    async with serving() as front:
        assert "<h1>Not Found</h1>" in await text_of(front, "/ui/instances/nowhere", 404)
        await front.call("GET", "/ui/nowhere", 404)
        assert await text_of(front, "/ui/static/0000/nothing.js", 404) == "no such file"


async def test_the_reference_is_a_view_with_contents_calls_and_bodies(serving: Serving) -> None:
    async with serving() as front:
        text = await text_of(front, "/docs")
        assert 'aria-current="page">API' in text
        anchors = re.findall('href="#([^"]+)"', text)
        assert {"post/instances", "InstanceInfo", "bodies"} <= {*anchors}
        assert [each for each in anchors if f'id="{each}"' not in text] == []
        assert "curl -s -X POST &quot;$URL/instances/{name}/stop&quot;" in text


async def test_the_page_can_be_switched_off(serving: Serving) -> None:
    async with serving() as front:
        settings: Settings = replace(front.app.state.settings, page=False)
    async with listening(settings) as front, aiohttp.ClientSession(front.url) as front.http:
        for path in VIEWS:
            await front.call("GET", path, 404)


async def test_a_page_under_a_foreign_name_may_only_read(serving: Serving) -> None:
    async with serving() as front:
        await front.create("a")
        text = await text_of(front, "/ui/instances/a", headers={"Host": "rebound.example:9000"})
        assert "Read only" in text
        assert "data-action" not in text
        assert "data-action" in await text_of(front, "/ui/instances/a")


async def test_the_first_view_of_200_instances_is_small(serving: Serving) -> None:
    async with serving(instance_port_end=8500) as front:
        front.fleet.on_views_changed = lambda views: None  # no events of four hundred changes
        await put(front, *(f"instance-{number}" for number in range(200)))
        for view in front.fleet.list():
            front.fleet.ready(view.spec.name)
        async with front.http.get("/", auto_decompress=False) as reply:
            page = await reply.read()
        text = gzip.decompress(page).decode()
        assert text.count("<tr data-name") == 200
        weight = len(page)
        for asset in set(re.findall(r'(?:src|href)="(/ui/static/[^"]+)"', text)):
            folder = asset.rpartition("/")[0]
            async with front.http.get(asset, auto_decompress=False) as reply:
                body = await reply.read()
            weight += len(body)
            if asset.endswith(".js"):
                for name in re.findall(r'from "\./([\w.]+)"', gzip.decompress(body).decode()):
                    async with front.http.get(f"{folder}/{name}", auto_decompress=False) as reply:
                        weight += len(await reply.read())
        assert weight < 100_000


# Live


async def test_the_stream_sends_what_changes(serving: Serving) -> None:
    async with serving() as front:
        await front.create("a")
        async with front.http.get("/ui/fleet/live") as reply:
            assert reply.headers["Content-Type"].startswith("text/event-stream")
            first = await next_event(reply)
            assert [(row["name"], row["state"]) for row in first["rows"]] == [("a", "starting")]
            front.fleet.ready("a")
            await front.create("b")
            rows: dict[str, str] = {}
            while rows.get("a") != "running" or "b" not in rows:
                rows |= {row["name"]: row["state"] for row in (await next_event(reply))["rows"]}
            await front.call("DELETE", "/instances/b", 200)
            while "b" not in (await next_event(reply))["gone"]:
                pass


async def test_the_stream_of_an_instance_ends_with_it(serving: Serving) -> None:
    async with serving() as front:
        await front.call("GET", "/ui/instances/a/live", 404)
        await front.create("a")
        async with front.http.get("/ui/instances/a/live") as reply:
            first = await next_event(reply)
            assert first["info"]["status"] == "starting"
            front.fleet.ready("a")
            assert [event["event"] for event in (await next_event(reply))["events"]] == ["running"]
            await front.call("DELETE", "/instances/a", 200)
            assert await next_event(reply) == {}
            assert (await reply.content.read()).strip() == b""


async def test_the_stream_of_an_instance_begins_behind_the_event_that_the_page_has(serving: Serving) -> None:
    """A worker that runs before the stream is opened is an event of neither otherwise."""
    async with serving() as front:
        await front.create("a")
        page = await text_of(front, "/ui/instances/a", headers=HTML)
        ids = [int(id) for id in re.findall(r'<li data-id="(\d+)">', page)]
        async with front.http.get("/ui/instances/a/live") as reply:
            await next_event(reply)
            front.fleet.ready("a")
            assert (await next_event(reply))["events"]

        for after in (max(ids), 10**12):  # the page's newest event, and one of the daemon before
            async with front.http.get(f"/ui/instances/a/live?after={after}") as reply:
                assert (await next_event(reply))["events"][-1]["event"] == "running"


async def test_a_restricted_key_is_not_told_for_whom_its_model_was_evicted(serving: Serving) -> None:
    async with serving(auth=AUTH) as front:
        await put(front, "team-a")
        live: dict[str, aiohttp.ClientResponse] = {}
        keys = {name: {"headers": {"Authorization": f"Bearer {SECRETS[name]}"}} for name in ("team", "read")}
        for key, how in keys.items():
            live[key] = await front.http.get("/ui/instances/team-a/live", **how)
            await next_event(live[key])
        incident = Incident(event="evicted", reason="evicted team-a: value 1; for secret", at="2026-03-04T12:00:00Z")
        front.fleet.put(replace(front.fleet.get("team-a"), incident=incident))
        for key, how in keys.items():
            paths = ("/instances/team-a/events", "/ui/instances/team-a", "/ui/alarms")
            texts = [*[await text_of(front, path, **how) for path in paths], json.dumps(await next_event(live[key]))]
            for text in texts:
                assert "evicted team-a: value 1" in html.unescape(text)
                assert ("secret" in text) == (key == "read"), text
            live[key].close()
        stream = {"headers": {**keys["team"]["headers"], "Accept": "text/event-stream", "Last-Event-ID": "0"}}
        async with front.http.get("/instances/team-a/events", **stream) as reply:
            while (event := await next_event(reply))["event"] != "evicted":
                pass
            assert event["reason"] == "evicted team-a: value 1; for another instance"


async def next_event(reply: aiohttp.ClientResponse) -> Any:
    while not (line := await reply.content.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    return json.loads(line.removeprefix(b"data: "))


# Sessions and rights


async def test_without_a_session_a_browser_is_asked_to_sign_in(serving: Serving) -> None:
    async with serving(auth=AUTH) as front:
        async with front.http.get("/ui/models?x=1", headers=HTML, allow_redirects=False) as reply:
            assert reply.status == 303
            assert reply.headers["Location"] == "/ui/sign-in?next=/ui/models%3Fx%3D1"
        await front.call("GET", "/ui/models", 401)
        assert 'value="/docs"' in await text_of(front, "/docs", headers=HTML)
        assert 'value="/ui/models?x=1"' in await text_of(front, "/ui/models?x=1", headers=HTML)
        assert 'value="/"' in await text_of(front, "/ui/sign-in?next=//evil.example/ui/")
        assert 'value="/"' in await text_of(front, "/ui/sign-in?next=https://evil.example")


async def test_a_session_stands_for_the_key(serving: Serving) -> None:
    async with serving(auth=AUTH) as front:
        reply = await sign_in(front, "read", "/ui/alarms")
        assert (reply.status, reply.headers["Location"]) == (303, "/ui/alarms")
        cookie = reply.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert SECRETS["read"] not in cookie
        text = await text_of(front, "/")
        assert "Signed in with the key <b>read</b>" in text
        await front.call("GET", "/instances", 200)
        told = await front.call("POST", "/instances", 403, json={}, headers={"Origin": front.url})
        assert told["error"] == "The key 'read' lacks the right admin"
        # A key in the headers counts, not the session.
        await front.call("GET", "/instances", 401, headers={"x-api-key": "wrong"})

        async with front.http.post("/ui/sign-out", headers={"Origin": front.url}, allow_redirects=False) as reply:
            assert reply.status == 303
        await front.call("GET", "/instances", 401)
        await front.call("GET", "/instances", 401, headers={"Cookie": cookie.partition(";")[0]})
        async with front.http.post("/ui/sign-out", headers={"Origin": front.url}) as reply:
            assert reply.url.path == "/ui/sign-in"


async def test_a_wrong_key_or_a_foreign_form_begins_no_session(serving: Serving) -> None:
    async with serving(auth=AUTH) as front:
        for key in ("wrong", "", SECRETS["read"] + "x"):
            reply = await sign_in(front, key)
            assert reply.status == 401
            assert "Set-Cookie" not in reply.headers
            assert "Unknown API key" in await reply.text()
        form = {"key": SECRETS["read"]}
        for headers in ({}, {"Origin": "https://evil.example"}, {"Origin": front.url, "Sec-Fetch-Site": "same-site"}):
            async with front.http.post("/ui/sign-in", data=form, headers=headers) as answer:
                assert (answer.status, "Set-Cookie" in answer.headers) == (403, False)
        async with front.http.post("/ui/sign-in", data="key=" + "x" * 10_000, headers={"Origin": front.url}) as answer:
            assert answer.status == 401


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "null"},
        {"Origin": "https://evil.example"},
        {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
async def test_no_other_page_changes_anything_with_a_session(serving: Serving, headers: dict[str, str]) -> None:
    async with serving(auth=AUTH) as front:
        await put(front, "a")
        await sign_in(front, "admin")
        told = await front.call("POST", "/instances/a/stop", 403, headers=headers)
        assert told["error"] == "a session is valid only for pages of this server: send an API key"
        assert front.fleet.get("a").spec.wanted_running
        await front.call("POST", "/instances/a/stop", 200, headers={"Origin": front.url})


async def test_a_reload_that_drops_a_key_ends_its_sessions(serving: Serving) -> None:
    async with serving(auth=AUTH) as front:
        await sign_in(front, "read")
        await front.call("GET", "/instances", 200)
        front.app.state.policy.swap(policy_of(replace(AUTH, api_keys=AUTH.api_keys[:1])))
        await front.call("GET", "/instances", 401)


async def test_actions_are_shown_to_those_who_may(serving: Serving) -> None:
    async with serving(auth=AUTH) as front:
        await put(front, "a")
        await sign_in(front, "read")
        text = await text_of(front, "/ui/instances/a")
        assert "data-action" not in text
        assert "<fieldset disabled" in text
        assert not re.search("/ui/create|data-bulk", await text_of(front, "/ui/fleet"))
        assert "Not allowed" in await text_of(front, "/ui/create", 403, headers=HTML)
        assert "/ui/playground" not in await text_of(front, "/ui/fleet")

        await sign_in(front, "inference")
        async with front.http.get("/", headers=HTML) as reply:
            assert reply.url.path == "/ui/playground"
        assert "lacks the right read" in await text_of(front, "/ui/fleet", 403, headers=HTML)


async def test_a_key_for_some_instances_sees_those_alone(serving: Serving) -> None:
    async with serving(auth=AUTH) as front:
        await put(front, "mine", "theirs", "team-1")
        for name in ("mine", "theirs", "team-1"):
            front.fleet.ready(name)
        front.fleet.fail("theirs", "a secret of theirs")
        await sign_in(front, "team")
        for path in ("/", "/ui/fleet", "/ui/alarms", "/ui/playground", "/ui/create"):
            text = await text_of(front, path)
            assert "theirs" not in text, path
        assert "mine" in await text_of(front, "/ui/alarms")
        async with front.http.get("/ui/fleet/live") as reply:
            first = await next_event(reply)
            assert [row["name"] for row in first["rows"]] == ["mine", "team-1"]
            assert first["totals"]["instances"] == 2
            assert first["totals"]["memory"] is None
        for path in ("/ui/instances/theirs", "/ui/instances/theirs/live", "/ui/models", "/ui/devices"):
            await front.call("GET", path, 403)
        assert "/ui/models" not in await text_of(front, "/ui/fleet")


# Mutual TLS


@needs_openssl
async def test_with_mutual_tls_the_certificate_is_enough(serving: Serving, tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    ours.server()
    ours.sign("operator", "/CN=operator", "DNS:operator.local")
    ours.sign("other", "/CN=other", "DNS:other.local")
    files = {name: ours.folder / f"{name}.pem" for name in ("ca", "server")}
    mtls = Mtls(
        ca_cert=files["ca"],
        server_cert=files["server"],
        server_key=ours.folder / "server.key",
        allowed_subjects=("CN=operator",),
    )
    async with serving(auth=Auth(enabled=True, providers=("mtls",), mtls=mtls)) as front:
        await put(front, "a")
        for name, status in (("operator", 200), ("other", 401)):
            context = ssl.create_default_context(cafile=str(files["ca"]))
            context.load_cert_chain(ours.folder / f"{name}.pem", ours.folder / f"{name}.key")
            async with front.http.get("/ui/instances/a", ssl=context, headers=HTML) as reply:
                text = await reply.text()
                assert reply.status == status
                assert ("data-action" in text) is (name == "operator")
                assert "sign-in" not in str(reply.url)
            for origin, allowed in ((front.url, name == "operator"), ("https://evil.example", False)):
                how: dict[str, Any] = {"ssl": context, "headers": {"Origin": origin}}
                async with front.http.post("/instances/a/restart", **how) as reply:
                    assert (reply.status == 200) is allowed


# Scaling


class Advice:
    """One recommendation of each kind of view: with a PATCH and without, and one that was taken back."""

    async def recommendations(self, window_s: float, covers: Callable[[str], bool]) -> list[Recommendation]:
        return [
            Recommendation(
                kind=kind,
                instance=name,
                finding=f"no call <{kind}>",
                evidence={"calls": 0, "held_bytes": 41_852_928, "busy_share": 0.07, "span_s": 600.0},
                effect="400 MiB are free",
                risk="a wait",
                patch=patch,
                expects=None,
            )
            for kind, name, patch in (("idle", "a", {"load": "on_demand"}), ("truncated", "theirs", None))
            if covers(name)
        ]

    def applied(self) -> list[Applied]:
        keys: dict[str, Any] = {"patch": {"dtype": "int8"}, "before": {}, "applied_at": "2026-03-04T12:00:00Z"}
        expects = Expectation("tokens_per_second", "at_least", 5.0)
        record = Applied(
            id="dtype.a",
            instance="a",
            finding="",
            expects=expects,
            window_secs=600,
            until=0,
            state="taken_back",
            **keys,
        )
        return [record, replace(record, id="dtype.theirs", instance="theirs")]


async def test_scaling_and_recommendations_are_shown_and_admins_may_apply(serving: Serving) -> None:
    for auth, is_admin in ((Auth(), True), (AUTH, False)):
        async with serving(auth=auth) as front:
            await put(front, "a", "theirs")
            for name in ("a", "theirs"):
                front.fleet.ready(name)
            front.app.state.advisor = Advice()
            if not is_admin:
                await sign_in(front, "read")
            text = await text_of(front, "/ui/scaling")
            assert "the number of replicas is fixed" in text
            assert ('data-apply="idle.a"' in text) is is_admin
            assert 'data-apply="truncated.theirs"' not in text  # it has no PATCH
            assert "no call &lt;idle&gt;" in text
            assert "calls 0, held 39.9 MiB, busy 7 %, span 10 min<" in text
            assert "taken back" in text
