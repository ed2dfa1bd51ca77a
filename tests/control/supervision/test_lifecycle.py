"""The state machine, as lists of events and effects."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teimgr.control.launch.process_handle import Exit, ExitReport
from teimgr.control.supervision.lifecycle import (
    FAILED_EXIT_LIMIT_S,
    TRANSITIONS,
    Backoff,
    Command,
    CommandRefused,
    Effect,
    Event,
    Exited,
    FailureCause,
    LoadBegan,
    Observation,
    Phase,
    ProbeFailed,
    ProbeOk,
    ReplicaState,
    RestartPolicy,
    Tick,
    WorkerDownloading,
    WorkerDraining,
    WorkerFailed,
    WorkerHealth,
    WorkerReady,
    explain,
    is_routable,
)
from teimgr.errors import Code
from teimgr.spec import State

POLICY = RestartPolicy(
    startup_timeout_s=60, max_probe_failures=3, backoff=Backoff(first_s=1.0, max_s=10.0, stable_after_s=30.0)
)
KILLED = Exited(Exit(-9))
HOPELESS = Exited(Exit(3, ExitReport(11, "no such model", permanent=True)))


def after(*events: Event | tuple[float, Event], life: ReplicaState | None = None) -> tuple[ReplicaState, list[Effect]]:
    """The life after the events, each at its time or at 0, and the effects of the last one."""
    life, effects = life or ReplicaState(policy=POLICY), []
    for item in events:
        now, event = item if isinstance(item, tuple) else (0.0, item)
        life, effects = life.step(event, now)
    return life, effects


RUNNING, _ = after(Command.START, LoadBegan(), WorkerReady())


# Start, stop, restart, delete


def test_start_launches_a_worker_and_sets_the_deadline() -> None:
    life, effects = after((5.0, Command.START))

    assert effects == [Effect.LAUNCH]
    assert (life.phase, life.phase.state, life.wake_at) == (Phase.STARTING, State.STARTING, None)
    assert after((7.0, LoadBegan()), life=life)[0].wake_at == 67.0, "the time begins with the load slot"


@pytest.mark.clause("M5.3-ready")
def test_a_ready_worker_runs_and_has_no_deadline() -> None:
    assert (RUNNING.phase, RUNNING.wake_at, RUNNING.restarts) == (Phase.RUNNING, None, 0)


def test_an_adopted_worker_is_not_launched() -> None:
    life, effects = after(Command.ADOPT)

    assert (life.phase, effects) == (Phase.STARTING, [])


def test_stop_terminates_and_ends_stopped_whatever_the_exit_says() -> None:
    stopping, effects = after(Command.STOP, life=RUNNING)
    stopped, none = after(HOPELESS, life=stopping)

    assert (stopping.phase, effects) == (Phase.STOPPING, [Effect.TERMINATE])
    assert (stopped.phase, stopped.reason, none) == (Phase.STOPPED, None, [])


def test_a_stop_while_waiting_for_the_next_try_ends_the_tries() -> None:
    waiting, _ = after(KILLED, life=RUNNING)
    stopped, effects = after(Command.STOP, life=waiting)

    assert (stopped.phase, stopped.wake_at, effects) == (Phase.STOPPED, None, [])


def test_restart_terminates_then_launches_at_once() -> None:
    replacing, effects = after(Command.RESTART, life=RUNNING)
    starting, launch = after(KILLED, life=replacing)

    assert (replacing.phase.state, effects) == (State.STARTING, [Effect.TERMINATE])
    assert (starting.phase, launch, starting.restarts) == (Phase.STARTING, [Effect.LAUNCH], 1)


def test_a_start_during_a_stop_brings_a_new_worker_after_the_old_one() -> None:
    life, effects = after(Command.STOP, Command.START, life=RUNNING)
    assert (life.phase, effects) == (Phase.REPLACING, [])

    life, effects = after(KILLED, life=life)
    assert (life.phase, effects) == (Phase.STARTING, [Effect.LAUNCH])


def test_a_stop_during_a_restart_wins() -> None:
    life, _ = after(Command.RESTART, Command.STOP, KILLED, life=RUNNING)

    assert life.phase is Phase.STOPPED


def test_delete_is_done_when_the_process_is_gone() -> None:
    life, effects = after(Command.DELETE, life=RUNNING)
    assert (life.phase, effects) == (Phase.STOPPING, [Effect.TERMINATE])

    life, effects = after(KILLED, life=life)
    assert (life.phase, effects) == (Phase.STOPPED, [Effect.END])


def test_delete_without_a_process_is_done_at_once() -> None:
    assert after(Command.DELETE)[1] == [Effect.END]


def test_a_running_worker_that_retires_hands_over_first() -> None:
    life, effects = after(Command.RETIRE, life=RUNNING)
    assert (life.phase, effects) == (Phase.STOPPING, [Effect.HAND_OVER])

    life, effects = after(KILLED, life=life)
    assert (life.phase, effects) == (Phase.STOPPED, [Effect.END])


def test_what_does_not_serve_retires_at_once() -> None:
    assert after(Command.START, Command.RETIRE)[1] == [Effect.TERMINATE]
    assert after(Command.START, HOPELESS, Command.RETIRE)[1] == [Effect.END]


@pytest.mark.parametrize("command", [Command.START, Command.STOP, Command.RESTART, Command.ADOPT])
def test_nothing_brings_a_deleted_instance_back(command: Command) -> None:
    life, _ = after(Command.DELETE, life=RUNNING)

    with pytest.raises(CommandRefused):
        life.step(command, 0.0)


# Crashes and restarts


def test_a_stable_worker_that_crashes_is_replaced_at_once() -> None:
    life, effects = after((100.0, KILLED), life=RUNNING)
    assert (life.phase, life.phase.state, life.wake_at, effects) == (Phase.WAITING, State.STARTING, 100.0, [])

    life, effects = after((100.0, Tick()), life=life)
    assert (effects, life.restarts, life.reason) == ([Effect.LAUNCH], 1, "the worker was killed by SIGKILL")


@pytest.mark.clause("M5.4-backoff")
def test_crashes_in_a_row_wait_twice_as_long_each_time_up_to_the_cap() -> None:
    life, delays = RUNNING, []
    for _ in range(6):
        life, _ = after(KILLED, life=life)
        assert life.wake_at is not None
        delays.append(life.wake_at)
        life, _ = after((life.wake_at, Tick()), life=life)

    assert delays == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_jitter_shortens_a_wait_by_up_to_a_half() -> None:
    life, _ = after(Exited(Exit(-9), jitter=1.0), life=RUNNING)

    assert life.wake_at == 0.5


def test_a_stable_run_forgives_earlier_crashes() -> None:
    life, _ = after(KILLED, (1.0, Tick()), (1.0, KILLED), (3.0, Tick()), (3.0, WorkerReady()), life=RUNNING)
    assert life.streak == 2

    life, _ = after((33.0, KILLED), life=life)
    assert (life.streak, life.wake_at) == (0, 33.0)


def test_failures_in_a_row_number_the_starts_and_become_an_alarm() -> None:
    life, _ = after(Command.START, LoadBegan(), KILLED)
    assert (life.attempt, life.next_attempt_s(0.5)) == (2, 0.5)
    for failures in range(2, 6):
        assert not life.is_failing(life.wake_at or 0.0), failures
        life, _ = after((life.wake_at or 0.0, Tick()), life=life)
        assert (life.attempt, life.next_attempt_s(0.0)) == (failures, None)
        life, _ = after((life.wake_at or 10.0 * failures, KILLED), life=life)
    assert life.is_failing(50.0)
    assert life.last_failure == "the worker was killed by SIGKILL"

    running, _ = after((51.0, Tick()), (60.0, WorkerReady()), life=replace(life, wake_at=51.0))
    assert running.attempt is None
    assert running.is_failing(89.0), "it may end again at once"
    assert not running.is_failing(90.0)
    assert not after(Command.RESTART, life=life)[0].is_failing(50.0), "someone has looked at it"


def test_few_failures_are_an_alarm_once_they_last_for_the_time_of_a_start() -> None:
    life, _ = after(Command.START, LoadBegan(), (10.0, KILLED), (11.0, Tick()))

    assert not life.is_failing(10.0 + POLICY.startup_timeout_s - 0.1)
    assert life.is_failing(10.0 + POLICY.startup_timeout_s)


def test_a_tick_before_its_time_changes_nothing() -> None:
    waiting, _ = after(KILLED, life=RUNNING)

    assert after((0.9, Tick()), life=waiting) == (waiting, [])


def test_a_permanent_failure_is_not_tried_again() -> None:
    life, effects = after(Command.START, HOPELESS)

    assert (life.phase, life.reason, life.wake_at, effects) == (Phase.FAILED, "no such model", None, [])


def test_a_user_may_start_a_failed_instance_again() -> None:
    life, effects = after(Command.START, HOPELESS, Command.START)

    assert (life.phase, life.reason, effects) == (Phase.STARTING, None, [Effect.LAUNCH])


def test_words_on_the_link_count_when_the_exit_has_none() -> None:
    life, _ = after(Command.START, WorkerFailed(FailureCause("gated", permanent=True)))
    assert (life.phase, life.wake_at) == (Phase.STARTING, FAILED_EXIT_LIMIT_S)

    life, _ = after(KILLED, life=life)
    assert (life.phase, life.reason) == (Phase.FAILED, "gated")


def test_a_failed_worker_that_does_not_exit_is_killed() -> None:
    life, effects = after(Command.START, WorkerFailed(FailureCause("gated")), (FAILED_EXIT_LIMIT_S, Tick()))

    assert effects == [Effect.KILL]
    assert after(KILLED, life=life)[0].phase is Phase.WAITING


def test_a_worker_that_is_not_ready_in_time_is_killed_and_the_instance_has_failed() -> None:
    life, effects = after(Command.START, LoadBegan(), (60.0, Tick()))
    assert effects == [Effect.KILL]

    life, _ = after((60.1, KILLED), life=life)
    assert (life.phase, life.reason) == (Phase.FAILED, "not ready within 60 s")


@pytest.mark.parametrize(
    "failure",
    [
        (LoadBegan(), (60.0, Tick()), (60.0, KILLED)),
        ((60.0, Exited(Exit(3, ExitReport(Code.OUT_OF_DEVICE_MEMORY, "no memory", permanent=True)))),),
        ((60.0, Exited(Exit(-9, ExitReport(Code.KILLED_FOR_MEMORY, "the cgroup allows", permanent=False)))),),
    ],
)
def test_a_failure_that_may_pass_is_tried_again_after_ever_longer_pauses(failure: tuple[Any, ...]) -> None:
    life, effects = after(Command.START, *failure)
    assert (life.phase, life.phase.state, life.wake_at, effects) == (Phase.FAILED, State.FAILED, 90.0, [])

    life, effects = after((90.0, Tick()), life=life)
    assert (life.phase, life.restarts, effects) == (Phase.STARTING, 1, [Effect.LAUNCH])

    life, _ = after((100.0, Exited(Exit(3, ExitReport(Code.OUT_OF_DEVICE_MEMORY, "x", permanent=True)))), life=life)
    assert (life.phase, life.wake_at) == (Phase.FAILED, 160.0)
    assert after(Command.STOP, life=life)[0].wake_at is None


UNREACHABLE = Exited(Exit(1, ExitReport(Code.BACKEND_UNAVAILABLE, "the hub cannot be reached", permanent=False)))


def test_a_model_on_demand_that_does_not_start_has_failed_and_the_next_call_tries_again() -> None:
    """It was started again and again, without end and with nobody calling, and its calls waited for their deadlines."""
    life, _ = after(Command.START, life=ReplicaState(policy=replace(POLICY, for_calls=True)))
    for at, then in ((1.0, 2.0), (5.0, 7.0)):
        life, _ = after((at, UNREACHABLE), life=life)
        assert (life.phase, life.wake_at) == (Phase.WAITING, then)
        life, _ = after((then, Tick()), life=life)
    life, _ = after((10.0, UNREACHABLE), life=life)
    assert (life.phase, life.reason, life.wake_at) == (Phase.FAILED, "the hub cannot be reached", 40.0)
    assert (life.attempt, life.next_attempt_s(11.0)) == (None, None)

    rested, effects = after((40.0, Tick()), life=life)
    assert (rested.phase, rested.reason, rested.wake_at, effects) == (Phase.STOPPED, life.reason, None, [])
    assert after((99.0, Command.START), life=rested)[1] == [Effect.LAUNCH]
    assert after((40.0, Tick(others_serve=True)), life=life)[1] == [Effect.LAUNCH], "the fleet would stay one short"


def test_a_replica_beside_one_that_serves_calls_is_tried_again_at_growing_intervals() -> None:
    """It was started every half minute without end, and took a load slot and a device's memory each time."""
    life, _ = after(Command.START, life=ReplicaState(policy=replace(POLICY, for_calls=True)))
    now, starts, alone = 0.0, list[float](), set[Phase]()
    while now < 3600:
        if life.phase is Phase.STARTING:
            life, _ = after((now, UNREACHABLE), life=life)
        assert life.wake_at is not None
        assert life.wake_at <= now + 30, "its calls would be refused for longer once no other one serves"
        now = life.wake_at
        alone.add(after((now, Tick()), life=life)[0].phase)
        life, effects = after((now, Tick(others_serve=True)), life=life)
        starts += [now] * (effects == [Effect.LAUNCH])
    assert Phase.STOPPED in alone
    pauses = [after_it - before for before, after_it in pairwise(starts)]
    assert pauses == sorted(pauses)
    assert pauses[2] == 60
    assert pauses[-1] == 600


def test_a_model_on_demand_whose_starts_take_long_has_failed_after_the_time_of_one() -> None:
    life, _ = after(
        Command.START, (30.0, UNREACHABLE), (31.0, Tick()), life=ReplicaState(policy=replace(POLICY, for_calls=True))
    )
    assert after((89.0, UNREACHABLE), life=life)[0].phase is Phase.WAITING
    assert after((90.0, UNREACHABLE), life=life)[0].phase is Phase.FAILED


@pytest.mark.parametrize(
    "ended",
    [
        Exited(Exit(-9, ExitReport(Code.KILLED_FOR_MEMORY, "killed by the kernel", permanent=False))),
        Exited(Exit(3, ExitReport(Code.OUT_OF_DEVICE_MEMORY, "no memory", permanent=True))),
    ],
)
def test_an_end_for_memory_after_days_of_service_has_nothing_to_do_with_the_one_before(ended: Exited) -> None:
    """Kills weeks apart were one row of failures: ever longer pauses, and an alarm with each start.

    That of a full device was one for good.
    """
    day = 86400.0
    life, _ = after(Command.START, WorkerReady())
    for number in range(1, 4):
        at = number * 10 * day
        life, _ = after((at, ended), life=life)
        assert (life.phase, life.streak, life.wake_at) == (Phase.WAITING, 0, at)
        life, effects = after((at, Tick()), life=life)
        assert (effects, life.is_failing(at + 1)) == ([Effect.LAUNCH], False)
        life, _ = after((at + 1, WorkerReady()), life=life)
    life, _ = after((at + 2, ended), life=life)  # it has served for a second
    assert (life.phase, life.wake_at) == (Phase.FAILED, at + 32)


def test_the_time_of_a_download_is_not_that_of_the_start() -> None:
    life, effects = after(Command.START, LoadBegan(), (59.0, WorkerDownloading()), (100.0, Tick()))
    assert (life.phase, effects) == (Phase.STARTING, [])

    assert after((119.0, Tick()), life=life)[1] == [Effect.KILL]


def test_a_worker_that_drains_by_itself_leaves_the_directory_and_is_replaced() -> None:
    life, effects = after(WorkerDraining(), life=RUNNING)
    assert (life.phase, effects) == (Phase.REPLACING, [Effect.TERMINATE])

    life, _ = after((50.0, Exited(Exit(0))), life=life)
    assert (life.phase, life.wake_at) == (Phase.WAITING, 50.0)


# Probes


def test_a_proof_makes_a_starting_worker_run() -> None:
    assert after(Command.START, ProbeOk())[0].phase is Phase.RUNNING


@pytest.mark.clause("M5.4-restart")
def test_probes_that_fail_in_a_row_kill_and_replace() -> None:
    life, effects = after(ProbeFailed("x"), ProbeFailed("x"), life=RUNNING)
    assert (life.phase, life.probe_failures, effects) == (Phase.RUNNING, 2, [])

    life, effects = after(ProbeFailed("no answer"), life=life)
    assert (life.phase, effects) == (Phase.REPLACING, [Effect.KILL])
    assert life.reason == "3 health probes in a row failed: no answer"

    life, _ = after((40.0, KILLED), life=life)
    assert (life.phase, life.wake_at) == (Phase.WAITING, 40.0)


@pytest.mark.clause("M5.4-restart")
def test_one_good_probe_clears_the_count() -> None:
    life, _ = after(ProbeFailed("x"), ProbeFailed("x"), ProbeOk(), ProbeFailed("x"), life=RUNNING)

    assert (life.phase, life.probe_failures) == (Phase.RUNNING, 1)


def test_a_missed_probe_raises_a_doubt_and_a_second_or_a_failed_self_test_confirms_it() -> None:
    missed = ProbeFailed("late", missed=True)

    assert after(missed, life=RUNNING)[0].health is WorkerHealth.DOUBTFUL
    assert after(missed, missed, life=RUNNING)[0].health is WorkerHealth.BAD
    assert after(ProbeFailed("NaN"), life=RUNNING)[0].health is WorkerHealth.BAD
    assert after(missed, ProbeFailed("NaN"), life=RUNNING)[0].health is WorkerHealth.BAD
    assert after(ProbeFailed("NaN"), missed, life=RUNNING)[0].health is WorkerHealth.BAD
    assert after(missed, ProbeOk(), missed, life=RUNNING)[0].health is WorkerHealth.DOUBTFUL


def test_a_doubtful_worker_gets_calls_only_where_no_sibling_is_in_good_health() -> None:
    good, doubtful, bad = WorkerHealth

    assert is_routable(good, [good, bad])
    assert not is_routable(doubtful, [doubtful, good, bad])
    assert is_routable(doubtful, [doubtful, doubtful, bad])
    assert is_routable(doubtful, [doubtful])
    assert not is_routable(bad, [bad])


@pytest.mark.clause("M5.4-zero")
def test_zero_allowed_failures_means_that_probes_never_restart() -> None:
    life, _ = after(Command.START, WorkerReady(), life=ReplicaState(policy=RestartPolicy(max_probe_failures=0)))
    life, effects = after(*[ProbeFailed("x")] * 50, life=life)

    assert (life.phase, life.probe_failures, effects) == (Phase.RUNNING, 50, [])


# The table


@pytest.mark.clause("M5.1-states")
def test_every_event_has_a_cell_for_every_phase() -> None:
    assert set(TRANSITIONS) == {each.value for each in Command} | {kind.__name__ for kind in Observation.__args__}
    assert all(set(row) == set(Phase) for row in TRANSITIONS.values())


_COMMANDS: st.SearchStrategy[Event] = st.sampled_from(
    [Command.START, Command.STOP, Command.RESTART, Command.DELETE, Command.RETIRE, Command.ADOPT]
)
_OBSERVATIONS: st.SearchStrategy[Event] = st.sampled_from(
    [
        LoadBegan(),
        WorkerReady(),
        WorkerFailed(FailureCause("x")),
        WorkerFailed(FailureCause("x", may_pass=True)),
        WorkerFailed(FailureCause("x", permanent=True)),
        WorkerDownloading(),
        WorkerDraining(),
        ProbeOk(),
        ProbeFailed("x"),
        ProbeFailed("x", missed=True),
        KILLED,
        HOPELESS,
        Exited(Exit(None)),
        Tick(),
    ]
)


@given(st.lists(st.tuples(st.floats(0, 40), _COMMANDS | _OBSERVATIONS), max_size=60))
def test_any_history_keeps_processes_and_effects_in_step(history: list[tuple[float, Event]]) -> None:
    """At most one process at a time; none ends without a request; every wait has an end."""
    life, now, alive, told, waits = ReplicaState(policy=POLICY), 0.0, False, False, False
    for pause, event in history:
        now += pause
        if isinstance(event, Exited) and not alive:
            continue
        if event is Command.ADOPT and alive:
            continue
        try:
            life, effects = life.step(event, now)
        except CommandRefused:
            continue
        alive = (alive and not isinstance(event, Exited)) or event is Command.ADOPT
        told = told and alive
        for effect in effects:
            if effect is Effect.LAUNCH:
                assert not alive
                alive, told, waits = True, False, True  # for its load slot, which has no limit
            elif effect is Effect.END:
                assert not alive
                return
            else:
                assert alive
                told = True

        assert alive == (life.phase in (Phase.STARTING, Phase.RUNNING, Phase.REPLACING, Phase.STOPPING))
        assert told or not life.is_ending
        waits = waits and not isinstance(event, LoadBegan)
        assert (life.wake_at is not None) or told or waits or life.phase not in (Phase.STARTING, Phase.WAITING)


@pytest.mark.parametrize(
    ("exit", "message"),
    [
        (Exit(1, None, "boom"), "the worker exited with status 1; its log ends: boom"),
        (Exit(-11), "the worker was killed by SIGSEGV"),
        (Exit(-40), "the worker was killed by signal 40"),
        (Exit(None), "the worker ended"),
        (Exit(3, ExitReport(6, "bad flag", True), "noise"), "bad flag"),
    ],
)
def test_an_exit_is_explained_by_words_then_status_then_log(exit: Exit, message: str) -> None:
    assert explain(exit).message == message


def test_a_worker_that_works_without_an_answer_is_kept_for_a_minute() -> None:
    busy = ProbeFailed("no answer", missed=True, works=True)
    life, effects = RUNNING.step(busy, 100.0)
    for second in range(1, 60):
        life, effects = life.step(busy, 100.0 + second)
        assert (life.phase, life.health, effects) == (Phase.RUNNING, WorkerHealth.DOUBTFUL, [])

    recovered, _ = life.step(ProbeOk(), 160.0)
    assert (recovered.health, recovered.working_since) == (WorkerHealth.GOOD, None)
    life, effects = life.step(busy, 160.0)
    assert effects == [Effect.KILL]
    assert life.reason == "busy without an answer for 60 s: no answer"


def test_missed_probes_of_an_idle_worker_count_beside_those_of_a_busy_one() -> None:
    busy, idle = ProbeFailed("x", missed=True, works=True), ProbeFailed("x", missed=True)
    life, effects = after(idle, busy, idle, busy, life=RUNNING)
    assert (life.phase, effects) == (Phase.RUNNING, [])
    assert after(idle, life=life)[1] == [Effect.KILL]
