"""The step of the engine with stand-ins for the device: what a failed batch leaves, and how far ahead it runs."""

from __future__ import annotations

import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.support.card import StandInCard

from teimgr.engine.batching.batch import Encoded, PackedBatch
from teimgr.engine.batching.queue import BatchDraft, BatchLimits, EntryQueue, QueueEntry
from teimgr.engine.finisher import Finisher, HostRows
from teimgr.engine.heads import Rows
from teimgr.engine.heads.pooling import finish
from teimgr.engine.job import InferOptions, Job, Lane, Output
from teimgr.engine.known_results import keys_of
from teimgr.engine.runner import Runner
from teimgr.errors import InferenceFailed, OutOfDeviceMemory, Unavailable
from teimgr.spec import CpuThreads

WIDTH = 4
WAIT_S = 60.0
_ids = itertools.count()


def job_of(texts: int) -> Job:
    job = Job(["x"] * texts, InferOptions(), Lane.BULK)
    job.vectors = np.zeros((texts, WIDTH), dtype=np.float32)
    return job


def entries_of(job: Job, length: int = 1) -> list[QueueEntry]:
    """Every text is another one."""
    return [
        QueueEntry(job, np.array([row]), Encoded(np.full(length, next(_ids), dtype=np.int32)))
        for row in range(len(job.inputs))
    ]


class Scarce:
    """A model with room for so many texts, which counts what its failed forwards keep alive."""

    backbone = SimpleNamespace(device=torch.device("cpu"))
    widths: ClassVar = {Output.DENSE: WIDTH}
    device_bytes_per_text: ClassVar = {Output.DENSE: 0}

    def __init__(self, error: type[Exception], room: int, message: str = "CUDA out of memory") -> None:
        self._error = error
        self._room = room
        self._message = message
        self.sizes: list[int] = []  # of all batches
        self._activations: list[weakref.ref[torch.Tensor]] = []
        self.most_alive = 0

    def run(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[Output, Rows]:
        self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self._activations))
        self.sizes.append(batch.texts)
        activation = torch.zeros(1000)
        self._activations.append(weakref.ref(activation))
        if batch.texts > self._room:
            raise self._error(self._message)
        return {Output.DENSE: Rows(torch.ones(batch.texts, WIDTH))}


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


class Broken:
    """A model on a card that fails in its second batch, and what its forwards raise from then on."""

    backbone = SimpleNamespace(device=torch.device("cpu"))
    widths: ClassVar = {Output.DENSE: WIDTH}
    device_bytes_per_text: ClassVar = {Output.DENSE: 0}

    def __init__(self, card: StandInCard) -> None:
        self._card = card
        self.forwards = 0

    def run(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[Output, Rows]:
        self.forwards += 1
        if self.forwards > 1:
            self._card.fault = torch.AcceleratorError("CUDA error: device-side assert triggered")
            raise self._card.fault
        return {Output.DENSE: Rows(torch.ones(batch.texts, WIDTH))}


def test_a_fault_of_the_device_fails_its_batch_and_nothing_is_run_any_more(
    card: StandInCard, caplog: pytest.LogCaptureFixture
) -> None:
    """At 8 texts a batch: one is answered, one had a part in the fault, two may be tried elsewhere."""
    model, job, faults = Broken(card), job_of(32), list[str]()
    serve(model, [job], batch_texts=8, on_fault=faults.append)

    assert model.forwards == 2
    assert [type(job.errors.get(row)) for row in (0, 8, 16, 24)] == [
        type(None),
        InferenceFailed,
        Unavailable,
        Unavailable,
    ]
    assert len(job.errors) == 24
    assert faults == ["the device failed: CUDA error: device-side assert triggered"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_running_out_of_memory_makes_later_batches_smaller(card: StandInCard) -> None:
    """A batch of 600 one-token texts does not fit: it runs in halves, and the next have 300 at most."""
    model, job = Scarce(torch.AcceleratorError, 400, "CUDA error: out of memory"), job_of(1300)
    serve(model, [job], batch_texts=600)

    assert job.errors == {}
    assert model.sizes == [600, 300, 300, 300, 300, 100]


class Longer:
    """A model whose vectors have the length 8."""

    backbone = SimpleNamespace(device=torch.device("cpu"))
    widths: ClassVar = {Output.DENSE: WIDTH}
    device_bytes_per_text: ClassVar = {Output.DENSE: 0}

    def run(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[Output, Rows]:
        return {Output.DENSE: Rows(torch.full((batch.texts, WIDTH), 4.0))}


@pytest.mark.parametrize("on_card", [False, True])
def test_vectors_are_finished_on_a_card_where_all_jobs_of_a_batch_want_the_same(
    on_card: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_card:
        request.getfixturevalue("card")
    by_host: list[int] = []
    monkeypatch.setattr(
        "teimgr.engine.finisher.finish",
        lambda values, *options: by_host.append(len(values)) or finish(values, *options),
    )

    def job(dimensions: int, normalize: bool) -> Job:
        made = Job(["x"] * 2, InferOptions(dimensions=dimensions, normalize=normalize), Lane.BULK)
        made.allocate_results(WIDTH, 0)
        return made

    alike, mixed = [job(2, True), job(2, True)], [job(2, True), job(4, True), job(3, False)]
    serve(Longer(), alike)
    assert by_host == ([] if on_card else [4])
    serve(Longer(), mixed)
    assert len(by_host) == (3 if on_card else 4)

    for each in (*alike, mixed[0]):
        np.testing.assert_allclose(each.vectors, np.full((2, 2), 0.5**0.5), atol=1e-7)
    np.testing.assert_allclose(mixed[1].vectors, np.full((2, 4), 0.5), atol=1e-7)
    assert mixed[2].vectors.tolist() == [[4.0] * 3] * 2


class Device:
    """A model whose batches finish, in order, when they are let go."""

    backbone = SimpleNamespace(device=torch.device("cpu"))
    widths: ClassVar = {Output.DENSE: WIDTH}
    device_bytes_per_text: ClassVar = {Output.DENSE: 0}

    def __init__(self) -> None:
        self.started: queue.Queue[int] = queue.Queue()
        self.finish = threading.Semaphore(0)

    def run(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[Output, Rows]:
        self.started.put(batch.tokens)
        return {Output.DENSE: Rows(torch.ones(batch.texts, WIDTH))}

    def copies(self, rows: dict[Output, Rows]) -> SimpleNamespace:
        def wait() -> dict[Output, HostRows]:
            assert self.finish.acquire(timeout=WAIT_S)
            return {output: HostRows(of.values.numpy()) for output, of in rows.items()}

        return SimpleNamespace(wait=wait, free=lambda: None)


def test_no_more_than_two_batches_are_under_way_and_their_time_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr("teimgr.engine.runner.HostCopies", device.copies)
    delivered: queue.Queue[Job] = queue.Queue()
    finisher = Finisher(lambda jobs: [delivered.put(job) for job in jobs] and None, pytest.fail)
    waiting = EntryQueue(BatchLimits(10, 10))
    runner = Runner(device, waiting, finisher, CpuThreads(1, 1))  # type: ignore[arg-type]
    threads = [threading.Thread(target=body) for body in (finisher.run, runner.run)]
    bulk, query = job_of(6), Job(["x"], InferOptions(), Lane.INTERACTIVE)
    query.vectors = np.zeros((1, WIDTH), dtype=np.float32)
    waiting.put(entries_of(bulk, length=10))
    began = time.monotonic_ns()
    for thread in threads:
        thread.start()
    for _ in range(2):
        device.started.get(timeout=WAIT_S)
    waiting.put(entries_of(query, length=7))
    assert finisher.running_tokens == 20
    assert 0 < finisher.busy_s() <= (time.monotonic_ns() - began) / 1e9, "the batch that runs is counted"
    device.finish.release()
    assert device.started.get(timeout=WAIT_S) == 7  # nothing was taken from the queue before there was room for it
    assert finisher.running_tokens == 17

    device.finish.release(10)
    waiting.close()
    assert {delivered.get(timeout=WAIT_S) for _ in range(2)} == {bulk, query}
    elapsed_ns = time.monotonic_ns() - began
    assert finisher.stats.batches == 7
    assert finisher.busy_s() == finisher.stats.busy_s
    assert finisher.stats.busy_s * 1e9 <= elapsed_ns
    assert 6 * bulk.inference_ns + query.inference_ns <= elapsed_ns
    assert finisher.running_tokens == 0

    finisher.close(WAIT_S)
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_runner_ends_when_nobody_finishes_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr("teimgr.engine.runner.HostCopies", device.copies)
    finisher = Finisher(lambda jobs: None, pytest.fail)
    waiting = EntryQueue(BatchLimits(10, 10))
    waiting.put(entries_of(job_of(6), length=10))
    running = threading.Thread(target=Runner(device, waiting, finisher, CpuThreads(1, 1)).run)  # type: ignore[arg-type]
    running.start()
    for _ in range(2):
        device.started.get(timeout=WAIT_S)
    finisher.abandon()
    running.join(WAIT_S)

    assert not running.is_alive()
    assert device.started.empty()


class NotingQueue(EntryQueue):
    """Notes how long its caller would wait, for three batches, and does not wait itself."""

    def __init__(self) -> None:
        super().__init__(BatchLimits(10, 10))
        self.waits_s: list[float] = []

    def next_batch(self, timeout_s: float, lanes: Sequence[Lane] = tuple(Lane)) -> BatchDraft | None:
        self.waits_s.append(timeout_s)
        return None if len(self.waits_s) > 3 else super().next_batch(0.0, lanes)


def test_an_idle_thread_wakes_up_for_memory_to_return_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    waiting = NotingQueue()
    monkeypatch.setattr("teimgr.engine.runner.return_freed_memory", lambda: returned.append(len(waiting.waits_s)))
    finisher = Finisher(lambda jobs: None, pytest.fail)
    waiting.put(entries_of(job_of(1), length=3))
    Runner(Threads(), waiting, finisher, CpuThreads(1, 1)).run()  # type: ignore[arg-type]

    assert waiting.waits_s == [60.0, 1.0, 60.0, 60.0]
    assert returned == [2]


class Threads:
    """A model that notes how many threads compute a batch of so many tokens."""

    backbone = SimpleNamespace(device=torch.device("cpu"))
    widths: ClassVar = {Output.DENSE: WIDTH}
    device_bytes_per_text: ClassVar = {Output.DENSE: 0}

    def __init__(self) -> None:
        self.used: list[tuple[int, int]] = []

    def run(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[Output, Rows]:
        self.used.append((batch.tokens, torch.get_num_threads()))
        return {Output.DENSE: Rows(torch.ones(batch.texts, WIDTH))}


def test_small_batches_are_computed_by_one_thread() -> None:
    before, model = torch.get_num_threads(), Threads()
    try:
        serve(model, [job_of(1), job_of(8), job_of(9), job_of(2)], threads=2, serial_tokens=8, batch_texts=9)
    finally:
        torch.set_num_threads(before)

    assert model.used
    assert all(threads == (1 if tokens <= 8 else 2) for tokens, threads in model.used)
    assert {threads for _, threads in model.used} == {1, 2}


class Echo:
    """A model whose vector of a text is its first id, in all places; `runs` are the ids of each batch."""

    backbone = SimpleNamespace(device=torch.device("cpu"))
    widths: ClassVar = {Output.DENSE: WIDTH}
    device_bytes_per_text: ClassVar = {Output.DENSE: 0}

    def __init__(self) -> None:
        self.runs: list[list[int]] = []

    def run(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[Output, Rows]:
        first = torch.from_numpy(batch.ids[batch.begins])
        self.runs.append(first.tolist())
        return {Output.DENSE: Rows(first[:, None].float().repeat(1, WIDTH))}


def test_equal_inputs_of_a_batch_are_computed_once() -> None:
    ids = [[7, 7, 7], [5], [7, 7, 7], [9, 9], [5], [7, 7]]
    jobs = [Job(["x"] * len(ids), InferOptions(normalize=False), Lane.BULK) for _ in range(2)]
    for job in jobs:
        job.vectors = np.zeros((len(ids), WIDTH), dtype=np.float32)
    echo, delivered, waiting = Echo(), list[Job](), EntryQueue(BatchLimits(1000, 1000))
    for job in jobs:
        waiting.put(
            [QueueEntry(job, np.array([row]), Encoded(np.array(each, dtype=np.int32))) for row, each in enumerate(ids)]
        )
    waiting.close()
    finisher = Finisher(delivered.extend, pytest.fail)
    finishing = threading.Thread(target=finisher.run)
    finishing.start()
    Runner(echo, waiting, finisher, CpuThreads(1, 1)).run()  # type: ignore[arg-type]
    finisher.close(WAIT_S)
    finishing.join(WAIT_S)

    assert [sorted(run) for run in echo.runs] == [[5, 7, 7, 9]]  # three sevens are not two
    assert delivered == jobs
    for job in jobs:
        assert job.vectors[:, 0].tolist() == [7, 5, 7, 9, 5, 7]
        assert job.tokens == 12


def test_equal_rows_of_entries_with_many_are_computed_once() -> None:
    """Within an entry, over entries, and where nothing of an entry is new."""
    groups = [[[5, 5], [7, 7], [5, 5]], [[7, 7], [8, 8]], [[5, 5], [8, 8]], [[9]]]
    jobs = [Job(["x"] * len(ids), InferOptions(normalize=False), Lane.BULK) for ids in groups]
    for job in jobs:
        job.vectors = np.zeros((len(job.inputs), WIDTH), dtype=np.float32)
    entries = [
        QueueEntry(job, np.arange(len(ids))[::-1], Encoded(np.array(ids[::-1], dtype=np.int32)))
        for job, ids in zip(jobs, groups, strict=True)
    ]
    echo = Echo()
    serve_entries(echo, entries, jobs)

    assert [sorted(run) for run in echo.runs] == [[5, 7, 8, 9]]
    assert [job.vectors[:, 0].tolist() for job in jobs] == [[row[0] for row in ids] for ids in groups]
    assert [job.tokens for job in jobs] == [6, 4, 4, 1]


def test_one_row_of_many_that_does_not_fit_fails_alone() -> None:
    """The rows of one entry are run in halves until the one at fault is by itself."""

    class Picky(Echo):
        def run(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[Output, Rows]:
            if 6 in batch.ids:
                raise RuntimeError("not this one")
            return super().run(batch, outputs)

    job = Job(["x"] * 11, InferOptions(normalize=False), Lane.BULK)
    job.vectors = np.zeros((11, WIDTH), dtype=np.float32)
    ids = np.repeat(np.arange(11, dtype=np.int32)[:, None], 3, axis=1)
    serve_entries(Picky(), [QueueEntry(job, np.arange(11), Encoded(ids))], [job])

    assert {row: type(error) for row, error in job.errors.items()} == {6: InferenceFailed}
    assert job.vectors[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 0, 7, 8, 9, 10]


@pytest.mark.parametrize(("in_entries", "bad", "failed"), [(4, 2, {2, 3}), (1, 2, {2, 3}), (1, 0, {0, 1, 2, 3})])
def test_a_defect_behind_a_part_of_a_batch_fails_each_row_that_is_left_once(
    in_entries: int, bad: int, failed: set[int]
) -> None:
    """A batch of four fails and is run in halves; one of these ends by a defect."""

    class Defective(Echo):
        def run(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[Output, Rows]:
            if batch.texts > 2:
                raise RuntimeError("not all of them")
            if bad in batch.ids:
                raise Panic
            return super().run(batch, outputs)

    class Panic(BaseException):
        """As pyo3 raises it."""

    job = Job(["x"] * 5, InferOptions(normalize=False), Lane.INTERACTIVE)
    job.vectors = np.zeros((5, WIDTH), dtype=np.float32)
    ids = np.arange(5, dtype=np.int32)[:, None]
    parts = [np.arange(4)] if in_entries == 1 else [np.array([row]) for row in range(4)]
    entries = [QueueEntry(job, rows, Encoded(ids[rows])) for rows in parts]
    delivered, defects = list[Job](), list[BaseException]()
    finisher = Finisher(delivered.extend, pytest.fail)
    waiting = EntryQueue(BatchLimits(1000, 1000))
    runner = Runner(
        Defective(),  # type: ignore[arg-type]
        waiting,
        finisher,
        CpuThreads(1, 1),
        lanes=(Lane.INTERACTIVE,),
        on_defect=defects.append,
    )
    runner._execute_queries(entries)
    finishing = threading.Thread(target=finisher.run)
    finishing.start()
    finisher.close(WAIT_S)
    finishing.join(WAIT_S)

    assert [type(defect) for defect in defects] == [Panic]
    assert {row: type(error) for row, error in job.errors.items()} == dict.fromkeys(failed, InferenceFailed)
    assert job.vectors[:, 0].tolist() == [0 if row in failed else row for row in range(4)] + [0]
    assert job.remaining == 1, "the fifth row has not come yet"
    assert delivered == []


@pytest.mark.parametrize(
    "other",
    [
        Encoded(np.array([1, 2], dtype=np.int32), keys=1),
        Encoded(np.array([1, 2], dtype=np.int32), type_ids=np.array([0, 1], dtype=np.uint8)),
        Encoded(np.array([1, 2], dtype=np.int32), prompt_tokens=1),
        Encoded(np.array([1, 2], dtype=np.int32), query=True),
    ],
    ids=["keys", "types", "prompt", "role"],
)
def test_inputs_of_the_same_ids_may_differ(other: Encoded) -> None:
    assert list(keys_of(other, 0)) != list(keys_of(Encoded(np.array([1, 2], dtype=np.int32)), 0))


def serve(
    embedder: Any,
    jobs: list[Job],
    threads: int = 1,
    serial_tokens: int = 0,
    batch_texts: int | None = None,
    on_fault: Callable[[str], None] = pytest.fail,
) -> None:
    """Run the jobs to their end."""
    entries = [entry for job in jobs for entry in entries_of(job)]
    serve_entries(embedder, entries, jobs, threads, serial_tokens, batch_texts, on_fault)


def serve_entries(
    embedder: Any,
    entries: list[QueueEntry],
    jobs: list[Job],
    threads: int = 1,
    serial_tokens: int = 0,
    batch_texts: int | None = None,
    on_fault: Callable[[str], None] = pytest.fail,
) -> None:
    """Run the entries of `jobs` to their end."""
    delivered: list[Job] = []
    finisher = Finisher(delivered.extend, on_fault)
    finishing = threading.Thread(target=finisher.run)
    finishing.start()
    waiting = EntryQueue(BatchLimits(1000, 1000, batch_texts))
    waiting.put(entries)
    waiting.close()
    Runner(embedder, waiting, finisher, CpuThreads(threads, threads), serial_tokens).run()
    finisher.close(WAIT_S)
    finishing.join(WAIT_S)
    assert delivered == jobs
