"""The messages of a rerank stream become one message, byte for byte as protobuf would write it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teimgr.errors import InvalidInput, TooLarge
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.pb.teimgr.v1 import frames_pb2
from teimgr.wire import rerank_stream
from teimgr.wire.frames import Flag
from teimgr.wire.rerank_stream import PairCollector


@given(st.lists(st.text(max_size=300), min_size=1, max_size=20))
def test_it_is_what_protobuf_writes(texts: list[str]) -> None:
    requests = [tei_pb2.RerankStreamRequest(query="q", text=text, truncate=True) for text in texts]
    collected = PairCollector(1 << 20)

    for request in requests:
        collected.add(request.SerializeToString())

    assert collected.payload() == frames_pb2.RerankPairs(requests=requests).SerializeToString()
    assert collected.flags == (Flag.WAIT | Flag.BULK if len(texts) > 4 else Flag.WAIT)


def test_it_may_fill_the_limit_and_not_a_byte_more() -> None:
    collected = PairCollector(20)
    collected.add(b"x" * 8)
    collected.add(memoryview(b"x" * 8))
    assert len(collected.payload()) == 20

    with pytest.raises(TooLarge, match=r"\(22 vs\. 20 bytes\)"):
        collected.add(b"")


def test_pairs_are_bounded_by_number_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rerank_stream, "MAX_PAIRS", 2)
    collected = PairCollector(1000)
    collected.add(b"")
    collected.add(b"")

    with pytest.raises(TooLarge, match=r"\(3 vs\. 2 messages\)"):
        collected.add(b"")


def test_no_request_is_invalid() -> None:
    with pytest.raises(InvalidInput, match="Missing rerank request"):
        PairCollector(10).payload()
