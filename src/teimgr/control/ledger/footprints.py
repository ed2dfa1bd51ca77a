"""Footprints of models: the predicted figure, or the measured one, which is kept in a file beside the state file.

A figure is of one model and revision, dtype, kind of device, version of the engine and batch budget (`figure_key`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from teimgr import __version__
from teimgr.control.delayed_json import DelayedJson
from teimgr.control.ledger.ledger import Footprint
from teimgr.control.ledger.prediction import ASSUMED, ASSUMED_ON_CARD, FIRST_CALLS_BYTES, batch_bytes, predicted
from teimgr.errors import TeimgrError
from teimgr.models import hub
from teimgr.models.gguf_head import HEADS
from teimgr.models.reading import read_layout
from teimgr.models.weight_sizes import WeightSizes, weight_sizes

_MAX_FIGURES = 10_000
_SAME = 0.02
"""A later measurement within this part of the kept figure is not written again."""
_SAME_LOAD = 0.2
"""The same of a load's time."""
_REMEMBERED = 7 / 8
_FIELDS = ("host_bytes", "device_bytes", "loading_bytes")


class ModelOptions(Protocol):
    """What a footprint depends on, of an `InstanceSpec` or a `WorkerSpec`."""

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
    """The figures of all models. Used by the event loop; files are read on threads."""

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
        if sizes is None:  # its files came while it started, and a figure without their identity could be of others
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
        """How long it takes until a model serves, by earlier loads; None without one."""
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
    """What a measured figure is of, as one text."""
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
    return source.sha or f"{sizes.file_bytes}.{sizes.changed_ns}", sizes


def _most(before: Footprint, now: Footprint, part: float = 1.0) -> Footprint:
    """The latter, and of each figure that was higher before a part of the difference."""
    higher = {name: max(0, getattr(before, name) - getattr(now, name)) for name in _FIELDS}
    return replace(now, **{name: getattr(now, name) + math.ceil(part * more) for name, more in higher.items()})


def _differs(before: int, now: int) -> bool:
    return abs(now - before) > _SAME * max(before, 1)
