"""The tenants of this host: writes their quotas for the workers, and keeps their usage across restarts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from teimgr.control.background import in_background
from teimgr.errors import InvalidConfig
from teimgr.files import write_atomically
from teimgr.http.auth.policy import Policy
from teimgr.observability import catalogue
from teimgr.observability.exposition import Page, Sample
from teimgr.wire.tenants.table import FILE, NS_PER_S, Counter, RowCounts, TenantKey, TenantTable, bucket_at, remaining
from teimgr.worker.tenant_meter import EntryMeters, TenantMeter

log = logging.getLogger(__name__)

_NONE = (0,) * len(Counter)


class UsageKey(NamedTuple):
    """Key of a usage counter: the name of an API key, "" without one, instance and model."""

    key: str
    instance: str
    model: str


Counts = tuple[int, ...]
"""Values in the order of `Counter`."""


@dataclass(slots=True)
class UsageTotals:
    """Counts of ended workers (`ended`) and of live workers by generation (`running`). `moved` are ended generations
    whose rows are not cleared yet."""

    ended: dict[UsageKey, Counts] = field(default_factory=dict)
    running: dict[int, dict[UsageKey, Counts]] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)

    def see(self, rows: Iterable[tuple[RowCounts, bool]], names: Mapping[int, str]) -> None:
        """Take the counters of all rows; those of workers that have ended, True, are moved to the totals.

        `names` are those of the tenants by number. A worker whose row is gone has ended too.
        """
        present = {row.generation: (row, has_ended) for row, has_ended in rows}
        self.moved &= present.keys()
        for generation, (row, has_ended) in present.items():
            if generation in self.moved:
                continue
            self.running[generation] = {
                UsageKey(names.get(tenant, ""), row.instance, row.model): counts
                for tenant, counts in row.counts.items()
            }
            if has_ended:
                self._move(generation)
                self.moved.add(generation)
        for generation in self.running.keys() - present.keys():
            self._move(generation)

    def by_key(self) -> dict[UsageKey, Counts]:
        """The totals up to now."""
        found = dict(self.ended)
        for counts in self.running.values():
            _add(found, counts)
        return found

    def _move(self, generation: int) -> None:
        _add(self.ended, self.running.pop(generation))

    def to_dict(self) -> dict[str, Any]:
        return {
            "ended": _rows(self.ended),
            "running": {str(generation): _rows(counts) for generation, counts in self.running.items()},
            "moved": sorted(self.moved),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> UsageTotals:
        """The inverse of `to_dict`; raises KeyError, TypeError, ValueError for anything else."""
        running = {int(generation): _of_rows(rows) for generation, rows in values["running"].items()}
        return cls(_of_rows(values["ended"]), running, {int(generation) for generation in values["moved"]})


def _add(totals: dict[UsageKey, Counts], more: Mapping[UsageKey, Counts]) -> None:
    for key, counts in more.items():
        totals[key] = tuple(a + b for a, b in zip(totals.get(key, _NONE), counts, strict=True))


def _rows(counts: Mapping[UsageKey, Counts]) -> list[list[Any]]:
    return [[*key, *numbers] for key, numbers in counts.items()]


def _of_rows(rows: Iterable[list[Any]]) -> dict[UsageKey, Counts]:
    width = len(UsageKey._fields)
    found = {}
    for row in rows:
        if len(row) <= width:
            raise ValueError(f"a row of {len(row)} values")
        numbers = [*map(int, row[width : width + len(_NONE)])]  # another version may have more or fewer counters
        found[UsageKey(*map(str, row[:width]))] = (*numbers, *_NONE[len(numbers) :])
    return found


USAGE_FILE = "usage.json"
"""Name of the file beside the state file."""
_EVERY_S = 1.0
_MAX_NAMES = 2048
# Limit of rows named by muxes of other hosts; further ones are counted as one row per key.
_MAX_COUNTED = 16_384
_OTHERS = "(others)"
_SHOWN_KEYS = 100  # with their own series in the metrics


class UsageRow(NamedTuple):
    """Usage of one instance by one key; `key` is None for calls without one."""

    key: str | None
    instance: str
    model: str
    tokens: int
    texts: int
    calls: int
    refused: int
    shadowed: int


class RateState(NamedTuple):
    """Rate limit of a tenant: the burst in tokens, the rest of it, and seconds until it is full."""

    limit: int
    remaining: int
    reset_s: float


class _Bucket:
    """The configured values of a tenant's bucket, and the positions of its words in the table."""

    __slots__ = ("arrival_at", "burst", "rate", "refunded_at")

    def __init__(self, table: TenantTable, number: int) -> None:
        self.rate, self.burst, _, _ = table.limits(number)
        self.arrival_at, self.refunded_at = bucket_at(number)


class TenantRegistry:
    """Tenants by number and name. Nothing is kept if no key is required.

    The file of totals is written each second with a change, so a power failure loses one second.
    """

    def __init__(self, run_dir: Path, state_file: Path) -> None:
        self._path = run_dir / FILE
        self._totals_path = state_file.with_name(USAGE_FILE)
        self._table: TenantTable | None = None
        self._meters = EntryMeters(self._path)
        self._meter: TenantMeter | None = None
        self._buckets: dict[int, _Bucket] = {}
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._totals = UsageTotals()
        self._elsewhere: dict[str, dict[int, int]] = {}  # tokens by instance and tenant, as muxes of other hosts report
        self._writing = threading.Lock()
        self._turn = self._written_turn = 0  # of the last totals made and written
        self._written = b""
        self._alarm: str | None = None

    def alarms(self) -> Sequence[str]:
        return [self._alarm] if self._alarm else []

    @property
    def is_on(self) -> bool:
        return self._table is not None

    def configure(self, policy: Policy, keys: Sequence[TenantKey]) -> Policy:
        """Write the quotas of `keys`; the result is `policy` with their numbers.

        Raises:
            InvalidConfig: the file cannot be made, or has too few places.
        """
        if policy.keys is None:
            return policy
        try:
            if self._table is None:
                self._open()
            assert self._table is not None
            self._numbers = self._table.configure(list(keys))
            self._buckets = {}
        except OSError as error:
            raise InvalidConfig(f"cannot create the tenants' file: {self._path}: {error}") from error
        except ValueError as error:
            raise InvalidConfig(f"auth.api_keys: {error}") from error
        self._names |= {number: name for name, number in self._numbers.items()}
        return policy.numbered(self._numbers)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Add up and write the counters at intervals."""
        return in_background(self._keep, "usage of the tenants")

    def close(self) -> None:
        """Write the last counters, once no worker is left to count."""
        if self._table is not None:
            self._save()
            if self._meter is not None:
                self._meter.close()
                self._meter = None
            self._table.close()
            self._table = None

    def meter(self) -> TenantMeter | None:
        """Return what charges for muxes of other hosts; None while no key is required, or while the table is full."""
        if self._meter is None and self._table is not None:
            self._meter = self._meters.lease("", "")
        return self._meter

    def terms(self) -> list[list[int]]:
        """Return for each key: number, weight, priority; 1 if it has a quota, else 0; 1 if the quota is a shadow."""
        if (table := self._table) is None:
            return []
        rows = [(number, table.terms(number), any(table.limits(number))) for number in self._numbers.values()]
        return [[number, weight, rank, int(quota), int(shadow)] for number, (shadow, weight, rank), quota in rows]

    def count(self, number: int, instance: str, model: str, counts: Sequence[int]) -> None:
        """Add use that a mux of another host has counted. Raises ValueError: it is malformed."""
        if len(counts) != len(Counter) or len(instance) + len(model) > _MAX_NAMES:
            raise ValueError("not a row of use")
        key, totals = UsageKey(self._names.get(number, ""), instance, model), self._totals.ended
        if key not in totals and len(totals) >= _MAX_COUNTED:
            key = UsageKey(key.key, _OTHERS, "")
        _add(totals, {key: tuple(counts)})
        if instance in self._elsewhere or len(self._elsewhere) < _MAX_COUNTED:
            tokens = self._elsewhere.setdefault(instance, {})
            tokens[number] = tokens.get(number, 0) + counts[Counter.TOKENS]

    def usage(self) -> list[UsageRow]:
        """What was used up to now, by key, instance and model."""
        self._see()
        totals = self._totals.by_key().items()
        return [UsageRow(each.key or None, each.instance, each.model, *counts) for each, counts in totals]

    def callers(self, instance: str) -> Mapping[int, int]:
        """Tokens computed for each tenant by the workers of now, and for calls at muxes of other hosts so far.

        Nothing while no key is required.
        """
        found = {} if self._table is None else self._table.callers(instance)
        for tenant, tokens in self._elsewhere.get(instance, {}).items():
            found[tenant] = found.get(tenant, 0) + tokens
        return found

    def badge(self, tenant: int) -> str:
        """A name that a tenant keeps and that does not tell who it is; "" for calls without a key."""
        return hashlib.sha256(self._names[tenant].encode()).hexdigest()[:12] if tenant in self._names else ""

    def rate_state(self, number: int) -> RateState | None:
        """The bucket of a tenant; None if it has no tokens a second."""
        if (table := self._table) is None or not number:
            return None
        if (bucket := self._buckets.get(number)) is None:
            bucket = self._buckets[number] = _Bucket(table, number)
        if not bucket.rate:
            return None
        arrival_ns = table.words[bucket.arrival_at] - table.words[bucket.refunded_at]
        left, until_full_ns = remaining(bucket.burst, bucket.rate, arrival_ns, time.monotonic_ns())
        return RateState(bucket.burst, left, until_full_ns / NS_PER_S)

    async def page(self) -> Page:
        """The counters by key for `/metrics`, those of all but the largest keys as one."""
        shown: list[dict[str, Any]] = tenant_counts(self.usage(), ("key",))
        rest = shown[_SHOWN_KEYS:]
        if rest:
            sums = {name: sum(each[name] for each in rest) for name in UsageRow._fields[-len(Counter) :]}
            shown = [*shown[:_SHOWN_KEYS], {"key": _OTHERS, **sums}]
        families = {catalogue.KEY_TOKENS: "tokens", catalogue.KEY_CALLS: "calls", catalogue.KEY_REFUSED: "refused"}
        return {
            family: [Sample("", {"key": each["key"] or ""}, each[name]) for each in shown]
            for family, name in families.items()
        }

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            if self._table is not None:
                ended, turn, content = self._to_save()
                if await asyncio.to_thread(self._write, turn, content):  # on a thread: a busy disk may take a second
                    self._clear(ended)

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        table = TenantTable(self._path)
        table.begin(_boot())
        self._table = table
        try:
            content = self._totals_path.read_bytes()
        except FileNotFoundError:
            return
        try:
            values = json.loads(content)
            self._totals = UsageTotals.from_dict(values)
            self._names = {int(number): str(name) for number, name in values["names"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            aside = self._totals_path.with_suffix(".broken")
            self._totals_path.replace(aside)
            log.error("the usage file is damaged and was moved to %s: %s", aside, error)

    def _see(self) -> list[int]:
        """Add up the counters; the result are the rows of workers that have ended."""
        if self._table is None:
            return []
        rows = list(self._table.rows())
        self._totals.see([(row, has_ended) for _, row, has_ended in rows], self._names)
        return [number for number, row, _ in rows if row.generation in self._totals.moved]

    def _save(self) -> None:
        """Write the totals, and then clear the rows that are among them."""
        ended, turn, content = self._to_save()
        if self._write(turn, content):
            self._clear(ended)

    def _to_save(self) -> tuple[list[int], int, bytes]:
        """The rows of workers that have ended; the number of these totals, and the totals as they are written."""
        ended = self._see()
        values = {"names": {str(number): name for number, name in self._names.items()}, **self._totals.to_dict()}
        self._turn += 1
        return ended, self._turn, json.dumps(values).encode()

    def _write(self, turn: int, content: bytes) -> bool:
        """True if the totals, or later ones, are on the disk. On any thread."""
        with self._writing:
            if turn > self._written_turn and content != self._written:
                try:
                    write_atomically(self._totals_path, content, mode=0o600, durable=True)
                except OSError as error:
                    self._alarm = f"usage of the keys cannot be saved: {self._totals_path}: {error.strerror}"
                    return False
                self._written, self._alarm = content, None
            self._written_turn = max(turn, self._written_turn)
        return True

    def _clear(self, ended: list[int]) -> None:
        if self._table is not None:
            for row in ended:
                self._table.clear(row)


def tenant_counts(rows: Sequence[UsageRow], by: Iterable[str]) -> list[dict[str, Any]]:
    """Sums of `rows` by some of key, instance and model, the largest first."""
    by, sums = tuple(by), dict[tuple[object, ...], list[int]]()
    width = len(Counter)
    for row in rows:
        group = tuple(getattr(row, name) for name in by)
        before = sums.get(group, [0] * width)
        counts = (row.tokens, row.texts, row.calls, row.refused, row.shadowed)
        sums[group] = [a + b for a, b in zip(before, counts, strict=True)]
    names = UsageRow._fields[-width:]
    found: list[dict[str, Any]] = [
        dict(zip(by, group, strict=True)) | dict(zip(names, counts, strict=True)) for group, counts in sums.items()
    ]
    return sorted(found, key=lambda one: (-int(str(one["tokens"])), str([one[name] for name in by])))


def _boot() -> int:
    """A word for this start of the host: the monotonic clock begins again at the next one."""
    try:
        return int(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").replace("-", "")[:15], 16) | 1
    except (OSError, ValueError):
        return 1
