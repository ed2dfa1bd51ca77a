"""A router as one caller sees it: what his key is not for is refused, and not told of."""

from __future__ import annotations

from typing import Protocol

from teimgr.access import Caller
from teimgr.directory import Snapshot
from teimgr.errors import Forbidden, ModelNotFound
from teimgr.route.links import LinkLimits
from teimgr.route.router import Lease, Router, check_target, only_running
from teimgr.wire.fields import Target


class Seen(Protocol):
    """What a call needs of a router, be it whole or a part."""

    @property
    def limits(self) -> LinkLimits:
        """Bounds of every link."""

    @property
    def snapshot(self) -> Snapshot:
        """The instances there are."""

    def lease(self, target: Target) -> Lease:
        """As `Router.lease`."""

    def only_running(self) -> Target:
        """As `Router.only_running`."""


def seen_by(caller: Caller, router: Router) -> Seen:
    """`router` as `caller` may use it."""
    return _Part(caller, router) if caller.is_restricted else router


class _Part:
    """The part of a router that a restricted caller is for."""

    def __init__(self, caller: Caller, router: Router) -> None:
        self._caller = caller
        self._router = router

    @property
    def limits(self) -> LinkLimits:
        return self._router.limits

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(tuple(entry for entry in self._router.snapshot.entries if self._caller.covers(entry.name)))

    def lease(self, target: Target) -> Lease:
        """As `Router.lease`.

        Raises:
            Forbidden: the target is an instance that the caller's key is not for, or a model that no instance runs
                which it is for. Whether there is such an instance is not told.
        """
        check_target(target)
        if target.instance_name is not None:
            self._caller.require_instance(target.instance_name)
        elif target.model_id is None:
            entries = self._router.snapshot.entries
            if (index := target.instance_index or 0) < len(entries):
                self._caller.require_instance(entries[index].name)
        try:
            return self._router.lease(target, self._caller.covers)
        except ModelNotFound as error:
            raise Forbidden(
                f"The key '{self._caller.name}' is for no running instance of model '{target.model_id}'"
            ) from error

    def only_running(self) -> Target:
        """As `Router.only_running`, of the instances that the caller's key is for."""
        return only_running(self.snapshot)
