"""Which assignments count as from outside, by a small tree of modules; and the limits of the ratchet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.assignments import assignments_from_outside
from tests.house.figures import modules
from tests.house.ratchet import risen

JOB = """
from dataclasses import dataclass

@dataclass
class Job:
    left: int = 0
    data: int = 0

    def finish(self) -> None:
        self.left = 0

def begin(job: Job) -> None:
    job.left = 1
"""
OTHER = """
class Table:
    data: int = 0
"""
OUTSIDE = {
    "by the type of a parameter": "def take(job: Job) -> None:\n    job.left -= 1",
    "by a constructor": "def take():\n    job = Job()\n    job.left = 1",
    "by an attribute of self": (
        "class Owner:\n    def __init__(self, job: Job) -> None:\n        self.job = job\n\n"
        "    def take(self) -> None:\n        self.job.left = 1"
    ),
    "by the items of a list": "def take(jobs: list[Job]) -> None:\n    for job in tuple(jobs):\n        job.left = 1",
    "by the name of the attribute": "def take(job) -> None:\n    job.left = 1",
}
INSIDE = {
    "a method call": "def take(job: Job) -> None:\n    job.finish()",
    "an object of a library": "from threading import Event\n\ndef take(event: Event) -> None:\n    event.left = 1",
    "a name that two modules declare": "def take(weight) -> None:\n    weight.data = 1",
    "its own class": "class Own:\n    def __init__(self) -> None:\n        self.left = 1",
}


def found(root: Path, text: str) -> list[str]:
    package = root / "src" / "teimgr"
    package.mkdir(parents=True)
    for name, content in {"job": JOB, "other": OTHER, "user": f"from teimgr.job import Job\n\n{text}\n"}.items():
        (package / f"{name}.py").write_text(content)
    return assignments_from_outside(modules(root))


@pytest.mark.parametrize("text", OUTSIDE.values(), ids=OUTSIDE)
def test_an_assignment_to_an_object_of_another_module_is_from_outside(tmp_path: Path, text: str) -> None:
    assert [each.rpartition(": ")[2].rpartition(".")[2] for each in found(tmp_path, text)] == ["left"]


@pytest.mark.parametrize("text", INSIDE.values(), ids=INSIDE)
def test_no_other_assignment_counts(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, text) == []


def test_a_figure_above_its_limit_or_without_one_is_named() -> None:
    assert risen({"lines": 5, "modules": 3, "new": 1}, {"lines": 5, "modules": 2}) == [
        "modules: 3, at most 2 allowed (limits.json)",
        "new: 1, at most 0 allowed (limits.json)",
    ]
