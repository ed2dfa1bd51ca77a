"""Called by `ray start` with its parameters (RAY_START_HOOK), for what its command line has no flag for."""

from __future__ import annotations

from typing import Any


def without_client_server(parameters: Any, head: bool) -> None:
    """Start no server of Ray Client, whose port runs code of its callers and which nothing here uses."""
    parameters.ray_client_server_port = None
