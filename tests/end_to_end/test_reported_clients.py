"""What clients of a daemon reported, end to end: proxies of the environment, overload, ids of other tokenizers."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from tests.support import models
from tests.support.daemon_process import DaemonProcess

# An encoding of bytes alone, as a plug-in of tiktoken has it; its ids are no ids of the model.
PLUG_IN = """
def letters():
    ranks = {bytes([each]): each for each in range(256)}
    return {"name": "letters", "pat_str": r"\\S+|\\s+", "mergeable_ranks": ranks, "special_tokens": {}}

ENCODING_CONSTRUCTORS = {"letters": letters}
"""
CALLS = 400
READY_S = 100
TEXT = "some text about rivers"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """`tiny`, which computes one call at a time, and `reads`, which takes ids of the plug-in's encoding."""
    folder = tmp_path_factory.mktemp("reported")
    (folder / "tiktoken_ext").mkdir()
    (folder / "tiktoken_ext" / "of_tests.py").write_text(PLUG_IN)
    model = str(models.build("bert", folder / "model"))
    made = DaemonProcess(token_encoding="letters")
    made.settings |= {name: str(made.folder / f"{name}.sock") for name in ("api_socket", "grpc_socket")}
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        made.start({"PYTHONPATH": os.pathsep.join(paths)})
        with made.client() as client:
            client.create("tiny", model, max_concurrent_requests=1, prometheus_port=0)
            client.create("reads", model, token_inputs="tiktoken", prometheus_port=0)
            for name in ("tiny", "reads"):
                client.wait_until_running(name, deadline_s=READY_S)
        made.await_grpc()
        yield made
    finally:
        made.close()


# C14: a proxy of the environment.


@pytest.fixture
def proxied() -> Iterator[dict[str, str]]:
    """An environment whose proxies take connections and never answer; none may come."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        came: list[object] = []
        over = threading.Event()

        def accept() -> None:
            while not over.is_set():
                try:
                    came.append(server.accept())
                except TimeoutError:
                    continue

        thread = threading.Thread(target=accept)
        thread.start()
        url = f"http://user:secret@127.0.0.1:{server.getsockname()[1]}"
        names = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
        proxies = {each: url for name in names for each in (name, name.upper())}
        environ = {name: value for name, value in os.environ.items() if "no_proxy" not in name.lower()}
        try:
            yield environ | proxies
        finally:
            over.set()
            thread.join()
        assert came == []


SAMPLE = """
import sys
from teimgr.client import Client
with Client(sys.argv[1], sys.argv[2], timeout_s=60) as client:
    print(len(client.embed(["a", "b"], instance="tiny")), len(client.list()))
"""


def embed_command(texts: Path) -> list[str]:
    output = str(texts.with_suffix(".npy"))
    return [sys.executable, "-m", "teimgr", "embed", str(texts), "--instance", "tiny", "--output", output]


@pytest.mark.parametrize("place", ["localhost", "socket"])
def test_loopback_and_sockets_never_use_a_proxy(
    daemon: DaemonProcess, proxied: dict[str, str], tmp_path: Path, place: str
) -> None:
    if place == "socket":
        rest, grpc = (f"unix:{daemon.settings[name]}" for name in ("api_socket", "grpc_socket"))
    else:
        rest, grpc = f"http://{place}:{daemon.api_port}", f"http://{place}:{daemon.grpc_port}"
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"text {each}"}) + "\n" for each in range(20)))
    commands = [
        [sys.executable, "-c", SAMPLE, rest, grpc],
        embed_command(texts),
        [sys.executable, "-m", "teimgr.cli.bench_client", "--endpoint", grpc, "--instance", "tiny", "--num-texts", "8"],
    ]
    for command in commands:
        environ = proxied | {"TEIMGR_URL": rest, "TEIMGR_GRPC_URL": grpc}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, (command, done.stderr)


def test_a_proxy_that_is_used_is_named_in_the_error(daemon: DaemonProcess, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("a text\n")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: refused
        proxy = f"127.0.0.1:{closed.getsockname()[1]}"
        environ = os.environ | {"https_proxy": f"http://user:secret@{proxy}", "no_proxy": "example.com"}
        environ = {name: value for name, value in environ.items() if name not in ("grpc_proxy", "no_grpc_proxy")}
        environ |= {"TEIMGR_URL": daemon.api, "TEIMGR_GRPC_URL": "http://192.0.2.1:9001"}
        done = subprocess.run(embed_command(texts), env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert f"through the proxy http://{proxy} of the variable https_proxy" in done.stderr
    assert "secret" not in done.stderr


# C15: more calls than an instance computes at a time.


async def test_parallel_calls_wait_and_none_is_429(daemon: DaemonProcess) -> None:
    async def call(http: aiohttp.ClientSession, number: int) -> int:
        body = {"input": [f"chunk {number} of a document"] * 8, "model": "tiny"}
        async with http.post("/v1/embeddings", json=body) as reply:
            await reply.read()
            return reply.status

    connector = aiohttp.TCPConnector(limit=CALLS)
    async with aiohttp.ClientSession(daemon.api, connector=connector) as http:
        statuses = Counter(await asyncio.gather(*(call(http, number) for number in range(CALLS))))
    assert statuses == {200: CALLS}


async def test_the_deadline_still_answers_behind_many_calls(daemon: DaemonProcess) -> None:
    from teimgr.errors import DeadlineExceeded, Overloaded

    async with daemon.async_client(timeout_s=100) as client:
        many = [asyncio.ensure_future(client.embed([TEXT] * 32, instance="tiny")) for _ in range(60)]
        await asyncio.sleep(0)
        async with daemon.async_client(timeout_s=0.001) as hurried:
            with pytest.raises((DeadlineExceeded, Overloaded)):
                await hurried.embed(TEXT, instance="tiny")
        assert len(await asyncio.gather(*many)) == 60


# C10: ids of another tokenizer.


async def test_ids_of_the_named_encoding_have_the_vectors_of_their_text(daemon: DaemonProcess) -> None:
    async def vectors(http: aiohttp.ClientSession, path: str, **body: object) -> np.ndarray:
        async with http.post(path, json=body) as reply:
            value = await reply.json()
            assert reply.status == 200, value
        return np.array([row["embedding"] for row in value["data"]])

    ids = [list(TEXT.encode()), list("é und ü".encode())]
    async with aiohttp.ClientSession(daemon.api) as http:
        of_texts = await vectors(http, "/v1/embeddings", model="reads", input=[TEXT, "é und ü"])
        np.testing.assert_allclose(await vectors(http, "/v1/embeddings", model="reads", input=ids), of_texts, atol=1e-6)
        one = await vectors(http, "/v1/embeddings", model="reads", input=ids[0])
        np.testing.assert_allclose(one, of_texts[:1], atol=1e-6)
        other = await vectors(http, "/v1/embeddings", model="tiny", input=ids)  # the model's own ids
        assert np.abs(other - of_texts).max() > 1e-3
        async with http.post("/v1/embeddings", json={"model": "reads", "input": [ids[0], [5, 300]]}) as reply:
            assert reply.status in (400, 422)
            message = (await reply.json())["error"]["message"]
        assert "letters does not have" in message
        assert "(input 1)" in message
