"""Mutual TLS of the REST listener, with certificates made for the test."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rest import Front, listening

from teimgr.front.callers import permitted
from teimgr.front.tls import subject_of, uvicorn_options
from teimgr.settings import Auth, Mtls, Settings

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def make_ca(folder: Path, name: str) -> None:
    """`<name>.pem` and `<name>.key`: a certificate authority."""
    files = ("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem")
    openssl("req", "-x509", *EC, "-nodes", "-days", "2", "-subj", f"/CN={name}", *files)


def make_certificate(folder: Path, ca: str, name: str, subject: str, san: str) -> None:
    """`<name>.pem` and `<name>.key`, signed by `ca`."""
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text(f"subjectAltName={san}\n")
    openssl("req", *EC, "-nodes", "-subj", subject, "-keyout", folder / f"{name}.key", "-out", request)
    signer = ("-CA", folder / f"{ca}.pem", "-CAkey", folder / f"{ca}.key", "-CAcreateserial")
    openssl(
        "x509", "-req", "-days", "2", "-in", request, *signer, "-extfile", extensions, "-out", folder / f"{name}.pem"
    )


EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_ca(folder, "ca")
    make_ca(folder, "stranger")
    make_certificate(folder, "ca", "server", "/CN=localhost", "DNS:localhost,IP:127.0.0.1")
    make_certificate(folder, "ca", "indexer", "/O=Search/CN=indexer", "DNS:indexer.local")
    make_certificate(folder, "stranger", "intruder", "/O=Search/CN=indexer", "DNS:indexer.local")
    return folder


def mtls(folder: Path, **rules: Any) -> Mtls:
    return Mtls(ca_cert=folder / "ca.pem", server_cert=folder / "server.pem", server_key=folder / "server.key", **rules)


@asynccontextmanager
async def listening_with(settings: Settings, folder: Path, client: str | None, **rules: Any) -> AsyncIterator[Front]:
    """A TLS front with these rules, called with the certificate of `client`."""
    auth = Auth(enabled=True, providers=("mtls",), mtls=mtls(folder, **rules))
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if client is not None:
        context.load_cert_chain(folder / f"{client}.pem", folder / f"{client}.key")
    async with (
        listening(replace(settings, auth=auth)) as front,
        aiohttp.ClientSession(front.url, connector=aiohttp.TCPConnector(ssl=context)) as front.http,
    ):
        yield front


async def test_a_client_that_the_authority_certified_is_served(settings: Settings, certificates: Path) -> None:
    async with listening_with(settings, certificates, "indexer") as front:
        assert (await front.create("a"))["name"] == "a"


@pytest.mark.parametrize("client", [None, "intruder"])
async def test_other_clients_get_no_connection(settings: Settings, certificates: Path, client: str | None) -> None:
    async with listening_with(settings, certificates, client) as front:
        with pytest.raises(aiohttp.ClientError):
            await front.call("GET", "/health", 200)


@pytest.mark.parametrize(
    "rules",
    [
        {"allowed_subjects": ("CN=indexer",)},
        {"allowed_subjects": ("CN=other", "O=Search")},
        {"verify_san": True, "allowed_sans": ("indexer.local",)},
        {"verify_san": True, "allowed_sans": ("DNS:indexer.local",)},
        {"allowed_sans": ("somebody.else",)},
        {"verify_subject": False, "allowed_subjects": ("CN=other",)},
    ],
)
async def test_callers_on_the_lists_are_let_in(settings: Settings, certificates: Path, rules: dict[str, Any]) -> None:
    async with listening_with(settings, certificates, "indexer", **rules) as front:
        await front.call("GET", "/instances", 200)


@pytest.mark.parametrize(
    "rules",
    [
        {"allowed_subjects": ("CN=other",)},
        {"verify_san": True, "allowed_sans": ("other.local",)},
        {"allowed_subjects": ("CN=indexer",), "verify_san": True, "allowed_sans": ("indexer",)},
    ],
)
async def test_callers_not_on_the_lists_get_401_but_probes_stay_open(
    settings: Settings, certificates: Path, rules: dict[str, Any]
) -> None:
    async with listening_with(settings, certificates, "indexer", **rules) as front:
        assert (await front.call("GET", "/instances", 401))["code"] == "UNAUTHENTICATED"
        assert (await front.call("POST", "/nope", 401))["code"] == "UNAUTHENTICATED"
        await front.call("GET", "/health", 200)


def test_without_mutual_tls_uvicorn_is_told_nothing() -> None:
    assert uvicorn_options(None) == {}


def test_a_subject_reads_as_the_certificate_orders_it() -> None:
    certificate = {"subject": ((("organizationName", "Search"),), (("commonName", "indexer"), ("userId", "7")))}
    assert subject_of(certificate) == "O=Search, CN=indexer, UID=7"
    assert subject_of({}) == ""


def test_an_absent_certificate_passes_only_where_nothing_is_asked(tmp_path: Path) -> None:
    assert permitted(mtls(tmp_path), "", ())
    assert not permitted(mtls(tmp_path, allowed_subjects=("CN=a",)), "", ())
