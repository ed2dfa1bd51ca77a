"""A scripted stand-in for a worker: it implements the frames of supervision, loads no model, and fails on request.

Its model id is `fake` or, as an id of the hub has to look, `fake/flag.flag_value…` (`fake_id`); the flags are the names
of `_FLAGS`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from teimgr.control.launch.process_handle import WorkerPaths
from teimgr.errors import Code, Internal, Unavailable
from teimgr.observability.memory import resident_bytes
from teimgr.spec import LoadedModel, WorkerSpec
from teimgr.wire.frames import Flag, FrameProtocol, FrameType, Header, Method, Received, Timings, pack_error

_FLAGS = {
    "first-only": "the other flags hold for the first worker of this instance alone",
    "slow-successor": "the workers of this instance after the first say ready after so many seconds",
    "exit-at-once": "exit with this status before anything else",
    "raise": "end with an exception",
    "never-ready": "stay in `loading`",
    "kind": "the kind of its model, embedding by default",
    "slow-start": "say ready after so many seconds",
    "fail-permanent": "say failed, permanent, with this code; exit 3",
    "fail-transient": "say failed, not permanent, with this code; exit 4",
    "crash-after-ready": "exit with this status right after saying ready",
    "ignore-term": "neither SIGTERM nor DRAIN ends it",
    "hang-probe": "never answer a PROBE",
    "fail-probe": "answer each PROBE with an error",
    "fail-probes": "answer so many PROBEs with an error, then well",
    "hang-probes": "never answer so many PROBEs, then well",
    "hang-embed": "never answer an EMBED",
    "compute-embed": "hold the event loop and a processor for so many seconds at an EMBED, then answer",
    "deadlock-embed": "hold the event loop without a processor for good at an EMBED",
    "busy": "count a batch at every PROBE and STATS",
    "alarm": "have its watchdog say this word in every answer to PROBE",
    "drain-itself": "say draining after saying ready, then exit 0",
    "deaf": "accept no connection, answer nothing",
    "exit-when-alone": "exit when the last watcher goes",
    "grow": "have so many MiB of memory from the first PROBE on",
    "large": "have so many MiB of memory from the start",
    "grandchild": "start a child of its own that sleeps; its pid goes to <run_dir>/grandchild",
}


def fake_id(flags: str) -> str:
    """The model id of a fake worker with flags in the form `flag,flag=value`."""
    return f"fake/{flags.replace(',', '.').replace('=', '_')}" if flags else "fake"


def main(listener_fd: int, incarnation: str, run_dir: str, spec_json: str, ports: str) -> int:
    """The entry the nursery runs."""
    spec = WorkerSpec.from_json(spec_json)
    flags = _flags(spec, Path(run_dir))
    print(f"worker {incarnation} of {spec.name}: {sorted(flags)}")
    if "exit-at-once" in flags:
        print("leaving at once", file=sys.stderr)
        return int(flags["exit-at-once"])
    if "raise" in flags:
        raise RuntimeError("asked to raise")
    if "grandchild" in flags:
        _have_grandchild(Path(run_dir))
    worker = FakeWorker(spec, flags, WorkerPaths(Path(run_dir), incarnation))
    return asyncio.run(worker.run(socket.socket(fileno=listener_fd)))


def _flags(spec: WorkerSpec, run_dir: Path) -> dict[str, str]:
    words = spec.model_id.rpartition("fake")[2].lstrip("/").split(".")
    flags = dict(word.partition("_")[::2] for word in words if word)
    if unknown := flags.keys() - _FLAGS:
        raise ValueError(f"unknown flags {unknown}")
    if not flags.keys().isdisjoint({"first-only", "slow-successor"}):
        seen = run_dir / f"{spec.name}.seen"
        if seen.exists():
            return {"slow-start": flags["slow-successor"]} if "slow-successor" in flags else {}
        seen.touch()
    return flags


def _have_grandchild(run_dir: Path) -> None:
    child = subprocess.Popen(["sleep", "600"])
    (run_dir / "grandchild").write_text(str(child.pid))


class FakeWorker:
    """State, links, and the clock that ends an orphan."""

    def __init__(self, spec: WorkerSpec, flags: dict[str, str], paths: WorkerPaths) -> None:
        self.spec = spec
        self.flags = flags
        self.paths = paths
        self.links: set[Link] = set()
        self.watchers: set[Link] = set()
        self.status: dict[str, object] = {
            "state": "loading",
            "pid": os.getpid(),
            "incarnation": paths.incarnation,
            "spec_hash": spec.hash,
            "model": None,
            "reason": None,
            "code": None,
            "permanent": False,
            "threads": spec.threads,
        }
        self.memory = b"x" * (int(flags.get("large", 0)) << 20)
        self.batches = 0
        self.probes = 0

    async def run(self, listener: socket.socket) -> int:
        self.loop = asyncio.get_running_loop()
        self.end: asyncio.Future[int] = self.loop.create_future()
        self.loop.add_signal_handler(signal.SIGTERM, self.drain)
        self.no_watcher_since = time.monotonic()
        if "deaf" not in self.flags:
            await self.loop.create_unix_server(lambda: Link(self), sock=listener)
        begin = float(self.flags.get("slow-start") or 0)
        self.loop.call_later(begin, self.started)
        self.check_orphan()
        status = await self.end
        for link in self.links:
            link.close()
        if status == 0:
            self.paths.run_file.unlink(missing_ok=True)
        return status

    def started(self) -> None:
        for flag, permanent in (("fail-permanent", True), ("fail-transient", False)):
            if flag in self.flags:
                return self.fail(int(self.flags[flag] or Code.MODEL_LOAD_FAILED), permanent)
        if "never-ready" in self.flags:
            return None
        self.say(state="ready", model=self.model())
        self.perhaps_drain()
        if "crash-after-ready" in self.flags:
            self.leave(int(self.flags["crash-after-ready"]))
        return None

    def model(self) -> dict[str, object]:
        return LoadedModel(
            model_id=self.spec.model_id,
            model_sha=None,
            dtype="float32",
            device="cpu",
            kind=self.flags.get("kind", "embedding"),
            pooling="mean",
            dimension=4,
            max_input_length=16,
            max_batch_tokens=self.spec.max_batch_tokens,
            batching="packed",
        ).to_dict()

    def fail(self, code: int, permanent: bool) -> None:
        self.say(state="failed", code=code, permanent=permanent, reason="scripted failure")
        self.paths.exit_report.write_text(json.dumps(self.status))
        self.leave(3 if permanent else 4)

    def say(self, **change: object) -> None:
        self.status |= change
        for watcher in self.watchers:
            watcher.tell(self.status)

    def drain(self) -> None:
        if "ignore-term" not in self.flags:
            self.say(state="draining")
            self.leave(0)

    def perhaps_drain(self) -> None:
        if "drain-itself" in self.flags and self.watchers and self.status["state"] == "ready":
            self.drain()

    def leave(self, status: int) -> None:
        if not self.end.done():
            self.loop.call_soon(lambda: self.end.done() or self.end.set_result(status))

    def check_orphan(self) -> None:
        now = time.monotonic()
        if self.watchers:
            self.no_watcher_since = now
        elif now - self.no_watcher_since > self.spec.orphan_grace_s:
            return self.leave(0)
        # A hundredth of the time that counts: a thousand of these share a few cores.
        self.loop.call_later(max(0.2, self.spec.orphan_grace_s / 100), self.check_orphan)
        return None

    def counted(self) -> bytes:
        """Its counters, as in answers to PROBE and STATS."""
        self.batches += "busy" in self.flags
        answer = {"batches": self.batches, "resident_bytes": resident_bytes(), "alarm": self.flags.get("alarm")}
        answer |= {"calls": 0, "requests": 0}
        return json.dumps(answer).encode()


class Link(FrameProtocol):
    """One connection to the fake."""

    def __init__(self, worker: FakeWorker) -> None:
        super().__init__(1 << 20)
        self.worker = worker
        worker.links.add(self)

    def tell(self, status: dict[str, object]) -> None:
        self.send(FrameType.REPLY, Method.WATCH, self.watch_id, json.dumps(status).encode())

    def frame_received(self, header: Header, payload: Received) -> None:
        worker = self.worker
        if header.method == Method.WATCH:
            self.watch_id = header.id
            worker.watchers.add(self)
            self.tell(worker.status)
            worker.perhaps_drain()
        elif header.method == Method.PROBE:
            if "grow" in worker.flags and not worker.memory:
                worker.memory = b"x" * (int(worker.flags["grow"]) << 20)
            counted = worker.counted()
            if payload and "busy" in worker.flags:
                self.answer(header, counted)
            else:
                self.probe(header, counted if payload else b"")
        elif header.method == Method.STATS:
            self.answer(header, worker.counted())
        elif header.method == Method.EMBED and "hang-embed" in worker.flags:
            pass
        elif header.method == Method.EMBED and "deadlock-embed" in worker.flags:
            threading.Event().wait()
        elif header.method == Method.EMBED:
            until = time.monotonic() + float(worker.flags.get("compute-embed", 0))
            while time.monotonic() < until:
                pass
            answered = Timings(chars=3, tokens=2, total_ns=1, tokenization_ns=1, queue_ns=1, inference_ns=1).pack()
            self.send(FrameType.REPLY, header.method, header.id, answered, flags=Flag.TIMINGS)
        elif header.method == Method.THREADS:
            worker.say(threads=json.loads(payload)["threads"])
            self.answer(header)
        elif header.method == Method.DRAIN:
            self.answer(header)
            worker.drain()
        else:
            self.send(FrameType.ERROR, header.method, header.id, pack_error(Internal("not scripted")))

    def probe(self, header: Header, counted: bytes) -> None:
        flags = self.worker.flags
        self.worker.probes += 1
        if "hang-probe" in flags or self.worker.probes <= int(flags.get("hang-probes", 0)):
            return
        if "fail-probe" in flags or self.worker.probes <= int(flags.get("fail-probes", 0)):
            error = Unavailable("the engine does not answer")
            self.send(FrameType.ERROR, header.method, header.id, pack_error(error))
            return
        self.answer(header, counted)

    def answer(self, header: Header, payload: bytes = b"") -> None:
        self.send(FrameType.REPLY, header.method, header.id, payload)

    def link_lost(self, error: Exception | None) -> None:
        self.worker.links.discard(self)
        self.worker.watchers.discard(self)
        if "exit-when-alone" in self.worker.flags and not self.worker.watchers:
            self.worker.leave(0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
