"""The autoscaling policy, over the scenarios of `bench autoscaler` and at its edges."""

from __future__ import annotations

import pytest
from bench.autoscaler import SCENARIOS, simulate

from teimgr.control.capacity.policy import Reading, Seen, Terms, decide


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_stays_within_one_replica_and_few_turns(name: str) -> None:
    scenario = SCENARIOS[name]
    for seed in range(2):
        run = simulate(scenario, seed)
        assert run.overshoot <= 1, (seed, run.reasons)
        assert max(run.replicas) <= scenario["most"], (seed, run.reasons)
        assert run.turns <= scenario["turns"], (seed, run.reasons)


def test_step_is_met_and_given_back() -> None:
    run = simulate(SCENARIOS["step"])
    assert run.replicas[80] == 3
    assert run.replicas[-1] == 1
    assert max(run.waiting_s[100:]) < 2.0  # what had queued until the replicas were ready is computed
    assert "s of work would wait > 2 s" in run.reasons[0][1]
    assert run.reasons[0][1].startswith("1 → ")
    assert "would have been enough for the last 120 s" in run.reasons[-1][1]


def test_replica_that_does_not_pay_is_taken_back_and_not_tried_again() -> None:
    run = simulate(SCENARIOS["one host"])
    ups = [reason for _, reason in run.reasons if reason.startswith("1 → 2")]
    assert len(ups) == 1
    assert "replica 2 does not pay on this host" in run.reasons[1][1]


def _readings(replicas: int, queued: float, count: int = 50) -> tuple[Seen, list[int]]:
    seen, wanted, terms = Seen(rate=100.0), [], Terms(min_replicas=1, max_replicas=4, down_delay_s=30)
    for at in range(count):
        seen, decision = decide(terms, seen, Reading(2.0 * at, replicas, queued, 100.0, 100.0, 1.0))
        wanted.append(decision.wanted)
    return seen, wanted


def test_no_replica_goes_before_the_delay_is_over() -> None:
    _, wanted = _readings(2, queued=0.0)
    assert wanted.index(1) in range(14, 18)


def test_replicas_go_at_uneven_readings_too() -> None:
    seen, decision, terms = Seen(rate=100.0), None, Terms(max_replicas=4, down_delay_s=4)
    for at in (0.0, 2.3, 4.7, 7.1):
        seen, decision = decide(terms, seen, Reading(at, 3, 0.0, 10.0, 10.0, 0.1))
    assert decision is not None
    assert decision.wanted == 1


def test_the_only_replica_that_holds_a_model_never_goes() -> None:  # 14 of the published failures
    """Only residence unloads it, which sees the calls that are under way and those that wait."""
    seen, terms = Seen(rate=100.0), Terms(min_replicas=0, max_replicas=4, down_delay_s=4)
    for at in range(200):
        seen, decision = decide(terms, seen, Reading(2.0 * at, 1, 0.0, 0.0, 0.0, 0.0))
        assert decision.wanted == 1


def test_no_replica_goes_while_work_waits() -> None:
    _, wanted = _readings(2, queued=150.0)  # 0.75 s: above the lower threshold, below the upper one
    assert set(wanted) == {2}


def test_limits_hold_at_once() -> None:
    reading = Reading(0.0, 1, 0, 0, 0, 0)
    assert decide(Terms(min_replicas=2, max_replicas=3), Seen(), reading)[1].wanted == 2
    assert decide(Terms(max_replicas=3), Seen(), Reading(0.0, 5, 0, 0, 0, 0))[1].reason == "5 → 3: max_replicas is 3"


def test_thresholds_that_cross_are_refused() -> None:
    with pytest.raises(ValueError, match="down_wait_s must be below up_wait_s"):
        Terms(up_wait_s=1.0, down_wait_s=1.0)
