"""A short fault run of each kind that heals fast; the long run is `python -m tests.faults`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import soak

# Without those that wait for a new nursery, which imports torch for seconds; a standby does not.
KINDS = (
    "worker_killed",
    "worker_terminated",
    "worker_paused",
    "mux_killed",
    "nursery_killed",
    "created_and_deleted",
    "model_switched",
    "worker_killed_in_a_switch",
    "scaled_up_and_down",
    "worker_killed_in_a_load_on_demand",
    "quotas_changed",
    "unloaded_under_calls",
    "disk_refused",
    "model_file_cut_short",
    "port_taken",
    "clients_vanished",
    "answers_unread",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1])
async def test_no_invariant_breaks(tmp_path: Path, seed: int) -> None:
    report = await soak.run(tmp_path, seed, faults=6, kinds=KINDS, minutes=0.5)

    assert report.breaches == []
    assert report.faults.total() >= 2
    assert report.texts > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_quotas_that_change_under_calls_are_exact(tmp_path: Path) -> None:
    report = await soak.run(tmp_path, 2, faults=2, kinds=("quotas_changed",))

    assert report.breaches == []
    assert report.faults.total() == 2
