"""Encoders in long-lived child processes, one pass each in turn, so that every round meets the same machine."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np

from bench import progress
from bench.encoders import Task
from bench.load import LoadTask
from bench.machine import busy_s
from bench.progress import partial, say
from bench.steady import SteadyTask

_ROOT = Path(__file__).resolve().parent.parent
_END_S = 30.0  # of a child that was told to end
_LATE_END_S = 1.0  # once the limit has passed: a dozen may be in their pass
_MODULES = {Task: "bench.child", LoadTask: "bench.load", SteadyTask: "bench.steady"}


class ChildFailed(RuntimeError):
    """A child could not load its encoder, or ended."""


class Child:
    """A process that is sent commands and answers them; of an encoder, `dtype` is what it computes in, and `note` what
    it says of itself."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._unread = 1
        loaded = self._answer()
        self.dtype: str = loaded.get("dtype", "")
        self.note: str = loaded.get("note", "")

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, verb: str, argument: Any = None) -> dict[str, Any]:
        """Send a command and wait for its answer, after that of one that an interrupt left without a reader.

        Raises:
            ChildFailed: it failed; its own words are in the message.
        """
        while self._unread:
            self._answer()
        self._unread += 1
        _pipe(self._process.stdin).write(json.dumps({verb: argument}) + "\n")
        _pipe(self._process.stdin).flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = _pipe(self._process.stdout).readline()
        self._unread -= 1
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise ChildFailed(answer["error"])
        return answer


@contextmanager
def child(task: Task | LoadTask | SteadyTask, checkout: Path | None = None) -> Iterator[Child]:
    """A child that has loaded its encoder, a load generator or a steady caller; it is gone when the block ends. With
    another `checkout` its teimgr, so its client, is that one's.

    Raises:
        ChildFailed: it could not load.
    """
    command = [sys.executable, "-m", _MODULES[type(task)], json.dumps(asdict(task))]
    environ = os.environ | ({} if checkout is None else {"PYTHONPATH": str(checkout / "src")})
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=_ROOT,
        env=environ,
        start_new_session=True,  # an interrupt from the terminal is for this process, which ends the child
    ) as process:
        try:
            yield Child(process)
        finally:
            with suppress(BrokenPipeError):
                _pipe(process.stdin).close()
            try:
                process.wait(_LATE_END_S if progress.limit_passed() else _END_S)
            except subprocess.TimeoutExpired:
                process.kill()
            except BaseException:  # an interrupt: a child left in its pass would run beside what is measured next
                process.kill()
                raise


@dataclass
class Row:
    """One entrant's results. `foreign_cores` is what others used of the machine during each pass.

    Cosines are those of vectors, differences the absolute ones of scores; `scores` are the lowest and the highest.
    """

    name: str
    dtype: str = ""
    seconds: list[float] = field(default_factory=list)
    foreign_cores: list[float] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)
    cosine_min: float = 1.0
    cosine_mean: float = 1.0
    difference_mean: float = 0.0
    difference_max: float = 0.0
    scores: tuple[float, float] = (0.0, 0.0)

    def compare(self, results: Any, reference: Any) -> None:
        """Results of all inputs against the reference's: scores by their differences, vectors by their cosines."""
        if reference.shape[1] == 1:
            differences = np.abs(results - reference)
            self.scores = float(results.min()), float(results.max())
            self.difference_mean, self.difference_max = float(differences.mean()), float(differences.max())
            return
        norms = np.linalg.norm(results, axis=1) * np.linalg.norm(reference, axis=1)
        cosines = (results * reference).sum(axis=1) / norms
        self.cosine_min, self.cosine_mean = float(cosines.min()), float(cosines.mean())

    @property
    def best_s(self) -> float:
        """The fastest pass."""
        return min(self.seconds)

    @property
    def median_s(self) -> float:
        """The middle pass."""
        return statistics.median(self.seconds)


@contextmanager
def entrants(
    tasks: dict[str, Task], skip_failing: bool = False, checkouts: Mapping[str, Path] = MappingProxyType({})
) -> Iterator[dict[str, Child]]:
    """A child for every task, loaded, by its name; with `skip_failing` without those that could not load, but for the
    first, which the others are compared with. Those named in `checkouts` take teimgr from there.

    Raises:
        ChildFailed: one could not load.
    """
    with ExitStack() as stack:
        children: dict[str, Child] = {}
        for name, task in tasks.items():
            say(f"loading {name}")
            try:
                children[name] = stack.enter_context(child(task, checkouts.get(name)))
            except ChildFailed as error:
                if not (skip_failing and children):
                    raise
                say(f"LEFT OUT, {name}: {error}")
        yield children


def compete(children: dict[str, Child], texts: Sequence[str], rounds: int, own_cpu: dict[str, Any]) -> list[Row]:
    """`rounds` times one pass of each in turn; cosines and differences are to the results of the first one.

    `own_cpu` maps a name to a function that gives the CPU seconds of its further processes (a server's), so
    that they do not count as foreign. An interrupt ends the rounds, where the first is complete.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts.json").write_text(json.dumps(list(texts)))
        rows = {name: Row(name, entrant.dtype) for name, entrant in children.items()}
        with partial():
            for entrant in children.values():
                entrant.ask("texts", str(folder / "texts.json"))
            for number in progress.rounds(rounds):
                for name, entrant in children.items():
                    # Results are kept once, outside the measured time.
                    file = folder / f"{list(children).index(name)}.npy" if number == 1 else None
                    _one_pass(entrant, rows[name], own_cpu.get(name, lambda: 0.0), file)
                    say(f"  {name}: {rows[name].seconds[-1]:.2f} s")
        if not all(row.seconds for row in rows.values()):
            raise KeyboardInterrupt
        for name, entrant in children.items():
            rows[name].memory = entrant.ask("memory")
        reference = np.load(folder / "0.npy")
        for number, row in enumerate(rows.values()):
            row.compare(np.load(folder / f"{number}.npy"), reference)
        return list(rows.values())


def _one_pass(entrant: Child, row: Row, further_cpu_s: Any, keep: Path | None) -> None:
    began_busy, began_own = busy_s(), further_cpu_s()
    answer = entrant.ask("pass", None if keep is None else str(keep))
    foreign_s = busy_s() - began_busy - (further_cpu_s() - began_own) - answer["cpu_seconds"]
    row.seconds.append(answer["seconds"])
    row.foreign_cores.append(max(0.0, foreign_s / answer["seconds"]))


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise ChildFailed("no pipe to the process")
    return stream
