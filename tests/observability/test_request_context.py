"""Request context: from headers, through frames, into log lines."""

from __future__ import annotations

import pytest

from teimgr.observability.request_context import CallStats, RequestContext, Trace, request_id_of

PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.mark.parametrize("sampled", [True, False])
def test_a_context_goes_through_a_frame_unchanged(sampled: bool) -> None:
    context = RequestContext("id-1", Trace(b"\xab" * 16, b"\xcd" * 8, sampled))
    there = RequestContext.unpack(context.pack())
    assert there.is_sampled is context.is_sampled is sampled
    assert (there.request_id, there.trace, there.log_fields()) == ("id-1", context.trace, context.log_fields())


def test_a_context_without_a_trace_has_an_id_alone() -> None:
    there = RequestContext.unpack(RequestContext("id-2").pack())
    assert (there.trace, there.is_sampled, there.log_fields()) == (None, False, {"request_id": "id-2"})


@pytest.mark.parametrize("size", [0, 1, 24])
def test_a_block_that_is_too_short_says_nothing(size: int) -> None:
    there = RequestContext.unpack(b"\xff" * size)
    assert (there.trace, there.is_sampled, there.request_id) == (None, False, "")


def test_later_versions_of_a_traceparent_are_read_as_far_as_they_are_known() -> None:
    assert Trace.parse(f"01{PARENT[2:]}-more") == Trace.parse(PARENT) == Trace(b"\xab" * 16, b"\xcd" * 8, True)


@pytest.mark.parametrize("given", ["", "has blanks", "a\nb", "é", "x" * 129])
def test_an_id_that_fits_no_header_is_replaced(given: str) -> None:
    ours = request_id_of({"x-request-id": given})
    assert ours != given
    assert ours != request_id_of({"x-request-id": given})


def test_stats_of_several_inferences_span_all_of_them() -> None:
    context = RequestContext("id")
    for began_ns, rows in ((100, 2), (50, 3)):
        context.add_stats(CallStats(began_ns, 60, 1, 2, 3, rows, 1, 10, 20))
    assert context.stats is not None
    assert context.stats[:2] == (50, 110)
    assert (context.stats.rows, context.stats.rows_failed, context.stats.tokens) == (5, 2, 20)
    assert CallStats.unpack(context.stats.pack()) == context.stats
