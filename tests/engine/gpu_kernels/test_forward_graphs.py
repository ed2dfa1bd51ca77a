"""Small batches through graphs give what the forward itself gives, whatever the graph was captured with."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support import card as stand_in
from tests.support.card import StandInCard
from tests.support.models import TEXTS, build_classifier

from teimgr.engine.backbone import Batching, Transformer
from teimgr.engine.batching.batch import Encoded, PackedBatch, pack
from teimgr.engine.gpu_kernels import forward_graphs
from teimgr.engine.gpu_kernels.forward_graphs import (
    MAX_TOKENS,
    CudaCapture,
    ForwardGraphs,
    RowInputs,
    bucket_of,
    host_row,
    shortened,
)
from teimgr.engine.loading import EngineOptions, load_parts
from teimgr.engine.model import load_model
from teimgr.models.reading import read_layout

from ..conftest import Served

CPU = torch.device("cpu")
WAIT_S = 60.0
Make = Callable[..., tuple[ForwardGraphs, "Forwards"]]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def texts_of(lengths: list[int], typed: bool = False, seed: int = 0) -> PackedBatch:
    random = np.random.default_rng(seed)
    types = [random.integers(0, 2, length).astype(np.uint8) if typed else None for length in lengths]
    ids = [random.integers(5, 60, length).astype(np.int32) for length in lengths]
    return pack([Encoded(one, kind) for one, kind in zip(ids, types, strict=True)])


@given(st.lists(st.integers(1, 600), min_size=1, max_size=60), st.booleans())
def test_a_bucket_holds_its_batch_and_the_rest_is_empty(lengths: list[int], typed: bool) -> None:
    batch = texts_of(lengths, typed)
    bucket = bucket_of(batch)
    if batch.tokens > MAX_TOKENS:
        assert bucket is None
        return
    assert bucket is not None
    assert batch.tokens <= bucket.tokens <= max(16, batch.tokens * (9 / 8 if batch.tokens > 4096 else 3 / 2))
    coarse = 2 if batch.tokens > 4096 else 1
    assert batch.texts <= bucket.texts < 2**coarse * batch.texts
    assert max(lengths) <= bucket.longest < max(64 * coarse + 1, 2**coarse * max(lengths))

    inputs = forward_graphs._inputs(torch.from_numpy(host_row(batch, bucket, 2)), bucket)
    idle = bucket.tokens - batch.tokens
    assert inputs.ids.tolist() == [*batch.ids.tolist(), *[0] * idle]
    assert inputs.positions.tolist() == [*(batch.position_ids + 2).tolist(), *[2] * idle]
    assert (inputs.types is not None) is typed
    assert (
        batch.type_ids is None or inputs.types is None or inputs.types.tolist()[: batch.tokens] == list(batch.type_ids)
    )
    assert inputs.borders.dtype is torch.int32
    assert inputs.borders.tolist() == [*batch.cu_seqlens.tolist(), *[batch.tokens] * (bucket.texts - batch.texts)]


def test_texts_that_do_not_see_all_their_tokens_have_no_bucket() -> None:
    assert bucket_of(pack([Encoded(np.arange(5, dtype=np.int32), keys=3)])) is None


def test_the_texts_of_a_proof_are_others_and_fit_the_same_bucket() -> None:
    batch = texts_of([1, 4, 9], typed=True)
    other = shortened(batch)

    assert np.diff(other.cu_seqlens).tolist() == [1, 3, 8]
    assert other.ids.tolist()[1:4] == batch.ids.tolist()[2:5][::-1]
    assert bucket_of(other) == bucket_of(batch)


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "qwen3", "distilbert"])
@torch.inference_mode()
def test_a_graph_gives_the_hidden_states_of_the_forward(
    family: str, card: StandInCard, model_dir: Callable[..., Path]
) -> None:
    backbone = load_model(read_layout(model_dir(family)), CPU).backbone
    assert isinstance(backbone, Transformer)
    backbone.convert(torch.bfloat16)
    backbone.use(Batching.VARLEN)
    batches = [texts_of(lengths, seed=seed) for seed, lengths in enumerate([[7], [12], [15], [9], [3, 20, 40], [16]])]
    exact = [backbone.hidden(batch) for batch in batches]
    backbone.use_graphs(stand_in.record)
    calls = [backbone.hidden(batches[0]) for _ in range(3)]
    assert backbone.wait_for_graphs(WAIT_S)
    assert backbone.graphs == 1
    module, backbone._module = backbone._module, None  # a graph needs none

    for i in (0, 1, 2, 3, 5):
        torch.testing.assert_close(backbone.hidden(batches[i]).float(), exact[i].float(), atol=0.08, rtol=0.02)
    backbone._module = module
    assert torch.equal(calls[0], exact[0])
    assert torch.equal(backbone.hidden(batches[4]), exact[4])  # of another bucket, which has no graph yet
    backbone.close(WAIT_S)
    assert "teimgr-graphs" not in threads()


def test_an_engine_answers_alike_with_and_without_graphs(
    card: StandInCard, model_dir: Callable[..., Path], serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(model_dir("bert"), dtype="float16")
    backbone: Any = served.engine._runners[0]._model.backbone
    for text in TEXTS * 4:
        served.embed([text])
    assert backbone.wait_for_graphs(WAIT_S)
    assert backbone.graphs > 0
    calls = card.flash_calls
    vectors = np.concatenate([served.embed([text]).vectors for text in TEXTS])
    assert card.flash_calls == calls + 2 * len(TEXTS)

    monkeypatch.setenv("TEIMGR_CUDA_GRAPHS", "0")
    without = serve(model_dir("bert"), dtype="float16")
    plain: Any = without.engine._runners[0]._model.backbone
    assert plain._graphs is None
    np.testing.assert_allclose(vectors, without.embed(TEXTS).vectors, atol=2e-3)


def test_the_head_of_a_classifier_follows_a_graph(card: StandInCard, tmp_path: Path) -> None:
    parts = load_parts(EngineOptions(path=build_classifier("bert", tmp_path), model_id="m", dtype="float16"))
    batch = texts_of([5, 9])
    (output,) = parts.model.outputs
    backbone: Any = parts.model.backbone
    assert backbone.wait_for_graphs(WAIT_S)
    of_queries = backbone.graphs
    scores = [parts.model.run(batch, [output])[output].values for _ in range(3)]
    assert backbone.wait_for_graphs(WAIT_S)
    assert backbone.graphs == of_queries + 1

    module, backbone._module = backbone._module, None  # a graph needs none
    torch.testing.assert_close(parts.model.run(batch, [output])[output].values, scores[0], atol=2e-2, rtol=0)
    backbone._module = module
    parts.model.close(WAIT_S)


class Forwards:
    """A forward of one product; a capture of it gives what `damage` makes of its results."""

    def __init__(self, damage: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._table = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
        self._damage = damage
        self._is_replayed = False
        self.captured_by: list[threading.Thread] = []
        self.began, self.may_capture = threading.Event(), threading.Event()
        self.may_capture.set()

    def __call__(self, row: RowInputs) -> torch.Tensor:
        result = self._table[row.ids] + row.positions.unsqueeze(1)
        return self._damage(result) if self._is_replayed else result

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        self.captured_by.append(threading.current_thread())
        self.began.set()
        self.may_capture.wait(WAIT_S)
        assert torch.is_inference_mode_enabled()
        body()

        def replay() -> None:
            self._is_replayed = True
            body()
            self._is_replayed = False

        return replay


Damage = Callable[[torch.Tensor], torch.Tensor]


def unharmed(result: torch.Tensor) -> torch.Tensor:
    return result


@pytest.fixture
def graphs_of() -> Iterator[Callable[..., tuple[ForwardGraphs, Forwards]]]:
    """Graphs of `Forwards`, whose thread ends with the test."""
    made: list[tuple[ForwardGraphs, Forwards]] = []

    def make(damage: Damage = unharmed) -> tuple[ForwardGraphs, Forwards]:
        forward = Forwards(damage)
        made.append((ForwardGraphs(forward, 0, CPU, forward.capture), forward))
        return made[-1]

    yield make
    for graphs, forward in made:
        forward.may_capture.set()
        assert graphs.close(WAIT_S)


@torch.inference_mode()
def uses(graphs: ForwardGraphs, length: int, count: int) -> list[bool]:
    """Whether a graph served each of so many batches of one text; captures are awaited in between."""
    served = []
    for _ in range(count):
        served.append(graphs.hidden(texts_of([length])) is not None)
        assert graphs.wait(WAIT_S)
    return served


def test_a_sound_graph_serves_from_the_fourth_batch_on(graphs_of: Make) -> None:
    graphs, forward = graphs_of()

    assert uses(graphs, 6, 4) == [False, False, False, True]
    assert uses(graphs, 40, 1) == [False]
    assert [each.name for each in forward.captured_by] == ["teimgr-graphs"]


@torch.inference_mode()
def test_the_engines_thread_does_not_wait_for_a_capture(graphs_of: Make) -> None:
    graphs, forward = graphs_of()
    forward.may_capture.clear()

    assert [graphs.hidden(texts_of([6])) for _ in range(9)] == [None] * 9
    assert [graphs.hidden(texts_of([40])) for _ in range(9)] == [None] * 9
    assert not graphs.wait(0)

    forward.may_capture.set()
    assert graphs.wait(WAIT_S)
    assert len(graphs) == 2
    assert uses(graphs, 6, 1) == [True]


def test_graphs_of_queries_are_there_before_the_first_one(graphs_of: Make) -> None:
    graphs, forward = graphs_of()
    known = [Encoded(np.arange(5, 45, dtype=np.int32))]
    prepared = forward_graphs.queries(known, 100)
    assert [batch.tokens for batch in prepared] == [16, 24, 32, 48, 64, 96]

    graphs.prepare(prepared)
    assert graphs.wait(WAIT_S)
    graphs.prepare(prepared)

    assert [uses(graphs, length, 1) for length in (3, 20, 64, 90)] == [[True]] * 4
    assert len(forward.captured_by) == 6


def test_large_batches_have_graphs_where_their_layers_are_short() -> None:
    """24 · tokens · width² operations a layer: the wider a model, the fewer tokens hide its launches."""
    assert [forward_graphs.most_tokens(width) for width in (384, 768, 1024, 2048, 4096)] == [
        32768,
        32768,
        32768,
        8192,
        4096,
    ]
    bulk = texts_of([512] * 31 + [100])
    bucket = bucket_of(bulk)
    assert bucket is not None
    assert (bucket.tokens, bucket.texts, bucket.longest) == (16384, 64, 512)
    assert bucket_of(bulk, 8192) is None


def test_large_graphs_keep_results_of_so_many_tokens_and_leave_room_for_small_ones(
    graphs_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the card a fleet of large ones had used up all that there might be, and batches beside queries had none."""
    monkeypatch.setattr(forward_graphs, "_LARGE", 50)
    monkeypatch.setattr(forward_graphs, "_MAX_LARGE_TOKENS", 190)
    graphs, _ = graphs_of()

    for length in (80, 100, 120, 40, 20):
        uses(graphs, length, 4)

    assert sorted(bucket.tokens for bucket in graphs._graphs) == [24, 48, 80, 104]


def test_there_are_so_many_graphs_at_most(graphs_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_graphs, "_MAX_GRAPHS", 2)
    graphs, forward = graphs_of()

    for length in (6, 20, 40, 80):
        uses(graphs, length, 4)

    assert len(graphs) == len(forward.captured_by) == 2


@torch.inference_mode()
def test_closing_ends_the_thread_and_what_waits_for_it(graphs_of: Make) -> None:
    graphs, forward = graphs_of()
    forward.may_capture.clear()
    for length in (6, 40, 80):
        [graphs.hidden(texts_of([length])) for _ in range(3)]

    assert forward.began.wait(WAIT_S)
    assert not graphs.close(0.0)  # as where a capture hangs
    forward.may_capture.set()

    assert graphs.close(WAIT_S)
    assert len(forward.captured_by) == 1
    assert uses(graphs, 6, 4) == [False] * 4
    assert len(graphs) == 0


@torch.inference_mode()
def test_a_graphs_result_outlives_the_next_graph(graphs_of: Make) -> None:
    """Graphs share memory for what they compute, and another thread may launch one at any time."""
    shared = torch.zeros(64, 8)

    def into_shared(result: torch.Tensor) -> torch.Tensor:
        return shared[: len(result)].copy_(result)

    graphs, _ = graphs_of(into_shared)
    for length in (6, 40):
        uses(graphs, length, 4)
    one, other = graphs._graphs.values()
    expected = one.run(texts_of([6]), 0)

    one._replay()
    other._replay()

    assert torch.equal(one._result[:6], expected)


def test_an_engine_that_closes_ends_its_captures(
    card: StandInCard, model_dir: Callable[..., Path], serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_capture = threading.Event(), threading.Event()

    def slow(body: Callable[[], None]) -> Callable[[], None]:
        began.set()
        may_capture.wait(WAIT_S)
        return stand_in.record(body)

    monkeypatch.setattr(forward_graphs, "CudaCapture", lambda: slow)
    served = serve(model_dir("bert"), dtype="float16")
    for _ in range(4):
        served.embed([TEXTS[0]])
    assert began.wait(WAIT_S)
    assert "teimgr-graphs" in threads()
    served.embed([TEXTS[0]])

    may_capture.set()
    served.engine.close(WAIT_S)

    assert "teimgr-graphs" not in threads()


def test_a_graph_that_keeps_what_it_was_captured_with_is_refused(
    graphs_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """It is right for the batch at hand; the other batch of the proof shows it."""
    first: list[torch.Tensor] = []

    def stuck(result: torch.Tensor) -> torch.Tensor:
        first.append(result)
        return first[0]

    graphs, _ = graphs_of(stuck)
    assert uses(graphs, 6, 5) == [False] * 5
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "results differ" in caplog.text


def test_a_capture_that_fails_ends_graphs_and_not_the_engine(graphs_of: Make, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs, _ = graphs_of(fail)
    assert uses(graphs, 6, 5) == [False] * 5
    assert uses(graphs, 40, 5) == [False] * 5
    assert caplog.text.count("not permitted") == 1


@torch.inference_mode()
def test_a_fault_of_the_device_during_a_capture_is_one_of_the_next_batch(card: StandInCard, graphs_of: Make) -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        card.fault = torch.AcceleratorError("CUDA error: unspecified launch failure")
        raise card.fault

    graphs, _ = graphs_of(fail)
    assert uses(graphs, 6, 3) == [False] * 3
    with pytest.raises(torch.AcceleratorError):
        graphs.hidden(texts_of([6]))


@pytest.mark.parametrize("ends", [True, False])
def test_what_fails_within_a_capture_is_told_where_its_end_fails_too(
    monkeypatch: pytest.MonkeyPatch, *, ends: bool
) -> None:
    """CUDA ends an invalidated capture with an error of its own; without a GPU it is given here."""
    calls: list[str] = []

    class Graph:
        def capture_begin(self, **_: Any) -> None:
            calls.append("begin")

        def capture_end(self) -> None:
            calls.append("end")
            if not ends:
                raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")

    def body() -> None:
        if calls:
            raise RuntimeError("the cause")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    with pytest.raises(RuntimeError, match="the cause"):
        CudaCapture()(body)
    assert calls == ["begin", "end"]


def test_what_waits_for_the_device_cannot_be_captured() -> None:
    """The stand-in refuses it as CUDA does, so the families above are known to do nothing of the kind."""
    with pytest.raises(RuntimeError, match="capturing"):
        stand_in.record(lambda: torch.ones(2).mul_(torch.ones(2).sum().item()) and None)
