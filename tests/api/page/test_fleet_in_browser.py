"""The fleet's view in Debian's Chromium, over an in-memory fleet: groups and density."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.api.page.chromium import CHROMIUM, OPTIONS, missing
from tests.api.page.conftest import Serving
from tests.support.rest_listener import Front

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "there")]

LIMIT_MS = 15_000
TAGS = {"embedding": {"team": "search"}, "reranker": {"team": "search"}, "classifier": {"team": "moderation"}}
Opened = Callable[..., AbstractAsyncContextManager[tuple[Front, Any]]]


@pytest.fixture
def opened(serving: Serving) -> Opened:
    """A fleet of three that run, and a page of it whose stream has begun."""

    @asynccontextmanager
    async def opening(path: str = "/") -> AsyncIterator[tuple[Front, Any]]:
        from playwright.async_api import async_playwright

        async with serving() as front, async_playwright() as playwright:
            for name, tags in TAGS.items():
                await front.create(name, tags=tags)
                front.fleet.ready(name)
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, **OPTIONS)
            page = await browser.new_page(base_url=front.url)
            page.set_default_timeout(LIMIT_MS)
            faults: list[str] = []
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
            await page.goto(path)
            await page.wait_for_selector(".live:not([hidden])")
            yield front, page
            assert faults == []
            await browser.close()

    return opening


def expect(locator: Any) -> Any:
    """Playwright's assertions, which wait for what they assert."""
    from playwright.async_api import expect

    expect.set_options(timeout=LIMIT_MS)
    return expect(locator)


async def shown(page: Any) -> list[str]:
    """The names of the rows that are visible, in their order."""
    rows = await page.locator("#fleet tr[data-name]:visible").all()
    return [await row.get_attribute("data-name") for row in rows]


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
