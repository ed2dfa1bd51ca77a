"""`teimgr batch` against a real daemon: upload, wait, results, failed requests, cancellation, and its refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemon_process import WarmDaemonProcess

from teimgr.cli.failures import ExitStatus
from teimgr.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(named_fleet: WarmDaemonProcess, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `teimgr batch` in this process against the daemon."""

    def call(*arguments: object) -> tuple[int, str, str]:
        return main(["batch", *map(str, arguments)]), *capsys.readouterr()

    return call


def requests(path: Path, models: Sequence[str]) -> Path:
    """A file of one request for each model."""
    lines: list[dict[str, Any]] = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": {"model": model, "input": "x"}}
        for number, model in enumerate(models)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_file_is_submitted_followed_and_its_results_downloaded(run: Run, tmp_path: Path) -> None:
    file = requests(tmp_path / 'in "1".jsonl', ["static"] * 3)
    status, out, err = run("submit", file, "--wait", "--json")
    batch = json.loads(out)
    assert (status, err, batch["status"], batch["endpoint"]) == (ExitStatus.OK, "", "completed", "/v1/embeddings")
    assert batch["request_counts"]["completed"] == 3

    results = tmp_path / "results.jsonl"
    assert run("get", batch["id"], "--output", results)[:2] == (ExitStatus.OK, f"{results}\n")
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert sorted(row["custom_id"] for row in rows) == ["0", "1", "2"]
    assert sorted(each.name for each in tmp_path.iterdir()) == [file.name, "results.jsonl"]
    assert run("get", batch["id"], "-o", results)[0] == ExitStatus.REFUSED
    assert f"id\t{batch['id']}\n" in run("get", batch["id"])[1]
    listed = [line.split("\t") for line in run("list")[1].splitlines()]
    assert [batch["id"], "completed", "3/3", "/v1/embeddings"] in [row[:4] for row in listed]
    ended = run("cancel", batch["id"])
    assert (ended[0], "teimgr:" in ended[2]) == (ExitStatus.REFUSED, True)


def test_failed_requests_are_a_file_of_their_own(run: Run, tmp_path: Path) -> None:
    file = requests(tmp_path / "in.jsonl", ["static", "ranker"])
    status, out, err = run("submit", file, "--wait")
    assert (status, "1 failed" in err) == (ExitStatus.INCOMPLETE, True), err
    batch_id = next(line.partition("\t")[2] for line in out.splitlines() if line.startswith("id\t"))
    status, out, _ = run("get", batch_id, "-o", tmp_path / "out.jsonl", "--wait")
    assert status == ExitStatus.INCOMPLETE
    assert out.splitlines() == [str(tmp_path / "out.jsonl"), str(tmp_path / "out.jsonl.failed.jsonl")]
    assert json.loads((tmp_path / "out.jsonl.failed.jsonl").read_text())["custom_id"] == "1"


def test_what_is_wrong_is_said(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    assert run("submit", file)[2] == f"teimgr: {file}: cannot be read: No such file or directory\n"
    file.write_text("x\n")
    status, _, err = run("submit", file, "--wait")
    assert (status, "failed, line 1: " in err) == (ExitStatus.FAILED, True), err
    status, _, err = run("submit", requests(file, ["static"]), "--window", "9d")
    assert (status, err.startswith("teimgr: completion_window")) == (ExitStatus.REFUSED, True), err
    status, _, err = run("get", "batch_1")
    assert (status, err.splitlines()[0]) == (ExitStatus.NOT_FOUND, "teimgr: No such batch: batch_1")
