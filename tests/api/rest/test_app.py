"""Mutual TLS of the REST listener: authentication, and certificates that change while it serves.

The way in for inference: which requests are answered there, for whom, and what a page gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support.credentials import AUTH, SECRETS, Authority, needs_openssl, put
from tests.support.http_peers import Peer, request
from tests.support.polling import eventually, on_uvloop
from tests.support.rest_listener import Fleet, Front, listening

from teimgr.api.gateway.gateway import Gateway
from teimgr.api.rest.app import RestTls, create_app, uvicorn_options
from teimgr.config.auth import Auth, Mtls, ServerTls, faults
from teimgr.config.settings import Settings
from teimgr.http.auth.tls_files import TlsFiles
from teimgr.http.http2.requests import protocol as http2_protocol
from teimgr.http.server import bind, serving
from teimgr.http.unix_listener import UnixListener, bind_unix
from teimgr.observability.metrics import DaemonMetrics
from teimgr.wire.routing.directory import Directory

pytestmark = needs_openssl
LIMIT_S = 20


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority(tmp_path_factory.mktemp("certs") / "ours")
    authority.server()
    authority.sign("indexer", "/O=Search, Inc./OU=a+CN=zürich/CN=indexer", "DNS:indexer.local,URI:spiffe://x/indexer")
    authority.sign("late", "/O=Search/CN=indexer", days=0)
    return authority


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority(tmp_path_factory.mktemp("certs") / "stranger", "stranger")
    authority.sign("indexer", "/O=Search/CN=indexer", "DNS:indexer.local")
    return authority


def mtls(folder: Path, **rules: Any) -> Mtls:
    return Mtls(ca_cert=folder / "ca.pem", server_cert=folder / "server.pem", server_key=folder / "server.key", **rules)


def client(ca: Path, authority: Authority | None = None, name: str = "indexer") -> ssl.SSLContext:
    """A client that trusts `ca` and shows the certificate of this name, or none."""
    context = ssl.create_default_context(cafile=str(ca))
    if authority is not None:
        context.load_cert_chain(authority.folder / f"{name}.pem", authority.folder / f"{name}.key")
    return context


@asynccontextmanager
async def session(url: str, context: ssl.SSLContext) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(ssl=context)) as http:
        yield http


@asynccontextmanager
async def calling(settings: Settings, ours: Authority, context: ssl.SSLContext, **rules: Any) -> AsyncIterator[Front]:
    """A front with these rules, called with this context."""
    auth = Auth(enabled=True, providers=("mtls",), mtls=mtls(ours.folder, **rules))
    async with listening(replace(settings, auth=auth)) as front, session(front.url, context) as front.http:
        yield front


@pytest.mark.clause("M6-tls")
async def test_a_client_that_the_authority_certified_is_served(settings: Settings, ours: Authority) -> None:
    async with calling(settings, ours, client(ours.ca, ours)) as front:
        assert (await front.create("a"))["name"] == "a"


@pytest.mark.clause("M6-tls")
@pytest.mark.parametrize("who", ["nobody", "another authority's", "expired"])
async def test_other_clients_get_no_connection(
    settings: Settings, ours: Authority, stranger: Authority, who: str
) -> None:
    context = {
        "nobody": client(ours.ca),
        "another authority's": client(ours.ca, stranger),
        "expired": client(ours.ca, ours, "late"),
    }[who]
    async with calling(settings, ours, context) as front:
        with pytest.raises(aiohttp.ClientError):
            await front.call("GET", "/health", 200)


@pytest.mark.clause("M6-subjects")
@pytest.mark.parametrize(
    "rules",
    [
        {"allowed_subjects": ("CN=indexer",)},
        {"allowed_subjects": ("CN=other", "O=Search, Inc.")},
        {"allowed_subjects": (r"CN=indexer, O=Search\, Inc.",)},
        {"allowed_subjects": ("indexer",)},
        {"allowed_subjects": ("CN=zürich",)},
        {"verify_san": True, "allowed_sans": ("indexer.local",)},
        {"verify_san": True, "allowed_sans": ("DNS:indexer.local",)},
        {"verify_san": True, "allowed_sans": ("spiffe://x/indexer",)},
        {"allowed_sans": ("somebody.else",)},
        {"verify_subject": False, "allowed_subjects": ("CN=other",)},
    ],
)
async def test_callers_on_the_lists_are_let_in(settings: Settings, ours: Authority, rules: dict[str, Any]) -> None:
    async with calling(settings, ours, client(ours.ca, ours), **rules) as front:
        await front.call("GET", "/instances", 200)


@pytest.mark.clause("M6-public")
@pytest.mark.parametrize(
    "rules",
    [
        {"allowed_subjects": ("CN=other",)},
        {"allowed_subjects": ("CN=index",)},
        {"allowed_subjects": ("CN=indexer, O=Other",)},
        {"allowed_subjects": ("",)},
        {"verify_san": True, "allowed_sans": ("other.local",)},
        {"verify_san": True, "allowed_sans": ("URI:indexer.local",)},
        {"allowed_subjects": ("CN=indexer",), "verify_san": True, "allowed_sans": ("indexer",)},
    ],
)
async def test_callers_not_on_the_lists_get_401_but_probes_stay_open(
    settings: Settings, ours: Authority, rules: dict[str, Any]
) -> None:
    async with calling(settings, ours, client(ours.ca, ours), **rules) as front:
        assert (await front.call("GET", "/instances", 401))["code"] == "UNAUTHENTICATED"
        assert (await front.call("POST", "/nope", 401))["code"] == "UNAUTHENTICATED"
        await front.call("GET", "/health", 200)
        async with front.http.get("/metrics") as reply:
            assert reply.status == 200


async def test_tls_without_certificates_of_clients(settings: Settings, ours: Authority) -> None:
    tls = ServerTls(server_cert=ours.folder / "server.pem", server_key=ours.folder / "server.key")
    auth = Auth(enabled=True, providers=("api_keys",), tls=tls)
    async with listening(replace(settings, auth=auth)) as front, session(front.url, client(ours.ca)) as front.http:
        await front.call("GET", "/health", 200)
        await front.call("GET", "/instances", 401)
        for path in ("/v1/models", "/v1/nothing"):  # OpenAI's object
            assert (await front.call("GET", path, 401))["error"]["code"] == "invalid_api_key"


@asynccontextmanager
async def renewing(
    settings: Settings, files: TlsFiles, unix: UnixListener | None = None
) -> AsyncIterator[tuple[RestTls, str]]:
    """The daemon's REST listener with these files."""
    app = create_app(Fleet(settings), settings, DaemonMetrics())
    tls, sock = RestTls(files), bind("127.0.0.1", 0)
    async with tls.serving(app, sock, unix=unix):
        yield tls, f"https://127.0.0.1:{sock.getsockname()[1]}"


async def served(url: str | Path, context: ssl.SSLContext) -> bytes | None:
    """The certificate that a new connection is shown, at a URL or a Unix socket; None where it is refused."""
    try:
        if isinstance(url, Path):
            reader, writer = await asyncio.open_unix_connection(url, ssl=context, server_hostname="localhost")
        else:
            host, _, port = url.removeprefix("https://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
    except (ssl.SSLError, ConnectionError):
        return None
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        await writer.wait_closed()
    return certificate if answer.startswith(b"HTTP/1.1 200") else None


@pytest.mark.parametrize(("rules", "status"), [({}, 200), ({"allowed_subjects": ("CN=other",)}, 401)])
@on_uvloop  # asyncio's loop loses connections that it accepts while a listener is replaced
async def test_http2_over_tls_has_the_clients_certificate(
    settings: Settings, ours: Authority, rules: dict[str, Any], status: int
) -> None:
    settings = replace(settings, auth=Auth(enabled=True, providers=("mtls",), mtls=mtls(ours.folder, **rules)))
    assert settings.tls_files
    context = client(ours.ca, ours)
    context.set_alpn_protocols(["h2"])
    async with renewing(settings, settings.tls_files) as (_, url):
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        peer = Peer(reader, writer)
        assert (await peer.ask(request("/instances")))[0] == status
        assert (await peer.ask(request("/health")))[0] == 200
        writer.close()


@pytest.mark.clause("M6-renewal")
@on_uvloop  # asyncio's loop loses connections that it accepts while a listener is replaced
async def test_certificates_and_authority_are_renewed_under_live_traffic(settings: Settings, tmp_path: Path) -> None:
    before, after = Authority(tmp_path / "before"), Authority(tmp_path / "after", "after")
    files = before.server()
    for authority in (before, after):
        authority.sign("indexer")
    new = after.server()
    old_client, new_client = client(before.ca, before), client(after.ca, after)
    failures, answers, stop = [], 0, asyncio.Event()

    async def ask(http: aiohttp.ClientSession) -> None:
        nonlocal answers
        while not stop.is_set():
            async with http.get("/health") as reply:
                answers += 1
                if reply.status != 200:
                    failures.append(reply.status)

    at_socket = tmp_path / "api.sock"
    unix = bind_unix(at_socket, 0o600, "api_socket")
    async with renewing(settings, files, unix) as (tls, url), session(url, old_client) as http:
        assert await served(at_socket, old_client) is not None
        asking = [asyncio.create_task(ask(http)) for _ in range(4)]
        first = await served(url, old_client)
        assert first is not None
        assert await served(url, new_client) is None

        for source, target in ((new.cert, files.cert), (new.key, files.key), (new.ca, files.ca)):
            assert source
            assert target
            put(source, target)

        async def renewed() -> bool:
            return await served(url, new_client) is not None

        await eventually(renewed)
        assert await served(url, new_client) != first
        assert await served(at_socket, new_client) is not None
        assert await served(at_socket, old_client) is None
        assert await served(url, old_client) is None  # it trusts another authority than that of the new server
        trusting = client(after.ca, before)
        assert await served(url, trusting) is None  # and would be refused if it did
        seen = answers
        await eventually(lambda: answers > seen + 50)  # connections that were there go on
        stop.set()
        await asyncio.gather(*asking)
    assert failures == []
    assert tls.alarms() == []


@on_uvloop  # asyncio's loop loses connections that it accepts while a listener is replaced
async def test_broken_files_change_nothing_but_the_alarm(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Authority(tmp_path / "ours")
    files = ours.server()
    ours.sign("indexer")
    good_key = files.key.read_bytes()
    async with renewing(settings, files) as (tls, url):
        first = await served(url, client(ours.ca, ours))
        ours.sign("other")
        put(ours.folder / "other.key", files.key)
        await eventually(tls.alarms)
        assert "the private key does not match the certificate" in tls.alarms()[0]
        assert tls.alarms()[0] in caplog.messages
        assert await served(url, client(ours.ca, ours)) == first

        (ours.folder / "good.key").write_bytes(good_key)
        put(ours.folder / "good.key", files.key)
        await eventually(lambda: not tls.alarms())
        assert await served(url, client(ours.ca, ours)) == first


@on_uvloop  # asyncio's loop loses connections that it accepts while a listener is replaced
async def test_a_lack_of_descriptors_at_a_renewal_is_an_alarm_and_tried_again(
    settings: Settings, tmp_path: Path
) -> None:
    ours = Authority(tmp_path / "ours")
    files = ours.server()
    ours.sign("indexer")
    new, key = ours.sign("renewed")
    async with renewing(settings, files) as (tls, url):
        first = await served(url, client(ours.ca, ours))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(lowest_free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            new.replace(files.cert)
            key.replace(files.key)
            await eventually(tls.alarms)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "Too many open files" in tls.alarms()[0]

        await eventually(lambda: not tls.alarms(), limit_s=10)
        assert await served(url, client(ours.ca, ours)) not in (None, first)


def test_without_files_there_is_no_tls() -> None:
    assert uvicorn_options(None) == {"proxy_headers": False}
    assert RestTls(None).alarms() == []


def test_tls_of_its_own_has_no_place_beside_mutual_tls(ours: Authority) -> None:
    tls = ServerTls(server_cert=ours.folder / "server.pem", server_key=ours.folder / "nowhere.key")
    both = Auth(enabled=True, providers=("mtls",), mtls=mtls(ours.folder), tls=tls)
    assert [fault.path for fault in faults(both)] == ["auth.tls"]
    alone = Auth(enabled=True, providers=("api_keys",), tls=tls)
    assert [fault.path for fault in faults(alone)] == ["auth.tls.server_key", "auth.api_keys"]


async def test_the_document_of_the_api_is_made_beside_other_requests(settings: Settings) -> None:
    app, sock = create_app(Fleet(settings), settings, DaemonMetrics()), bind("127.0.0.1", 0)
    may_go_on, made = threading.Event(), []

    def openapi() -> dict[str, Any]:
        made.append(may_go_on.wait(LIMIT_S))
        return {"info": {"title": "t", "version": "1"}, "paths": {}}

    app.openapi = openapi  # type: ignore[method-assign]
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with serving(app, sock), aiohttp.ClientSession(url) as client, asyncio.timeout(LIMIT_S):
        waiting = [asyncio.create_task(client.get(path)) for path in ("/openapi.json", "/docs", "/openapi.json")]
        async with client.get("/health") as health:
            assert health.status == 200
        assert not any(task.done() for task in waiting)
        may_go_on.set()
        answers = [await (await task).text() for task in waiting]

    assert answers[0] == answers[2] == '{"info":{"title":"t","version":"1"},"paths":{}}'
    assert made == [True]  # once


async def test_many_requests_of_a_few_connections_leave_turns_to_another_client(settings: Settings) -> None:
    served = 0

    def alarms() -> tuple[str, ...]:
        nonlocal served
        served += 1
        return ()

    app, sock = create_app(Fleet(settings), settings, DaemonMetrics(), alarms), bind("127.0.0.1", 0)
    address = sock.getsockname()[:2]
    async with serving(app, sock, http2_protocol):
        reader, writer = await asyncio.open_connection(*address)
        peers = [Peer(*await asyncio.open_connection(*address)) for _ in range(4)]
        for peer in peers:
            for _ in range(200):
                peer.open(request("/health"), end=True)
        writer.write(b"GET /health/ready HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer another\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 ")
        assert served < 60  # 119 and more where all that has come begins at once
        for each in (writer, *(peer.writer for peer in peers)):
            each.close()


@asynccontextmanager
async def asked(settings: Settings) -> AsyncIterator[tuple[aiohttp.ClientSession, Any, tuple[str, int]]]:
    """A client of an application that serves no instance, what answers inference, and the address."""
    gateway, sock = Gateway(settings, Directory(), DaemonMetrics()), bind("127.0.0.1", 0)
    app = create_app(Fleet(settings), settings, DaemonMetrics(), gateway=gateway)
    address = sock.getsockname()
    async with (
        serving(app, sock, direct=app.state.direct),
        aiohttp.ClientSession(f"http://127.0.0.1:{address[1]}") as client,
        asyncio.timeout(30),
    ):
        yield client, app.state.direct, address
    await gateway.close()


@pytest.mark.parametrize(
    ("target", "is_inference"),
    [
        ("/v1/embeddings", True),
        ("/v1/embeddings?api-version=1", True),
        ("http://host/v1/embeddings", True),
        ("/instances/a/embed", True),
        ("/instances/a%20b", True),
        ("/v1/encode/org/model", True),
        ("/weaviate/a/vectors", True),
        ("/v1/embeddings?" + "a&" * 1000, False),  # refused by the application
        ("/instances/a%2Fembed", False),
        ("/instances/%ff/embed", False),
        ("/instances/actions", False),
        ("/instances/a/start", False),
        ("/instances", False),
        ("/v1/files", False),
        ("/v1/nowhere", False),
        ("*", False),
    ],
)
async def test_the_target_says_what_is_inference(settings: Settings, target: str, is_inference: bool) -> None:
    async with asked(settings) as (_, direct, _):
        assert (direct(b"POST", target.encode()) is not None) is is_inference
        assert direct(b"GET", target.encode()) is None


async def test_an_allowed_page_may_read_the_answer_and_a_foreign_one_gets_none(settings: Settings) -> None:
    allowed = replace(settings, allowed_origins=("https://app.example",))
    async with asked(allowed) as (client, _, _):
        for origin, status in (("https://app.example", 404), ("https://evil.example", 403), (None, 404)):
            headers = {} if origin is None else {"Origin": origin}
            async with client.post("/v1/embeddings", json={"model": "a", "input": "x"}, headers=headers) as reply:
                assert (reply.status, reply.headers["content-type"]) == (status, "application/json")
                assert reply.headers.get("access-control-allow-origin") == (None if origin is None else "*")
                assert "x-request-id" in reply.headers


async def test_a_caller_without_the_right_is_refused_before_its_body_comes(settings: Settings) -> None:
    async with asked(replace(settings, auth=AUTH)) as (_, _, address):
        for path, status in ((b"/v1/embeddings", b"401"), (b"/instances/theirs/embed", b"403")):
            reader, writer = await asyncio.open_connection(*address)
            key = b"" if status == b"401" else b"authorization: Bearer %s\r\n" % SECRETS["team"].encode()
            writer.write(b"POST %s HTTP/1.1\r\nhost: a\r\n%scontent-length: 1000000\r\n\r\n" % (path, key))
            assert (await reader.readuntil(b"\r\n\r\n")).split()[1] == status
            writer.close()


async def test_other_methods_are_refused_by_the_application(settings: Settings) -> None:
    async with asked(settings) as (client, _, _):
        for path in ("/v1/embeddings", "/instances/a/embed"):
            async with client.get(path) as reply:
                assert (reply.status, reply.headers["allow"]) == (405, "POST")
        async with client.get("/instances/a/info") as reply:
            assert reply.status == 404
