"""The fleet's view in Debian's Chromium, over an in-memory fleet: groups, density, actions on what a filter shows."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from tests.api.page.chromium import CHROMIUM, OPTIONS, missing
from tests.api.page.conftest import Serving
from tests.api.page.test_browser import AXE
from tests.api.page.test_page import next_event
from tests.support.rest_listener import MODEL, Front

from teimgr.api.page import views

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "there"),
    pytest.mark.asyncio(loop_scope="module"),
]

LIMIT_MS = 15_000
TAGS = {"embedding": {"team": "search"}, "reranker": {"team": "search"}, "classifier": {"team": "moderation"}}
Opened = Callable[..., AbstractAsyncContextManager[tuple[Front, Any]]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, **OPTIONS)
        yield browser
        await browser.close()


@pytest.fixture
def opened(serving: Serving, browser: Any) -> Opened:
    """A fleet of three that run, and a page of it whose stream has begun."""

    @asynccontextmanager
    async def opening(path: str = "/") -> AsyncIterator[tuple[Front, Any]]:
        async with serving() as front, await browser.new_context(base_url=front.url) as context:
            for name, tags in TAGS.items():
                await front.create(name, tags=tags)
                front.fleet.ready(name)
            page = await context.new_page()
            page.set_default_timeout(LIMIT_MS)
            faults: list[str] = []
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on(
                "console", lambda message: faults.append(message.text) if "Content Security" in message.text else None
            )
            await page.goto(path)
            await page.wait_for_selector(".live:not([hidden])")
            yield front, page
            assert faults == []

    return opening


def expect(locator: Any) -> Any:
    """Playwright's assertions, which wait for what they assert."""
    from playwright.async_api import expect

    expect.set_options(timeout=LIMIT_MS)
    return expect(locator)


async def shown(page: Any) -> list[str]:
    """The names of the rows that are visible, in their order."""
    rows = page.locator("#fleet tr[data-name]:visible")
    found: list[str] = await rows.evaluate_all("(rows) => rows.map((row) => row.dataset.name)")
    return found


async def test_rows_are_grouped_by_a_tag(opened: Opened) -> None:
    async with opened("/?group=team") as (front, page):
        groups = page.locator("#fleet .group:visible")
        await expect(groups).to_have_text([re.compile("moderation1 instance · "), re.compile("search2 instances · ")])
        front.fleet.fail("reranker", "no weights")
        await expect(groups.nth(1)).to_contain_text("2 instances · 1 failed · 0 tokens/s")
        await page.locator("#filter").fill("rerank")
        await expect(groups).to_have_text([re.compile("search1 instance · ")])
        await page.locator("#filter").fill("")
        await page.get_by_role("button", name="search", exact=True).click()
        assert await shown(page) == ["classifier"]

        view = front.fleet.get("classifier")
        front.fleet.put(replace(view, spec=replace(view.spec, tags={"team": "<b>", "constructor": ""})))
        await expect(groups.first).to_contain_text("<b>1 instance")
        await page.locator("#group").select_option("constructor")
        await expect(groups).to_have_text([re.compile("constructor1"), re.compile("without constructor2 instances")])
        assert page.url.endswith("/?group=constructor")
        front.fleet.put(view)
        await expect(groups).to_have_count(0)
        assert await shown(page) == ["embedding", "reranker", "classifier"]


async def test_the_filter_has_the_words_of_rest_and_of_the_command_line(opened: Opened) -> None:
    """In the field and in the address; without other words the query is that of `GET /instances`."""
    async with opened() as (front, page):
        await front.create("spaced", tags={"team": "a b"}, model_id="org/other")
        await page.locator("tr[data-name=spaced]").wait_for()
        lines = {
            "tag=team:search": ["embedding", "reranker"],
            "tag=team": [*TAGS, "spaced"],
            'tag="team:a b"': ["spaced"],
            "tag=team:sea": [],
            "tag=team:search tag=none": [],
            "status=starting": ["spaced"],
            "status=starting status=running": [*TAGS, "spaced"],
            "model_id=org/other": ["spaced"],
            "model_id=org": [],
        }
        for line, names in lines.items():
            await page.locator("#filter").fill(line)
            assert sorted(await shown(page)) == sorted(names), line
            query = page.url.partition("?")[2]
            assert [each["name"] for each in await front.call("GET", f"/instances?{query}", 200)] == names
            if " " in line:
                await page.reload()
                assert sorted(await shown(page)) == sorted(names), line
        await page.locator("#filter").fill("model=org/other status=starting OTH tag=")
        assert await shown(page) == ["spaced"]
        assert page.url.endswith("/?status=starting&model_id=org%2Fother&q=oth")
        await page.reload()
        assert await page.locator("#filter").input_value() == "model_id=org/other oth"
        assert await page.get_by_role("radio", name="starting 1").is_checked()
        await page.locator("#filter").fill("status=stopped")
        assert await page.get_by_role("radio", name="all 4").is_checked()
        await page.get_by_role("radio", name="running 3").check()
        assert await page.locator("#filter").input_value() == ""
        assert page.url.endswith("/?status=running")


async def test_groups_keep_the_order_and_the_focus(opened: Opened) -> None:
    async with opened() as (front, page):
        await page.get_by_role("button", name="Instance", exact=True).click()
        assert await shown(page) == ["classifier", "embedding", "reranker"]
        await page.locator("#group").select_option("team")
        await page.get_by_role("button", name="Instance", exact=True).click()
        assert await shown(page) == ["classifier", "reranker", "embedding"]
        await page.get_by_role("link", name="embedding").focus()
        await front.create("late", tags={"team": "search"})
        await page.locator("tr[data-name=late]").wait_for()
        assert await shown(page) == ["classifier", "reranker", "late", "embedding"]
        assert await page.evaluate("document.activeElement.textContent") == "embedding"


async def test_the_dense_form_has_one_line_for_an_instance_and_is_kept(opened: Opened) -> None:
    async with opened() as (_, page):
        row = page.locator("tr[data-name=reranker]")
        for width in (1360, 390):
            await page.set_viewport_size({"width": width, "height": 850})
            await page.goto("/")
            before = (await row.bounding_box())["height"]
            await page.get_by_label("Dense").check()
            assert (await row.bounding_box())["height"] < 0.7 * before
            await page.goto("/ui/fleet")
            assert await page.get_by_label("Dense").is_checked()
            assert (await row.bounding_box())["height"] < 0.7 * before
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            await page.get_by_label("Dense").uncheck()


async def test_actions_concern_what_the_filter_shows_and_ask_with_the_number(opened: Opened) -> None:
    async with opened() as (front, page):
        bulk, dialog = page.locator("#bulk"), page.get_by_role("dialog")
        states = {name: front.fleet.get(name).state.value for name in TAGS}
        assert not await bulk.is_visible()
        await page.locator("#filter").fill("team=search")
        await expect(bulk.get_by_role("button")).to_have_text(["Start 0", "Restart 2", "Stop 2"])
        assert await bulk.get_by_role("button", name="Start 0").is_disabled()
        await bulk.get_by_role("button", name="Stop").click()
        await expect(dialog.get_by_role("heading")).to_have_text("Stop 2 instances?")
        await expect(dialog).to_contain_text("embedding, reranker. Their callers are refused")
        await dialog.get_by_role("button", name="Cancel").click()
        assert {name: front.fleet.get(name).state.value for name in TAGS} == states

        await bulk.get_by_role("button", name="Stop").click()
        await dialog.get_by_role("button", name="Stop 2").click()
        await page.get_by_text("Stopped 2 instances").wait_for()
        await expect(bulk.get_by_role("button")).to_have_text(["Start 2", "Restart 0", "Stop 0"])
        assert front.fleet.get("classifier").state.value == "running"
        await page.locator("#filter").fill("classifier")
        await bulk.get_by_role("button", name="Restart").click()
        await expect(dialog.get_by_role("heading")).to_have_text("Restart 1 instance?")
        await dialog.get_by_role("button", name="Restart 1").click()
        await page.get_by_text("Restarting 1 instance").wait_for()
        assert front.fleet.get("classifier").update is not None, "rolling, for it runs"


async def test_refused_actions_are_told_by_name_and_the_others_are_done(opened: Opened) -> None:
    async with opened("/?q=team") as (front, page):
        for number in range(8):
            await front.create(f"more-{number}", tags={"team": "more"})
        stop = page.locator("#bulk").get_by_role("button", name="Stop 11")
        await stop.click()
        await expect(page.get_by_role("dialog")).to_contain_text("more-4 and 3 more.")
        for name in ("embedding", "more-7"):
            view = front.fleet.get(name)
            front.fleet.put(replace(view, spec=replace(view.spec, wanted_running=False)))
        await page.get_by_role("dialog").get_by_role("button", name="Stop 11").click()
        await page.get_by_text("Stopped 9 instances").wait_for()
        assert "embedding: " in await page.get_by_text("2 instances refused: ").inner_text()
        await expect(page.locator("#bulk").get_by_role("button").first).to_have_text("Start 9")


async def test_the_lines_of_the_fleet_are_named_and_have_one_scale(opened: Opened) -> None:
    async with opened() as (front, page):
        folder = (await page.locator("script[src*=page]").get_attribute("src")).rpartition("/")[0]
        sparks = [[], [1.0], [0.0, 3.0, None, 250.0, 9000.0], [5.0] * 20]
        of_scripts = "([path, values]) => import(path).then((all) => values.map((each) => all.spark(each, 500)))"
        found = await page.evaluate(of_scripts, [f"{folder}/format.js", sparks])
        assert found == [views.spark(each, 500) for each in sparks]
        await expect(page.locator(".scale")).to_have_text("5 min, 0 to 100")
        async with front.http.get("/ui/fleet/live") as reply:
            sent = await next_event(reply)
        row = next(row for row in sent["rows"] if row["name"] == "embedding") | {"spark": [0.0, 900.0]}
        body = ""
        for rows, top in (([row], 1000), ([], 5000)):  # the row does not change, the scale does
            event = json.dumps(sent | {"rows": rows, "totals": sent["totals"] | {"spark_top": top}})
            body += f"event: fleet\ndata: {event}\n\n"
        await page.route("**/ui/fleet/live", partial(answer, body))
        await page.reload()
        await expect(page.locator(".scale")).to_have_text("5 min, 0 to 5k")
        line = page.locator("tr[data-name=embedding] .spark path")
        assert await line.get_attribute("d") == views.spark([0.0, 900.0], 5000)


async def test_figures_are_dimmed_and_have_their_time_once_they_are_not_current(opened: Opened) -> None:
    async with opened() as (front, page):
        async with front.http.get("/ui/fleet/live") as reply:
            sent = await next_event(reply)
        silent = next(row for row in sent["rows"] if row["name"] == "embedding") | {
            "as_of": 1_764_000_202,
            "tokens": 71,
        }
        body = f"retry: 60000\nevent: fleet\ndata: {json.dumps(sent | {'rows': [silent]})}\n\n"
        await page.route("**/ui/fleet/live", partial(answer, body))
        await page.set_viewport_size({"width": 390, "height": 850})
        await page.reload()
        row = page.locator("tr[data-name=embedding]")
        await expect(row.locator("[data-field=as_of]")).to_have_text("no answer since 16:03:22 UTC")
        assert views.clock(1_764_000_202) == "16:03:22 UTC"
        # The stream has ended.
        await expect(page.locator("#live")).to_have_text(re.compile(r"Reconnecting, figures of \d\d:\d\d:\d\d UTC"))
        assert await page.locator("#live .live-text").is_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        await page.set_viewport_size({"width": 1360, "height": 850})
        dimmed = "(cell) => getComputedStyle(cell).opacity < 1"
        numbers = page.locator("[data-field=requests], #totals dd")
        assert await numbers.evaluate_all(f"(cells) => cells.every({dimmed})")

        await page.unroute_all()
        await page.reload()
        await expect(page.locator("#live")).to_have_text("Live")
        assert not await numbers.evaluate_all(f"(cells) => cells.some({dimmed})")


async def test_views_without_a_stream_are_drawn_again_and_dimmed_when_that_fails(opened: Opened) -> None:
    async with opened("/ui/devices") as (front, page):
        again = "document.dispatchEvent(new Event('visibilitychange'))"
        devices = page.locator("[data-redrawn] tbody tr")
        await expect(devices).to_have_count(3)
        await front.call("DELETE", "/instances/reranker", 200)
        await page.evaluate(again)
        await expect(devices).to_have_count(2)
        await page.get_by_role("link", name="embedding").focus()  # what has the focus is not replaced
        await front.call("DELETE", "/instances/classifier", 200)
        await page.evaluate(again)
        await page.route("**/ui/devices", lambda route: route.abort())
        await page.evaluate("document.activeElement.blur()")
        await page.evaluate(again)
        await expect(page.locator("#live")).to_have_text(re.compile(r"Reconnecting, figures of \d\d:\d\d:\d\d UTC"))
        assert await devices.count() == 2
        assert await page.locator(".facts dd").first.evaluate("(cell) => getComputedStyle(cell).opacity < 1")
        await page.unroute_all()
        await page.evaluate(again)
        await expect(page.locator("#live")).to_have_text("Live")
        await expect(devices).to_have_count(1)


async def test_an_instance_that_reads_images_alone_is_called_with_one(opened: Opened) -> None:
    async with opened("/ui/instances/embedding") as (front, page):
        call = page.locator("#call pre")
        await expect(call).to_contain_text('--json \'{"model":"embedding","input":"a text"}')
        view = front.fleet.get("embedding")
        front.fleet.put(replace(view, model=replace(MODEL, modalities=("image",))))
        await page.reload()
        await expect(call).to_contain_text('{"model":"embedding","input":[{"image":"$(base64 -w0 picture.png)"}]}')
        await expect(page.locator("[data-fact=reads]")).to_have_text("image")


async def answer(body: str, route: Any) -> None:
    await route.fulfill(content_type="text/event-stream", body=body)


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_axe_finds_nothing_in_groups_actions_and_dimmed_figures(opened: Opened, theme: str) -> None:
    async with opened("/?q=team&group=team") as (_, page):
        await page.emulate_media(color_scheme=theme)
        await page.get_by_label("Dense").check()
        await page.evaluate("document.body.classList.add('stale')")
        await page.evaluate(AXE)
        found = await page.evaluate("axe.run().then((found) => found.violations)")
        assert [(each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in found] == []
