"""The REST application on a real listener."""

from tests.support.rest_listener import front, settings

__all__ = ["front", "settings"]
