"""A short fault run of each kind that heals fast; the long run is `python -m tests.faults`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import long_run, soak

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
def test_no_invariant_breaks_and_a_run_that_is_stopped_leaves_its_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults", "--patience", "2", "--only", *KINDS, "--report", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert any(line.startswith("6 faults") for line in run.stdout)
        run.terminate()
        run.communicate()

    assert run.returncode == long_run.INTERRUPTED
    report = json.loads((tmp_path / "faults-1.json").read_bytes())
    total = sum(report["faults"].values())
    assert report["breaches"] == []
    assert total >= 6
    assert report["faults"].keys() >= {"quotas_changed", "worker_killed", "nursery_killed"}  # this seed draws them
    assert report["texts"] > 0
    assert (tmp_path / "faults-1.md").read_text().startswith(f"{total} faults, seed 1, ")


@pytest.mark.long  # the run above has changed some quotas, with the same checks
@pytest.mark.timeout(300)
async def test_quotas_that_change_under_calls_are_exact(tmp_path: Path) -> None:
    report = await soak.run(tmp_path, 2, faults=2, kinds=("quotas_changed",))

    assert report.breaches == []
    assert report.faults.total() == 2
