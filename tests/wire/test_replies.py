"""Replies packed by hand are the bytes protobuf writes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from teimgr.errors import Code, TeimgrError, error_from_code
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.wire.frames import Timings, pack_error, split_timings, unpack_error
from teimgr.wire.replies import arrow_response, embed_all_response, embed_response, embed_sparse_response
from teimgr.wire.status import STATUS

uint32, uint64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
floats = st.floats(width=32)
some_timings = st.builds(Timings, uint32, uint32, uint64, uint64, uint64, uint64)


def metadata(timings: Timings) -> tei_pb2.Metadata:
    return tei_pb2.Metadata(
        compute_chars=timings.chars,
        compute_tokens=timings.tokens,
        total_time_ns=timings.total_ns,
        tokenization_time_ns=timings.tokenization_ns,
        queue_time_ns=timings.queue_ns,
        inference_time_ns=timings.inference_ns,
    )


@given(st.lists(floats, max_size=40), some_timings)
def test_embed_response_is_byte_identical_to_protobuf(values: list[float], timings: Timings) -> None:
    message = tei_pb2.EmbedResponse(embeddings=values, metadata=metadata(timings))

    assert embed_response(np.array(values, np.float32), timings) == message.SerializeToString()


@given(st.lists(st.tuples(uint32 | st.integers(0, 40_000), floats), max_size=40), some_timings)
def test_embed_sparse_response_is_byte_identical_to_protobuf(
    entries: list[tuple[int, float]], timings: Timings
) -> None:
    message = tei_pb2.EmbedSparseResponse(metadata=metadata(timings))
    for index, value in entries:
        message.sparse_embeddings.add(index=index, value=value)
    indices = np.array([index for index, _ in entries], np.uint32)
    values = np.array([value for _, value in entries], np.float32)

    assert embed_sparse_response(indices, values, timings) == message.SerializeToString()


@given(arrays(np.float32, st.tuples(st.integers(0, 9), st.integers(0, 40)), elements=st.floats(width=32)), some_timings)
def test_embed_all_response_is_byte_identical_to_protobuf(vectors: NDArray[np.float32], timings: Timings) -> None:
    message = tei_pb2.EmbedAllResponse(metadata=metadata(timings))
    for vector in vectors:
        message.token_embeddings.add(embeddings=vector.tolist())

    assert embed_all_response(vectors, timings) == message.SerializeToString()


def test_values_that_are_a_slice_of_others_are_packed_too() -> None:
    timings = Timings(0, 0, 0, 0, 0, 0)
    wide = np.arange(12, dtype=np.float32).reshape(3, 4)

    assert embed_all_response(wide[:, 1:3], timings) == embed_all_response(wide[:, 1:3].copy(), timings)
    assert embed_sparse_response(np.array([1, 2, 3], np.uint32), wide[:, 2], timings) == embed_sparse_response(
        np.array([1, 2, 3], np.uint32), wide[:, 2].copy(), timings
    )


@given(st.binary(min_size=1, max_size=300))
def test_arrow_response_is_byte_identical_to_protobuf(ipc: bytes) -> None:
    assert arrow_response(ipc) == multiplexer_pb2.EmbedArrowResponse(arrow_ipc=ipc).SerializeToString()


def test_timings_survive_the_frame() -> None:
    timings = Timings(1, 2, 3, 4, 5, 6)

    assert split_timings(timings.pack() + b"rest") == (timings, b"rest")


@pytest.mark.clause("M2.2-codes")
@pytest.mark.parametrize("code", list(Code), ids=lambda code: code.name)
def test_every_code_has_a_class_a_status_and_survives_an_error_frame(code: Code) -> None:
    error = unpack_error(pack_error(error_from_code(code, "what happened – ünïcode")))

    assert error.code is code
    assert error.message == "what happened – ünïcode"
    assert STATUS[code].http >= 400


def test_an_unknown_code_of_a_newer_peer_is_internal() -> None:
    assert error_from_code(250, "new").code is Code.INTERNAL_ERROR
    assert isinstance(unpack_error(b""), TeimgrError)
