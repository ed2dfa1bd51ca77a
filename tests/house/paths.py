"""The files that one real call passes through, counted by tracing every process of a real daemon.

A file counts when, in any process, one of its functions runs in each of four such calls: what runs beside a call, such
as the exchange of counters between daemon and mux, is not in all. What runs in each of four pauses too, such as the
watch over a worker's queue, only counts where it runs more often during the calls. Generated code does not count.
For the start of an instance only the daemon and the fork server count: what runs in the worker is the loading of its
model, and what runs in the mux follows after.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from tests.support.daemon_process import free_ports

_TRACE = Path(__file__).with_name("trace")
_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
_LIMIT_S = 900.0
_QUIET_S = 1.0
_IDLE_S = 12.0  # longer than any interval of what runs beside calls, such as the sweep for strays every 10 s
_IDLE = 1
EMBED, CREATE, EMBEDDINGS = 2, 3, 4
# Enough that nothing periodic runs in each: the exchange of counters every 5 s once fell into three windows in a row.
_ROUNDS = 4
NAMES = {EMBED: "gRPC Embed", CREATE: "POST /instances to running", EMBEDDINGS: "/v1/embeddings"}


def trace(root: Path) -> dict[int, list[str]]:
    """The files on each path, for the checkout at `root`.

    Raises:
        TimeoutError: the daemon or an instance did not come up.
    """
    with tempfile.TemporaryDirectory(prefix="tm") as name:
        folder = Path(name)
        window = folder / "window"
        window.write_bytes(b"\0")
        api, mux, instance, *others = free_ports(3 + _ROUNDS)
        config = folder / "teimgr.toml"
        config.write_text(
            f"api_port = {api}\ngrpc_port = {mux}\nstate_file = '{folder}/state.toml'\n"
            "health_check_interval_secs = 3600\n"
        )
        environ = os.environ | {
            "PYTHONPATH": f"{_TRACE}:{root / 'src'}",
            "TEIMGR_TRACE": str(folder),
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-m", "teimgr", "serve", "-c", str(config)]
        with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as daemon:
            try:
                rest = f"http://127.0.0.1:{api}"
                _until(lambda: _get(f"{rest}/health") is not None)
                _create(rest, "first", instance)
                _embed(mux)
                _embeddings(rest)  # connections, caches and lazy imports are there now
                found: dict[int, list[Counter[str]]] = {number: [] for number in (_IDLE, *NAMES)}
                seconds = dict.fromkeys(found, 0.0)
                for turn, port in enumerate(others):
                    for number, call in (
                        (_IDLE, lambda: time.sleep(_IDLE_S)),
                        (EMBED, lambda: _embed(mux)),
                        (EMBEDDINGS, lambda: _embeddings(rest)),
                        (CREATE, lambda port=port: _create(rest, f"at-{port}", port)),
                    ):
                        opened = number + turn * len(found)
                        with _open(window, opened) as window_s:
                            call()
                        seconds[number] += window_s()
                        found[number].append(_calls(folder, opened, whole=number != CREATE))
                    time.sleep(_QUIET_S * turn / 2)
            finally:
                daemon.terminate()
        idle = found.pop(_IDLE)
        return {number: _files(rounds, idle, seconds[number] / seconds[_IDLE]) for number, rounds in found.items()}


@contextmanager
def _open(window: Path, number: int) -> Iterator[Callable[[], float]]:
    """Gives how long the window has been open, in seconds; after it has closed, how long it was."""
    time.sleep(_QUIET_S)  # what an earlier call left behind is over
    began, ended = time.monotonic(), list[float]()
    with window.open("r+b") as file:
        file.write(bytes([number]))
    yield lambda: (ended or [time.monotonic()])[0] - began
    time.sleep(_QUIET_S)
    ended.append(time.monotonic())
    with window.open("r+b") as file:
        file.write(b"\0")


def _calls(folder: Path, number: int, *, whole: bool) -> Counter[str]:
    """Calls by `file:function` while window `number` was open; `whole`: in the data plane too."""
    found = Counter[str]()
    for path in folder.glob(f"{number}.*"):
        if whole or not _is_of_the_data_plane(path.suffix[1:]):
            found.update(line for line in path.read_text().splitlines() if not line.startswith("pb/"))
    return found


def _files(rounds: list[Counter[str]], idle: list[Counter[str]], times: float) -> list[str]:
    """The files on a path, by the calls in rounds of it and in pauses; the rounds are `times` as long as the pauses."""
    always, without = (set.intersection(*map(set, each)) for each in (rounds, idle))
    calls, pauses = sum(rounds, Counter[str]()), sum(idle, Counter[str]())
    found = {name for name in always if name not in without or calls[name] >= pauses[name] * times + _ROUNDS - 1}
    return sorted({name.partition(":")[0] for name in found})


def _is_of_the_data_plane(pid: str) -> bool:
    """Whether a process is a worker (its name begins with `tei:`) or a mux."""
    process = Path("/proc") / pid
    try:
        name, command = (process.joinpath(file).read_text() for file in ("comm", "cmdline"))
    except FileNotFoundError:  # it has ended, as neither of them does
        return False
    return name.startswith("tei:") or "mux" in command


def _create(rest: str, name: str, port: int) -> None:
    _post(f"{rest}/instances", {"name": name, "model_id": _MODEL, "port": port, "dtype": "float32"})
    _until(
        lambda: (_get(f"{rest}/instances/{name}") or {}).get("status") == "running" if name == "first" else _ready(port)
    )


def _ready(port: int) -> bool:
    return _get(f"http://127.0.0.1:{port}/health") is not None


def _embed(port: int) -> None:
    from teimgr.wire.pb.tei.v1 import tei_pb2
    from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2

    target = mux_pb2.Target(instance_name="first")
    request = mux_pb2.EmbedRequest(target=target, request=tei_pb2.EmbedRequest(inputs="one text"))
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        embed = channel.unary_unary("/tei_multiplexer.v1.TeiMultiplexer/Embed", mux_pb2.EmbedRequest.SerializeToString)
        embed(request, timeout=_LIMIT_S, wait_for_ready=True)


def _embeddings(rest: str) -> None:
    _post(f"{rest}/v1/embeddings", {"model": "first", "input": ["one text"]})


def _post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_LIMIT_S):
        pass


def _get(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as reply:
            body = reply.read()
    except OSError:
        return None
    return json.loads(body) if body else {}


def _until(holds: Any) -> None:
    end = time.monotonic() + _LIMIT_S
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("the daemon or its instance did not come up")
        time.sleep(0.05)
