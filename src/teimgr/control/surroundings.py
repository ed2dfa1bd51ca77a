"""What every supervisor is given alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from teimgr.control.attempt import ProbePlan
from teimgr.control.lifecycle import Policy
from teimgr.directory import Directory
from teimgr.launch.base import Launcher
from teimgr.settings import Settings


class ControlMetrics(Protocol):
    """What supervision counts."""

    def instance_restarted(self, name: str) -> None:
        """The daemon, not a user, decided to restart an instance."""

    def health_check_failed(self, name: str) -> None:
        """A probe failed."""

    def worker_started(self, name: str, seconds: float) -> None:
        """A worker proved that it is ready, `seconds` after its launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What every supervisor is given alike. `grace_s` is what a stop allows for finishing calls."""

    launcher: Launcher
    directory: Directory
    metrics: ControlMetrics
    policy: Policy
    probes: ProbePlan
    grace_s: float
    changed: Callable[[], None]


def policy_of(settings: Settings) -> Policy:
    """The numbers of supervision that the settings say."""
    return Policy(
        startup_timeout_s=settings.startup_timeout_secs,
        max_probe_failures=settings.max_failures_before_restart,
        backoff_s=settings.restart_backoff_secs,
        backoff_max_s=settings.restart_backoff_max_secs,
    )
