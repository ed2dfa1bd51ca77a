"""The parts of the benchmarks that a wrong number could come from."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from bench import LIMITS_S, SCENARIOS, corpus, guard, html, machine, progress
from bench.contest import Row
from bench.report import RESULTS, markdown_table
from bench.table import ratios
from docsite import plots
from docsite.plots import curves

_ROOT = Path(__file__).resolve().parents[2]
# A scenario that measures something, says so, and then waits for what does not come.
_INTERRUPTED = """
import sys
from pathlib import Path
from bench import progress, report
report.RESULTS = Path(sys.argv[1])
rows = []
with progress.limited(float(sys.argv[2])):
    with progress.partial():
        for number in progress.rounds(2):
            rows.append([number, 1.5])
            print("measured", flush=True)
            sys.stdin.read()
    report.publish("some", {}, ("round", "s"), rows, {"rows": rows})
"""


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
    assert all(4 <= len(query.split()) <= 14 and len(query) <= 120 for query in queries)


def test_ratios_are_paired_by_round() -> None:
    baseline = Row("theirs", seconds=[10.0, 30.0, 10.0])
    row = Row("ours", seconds=[5.0, 10.0, 5.0])
    assert ratios(row, baseline) == {"best": 2.0, "median": 2.0, "least": 2.0, "most": 3.0}


def test_ratios_of_an_unfinished_round_are_those_of_the_rounds_before() -> None:
    assert ratios(Row("ours", seconds=[5.0]), Row("theirs", seconds=[10.0, 30.0]))["median"] == 2.0


def _started(folder: Path, limit_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _INTERRUPTED, str(folder), str(limit_s)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=_ROOT, text=True, **pipes)


@pytest.mark.parametrize(("number", "limit_s"), [(signal.SIGTERM, 600.0), (signal.SIGINT, 600.0), (None, 1.0)])
def test_what_was_measured_before_an_interrupt_or_the_limit_is_written(
    tmp_path: Path, number: signal.Signals | None, limit_s: float
) -> None:
    with _started(tmp_path, limit_s) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "measured\n"
        if number is not None:
            process.send_signal(number)
        process.wait(60)  # its stdin stays open: it ends by the interrupt alone
        _, stderr = process.communicate()

    assert process.returncode == 0, stderr
    (found,) = tmp_path.glob("*.json")
    assert found.name.startswith("partial-some-")
    assert found.stem.endswith(f"-{machine.instruction_set(machine.describe())}")
    document = json.loads(found.read_text())
    assert document["rows"] == [[1, 1.5]]
    reason = "an interrupt" if number is not None else "the limit of 1 s"
    assert reason in document["facts"]["incomplete"]
    assert "round 1 of 2" in stderr


def test_no_round_begins_that_would_not_end_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_limit_s", 0.0)
    monkeypatch.setattr(progress, "_reason", "")

    assert list(progress.rounds(3)) == []
    assert "0 of 3 rounds" in progress.incomplete()


def test_a_part_has_its_first_round_and_leaves_the_rest_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_began": time.monotonic() - 50.0, "_limit_s": 100.0, "_reason": ""}.items():
        monkeypatch.setattr(progress, name, value)

    with progress.until(0.4):
        assert list(progress.rounds(3)) == [1]
    assert "40% of the limit of 100 s, after 1 of 3 rounds" in progress.incomplete()
    assert list(progress.rounds(3)) == [1, 2, 3]


def test_every_scenario_has_a_limit() -> None:
    assert LIMITS_S.keys() == SCENARIOS.keys() - {"card"}


def test_the_guard_names_what_is_below_its_bound_and_counts_the_cheapest_pass() -> None:
    assert guard.below({"a": 1.0, "b": 0.99, "c": 5.0}, {"a": 1.0, "b": 1.0, "c": 1.0, "not here": 2.0}) == ["b"]
    assert all(bound > 0 for bound in guard.bounds_here().values())

    calls: list[str] = []
    spent = guard.cheapest_s({"one": lambda: calls.append("one"), "other": lambda: sum(range(200_000))}, 2)

    assert calls == ["one"] * 3
    assert 0 <= spent["one"] < spent["other"]


def test_curves_are_a_picture_with_every_point_within_it() -> None:
    lines = {"a < b": [(1.0, 2.0), (10.0, 3.0), (1000.0, 40.0)], "flat": [(5.0, 7.0), (50.0, 7.0)]}

    root = ElementTree.fromstring(curves("title", ("calls", "ms"), "bench/results/x.json", lines))

    circles = [element for element in root if element.tag.endswith("circle")]
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert len(circles) == 5
    assert all(0 <= float(each.attrib["cx"]) <= width and 0 <= float(each.attrib["cy"]) <= height for each in circles)


def test_a_table_is_aligned_and_says_nothing_for_what_is_missing() -> None:
    assert markdown_table(("path", "n"), [["a", 1234.0], ["long", None]]) == (
        "| path |     n |\n| ---- | ----: |\n| a    | 1,234 |\n| long |     – |"
    )


def test_another_machines_result_stands_beside_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (html, plots):
        monkeypatch.setattr(module, "RESULTS" if module is html else "_RESULTS", tmp_path)
    sets = {"avx2": ["avx2"], "avx512": ["avx2", "avx512f"], "avx512_bf16": ["avx2", "avx512f", "avx512_bf16"]}
    names = [
        f"some-2026-11-{day}-{name}" for day, name in ((24, "avx2"), (25, "avx2"), (25, "avx512"), (26, "avx512_bf16"))
    ]
    for name in names:
        found = {"machine": {"instruction_sets": sets[name.split("-")[-1]]}}
        (tmp_path / f"{name}.json").write_text(json.dumps(found))

    assert plots.newest("some") == names[3]
    assert html._elsewhere("some") == names[1:3]


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
