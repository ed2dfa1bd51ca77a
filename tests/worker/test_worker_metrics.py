"""The `te_*` text: names, labels and buckets of Text Embeddings Inference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from teimgr.engine.engine import EngineStats
from teimgr.engine.job import InferOptions, Job, Lane, Output
from teimgr.errors import EmptyInput, InferenceFailed, InvalidInput, Overloaded
from teimgr.observability.catalogue import DURATION_BOUNDS
from teimgr.worker.calls import WorkerCall
from teimgr.worker.worker_metrics import Histogram, TeiMetrics

PARTS = ("", "_tokenization", "_queue", "_inference")


def done(texts: int = 1, tokens: int = 8, output: Output = Output.DENSE) -> Job:
    job = Job(["a"] * texts, InferOptions(frozenset({output})), Lane.INTERACTIVE)
    job.tokens = tokens
    job.tokenization_ns, job.queue_ns, job.inference_ns = 10**6, 10**7, 10**8
    return job


def stats(**counts: Any) -> EngineStats:
    """Of an engine that has run five batches: of 1, 2, 3, 4 and 5000 texts with 3, 4, 5, 8 and 9000 tokens."""
    by_texts, by_tokens = [0] * 32, [0] * 32
    by_texts[:3], by_texts[13] = [1, 1, 2], 1
    by_tokens[2:4], by_tokens[14] = [2, 2], 1
    usual = {"queued_texts": 3, "queued_tokens": 30, "running_tokens": 0, "batches": 5, "texts": 5010, "tokens": 9020}
    rest = {"failed_texts": 0, "busy_s": 0.5, "healthy": True}
    return EngineStats(by_texts=tuple(by_texts), by_tokens=tuple(by_tokens), **usual, **rest, **counts)


def buckets_of(family: Metric) -> dict[float, float]:
    return {float(sample.labels["le"]): sample.value for sample in family.samples if sample.name.endswith("_bucket")}


def parsed(metrics: TeiMetrics) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(metrics.render())}


def values(family: Metric, label: str) -> dict[str, float]:
    return {sample.labels[label]: sample.value for sample in family.samples}


@pytest.fixture
def metrics() -> TeiMetrics:
    """One call of one text, one of four; limits of a model of 512 tokens."""
    metrics = TeiMetrics()
    metrics.attach(stats, max_input_length=512)
    for texts in (1, 4):
        metrics.received(texts)
        metrics.finished(done(texts, 8 * texts), WorkerCall(1, Lane.INTERACTIVE), None)
    return metrics


def test_only_type_lines_and_no_total(metrics: TeiMetrics) -> None:
    lines = metrics.render().splitlines()

    assert {line.split()[1] for line in lines if line.startswith("#")} == {"TYPE"}
    assert not any("_total" in line for line in lines)
    assert 'te_request_count{method="single"} 1' in lines
    assert "te_embed_count 5" in lines


def test_calls_and_texts_are_counted(metrics: TeiMetrics) -> None:
    families = parsed(metrics)

    assert values(families["te_request_count"], "method") == {"single": 1, "batch": 1}
    assert values(families["te_request_success"], "method") == {"single": 1, "batch": 1}
    assert families["te_embed_count"].samples[0].value == 5
    assert families["te_embed_success"].samples[0].value == 5
    assert families["te_queue_size"].samples[0].value == 3
    assert families["te_queue_size"].type == "gauge"


@pytest.mark.parametrize("part", PARTS)
def test_durations_have_teis_buckets_and_seven_more(metrics: TeiMetrics, part: str) -> None:
    families = parsed(metrics)

    for prefix, count in (("te_request", 2), ("te_embed", 5)):
        family = families[f"{prefix}{part}_duration"]
        buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
        bounds = [float(sample.labels["le"]) for sample in buckets]
        assert family.type == "histogram"
        assert bounds == [*(pytest.approx(1e-5 * 1.5**k) for k in range(1, 43)), float("inf")]
        assert [sample.value for sample in buckets] == sorted(sample.value for sample in buckets)
        assert buckets[-1].value == count


def test_lengths_have_powers_of_two_up_to_the_models_limit(metrics: TeiMetrics) -> None:
    family = parsed(metrics)["te_request_input_length"]
    buckets = {sample.labels["le"]: sample.value for sample in family.samples if sample.name.endswith("_bucket")}

    assert [float(bound) for bound in buckets] == [*(2.0**k for k in range(10)), float("inf")]
    assert buckets["4.0"] == 0
    assert buckets["8.0"] == 5
    assert next(sample.value for sample in family.samples if sample.name.endswith("_sum")) == 40


def test_batches_are_those_of_the_engine_in_powers_of_two(metrics: TeiMetrics) -> None:
    families = parsed(metrics)
    sizes, tokens = buckets_of(families["te_batch_next_size"]), buckets_of(families["te_batch_next_tokens"])

    assert list(sizes) == [*(2.0**k for k in range(13)), float("inf")]
    assert list(tokens) == [*(2.0**k for k in range(21)), float("inf")]
    assert [sizes[bound] for bound in (1, 2, 4, 4096, float("inf"))] == [1, 2, 4, 4, 5]
    assert [tokens[bound] for bound in (2, 4, 8, 8192, 16384, float("inf"))] == [0, 2, 4, 4, 5, 5]
    sums = {s.name: s.value for family in families.values() for s in family.samples if s.name.endswith("_sum")}
    assert sums["te_batch_next_size_sum"] == 5010
    assert sums["te_batch_next_tokens_sum"] == 9020


def test_scores_are_predictions_and_all_else_embeddings() -> None:
    metrics = TeiMetrics()
    for output in Output:
        metrics.received(2)
        metrics.finished(done(2, output=output), WorkerCall(1, Lane.INTERACTIVE), None)

    families = parsed(metrics)

    assert families["te_embed_count"].samples[0].value == 8
    assert families["te_embed_success"].samples[0].value == 8
    assert families["te_predict_count"].samples[0].value == 2
    assert families["te_predict_success"].samples[0].value == 2
    for part in PARTS:
        assert buckets_of(families[f"te_predict{part}_duration"])[float("inf")] == 2
        assert buckets_of(families[f"te_embed{part}_duration"])[float("inf")] == 8


def test_a_message_of_a_stream_is_no_request_but_has_durations() -> None:
    metrics = TeiMetrics()

    metrics.finished(done(), WorkerCall(1, Lane.BULK, streamed=True), None)

    families = parsed(metrics)
    assert "te_request_success" not in families
    assert buckets_of(families["te_request_duration"])[float("inf")] == 1
    assert families["te_embed_success"].samples[0].value == 1


def test_a_series_appears_once_something_was_counted() -> None:
    families = parsed(TeiMetrics())

    assert "te_request_failure" not in families
    assert "te_request_count" not in families
    assert "te_request_duration" not in families


def test_failures_by_teis_reasons() -> None:
    metrics = TeiMetrics()
    for error in (EmptyInput(), InvalidInput("no"), Overloaded(), InferenceFailed("no")):
        metrics.failed(error)
    metrics.dropped()
    metrics.batch_too_large(33)

    assert values(parsed(metrics)["te_request_failure"], "err") == {
        "tokenization": 2,
        "overloaded": 1,
        "inference": 1,
        "dropped": 1,
        "batch_size": 1,
    }
    assert [each.value for each in parsed(metrics)["te_request_count"].samples] == [1]  # the others as they came


def test_rows_that_failed_count_apart() -> None:
    metrics = TeiMetrics()
    job = done(3)
    job.errors = {1: InvalidInput("too long")}

    metrics.received(3)
    metrics.finished(job, WorkerCall(1, Lane.BULK), None)

    families = parsed(metrics)
    assert values(families["te_request_failure"], "err") == {"tokenization": 1}
    assert values(families["te_request_success"], "method") == {"batch": 1}
    assert families["te_embed_success"].samples[0].value == 2


def test_a_reply_that_could_not_be_made_is_a_failure() -> None:
    metrics = TeiMetrics()

    metrics.received(1)
    metrics.finished(done(), WorkerCall(1, Lane.BULK), InferenceFailed("no"))

    assert values(parsed(metrics)["te_request_failure"], "err") == {"inference": 1}
    assert "te_request_success" not in parsed(metrics)


def test_the_counts_of_the_page_have_a_bucket_for_each_bound(metrics: TeiMetrics) -> None:
    counts = metrics.counts()
    assert (counts["requests"], counts["failures"]) == (2, 0)
    assert len(counts["by_duration"]) == len(DURATION_BOUNDS) + 1
    assert sum(counts["by_duration"]) == 2
    metrics.failed(Overloaded("later"))
    assert metrics.counts()["failures"] == 1
    counts["by_duration"][0] = 99
    assert sum(metrics.counts()["by_duration"]) == 2


def test_many_values_are_counted_as_one_by_one() -> None:
    values = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 2.0, 9.0])
    times = np.array([1, 0, 3, 2, 1, 5, 4])
    together, one_by_one = Histogram([0.5, 1.0, 2.0]), Histogram([0.5, 1.0, 2.0])
    together.observe_all(values, times)
    for value, count in zip(values.tolist(), times.tolist(), strict=True):
        one_by_one.observe(value, count)
    assert together.counts == one_by_one.counts
    assert together.samples() == one_by_one.samples()
