"""The REST client without an event loop: the same calls as `AsyncClient`, and few imports."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.small_servers import Certificates, Daemon, serve

from teimgr.client import AsyncClient, RestClient, Tls
from teimgr.client.http_replies import error_from_reply
from teimgr.client.rest import FleetCalls, InstanceCalls, ModelCalls
from teimgr.errors import (
    DeadlineExceeded,
    Forbidden,
    InstanceNotFound,
    InvalidInput,
    ModelLoadFailed,
    SpaceDiffers,
    Unavailable,
    Unreachable,
    ValidationError,
    WrongModelKind,
)

ROOT = Path(__file__).resolve().parents[2]


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_it_has_every_rest_call_of_the_other_clients() -> None:
    assert public(RestClient) == public(InstanceCalls) | public(ModelCalls) | public(FleetCalls)
    assert public(RestClient) <= public(AsyncClient)


async def blocking(body: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(body)


async def test_calls_block_and_return_values(api_url: str) -> None:
    def body() -> None:
        client = RestClient(api_url)
        client.create("one", "org/model")
        assert client.wait_until_running("one", deadline_s=20).pid == 7
        assert [each.name for each in client.list()] == ["one"]
        assert [event.event for event in client.download_model("org/model")] == ["progress", "done"]
        with pytest.raises(InstanceNotFound):
            client.get("nope")
        with pytest.raises(ValidationError, match="max_batch_tokens"):
            client.create("two", "org/model", max_batch_token=1)  # type: ignore[call-arg]
        client.create("bad", "broken")
        with pytest.raises(ModelLoadFailed):
            client.wait_until_running("bad", deadline_s=20)

    await blocking(body)


async def test_a_reply_that_never_comes_ends_at_the_timeout(api_url: str) -> None:
    with pytest.raises(DeadlineExceeded, match="no reply within"):
        await blocking(lambda: RestClient(api_url, timeout_s=0.2).get("slow"))


def test_no_listener_is_unreachable(unused_port: int) -> None:
    with pytest.raises(Unreachable, match="Connection refused") as caught:
        RestClient(f"http://127.0.0.1:{unused_port}").health()
    assert caught.value.address == f"http://127.0.0.1:{unused_port}"


async def test_rest_over_mtls(daemon: Daemon, certificates: Certificates) -> None:
    proof = Tls(ca=certificates.ca, cert=certificates.client_cert, key=certificates.client_key, server_name="localhost")
    async with serve(daemon, certificates.server_context()) as url:
        assert (await blocking(lambda: RestClient(url, tls=proof).health())).status == "healthy"
        with pytest.raises(Unavailable):
            await blocking(lambda: RestClient(url, tls=Tls(ca=certificates.ca, server_name="localhost")).health())
        with pytest.raises(Unavailable, match=r"(?i)certificate.verify.failed"):
            await blocking(lambda: RestClient(url).health())


async def test_rest_over_a_unix_socket(daemon: Daemon, certificates: Certificates, tmp_path: Path) -> None:
    import ssl

    path = tmp_path / "api.sock"
    async with serve(daemon, path=path) as url:
        assert (await blocking(lambda: RestClient(url).health())).status == "healthy"
    with pytest.raises(Unreachable, match="Connection refused") as caught:
        RestClient(f"unix:{path}").health()
    assert caught.value.address == f"unix:{path}"

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.server_cert, certificates.server_key)
    async with serve(daemon, context, path) as url:
        assert (await blocking(lambda: RestClient(url, tls=Tls(ca=certificates.ca)).health())).status == "healthy"
        with pytest.raises(Unavailable, match=r"(?i)certificate.verify.failed"):
            await blocking(lambda: RestClient(url).health())


def imported(code: str) -> set[str]:
    """The modules that a new interpreter has after `code`."""
    code += "\nimport sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_it_imports_neither_numpy_nor_grpc() -> None:
    heavy = {"numpy", "grpc", "pyarrow", "aiohttp", "asyncio", "torch", "fastapi", "google.protobuf"}
    assert not heavy & imported("from teimgr.client import DaemonConnection, RestClient, Tls")


def test_the_client_runs_with_what_its_own_distribution_has(tmp_path: Path) -> None:
    """`packaging/client` lists every package that the client needs, and no torch."""
    import shutil
    import tomllib

    project = tomllib.loads((ROOT / "packaging" / "client" / "pyproject.toml").read_text())
    for package in project["tool"]["setuptools"]["packages"]:
        source = ROOT / "src" / Path(*package.split("."))
        for file in source.glob("*.py"):
            target = tmp_path / file.relative_to(ROOT / "src")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "for name in ('torch', 'transformers', 'tokenizers', 'safetensors', 'huggingface_hub', 'fastapi', 'uvicorn',\n"
        "             'orjson', 'pynvml', 'hpack', 'prometheus_client', 'msgpack', 'httptools'):\n"
        "    sys.modules[name] = None\n"
        "import teimgr; assert teimgr.__file__.startswith(sys.path[0])\n"
        "from teimgr.client import AsyncClient, Client, RestClient, Embedded\n"
        "from teimgr.client.corpus import embed_file\n"
        "import teimgr.cli.bench_client.command, teimgr.client.__main__\n"
        "from teimgr.cli.main import main\n"
        "assert main(['--help']) == 0 and main(['context', 'list']) == 0 and main(['explain', 'OVERLOADED']) == 0\n"
        "assert main(['ps', '--url', 'http://127.0.0.1:1']) == 3\n"
        "assert main(['serve', '--port', '19999']) == 1\n"
        "assert main(['import', 'compose.yml']) == 1\n"
    )
    environ = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("installation is incomplete") == 2


def test_a_refusal_for_another_space_is_its_own_error_in_teis_dialect_too() -> None:
    body = b'{"error": "the space differs", "error_type": "Validation"}'
    assert type(error_from_reply(412, body, {})) is SpaceDiffers
    assert type(error_from_reply(422, body, {})) is InvalidInput
    for name, kind in (("FORBIDDEN", Forbidden), ("WRONG_MODEL_KIND", WrongModelKind)):
        assert type(error_from_reply(424, body, {"x-teimgr-code": name})) is kind


def test_a_refusal_in_plain_text_has_the_code_of_its_header_or_status() -> None:
    named = error_from_reply(400, b"inputs.0.data: only text is supported", {"x-teimgr-code": "INVALID_INPUT"})
    assert (type(named), named.message) == (InvalidInput, "inputs.0.data: only text is supported")
    dated = error_from_reply(503, b"a proxy's words", {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"})
    assert dated.retry_after_s is None
    assert type(error_from_reply(400, b"a proxy's words", {})) is ValidationError
    assert "an instance's own port" in error_from_reply(404, b"", {}).message
