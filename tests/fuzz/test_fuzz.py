"""A small run of both fuzzers, the same cases every time; `python -m tests.fuzz` is the long one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import documents, images, rest, rpc, sounds, target
from tests.support.daemon_process import WarmDaemonProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
REST_CASES = 50
RPC_CASES = 200
IMAGE_CASES = 300
SOUND_CASES = 300
DOCUMENT_CASES = 6  # of a process each


@pytest.fixture(scope="module")
def running() -> Iterator[target.Target]:
    with target.running(WarmDaemonProcess) as found:
        yield found


def test_http_keeps_to_its_documents(running: target.Target, tmp_path: Path) -> None:
    instances = ("fuzz-embedding", "fuzz-reranker")  # a process each; the ports have one document
    report = rest.run(running, REST_CASES, tmp_path, boundaries=False, instances=instances)

    assert not report.failures, report.output
    assert report.cases >= REST_CASES
    running.check_unharmed()


def test_malformed_protobuf_and_arrow_are_refused_and_harm_nobody(running: target.Target) -> None:
    report = rpc.run(running, RPC_CASES)

    assert report.cases >= RPC_CASES
    assert report.statuses["OK"] > RPC_CASES // 20  # the cases reach the models


def test_broken_files_of_images_are_refused_or_decoded(tmp_path: Path) -> None:
    found = images.read_cases(IMAGE_CASES, target.SEED, tmp_path / "case")
    assert not found["failures"]
    assert found["outcomes"].keys() >= {"refused", *images.FORMATS}


def test_broken_files_of_sounds_are_refused_or_decoded(tmp_path: Path) -> None:
    found = sounds.read_cases(SOUND_CASES, target.SEED, tmp_path / "case")
    assert not found["failures"]
    assert found["outcomes"].keys() >= {"refused", *sounds.FORMATS}


def test_broken_documents_are_refused_or_rendered(tmp_path: Path) -> None:
    found = documents.read_cases(DOCUMENT_CASES, target.SEED, tmp_path / "case")
    assert not found["failures"]
    assert found["outcomes"].keys() >= {"refused", "rendered"}
