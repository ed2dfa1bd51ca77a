"""A device that hangs may cost its answers, never the end of the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.engine.conftest import WAIT_S, Served

from teimgr.engine.batch import Encoded
from teimgr.engine.finisher import Failures, Finisher, HostRows, StartedBatch
from teimgr.engine.job import InferOptions, Job, Lane, Output
from teimgr.engine.model import Model
from teimgr.engine.queue import QueueEntry
from teimgr.errors import Unavailable


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What the hanging device waits for; set when the test is over, so that no thread outlives it for long."""
    event = threading.Event()
    yield event
    event.set()


def test_a_finisher_that_hangs_can_be_left(released: threading.Event) -> None:
    finisher = Finisher(lambda jobs: None, lambda reason: None)
    running = threading.Thread(target=finisher.run)
    running.start()

    def hang() -> dict[Output, HostRows]:
        released.wait()
        return {Output.DENSE: HostRows(np.zeros((1, 4), dtype=np.float32))}

    job = Job(["a"], InferOptions(), Lane.BULK)
    job.vectors = np.zeros((1, 4), dtype=np.float32)
    entry = QueueEntry(job, 0, Encoded(np.zeros(1, dtype=np.int32)))
    for _ in range(3):  # one is at hand, and two fill the queue
        finisher.put(StartedBatch([entry], hang, 0, 1))
    stuck = threading.Thread(target=finisher.put, args=(StartedBatch([entry], hang, 0, 1),))
    stuck.start()
    closing = threading.Thread(target=finisher.close, args=(0.1,))
    closing.start()
    for thread in (closing, stuck):
        thread.join(WAIT_S)
        assert not thread.is_alive()

    released.set()
    running.join(WAIT_S)
    assert not running.is_alive()
    finisher.put(Failures([(job, 0, Unavailable("late"))]))
    assert job.errors == {}


@pytest.mark.parametrize("where", ["launch", "copy"])
def test_an_engine_closes_whatever_its_device_does(
    where: str,
    model_dir: Callable[..., Path],
    serve: Callable[..., Served],
    monkeypatch: pytest.MonkeyPatch,
    released: threading.Event,
) -> None:
    served = serve(model_dir("bert"))
    hanging = threading.Event()

    def hang() -> dict[Output, HostRows]:
        hanging.set()
        released.wait()
        return {Output.DENSE: HostRows(np.zeros((1, 32), dtype=np.float32))}

    if where == "launch":
        monkeypatch.setattr(Model, "run", lambda self, batch, outputs: hang())
    else:
        monkeypatch.setattr("teimgr.engine.runner._to_host", lambda rows: hang)
    served.send(["rain"])
    assert hanging.wait(WAIT_S)
    for _ in range(6):
        served.send(["fog"])
    closing = threading.Thread(target=served.engine.close, args=(0.0,))
    closing.start()
    closing.join(WAIT_S)

    assert not closing.is_alive()
