"""`ModelNames`: resolves a name to an instance, and suggests similar names. `ModelScans`: finds `model` in a body."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import orjson

from teimgr.errors import AmbiguousInstance, Forbidden, InstanceNotFound, ModelNotFound, Stopped, Unavailable
from teimgr.http.turns import WorkTurns
from teimgr.models.source import names_a_path, shown_id
from teimgr.spec import State
from teimgr.wire.gil import StepThread
from teimgr.wire.json_scan import Steps, text_member
from teimgr.wire.protobuf import Target
from teimgr.wire.routing.router import Lease, RouterView

_NEAREST = 3
# The most characters of an unknown name in the error text.
_SHOWN_CHARS = 256
# Limit on the search for similar names, in products of two lengths: some 10 ms on the event loop. Each comparison has a
# fixed cost like that of two names of 40 characters.
_COMPARED_CHARS, _COMPARISONS, _BEGUN = 128, 200_000, 1600
_REGISTRIES = ("registry.ollama.ai/", "library/")  # of Ollama
_LATEST = ":latest"


class ModelNames:
    """Resolves names against the router's last snapshot; `aliases` maps an alias to an instance name or a model id.

    Model ids that are paths of the host resolve for every caller, and are listed only if `shows_paths`.
    """

    def __init__(
        self, router: RouterView, aliases: Callable[[], Mapping[str, str]], *, shows_paths: bool = True
    ) -> None:
        self._router = router
        self._aliases = aliases
        self._shows_paths = shows_paths
        self._sorted: tuple[object, object, list[str]] | None = None  # made from these entries and aliases

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
        except (ModelNotFound, Forbidden):  # there are such instances, as was just checked
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


# Larger bodies, or those with more lists and objects, are scanned for their model instead of parsed: orjson would hold
# the GIL for more than 2 ms.
PARSED_BYTES = 64 * 1024
_PARSED_LISTS = 4096
# A scan begins on the event loop, which suffices for most bodies; after this time it goes on on a thread.
_ON_LOOP_S = 0.0005


class ModelScans:
    """Finds `model` in bodies, taking turns by caller (`TURNS_OF`): on the event loop, and for long bodies on a
    thread."""

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
