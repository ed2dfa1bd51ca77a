"""Static files: cached by their digest, compressed, licensed, and without another host."""

from __future__ import annotations

import gzip
import re
from importlib.resources import files

import pytest
from starlette.requests import Request

from teimgr.api.page import views
from teimgr.api.page.assets import SECURITY_HEADERS, accepts_gzip, assets, html_response

STATIC = files("teimgr.api.page").joinpath("static")
OWN = [path for path in STATIC.iterdir() if path.name.endswith((".js", ".css", ".svg")) and "uplot" not in path.name]


def request(encodings: str = "", **path: str) -> Request:
    headers = [(b"accept-encoding", encodings.encode())] if encodings else []
    return Request({"type": "http", "method": "GET", "headers": headers, "path_params": path})


def test_a_file_is_sent_compressed_and_cached_for_ever() -> None:
    name, digest = "page.js", assets().digest
    assert assets().path(name) == f"/ui/static/{digest}/{name}"
    reply = assets().respond(request("br, gzip", digest=digest, name=name))
    assert reply is not None
    assert gzip.decompress(bytes(reply.body)) == STATIC.joinpath(name).read_bytes()
    assert reply.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert reply.headers["content-encoding"] == "gzip"
    plain = assets().respond(request(digest="of-another-version", name=name))
    assert plain is not None
    assert bytes(plain.body) == STATIC.joinpath(name).read_bytes()
    assert plain.headers["cache-control"] == "no-store"
    assert assets().respond(request(digest=digest, name="../page.py")) is None
    with pytest.raises(KeyError):
        assets().path("nothing.js")


@pytest.mark.parametrize(
    ("header", "takes"),
    [("", False), ("gzip", True), ("br;q=1, gzip;q=0.5", True), ("gzip; q=0", False), ("br", False)],
)
async def test_what_a_browser_accepts(header: str, takes: bool) -> None:
    assert accepts_gzip(request(header)) is takes
    assert ("content-encoding" in (await html_response(request(header), "x")).headers) is takes


def test_foreign_code_has_its_licence() -> None:
    assert "MIT License" in STATIC.joinpath("uplot.LICENSE.txt").read_text()


@pytest.mark.parametrize("path", OWN, ids=lambda path: str(path.name))
def test_own_files_name_no_other_host_and_evaluate_nothing(path: object) -> None:
    text = path.read_text()  # type: ignore[attr-defined]
    hosts = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text))
    assert hosts <= {"http://www.w3.org"}, hosts
    assert not re.search(r"\beval\(|new Function|innerHTML|insertAdjacentHTML|document\.write", text)
    assert "default-src 'none'" in SECURITY_HEADERS["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("shown", "value"),
    [
        (views.size(0), "0 B"),
        (views.size(1536), "1.5 KiB"),
        (views.size(300 * 2**20), "300 MiB"),
        (views.size(None), "–"),
        (views.number(0), "0"),
        (views.number(7.44), "7.4"),
        (views.number(12_345), "12.3k"),
        (views.number(4_100_000), "4.1M"),
        (views.milliseconds(0.75), "0.8 ms"),
        (views.milliseconds(12.2), "12 ms"),
        (views.milliseconds(2500), "2.5 s"),
        (views.milliseconds(249_000), "> 249 s"),
        (views.duration(0), "0 s"),
        (views.duration(3700), "1 h 1 min"),
        (views.duration(3 * 86400 + 4 * 3600 + 59), "3 d 4 h"),
        (views.clock(None), ""),
        (views.clock(1_764_000_202), "16:03:22 UTC"),
        (", ".join(views.tags({"team": "search", "new": ""})), "team=search, new"),
        (views.spark([1.0, None], 100), "M90.9,21.8"),
    ],
)
def test_figures_as_text(shown: str, value: str) -> None:
    assert shown == value
