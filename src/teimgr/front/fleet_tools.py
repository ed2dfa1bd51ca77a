"""What the routes that concern the whole fleet stand on."""

from __future__ import annotations

from dataclasses import dataclass

from teimgr.control.happenings import Happenings
from teimgr.control.live_probe import LiveProbe
from teimgr.control.reload import Reloader


@dataclass(frozen=True, slots=True)
class FleetTools:
    """Events, proofs on demand, and the way to another configuration."""

    happenings: Happenings
    live_probe: LiveProbe
    reloader: Reloader
