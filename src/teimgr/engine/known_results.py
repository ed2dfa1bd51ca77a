"""Finds results that need not be computed again: of an equal input in a running batch, or in the engine's cache.

Both are searched when a batch begins, by the tokenized input: equal token ids, token types, role and task give equal
results. A tenant finds only its own results, so response times do not reveal the inputs of others. The kept results are
those of the heads, before a request's dimensions and norm are applied.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from teimgr.engine.batching.batch import Encoded
from teimgr.engine.batching.queue import QueueEntry
from teimgr.engine.finisher import Floats, HostRows, KnownBatch
from teimgr.engine.job import Output

Key = tuple[Any, ...]
Numbers = tuple[Floats, NDArray[np.int64] | None]
"""The result of one text: values, and the positions of sparse ones."""
Result = Mapping[Output, Numbers]

OWN_TENANT = -1
"""Tenant of the engine's own jobs, which are always computed, because they test the device."""
RECENT_BYTES = 8 * 2**20
"""The most result bytes of a batch kept for equal inputs that arrived while it ran."""
_SAMPLE_MASK, _SAMPLE_KEPT = 7, 8192
_ENTRY_BYTES = 500  # of a kept result beside its numbers and ids


def keys_of(encoded: Encoded, tenant: int) -> Iterator[Key]:
    """Return a key for each text of a tenant; texts with equal results have equal keys."""
    settings = tenant, encoded.keys, encoded.prompt_tokens, encoded.query, encoded.task
    ids, size = encoded.ids.tobytes(), encoded.length
    types = None if encoded.type_ids is None else encoded.type_ids.tobytes()
    for begin in range(0, encoded.ids.size, size):
        own = None if types is None else types[begin : begin + size]
        yield ids[4 * begin : 4 * (begin + size)], own, *settings


def is_own(key: Key) -> bool:
    """True if the engine itself asked for the text."""
    return bool(key[2] == OWN_TENANT)


class DistinctInputs(NamedTuple):
    """The distinct inputs of a batch: `inputs_of` maps each text to the number of its input, `known` each key.

    Inputs of different tenants are distinct. `known` is empty if it was not needed.
    """

    inputs: list[Encoded]
    inputs_of: NDArray[np.intp]
    known: Mapping[Key, int]


class ResultCache:
    """Results by tenant and input, within `most_bytes`; the least recently used are dropped first. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, Result] = OrderedDict()

    def find(self, key: Key, outputs: frozenset[Output]) -> Result | None:
        """Return the result of an input if all of its `outputs` are kept."""
        with self._lock:
            found = self._kept.get(key)
            if found is None or not outputs <= found.keys():
                return None
            self._kept.move_to_end(key)
            return found

    def put(self, key: Key, result: Result) -> None:
        """Keep a result, unless it has NaN or infinity."""
        own = {output: (of.copy(), at if at is None else at.copy()) for output, (of, at) in result.items()}
        if not all(np.isfinite(values).all() for values, _ in own.values()):
            return
        size = _bytes_of(key, own)
        if size > self.most_bytes:
            return
        with self._lock:
            known = self._kept.pop(key, None)
            if known is not None:
                self.bytes -= _bytes_of(key, known)
            self._kept[key] = own
            self.bytes += size
            while self.bytes > self.most_bytes:
                oldest, gone = self._kept.popitem(last=False)
                self.bytes -= _bytes_of(oldest, gone)

    def __len__(self) -> int:
        return len(self._kept)


def _bytes_of(key: Key, result: Result) -> int:
    numbers = sum(values.nbytes + (0 if at is None else at.nbytes) for values, at in result.values())
    return numbers + len(key[0]) + _ENTRY_BYTES


@dataclass(slots=True)
class RecentBatch:
    """The last batch of a thread, whose results are valid for inputs submitted before it ended, at `ended_ns`.

    `distinct` are its inputs; `places` are the rows of their results.
    """

    distinct: DistinctInputs
    places: NDArray[np.intp]
    wait: Callable[[], Mapping[Output, HostRows]]
    outputs: frozenset[Output]
    ended_ns: int
    _rows: Mapping[Output, HostRows] | None = None

    def find(self, key: Key, outputs: frozenset[Output]) -> Result | None:
        """Return the result of an input if its tenant asked for it in this batch too."""
        at = self.distinct.known.get(key)
        if at is None or not outputs <= self.outputs:
            return None
        if self._rows is None:
            self._rows = self.wait()
        return {output: numbers_of(self._rows[output], int(self.places[at])) for output in outputs}


class RepeatSample:
    """Estimates how many inputs repeat, from a sample of one in eight, chosen by hash.

    `repeated` of the `sampled` inputs were among the last `8 * _SAMPLE_KEPT` inputs, which a cache would have kept.
    One thread counts at a time; any thread may read.
    """

    def __init__(self) -> None:
        self.sampled = self.repeated = 0
        self._last: OrderedDict[int, None] = OrderedDict()

    def count(self, keys: Iterable[Key]) -> None:
        """Count the inputs of a batch, each once."""
        for key in keys:
            hashed = hash(key[0])  # bytes cache their hash, if they were a dictionary key before
            if hashed & _SAMPLE_MASK:
                continue
            self.sampled += 1
            if hashed in self._last:
                self.repeated += 1
                self._last.move_to_end(hashed)
                continue
            self._last[hashed] = None
            if len(self._last) > _SAMPLE_KEPT:
                self._last.popitem(last=False)


def numbers_of(rows: HostRows, place: int) -> Numbers:
    """Return the numbers of one text of a batch, without a copy."""
    if rows.offsets is None:
        return rows.values[place], None
    own = slice(int(rows.offsets[place]), int(rows.offsets[place + 1]))
    return rows.values[own], None if rows.indices is None else rows.indices[own]


def known_and_rest(
    entries: Sequence[QueueEntry], recent: RecentBatch | None, cache: ResultCache | None
) -> tuple[KnownBatch | None, list[QueueEntry]]:
    """Split a batch into the texts whose results are known and the entries that are left to compute."""
    found: list[QueueEntry] = []
    results: list[tuple[frozenset[Output], Result]] = []
    rest: list[QueueEntry] = []
    for entry in entries:
        job = entry.job
        came_before = recent is not None and job.submitted_ns <= recent.ended_ns
        if job.tenant == OWN_TENANT or (cache is None and not came_before):
            rest.append(entry)
            continue
        outputs = job.options.outputs
        known: list[int] = []
        unknown: list[int] = []
        for i, key in enumerate(keys_of(entry.encoded, job.tenant)):
            result = recent.find(key, outputs) if recent is not None and came_before else None
            if result is None and cache is not None:
                result = cache.find(key, outputs)
            (unknown if result is None else known).append(i)
            if result is not None:
                results.append((outputs, result))
        if not known:
            rest.append(entry)
        elif not unknown:
            found.append(entry)
        else:
            found.append(entry.some(known))
            rest.append(entry.some(unknown))
    return (None if not found else _batch_of(found, results)), rest


def _batch_of(entries: list[QueueEntry], results: list[tuple[frozenset[Output], Result]]) -> KnownBatch:
    """Make a batch of the known texts; an output that a text did not request is empty or zero."""
    rows: dict[Output, HostRows] = {}
    for output in frozenset().union(*(outputs for outputs, _ in results)):
        numbers = [result.get(output) for _, result in results]
        first = next(each for each in numbers if each is not None)
        rows[output] = _rows_of([first if each is None else each for each in numbers], output)
    return KnownBatch(entries, np.arange(len(results)), rows)


def _rows_of(numbers: Sequence[Numbers], output: Output) -> HostRows:
    values = [each for each, _ in numbers]
    if output in (Output.DENSE, Output.SCORES):
        return HostRows(np.stack(values))
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(each) for each in values], out=offsets[1:])
    positions = [at for _, at in numbers if at is not None]
    return HostRows(np.concatenate(values), offsets, np.concatenate(positions) if positions else None)
