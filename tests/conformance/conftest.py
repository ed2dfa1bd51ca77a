"""One daemon with every model for the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.fleet import MODELS, create
from tests.conformance.surfaces import Surfaces
from tests.support.daemon_process import WarmDaemonProcess


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package")
def surfaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surfaces]:
    with WarmDaemonProcess(max_instances=len(MODELS), health_check_interval_secs=10) as daemon:
        create(daemon, tmp_path_factory.mktemp("models"))
        surfaces = Surfaces(daemon)
        yield surfaces
        surfaces.close()
