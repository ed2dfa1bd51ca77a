"""Memory footprints of models: predicted, or measured and kept in a file beside the state file.

Before a model's first load, its footprint is predicted from the headers of its files. The constants were measured with
`bench ledger` on forked workers of all kinds. A prediction is an upper bound, meant to be at most 25 % too high.

A figure applies to one model and revision, dtype, kind of device, engine version and batch budget (`figure_key`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from teimgr import __version__
from teimgr.control.background import DelayedJson
from teimgr.control.ledger.ledger import Footprint
from teimgr.errors import TeimgrError
from teimgr.models import hub
from teimgr.models.gguf_head import HEADS, WeightSizes, weight_sizes
from teimgr.models.reading import read_layout
from teimgr.spec import CPU_BATCH_TOKENS, CPU_TEMPORARY_BYTES, GRAPH_TOKENS, Kind

log = logging.getLogger(__name__)
ASSUMED = Footprint(host_bytes=2 << 30, source="assumed")
"""Assumed bytes of a model whose files are not on this host yet."""
ASSUMED_ON_CARD = Footprint(host_bytes=2 << 30, device_bytes=2 << 30, source="assumed")
_MIB = 1 << 20
_PROCESS_BYTES = 34 * _MIB  # shared pages of the fork server that a worker writes
_OTHER_TOKENIZER_BYTES = 5 * _MIB  # caches of tokenizers other than WordPiece
_NARROW_BYTES = 1 * _MIB  # for dtypes other than float32
_WORDPIECE = frozenset({"albert", "bert", "distilbert", "electra", "mpnet", "nomic_bert"})
# Added for the output of the largest batch, compared with an embedding model.
_KIND_BYTES = {
    Kind.SPARSE: 3 * _MIB,
    Kind.MULTI_VECTOR: 2 * _MIB,
    Kind.RERANKER: 3 * _MIB,
    Kind.CLASSIFIER: 3 * _MIB,
    Kind.TOKEN_CLASSIFIER: 3 * _MIB,
}
_STATIC_PROCESS_BYTES = 18 * _MIB  # never runs a transformer
_CARD_PROCESS_BYTES = 1200 * _MIB  # with a CUDA context
CONTEXT_BYTES = 640 * _MIB
"""Bytes of a process on a card outside its allocator."""
FIRST_CALLS_BYTES = 9 * _MIB // 2
"""Growth of a loaded worker after calls of all interfaces: 2.3 to 4.3 MiB in `bench forty`'s models."""
_MAX_FIGURES = 10_000
_SAME = 0.02
"""A measurement that differs from the kept one by at most this fraction is not written."""
_SAME_LOAD = 0.2
"""The same for load times."""
_REMEMBERED = 7 / 8
_FIELDS = ("host_bytes", "device_bytes", "loading_bytes")


class _Architecture(NamedTuple):
    """MiB used by an architecture in addition to its weights: in float32, in other dtypes, and more during the load."""

    wide: int = 0
    narrow: int = 0
    loading: int = 0


# Models computed by torch operators: its libraries allocate working memory, more in 16 bits than in float32. DeBERTa's
# code is compiled at load.
_ARCHITECTURES = {
    "mpnet": _Architecture(19, 21, 7),
    "t5": _Architecture(14, 14, 7),
    "deberta": _Architecture(26, 26, 44),
    "deberta-v2": _Architecture(26, 26, 44),
    "gemma3_text": _Architecture(11, 20, 2),
    "qwen3": _Architecture(5, 14, 0),
}
_BYTES_OF_TOKENIZER = 19  # in memory per byte of its file
_MARGIN = 1.08
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_STATIC_BATCH_BYTES = 8 * _MIB


def predicted(sizes: WeightSizes, dtype: str, max_batch_tokens: int, *, on_card: bool) -> Footprint:
    """The footprint of a worker with these weights. "auto" counts as float32, as that is taken where nothing else fits.

    On a CPU the layers are copied into the order in which they are computed; tables of float32 stay in the file,
    and the page cache is not charged to anyone. On a card everything is copied to it.
    """
    item = 4 if sizes.is_static else _ITEM_BYTES.get(dtype, 4)  # static models keep the dtype of the file
    tokenizer = _BYTES_OF_TOKENIZER * sizes.tokenizer_bytes
    if sizes.is_static and not on_card:
        host = _STATIC_PROCESS_BYTES + tokenizer + 4 * sizes.parameters + _STATIC_BATCH_BYTES
        return _with_margin(host, 4 * sizes.parameters)
    batch = _batch_bytes(sizes, max_batch_tokens, on_card=on_card)
    widened = 0 if sizes.is_wide else 4 * sizes.parameters  # float32 copy for the comparison at load
    if on_card:
        # Counted from the start, although CUDA graphs are captured later. Static models have none.
        graphs = 0 if sizes.is_static else GRAPH_TOKENS * sizes.hidden * _ITEM_BYTES["float16"]
        device = CONTEXT_BYTES + item * sizes.parameters + batch + graphs
        found = _with_margin(_CARD_PROCESS_BYTES + tokenizer, widened)
        return Footprint(
            host_bytes=found.host_bytes, loading_bytes=found.loading_bytes, device_bytes=int(device * _MARGIN)
        )
    own = _ARCHITECTURES.get(sizes.architecture, _Architecture())
    process = _PROCESS_BYTES + _KIND_BYTES.get(sizes.kind, 0)
    wide, narrow = own.wide * _MIB, own.narrow * _MIB + _NARROW_BYTES
    process += max(wide, narrow) if dtype == "auto" else wide if item == 4 else narrow
    if sizes.architecture not in _WORDPIECE:
        process += _OTHER_TOKENIZER_BYTES
    layers = sizes.parameters - sizes.tables
    tables = 0 if sizes.is_wide else 4 * sizes.tables
    copied = item * layers + tables
    # int8 is quantized from float32 layers, all of which may be in memory at once.
    extra = max(widened, 4 * layers) // (1 if item == 1 else 4) + own.loading * _MIB
    return _with_margin(process + tokenizer + copied + batch, extra)


def batch_bytes(sizes: WeightSizes, max_batch_tokens: int) -> int:
    """Return the bytes of the largest batch on a CPU besides the model, which an idle worker gives back."""
    return _STATIC_BATCH_BYTES if sizes.is_static else _batch_bytes(sizes, max_batch_tokens, on_card=False)


def _batch_bytes(sizes: WeightSizes, max_batch_tokens: int, *, on_card: bool) -> int:
    row = 4 * (2 * sizes.hidden + sizes.widest)
    if on_card:
        return 3 * row * max_batch_tokens
    return min(min(max_batch_tokens, CPU_BATCH_TOKENS) * row, CPU_TEMPORARY_BYTES)


def _with_margin(host: int, extra_while_loading: int) -> Footprint:
    host = int(host * _MARGIN)
    return Footprint(host_bytes=host, loading_bytes=host + extra_while_loading)


class ModelOptions(Protocol):
    """The fields of an `InstanceSpec` or `WorkerSpec` that a footprint depends on."""

    @property
    def model_id(self) -> str: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def pooling(self) -> str | None: ...
    @property
    def kind(self) -> str | None: ...
    @property
    def trust_remote_code(self) -> bool: ...
    @property
    def max_batch_tokens(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...


def figures_path(state_file: Path) -> Path:
    """The file of measured figures, beside the state file."""
    return state_file.with_name(f"{state_file.stem}.memory.json")


class Footprints:
    """The figures of all models, used by the event loop; threads read the files."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = DelayedJson(path, "figures of memory", self._content)
        self._measured: dict[str, Footprint] = {}
        self._load_seconds: dict[str, float] = {}
        self._sizes: dict[tuple[object, ...], tuple[str, WeightSizes | None]] = {}

    def load(self) -> None:
        """Read the file; a broken one is left out, as every figure can be measured again. Blocking."""
        self._file.read(self._take)

    def _take(self, kept: Any) -> None:
        self._measured = {
            str(key): Footprint(**{name: int(figure[name]) for name in _FIELDS}, source="measured")
            for key, figure in kept["measured"].items()
        }
        self._load_seconds = {str(key): float(seconds) for key, seconds in kept.get("load_seconds", {}).items()}

    async def of(
        self, spec: ModelOptions, device_kind: str = "cpu", roots: Sequence[str] | None = None, *, fresh: bool = True
    ) -> Footprint:
        """The measured footprint of a model, else the predicted one, else an assumption.

        `device_kind` is "cpu" or the name of the card. Not `fresh`: files that were looked at before are not again.
        """
        if fresh or _options(spec) not in self._sizes:
            await self.look(spec, roots)
        return self.known(spec, device_kind)

    async def look(self, spec: ModelOptions, roots: Sequence[str] | None = None) -> None:
        """Look at the files of a model."""
        found = await asyncio.to_thread(_look, spec, roots)
        self._sizes.pop(_options(spec), None)
        self._sizes[_options(spec)] = found
        while len(self._sizes) > _MAX_FIGURES:
            del self._sizes[next(iter(self._sizes))]

    def snapshot(self) -> Footprints:
        """Return the figures of now, for another thread."""
        made = Footprints()
        made._measured, made._load_seconds, made._sizes = {**self._measured}, {**self._load_seconds}, {**self._sizes}
        return made

    def known(self, spec: ModelOptions, device_kind: str = "cpu") -> Footprint:
        """Like `of`, from the last look at the files; an assumption if there was none."""
        identity, sizes = self._sizes.get(_options(spec), ("", None))
        on_card = device_kind != "cpu"
        if found := self._measured.get(figure_key(spec, identity, device_kind)):
            return found
        if sizes is None:
            return ASSUMED_ON_CARD if on_card else ASSUMED
        found = predicted(sizes, spec.dtype, spec.max_batch_tokens, on_card=on_card)
        return replace(found, host_bytes=found.host_bytes + spec.cache_bytes)

    def room_for_a_batch(self, spec: ModelOptions, device_kind: str = "cpu") -> int:
        """Host memory of the largest batch, the first calls and a full cache, which a new worker does not show yet."""
        _, sizes = self._sizes.get(_options(spec), ("", None))
        batch = 0 if sizes is None or device_kind != "cpu" else batch_bytes(sizes, spec.max_batch_tokens)
        return batch + FIRST_CALLS_BYTES + spec.cache_bytes

    def learn(self, spec: ModelOptions, device_kind: str, measured: Footprint, *, is_first: bool = False) -> Footprint:
        """Keep the most that workers of this model took, also for the next daemon; the result is that.

        The first reading of a worker is taken before its calls. What earlier workers took beyond it, with their calls,
        is reduced by an eighth, until it is measured again.
        """
        identity, sizes = self._sizes.get(_options(spec), ("", None))
        if sizes is None:  # downloaded during the start: unknown revision
            return measured
        key = figure_key(spec, identity, device_kind)
        before = self._measured.pop(key, None)
        most = measured if before is None else _most(before, measured)
        measured = most if before is None or not is_first else _most(before, measured, _REMEMBERED)
        self._measured[key] = measured
        while len(self._measured) > _MAX_FIGURES:
            del self._measured[next(iter(self._measured))]
        if before is None or any(_differs(getattr(before, name), getattr(measured, name)) for name in _FIELDS):
            self._file.write_soon()
        return most

    def load_seconds(self, spec: ModelOptions) -> float | None:
        """Return the seconds until a model serves, from earlier loads; None without one."""
        return self._load_seconds.get(_load_key(spec))

    def learn_load(self, spec: ModelOptions, seconds: float) -> float:
        """Keep how long a load took, also for the next daemon; the result is the figure that is kept.

        A shorter one counts at once. A longer one counts by a third, as it may have waited for the imports of a fork
        server that had just started, or for other loads.
        """
        key = _load_key(spec)
        before = self._load_seconds.pop(key, None)
        kept = seconds if before is None or seconds < before else before + (seconds - before) / 3
        self._load_seconds[key] = kept
        while len(self._load_seconds) > _MAX_FIGURES:
            del self._load_seconds[next(iter(self._load_seconds))]
        if before is None or abs(kept - before) > _SAME_LOAD * before:
            self._file.write_soon()
        return kept

    def _content(self) -> dict[str, Any]:
        return {
            "measured": {
                key: {name: getattr(it, name) for name in _FIELDS} for key, it in list(self._measured.items())
            },
            "load_seconds": {key: round(seconds, 4) for key, seconds in list(self._load_seconds.items())},
        }

    async def close(self) -> None:
        """Write what is not written yet."""
        await self._file.close()


def figure_key(spec: ModelOptions, identity: str, device_kind: str) -> str:
    """Return the key of a measured figure, as one text."""
    sizes = str(spec.max_batch_tokens) + (f"+{spec.cache_bytes}" if spec.cache_bytes else "")
    return "|".join((spec.model_id, identity, spec.dtype, device_kind, engine_version(), sizes))


@cache
def engine_version() -> str:
    """That of our engine and of torch."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{__version__}+torch{importlib.metadata.version('torch')}"
    return __version__


def _load_key(spec: ModelOptions) -> str:
    return "|".join((spec.model_id, spec.revision or "", spec.dtype, engine_version()))


def _options(spec: ModelOptions) -> tuple[object, ...]:
    return spec.model_id, spec.revision, spec.pooling, spec.kind, spec.trust_remote_code


def _look(spec: ModelOptions, roots: Sequence[str] | None) -> tuple[str, WeightSizes | None]:
    """The identity of a model's files on this host, and their sizes; None if they are missing or unreadable."""
    try:
        source = hub.find_here(spec.model_id, spec.revision, roots) or hub.find_packaged(spec.model_id)
        if source is None:
            return "", None
        with HEADS.kept():
            layout = read_layout(
                source.path, spec.pooling, kind=spec.kind, trust_remote_code=spec.trust_remote_code, render=False
            )
            sizes = weight_sizes(layout)
    except (TeimgrError, OSError):  # the worker reports it
        return "", None
    except Exception:  # a bug in reading the files must not fail the start
        log.exception("cannot predict the memory of a model", extra={"model_id": spec.model_id})
        return "", None
    return source.sha or f"{sizes.file_bytes}.{sizes.changed_ns}", sizes


def _most(before: Footprint, now: Footprint, part: float = 1.0) -> Footprint:
    """The latter, and of each figure that was higher before a part of the difference."""
    higher = {name: max(0, getattr(before, name) - getattr(now, name)) for name in _FIELDS}
    return replace(now, **{name: getattr(now, name) + math.ceil(part * more) for name, more in higher.items()})


def _differs(before: int, now: int) -> bool:
    return abs(now - before) > _SAME * max(before, 1)
