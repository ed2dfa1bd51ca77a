"""The finisher: results of a batch become rows of jobs, and a device that hangs never keeps an engine from closing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice, permutations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.engine.conftest import WAIT_S, Served
from tests.support import models
from tests.support.polling import until

from teimgr.engine import runner
from teimgr.engine.backbone import Batching
from teimgr.engine.batching.batch import Encoded, PackedBatch, pack
from teimgr.engine.batching.queue import QueueEntry
from teimgr.engine.finisher import BatchResults, Failures, Finisher, HostRows, InFlightLimit, StartedBatch
from teimgr.engine.heads import Rows
from teimgr.engine.job import InferOptions, Job, Lane, Output, Pair
from teimgr.engine.model import Model, load_model
from teimgr.errors import InferenceFailed, InvalidInput, OutOfDeviceMemory, Unavailable
from teimgr.models.reading import read_layout


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
    entry = QueueEntry(job, np.zeros(1, np.intp), Encoded(np.zeros(1, dtype=np.int32)))
    limit = finisher.new_limit()
    *started, last = [StartedBatch([entry], np.zeros(1, np.intp), hang, limit.enter(1, 0)) for _ in range(4)]
    for batch in started:  # one is at hand, and two fill the queue
        finisher.put(batch)
    stuck = threading.Thread(target=finisher.put, args=(last,))
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


def test_a_batch_computed_within_another_has_its_own_time_and_the_one_around_leaves_it_out() -> None:
    limit = InFlightLimit()
    around = limit.enter(100, 1_000)
    within = limit.enter(1, 5_000)
    ended_ns = within.leave()

    assert within.began_ns == 5_000
    assert around.began_ns == limit.began_ns == 1_000 + ended_ns - 5_000

    following = limit.enter(1, time.monotonic_ns())
    assert around.leave() == following.began_ns == limit.began_ns  # batches are computed one after the other
    following.leave()
    assert (limit.tokens, limit.batches, limit.departures, limit.began_ns) == (0, 0, 3, None)


def test_a_host_without_room_for_results_fails_its_batch_alone() -> None:
    faults: list[str] = []
    freed: list[bool] = []
    finisher = Finisher(lambda jobs: None, faults.append)
    job = Job(["a"], InferOptions(), Lane.BULK)
    entry = QueueEntry(job, np.zeros(1, np.intp), Encoded(np.zeros(1, dtype=np.int32)))
    limit = finisher.new_limit()

    def full() -> dict[Output, HostRows]:
        raise RuntimeError("CUDA error: out of memory")

    batch = StartedBatch([entry], np.zeros(1, np.intp), full, limit.enter(1, 0), free=lambda: freed.append(True))
    assert finisher.finish_here(batch)

    assert (type(job.errors[0]), freed) == (OutOfDeviceMemory, [True])
    assert (finisher.fault, faults, limit.batches) == (None, [], 0)


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
        copies = SimpleNamespace(wait=hang, free=lambda: None)
        monkeypatch.setattr("teimgr.engine.runner.HostCopies", lambda rows: copies)
    served.send(["rain"])
    assert hanging.wait(WAIT_S)
    for _ in range(6):
        served.send(["fog"])
    closing = threading.Thread(target=served.engine.close, args=(0.0,))
    closing.start()
    closing.join(WAIT_S)

    assert not closing.is_alive()


DENSE, SPARSE, TOKENS, MULTI_VECTOR, SCORES = (frozenset({output}) for output in Output)
A, B = "What is the fog?", "The lamps are still lit tonight."


class Batches:
    """Holds the engine thread, and notes what each batch was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, frozenset[Output]]] = []
        self.held = threading.Event()
        self.open = threading.Event()
        self.open.set()
        original = Model.run

        def run(model: Model, batch: PackedBatch, outputs: frozenset[Output]) -> dict[Output, Rows]:
            self.held.set()
            assert self.open.wait(WAIT_S)
            self.asked.append((batch.texts, outputs))
            return original(model, batch, outputs)

        monkeypatch.setattr(Model, "run", run)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    return Batches(monkeypatch)


def test_vectors_and_token_vectors_of_one_batch_do_not_disturb_each_other(
    model_dir: Callable[..., Path], serve: Callable[..., Served], batches: Batches
) -> None:
    """Pooled are A, B and A, by token too; of the batch of six, two are computed."""
    served = serve(model_dir("bert", pooling="cls"))
    alone = {text: served.embed([text], outputs=TOKENS | DENSE, normalize=False) for text in (A, B)}
    batches.held.clear()
    batches.open.clear()
    first = served.send(["rain"])
    assert batches.held.wait(WAIT_S)
    pooled = [served.send([text], outputs=DENSE, normalize=False) for text in (A, B, A)]
    by_token = [served.send([text], outputs=TOKENS) for text in (A, B, A)]
    until(lambda: served.engine.stats().queued_texts >= 6)
    batches.asked.clear()
    batches.open.set()
    for job in (first, *pooled, *by_token):
        assert served.wait(job).errors == {}

    assert batches.asked[-1] == (2, DENSE | TOKENS)
    for text, job in zip((A, B, A), pooled, strict=True):
        np.testing.assert_allclose(job.vectors, alone[text].vectors, atol=2e-5)
        assert job.tokens_of == []
    for text, job in zip((A, B, A), by_token, strict=True):
        ours, theirs = job.tokens_of[0], alone[text].tokens_of[0]
        assert ours is not None
        assert theirs is not None
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
        np.testing.assert_allclose(ours[0], alone[text].vectors[0], atol=2e-5)
        assert job.vectors.shape == (1, 0)
        assert ours.base is None  # a copy: the batch is not held by its smallest job


def test_a_batch_of_many_results_is_run_in_parts(
    model_dir: Callable[..., Path], serve: Callable[..., Served], batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(model_dir("bert"))
    words = ("fog", "and", "rain", "on", "the", "harbour")
    texts = [" ".join(order) for order in islice(permutations(words), 64)]
    length = len(served.engine.tokenize(texts[0], True, None))
    monkeypatch.setattr(runner, "MAX_RESULT_BYTES", 4 * 32 * length * 10)
    batches.asked.clear()
    job = served.embed(texts, outputs=TOKENS)
    assert job.errors == {}
    assert max(texts for texts, _ in batches.asked) <= 10
    assert sum(texts for texts, _ in batches.asked) == 64

    batches.asked.clear()
    assert served.embed(texts, outputs=DENSE).errors == {}
    assert max(texts for texts, _ in batches.asked) > 10
    monkeypatch.setattr(runner, "MAX_RESULT_BYTES", 1)
    assert served.embed(texts[:1], outputs=TOKENS).errors == {}


def job_of(outputs: frozenset[Output], raw_scores: bool = True) -> Job:
    job = Job(["a", "b", "c"], InferOptions(outputs, normalize=False, raw_scores=raw_scores), Lane.BULK)
    job.allocate_results(dimension=2, labels=2)
    return job


def results_of(bad: Output | None, number: float) -> BatchResults:
    """Of three texts with one, none and two tokens, the first spoilt in one output."""
    values = {output: np.ones((3, 2), dtype=np.float32) for output in Output}
    values[Output.SPARSE] = np.array([1.0, 0.0, 2.0], dtype=np.float32)
    if bad is not None:
        values[bad].reshape(-1)[0] = number
    offsets = np.array([0, 1, 1, 3])
    return BatchResults(
        {
            Output.DENSE: HostRows(values[Output.DENSE]),
            Output.SCORES: HostRows(values[Output.SCORES]),
            Output.TOKENS: HostRows(values[Output.TOKENS], offsets),
            Output.MULTI_VECTOR: HostRows(values[Output.MULTI_VECTOR], offsets),
            Output.SPARSE: HostRows(values[Output.SPARSE], offsets, np.array([7, 3, 9])),
        },
        "sigmoid",
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_of_any_type_of_numbers_are_told_finite(dtype: type[np.floating]) -> None:
    values = np.ones((3, 5), dtype)
    values[1, 4] = np.nan

    assert HostRows(values).finite().tolist() == [True, False, True]


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bad", list(Output))
def test_what_is_no_number_fails_its_row_where_it_was_asked_for(bad: Output, number: float) -> None:
    job = job_of(frozenset(Output))
    failed = results_of(bad, number).write(job, np.array([0, 1, 2]), np.array([2, 0, 1]))

    assert {row: type(error) for row, error in failed.items()} == {2: InferenceFailed}
    expected = "Backend error: the vector has NaN or infinity in it"
    if bad is Output.SCORES:
        expected = "score is NaN" if np.isnan(number) else "Backend error: a score is infinite"
    assert failed[2].message == expected
    assert not job.vectors[2].any()
    assert not job.scores[2].any()
    assert job.sparse[2] is job.tokens_of[2] is job.multi_vectors[2] is None
    assert job.tokens_of[0] is not None
    assert job.tokens_of[0].shape == (0, 2)
    others = frozenset(Output) - {bad}
    assert results_of(bad, number).write(job_of(others), np.array([0, 1, 2]), np.array([2, 0, 1])) == {}


def test_results_go_to_their_rows() -> None:
    job = job_of(frozenset(Output), raw_scores=False)
    assert results_of(None, 0.0).write(job, np.array([2, 0]), np.array([1, 2])) == {}

    sparse, empty = job.sparse[1], job.sparse[0]
    assert sparse is not None
    assert (sparse.indices.tolist(), sparse.values.tolist()) == ([9], [2.0])
    assert empty is None
    assert job.vectors.tolist() == [[0, 0], [1, 1], [1, 1]]
    np.testing.assert_allclose(job.scores[1:], 1 / (1 + np.exp(-1.0)))
    assert [None if rows is None else len(rows) for rows in job.tokens_of] == [None, 2, 1]


def test_a_model_whose_every_score_is_no_number_makes_the_engine_unhealthy(
    tmp_path: Path, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(models.build_cross_encoder("bert", tmp_path))
    original = Model.run

    def spoilt(model: Model, batch: PackedBatch, outputs: frozenset[Output]) -> dict[Output, Rows]:
        scores = original(model, batch, outputs)[Output.SCORES].values
        return {Output.SCORES: Rows(torch.full_like(scores, torch.nan))}

    monkeypatch.setattr(Model, "run", spoilt)
    assert served.embed(["fog"], outputs=SCORES).errors[0].message == "score is NaN"
    until(lambda: not served.engine.stats().healthy)
    with pytest.raises(Unavailable, match="NaN"):
        served.send(["fog"], outputs=SCORES)


def test_pairs_and_ids_pass_the_whole_engine(tmp_path: Path, serve: Callable[..., Served]) -> None:
    path = models.build("bert", tmp_path, prompts={"q": "ask: "}, default_prompt_name="q")
    served = serve(path)
    ids = np.array([token.id for token in served.engine.tokenize("fog", True, None)], dtype=np.int32)
    job = served.embed(["fog", Pair(A, B), ids], prompt_name="q")
    default = served.embed(["fog", Pair(A, B)])

    assert {row: type(error) for row, error in job.errors.items()} == {1: InvalidInput}
    assert job.errors[1].message == "Input validation error: `prompt_name` cannot be set with dual inputs"
    assert default.errors == {}
    assert job.chars == 3 + len(A) + len(B) + len(ids)


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "mpnet"])
def test_unseen_tokens_are_as_with_the_librarys_own_mask(family: str, model_dir: Callable[..., Path]) -> None:
    """In a batch with others, where `keys` are honoured by packing or run by run."""
    from transformers import AutoModel

    path = model_dir(family)
    random = np.random.default_rng(0)
    shapes = [(12, 5), (7, None), (12, 12), (12, 1), (20, 9), (7, 3)]
    inputs = [Encoded(random.integers(5, 140, n).astype(np.int32), keys=keys) for n, keys in shapes]
    model = load_model(read_layout(path), torch.device("cpu"))
    reference = AutoModel.from_pretrained(path).eval()
    batch = pack(inputs)
    for batching in ([] if family == "mpnet" else [Batching.BY_RUN]) + [Batching.EQUAL_LENGTH]:
        model.backbone.use(batching)
        rows = model.run(batch, TOKENS)[Output.TOKENS]
        assert rows.offsets is not None
        for place, source in enumerate(batch.order.tolist()):
            length, keys = shapes[source]
            mask = torch.arange(length)[None] < (length if keys is None else keys)
            with torch.inference_mode():
                ids = torch.from_numpy(inputs[source].ids.astype(np.int64))[None]
                there = reference(input_ids=ids, attention_mask=mask.long()).last_hidden_state[0]
            here = rows.values[rows.offsets[place] : rows.offsets[place + 1]]
            torch.testing.assert_close(here, there, atol=2e-5, rtol=1e-4)
