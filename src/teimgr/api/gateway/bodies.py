"""Bodies of inference on port 9000, and the model that one names.

`Bodies` shares the bytes that requests and replies hold among callers. `ModelScans` finds `model` in a body;
`ModelNames` resolves it to an instance and suggests similar names.
"""

from __future__ import annotations

import difflib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import orjson

from teimgr.errors import (
    AmbiguousInstance,
    Forbidden,
    InstanceNotFound,
    ModelNotFound,
    Overloaded,
    Stopped,
    TooLarge,
    Unavailable,
)
from teimgr.http.bodies import charge_body, read_body
from teimgr.http.byte_budget import ByteBudget, Charge, Shares
from teimgr.http.direct import DirectRequest
from teimgr.http.turns import WorkTurns
from teimgr.models.source import names_a_path, shown_id
from teimgr.spec import State
from teimgr.wire.frames import Buffer
from teimgr.wire.gil import StepThread
from teimgr.wire.json_scan import Steps, text_member
from teimgr.wire.protobuf import Target
from teimgr.wire.routing.router import Lease, RouterView

_NEAREST = 3
_SHOWN_CHARS = 256  # of an unknown name in an error text
# Limits of the search for similar names, in products of two lengths: about 10 ms on the event loop. `_BEGUN` is the
# fixed cost of a comparison.
_COMPARED_CHARS, _COMPARISONS, _BEGUN = 128, 200_000, 1600
_REGISTRIES = ("registry.ollama.ai/", "library/")  # of Ollama
_LATEST = ":latest"


class ModelNames:
    """Resolves names against the router's last snapshot; `aliases` maps aliases to instance names or model ids.

    Model ids that are paths of the host resolve for every caller but are listed only if `shows_paths`.
    """

    def __init__(
        self, router: RouterView, aliases: Callable[[], Mapping[str, str]], *, shows_paths: bool = True
    ) -> None:
        self._router = router
        self._aliases = aliases
        self._shows_paths = shows_paths
        self._sorted: tuple[object, object, list[str]] | None = None  # cached for these entries and aliases

    def restricted(self, router: RouterView, shows_paths: bool) -> ModelNames:
        return self if router is self._router else ModelNames(router, self._aliases, shows_paths=shows_paths)

    def lease(self, model: str | None, kinds: Sequence[str] = ()) -> Lease:
        """Lease the least busy worker of `model`; without a model, of the instance for one of `kinds`.

        Raises:
            ModelNotFound: the name is unknown; the text lists similar ones.
            AmbiguousInstance: no model is given, and `RouterView.unnamed` finds several instances or none.
            Unavailable: the instance does not run.
        """
        if not model:
            try:
                return self._router.lease(self._router.unnamed(kinds))
            except AmbiguousInstance as error:
                raise AmbiguousInstance(f"Say which model: {error.message}") from None
        self.check(model)
        target = self.target(model)
        if self._router.find(target) is not None:
            return self._router.lease(Target(instance_name=target))
        try:
            return self._router.lease(Target(model_id=target))
        except (ModelNotFound, Forbidden):  # instances of it exist, but none can be called
            found = [(entry.name, entry.state) for entry in self._router.of_model(target)]
            states = ", ".join(f"'{name}' is {state.value}" for name, state in found)
            kind = Stopped if all(state is State.STOPPED for _, state in found) else Unavailable
            shown = target if self._shows_paths else shown_id(target)
            raise kind(f"No instance of the model '{shown}' takes calls now: {states}") from None

    def lease_instance(self, name: str) -> Lease:
        """Lease a worker of the instance of that name.

        Raises:
            InstanceNotFound: the text has the nearest names.
            Unavailable: it does not run.
        """
        try:
            return self._router.lease(Target(instance_name=name))
        except InstanceNotFound as error:
            error.reword(error.message + _nearest(name, self._instances()))
            raise error from None

    def names(self) -> list[str]:
        """Return the listed names that `model` may have, sorted: instances, aliases and model ids."""
        entries, given = self._router.snapshot.entries, self._aliases()
        if self._sorted is not None and self._sorted[0] is entries and self._sorted[1] is given:
            return self._sorted[2]
        aliases = (alias for alias in given if self.model_id(alias) is not None)
        ids = {entry.model_id for entry in entries}
        listed = ids if self._shows_paths else {each for each in ids if not names_a_path(each)}
        self._sorted = entries, given, sorted({*self._instances(), *listed, *aliases})
        return self._sorted[2]

    def check(self, model: str, refusal: str = "The model '{}' does not exist") -> None:
        """Raise ModelNotFound, with similar names, for an unknown name; a known one need not be running."""
        if self.model_id(model) is None and not self._router.may_load(self.target(model)):
            shown = model if len(model) <= _SHOWN_CHARS else model[:_SHOWN_CHARS] + "…"
            raise ModelNotFound(refusal.format(shown) + _nearest(model, self.names()))

    def model_id(self, model: str) -> str | None:
        """Return the model id behind a name; None for an unknown name."""
        target = self.target(model)
        if (entry := self._router.find(target)) is not None:
            return entry.model_id
        return target if self._router.of_model(target) else None

    def spelt_here(self, model: str) -> str:
        """Return the known spelling of a name as Ollama's clients write it; otherwise the name itself."""
        return next((each for each in _spellings(model) if self.model_id(each) is not None), model)

    def target(self, model: str) -> str:
        """Return the instance or the model id that an alias stands for; any other name unchanged."""
        return model if self._router.find(model) is not None else self._aliases().get(model, model)

    def _instances(self) -> list[str]:
        return [entry.name for entry in self._router.snapshot.entries]


def _spellings(model: str) -> Iterator[str]:
    """Yield the spellings of a name of Ollama's clients: without its registry, with or without the tag `latest`."""
    yield model
    bare = model
    for registry in _REGISTRIES:
        bare = bare.removeprefix(registry)
    yield bare
    yield bare.removesuffix(_LATEST) if bare.endswith(_LATEST) else bare + _LATEST


def _nearest(name: str, candidates: list[str]) -> str:
    by_spelling: dict[str, list[str]] = {}
    for each in candidates:
        for spelling in {
            each.casefold(),
            each.casefold().rpartition("/")[2],
        }:  # a model's id, or the id without its owner
            by_spelling.setdefault(spelling, []).append(each)
    given = name[:_COMPARED_CHARS].casefold()
    similar = difflib.get_close_matches(given, _comparable(given, by_spelling), _NEAREST, 0.5) or [
        key for key in by_spelling if given in key
    ]
    nearest = list(dict.fromkeys(one for key in similar for one in sorted(by_spelling[key], key=len)))[:_NEAREST]
    if nearest:
        return f"; did you mean {' or '.join(map(repr, nearest))}?"
    return f"; there are {', '.join(map(repr, candidates[:_NEAREST]))}" if candidates else "; no model is running"


def _comparable(given: str, names: Iterable[str]) -> Iterator[str]:
    """Yield the names to compare with a name: those of similar length, as far as the time limit allows."""
    left = _COMPARISONS
    for name in sorted(names, key=lambda each: abs(len(each) - len(given))):
        left -= _BEGUN + len(name) * len(given)
        if left < 0:
            return
        yield name


# Larger bodies, or bodies with more lists and objects, are scanned instead of parsed, since orjson would hold the GIL
# for more than 2 ms.
PARSED_BYTES = 64 * 1024
_PARSED_LISTS = 4096
_ON_LOOP_S = 0.0005  # a longer scan continues on a thread


class ModelScans:
    """Finds `model` in bodies, in turns by caller (`TURNS_OF`): on the event loop, or on a thread for long bodies."""

    def __init__(self) -> None:
        self._turns = WorkTurns()
        self._thread = StepThread("scan")

    def close(self) -> None:
        self._thread.close()

    async def model_of(self, body: bytes | bytearray, start: int = 0) -> str | None:
        """Return the text under `model` in the JSON object that begins at `start`, or None.

        The last of several wins, as in the worker. Malformed JSON may give a result too: the worker, which parses all
        of it, refuses it.

        Raises:
            InvalidInput: `json_scan.MAX_TOKENS` lists, objects and long texts come before it.
        """
        found = await self._turns.run(partial(_found, body, start))
        return found if found is None or isinstance(found, str) else await self._thread.run(found)


def _found(body: bytes | bytearray, start: int) -> str | Steps[str | None] | None:
    """Return a body's model, or, if that takes longer, the remaining steps."""
    if _parses_quickly(body, start):
        try:
            value = orjson.loads(memoryview(body)[start:])
        except orjson.JSONDecodeError:
            pass
        else:
            model = value.get("model") if isinstance(value, dict) else None
            return model if isinstance(model, str) else None
    steps = text_member(body, "model", start)
    until = time.perf_counter() + _ON_LOOP_S
    try:
        while time.perf_counter() < until:
            next(steps)
    except StopIteration as end:
        text: str | None = end.value
        return text
    return steps


def _parses_quickly(body: bytes | bytearray, start: int) -> bool:
    """True if orjson parses a body quickly."""
    size = len(body) - start
    if size > PARSED_BYTES:
        return False
    return size <= _PARSED_LISTS or body.count(b"[", start) + body.count(b"{", start) <= _PARSED_LISTS


# Bodies up to this size have a separate budget, so that interactive requests never wait for bulk ones.
SMALL_BYTES = 64 * 1024
_SMALL_BODIES_BYTES = 64 * 2**20
_LARGE_BODIES_BYTES = 256 * 2**20
# Calls to one instance may hold at most a quarter of a budget, so that a hanging instance does not block others.
_INSTANCE_SHARE = 4
# The bodies of one caller, or of one connection without keys, may hold at most half of a budget.
_SHARE = 2
_SMALL_DIGITS = 9
# Replies are charged to the budget of large bodies even if they exceed it; above this multiple, new calls are refused.
_REPLIES = 2

# Minimum charge of a call, for its memory besides the body.
MIN_HELD_BYTES = 1024

HeldKey = tuple[str, str | None, ByteBudget]
"""Instance, the caller whose share is counted (None: all callers), and the budget."""


class ReadBody(NamedTuple):
    """A buffer with a request's head and its body from `start` on; the bytes charged, and their budget."""

    payload: bytearray
    start: int
    charged: int
    budget: ByteBudget


def framed(head: bytes, body: Buffer) -> bytearray:
    """Return a buffer with a request's head and its body, which is copied once: each copy of 32 MiB takes 10 ms."""
    return bytearray().join((head, body))


class Bodies:
    """Memory budgets of requests and replies, one for small and one for large bodies.

    One instance, caller or connection can hold only a part of a budget.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.small_bytes = min(SMALL_BYTES, limit_bytes)
        self.small = ByteBudget(_SMALL_BODIES_BYTES)
        self.large = ByteBudget(max(_LARGE_BODIES_BYTES, limit_bytes))
        self._small_shares, self._large_shares = Shares(self.small, _SHARE), Shares(self.large, _SHARE)
        self._held: Counter[HeldKey] = Counter()

    async def read(self, request: DirectRequest, head: bytes, sharer: Hashable) -> tuple[ReadBody, Charge]:
        """Read `head` and the body into one buffer; the caller releases the returned charge.

        Each byte is charged as it arrives, also against the part of the budget for the bodies of `sharer`.

        Raises:
            TooLarge: the body is over the limit; the rest of it is discarded.
            Overloaded: too many replies wait for their clients, or the budget stayed exhausted for too long.
            SlowClient: the client stopped sending.
        """
        self._check_replies()
        length = request.headers.get(b"content-length", b"")
        is_small = length.isdigit() and len(length) <= _SMALL_DIGITS and int(length) <= SMALL_BYTES
        budget, shares = (self.small, self._small_shares) if is_small else (self.large, self._large_shares)
        charge = shares.charge(sharer)
        try:
            buffer = await read_body(request, self.limit_bytes, charge, head)
            if buffer is None:
                raise TooLarge(f"The request body is larger than the limit of {self.limit_bytes} bytes")
        except Overloaded:
            charge.release()
            raise Overloaded("Too many large requests are being read; try again later") from None
        except BaseException:
            charge.release()
            raise
        return ReadBody(buffer, len(head), charge.bytes, budget), charge

    def take_small(self, request: DirectRequest, head: bytes) -> tuple[ReadBody, Charge] | None:
        """Return the result of `read` for a small body that has arrived and fits its budget now; else None."""
        size = request.body.whole_bytes
        if size is None or size > self.small_bytes:
            return None
        self._check_replies()
        charge = Charge(self.small)
        if not charge.try_take(size):
            return None
        return ReadBody(framed(head, request.body.take()), len(head), size, self.small), charge

    async def hold(
        self, head: bytes, body: bytes | bytearray, budget: ByteBudget | None = None
    ) -> tuple[ReadBody, Charge]:
        """Like `read`, for a body that is in memory, as a small one unless a budget is given; the caller releases the
        charge.

        Raises:
            Overloaded: too many replies wait for their clients, or the budget stayed exhausted for too long.
        """
        self._check_replies()
        charge = Charge(budget or self.small)
        await charge_body(charge, len(body))
        return ReadBody(framed(head, body), len(head), charge.bytes, budget or self.small), charge

    def _check_replies(self) -> None:
        if self.large.taken_bytes > self.large.limit_bytes * _REPLIES:
            raise Overloaded("Too many replies wait for clients that do not read them; try again later")

    def held_for(self, instance: str, body: ReadBody, holder: str | None = None) -> Holding:
        """Count `body` as held by `instance` and the caller `holder` within the block, at least `MIN_HELD_BYTES`.

        Raises:
            Overloaded: the calls to the instance, or those of `holder` to it, already hold their share.
        """
        count = max(body.charged, MIN_HELD_BYTES)
        most = body.budget.limit_bytes // _INSTANCE_SHARE
        of_all: HeldKey = (instance, None, body.budget)
        if (held := self._held.get(of_all, 0)) and held + count > most:
            raise Overloaded(f"Too many requests wait for instance '{instance}'; try again later")
        if holder is None:
            return Holding(self._held, (of_all,), count)
        of_holder: HeldKey = (instance, holder, body.budget)
        if (held := self._held.get(of_holder, 0)) and held + count > most // _SHARE:
            raise Overloaded(
                f"Too many requests with the key '{holder}' wait for instance '{instance}'; try again later"
            )
        return Holding(self._held, (of_all, of_holder), count)


class Holding:
    """A context manager that adds `count` to the bytes held under each of `keys`."""

    __slots__ = ("_count", "_held", "_keys")

    def __init__(self, held: Counter[HeldKey], keys: Sequence[HeldKey], count: int) -> None:
        self._held = held
        self._keys = keys
        self._count = count

    def __enter__(self) -> None:
        for key in self._keys:
            self._held[key] += self._count

    def __exit__(self, *failure: object) -> None:
        for key in self._keys:
            self._held[key] -= self._count
            if not self._held[key]:
                del self._held[key]
