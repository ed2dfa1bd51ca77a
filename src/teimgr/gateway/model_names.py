"""Resolution of the `model` of a request: an instance name, an alias or a model id, in this order."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from teimgr.errors import AmbiguousInstance, Forbidden, InstanceNotFound, ModelNotFound, Unavailable
from teimgr.routing.router import Lease, RouterView
from teimgr.wire.protobuf import Target

_NEAREST = 3
# Bounds the cost of finding similar names, and the length of the error text, for absurdly long names.
_COMPARED_CHARS = 256


class ModelNames:
    """Resolves names against the router's last snapshot; `aliases` maps an alias to an instance name or a model id."""

    def __init__(self, router: RouterView, aliases: Callable[[], Mapping[str, str]]) -> None:
        self._router = router
        self._aliases = aliases

    def restricted(self, router: RouterView) -> ModelNames:
        return self if router is self._router else ModelNames(router, self._aliases)

    def lease(self, model: str | None) -> Lease:
        """A lease on the least busy worker of `model`; where it is None, of the only running instance.

        Raises:
            ModelNotFound: the name is unknown; the text lists similar ones.
            AmbiguousInstance: no model is given and there is not exactly one to choose.
            Unavailable: the instance does not run.
        """
        if not model:
            try:
                return self._router.lease(self._router.only_running())
            except AmbiguousInstance as error:
                raise AmbiguousInstance(f"Say which model: {error.message}") from None
        self.check(model)
        target = self._resolved(model)
        if self._router.find(target) is not None:
            return self._router.lease(Target(instance_name=target))
        try:
            return self._router.lease(Target(model_id=target))
        except (ModelNotFound, Forbidden):  # there are such instances, as was just checked
            entries = (entry for entry in self._router.snapshot.entries if entry.model_id == target)
            states = ", ".join(f"'{entry.name}' is {entry.state.value}" for entry in entries)
            raise Unavailable(f"No instance of the model '{target}' takes calls now: {states}") from None

    def lease_instance(self, name: str) -> Lease:
        """A lease on the instance of that name.

        Raises:
            InstanceNotFound: with the nearest names.
            Unavailable: it does not run.
        """
        try:
            return self._router.lease(Target(instance_name=name))
        except InstanceNotFound as error:
            error.message += _nearest(name, self._instances())
            raise error from None

    def names(self) -> list[str]:
        """All names that `model` may have, sorted: instances, aliases and model ids."""
        aliases = (alias for alias in self._aliases() if self.model_id(alias) is not None)
        return sorted({*self._instances(), *(entry.model_id for entry in self._router.snapshot.entries), *aliases})

    def check(self, model: str) -> None:
        """Raises ModelNotFound, with similar names, for an unknown name; what is known need not run."""
        if self.model_id(model) is None:
            shown = model if len(model) <= _COMPARED_CHARS else model[:_COMPARED_CHARS] + "…"
            raise ModelNotFound(f"The model '{shown}' does not exist{_nearest(model, self.names())}")

    def model_id(self, model: str) -> str | None:
        """The id of the model behind a name; None for an unknown name."""
        target = self._resolved(model)
        if (entry := self._router.find(target)) is not None:
            return entry.model_id
        return next((target for each in self._router.snapshot.entries if each.model_id == target), None)

    def card(self, name: str, created: int) -> dict[str, Any]:
        """OpenAI's model object; `root` is the id of the model behind the name, as in vLLM's."""
        return {"id": name, "object": "model", "created": created, "owned_by": "teimgr", "root": self.model_id(name)}

    def _resolved(self, model: str) -> str:
        return model if self._router.find(model) is not None else self._aliases().get(model, model)

    def _instances(self) -> list[str]:
        return [entry.name for entry in self._router.snapshot.entries]


def _nearest(name: str, candidates: list[str]) -> str:
    by_spelling: dict[str, list[str]] = {}
    for each in candidates:
        for spelling in {
            each.casefold(),
            each.casefold().rpartition("/")[2],
        }:  # a model's id, or that without its owner
            by_spelling.setdefault(spelling, []).append(each)
    given = name[:_COMPARED_CHARS].casefold()
    similar = difflib.get_close_matches(given, by_spelling, _NEAREST, 0.5) or [
        key for key in by_spelling if given in key
    ]
    nearest = list(dict.fromkeys(one for key in similar for one in sorted(by_spelling[key], key=len)))[:_NEAREST]
    if nearest:
        return f"; did you mean {' or '.join(map(repr, nearest))}?"
    return f"; there are {', '.join(map(repr, candidates[:_NEAREST]))}" if candidates else "; there are none"
