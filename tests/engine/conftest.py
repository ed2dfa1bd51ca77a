"""Engines on tiny models, each loaded once per session and shared by the tests that only send requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from bench import weights
from tests.support.card import card
from tests.support.models import build

from teimgr.engine.engine import Engine, EngineOptions
from teimgr.engine.job import InferOptions, Input, Job, Lane
from teimgr.engine.text.tokenizer import TextTokenizer
from teimgr.models.reading import read_layout

__all__ = ["card"]

WAIT_S = 60.0


class Served:
    """An engine and the jobs it delivered."""

    def __init__(self, path: Path, **options: Any) -> None:
        defaults: dict[str, Any] = {"model_id": path.name, "dtype": "float32", "threads": 2}
        self.path = path
        self._arrived = threading.Condition()
        self._delivered: set[Job] = set()
        self.delivered_by: dict[Job, int] = {}  # the threads
        self.engine = Engine.load(EngineOptions(path=path, **(defaults | options)), self._take)

    def send(
        self, texts: Sequence[Input], lane: Lane = Lane.INTERACTIVE, deadline: float | None = None, **options: Any
    ) -> Job:
        job = Job(texts, InferOptions(**options), lane, deadline)
        self.engine.submit(job)
        return job

    def send_together(self, texts: Sequence[Input], deadline: float | None = None) -> list[Job]:
        """A job for each text, put together as an event loop does."""
        jobs = [Job([text], InferOptions(), Lane.INTERACTIVE, deadline) for text in texts]
        for job in jobs:
            self.engine.submit(job, starts=False)
        self.engine.start()
        return jobs

    def wait(self, job: Job) -> Job:
        with self._arrived:
            assert self._arrived.wait_for(lambda: job in self._delivered, WAIT_S), "the job was never delivered"
        return job

    def was_delivered(self, job: Job) -> bool:
        with self._arrived:
            return job in self._delivered

    def forget(self) -> None:
        """Drop the jobs that were delivered."""
        with self._arrived:
            self._delivered.clear()
            self.delivered_by.clear()

    def embed(self, texts: Sequence[Input], lane: Lane = Lane.BULK, **options: Any) -> Job:
        return self.wait(self.send(texts, lane, **options))

    def _take(self, jobs: list[Job]) -> None:
        with self._arrived:
            self._delivered.update(jobs)
            self.delivered_by |= dict.fromkeys(jobs, threading.get_ident())
            self._arrived.notify_all()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Directories of tiny models, one per family and variant."""
    made: dict[str, Path] = {}

    def make(family: str, **variant: Any) -> Path:
        key = f"{family} {sorted(variant.items())}"
        if key not in made:
            made[key] = build(family, tmp_path_factory.mktemp(family), **variant)
        return made[key]

    return make


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The real all-MiniLM-L6-v2."""
    return weights.minilm()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Start engines that end with the test."""
    with ExitStack() as stack:

        def start(path: Path, **options: Any) -> Served:
            served = Served(path, **options)
            stack.callback(served.engine.close, 1.0)
            return served

        yield start


@pytest.fixture
def tokenizer(minilm: Path) -> TextTokenizer:
    return TextTokenizer(read_layout(minilm), 256)
