"""The step of the engine with stand-ins for the device: what a failed batch leaves, and how far ahead it runs."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from teimgr.engine.batch import PackedBatch
from teimgr.engine.finisher import Finisher
from teimgr.engine.job import EmbedOptions, Job, Lane
from teimgr.engine.queue import BatchLimits, EntryQueue
from teimgr.engine.runner import Runner
from teimgr.engine.shelf import Entry
from teimgr.errors import InferenceFailed, OutOfDeviceMemory

WIDTH = 4
WAIT_S = 60.0


def job_of(texts: int) -> Job:
    job = Job(["x"] * texts, EmbedOptions(), Lane.BULK)
    job.vectors = np.zeros((texts, WIDTH), dtype=np.float32)
    return job


def entries_of(job: Job, length: int = 1) -> list[Entry]:
    return [Entry(job, row, np.zeros(length, dtype=np.int32)) for row in range(len(job.texts))]


class Scarce:
    """An embedder with room for so many texts, which counts what its failed forwards keep alive."""

    transformer = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self, error: type[Exception], room: int) -> None:
        self._error = error
        self._room = room
        self._activations: list[weakref.ref[torch.Tensor]] = []
        self.most_alive = 0

    def embed(self, batch: PackedBatch) -> torch.Tensor:
        self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self._activations))
        activation = torch.zeros(1000)
        self._activations.append(weakref.ref(activation))
        if batch.texts > self._room:
            raise self._error("CUDA out of memory")
        return torch.ones(batch.texts, WIDTH)


@pytest.mark.parametrize(
    ("error", "room", "outcome"),
    [
        (torch.OutOfMemoryError, 1, set()),
        (torch.OutOfMemoryError, 0, {OutOfDeviceMemory}),
        (RuntimeError, 0, {InferenceFailed}),
    ],
)
def test_a_batch_that_fails_leaves_nothing_in_memory_when_its_halves_run(
    error: type[Exception], room: int, outcome: set[type], caplog: pytest.LogCaptureFixture
) -> None:
    embedder = Scarce(error, room)
    job = job_of(8)
    serve(embedder, [job])

    assert embedder.most_alive == 0
    assert {type(e) for e in job.errors.values()} == outcome
    assert (len(job.errors) == 8) is bool(outcome)
    assert ("raise self._error" in caplog.text) is (error is RuntimeError)


def serve(embedder: Any, jobs: list[Job]) -> None:
    """Run the jobs to their end."""
    delivered: list[Job] = []
    finisher = Finisher(delivered.extend, pytest.fail)
    finishing = threading.Thread(target=finisher.run)
    finishing.start()
    queue = EntryQueue(BatchLimits(1000, 1000))
    for job in jobs:
        queue.put(entries_of(job))
    queue.close()
    Runner(embedder, queue, finisher, 1).run()
    finisher.close(WAIT_S)
    finishing.join(WAIT_S)
    assert delivered == jobs
