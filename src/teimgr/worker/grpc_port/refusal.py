"""A gRPC status that no failure of teimgr's stands for."""

from __future__ import annotations


class Refusal(Exception):
    """End the call with the gRPC status of that number and this sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
