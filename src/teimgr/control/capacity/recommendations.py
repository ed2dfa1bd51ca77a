"""Recommends changes of an instance from observations over a window, and judges their effect.

Pure: `recommend` takes an `Observation` and returns `Recommendation`s, each with its evidence, the PATCH and an
`Expectation`, which `verdict` compares with an observation after the change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from teimgr.control.capacity.policy import FILL_DOWN
from teimgr.control.ledger.system_memory import mib
from teimgr.spec import InstanceSpec, LoadedModel

KINDS = ("idle", "replicas", "batch_tokens", "dtype", "truncated", "duplicates", "device")
_MIB = 2**20
_MIN_TEXTS = 100  # in a window, for its shares to be meaningful
_MIN_SAMPLED = 50
_MANY_CUT = 0.05
_MANY_REPEATED = 0.1
_OFTEN = 0.5  # fraction of the readings
_BUSY, _SOMEWHAT_BUSY = 0.9, 0.2
_SAMPLED_PART = 8  # one text in eight is sampled
_CACHE_RESULTS = 65536  # results covered by the estimate of repeated texts
_ENTRY_BYTES = 500  # overhead of a cached result besides its numbers and token ids
_MAX_CACHE_BYTES = 2**30
_MIN_SAVED_BYTES = 64 * _MIB
_MAX_BATCH_TOKENS = 131072
_IDLE_TIMEOUT_SECS = 900
_MAX_REPLICAS = 256

Metric = Literal["tokens_per_second", "waiting_seconds", "held_bytes", "known_share"]


class Card(NamedTuple):
    """A GPU of the instance's host that has room for it."""

    gpu_id: int
    name: str
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Observations of one instance in a window of `span_s` seconds with unchanged keys.

    Counts are those of `EngineStats`, summed over all workers in the window. `queued_tokens` and `waiting_s`, the work
    waiting per replica, are means of the readings; `waited_share` is the fraction of readings above `scale_up_wait_ms`.
    `held_bytes` is the reserved memory, including `batch_bytes` for the largest batch. `pays` is False if another
    replica was measured to be useless.
    """

    spec: InstanceSpec
    model: LoadedModel | None
    span_s: float
    replicas: int
    on_card: bool = False
    calls: int = 0
    texts: int = 0
    tokens: int = 0
    batches: int = 0
    known_texts: int = 0
    full_texts: int = 0
    sampled_texts: int = 0
    repeated_texts: int = 0
    busy_s: float = 0.0
    by_tokens: tuple[int, ...] = ()
    queued_tokens: float = 0.0
    waiting_s: float = 0.0
    waited_share: float = 0.0
    held_bytes: int = 0
    batch_bytes: int = 0
    card: Card | None = None
    pays: bool = True

    @property
    def rate(self) -> float:
        """Tokens a second of one replica while it computes; 0 where it did not."""
        return self.tokens / self.busy_s if self.busy_s else 0.0

    @property
    def busy_share(self) -> float:
        """Part of the window in which the replicas computed."""
        return self.busy_s / (self.span_s * self.replicas) if self.span_s and self.replicas else 0.0

    @property
    def known_share(self) -> float:
        """Part of the texts whose results were known already."""
        texts = self.texts + self.known_texts
        return self.known_texts / texts if texts else 0.0

    def value(self, metric: Metric) -> float:
        found = {
            "tokens_per_second": self.rate,
            "waiting_seconds": self.waiting_s,
            "held_bytes": float(self.held_bytes),
            "known_share": self.known_share,
        }
        return found[metric]


class Expectation(NamedTuple):
    """The expected effect of a change: `metric` is at least, or at most, `value`."""

    metric: Metric
    relation: Literal["at_least", "at_most"]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """One change of one instance. `patch` is the body of its PATCH, None if no key helps.

    `id` is made of kind and instance, so it is stable. `effect` and `risk` are sentences.
    """

    kind: str
    instance: str
    finding: str
    evidence: Mapping[str, float]
    effect: str
    risk: str
    patch: Mapping[str, Any] | None
    expects: Expectation | None

    @property
    def id(self) -> str:
        return f"{self.kind}.{self.instance}"


def recommend(seen: Observation) -> list[Recommendation]:
    """Return the recommended changes of an instance, by the rules in the order of `KINDS`."""
    if seen.span_s <= 0 or not seen.replicas:
        return []
    rules: tuple[Callable[[Observation], Iterator[Recommendation]], ...] = (
        *(_idle, _more_replicas, _fewer_replicas, _larger_batches, _smaller_batches),
        *(_dtype, _truncated, _duplicates, _device),
    )
    return [found for rule in rules for found in rule(seen)]


def verdict(expects: Expectation, seen: Observation, min_span_s: float = 0.0) -> tuple[bool | None, str]:
    """Whether a change brought what was expected, and the figures as a sentence; None: too little was seen.

    What it holds is seen at once, all else within `min_span_s` at least.
    """
    value = seen.value(expects.metric)
    words = expects.relation.replace("_", " ")
    figures = f"{expects.metric} is {value:,.4g}, expected {words} {expects.value:,.4g}"
    if expects.metric != "held_bytes" and seen.span_s < min_span_s:
        return None, f"{seen.span_s:,.0f} s are too short to judge"
    if expects.metric in ("tokens_per_second", "known_share") and seen.texts + seen.known_texts < _MIN_TEXTS:
        return None, f"{seen.texts + seen.known_texts} texts are too few to judge"
    return (value >= expects.value if expects.relation == "at_least" else value <= expects.value), figures


def _idle(seen: Observation) -> Iterator[Recommendation]:
    if seen.spec.load != "eager" or seen.calls:
        return
    yield Recommendation(
        kind="idle",
        instance=seen.spec.name,
        finding=f"no call in {seen.span_s:,.0f} s, while it holds {mib(seen.held_bytes)}",
        evidence={"calls": 0, "span_s": seen.span_s, "held_bytes": seen.held_bytes, "replicas": seen.replicas},
        effect=f"{mib(seen.held_bytes)} are free while there are no calls",
        risk="the first call after a pause waits until it is loaded",
        patch={"load": "on_demand", "idle_timeout_secs": min(_IDLE_TIMEOUT_SECS, max(1, round(seen.span_s / 2)))},
        expects=Expectation("held_bytes", "at_most", seen.held_bytes / 2),
    )


def _more_replicas(seen: Observation) -> Iterator[Recommendation]:
    if not _is_short_of(seen) or not seen.pays or not isinstance(seen.spec.replicas, int):
        return
    most = max(seen.spec.max_replicas, seen.replicas) + 1
    if most > _MAX_REPLICAS or seen.replicas < seen.spec.max_replicas:
        return
    yield Recommendation(
        kind="replicas",
        instance=seen.spec.name,
        finding=f"{seen.waiting_s:.1f} s of work waits for each of {seen.replicas} replicas, which are always busy",
        evidence=_load(seen),
        effect=f"less than {seen.waiting_s / 2:.1f} s of work waits",
        risk="one more replica takes as much memory as each existing one; on one CPU host they share its cores",
        patch={"max_replicas": most},
        expects=Expectation("waiting_seconds", "at_most", seen.waiting_s / 2),
    )


def _fewer_replicas(seen: Observation) -> Iterator[Recommendation]:
    if seen.spec.max_replicas or not isinstance(seen.spec.replicas, int) or seen.waited_share or seen.replicas < 2:
        return
    arrived = seen.tokens / seen.span_s
    enough = max(1, -int(-arrived // (FILL_DOWN * seen.rate))) if seen.rate else 1
    if enough >= seen.replicas or seen.replicas != seen.spec.replicas:
        return
    spared = seen.held_bytes * (seen.replicas - enough) // seen.replicas
    yield Recommendation(
        kind="replicas",
        instance=seen.spec.name,
        finding=f"{enough} of {seen.replicas} replicas would have been enough",
        evidence=_load(seen),
        effect=f"{mib(spared)} are free, and at most {seen.spec.scale_up_wait_ms / 1000:g} s of work waits",
        risk="a later peak may need them; with max_replicas the number follows the load",
        patch={"replicas": enough},
        expects=Expectation("waiting_seconds", "at_most", seen.spec.scale_up_wait_ms / 1000),
    )


def _larger_batches(seen: Observation) -> Iterator[Recommendation]:
    budget = seen.spec.max_batch_tokens
    full = sum(seen.by_tokens[max(0, (budget // 2).bit_length()) :])  # more than half of the budget
    if not (seen.on_card and _is_short_of(seen)) or full < _OFTEN * seen.batches or 2 * budget > _MAX_BATCH_TOKENS:
        return
    yield Recommendation(
        kind="batch_tokens",
        instance=seen.spec.name,
        finding=f"{full / seen.batches:.0%} of the batches are full, and work waits",
        evidence=_load(seen) | {"batches": seen.batches, "full_batches": full, "max_batch_tokens": budget},
        effect="at least 1.05 times as many tokens a second",
        risk="twice the memory of a batch on the card; the largest one is tried before the worker serves",
        patch={"max_batch_tokens": 2 * budget},
        expects=Expectation("tokens_per_second", "at_least", 1.05 * seen.rate),
    )


def _smaller_batches(seen: Observation) -> Iterator[Recommendation]:
    budget, longest = seen.spec.max_batch_tokens, seen.model.max_input_length if seen.model else 0
    largest = max((1 << power for power, count in enumerate(seen.by_tokens) if count), default=0)
    wanted = max(2 * largest, longest)
    saved = seen.batch_bytes - seen.batch_bytes * wanted // budget if budget else 0
    if seen.batches < _MIN_TEXTS or not longest or 2 * wanted > budget or saved < _MIN_SAVED_BYTES * seen.replicas:
        return
    yield Recommendation(
        kind="batch_tokens",
        instance=seen.spec.name,
        finding=f"no batch had more than {largest:,} of the {budget:,} tokens that memory is reserved for",
        evidence={
            "batches": seen.batches,
            "largest_batch_tokens": largest,
            "max_batch_tokens": budget,
            "held_bytes": seen.held_bytes,
            "batch_bytes": seen.batch_bytes,
        },
        effect=f"about {mib(saved)} less is reserved",
        risk="a later burst of calls is computed in smaller batches, which on a CPU takes the same time",
        patch={"max_batch_tokens": wanted},
        expects=Expectation("held_bytes", "at_most", seen.held_bytes - saved / 2),
    )


def _dtype(seen: Observation) -> Iterator[Recommendation]:
    if seen.model is None or seen.busy_share < _OFTEN or seen.texts < _MIN_TEXTS:
        return
    wanted, gain = None, 1.1
    if seen.spec.dtype == "float32" and seen.model.dtype == "float32" and seen.on_card:
        wanted, gain = "auto", 1.3
    elif not seen.on_card and _is_short_of(seen) and seen.spec.dtype == "auto" and not seen.pays:
        wanted = "int8"
    if wanted is None:
        return
    yield Recommendation(
        kind="dtype",
        instance=seen.spec.name,
        finding=f"it computes {seen.busy_share:.0%} of the time in {seen.model.dtype}",
        evidence=_load(seen) | {"texts": seen.texts},
        effect=f"at least {gain:g} times as many tokens a second",
        risk="vectors change within the tolerance of the dtype (16-bit or int8); callers that require the current "
        "precision are refused",
        patch={"dtype": wanted},
        expects=Expectation("tokens_per_second", "at_least", gain * seen.rate),
    )


def _truncated(seen: Observation) -> Iterator[Recommendation]:
    if seen.model is None or seen.texts < _MIN_TEXTS or seen.full_texts < _MANY_CUT * seen.texts:
        return
    length = seen.model.max_input_length
    yield Recommendation(
        kind="truncated",
        instance=seen.spec.name,
        finding=f"{seen.full_texts / seen.texts:.0%} of the texts fill the model's limit of {length:,} tokens: the "
        "rest is cut off, and no search finds it",
        evidence={"texts": seen.texts, "full_texts": seen.full_texts, "max_input_length": length},
        effect=f"nothing is lost if callers split texts at {length:,} tokens or use a model with a higher limit",
        risk="",
        patch=None,
        expects=None,
    )


def _duplicates(seen: Observation) -> Iterator[Recommendation]:
    repeated, sampled = seen.repeated_texts, seen.sampled_texts
    if seen.spec.cache_bytes or seen.model is None or sampled < _MIN_SAMPLED or repeated < _MANY_REPEATED * sampled:
        return
    share = repeated / sampled
    results = min(_CACHE_RESULTS, _SAMPLED_PART * (sampled - repeated) * 2)
    tokens = seen.tokens / seen.texts if seen.texts else 0
    size = results * (4 * (seen.model.dimension + tokens) + _ENTRY_BYTES)
    size = min(_MAX_CACHE_BYTES, -int(-size // _MIB) * _MIB)
    yield Recommendation(
        kind="duplicates",
        instance=seen.spec.name,
        finding=f"{share:.0%} of the texts were repeated",
        evidence={"sampled_texts": sampled, "repeated_texts": repeated, "texts": seen.texts, "span_s": seen.span_s},
        effect=f"about {share:.0%} of the texts need not be computed",
        risk=f"each worker holds {mib(size)} more; results are shared only by callers with the same API key",
        patch={"cache_bytes": size},
        expects=Expectation("known_share", "at_least", share / 2),
    )


def _device(seen: Observation) -> Iterator[Recommendation]:
    card = seen.card
    if seen.on_card or card is None or seen.busy_share < _SOMEWHAT_BUSY or seen.spec.dtype == "int8":
        return
    yield Recommendation(
        kind="device",
        instance=seen.spec.name,
        finding=f"it computes {seen.busy_share:.0%} of the time on the CPU, while {card.name or 'a GPU'} has "
        f"{mib(card.free_bytes)} free",
        evidence=_load(seen) | {"card_free_bytes": card.free_bytes},
        effect="at least twice as many tokens a second",
        risk="other models cannot use this memory of the card; vectors change within the tolerance of the dtype",
        patch={"gpu_id": card.gpu_id},
        expects=Expectation("tokens_per_second", "at_least", 2 * seen.rate),
    )


def _is_short_of(seen: Observation) -> bool:
    """True if work has waited most of the time, though the replicas computed all the time."""
    return seen.waited_share >= _OFTEN and seen.busy_share >= _BUSY


def _load(seen: Observation) -> dict[str, float]:
    return {
        "span_s": seen.span_s,
        "replicas": seen.replicas,
        "tokens_per_second": round(seen.rate, 1),
        "busy_share": round(seen.busy_share, 3),
        "queued_tokens": round(seen.queued_tokens),
        "waiting_s": round(seen.waiting_s, 3),
        "waited_share": round(seen.waited_share, 3),
    }
