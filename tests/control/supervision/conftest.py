"""Fixtures of supervised fleets, and settings for mux processes."""

from tests.support.fleet import _note_others, fleet, fleets, folder, launcher
from tests.support.mux_process import settings

__all__ = ["_note_others", "fleet", "fleets", "folder", "launcher", "settings"]
