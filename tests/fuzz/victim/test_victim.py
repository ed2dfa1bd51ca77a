"""A short run with a second client, the same cases every time; `dev.py soak fuzz --victim` is the long one."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from itertools import islice

import pytest
from bench.contest import Child, child

from tests.fuzz.victim.attack import Attack, Strike
from tests.fuzz.victim.command import attacks, plan
from tests.fuzz.victim.target import Target, running
from tests.fuzz.victim.trial import Trial, own_ms
from tests.support.daemon_process import WarmDaemonProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

KIB = 1024
# What held up everybody for seconds once, or ended a worker, each at a size that showed it.
CASES = (
    ("json: broken, quotes unended", 256 * KIB),
    ("json: odd, lists [0]", 4096 * KIB),
    ("protobuf: unknown numbers", 8192 * KIB),
    ("text: dots, instance port", 1900 * KIB),
    ("text: Chinese, mux", 3072 * KIB),
    ("text: base64, reranker", 4096 * KIB),
    ("arrow: many columns", 3072 * KIB),
    ("arrow: dictionary of one long text, LZ4", 256 * KIB),
    ("http1: trailers, REST", 4096 * KIB),
    ("http1: pipelined requests, instance port", 4096 * KIB),
    ("http2: SETTINGS, long, mux", 4096 * KIB),
    ("http2: header blocks, Huffman, REST", 4096 * KIB),
)
# One process at a time may be late on a machine that runs other tests; what these did took whole seconds.
FLOOR_MS = 2000.0


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with running(WarmDaemonProcess) as found:
        yield found


@pytest.fixture(scope="module")
def second(target: Target) -> Iterator[Child]:
    with child(target.second_client(5.0)) as found:
        yield found


async def test_a_second_client_does_not_feel_attacks_and_no_process_is_harmed(target: Target, second: Child) -> None:
    known = {each.title: each for each in attacks()}
    trial = Trial(target, second, FLOOR_MS)
    await trial.quiet(1.0)

    verdicts = {title: await trial.attempt(known[title], 1, size) for title, size in CASES}

    broken = {title: verdict.broken for title, verdict in verdicts.items() if verdict.broken}
    assert not broken, "\n".join(f"{title}: {each}" for title, found in broken.items() for each in found)
    assert all(verdict.calls >= 10 for verdict in verdicts.values())  # it was there to feel something


async def test_a_daemon_that_stands_still_is_a_finding_with_its_reproducer(target: Target, second: Child) -> None:
    process = target.daemon.process
    assert process is not None

    def stopped(target: Target, chance: random.Random, size: int) -> Strike:
        async def strike() -> str:
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(size / 1e3)
            process.send_signal(signal.SIGCONT)
            return "stopped"

        return strike

    trial = Trial(target, second, 500.0)
    await trial.quiet(1.0)

    verdict = await trial.judge(Attack("test", "stopped", stopped, least=1000, most=2000, unit="ms"), 7, 2000)

    assert any(each.startswith("slow") for each in verdict.broken), verdict
    (finding,) = trial.course.findings
    assert finding.reproducer == "--attack 'test: stopped' --seed 7 --size 1000"


def test_the_plan_of_a_seed_is_always_the_same_and_has_every_attack_at_its_limit() -> None:
    known = attacks()

    first, again = (list(islice(plan(known, 3), 2 * len(known))) for _ in range(2))

    assert first == again
    grown = {attack.title for attack, _, sizes in first if attack and sizes[-1] == attack.most}
    assert grown == {attack.title for attack in known}


def test_the_second_client_takes_off_what_it_was_late_itself() -> None:
    assert own_ms([(1.0, 500.0), (9.0, 100.0)], due=1.2, latency_ms=1000.0) == pytest.approx(300.0)
