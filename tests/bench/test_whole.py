"""`bench all`: what it runs with which options, and what its record says."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from bench import SCENARIOS, machine, provenance, whole
from tests.support.polling import until

_ROOT = Path(__file__).resolve().parents[2]


def _options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    whole.arguments(parser)
    return parser.parse_args(given)


def test_paths_are_passed_on_to_the_scenarios_that_take_them() -> None:
    plan = whole.planned(_options("--against", "/o", "--infinity", "/i", "--infinity-arguments=--engine torch"))

    assert plan.steps["front"] == ["--against", "/o"]
    assert plan.steps["servers"] == ["--infinity", "/i", "--infinity-arguments=--engine torch"]
    assert plan.steps["engine"] == []
    assert plan.steps["fidelity"][:4] == ["--dtype", "float32", "bfloat16", "int8"]
    assert list(plan.steps)[-1] == "html"
    assert {"peers", "peers-base", "peers-large", "peers-qwen3"} <= plan.steps.keys()


def test_what_was_not_given_is_left_out_with_the_reason() -> None:
    plan = whole.planned(_options("--skip", "guard"))

    assert "--vllm" in plan.skipped["servers"]
    assert "--skip" in plan.skipped["guard"]
    assert plan.steps["front"] == []
    assert plan.steps.keys() | plan.skipped.keys() == whole.STEPS.keys()


def test_a_scenario_that_this_checkout_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "SCENARIOS", {name: "" for name in SCENARIOS if name != "mux"})

    assert "mux" in whole.planned(_options()).skipped


def test_every_step_takes_the_options_that_it_is_given() -> None:
    """The scenarios' own parsers read the options of the plan."""
    plan = whole.planned(_options("--against", "/o", *(f"--{each}=/p" for each in ("infinity", "tei", "vllm"))))
    for name in ("front", "servers", "fidelity", "peers-large", "peers-splade"):
        scenario = __import__(f"bench.{whole.STEPS[name].scenario}", fromlist=["arguments"])
        parser = argparse.ArgumentParser(exit_on_error=False)
        scenario.arguments(parser)
        parser.add_argument("--limit", type=float)
        parser.parse_args(plan.steps[name])


def test_the_record_has_no_path_of_this_machine() -> None:
    given = ["--against", "/o", "--skip", "guard", "--tei=/t", "--tei-arguments=--x /y", "--infinity", "/i"]

    assert whole.names_of(given) == ["--against", "--skip", "guard", "--tei", "--tei-arguments", "--infinity"]


_RUN = """
import sys
from pathlib import Path
from bench import report, whole, html
whole.RESULTS = Path(sys.argv[1])
whole.STEPS = {"html": whole.Step("html", ("--help",)), "engine": whole.Step("engine", ("--no-such-option",))}
parser = __import__("argparse").ArgumentParser()
whole.arguments(parser)
sys.exit(whole.run(parser.parse_args([]), []))
"""


def test_a_scenario_that_fails_stops_no_other_and_the_record_has_the_commit_it_began_at(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _RUN, str(tmp_path)], cwd=_ROOT, capture_output=True, text=True)

    assert done.returncode == 2, done.stderr
    (file,) = tmp_path.glob("all-*.json")
    record = json.loads(file.read_text())
    assert record["statuses"] == {"html": 0, "engine": 2}
    assert record["began_at"] == machine.revision()
    assert "Ended with an error: engine" in provenance.whole_run(record)


def test_what_a_scenario_started_ends_with_it_beyond_its_limit(tmp_path: Path) -> None:
    """A daemon has a session of its own: left behind, it would run beside the next scenario."""
    started = tmp_path / "pid"
    command = ["sh", "-c", f"setsid sleep 300 & echo $! > {started}; wait"]

    assert whole._in_own_process(command, os.environ, 5.0, []) == 1

    pid = int(started.read_text())
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_result_names_the_commit_that_the_whole_run_began_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(machine.START, raising=False)
    assert "run_began_at" not in machine.describe()

    monkeypatch.setitem(os.environ, machine.START, "1234567")
    assert machine.describe()["run_began_at"] == "1234567"


def test_results_of_a_run_do_not_make_its_checkout_dirty(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    result, source = tmp_path / "bench" / "results" / "a.json", tmp_path / "source.py"
    result.parent.mkdir(parents=True)
    for file in (result, source):
        file.write_text("one")
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    clean = machine.revision(tmp_path)
    assert clean
    assert not clean.endswith("-dirty")

    result.write_text("two")
    assert machine.revision(tmp_path) == clean
    source.write_text("two")
    assert machine.revision(tmp_path) == f"{clean}-dirty"
