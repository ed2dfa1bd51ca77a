"""What the front asks of the control plane: the one door for lifecycle verbs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from teimgr.spec import InstanceSpec, InstanceView


class Manager(Protocol):
    """The verbs as REST needs them. Every failure is a `TeimgrError` that says what to tell the caller.

    A verb on an unknown name raises `InstanceNotFound`.
    """

    @property
    def store_alarm(self) -> str | None:
        """What happened to the state file, when wanted state may have been lost."""

    async def create(self, request: InstanceSpec) -> InstanceView:
        """Store and start a new instance; `port` 0 and absent `prometheus_port` are chosen here."""

    async def start(self, name: str) -> InstanceView:
        """Want it running.

        Raises:
            AlreadyRunning: it is wanted running already.
        """

    async def stop(self, name: str) -> InstanceView:
        """Want it stopped, and return when it is.

        Raises:
            NotRunning: it is stopped already.
        """

    async def restart(self, name: str, *, rolling: bool = False, wait: bool = False) -> InstanceView:
        """Stop it where it runs, and start it; `rolling` as an `update` that changes nothing."""

    async def update(
        self, name: str, changes: Mapping[str, Any], *, recreate: bool = False, wait: bool = False
    ) -> InstanceView:
        """Change keys of its spec (None: back to the default), without a gap unless `recreate`.

        Raises:
            UpdateInProgress: another change of it is under way.
            UpdateFailed: with `wait`, when it came to nothing.
        """

    async def delete(self, name: str) -> InstanceView:
        """Stop it and forget it; the result is how it was last."""

    def list(self) -> list[InstanceView]:
        """All instances, in order of creation."""

    def get(self, name: str) -> InstanceView:
        """One instance."""
