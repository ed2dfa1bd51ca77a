"""The header `x-teimgr-lane`: every interface computes a request in the lane that its caller chose."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import grpc
import pyarrow as pa
import pytest
from tests.support import models
from tests.support.daemon_process import WarmDaemonProcess

from teimgr.client import Client
from teimgr.errors import ValidationError
from teimgr.spec import LANE_KEY
from teimgr.wire.frames import HEADER, FrameType, Method, pack_header, unpack_header
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2

WORDS = ["a text", "fog", "harbour", "light", "rain", "boats"]
FEW = [f"boats {n} " + "fog " * 10 for n in range(30)]  # below 4,096 tokens together
MANY = [f"boats {n} " + "fog " * 40 for n in range(150)]  # above


class Lanes:
    """A daemon with one instance, a function for each interface, and the texts that were computed by lane."""

    def __init__(self, running: WarmDaemonProcess, client: Client, channels: dict[str, grpc.Channel]) -> None:
        self.client = client
        self._run = running.folder / "run"
        self._api = f"http://127.0.0.1:{running.api_port}"
        self._port = client.get("a").port
        self._channels = channels

    def texts(self) -> dict[str, int]:
        """Of the worker now; `/metrics` is up to a second old."""
        [path] = (name for name in self._run.glob("*.sock") if not name.name.startswith("mux"))
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(path))
            link.sendall(pack_header(0, FrameType.REQUEST, Method.STATS, 1))
            with link.makefile("rb") as answer:
                header = unpack_header(answer.read(HEADER.size))
                found = json.loads(answer.read(header.length)[header.context_bytes :])["lanes"]
        return {lane: counts["texts"] for lane, counts in found.items()}

    def ask(self, interface: str, texts: list[str], lane: str | None) -> None:
        """Raises AssertionError where the request is refused."""
        headers = {} if lane is None else {LANE_KEY: lane}
        if interface in ("v1", "asgi"):
            padding = {"asgi": 70_000, "v1": 0}[interface] * " "  # a larger body is served through ASGI
            body = {"model": "a", "input": texts, "user": padding}
            _post(f"{self._api}/v1/embeddings", body, headers)
        elif interface == "embed":
            _post(f"http://127.0.0.1:{self._port}/embed", {"inputs": texts}, headers)
        elif interface == "port":
            self._embed("port", "/tei.v1.Embed/Embed", tei_pb2.EmbedRequest(inputs=texts[0]), headers)
        elif interface == "mux":
            inner = tei_pb2.EmbedRequest(inputs=texts[0])
            request = multiplexer_pb2.EmbedRequest(target={"instance_name": "a"}, request=inner)
            self._embed("mux", "/tei_multiplexer.v1.TeiMultiplexer/Embed", request, headers)
        elif interface == "stream":
            inner = tei_pb2.EmbedRequest(inputs=texts[0])
            request = multiplexer_pb2.EmbedRequest(target={"instance_name": "a"}, request=inner)
            call = self._channels["mux"].stream_stream("/tei_multiplexer.v1.TeiMultiplexer/EmbedStream")
            assert len(list(call(iter([request.SerializeToString()]), metadata=[*headers.items()]))) == 1
        else:
            self._embed("mux", "/tei_multiplexer.v1.TeiMultiplexer/EmbedArrow", _arrow(texts), headers)

    def _embed(self, channel: str, path: str, request: object, headers: dict[str, str]) -> None:
        message = request.SerializeToString()  # type: ignore[attr-defined]
        assert self._channels[channel].unary_unary(path)(message, metadata=[*headers.items()])


ONE_TEXT = ("mux", "stream", "port", "v1", "embed")
SEVERAL = ("arrow", "v1", "asgi", "embed")


def _post(url: str, body: dict[str, object], headers: dict[str, str]) -> None:
    """Raises AssertionError, with status and body, for another status than 200."""
    headers = {"content-type": "application/json", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        urllib.request.urlopen(request, timeout=30).close()
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{error.code} {error.read().decode()}") from None


def _arrow(texts: list[str]) -> multiplexer_pb2.EmbedArrowRequest:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"text": texts})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return multiplexer_pb2.EmbedArrowRequest(target={"instance_name": "a"}, arrow_ipc=sink.getvalue().to_pybytes())


@pytest.fixture(scope="module")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lanes]:
    model = models.build("bert", tmp_path_factory.mktemp("model"))
    with (
        WarmDaemonProcess(health_check_interval_secs=60, max_client_batch_size=200) as running,
        running.client() as client,
    ):  # no self-tests between
        client.create("a", str(model))
        client.wait_until_running("a", deadline_s=60)
        ports = {"mux": running.grpc_port, "port": client.get("a").port}
        channels = {name: grpc.insecure_channel(f"127.0.0.1:{port}") for name, port in ports.items()}
        try:
            yield Lanes(running, client, channels)
        finally:
            for channel in channels.values():
                channel.close()


def moved(lanes: Lanes, interface: str, texts: list[str], lane: str | None) -> dict[str, int]:
    """How many texts each lane computed for one request."""
    before = lanes.texts()
    lanes.ask(interface, texts, lane)
    return {name: count - before[name] for name, count in lanes.texts().items()}


@pytest.mark.parametrize("interface", ONE_TEXT)
def test_a_single_text_is_interactive_unless_its_caller_chooses_bulk(lanes: Lanes, interface: str) -> None:
    assert moved(lanes, interface, ["fog"], None) == {"interactive": 1, "bulk": 0}
    assert moved(lanes, interface, ["rain"], "bulk") == {"interactive": 0, "bulk": 1}


@pytest.mark.parametrize("interface", ["v1", "embed"])
def test_several_texts_of_little_cost_are_interactive(lanes: Lanes, interface: str) -> None:
    assert moved(lanes, interface, FEW, None) == {"interactive": len(FEW), "bulk": 0}


@pytest.mark.parametrize("interface", SEVERAL)
def test_what_costs_much_is_bulk_unless_its_caller_chooses_interactive(lanes: Lanes, interface: str) -> None:
    count = len(MANY)
    assert moved(lanes, interface, MANY, None) == {"interactive": 0, "bulk": count}
    assert moved(lanes, interface, MANY, "interactive") == {"interactive": count, "bulk": 0}


def test_the_client_chooses_by_a_keyword(lanes: Lanes) -> None:
    before = lanes.texts()
    lanes.client.embed("fog", instance="a", lane="bulk")
    lanes.client.embed_arrow(WORDS, instance="a", lane="interactive")
    list(lanes.client.embed_stream(WORDS, instance="a", lane="bulk"))
    after = lanes.texts()

    assert {name: after[name] - before[name] for name in after} == {"interactive": len(WORDS), "bulk": len(WORDS) + 1}
    with pytest.raises(ValidationError, match="lane"):
        lanes.client.embed("fog", instance="a", lane="express")


@pytest.mark.parametrize("interface", ["mux", "stream", "port", "arrow"])
def test_another_word_is_an_invalid_argument_over_grpc(lanes: Lanes, interface: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        lanes.ask(interface, ["fog"], "express")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert LANE_KEY in caught.value.details()
    assert "express" in caught.value.details()


@pytest.mark.parametrize(("interface", "status"), [("v1", 400), ("asgi", 400), ("embed", 422)])
def test_another_word_is_refused_over_http(lanes: Lanes, interface: str, status: int) -> None:
    with pytest.raises(AssertionError, match=rf"^{status} .*{LANE_KEY}"):
        lanes.ask(interface, ["fog"], "express")
