"""Replies packed by hand are the bytes protobuf writes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teimgr.errors import Code, TeimgrError, error_from_code
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.wire.frames import Timings, pack_error, split_timings, unpack_error
from teimgr.wire.replies import arrow_response, embed_response
from teimgr.wire.status import STATUS

uint32, uint64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@given(st.lists(st.floats(width=32), max_size=40), st.builds(Timings, uint32, uint32, uint64, uint64, uint64, uint64))
def test_embed_response_is_byte_identical_to_protobuf(values: list[float], timings: Timings) -> None:
    message = tei_pb2.EmbedResponse(
        embeddings=values,
        metadata=tei_pb2.Metadata(
            compute_chars=timings.chars,
            compute_tokens=timings.tokens,
            total_time_ns=timings.total_ns,
            tokenization_time_ns=timings.tokenization_ns,
            queue_time_ns=timings.queue_ns,
            inference_time_ns=timings.inference_ns,
        ),
    )

    assert embed_response(np.array(values, np.float32), timings) == message.SerializeToString()


@given(st.binary(min_size=1, max_size=300))
def test_arrow_response_is_byte_identical_to_protobuf(ipc: bytes) -> None:
    assert arrow_response(ipc) == multiplexer_pb2.EmbedArrowResponse(arrow_ipc=ipc).SerializeToString()


def test_timings_survive_the_frame() -> None:
    timings = Timings(1, 2, 3, 4, 5, 6)

    assert split_timings(timings.pack() + b"rest") == (timings, b"rest")


@pytest.mark.parametrize("code", list(Code), ids=lambda code: code.name)
def test_every_code_has_a_class_a_status_and_survives_an_error_frame(code: Code) -> None:
    error = unpack_error(pack_error(error_from_code(code, "what happened – ünïcode")))

    assert error.code is code
    assert error.message == "what happened – ünïcode"
    assert STATUS[code].http >= 400


def test_an_unknown_code_of_a_newer_peer_is_internal() -> None:
    assert error_from_code(250, "new").code is Code.INTERNAL_ERROR
    assert isinstance(unpack_error(b""), TeimgrError)
