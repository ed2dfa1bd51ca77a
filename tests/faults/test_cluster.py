"""A few failures of a cluster in namespaces; all of them are `python -m tests.faults.cluster`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import cluster
from tests.support.cluster import needs_ray
from tests.support.network_namespace import reason_for_none

FAILURES = (
    "worker killed",
    "model changed",
    "network of a host cut, model changed, then healed",
    "disk of a host full",
)


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(reason_for_none()), reason=reason_for_none() or "allowed")
async def test_no_invariant_breaks(tmp_path: Path) -> None:
    outcomes, report = await cluster.run(tmp_path, "memory", FAILURES)

    assert report.breaches == []
    assert [each.failure for each in outcomes] == list(FAILURES)
    assert report.texts > 0
