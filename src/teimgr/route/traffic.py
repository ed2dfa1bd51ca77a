"""What went over the links to the workers of one instance, in this process, since its start."""

from __future__ import annotations

from typing import Any


class Traffic:
    """Counters of one instance; its replicas come and go, these stay. Bytes are those of payloads."""

    __slots__ = ("connects", "expired", "losses", "received_bytes", "requests", "sent_bytes")

    def __init__(self) -> None:
        self.requests = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self.connects = 0
        self.losses = 0
        self.expired = 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}
