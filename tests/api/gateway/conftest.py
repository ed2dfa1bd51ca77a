"""The REST application on a real listener."""

from tests.support.rest_fixtures import front, settings

__all__ = ["front", "settings"]
