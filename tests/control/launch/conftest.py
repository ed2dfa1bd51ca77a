"""Fixtures of supervised fleets."""

from tests.support.fleet import _note_others, fleet, fleets, folder, launcher

__all__ = ["_note_others", "fleet", "fleets", "folder", "launcher"]
