"""Equal inputs under way are computed once, and a cache gives the same bits, to nobody but the tenant that asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.conftest import Served
from tests.support.card import StandInCard
from tests.support.models import build, build_cross_encoder, build_m3
from tests.support.polling import until

from teimgr.engine.job import InferOptions, Job, Lane, Output, Pair
from teimgr.engine.known_results import RepeatSample, ResultCache

TEXT, OTHER = "The boats lie in the harbour.", "Rain fell all night."


class Gated(Served):
    """An engine whose batches wait for `open`, and are counted by their texts."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.batches: list[int] = []
        model = self.engine._runners[-1]._model
        run = model.run

        def gated(batch: Any, outputs: Any) -> Any:
            self.batches.append(batch.texts)
            self.entered.set()
            assert self.gate.wait(60)
            return run(batch, outputs)

        model.run = gated  # type: ignore[method-assign]

    def shut(self) -> None:
        self.gate.clear()
        self.entered.clear()

    def bulk(self, texts: Sequence[Any], tenant: int = 0, **options: Any) -> Job:
        job = Job(texts, InferOptions(**options), Lane.BULK, tenant=tenant)
        self.engine.submit(job)
        return job

    def twins(self, first: Job, *later: Callable[[], Job]) -> list[Job]:
        """`first` is sent and runs; `later` are sent while it does; all are awaited but a cancelled first."""
        assert self.entered.wait(60)
        jobs = [send() for send in later]
        wanted = sum(len(job.inputs) for job in jobs)
        until(lambda: self.engine._queue.texts(Lane.BULK) == wanted)
        self.gate.set()
        return [self.wait(job) for job in jobs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("bert", tmp_path_factory.mktemp("known"))


@pytest.fixture
def served(folder: Path) -> Iterator[Gated]:
    gated = Gated(folder)
    gated.batches.clear()
    yield gated
    gated.gate.set()
    gated.engine.close(1.0)


def test_an_input_that_comes_while_an_equal_one_runs_is_not_computed(served: Gated) -> None:
    served.shut()
    first = served.bulk([TEXT])
    second, third = served.twins(first, lambda: served.bulk([OTHER, TEXT]), lambda: served.bulk([TEXT]))
    served.wait(first)

    assert served.batches == [1, 1]
    assert served.engine.stats().known_texts == 2
    np.testing.assert_array_equal(second.vectors[1], first.vectors[0])
    np.testing.assert_array_equal(third.vectors[0], first.vectors[0])
    assert (third.tokens, second.errors) == (first.tokens, {})
    again = served.wait(served.bulk([OTHER]))
    np.testing.assert_array_equal(second.vectors[0], again.vectors[0])


def test_a_first_that_is_cancelled_does_not_cancel_the_second(served: Gated) -> None:
    served.shut()
    first = served.bulk([TEXT])
    assert served.entered.wait(60)
    first.cancel()
    (second,) = served.twins(first, lambda: served.bulk([TEXT]))
    assert served.batches == [1]
    np.testing.assert_allclose(np.linalg.norm(second.vectors[0]), 1.0, atol=1e-5)
    assert not served.was_delivered(first)


def test_an_input_with_other_options_has_its_own_result(served: Gated) -> None:
    served.shut()
    first = served.bulk([TEXT])
    short, plain, hidden = served.twins(
        first,
        lambda: served.bulk([TEXT], dimensions=4),
        lambda: served.bulk([TEXT], normalize=False),
        lambda: served.bulk([TEXT], outputs=frozenset({Output.TOKENS})),
    )
    served.wait(first)
    assert short.vectors.shape == (1, 4)
    assert np.linalg.norm(plain.vectors[0]) != pytest.approx(1.0, abs=1e-3)
    assert hidden.tokens_of[0] is not None
    assert served.batches == [1, 1]  # for the hidden states, which the first did not ask for


def test_another_tenants_input_is_computed_on_its_own(served: Gated) -> None:
    served.shut()
    first = served.bulk([TEXT], tenant=1)
    other, own = served.twins(first, lambda: served.bulk([TEXT], tenant=2), lambda: served.bulk([TEXT], tenant=1))
    served.wait(first)
    assert served.batches == [1, 1]
    assert served.engine.stats().known_texts == 1
    np.testing.assert_array_equal(other.vectors, own.vectors)


def test_equal_inputs_of_a_batch_are_computed_once_for_each_tenant(served: Gated) -> None:
    served.shut()
    first = served.bulk([OTHER])
    jobs = served.twins(first, *(partial(served.bulk, [TEXT], tenant=tenant) for tenant in (1, 2, 2, 1, 1)))
    served.wait(first)
    assert served.batches == [1, 2]  # with one for all, the time of a batch would tell who asks the same
    assert len({job.vectors.tobytes() for job in jobs}) == 1


def test_an_input_that_comes_after_the_end_is_computed(served: Gated) -> None:
    served.wait(served.bulk([TEXT]))
    served.wait(served.bulk([TEXT]))
    assert served.batches == [1, 1]


KINDS: dict[str, tuple[Callable[[Path], Any], Any, frozenset[Output]]] = {
    "dense": (lambda path: build("bert", path), TEXT, frozenset({Output.DENSE})),
    "three outputs": (build_m3, TEXT, frozenset({Output.DENSE, Output.SPARSE, Output.MULTI_VECTOR})),
    "scores": (lambda path: build_cross_encoder("bert", path), Pair(TEXT, OTHER), frozenset({Output.SCORES})),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_result_is_the_computed_one_bit_for_bit(kind: str, tmp_path: Path) -> None:
    make, item, outputs = KINDS[kind]
    make(tmp_path)
    served = Gated(tmp_path, cache_bytes=2**20)
    try:
        first = served.wait(served.bulk([item], outputs=outputs))
        served.batches.clear()
        second = served.wait(served.bulk([item], outputs=outputs))
        query = served.wait(served.send([item], outputs=outputs))
        assert served.batches == []
        for job in (second, query):
            assert (job.tokens, job.errors) == (first.tokens, {})
            np.testing.assert_array_equal(job.vectors, first.vectors)
            np.testing.assert_array_equal(job.scores, first.scores)
            for one, other in zip(job.sparse, first.sparse, strict=True):
                assert one is not None
                assert other is not None
                np.testing.assert_array_equal(one.indices, other.indices)
                np.testing.assert_array_equal(one.values, other.values)
            for here, there in zip(job.multi_vectors, first.multi_vectors, strict=True):
                np.testing.assert_array_equal(np.asarray(here), np.asarray(there))
        served.wait(served.bulk([item], tenant=5, outputs=outputs))
        assert served.batches == [1]  # what another one asked is not known to it
        served.engine.self_test(60.0)
    finally:
        served.engine.close(1.0)


def numbers(value: float, count: int = 100) -> dict[Output, Any]:
    return {Output.DENSE: (np.full(count, value, np.float32), None)}


def test_the_cache_is_bounded_in_bytes_and_loses_what_was_not_used_for_longest() -> None:
    cache = ResultCache(3000)
    dense = frozenset({Output.DENSE})
    for i in range(3):
        cache.put((bytes([i]) * 16,), numbers(i))
    assert cache.find((bytes([0]) * 16,), dense) is not None
    cache.put((bytes([3]) * 16,), numbers(3))
    assert cache.bytes <= 3000
    found = [cache.find((bytes([i]) * 16,), dense) is not None for i in range(4)]
    assert found == [True, False, True, True]
    cache.put((b"large",), numbers(1, 1000))
    assert cache.find((b"large",), dense) is None
    cache.put((b"nan",), numbers(float("nan")))
    assert cache.find((b"nan",), dense) is None
    assert cache.find((bytes([0]) * 16,), frozenset({Output.TOKENS})) is None
    assert len(cache) == 3


def test_what_is_kept_stays_when_the_memory_that_it_came_in_is_used_again() -> None:
    """Results of a card come in pinned memory, which the next batch gets."""
    cache, values, positions = ResultCache(3000), np.ones(3, np.float32), np.arange(3)
    cache.put((b"sparse",), {Output.SPARSE: (values, positions)})
    values[:], positions[:] = 7.0, 7
    found = cache.find((b"sparse",), frozenset({Output.SPARSE}))
    assert found is not None
    assert [each.tolist() for each in found[Output.SPARSE] if each is not None] == [[1.0] * 3, [0, 1, 2]]


def test_a_card_keeps_the_entries_of_sparse_vectors(card: StandInCard, tmp_path: Path) -> None:
    build_m3(tmp_path)
    served = Served(tmp_path, dtype="bfloat16", cache_bytes=2**20)
    try:
        outputs = frozenset({Output.SPARSE})
        (first,) = served.embed([TEXT], outputs=outputs).sparse
        served.embed([OTHER], outputs=outputs)
        (again,) = served.embed([TEXT], outputs=outputs).sparse
        assert first is not None
        assert again is not None
        assert again.indices.tolist() == first.indices.tolist()
    finally:
        served.engine.close(1.0)


def test_one_in_eight_texts_tells_how_many_come_again() -> None:
    sample = RepeatSample()
    texts = [(str(i).encode(),) for i in range(4000)]
    sample.count(texts)
    assert 300 < sample.sampled < 700
    assert sample.repeated == 0
    once = sample.sampled
    sample.count(texts[:2000])
    assert sample.sampled < 2 * once
    assert sample.repeated == sample.sampled - once
