"""CUDA graphs of the forward: a batch is one launch instead of some 170, which take longer than their execution.

On an H200's host a layer of BERT takes a millisecond to launch kernel by kernel, and 0.4 ms to run with 16,384 tokens
(`bench card`, step forward). So graphs are used for bulk too, up to `most_tokens` of a model's width.

A graph serves a `Bucket` of batches; smaller batches are filled with idle tokens after the last text and with empty
texts. Another thread captures it when its bucket is requested for the third time, or in advance (`prepare`); the
engine's thread does not wait. The graph is used once its results equal those of the forward for that batch and for
another one. A failure before that only ends the use of graphs.

The capturing thread launches its work on the engine's stream, between the engine's batches: graphs share the memory of
intermediate results, so only one may run at a time. Only the capture, which executes nothing, has a separate stream. A
graph's inputs and result are outside of the shared memory, so only a launch must not be interrupted.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from teimgr.engine import gpu
from teimgr.engine.batching.batch import Encoded, PackedBatch, copy_to, pack
from teimgr.spec import GRAPH_TOKENS

log = logging.getLogger(__name__)

MAX_TOKENS = 32_768
MIN_MOST_TOKENS = 4096
_SMALL_WORK = MAX_TOKENS * 1024**2  # tokens × width²: a larger layer runs longer than its launches take
_LARGE = 4096  # tokens above which the kernels take as long as the launches
# Limits of tokens of all large graphs, each of which keeps a result, and of all small ones.
_MAX_LARGE_TOKENS, _MAX_SMALL_TOKENS = 2 * GRAPH_TOKENS // 3, GRAPH_TOKENS // 3
_MIN_TOKENS = 16
_MIN_LONGEST = 64
_QUERY_LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_CAPTURED_AT = 3  # requests for a bucket
_MAX_GRAPHS = 64  # of small ones, and of large ones
_LOWEST_COSINE, _LOWEST_MEAN_COSINE = 0.99, 0.999  # of tokens' hidden states; a row's length changes the order of sums

_Row = TypeVar("_Row", Tensor, NDArray[np.int64])


class Bucket(NamedTuple):
    """The shape of a graph: limits of tokens, of texts and of the longest text; with token types if `typed`."""

    tokens: int
    texts: int
    longest: int
    typed: bool


@dataclass(frozen=True, slots=True)
class RowInputs:
    """The inputs of a graph on the device: ids, positions and types int64 [tokens], borders int32 [texts + 1]."""

    ids: Tensor
    positions: Tensor
    types: Tensor | None
    borders: Tensor
    longest: int


Forward = Callable[[RowInputs], Tensor]
"""Inputs of one row → hidden states [tokens, H]; undefined for idle tokens."""


class Capture(Protocol):
    """Captures the launches of a function, and returns a function that repeats them."""

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        """Raises RuntimeError: torch's own."""
        ...


class CudaCapture:
    """Capture by CUDA. All graphs share one memory pool, since only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        # First run: what libraries load and allocate must not be in the graph. On the engine's stream, because work on
        # the capture stream would use cuBLAS's work space at the same time as graphs.
        body()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # "thread_local": other threads call CUDA. torch.cuda.graph would wait for the device and empty the cache.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                body()
            except BaseException:
                with suppress(RuntimeError):  # a consequence of the body's exception
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay


def most_tokens(width: int) -> int:
    """The largest batches for which graphs pay, with hidden states of `width`."""
    return min(MAX_TOKENS, max(MIN_MOST_TOKENS, _SMALL_WORK // width**2))


def bucket_of(batch: PackedBatch, most: int = MAX_TOKENS) -> Bucket | None:
    """The smallest bucket for a batch; None for more than `most` tokens, or texts that do not see all of theirs."""
    if batch.keys is not None or batch.tokens > most:
        return None
    # Idle tokens cost as much as others, empty texts almost nothing: large buckets have fine steps of tokens and coarse
    # ones of texts, so that they are few.
    tokens, step = _rounded(batch.tokens, _MIN_TOKENS), 2 if batch.tokens > _LARGE else 1
    texts, longest = _power(batch.texts, step=step), _power(batch.max_seqlen, step * _MIN_LONGEST, step)
    return Bucket(tokens, texts, longest, batch.type_ids is not None)


def host_row(batch: PackedBatch, bucket: Bucket, offset: int) -> NDArray[np.int64]:
    """The inputs of a graph as one array, in the order of `RowInputs`: idle tokens are ids 0 at the first position."""
    row = np.zeros(_row_numbers(bucket), dtype=np.int64)
    ids, positions, types, borders = _parts(row, bucket)
    ids[: batch.tokens] = batch.ids
    positions[:] = offset
    positions[: batch.tokens] += batch.position_ids
    if batch.type_ids is not None:
        types[: batch.tokens] = batch.type_ids
    ends = borders.view(np.int32)[: bucket.texts + 1]
    ends[:] = batch.cu_seqlens[-1]
    ends[: batch.texts + 1] = batch.cu_seqlens
    return row


class ForwardGraphs:
    """Graphs of one forward for batches of up to `most` tokens; only one thread at a time calls `hidden`. `offset` is
    that of positions."""

    def __init__(
        self, forward: Forward, offset: int, device: torch.device, capture: Capture, most: int = MAX_TOKENS
    ) -> None:
        self._most = most
        self._forward = forward
        self._offset = offset
        self._device = device
        self._capture = capture
        self._uses: Counter[Bucket] = Counter()
        self._graphs: dict[Bucket, _Graph] = {}
        self._asked: set[Bucket] = set()  # captured or waiting for their capture
        self._waiting: deque[tuple[Bucket, PackedBatch]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_capturing = False
        self._is_used = True  # False after a failure, and after `close`
        self._fault: Exception | None = None  # a permanent fault of the device

    def __len__(self) -> int:
        return len(self._graphs)

    def hidden(self, batch: PackedBatch) -> Tensor | None:
        """Hidden states [T, H] by a graph; None if no graph fits this batch.

        Raises:
            RuntimeError: torch's own, where the device has failed for good during a capture.
        """
        if self._fault is not None:
            raise self._fault
        bucket = bucket_of(batch, self._most) if self._is_used else None
        if bucket is None:
            return None
        if (graph := self._graphs.get(bucket)) is not None:
            return graph.run(batch, self._offset)
        self._uses[bucket] += 1
        if self._uses[bucket] == _CAPTURED_AT:
            self._ask_for(bucket, batch)
        return None

    def prepare(self, batches: Iterable[PackedBatch]) -> None:
        """Capture the graphs of these batches now, rather than when they are asked for again and again."""
        for batch in batches:
            if (bucket := bucket_of(batch, self._most)) is not None:
                self._ask_for(bucket, batch)

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is to be captured; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_capturing, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End the capturing thread, after its current step; False where that takes longer."""
        with self._changed:
            self._is_used = False
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _ask_for(self, bucket: Bucket, batch: PackedBatch) -> None:
        with self._changed:
            alike = [each.tokens for each in self._asked if (each.tokens > _LARGE) is (bucket.tokens > _LARGE)]
            most = _MAX_LARGE_TOKENS if bucket.tokens > _LARGE else _MAX_SMALL_TOKENS
            is_full = len(alike) >= _MAX_GRAPHS or sum(alike) + bucket.tokens > most
            if not self._is_used or is_full or bucket in self._asked:
                return
            self._asked.add(bucket)
            self._waiting.append((bucket, batch))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="teimgr-graphs", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        """The capturing thread's body."""
        while True:
            with self._changed:
                self._is_capturing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or not self._is_used)
                if not self._is_used:
                    return
                bucket, batch = self._waiting.popleft()
                self._is_capturing = True
            self._try(bucket, batch)

    @torch.inference_mode()
    def _try(self, bucket: Bucket, batch: PackedBatch) -> None:
        """Capture and prove a graph."""
        try:
            graph = _Graph(bucket, self._forward, self._device, self._capture)
            for proof in (batch, shortened(batch)):
                if not self._is_used:
                    return
                low, mean = self._closeness(graph, proof)
                if low < _LOWEST_COSINE or mean < _LOWEST_MEAN_COSINE:
                    raise ValueError(f"its results differ: cosines {low:.4f} at least, {mean:.4f} on average")
        except Exception as error:  # of any type: the forward is used without graphs
            if gpu.fault_of(error, self._device):
                self._fault = error
            with self._changed:
                self._is_used = False
                self._waiting.clear()
            self._graphs.clear()
            log.warning("the forward is launched kernel by kernel: no graph for %s: %s", bucket, error)
        else:
            self._graphs[bucket] = graph
            log.info("captured a graph for %s; there are %d", bucket, len(self._graphs))

    def _closeness(self, graph: _Graph, batch: PackedBatch) -> tuple[float, float]:
        """The lowest and the mean cosine of a graph's hidden states to those of the forward for the batch alone."""
        exact = Bucket(batch.tokens, batch.texts, batch.max_seqlen, batch.type_ids is not None)
        row = torch.from_numpy(host_row(batch, exact, self._offset)).to(self._device)
        truth = self._forward(_inputs(row, exact)).float()
        cosines = functional.cosine_similarity(graph.run(batch, self._offset).float(), truth).nan_to_num(-1.0)
        return float(cosines.min()), float(cosines.mean())


class _Graph:
    def __init__(self, bucket: Bucket, forward: Forward, device: torch.device, capture: Capture) -> None:
        self._bucket = bucket
        self._row = torch.zeros(_row_numbers(bucket), dtype=torch.int64, device=device)
        inputs = _inputs(self._row, bucket)
        # A first run has the forward's shape and type. Allocated outside of the memory that graphs share.
        self._result = torch.empty_like(forward(inputs))
        self._replay = capture(lambda: self._keep(forward(inputs)))

    def _keep(self, hidden: Tensor) -> None:
        self._result.copy_(hidden)

    def run(self, batch: PackedBatch, offset: int) -> Tensor:
        """A copy of the hidden states: the next run writes them to the same place."""
        copy_to(self._row, host_row(batch, self._bucket, offset))
        self._replay()
        return self._result[: batch.tokens].clone()


def shortened(batch: PackedBatch) -> PackedBatch:
    """Other texts of the same bucket: each text from its end on, and without its first token where it has two."""
    texts = []
    for begin, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        kept = slice(min(begin + 1, stop - 1), stop)
        types = None if batch.type_ids is None else batch.type_ids[kept].astype(np.uint8)
        texts.append(Encoded(batch.ids[kept][::-1].astype(np.int32), types))
    return pack(texts)


def queries(known: Sequence[Encoded], longest: int) -> list[PackedBatch]:
    """A query of each of the usual lengths, of ids of the `known` texts, but of none above `longest` tokens."""
    ids = np.concatenate([text.ids for text in known])
    lengths = [length for length in _QUERY_LENGTHS if length <= longest]
    return [pack([Encoded(np.resize(ids, length))]) for length in lengths]


def graphs_are_wanted() -> bool:
    return os.environ.get("TEIMGR_CUDA_GRAPHS") != "0"


def _row_numbers(bucket: Bucket) -> int:
    return 3 * bucket.tokens + bucket.texts // 2 + 1


def _parts(row: _Row, bucket: Bucket) -> tuple[_Row, _Row, _Row, _Row]:
    at = bucket.tokens
    return row[:at], row[at : 2 * at], row[2 * at : 3 * at], row[3 * at :]


def _inputs(row: Tensor, bucket: Bucket) -> RowInputs:
    ids, positions, types, borders = _parts(row, bucket)
    ends = borders.view(torch.int32)[: bucket.texts + 1]
    return RowInputs(ids, positions, types if bucket.typed else None, ends, bucket.longest)


def _power(number: int, least: int = 1, step: int = 1) -> int:
    """The least `least` · 2 ** (k · `step`) from `number` on, for a whole k; `least` is a power of two."""
    bits = (number - 1).bit_length()
    return max(least, 1 << (bits + (least.bit_length() - 1 - bits) % step))


def _rounded(number: int, least: int) -> int:
    """The next power of two or three quarters of one: a third more at most; from `_LARGE` on an eighth more."""
    power = _power(number, least)
    if number > _LARGE:
        step = power // 16
        return -(-number // step) * step
    return power * 3 // 4 if power > least and number <= power * 3 // 4 else power
