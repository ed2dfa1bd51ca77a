"""Products that are not installed here: settings of their how-to pages, requests as their HTTP libraries write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from http.client import HTTPConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import yaml
from tests.docsite.pages import ROOT

LIMIT_S = 60.0
_PAGES = ROOT / "docs" / "how-to" / "clients"
_SECTION = re.compile(r"^## (.+?)$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_ENVIRONMENT = re.compile(r"^([A-Z][A-Z_]+)=(\S*)$", re.MULTILINE)
_ROW = re.compile(r"^\| ([^|]+?) \| `([^`|]+)`[^|]*\|$", re.MULTILINE)
_TREE = re.compile(r"^```(?:json|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Section(NamedTuple):
    """A section of a page, with the names and addresses of the tests' daemon in place of the page's."""

    text: str

    @property
    def fields(self) -> dict[str, str]:
        """Values by name, of `NAME=value` in its blocks and of the rows `name | value` of its tables."""
        return dict(_ENVIRONMENT.findall(self.text)) | {
            name.strip("`"): value for name, value in _ROW.findall(self.text)
        }

    @property
    def tree(self) -> Any:
        """Its block of JSON or YAML."""
        [block] = _TREE.findall(self.text)
        return yaml.safe_load(block)


def section(page: str, heading: str, addresses: Mapping[str, str]) -> Section:
    """A section of `docs/how-to/clients/PAGE.md`. `addresses` maps a page's `host:port` to the daemon's."""
    sections = dict(_SECTION.findall((_PAGES / f"{page}.md").read_text()))
    text = sections[heading]
    for theirs, ours in addresses.items():
        text = text.replace(theirs, ours)
    return Section(re.sub(r"\bmini\b", "embedding", re.sub(r"\branker\b", "reranker", text)))


class Reply(NamedTuple):
    status: int
    text: str

    @property
    def json(self) -> Any:
        assert self.status == 200, self
        return json.loads(self.text)

    @property
    def error(self) -> Any:
        """The body of a refusal in JSON."""
        assert self.status >= 400, self
        return json.loads(self.text)

    @property
    def vectors(self) -> Any:
        """Of an answer in OpenAI's form."""
        return [row["embedding"] for row in self.json["data"]]

    @property
    def scores(self) -> list[float]:
        """Of an answer with Cohere's or Jina's `results`, in the order of the documents."""
        return [row["relevance_score"] for row in sorted(self.json["results"], key=lambda row: int(row["index"]))]


class Library(NamedTuple):
    """An HTTP library: the headers that it adds by itself, and how it writes JSON."""

    headers: Mapping[str, str]
    encode: Callable[[Any], str]

    def post(self, url: str, body: Any, **headers: str) -> Reply:
        """POST `body` as JSON. A header's name has underscores for its hyphens."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._ask("POST", url, self.encode(body).encode(), {"Content-Type": "application/json"} | named)

    def get(self, url: str) -> Reply:
        return self._ask("GET", url, None, {})

    def _ask(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> Reply:
        where = urlsplit(url)
        assert where.hostname is not None
        connection = HTTPConnection(where.hostname, where.port, timeout=LIMIT_S)
        try:
            connection.putrequest(method, where.path or "/", skip_accept_encoding=True)
            for name, value in {**self.headers, **headers}.items():
                connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            assert answer.getheader("Content-Encoding") is None
            return Reply(answer.status, answer.read().decode())
        finally:
            connection.close()


def _of_go(body: Any) -> str:
    """encoding/json: keys of structs as declared, no spaces, HTML escaped."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _compact(body: Any) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


_ANY = {"Accept": "*/*", "Accept-Encoding": "gzip, deflate", "Connection": "keep-alive"}
REQUESTS = Library(_ANY | {"User-Agent": "python-requests/2.32.5"}, json.dumps)
AIOHTTP = Library(_ANY | {"User-Agent": "Python/3.11 aiohttp/3.13.2"}, json.dumps)
HTTPX = Library(_ANY | {"User-Agent": "python-httpx/0.28.1"}, _compact)
GO = Library({"User-Agent": "Go-http-client/1.1", "Accept-Encoding": "gzip"}, _of_go)
OPENAI_JS = Library(
    {
        "Accept": "application/json",
        "User-Agent": "OpenAI/JS 4.95.1",
        "X-Stainless-Lang": "js",
        "X-Stainless-Package-Version": "4.95.1",
        "X-Stainless-Retry-Count": "0",
        "X-Stainless-Timeout": "600",
        "Accept-Encoding": "gzip,deflate",
        "Connection": "keep-alive",
    },
    _compact,
)
