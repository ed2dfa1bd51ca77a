"""Which instance a request means by its `model`: an instance's name, an alias, or a model's id, in this order."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from teimgr.errors import AmbiguousInstance, InstanceNotFound, ModelNotFound, TeimgrError, Unavailable
from teimgr.route.router import Lease
from teimgr.route.seen import Seen
from teimgr.spec import State
from teimgr.wire.fields import Target

_NEAREST = 3


class Naming:
    """Resolves names against the last snapshot; `aliases` maps an alias to an instance's name or a model's id."""

    def __init__(self, router: Seen, aliases: Callable[[], Mapping[str, str]]) -> None:
        self._router = router
        self._aliases = aliases

    def of(self, router: Seen) -> Naming:
        """The same names over the part of the router that one caller sees."""
        return self if router is self._router else Naming(router, self._aliases)

    def lease(self, model: str | None) -> Lease:
        """A lease on the least busy worker that `model` means; where it is None, on the only running instance.

        Raises:
            ModelNotFound: nothing is called so; the text names what nearly is.
            AmbiguousInstance: no model is given and there is not exactly one to choose.
            Unavailable: what it means does not run.
        """
        return self._router.lease(self._unnamed() if not model else self._target(model))

    def instance(self, name: str) -> Lease:
        """A lease on the instance of that name.

        Raises:
            InstanceNotFound: with the nearest names.
            Unavailable: it does not run.
        """
        try:
            return self._router.lease(Target(instance_name=name))
        except InstanceNotFound as error:
            raise _extended(error, _nearest(name, self._instances())) from None

    def names(self) -> list[str]:
        """Everything that a `model` may say, sorted: instances, aliases and model ids."""
        return sorted({*self._instances(), *self._model_ids(), *self._aliases()})

    def known(self, model: str) -> str | None:
        """The model id behind a name; None where nothing is called so."""
        meant = model if model in self._instances() else self._aliases().get(model, model)
        for entry in self._router.snapshot.entries:
            if meant in (entry.name, entry.model_id):
                return entry.model_id
        return None

    def _target(self, model: str) -> Target:
        instances = self._instances()
        meant = model if model in instances else self._aliases().get(model, model)
        if meant in instances:
            return Target(instance_name=meant)
        having = [entry for entry in self._router.snapshot.entries if entry.model_id == meant]
        if not having:
            raise ModelNotFound(f"The model '{model}' does not exist{_nearest(model, self.names())}")
        if not any(entry.state is State.RUNNING for entry in having):
            states = ", ".join(f"'{entry.name}' is {entry.state.value}" for entry in having)
            raise Unavailable(f"No instance of the model '{meant}' is running: {states}")
        return Target(model_id=meant)

    def _unnamed(self) -> Target:
        try:
            return self._router.only_running()
        except AmbiguousInstance as error:
            raise AmbiguousInstance(f"Say which model: {error.message}") from None

    def _instances(self) -> list[str]:
        return [entry.name for entry in self._router.snapshot.entries]

    def _model_ids(self) -> list[str]:
        return [entry.model_id for entry in self._router.snapshot.entries]


def _nearest(name: str, known: list[str]) -> str:
    """What a caller may have meant, as the end of a sentence."""
    folded = {one.casefold(): one for one in known} | {
        one.casefold().rpartition("/")[2]: one for one in known if "/" in one
    }
    found = difflib.get_close_matches(name.casefold(), folded, _NEAREST, 0.5)
    found += [key for key in folded if name.casefold() in key and key not in found][: _NEAREST - len(found)]
    nearest = list(dict.fromkeys(folded[one] for one in found))
    if nearest:
        return f"; did you mean {' or '.join(map(repr, nearest))}?"
    return f"; there are {', '.join(map(repr, known[:_NEAREST]))}" if known else "; there are none"


def _extended(error: TeimgrError, tail: str) -> TeimgrError:
    error.message += tail
    return error
