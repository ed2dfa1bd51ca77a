"""The page in Debian's Chromium, behind API keys: each flow as a user would do it, and axe-core on every view."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.api.nginx import below, needs_nginx, nginx
from tests.api.page.chromium import CHROMIUM, OPTIONS, missing
from tests.api.page.demo_fleet import small_fleet
from tests.support.credentials import SECRETS
from tests.support.daemon_process import DaemonProcess
from tests.support.models.dual_encoders import build_clap, build_clip, build_colqwen2, file_of, noise, sound, sound_file

from teimgr.api.page import views
from teimgr.client.rest_client import RestClient

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "there")]

AXE = gzip.decompress((Path(__file__).parent / "axe" / "axe.min.js.gz").read_bytes()).decode()
LIMIT_MS = 15_000
VIEWS = (
    "/",
    "/ui/instances/embedding",
    "/ui/create",
    "/ui/models",
    "/ui/devices",
    "/ui/scaling",
    "/ui/alarms",
    "/docs",
    "/ui/playground",
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with small_fleet(tmp_path_factory.mktemp("models")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, **OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def sessions(browser: Any, daemon: DaemonProcess) -> dict[str, Any]:
    """The state of a browser that is signed in, by the name of a key's secret."""
    states = {}
    for name in ("admin", "read"):
        context = browser.new_context(base_url=daemon.api)
        sign_in(context.new_page(), name)
        states[name] = context.storage_state()
        context.close()
    return states


@pytest.fixture
def faults() -> list[str]:
    """Errors of scripts, refused by the content policy, and requests to other hosts."""
    return []


@pytest.fixture
def page(browser: Any, daemon: DaemonProcess, sessions: dict[str, Any], faults: list[str]) -> Iterator[Any]:
    yield from opened(browser, daemon, sessions["admin"], faults)
    assert faults == []


@pytest.fixture
def viewer(browser: Any, daemon: DaemonProcess, sessions: dict[str, Any], faults: list[str]) -> Iterator[Any]:
    yield from opened(browser, daemon, sessions["read"], faults)


def opened(browser: Any, daemon: DaemonProcess, state: Any, faults: list[str]) -> Iterator[Any]:
    context = browser.new_context(base_url=daemon.api, storage_state=state, reduced_motion="reduce")
    context.set_default_timeout(LIMIT_MS)
    page = context.new_page()

    def asked(url: str) -> None:
        if not url.removeprefix("blob:").startswith(daemon.api):
            faults.append(url)

    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if "Content Security" in message.text else None)
    page.on("request", lambda request: asked(request.url))
    yield page
    context.close()


def expect(locator: Any) -> Any:
    """Playwright's assertions, which wait for what they assert."""
    from playwright.sync_api import expect

    expect.set_options(timeout=LIMIT_MS)
    return expect(locator)


def sign_in(page: Any, name: str) -> None:
    page.goto("/")
    page.get_by_label("API key").fill(SECRETS[name])
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(lambda url: "sign-in" not in url)


def row_of(page: Any, name: str) -> Any:
    return page.locator(f"#fleet tr[data-name='{name}']")


def test_a_user_signs_in_and_out(browser: Any, daemon: DaemonProcess) -> None:
    page = browser.new_page(base_url=daemon.api)
    page.goto("/ui/devices")
    page.get_by_label("API key").fill("not a key of this daemon")
    page.keyboard.press("Enter")
    assert "Unknown API key" in page.get_by_role("alert").inner_text()
    page.get_by_label("API key").fill(SECRETS["admin"])
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui/devices")
    page.get_by_text("operator").first.click()
    assert "admin, inference, read" in page.locator(".menu").inner_text()
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/ui/sign-in")
    page.goto("/ui/devices")
    assert page.get_by_label("API key").is_visible()
    page.context.close()


def test_axe_finds_nothing(page: Any) -> None:
    """In both themes, which differ in their colours alone."""
    for view in VIEWS:
        page.emulate_media(color_scheme="light")
        page.goto(view)
        if view == "/ui/playground":
            page.get_by_role("button", name="Run").click()
            page.wait_for_selector("#results article")
        if view == "/ui/create":
            page.get_by_text("More settings").click()
        if "instances" in view:
            page.wait_for_selector("#log div")
        # Sections of the reference are alike, and axe takes a minute for all.
        page.evaluate(
            "for (const each of document.querySelectorAll('.reference section:nth-of-type(n+9)')) each.remove()"
        )
        axe_finds_nothing(page, view)
    signed_out = page.context.browser.new_page(color_scheme="light")
    signed_out.goto(page.url.partition("/ui/")[0] + "/ui/sign-in")
    axe_finds_nothing(signed_out, "signed out")
    signed_out.context.close()


def axe_finds_nothing(page: Any, view: str) -> None:
    page.evaluate(AXE)
    for theme, rules in (("light", ""), ("dark", "{runOnly: ['color-contrast']}")):
        page.emulate_media(color_scheme=theme)
        found = page.evaluate(f"axe.run({rules}).then((found) => found.violations)")
        shown = [(each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in found]
        assert shown == [], (view, theme)


def test_filter_sort_and_keyboard(page: Any) -> None:
    page.goto("/")
    page.wait_for_selector(".live:not([hidden])")
    page.keyboard.press("/")
    page.keyboard.type("RERANK team=search")
    assert page.locator("#shown").inner_text() == "1 shown"
    assert [row.get_attribute("data-name") for row in page.locator("#fleet tbody tr:visible").all()] == ["reranker"]
    page.keyboard.type(" nothing like it")
    assert page.get_by_text("No instance matches the filter").is_visible()
    page.locator("#filter").fill("")
    page.get_by_role("radio", name="failed 0").check()
    assert page.locator("#shown").inner_text() == "0 shown"
    page.get_by_role("radio", name="all 3").check()
    page.get_by_role("button", name="Instance", exact=True).focus()
    for order, names in (("ascending", sorted), ("descending", lambda names: sorted(names, reverse=True))):
        page.keyboard.press("Enter")
        assert page.locator("th[data-sort=name]").get_attribute("aria-sort") == order
        shown = [row.get_attribute("data-name") for row in page.locator("#fleet tbody tr").all()]
        assert shown == names(shown)


def test_the_filter_is_in_the_address(page: Any) -> None:
    page.goto("/?q=rerank&status=running")
    assert page.locator("#shown").inner_text() == "1 shown"
    page.locator("#filter").fill("")
    assert page.url.endswith("/?status=running")
    page.get_by_role("radio", name="all 3").check()
    assert page.url.endswith("/")
    page.goto("/?status=nonsense")
    assert page.locator("#fleet tbody tr:visible").count() == 3


@pytest.mark.parametrize("path", ["/", "/ui/instances/reranker", "/ui/models", "/ui/playground", "/docs"])
def test_nothing_is_cut_off_on_a_phone_or_a_small_screen(page: Any, path: str) -> None:
    page.set_viewport_size({"width": 390, "height": 850})
    page.goto(path)
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 850})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for each in page.locator(".top nav a").all():
            box = each.bounding_box()
            assert 0 <= box["x"] <= width - box["width"]
        if path == "/":
            hidden = page.locator(".scroll").evaluate("(box) => box.scrollWidth - box.clientWidth")
            assert hidden <= 0
            assert row_of(page, "reranker").locator("[data-field=state]").bounding_box()["x"] < width


def test_an_instance_says_how_to_call_it(page: Any, daemon: DaemonProcess) -> None:
    page.goto("/ui/instances/reranker")
    expect(page.locator("#call pre")).to_contain_text(f'curl {daemon.api}/v1/rerank --json \'{{"model":"reranker"')
    assert "Bearer $TEIMGR_API_KEY" in page.locator("#call pre").inner_text()
    assert page.locator("#edit-placement").evaluate("(field) => field.selectedIndex") == 0, "the default"


def test_the_theme_is_kept(page: Any) -> None:
    page.emulate_media(color_scheme="light")
    page.goto("/")
    page.get_by_role("button", name="Dark theme").click()
    page.goto("/ui/devices")
    assert page.locator("html").get_attribute("data-theme") == "dark"
    assert page.get_by_role("button", name="Dark theme").get_attribute("aria-pressed") == "true"


def test_the_life_of_an_instance(page: Any, daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Create, watch it start, change it, test it, stop, start and delete it."""
    page.goto("/ui/instances/embedding")
    model = page.locator("#edit-model_id").input_value()
    page.goto("/ui/create")
    page.locator("#create-model_id").fill("/no/such/place")
    page.locator("#create-name").fill("a b")
    page.get_by_role("button", name="Create and start").click()
    expect(page.locator("#create-name-fault")).to_contain_text("name 'a b'")
    assert page.evaluate("document.activeElement.id") == "create-name"
    page.get_by_role("button", name="all-MiniLM-L6-v2").first.click()
    assert page.locator("#create-model_id").input_value() == "sentence-transformers/all-MiniLM-L6-v2"
    assert page.locator("#create-name").input_value() == "a b", "that of the user"
    page.locator("#create-name").fill("")
    page.locator("#create-model_id").fill(model)
    expect(page.locator("#create-name-fault")).to_be_hidden()
    page.locator("#create-model_id").blur()
    expect(page.locator("#estimate")).to_contain_text(re.compile(r"Takes about [\d.]+ MiB of memory .*It fits"))
    page.locator("#create-name").fill("fresh")
    page.get_by_text("More settings").click()
    page.locator("#create-port").fill("80")
    page.locator("#create-dtype").evaluate("(field) => field.closest('details').open = false")
    page.get_by_role("button", name="Create and start").click()
    expect(page.locator("#create-port-fault")).to_contain_text("Invalid port 80")
    page.locator("#create-port").fill("")
    page.locator("#create-prometheus_port").fill("0")
    page.locator("#create-tags").fill("team=page\nstage=test")
    page.get_by_role("button", name="Create and start").click()
    page.wait_for_url("**/ui/instances/fresh")
    page.wait_for_selector("h1 .state.running")
    warned = "config.json has speed_of_light = 299792458, which is not known here"
    expect(page.locator("#model-warnings li")).to_have_text([warned])  # it came with the model, after the page
    page.reload()
    expect(page.locator("#model-warnings li")).to_have_text([warned])
    expect(page.locator("#life .running")).to_have_count(1)
    page.wait_for_selector("#log >> text=worker ready")
    page.locator("#log-filter").fill("nothing like it")
    assert page.locator("#log div:visible").count() == 0

    page.get_by_role("button", name="Run the self-test").click()
    page.wait_for_selector("#self-test-result >> text=passed")

    page.locator("#edit-max_batch_tokens").fill("many")
    page.get_by_role("button", name="Apply changes").click()
    expect(page.locator("#edit-max_batch_tokens-fault")).to_contain_text("must be a whole number")
    page.locator("#edit-max_batch_tokens").fill("2048")
    page.locator("#edit-tags").fill("team=changed")
    page.get_by_role("button", name="Apply 2 changes").click()
    page.wait_for_selector("#life >> text=updated")
    with daemon.client(api_key=SECRETS["admin"]) as client:
        info = client.get("fresh")
        assert (info.max_batch_tokens, info.tags) == (2048, {"team": "changed"})

    page.get_by_role("button", name="Stop").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    page.wait_for_selector("h1 .state.stopped")
    page.get_by_role("button", name="Start").click()
    page.wait_for_selector("h1 .state.running")
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.wait_for_url("**/ui/fleet")
    expect(row_of(page, "fresh")).to_have_count(0)


def test_the_fleet_follows_what_others_do(page: Any, daemon: DaemonProcess) -> None:
    page.goto("/")
    page.wait_for_selector(".live:not([hidden])")
    with daemon.client(api_key=SECRETS["admin"]) as client:
        client.stop("classifier")
        row_of(page, "classifier").locator(".state.stopped").wait_for()
        client.start("classifier")
        row_of(page, "classifier").locator(".state.running").wait_for()
        client.embed(["some text"] * 20, instance="embedding")
        expect(row_of(page, "embedding").locator("[data-field=p99]")).to_contain_text("ms")
        client.create("late", str(client.get("embedding").model_id), prometheus_port=0)
        row_of(page, "late").wait_for()
        client.delete("late")
        row_of(page, "late").wait_for(state="detached")


@needs_nginx
def test_behind_a_proxy_that_strips_a_path(browser: Any, daemon: DaemonProcess, tmp_path: Path) -> None:
    """Sign in, every view, its live streams and calls, through nginx: each request is below the prefix and answered."""
    with nginx(tmp_path, below("/tools/teimgr", daemon.api)) as url:
        base, faults = f"{url}/tools/teimgr", []
        page = browser.new_page()
        page.set_default_timeout(LIMIT_MS)
        page.on("request", lambda request: faults.append(request.url) if not request.url.startswith(base) else None)
        page.on("response", lambda reply: faults.append((reply.status, reply.url)) if reply.status >= 400 else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(f"{base}/ui/devices")
        page.get_by_label("API key").fill(SECRETS["admin"])
        page.keyboard.press("Enter")
        page.wait_for_url(f"{base}/ui/devices")
        page.get_by_role("link", name="Fleet").click()
        page.wait_for_url(f"{base}/ui/fleet")
        page.wait_for_selector(".live:not([hidden]):not(.off)")
        row_of(page, "embedding").get_by_role("link").click()
        page.wait_for_url(f"{base}/ui/instances/embedding")
        page.wait_for_selector("#log >> text=worker ready")
        page.get_by_role("button", name="Run the self-test").click()
        page.wait_for_selector("#self-test-result >> text=passed")
        page.get_by_role("link", name="Try it").click()
        page.get_by_role("button", name="Run").click()
        page.wait_for_selector(".matrix td")
        environ = os.environ | {"TEIMGR_API_KEY": SECRETS["admin"]}
        command = page.locator("#call").inner_text() + " -sS --fail"
        assert json.loads(subprocess.run(["bash", "-c", command], env=environ, stdout=-1).stdout)
        page.get_by_role("radio", name="Python").check()
        sample = page.locator("#call").inner_text()
        assert f'Client("{base}"' in sample
        page.get_by_role("link", name="Models").click()
        line = page.locator("#models tbody tr", has=page.get_by_role("link", name="classifier", exact=True))
        line.get_by_role("button", name="Measure").click()  # its id is a directory, with slashes
        expect(line.locator(".state.verified")).to_be_visible()
        page.get_by_role("link", name="API", exact=True).click()
        page.get_by_role("link", name="openapi.json").click()
        page.wait_for_url(f"{base}/openapi.json")
        page.goto(f"{base}/ui/alarms")
        page.get_by_text("operator").first.click()
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url(f"{base}/ui/sign-in")
        assert faults == []
        page.context.close()
        client = RestClient(base, api_key=SECRETS["admin"])
        assert [each.name for each in client.list()] == ["embedding", "reranker", "classifier"]


def test_charts_have_points(page: Any, daemon: DaemonProcess) -> None:
    page.goto("/ui/instances/embedding")
    with daemon.client(api_key=SECRETS["admin"]) as client:
        client.embed(["some text"] * 20, instance="embedding")
    assert page.locator(".chart canvas").count() == 7
    expect(page.locator("[data-latest=latency]")).to_contain_text("p99")
    assert "now" in page.locator("[data-chart=tokens]").get_attribute("aria-label")
    assert page.locator("[data-latest=latency] .key").count() == 2
    page.locator("[data-chart=tokens] .u-over").hover(position={"x": 100, "y": 40})
    for each in page.locator("[data-latest]").all():  # the cursor is that of all
        expect(each).to_contain_text(re.compile(r"^\d\d:\d\d:\d\d"))
    page.get_by_role("radio", name="1 hour").check()
    expect(page.locator("[data-latest=memory]")).to_contain_text("MiB")


def test_the_minutes_before_a_page_is_opened_are_in_its_first_chart(page: Any, daemon: DaemonProcess) -> None:
    """Samples of an unwatched daemon are coarse; the page joins them with the fine ones it receives."""
    page.goto("/ui/instances/embedding")
    joined, gaps = page.evaluate(
        """async () => {
            const url = performance.getEntriesByType("resource").find(({ name }) => /format[^/]*\\.js/.test(name)).name;
            const { gapped, joined } = await import(url);
            const coarse = [0, 15, 30, 45, 60, 75].map((time) => [time, 1]);
            const fine = [32, 34, 45, 75, 77].map((time) => [time, 2]);
            const all = joined(fine, coarse);
            return [all, gapped(all, 45).length - all.length];
        }"""
    )
    assert joined == [[0, 1], [15, 1], [30, 1], [32, 2], [34, 2], [45, 2], [60, 1], [75, 2], [77, 2]]
    assert gaps == 0


def test_a_key_that_reads_is_offered_nothing_else(viewer: Any) -> None:
    viewer.goto("/ui/instances/embedding")
    assert viewer.locator("[data-action]").count() == 0
    assert viewer.locator("#edit-max_batch_tokens").is_disabled()
    assert viewer.get_by_role("link", name="Playground").count() == 0
    viewer.goto("/ui/create")
    assert "lacks the right admin" in viewer.locator("main").inner_text()
    told = viewer.evaluate("fetch('/instances/embedding/stop', {method: 'POST'}).then((reply) => reply.status)")
    assert told == 403


PLAYS = {
    "similarity": ".matrix td",
    "rerank": ".ranked tbody tr",
    "classify": ".classes .bar",
    "tokens": ".tokens span",
}


def test_the_playground_and_the_same_call_elsewhere(page: Any, tmp_path: Path) -> None:
    environ = os.environ | {"TEIMGR_API_KEY": SECRETS["admin"]}
    script = []
    for mode, result in PLAYS.items():
        page.goto(f"/ui/playground#{mode}")
        page.reload()
        page.get_by_role("button", name="Run").click()
        page.wait_for_selector(result)
        curl = subprocess.run(
            ["bash", "-c", page.locator("#call").inner_text() + " -sS --fail"], env=environ, stdout=-1
        )
        assert curl.returncode == 0
        json.loads(curl.stdout)
        page.get_by_role("radio", name="Python").check()
        script.append(page.locator("#call").inner_text())
        page.get_by_role("radio", name="grpcurl").check()
        assert "tei_multiplexer.v1.TeiMultiplexer/" in page.locator("#call").inner_text()
        sent = re.findall(r"^(?:    -d ')?(\{.*?\})'?(?: \\)?$", page.locator("#call").inner_text(), re.MULTILINE)
        assert all(json.loads(each)["target"]["instance_name"] for each in sent)
        assert sent
    python = subprocess.run([sys.executable, "-c", "\n".join(script)], env=environ, capture_output=True, text=True)
    assert python.returncode == 0, python.stderr


def test_an_unknown_instance_in_the_address_is_named(page: Any) -> None:
    page.goto("/ui/playground?instance=nosuch")
    expect(page.locator("#play-state")).to_have_text('There is no running instance "nosuch": choose a model')


def test_two_models_side_by_side(page: Any) -> None:
    page.goto("/ui/playground?instance=embedding#tokens")
    page.locator("#model-b").select_option("classifier")
    page.get_by_role("button", name="Run").click()
    page.wait_for_selector("#results article:nth-child(2)")
    assert [head.split("\n")[0] for head in page.locator("#results h2").all_inner_texts()] == [
        "embedding",
        "classifier",
    ]
    page.get_by_role("tab", name="Tokens").press("ArrowRight")
    assert page.get_by_role("tab", name="Similarity").get_attribute("aria-selected") == "true"
    page.locator("#texts").fill("\n".join(["x"] * 33))
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#texts-fault")).to_contain_text("at most 32 at a time")


def test_scripts_agree_with_the_server(page: Any) -> None:
    """The same numbers as text, and vectors that numpy would give."""
    page.goto("/")
    folder = page.locator("script[src*=page]").get_attribute("src").rpartition("/")[0]
    values = [None, 0, 0.04, 7.44, 99.96, 312.4, 999.6, 12_345, 4.1e6, 5e9, 1024, 1536, 3e8, 7e12]
    for name, shown in (("number", views.number), ("size", views.size), ("milliseconds", views.milliseconds)):
        found = page.evaluate(
            "([path, name, values]) => import(path).then((all) => values.map((value) => all[name](value)))",
            [f"{folder}/format.js", name, values],
        )
        assert found == [shown(value) for value in values], name
    of_gaps = "(path) => import(path).then((all) => all.gapped([[1, 7], [3, 8], [20, 9]], 10))"
    assert page.evaluate(of_gaps, f"{folder}/format.js") == [[1, 7], [3, 8], [11.5], [20, 9]]
    points = [[0.0, 0.0], [3.0, 0.0], [3.0, 4.0], [-2.0, 1.0]]
    products = [[sum(x * y for x, y in zip(a, b, strict=True)) for b in points] for a in points]
    places = page.evaluate(
        "([path, products]) => import(path).then((all) => all.flatMap(products))", [f"{folder}/vectors.js", products]
    )
    for a, p in zip(points, places, strict=True):
        for b, q in zip(points, places, strict=True):
            wanted = sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
            assert sum((x - y) ** 2 for x, y in zip(p, q, strict=True)) == pytest.approx(wanted, abs=1e-6)


def test_models_are_measured_and_a_failed_download_says_why(page: Any, daemon: DaemonProcess) -> None:
    page.goto("/ui/models")
    line = page.locator("#models tbody tr", has=page.get_by_role("link", name="classifier", exact=True))
    assert line.get_by_role("button", name="Delete").is_disabled()
    line.get_by_role("button", name="Measure").click()
    expect(line.locator(".state.verified")).to_be_visible()
    expect(line).to_contain_text("tokens/s")
    expect(line).to_contain_text("verified against transformers")
    page.get_by_role("textbox").fill("nobody/nothing")
    page.get_by_role("button", name="Add and download").click()  # there is no network
    line = page.locator("tr[data-model='nobody/nothing']")
    expect(line.locator(".reason")).not_to_be_empty()
    line.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(line).to_have_count(0)


@pytest.fixture(scope="module")
def senses(daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`clip`, `clap` and `pages` beside the others, for the last tests here; the folder of files for them."""
    folder = tmp_path_factory.mktemp("senses")
    whole = file_of(noise(60, 40))
    files = {"fox.png": whole, "it's $5.png": file_of(noise(30, 30, 1)), "cut.png": whole[:200], "notes.txt": b"text"}
    files |= {"horn.wav": sound_file(sound(1.0)), "large.png": b"", "page.png": file_of(noise(120, 90, 2))}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    os.truncate(folder / "large.png", 25 * 2**20)
    made = {"clip": build_clip(folder / "clip"), "clap": build_clap(folder / "clap")}
    made["pages"] = build_colqwen2(folder / "pages")
    with daemon.client(api_key=SECRETS["admin"]) as client:
        for name, model in made.items():
            client.create(name, str(model), dtype="float32", prometheus_port=0)
        for name in made:
            client.wait_until_running(name, deadline_s=100)
    return folder


TEXTS = ['a "fox" for $5 `now` \\', "the sea"]


def test_the_playground_compares_files_with_texts(page: Any, daemon: DaemonProcess, senses: Path) -> None:
    pictures = [senses / "fox.png", senses / "it's $5.png"]
    page.goto("/ui/playground?instance=clip")
    page.locator("#texts").fill("\n".join(TEXTS))
    page.get_by_label("Pictures").set_input_files(pictures[0])
    page.get_by_label("Pictures").set_input_files(pictures[1])
    page.get_by_role("button", name="Run").click()
    page.wait_for_selector("#results article")
    with daemon.client(api_key=SECRETS["admin"]) as client:
        images, texts = client.embed_images(pictures, instance="clip"), client.embed(TEXTS, instance="clip")
    table = page.locator(".matrix").first
    shown = np.array(table.locator("tbody td").all_inner_texts(), float).reshape(2, 2)
    assert np.allclose(shown, texts @ images.T, atol=0.0051)
    assert page.locator(".matrix").nth(1).locator("tbody td").count() == 16
    drawn = "(images) => images.every((each) => each.complete && each.naturalWidth)"
    page.wait_for_function(f"({drawn})([...document.querySelectorAll('img.thumb')])")
    assert page.locator("#picked img").count() == page.locator(".map image").count() == 2
    page.get_by_text("Vectors", exact=True).click()
    first = re.search(r"24 numbers: (\S+)", page.locator(".vectors tr").nth(2).inner_text())
    assert first is not None
    assert float(first[1]) == pytest.approx(images[0][0], abs=1e-4)
    page.evaluate(AXE)
    found = page.evaluate("axe.run().then((found) => found.violations.map((each) => each.id))")
    assert found == []

    environ = os.environ | {"TEIMGR_API_KEY": SECRETS["admin"]}
    command = page.locator("#call").inner_text().replace("curl ", "curl -sS --fail ", 1)
    sent = subprocess.run(["bash", "-c", command], env=environ, cwd=senses, stdout=-1, check=True)
    assert np.allclose(json.loads(sent.stdout), [*texts, *images], atol=1e-5)
    scripts = [read_python(page)]
    page.goto("/ui/playground?instance=clap")
    page.get_by_label("Sounds").set_input_files(senses / "horn.wav")
    page.get_by_role("button", name="Run").click()
    page.wait_for_selector(".matrix thead .thumb >> text=♪")
    scripts.append(read_python(page))
    python = [sys.executable, "-c", "\n".join(scripts)]
    told = subprocess.run(python, env=environ, cwd=senses, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("error: [[null") == 2, told.stdout


def test_a_page_shows_the_patches_that_answer_a_text(page: Any, daemon: DaemonProcess, senses: Path) -> None:
    page.goto("/ui/playground?instance=pages")
    page.locator("#texts").fill("\n".join(TEXTS))
    page.get_by_label("Pictures").set_input_files(senses / "page.png")
    page.get_by_role("button", name="Run").click()
    page.wait_for_selector("#results article")
    url = f"{daemon.api}/instances/pages/embed_all"
    image = {"type": "image", "data": base64.b64encode((senses / "page.png").read_bytes()).decode()}
    asked = {"inputs": [TEXTS[0], image], "patches": True}
    headers = {"authorization": f"Bearer {SECRETS['admin']}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(asked).encode(), headers), timeout=60) as reply:
        answers = json.load(reply)
    query, of_page = (np.array(each["vectors"]) for each in answers)
    patches = answers[1]["patches"]
    cosines = query @ of_page.T
    best = cosines[:, patches["vectors"]].max(axis=0)
    shown = page.locator(".patches").filter(has_text=f"“{TEXTS[0]}”")
    told = f"MaxSim {cosines.max(axis=1).sum():.2f}, best at row {best.argmax() // patches['columns'] + 1} of"
    expect(shown.locator("figcaption")).to_contain_text(told)
    titles = shown.locator("title").all_text_contents()
    assert np.allclose(np.array(titles, float), best, atol=0.00051)
    winners = len(set(cosines.argmax(axis=1)) & set(patches["vectors"]))
    assert shown.locator(".winner").count() == winners
    assert page.locator(".patches").count() == 2
    page.evaluate(AXE)
    assert page.evaluate("axe.run().then((found) => found.violations.map((each) => each.id))") == []


def read_python(page: Any) -> str:
    page.get_by_role("radio", name="Python").check()
    return str(page.locator("#call").inner_text())


def test_files_that_are_refused_are_told_at_their_fields(page: Any, senses: Path) -> None:
    page.goto("/ui/playground?instance=clip")
    fault, files, run = page.locator("#files-fault"), page.locator("#files"), page.get_by_role("button", name="Run")
    for name, says in (("notes.txt", "must be JPEG"), ("large.png", "has 25.0 MiB"), ("horn.wav", "must be JPEG")):
        files.set_input_files(senses / name)
        expect(fault).to_contain_text(f"{name}: {says}")
    for uri, says in (("http://host/fox.png", "begins with data:"), ("data:image/png;base64,?", "not base64")):
        page.get_by_label("A data URI").fill(uri)
        page.get_by_role("button", name="Add").click()
        expect(fault).to_contain_text(says)
    whole = base64.b64encode((senses / "fox.png").read_bytes()).decode()
    page.get_by_label("A data URI").fill(f"data:image/png;base64,{whole}")
    page.keyboard.press("Enter")
    expect(fault).to_be_hidden()
    files.set_input_files(senses / "cut.png")
    run.click()
    expect(fault).to_contain_text("cut.png: ")
    assert page.locator("#texts-fault").is_hidden()
    assert page.locator("#results article").count() == 0
    page.get_by_role("button", name="Remove cut.png").click()
    run.click()
    page.wait_for_selector("#results article")
    assert page.locator("#picked .name").all_inner_texts() == ["data-uri-1.png"]
    page.locator("#model-b").select_option("embedding")
    run.click()
    expect(page.locator("#model-b-fault")).to_have_text("embedding reads text, and there is image")
    page.locator("#model-a").select_option("embedding")
    assert page.locator("#files-field").is_hidden()
    page.locator("#texts").fill("")
    run.click()
    expect(page.locator("#texts-fault")).to_have_text("enter a text")
