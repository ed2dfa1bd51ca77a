"""The parts of the benchmarks that a wrong number could come from."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from pathlib import Path

import pytest
from bench import SCENARIOS, card, card_steps, corpus, html, machine
from bench.contest import Row
from bench.report import RESULTS, markdown_table
from bench.table import ratios


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return corpus.corpus(1000)


def test_the_corpus_has_mixed_lengths_and_its_digest_names_it(texts: list[str]) -> None:
    words = sorted(len(text.split()) for text in texts)
    assert len(texts) == 1000
    assert words[0] >= 3
    assert 15 < words[500] < 45
    assert words[-1] > 200
    assert corpus.digest(texts) == corpus.digest(list(texts)) != corpus.digest(texts[1:])


def test_queries_are_short_and_always_the_same() -> None:
    queries = corpus.queries(20)
    assert queries == corpus.queries(20)
    assert all(4 <= len(query.split()) <= 14 for query in queries)


def test_ratios_are_paired_by_round() -> None:
    baseline = Row("theirs", seconds=[10.0, 30.0, 10.0])
    row = Row("ours", seconds=[5.0, 10.0, 5.0])
    assert ratios(row, baseline) == {"best": 2.0, "median": 2.0}


def test_a_table_is_aligned_and_says_nothing_for_what_is_missing() -> None:
    assert markdown_table(("path", "n"), [["a", 1234.0], ["long", None]]) == (
        "| path |     n |\n| ---- | ----: |\n| a    | 1,234 |\n| long |     – |"
    )


def test_a_result_does_not_name_its_host() -> None:
    described = json.dumps(machine.describe())
    assert platform.node() not in described
    assert os.path.expanduser("~") not in described  # noqa: PTH111


def test_memory_and_time_of_a_process_are_read() -> None:
    pid = os.getpid()
    assert 0 < machine.unique_mib(pid) <= machine.peak_rss_mib(pid)
    assert 0 < machine.cpu_s(pid) <= machine.busy_s()


def test_the_page_of_results_is_whole_and_asks_no_other_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "_TARGET", tmp_path / "report.html")

    assert html.run(argparse.Namespace()) == 0

    page = (tmp_path / "report.html").read_text()
    scenarios = {path.name.split("-20")[0] for path in RESULTS.glob("*-20*.json")} & set(SCENARIOS)
    assert all(f'<section id="{name}">' in page for name in scenarios)
    assert page.count("<table>") >= len(scenarios) <= page.count("<li>")
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page)


def test_a_step_of_the_card_run_that_fails_hides_no_other(tmp_path: Path) -> None:
    command = argparse.ArgumentParser()
    card.arguments(command)
    steps = ["--steps", "fidelity,facts,tests", "--device", "cpu", "--out", str(tmp_path)]
    options = command.parse_args([*steps, "--model", str(tmp_path / "none")])
    assert card.STEPS.keys() == card_steps.STEPS.keys()

    assert card.run(options) == 1

    found = json.loads((tmp_path / "card.json").read_text())["steps"]
    assert list(found) == ["fidelity", "facts", "tests"]
    assert "ModelNotFound" in found["fidelity"]["failed"] or "ModelLoadFailed" in found["fidelity"]["failed"]
    assert found["facts"]["kernel is taken"] is True
    assert (found["tests"]["status"], "failed" in found["tests"]) == (0, False)
    assert "==== tests" in (tmp_path / "card.log").read_text()
