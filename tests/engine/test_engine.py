"""Jobs in a running engine: every row answered once, failures kept to the row, and an end in good order."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench import weights
from tests.engine.conftest import WAIT_S, Served
from tests.support import models
from tests.support.models import build
from tests.support.native import needs_native_forward
from tests.support.polling import until
from tests.support.worker_process import WorkerProcess, arrow, table

from teimgr.engine.batching.batch import PackedBatch
from teimgr.engine.batching.queue import EntryQueue, QueueEntry
from teimgr.engine.finisher import HostRows
from teimgr.engine.heads import Rows
from teimgr.engine.host_copies import HostCopies
from teimgr.engine.job import InferOptions, Input, Job, Lane, Output, Pair
from teimgr.engine.model import Model
from teimgr.engine.runner import Runner
from teimgr.engine.text.tokenizer import TextTokenizer, TokenizeOptions
from teimgr.errors import (
    DeadlineExceeded,
    EmptyInput,
    InferenceFailed,
    InputTooLong,
    InvalidConfig,
    InvalidInput,
    ModelLoadFailed,
    ModelNotFound,
    OutOfDeviceMemory,
    Overloaded,
    TokenizerFailed,
    Unavailable,
)
from teimgr.spec import CpuThreads
from teimgr.wire.frames import Method
from teimgr.wire.text_column import TextColumn

LONG = "rain " * 300
DENSE = frozenset({Output.DENSE})


class Gate:
    """Holds the engine's threads before their next batches until opened, or lets them do something else instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = threading.Event()
        self.open = threading.Event()
        self.instead: Callable[[Model, PackedBatch], dict[Output, Rows]] | None = None
        self._passing_tokens = 0
        self.original = original = Model.run

        def run(model: Model, batch: PackedBatch, outputs: frozenset[Output]) -> dict[Output, Rows]:
            if batch.tokens > self._passing_tokens:
                self.held.set()
                assert self.open.wait(WAIT_S)
            return original(model, batch, outputs) if self.instead is None else self.instead(model, batch)

        monkeypatch.setattr(Model, "run", run)

    def hold(self, passing_tokens: int = 0) -> None:
        """Hold batches from now on, but for those of up to so many tokens."""
        self._passing_tokens = passing_tokens
        self.held.clear()
        self.open.clear()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(monkeypatch)
    gate.open.set()
    return gate


@pytest.fixture
def bert(model_dir: Callable[..., Path], serve: Callable[..., Served]) -> Served:
    return serve(model_dir("bert"))


def test_failed_rows_fail_alone(bert: Served) -> None:
    job = bert.embed(["fog", None, "", LONG, "fog"], truncate=False)

    assert {row: type(error) for row, error in job.errors.items()} == {1: InvalidInput, 2: EmptyInput, 3: InputTooLong}
    assert f"less than 96 tokens. Given: {len(bert.engine.tokenize(LONG, True, None))}" in job.errors[3].message
    assert not job.vectors[1:4].any()
    np.testing.assert_array_equal(job.vectors[0], job.vectors[4])


def test_a_job_adds_up_its_rows(bert: Served) -> None:
    job = bert.embed(["fog", LONG, "ü"], Lane.INTERACTIVE)

    assert job.chars == 3 + len(LONG) + 1
    assert job.tokens == sum(len(bert.engine.tokenize(text, True, None)) for text in ("fog", "ü")) + 96
    assert min(job.tokenization_ns, job.queue_ns, job.inference_ns) > 0


@pytest.mark.parametrize("model", ["minilm", "static", "roberta"])
@pytest.mark.parametrize("options", [{}, {"prompt": "ask: "}, {"truncate": False}, {"truncation_left": True}], ids=str)
def test_a_column_of_texts_has_the_results_of_its_texts(
    model: str,
    options: dict[str, Any],
    minilm: Path,
    tmp_path: Path,
    model_dir: Callable[..., Path],
    serve: Callable[..., Served],
) -> None:
    """Bit for bit, with the same errors, on one thread; lengths come in many groups, more rows than a chunk holds."""
    if model == "static":
        path = weights.random_static(tmp_path, minilm)
    else:
        path = minilm if model == "minilm" else model_dir("roberta")
    served = serve(path, dtype="float32", threads=1)
    texts: list[str | None] = [
        " ".join(["fog", "rain", "lamp", "unaffable"][i % 4 :] * (i % 3 + 1)) for i in range(1100)
    ]
    for row, odd in enumerate([None, "", "naïve", "a [MASK] b", "x " * 40_000, "东京", "word " * 300, " "]):
        texts[37 * (row + 1)] = odd

    job = served.embed(TextColumn.of(texts), **options)
    each = served.embed(texts, **options)

    assert job.errors.keys() == each.errors.keys() >= {37, 74}
    assert {row: str(error) for row, error in job.errors.items()} == {
        row: str(error) for row, error in each.errors.items()
    }
    assert (job.tokens, job.chars) == (each.tokens, each.chars)
    if model != "roberta":  # by torch's kernels a vector may depend on its batch in the last bits
        np.testing.assert_array_equal(job.vectors, each.vectors)
    np.testing.assert_allclose(job.vectors, each.vectors, atol=1e-5)
    zeros = 1 if model == "static" and "prompt" not in options else 0  # of the space
    assert np.count_nonzero(job.vectors.any(axis=1)) == len(texts) - len(job.errors) - zeros


def test_columns_and_lists_of_several_jobs_are_tokenized_each_for_itself(bert: Served, gate: Gate) -> None:
    gate.hold()
    first = bert.send(["fog"])
    assert gate.held.wait(WAIT_S)
    sent: list[Sequence[str | None]] = [["fog", "rain"], TextColumn.of(["dog", None]), ["dog"], TextColumn.of(["rain"])]
    jobs = [bert.send(texts, Lane.BULK) for texts in sent]
    gate.open.set()
    for job in (first, *jobs):
        bert.wait(job)
    alone = {text: bert.embed([text]).vectors[0] for text in ("fog", "rain", "dog")}

    for job, texts in zip(jobs, sent, strict=True):
        assert list(job.errors) == [row for row, text in enumerate(texts) if text is None]
        for row, text in enumerate(texts):
            if text is not None:
                np.testing.assert_allclose(job.vectors[row], alone[text], atol=2e-6)


def test_a_job_without_texts_is_answered(bert: Served) -> None:
    assert bert.embed([]).vectors.shape == (0, 32)


def test_a_job_of_refused_rows_only_is_answered(bert: Served) -> None:
    assert set(bert.embed([None, ""]).errors) == {0, 1}


@pytest.mark.parametrize("kind", [pytest.param("bert", marks=needs_native_forward), "table"])
def test_few_queries_of_a_fast_model_are_computed_on_the_calling_thread(
    kind: str, model_dir: Callable[..., Path], serve: Callable[..., Served], minilm: Path, tmp_path: Path
) -> None:
    path = model_dir("bert") if kind == "bert" else weights.random_static(tmp_path / "table", minilm, width=32)
    served = serve(path)
    texts = ["the sky is grey", "fog", "rain on the hill"]
    expected = served.embed(texts).vectors
    here = threading.get_ident()

    def sent(texts: Sequence[str], deadline: float | None = None) -> list[Job]:
        return [served.wait(job) for job in served.send_together(texts, deadline)]

    for _ in range(1000):  # until the engine has measured that the model is fast
        jobs = sent(texts)
        if all(served.delivered_by[job] == here for job in jobs):
            break
    else:
        pytest.fail("other threads computed the queries")
    for job, vector in zip(jobs, expected, strict=True):
        np.testing.assert_allclose(job.vectors[0], vector, atol=2e-6)
    stats = served.engine.stats()
    assert stats.running_tokens == stats.queued_tokens == 0

    (late,) = sent(["fog"], time.monotonic() - 1)
    assert isinstance(late.errors[0], DeadlineExceeded)
    many, together = sent(["fog"] * 33), served.wait(served.send(["fog", "rain"]))
    assert all(served.delivered_by[job] != here for job in (late, *many, together))


def test_queries_of_a_slow_model_are_left_to_the_engines_thread(bert: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teimgr.engine.runner._ON_CALLER_S", 0.0)

    jobs = [bert.wait(job) for _ in range(20) for job in bert.send_together(["the sky is grey"])]

    assert all(bert.delivered_by[job] != threading.get_ident() for job in jobs)


def test_queries_of_a_model_that_its_own_code_computes_are_left_to_the_engines_thread(
    model_dir: Callable[..., Path], serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads are OpenMP's, which belong to the thread that has computed before."""
    monkeypatch.setenv("TEIMGR_NATIVE", "attention")
    monkeypatch.setattr("teimgr.engine.runner._ON_CALLER_S", math.inf)
    served = serve(model_dir("bert"))
    assert served.engine.info.forward == "library"

    jobs = [served.wait(job) for _ in range(20) for job in served.send_together(["the sky is grey"])]

    assert all(served.delivered_by[job] != threading.get_ident() for job in jobs)


def test_batches_on_the_calling_thread_are_within_the_bounds_of_one(
    model_dir: Callable[..., Path], serve: Callable[..., Served]
) -> None:
    served = serve(model_dir("bert"), max_batch_requests=1)
    for _ in range(50):
        for job in served.send_together(["fog", "rain"]):
            served.wait(job)

    assert served.engine.stats().by_texts[1:] == [0] * 31


def test_many_jobs_from_many_threads_are_each_answered_right(bert: Served) -> None:
    words = [f"fog {'lamp ' * (i % 40)} {i}" for i in range(60)]
    expected = bert.embed(words).vectors
    jobs = [bert.send([word], Lane.BULK if i % 2 else Lane.INTERACTIVE) for i, word in enumerate(words)]

    for i, job in enumerate(jobs):
        np.testing.assert_allclose(bert.wait(job).vectors[0], expected[i], atol=2e-6)


def test_bad_options_are_refused_at_the_door(bert: Served) -> None:
    with pytest.raises(InvalidInput, match="`dimensions` should be positive"):
        bert.send(["fog"], dimensions=0)
    with pytest.raises(InvalidInput, match="smaller than the maximum embedding dimension"):
        bert.send(["fog"], dimensions=33)
    with pytest.raises(InvalidInput, match="default-prompt-name"):
        bert.send(["fog"], prompt_name="none")
    assert bert.embed(["fog"], dimensions=32).errors == {}


@needs_native_forward
def test_a_query_waits_for_no_batch_of_bulk(bert: Served, gate: Gate) -> None:
    bert.embed(["warm"])
    gate.hold(passing_tokens=10)
    bulk = bert.send([LONG] * 400, Lane.BULK)
    assert gate.held.wait(WAIT_S)
    assert bert.wait(bert.send(["fog"], Lane.INTERACTIVE)).errors == {}

    assert not bert.was_delivered(bulk)
    assert bert.engine.stats().running_tokens > 10
    gate.open.set()
    assert bert.wait(bulk).errors == {}


KINDS_OF_MODEL: dict[str, Callable[[Path], Path]] = {
    "dense": lambda folder: models.build("bert", folder),
    "causal": lambda folder: models.build("qwen3", folder),
    "cross-encoder": lambda folder: models.build_cross_encoder("bert", folder),
    "yes-no reranker": models.build_yes_no_reranker,
    "sparse": lambda folder: models.build_splade("bert", folder),
    "late interaction": lambda folder: models.build_multi_vector("bert", folder),
    "m3": models.build_m3,
}


@pytest.mark.parametrize("kind", KINDS_OF_MODEL)
def test_both_lanes_at_once_give_each_text_its_own_results(
    kind: str, tmp_path: Path, serve: Callable[..., Served]
) -> None:
    served = serve(KINDS_OF_MODEL[kind](tmp_path))
    outputs = frozenset(map(Output, served.engine.info.outputs))
    words = [
        "rain and fog",
        "a dog",
        "the lamps are still lit tonight",
        "fog",
        "rain",
        "late in the day",
        "why",
        "dog fog",
    ]
    texts: list[Input] = [Pair("what", text) if outputs == {Output.SCORES} else text for text in words]
    how: dict[str, Any] = {"outputs": outputs, "normalize": False, "raw_scores": True}
    alone = [results(served.embed([text], **how))[0] for text in texts]

    bulk = served.send(texts * 40, Lane.BULK, **how)
    asked = 0
    while not served.was_delivered(bulk):
        [found] = results(served.embed([texts[asked % len(texts)]], Lane.INTERACTIVE, **how))
        for one, expected in zip(found, alone[asked % len(texts)], strict=True):
            np.testing.assert_allclose(one, expected, atol=2e-5)
        asked += 1

    assert asked
    for row, found in enumerate(results(bulk)):
        for one, expected in zip(found, alone[row % len(texts)], strict=True):
            np.testing.assert_allclose(one, expected, atol=2e-5)


def results(job: Job) -> list[list[np.ndarray]]:
    """Of each row, every output that was requested."""
    assert not job.errors
    found: list[list[np.ndarray]] = [[] for _ in job.inputs]
    for row, of in enumerate(found):
        for output in sorted(job.options.outputs, key=list(Output).index):
            if output is Output.SPARSE:
                sparse = job.sparse[row]
                assert sparse is not None
                of += [sparse.indices, sparse.values]
            else:
                rows: Any = {
                    Output.DENSE: job.vectors,
                    Output.SCORES: job.scores,
                    Output.TOKENS: job.tokens_of,
                    Output.MULTI_VECTOR: job.multi_vectors,
                }[output]
                of.append(np.array(rows[row]))
    return found


@needs_native_forward
def test_bulk_yields_the_cores_to_queries_but_not_where_it_has_the_gil(bert: Served) -> None:
    bert.embed(["warm"], Lane.BULK)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    nicenesses = {
        (task / "comm").read_text().strip(): os.getpriority(os.PRIO_PROCESS, int(task.name))
        for task in Path("/proc/self/task").iterdir()
    }

    assert nicenesses["teimgr-bulk"] == min(own + 6, 19)
    assert all(os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) == own for thread in bert.engine._running)


def test_a_query_overtakes_bulk_work_where_one_thread_computes_both(
    model_dir: Callable[..., Path], serve: Callable[..., Served], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEIMGR_NATIVE", "attention")
    served = serve(model_dir("bert"))
    assert served.engine.info.forward == "library"
    gate.hold()
    first = served.send(["rain"], Lane.BULK)
    assert gate.held.wait(WAIT_S)
    bulk = served.send([LONG] * 400, Lane.BULK)
    query = served.send(["fog"], Lane.INTERACTIVE)
    until(lambda: served.engine.stats().queued_texts >= 401)
    gate.open.set()
    served.wait(query)

    assert not served.was_delivered(bulk)
    assert served.wait(first).errors == served.wait(bulk).errors == {}


def test_a_cancelled_job_is_never_delivered(bert: Served, gate: Gate) -> None:
    gate.hold()
    held = bert.send(["rain"])
    assert gate.held.wait(WAIT_S)
    gone = bert.send(["fog"])
    gone.cancel()
    gate.open.set()
    bert.wait(held)
    bert.embed(["later"], Lane.INTERACTIVE)

    assert not bert.was_delivered(gone)
    assert bert.engine.stats().queued_tokens == 0


def test_a_text_that_cannot_be_computed_before_its_deadline_is_not_run(bert: Served) -> None:
    bert.embed(["fog"])  # a batch whose time counts
    batches = bert.engine.stats().batches
    bert.engine._finisher.quickest_s = 60.0  # per token, as on a very slow device
    job = bert.wait(bert.send(["fog"], deadline=time.monotonic() + 30.0))

    assert [type(error) for error in job.errors.values()] == [DeadlineExceeded]
    assert bert.engine.stats().batches == batches
    assert bert.embed(["fog"]).errors == {}  # without a deadline


def test_an_idle_engine_keeps_no_job_that_it_delivered(bert: Served) -> None:
    class Context:
        """What the caller belongs to."""

    context = Context()
    kept = weakref.ref(context)
    job = Job(["fog", "", "rain"] * 700, InferOptions(), Lane.BULK, context=context)  # with failures
    bert.engine.submit(job)
    bert.wait(job)
    bert.embed(["fog"], Lane.INTERACTIVE)
    bert.forget()
    del job, context

    until(lambda: kept() is None, "the last reference to the job", WAIT_S)


def test_a_job_past_its_deadline_fails_and_its_texts_are_not_run(bert: Served, gate: Gate) -> None:
    gate.hold()
    held = bert.send(["rain"])
    assert gate.held.wait(WAIT_S)
    late = bert.send(["fog"], deadline=time.monotonic())
    gate.open.set()

    assert isinstance(bert.wait(late).errors[0], DeadlineExceeded)
    assert bert.wait(held).errors == {}


def test_the_expected_time_is_that_of_what_waits(
    model_dir: Callable[..., Path], serve: Callable[..., Served], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(model_dir("bert"))
    engine = served.engine
    monkeypatch.setattr(EntryQueue, "tokens_per_s", lambda queue, lane: 1000.0)
    assert engine.expected_s(Lane.BULK) == 0.0
    gate.hold()
    jobs = [served.send(["rain"], Lane.BULK)]
    assert gate.held.wait(WAIT_S)
    jobs += [served.send([LONG] * 20, Lane.BULK) for _ in range(14)]
    until(lambda: engine.stats().queued_tokens > 0)  # some rows are tokenized, the others only estimated
    expected_s = engine.expected_s(Lane.BULK)
    gate.open.set()
    for job in jobs:
        served.wait(job)

    tokens = sum(job.tokens for job in jobs)
    assert expected_s == pytest.approx(tokens / 1000, rel=0.2)
    assert engine.expected_s(Lane.BULK) == 0.0


def test_a_full_lane_refuses_at_once_and_the_other_lane_does_not(
    model_dir: Callable[..., Path], serve: Callable[..., Served], gate: Gate
) -> None:
    served = serve(model_dir("bert"), lane_limit_tokens=1000)
    gate.hold()
    held = served.send(["rain"], Lane.BULK)
    assert gate.held.wait(WAIT_S)
    waiting = served.send([LONG] * 10, Lane.BULK)
    with pytest.raises(Overloaded, match="Model is overloaded"):
        served.send([LONG], Lane.BULK)
    query = served.send(["fog"], Lane.INTERACTIVE)
    until(lambda: served.engine.stats().queued_texts >= 10)

    gate.open.set()
    assert all(not served.wait(job).errors for job in (held, query, waiting))
    assert served.embed([LONG], Lane.BULK).errors == {}


def test_what_was_cancelled_makes_room_when_its_turn_comes(
    model_dir: Callable[..., Path], serve: Callable[..., Served], gate: Gate
) -> None:
    served = serve(model_dir("bert"), lane_limit_tokens=1000)
    gate.hold()
    held = served.send(["rain"], Lane.BULK)
    assert gate.held.wait(WAIT_S)
    gone = served.send([LONG] * 10, Lane.BULK)
    until(lambda: served.engine.stats().queued_texts >= 10)
    gone.cancel()
    gate.open.set()
    served.wait(held)
    until(lambda: not served.engine.stats().queued_tokens)

    assert served.embed([LONG] * 10, Lane.BULK).errors == {}
    assert not served.was_delivered(gone)


def test_out_of_memory_costs_only_the_text_that_does_not_fit(bert: Served, gate: Gate) -> None:
    whole = bert.embed(["fog", "dog", LONG]).vectors

    def scarce(model: Model, batch: PackedBatch) -> dict[Output, Rows]:
        if batch.tokens > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gate.original(model, batch, DENSE)

    gate.instead = scarce
    job = bert.embed(["fog", LONG, "dog"])

    assert {row: type(error) for row, error in job.errors.items()} == {1: OutOfDeviceMemory}
    np.testing.assert_allclose(job.vectors[[0, 2]], whole[:2], atol=2e-6)
    assert bert.engine.stats().healthy


@pytest.mark.clause("D-nan")
@pytest.mark.parametrize("fault", ["nan", "overflow"])
def test_a_text_without_a_result_fails_alone_and_the_self_test_runs_at_once(
    bert: Served, gate: Gate, fault: str
) -> None:
    """As an overflow in float16 does; the neighbours are answered, and the engine stays healthy."""
    texts = ["fog", "rain and fog", "dog"]
    length = len(bert.engine.tokenize(texts[1], True, None))
    whole = bert.embed(texts).vectors

    def spoilt(model: Model, batch: PackedBatch) -> dict[Output, Rows]:
        vectors = gate.original(model, batch, DENSE)[Output.DENSE].values.clone()
        bad = np.diff(batch.cu_seqlens) == length
        if bad.any() and fault == "overflow":
            raise OverflowError("int too big to convert")
        vectors[torch.from_numpy(bad), 5] = torch.nan
        return {Output.DENSE: Rows(vectors)}

    gate.instead = spoilt
    before = bert.engine.stats().batches
    job = bert.embed(texts)

    assert {row: type(error) for row, error in job.errors.items()} == {1: InferenceFailed}
    np.testing.assert_allclose(job.vectors[[0, 2]], whole[[0, 2]], atol=2e-6)
    until(lambda: bert.engine._doubt is None)
    assert bert.engine.stats().batches > before + (1 if fault == "nan" else 2)  # the self-test among them
    assert bert.engine.stats().healthy
    bert.engine.self_test(WAIT_S)
    assert bert.embed(["fog"]).errors == {}


def test_an_id_that_has_no_weights_fails_its_text_alone(bert: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the check of ids has let it pass."""
    monkeypatch.setattr(TextTokenizer, "_check_ids", lambda *_: None)
    ids = [np.array([2, one, 3], np.int32) for one in (5, 2_000_000_000, 6)]

    job = bert.embed(ids)

    assert {row: type(error) for row, error in job.errors.items()} == {1: InferenceFailed}
    assert np.isfinite(job.vectors).all()
    assert job.vectors[[0, 2]].any(axis=1).all()


def test_a_device_that_fails_its_self_test_after_a_bad_result_is_reported_at_once(bert: Served, gate: Gate) -> None:
    faults: queue.Queue[str] = queue.Queue()
    bert.engine._on_fault = faults.put

    def fail(_model: Model, batch: PackedBatch) -> dict[Output, Rows]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gate.instead = fail
    assert isinstance(bert.embed(["fog"]).errors[0], InferenceFailed)

    assert "illegal memory access" in faults.get(timeout=WAIT_S)
    with pytest.raises(Unavailable, match="illegal memory access"):
        bert.send(["fog"])


def test_an_input_that_breaks_the_tokenizer_fails_alone(
    bert: Served, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TextTokenizer.encode_all

    def encode_all(tokenizer: TextTokenizer, inputs: list[Input], options: TokenizeOptions) -> Any:
        if "dog" in inputs:
            raise OverflowError("Python integer 4294967296 out of bounds for int32")
        return original(tokenizer, inputs, options)

    monkeypatch.setattr(TextTokenizer, "encode_all", encode_all)
    job = bert.embed(["fog", "dog"])

    assert {row: type(error) for row, error in job.errors.items()} == {1: TokenizerFailed}
    assert bert.engine.stats().healthy


def test_a_forward_that_hangs_is_noticed_after_a_limit_by_its_size(
    bert: Served, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """Intervals of the watch count, not the clock: a process that is stopped as a whole has not hung."""
    faults: queue.Queue[str] = queue.Queue()
    bert.engine._on_fault = faults.put
    gate.hold()
    job = bert.send(["fog"])
    assert gate.held.wait(WAIT_S)
    for _ in range(11):  # the first sees that a batch is under way; the limit is 5 s
        bert.engine.detect_hang(0.5)
    assert faults.empty()

    bert.engine.detect_hang(0.5)
    assert "has not ended within 5 s" in faults.get(timeout=WAIT_S)
    (record,) = (record for record in caplog.records if record.message == "a forward hangs")
    assert "self.open.wait" in record.stacks
    gate.open.set()
    bert.wait(job)


def test_slow_batches_raise_the_limit_of_a_forward(bert: Served, gate: Gate) -> None:
    bert.engine._finisher.slowest_s = 0.1  # per token, as on a slow device
    gate.hold()
    job = bert.send(["fog"])
    assert gate.held.wait(WAIT_S)
    for _ in range(100):
        bert.engine.detect_hang(1.0)

    assert bert.engine.stats().healthy
    gate.open.set()
    bert.wait(job)


def test_a_prompt_that_cannot_be_tokenized_fails_its_texts_only(
    model_dir: Callable[..., Path], serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(model_dir("bert", prompts={"q": "ask: "}))

    def refuse(tokenizer: TextTokenizer, prompt: str) -> int:
        if prompt:
            raise TokenizerFailed("tokenizer error")
        return 0

    monkeypatch.setattr(TextTokenizer, "prompt_len", refuse)

    assert {type(error) for error in served.embed(["fog"], prompt_name="q").errors.values()} == {TokenizerFailed}
    assert served.embed(["fog"]).errors == {}


def test_a_thread_that_ends_by_anything_makes_the_engine_unhealthy(
    bert: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As pyo3 raises it."""

    def panic(*args: object) -> None:
        raise Panic("the library panicked")

    monkeypatch.setattr(bert.engine.tokenizer, "encode_all", panic)
    bert.send(["fog"])
    bert.engine._tokenizing[0].join(WAIT_S)

    with pytest.raises(Unavailable, match="the library panicked"):
        bert.engine.self_test(WAIT_S)


def test_a_defect_on_the_callers_thread_fails_its_queries_and_makes_the_engine_unhealthy(
    minilm: Path, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teimgr.engine.runner._ON_CALLER_S", math.inf)  # on a busy machine too
    served = serve(minilm)

    def computed_here() -> bool:
        [job] = [served.wait(job) for job in served.send_together(["fog"])]
        return served.delivered_by[job] == threading.get_ident()

    until(computed_here, "a query computed by its caller", WAIT_S)

    def broken(runner: Runner, left: list[list[QueueEntry]]) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(Runner, "_execute", broken)
    [job] = served.send_together(["fog"])

    assert isinstance(served.wait(job).errors[0], InferenceFailed)
    with pytest.raises(Unavailable, match="a defect"):
        served.engine.self_test(WAIT_S)


def test_a_proof_goes_through_the_device_and_a_hanging_one_fails_it(
    bert: Served, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teimgr.engine.engine._RECENT_BATCH_S", 0.0)
    before = bert.engine.stats().batches
    bert.engine.self_test(WAIT_S)
    assert bert.engine.stats().batches == before + 1

    gate.hold()
    with pytest.raises(DeadlineExceeded, match="no answer"):
        bert.engine.self_test(0.05)
    gate.open.set()
    bert.engine.self_test(WAIT_S)


def test_a_device_that_answers_wrongly_fails_the_proof(
    bert: Served, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teimgr.engine.engine._RECENT_BATCH_S", 0.0)
    gate.instead = lambda _model, batch: {Output.DENSE: Rows(torch.ones(batch.texts, 32))}

    with pytest.raises(Unavailable, match="has changed since the model was loaded"):
        bert.engine.self_test(WAIT_S)


def test_a_batch_just_finished_is_proof_enough(bert: Served, gate: Gate) -> None:
    bert.embed(["fog"])
    gate.hold()
    bert.engine.self_test(0.0)
    gate.open.set()


def test_threads_can_change_while_it_serves(bert: Served) -> None:
    before = bert.embed(["fog"]).vectors
    bert.engine.set_threads(CpuThreads(1, 1))

    np.testing.assert_allclose(bert.embed(["fog"]).vectors, before, atol=2e-6)


def left_since(before: set[threading.Thread]) -> list[str]:
    """Threads of engines that were not there then; other tests' engines may run on."""
    return [t.name for t in threading.enumerate() if t.name.startswith("teimgr-") and t not in before]


def test_closing_finishes_what_waits(model_dir: Callable[..., Path], serve: Callable[..., Served]) -> None:
    before = set(threading.enumerate())
    served = serve(model_dir("bert"))
    job = served.send([LONG] * 200, Lane.BULK)  # more than is tokenized at once
    begun = time.monotonic()
    served.engine.close(grace_s=WAIT_S)

    assert time.monotonic() - begun < WAIT_S, "a thread was not told that nothing more comes"
    assert served.wait(job).errors == {}
    assert not left_since(before)
    with pytest.raises(Unavailable):
        served.send(["fog"])


def test_closing_without_grace_fails_what_waits(bert: Served, gate: Gate) -> None:
    gate.hold()
    held = bert.send(["rain"])
    assert gate.held.wait(WAIT_S)
    waiting = bert.send(["fog"] * 3)
    closer = threading.Thread(target=bert.engine.close, args=(0.0,))
    closer.start()
    until(lambda: bert.engine._queue._abandoned)
    gate.open.set()
    closer.join(WAIT_S)

    assert bert.wait(held).errors == {}
    assert {type(error) for error in bert.wait(waiting).errors.values()} == {Unavailable}


def test_what_cannot_be_loaded_is_refused_with_a_reason(
    tmp_path: Path, serve: Callable[..., Served], model_dir: Callable[..., Path]
) -> None:
    with pytest.raises(ModelNotFound):
        serve(tmp_path / "nowhere")
    with pytest.raises(InvalidConfig, match="dtype"):
        serve(model_dir("bert"), dtype="int4")
    with pytest.raises(InvalidConfig, match="no prompts were found"):
        serve(model_dir("bert"), default_prompt_name="query")

    broken = build("bert", tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(ModelLoadFailed, match="all files of weights have 64 bytes"):
        serve(broken)

    other = build("bert", tmp_path / "other")
    (other / "model.safetensors").write_bytes((model_dir("distilbert") / "model.safetensors").read_bytes())
    with pytest.raises(ModelLoadFailed, match="weights are missing"):
        serve(other)

    wordless = build("bert", tmp_path / "wordless")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (wordless / name).unlink()
    with pytest.raises(ModelLoadFailed, match="tokenizer"):
        serve(wordless)


def test_the_length_limit_is_never_over_the_batch(model_dir: Callable[..., Path], serve: Callable[..., Served]) -> None:
    served = serve(model_dir("bert"), max_batch_tokens=16)

    assert served.engine.info.max_input_length == 16
    assert served.embed([LONG]).tokens == 16


def test_an_engine_is_made_by_load_only_when_it_proved_itself(
    model_dir: Callable[..., Path], serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    nothing = {Output.DENSE: HostRows(np.full((1, 32), np.nan, np.float32))}
    monkeypatch.setattr(HostCopies, "wait", lambda self: nothing)
    with pytest.raises(ModelLoadFailed, match="NaN"):
        serve(model_dir("bert"))
    assert not left_since(before)


async def test_a_forked_worker_serves_and_keeps_little_memory_of_its_own(minilm: Path) -> None:
    """It does not hang on a lost pool of threads, and the embedding tables stay mapped from the file."""
    texts: list[str | None] = [f"a text of {number} words" for number in range(200)]
    with WorkerProcess(minilm, threads=2) as worker:
        link, _ = await worker.watcher("ready")
        found = table((await link.ask(Method.EMBED_ARROW, arrow(texts))).reply)
        rollup = Path(f"/proc/{worker.process.pid}/smaps_rollup").read_text()

    assert len(found) == len(texts)
    assert found["error"].null_count == len(texts)
    (private_kib,) = (int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_Dirty:"))
    assert private_kib < 180 << 10


def test_self_tests_are_counted_apart_from_the_texts_of_callers(bert: Served) -> None:
    before = bert.engine.stats()
    assert before.own_texts, "that of the load"
    bert.engine._run_self_test(WAIT_S)
    after = bert.engine.stats()

    assert (after.batches, after.own_texts) == (before.batches + 1, before.own_texts + 1)
    assert after.own_tokens > before.own_tokens
    for one in ("texts", "tokens", "lanes", "by_texts", "by_tokens"):
        assert getattr(after, one) == getattr(before, one), one
