"""Clauses of the gRPC contract that only a real daemon with a real model shows."""

from __future__ import annotations

import socket
from io import BytesIO

import grpc
import h2.config
import h2.connection
import h2.events
import numpy as np
import pyarrow as pa
import pytest

from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2
from tests.support.daemon_process import DaemonProcess

pytestmark = pytest.mark.slow
SERVICE = "/tei_multiplexer.v1.TeiMultiplexer/"
PINGS = 20
LONG = " ".join(f"{word} harbour" for word in ("rain", "fog", "wind", "snow", "sun") * 200)


def embed(channel: grpc.Channel, text: str, instance: str = "mini", **how: object) -> np.ndarray:
    call = channel.unary_unary(
        SERVICE + "Embed", mux_pb2.EmbedRequest.SerializeToString, tei_pb2.EmbedResponse.FromString
    )
    request = mux_pb2.EmbedRequest(target=mux_pb2.Target(instance_name=instance))
    request.request.CopyFrom(tei_pb2.EmbedRequest(inputs=text))
    return np.array(call(request, timeout=30, **how).embeddings, np.float32)


def arrow(channel: grpc.Channel, texts: list[str], instance: str = "mini", **options: object) -> pa.Table:
    """The answer to one batch of `texts`."""
    sink = BytesIO()
    batch = pa.record_batch({"text": pa.array(texts, pa.string())})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    call = channel.unary_unary(
        SERVICE + "EmbedArrow", mux_pb2.EmbedArrowRequest.SerializeToString, mux_pb2.EmbedArrowResponse.FromString
    )
    request = mux_pb2.EmbedArrowRequest(
        target=mux_pb2.Target(instance_name=instance), arrow_ipc=sink.getvalue(), **options
    )
    return pa.ipc.open_stream(call(request, timeout=30).arrow_ipc).read_all()


def vectors(table: pa.Table) -> np.ndarray:
    return np.array(table["embeddings"].to_pylist(), np.float32)


@pytest.mark.clause("M1.5-exact-names")
@pytest.mark.parametrize("name", ["Mini", "mini ", "min"])
def test_names_match_exactly(channel: grpc.Channel, name: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        embed(channel, "fog", name)

    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == f"Instance '{name}' not found"


@pytest.mark.clause("M1.8-normalize")
def test_absent_normalize_is_true_for_a_text_and_false_for_a_batch(channel: grpc.Channel) -> None:
    # The tiny model ends without a module that normalises; MiniLM ends with one.
    alone, batch = (
        embed(channel, "fog", "prompted"),
        arrow(channel, ["fog"], "prompted", output_dtype="OUTPUT_DTYPE_F32"),
    )
    asked = arrow(channel, ["fog"], "prompted", output_dtype="OUTPUT_DTYPE_F32", normalize=True)

    assert np.linalg.norm(alone) == pytest.approx(1, abs=1e-5)
    assert np.linalg.norm(vectors(batch)[0]) != pytest.approx(1, abs=1e-2)
    assert np.allclose(vectors(asked)[0], alone, atol=1e-5)


@pytest.mark.clause("M1.10-compression")
def test_a_compressed_message_is_unimplemented(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        embed(channel, "fog " * 100, compression=grpc.Compression.Gzip)

    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "gzip" in caught.value.details()


@pytest.mark.clause("M1.10-keepalive")
def test_a_client_may_ping_as_often_as_it_likes(served: DaemonProcess) -> None:
    with served.client() as client:
        ports = [served.grpc_port, client.get("mini").port]

    assert [answered_pings(port) for port in ports] == [PINGS, PINGS]


def answered_pings(port: int) -> int:
    """How many pings in a row, without any call, are answered before the server ends the connection."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    connection.initiate_connection()
    answered = 0
    with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
        for serial in range(PINGS):
            connection.ping(serial.to_bytes(8, "big"))
            link.sendall(connection.data_to_send())
            while answered <= serial:
                data = link.recv(65536)
                events = connection.receive_data(data)
                if not data or any(isinstance(event, h2.events.ConnectionTerminated) for event in events):
                    return answered
                answered += sum(isinstance(event, h2.events.PingAckReceived) for event in events)
    return answered


@pytest.mark.clause("M1.10-large-answers")
def test_an_answer_may_be_larger_than_four_mebibytes(served: DaemonProcess) -> None:
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}", options) as channel:
        table = arrow(channel, ["fog"] * 6_000, output_dtype="OUTPUT_DTYPE_F32")

    assert table["embeddings"].nbytes > 4 * 1024 * 1024


@pytest.mark.clause("M8-noop-sizes")
@pytest.mark.parametrize("rows", [0, 2, 100])
def test_noop_gives_a_row_of_zeros_for_each_text(channel: grpc.Channel, rows: int) -> None:
    table = arrow(channel, ["fog"] * rows, noop=True)

    assert table.num_rows == rows
    assert table.schema.field("embeddings").type.list_size == 384
    assert not np.any(vectors(table))


@pytest.mark.clause("M8-timeout-zero")
def test_without_a_limit_calls_are_answered(channel: grpc.Channel) -> None:
    assert embed(channel, LONG[:400]).shape == (384,)  # the daemon's grpc_request_timeout_secs is 0


@pytest.mark.clause("M8-streams")
def test_three_in_three_out_and_near_texts_score_higher(channel: grpc.Channel) -> None:
    call = channel.stream_stream(
        SERVICE + "EmbedStream", mux_pb2.EmbedRequest.SerializeToString, tei_pb2.EmbedResponse.FromString
    )
    texts = ["a cat sits on the mat", "a kitten lies on a rug", "the bank raised interest rates"]
    requests = (
        mux_pb2.EmbedRequest(
            target=mux_pb2.Target(instance_name="mini"), request=tei_pb2.EmbedRequest(inputs=text, normalize=True)
        )
        for text in texts
    )

    cat, kitten, bank = (np.array(answer.embeddings) for answer in call(requests, timeout=30))

    assert [np.linalg.norm(vector) for vector in (cat, kitten, bank)] == pytest.approx([1, 1, 1], abs=0.01)
    assert cat @ kitten > cat @ bank


@pytest.mark.clause("N-dtype")
def test_the_type_of_arrow_answers_is_the_requests_else_the_configurations(channel: grpc.Channel) -> None:
    told = {
        name: arrow(channel, ["fog"], **options).schema.field("embeddings").type.value_type
        for name, options in {
            "absent": {},
            "f32": {"output_dtype": "OUTPUT_DTYPE_F32"},
            "f16": {"output_dtype": "OUTPUT_DTYPE_F16"},
        }.items()
    }

    assert told == {"absent": pa.float16(), "f32": pa.float32(), "f16": pa.float16()}


@pytest.mark.clause("N-options")
def test_arrow_calls_have_prompt_dimensions_and_direction(channel: grpc.Channel) -> None:
    f32 = {"output_dtype": "OUTPUT_DTYPE_F32", "normalize": True}
    plain = vectors(arrow(channel, ["fog"], "prompted", **f32))
    prompted = vectors(arrow(channel, ["fog"], "prompted", prompt_name="query", **f32))
    by_hand = vectors(arrow(channel, ["query: fog"], "prompted", **f32))
    short = vectors(arrow(channel, ["fog"], "prompted", dimensions=8, **f32))
    ends = "rain " * 400 + "sun"
    right, left = (
        vectors(arrow(channel, [ends], truncate=True, truncation_direction=direction, **f32)) for direction in (0, 1)
    )

    assert np.allclose(prompted, by_hand, atol=1e-5)
    assert not np.allclose(prompted, plain, atol=1e-3)
    assert short.shape == (1, 8)
    assert np.allclose(short, plain[:, :8] / np.linalg.norm(plain[:, :8]), atol=1e-5)
    assert not np.allclose(left, right, atol=1e-3)
