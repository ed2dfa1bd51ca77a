"""The element type of EmbedArrow's vectors by request metadata."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pyarrow as pa
import pytest
from tests.support.daemon_process import DaemonProcess

from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.wire.quantisation import Precision, converted

KEY = "x-teimgr-output-dtype"
TEXTS = ["fog", "The boats lie in the harbour.", "a b c"]


@pytest.fixture(scope="module")
def channel(daemon: DaemonProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{daemon.grpc_port}") as opened:
        yield opened


def request(**options: object) -> bytes:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"text": TEXTS})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    target = multiplexer_pb2.Target(instance_name="exact")
    values = {"normalize": True, **options}
    message = multiplexer_pb2.EmbedArrowRequest(target=target, arrow_ipc=sink.getvalue().to_pybytes(), **values)
    return bytes(message.SerializeToString())


def vectors(reply: bytes) -> np.ndarray:
    ipc = multiplexer_pb2.EmbedArrowResponse.FromString(reply).arrow_ipc
    column = pa.ipc.open_stream(ipc).read_all().column("embeddings").combine_chunks()
    return np.asarray(column.flatten()).reshape(len(TEXTS), -1)


def ask(channel: grpc.Channel, word: str | None, **options: object) -> np.ndarray:
    call = channel.unary_unary("/tei_multiplexer.v1.TeiMultiplexer/EmbedArrow")
    return vectors(call(request(**options), metadata=((KEY, word),) if word else ()))


@pytest.mark.parametrize("precision", list(Precision), ids=lambda precision: precision.value)
def test_vectors_come_in_the_type_of_the_metadata(channel: grpc.Channel, precision: Precision) -> None:
    expected = converted(ask(channel, None), precision)
    found = ask(channel, precision.value, output_dtype=multiplexer_pb2.OUTPUT_DTYPE_F16)

    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_every_answer_of_a_stream_has_that_type(channel: grpc.Channel) -> None:
    call = channel.stream_stream("/tei_multiplexer.v1.TeiMultiplexer/EmbedArrowStream")
    answers = list(call(iter([request()] * 3), metadata=((KEY, "ubinary"),)))

    assert [vectors(answer).dtype for answer in answers] == [np.dtype(np.uint8)] * 3


@pytest.mark.parametrize(("word", "options"), [("int4", {}), ("int8", {"normalize": False})])
def test_what_cannot_be_is_refused(channel: grpc.Channel, word: str, options: dict[str, object]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ask(channel, word, **options)

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert word in caught.value.details()
