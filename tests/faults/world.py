"""The system under test of a fault run: one daemon, tiny models, what is wanted of it, and what is right."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import aiohttp
import numpy as np
import psutil
from bench import weights
from numpy.typing import NDArray

from teimgr.client import AsyncClient
from teimgr.control.supervision.store import parse
from teimgr.errors import TeimgrError
from teimgr.spec import InstanceSpec, State
from tests.support.daemon_process import DaemonProcess, toml
from tests.support.models import build

# Two models of one shape and other weights, so that a reply of the wrong model is a wrong vector and not an error.
MODELS = {"red": 0, "blue": 1}
MINILM = "minilm"
"""The real all-MiniLM-L6-v2, and the instance that has it: its recovery is that of a model in use."""
# The float32 of a worker and of sentence-transformers differ by less than 1e-6; the two models by more than a tenth.
MIN_COSINE = 0.9999
TEXTS = 64
# For the fleet, what changes of it take besides, and a few models on demand.
MEMORY_MIB = 480
CALL_LIMIT_S = 10.0
# For processes that end by themselves, such as the nursery of a killed daemon: it may be importing torch.
_LEFT_OVER_S = 60.0
_KEY = "world-" + "k" * 24
_WORDS = (
    "fleet",
    "worker",
    "state",
    "kill",
    "model",
    "vector",
    "batch",
    "token",
    "queue",
    "reply",
    "route",
    "probe",
    "a",
)

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Wanted:
    """What was acknowledged about an instance; `model` is a key of `MODELS`."""

    model: str
    replicas: int = 1
    is_running: bool = True


@dataclass
class World:
    """The daemon and the truth about it.

    `wanted` is the acknowledged state. `allowed` lists the models whose vectors an instance may answer with; more than
    one while a change is under way. `breaches` are broken invariants.
    """

    daemon: DaemonProcess
    folder: Path
    random: random.Random
    texts: Sequence[str]
    references: Mapping[str, Vectors]
    wanted: dict[str, Wanted] = field(default_factory=dict)
    allowed: dict[str, set[str]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    breaches: list[str] = field(default_factory=list)
    ended: dict[int, float | None] = field(default_factory=dict)
    """Workers that were sent a deadly signal, with the times of their starts."""
    patience: float = 1.0
    """A factor of every limit of time, for a machine with other work."""

    @classmethod
    def make(
        cls,
        folder: Path,
        seed: int,
        daemon: DaemonProcess | None = None,
        models: Sequence[str] = (*MODELS, MINILM),
        patience: float = 1.0,
    ) -> Self:
        """Models, references and a started daemon without instances: `daemon`, or one of its own."""
        from sentence_transformers import SentenceTransformer

        chance = random.Random(seed)
        texts = [" ".join(chance.choices(_WORDS, k=chance.randint(1, 40))) for _ in range(TEXTS)]
        references = {}
        for name, seed_of_weights in MODELS.items():
            build("bert", folder / name, seed=seed_of_weights)
        if MINILM in models:
            (folder / MINILM).symlink_to(weights.minilm())
        for name in models:
            model = SentenceTransformer(str(folder / name), device="cpu")
            references[name] = np.asarray(model.encode(texts, normalize_embeddings=True), np.float32)
        daemon = daemon or DaemonProcess(
            orphan_grace_secs=60,
            health_check_interval_secs=1,
            health_probe_timeout_secs=round(patience),
            restart_backoff_max_secs=1,
            startup_timeout_secs=round(60 * patience),
            host_memory_budget_mib=MEMORY_MIB,
            auth=_auth(),
        )
        daemon.listen_limit_s *= patience
        return cls(daemon.start(), folder, chance, texts, references, patience=patience)

    async def populate(self, *, minilm: bool = True) -> None:
        """The instances of the run: `pair` has two replicas, no fault is aimed at `neighbour`; with the real MiniLM."""
        fleet = [("pair", "red", 2), ("single", "blue", 1), ("neighbour", "red", 1)]
        if minilm:
            fleet.append((MINILM, MINILM, 1))
        for name, model, replicas in fleet:
            await self.create(name, model, replicas=replicas)
        await self.converged(180.0 * self.patience)  # the nursery imports torch, on a machine that may be loaded

    def client(self, timeout_s: float = CALL_LIMIT_S) -> AsyncClient:
        return self.daemon.async_client(timeout_s=timeout_s * self.patience, api_key=_KEY)

    def http(self, key: str = _KEY) -> aiohttp.ClientSession:
        """A session whose calls carry the key of the world, or another one."""
        timeout = aiohttp.ClientTimeout(CALL_LIMIT_S * self.patience)
        return aiohttp.ClientSession(timeout=timeout, headers={"authorization": f"Bearer {key}"})

    # Changes that are acknowledged

    async def create(self, name: str, model: str, *, replicas: int = 1, node: str | None = None) -> None:
        """Create an instance with float32 weights; it is wanted once this returns."""
        self.allowed[name] = {model}
        async with self.client(60.0) as client:
            made = await client.create(name, str(self.folder / model), dtype="float32", replicas=replicas, node=node)
        self.ports[name] = made.port
        self.wanted[name] = Wanted(model, replicas)

    async def delete(self, name: str) -> None:
        async with self.client(60.0) as client:
            await client.delete(name)
        del self.wanted[name]

    async def set_running(self, name: str, is_running: bool) -> None:
        async with self.client(60.0) as client:
            await (client.start(name) if is_running else client.stop(name))
        self.wanted[name] = replace(self.wanted[name], is_running=is_running)

    async def switch_model(self, name: str) -> None:
        """Replace the model of an instance by the other one, without a gap, and wait for the end."""
        other = next(model for model in MODELS if model != self.wanted[name].model)
        self.allowed[name].add(other)
        async with self.client(60.0) as client:
            await client.update(name, model_id=str(self.folder / other), wait=True)
        self.wanted[name] = replace(self.wanted[name], model=other)

    async def set_keys(self, **quotas: dict[str, int]) -> None:
        """Have the daemon know these API keys beside that of the world, each its own name and with these quotas."""
        self.daemon.settings["auth"] = _auth(**quotas)
        (self.daemon.folder / "teimgr.toml").write_text(toml(self.daemon.settings))
        async with self.client(60.0) as client:
            await client.reload()

    # Truth

    def check_vectors(self, name: str, rows: Sequence[int], vectors: Any, models: Collection[str]) -> None:
        """Note a breach unless the vectors are those of one of the models."""
        found = np.asarray(vectors, np.float32)
        for model in models:
            reference = self.references[model][list(rows)]
            if found.shape == reference.shape and float((found * reference).sum(axis=1).min()) >= MIN_COSINE:
                return
        nearest = [self._model_of(row, vector) for row, vector in zip(rows, found, strict=False)]
        self.breaches.append(f"{name}: texts {list(rows)}, shape {found.shape}: vectors of {nearest}, not {[*models]}")

    def _model_of(self, row: int, vector: Any) -> str:
        """The model whose vector of the text this is."""
        right = (model for model, known in self.references.items() if float(known[row] @ vector) >= MIN_COSINE)
        return next(right, "none")

    async def converged(self, limit_s: float) -> float:
        """Wait until every instance is as wanted and answers rightly; the result is how long it took.

        Raises:
            AssertionError: `limit_s` passed; the text has what was wrong last.
        """
        began = time.monotonic()
        wrong = "not looked yet"
        while time.monotonic() - began < limit_s:
            try:
                async with self.client(3.0) as client:
                    wrong = await self._difference(client)
            except (TeimgrError, OSError, TimeoutError) as error:
                wrong = repr(error)
            if not wrong:
                return time.monotonic() - began
            await asyncio.sleep(0.02)
        raise AssertionError(f"not converged within {limit_s:g} s: {wrong}")

    async def _difference(self, client: AsyncClient) -> str:
        found = {instance.name: instance for instance in await client.list()}
        if found.keys() != self.wanted.keys():
            return f"instances are {sorted(found)}, wanted {sorted(self.wanted)}"
        for name, wanted in self.wanted.items():
            state = State.RUNNING if wanted.is_running else State.STOPPED
            workers = [
                each
                for each in found[name].details["workers"]
                if each["state"] == state.value and not self._has_ended(each["pid"])
            ]
            if found[name].status is not state or len(workers) != wanted.replicas:
                return f"{name} is {found[name].status.value} with {len(workers)} workers, wanted {wanted}"
            if wanted.is_running:
                self.allowed[name] = {wanted.model}
                for _ in range(wanted.replicas):
                    vector = await client.embed(self.texts[0], instance=name)
                    self.check_vectors(name, [0], vector, {wanted.model})
        return ""

    def saved(self) -> Sequence[InstanceSpec]:
        """The instances in the state file."""
        return parse((self.daemon.folder / "state.toml").read_bytes()).specs

    def check_state_file(self) -> None:
        """Note a breach unless the state file has what was acknowledged."""
        saved = {
            spec.name: (Path(spec.model_id).name, int(spec.replicas), spec.wanted_running) for spec in self.saved()
        }
        wanted = {name: (each.model, each.replicas, each.is_running) for name, each in self.wanted.items()}
        if saved != wanted:
            self.breaches.append(f"state file has {saved}, acknowledged was {wanted}")

    async def check_left_over(self) -> None:
        """Note a breach unless the daemon's processes are the workers wanted, a mux, a nursery and its standby."""
        workers = sum(each.replicas for each in self.wanted.values() if each.is_running)
        end = time.monotonic() + _LEFT_OVER_S * self.patience
        while len(found := await asyncio.to_thread(self._processes)) != workers + 3:
            if time.monotonic() > end:
                self.breaches.append(f"{found}, wanted {workers} workers, a mux, a nursery and its standby")
                return
            await asyncio.sleep(0.2)

    def _processes(self) -> list[str]:
        found = []
        for process in self.daemon.processes():
            with suppress(psutil.Error):
                age_s = time.time() - process.create_time()
                found.append(f"{process.pid} {' '.join(process.cmdline())[-40:]} of {age_s:.0f} s")
        return found

    # Processes

    def end(self, pid: int) -> None:
        """Note that a fault ends this process, which no longer counts as a worker."""
        self.ended[pid] = _started_at(pid)

    def _has_ended(self, pid: int | None) -> bool:
        """Whether a fault ended this process, and not an earlier one of the same pid."""
        return pid in self.ended and _started_at(pid) in (None, self.ended[pid])

    async def worker_pids(self, name: str) -> list[int]:
        """The pids of the instance's workers."""
        async with self.client() as client:
            return [worker["pid"] for worker in (await client.get(name)).details["workers"] if worker["pid"]]

    def process(self, word: str) -> psutil.Process | None:
        """The daemon's process with this word in its name or on its command line."""
        for process in self.daemon.processes():
            try:
                if word == process.name() or any(word in part for part in process.cmdline()):
                    return process
            except psutil.Error:
                continue
        return None


def _auth(**quotas: dict[str, int]) -> dict[str, Any]:
    keys: list[dict[str, Any]] = [{"name": "world", "key": _KEY, "rights": ["admin", "inference", "read"]}]
    keys += [{"name": name, "key": name, "rights": ["inference"], **more} for name, more in quotas.items()]
    return {"enabled": True, "providers": ["api_keys"], "api_keys": keys}


def _started_at(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return None
