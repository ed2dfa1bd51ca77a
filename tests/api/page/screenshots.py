"""Pictures of each view in both themes, wide and on a phone: `python -m tests.api.page.screenshots FOLDER [--url URL]`.

Without `--url` the pictures are of a daemon of its own with an instance of each kind, under some load.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import FilePayload, Page, sync_playwright
from tests.api.page.chromium import CHROMIUM, OPTIONS
from tests.api.page.demo_fleet import pictured_fleet
from tests.support.daemon_process import DaemonProcess
from tests.support.models.dual_encoders import file_of

VIEWS = {
    "fleet": "/",
    "instance": "/ui/instances/docs-search",
    "failed": "/ui/instances/candidate",
    "create": "/ui/create",
    "models": "/ui/models",
    "devices": "/ui/devices",
    "scaling": "/ui/scaling",
    "alarms": "/ui/alarms",
    "reference": "/docs",
    "similarity": "/ui/playground?instance=docs-search#similarity",
    "pictures": "/ui/playground?instance=photo-search#similarity",
    "rerank": "/ui/playground#rerank",
    "classify": "/ui/playground#classify",
    "tokens": "/ui/playground?instance=docs-search#tokens",
}
WIDTHS = {"": 1360, "-phone": 390}
PICTURES: list[FilePayload] = [
    {"name": f"{name}.png", "mimeType": "image/png", "buffer": file_of(Image.linear_gradient("L").rotate(turn))}
    for name, turn in (("dusk", 0), ("dawn", 180), ("shore", 90))
]
WARM_UP_MS = 240_000  # the charts show five minutes


@contextmanager
def under_load(daemon: DaemonProcess) -> Iterator[None]:
    """Some calls a second, of one text to sixteen, within the block."""
    over = threading.Event()

    def call() -> None:
        chance = random.Random(7)
        with daemon.client() as client:
            while not over.wait(chance.expovariate(4)):
                text = "a question about " + " ".join(chance.choices(["plants", "stocks", "rivers", "trains"], k=12))
                client.embed([text] * chance.choice((1, 2, 8, 16)), instance="docs-search")

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def shoot(page: Page, url: str, folder: Path, suffix: str) -> None:
    for name, path in VIEWS.items():
        page.goto(url + path)
        if "playground" in path:
            page.reload()  # another fragment alone is no other page
            if name == "pictures":
                page.locator("#texts").fill("a dark sky\nmorning light\nsand and water")
                page.locator("#files").set_input_files(PICTURES)
            page.get_by_role("button", name="Run").click()
            page.wait_for_selector("#results article")
        if name == "instance":
            page.wait_for_selector("#log div")
            page.get_by_role("button", name="Run the self-test").click()
            page.wait_for_selector("#self-test-result .running")
        page.wait_for_timeout(2500 if name in ("fleet", "instance") else 300)
        page.evaluate("scrollTo(0, 0); document.activeElement.blur()")
        page.screenshot(path=folder / f"{name}{suffix}.png", full_page=name != "reference")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.api.page.screenshots", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", help="of a daemon that runs already")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.url:
        take(options.url, options.folder, 0)
        return 0
    models = Path(tempfile.gettempdir()) / "models"  # the pictures show it
    try:
        with pictured_fleet(models) as daemon, under_load(daemon):
            take(daemon.api, options.folder, WARM_UP_MS)
    finally:
        shutil.rmtree(models, ignore_errors=True)
    return 0


def take(url: str, folder: Path, warm_up_ms: int) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, **OPTIONS)
        for theme in ("light", "dark"):
            page = browser.new_page(color_scheme=theme, viewport={"width": 1360, "height": 850})
            page.on("console", lambda message: print(message.type, message.text, file=sys.stderr))
            page.on("pageerror", lambda error: print("error", error, file=sys.stderr))
            page.goto(url)
            page.wait_for_timeout(warm_up_ms)
            warm_up_ms = 0
            for form, width in WIDTHS.items():
                page.set_viewport_size({"width": width, "height": 850})
                shoot(page, url, folder, f"-{theme}{form}")
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
