"""The bound falls with a batch that did not fit, and rises again with time."""

from __future__ import annotations

from teimgr.engine.token_cap import TokenCap


def test_a_batch_that_did_not_fit_halves_the_bound_until_a_minute_has_passed() -> None:
    now = 0.0
    cap = TokenCap(16384, lambda: now)
    cap.did_not_fit(10_000)
    assert cap.tokens == 5000

    now = 59.0
    cap.did_not_fit(4000)
    assert cap.tokens == 2000
    now = 118.0
    assert cap.tokens == 2000
    now = 119.0
    assert (cap.tokens, cap.tokens) == (4000, 4000)
    now = 400.0
    assert [cap.tokens for _ in range(3)] == [8000, 8000, 8000]
    now = 10_000.0
    assert cap.tokens == 16000
    now = 20_000.0
    assert cap.tokens == 16384


def test_small_batches_leave_room_for_a_text() -> None:
    cap = TokenCap(16384, lambda: 0.0)
    cap.did_not_fit(20)

    assert cap.tokens == 256
    assert TokenCap(100, lambda: 0.0).tokens == 100
