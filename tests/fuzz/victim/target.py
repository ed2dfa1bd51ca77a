"""The daemon that is attacked: keys of two teams, small instances of both, one that they share, and its condition."""

from __future__ import annotations

import base64
import json
import re
import ssl
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from bench.monster_inputs import mux_messages
from bench.steady import SteadyCall, SteadyTask

from teimgr.client import Client
from teimgr.client.server_address import Tls
from tests.support import models
from tests.support.credentials import Authority
from tests.support.daemon_process import DaemonProcess, free_ports
from tests.support.measures import resident_mib

STARTING_LIMIT_S = 240.0
SHARED, READER, RANKER, OTHER = "shared", "a-reader", "a-ranker", "b-static"
FLEET: Mapping[str, Callable[[Path], Path]] = {
    SHARED: lambda folder: models.build("bert", folder),
    READER: lambda folder: models.build("xlm_roberta", folder),
    RANKER: lambda folder: models.build_cross_encoder("roberta", folder),
    OTHER: models.build_static,
}
"""The attacker's team has `a-*` and the second client's `b-*`; both use the first."""

OWN_PREFIX = "a-own-"
"""Of the instances that attacks create."""

OPERATOR, ATTACKER, OWNER, SECOND = ("operator", "attacker", "owner", "second")
KEYS = {name: f"{name}-{'k' * 32}" for name in (OPERATOR, ATTACKER, OWNER, SECOND)}
_RIGHTS = {
    OPERATOR: {"rights": ["admin", "inference", "read"]},
    ATTACKER: {"rights": ["inference", "read"], "instances": ["a-*", SHARED]},
    OWNER: {"rights": ["admin", "inference", "read"], "instances": ["a-*"]},
    SECOND: {"rights": ["inference", "read"], "instances": ["b-*", SHARED]},
}
_MISSED = re.compile(r"(te\w+_health_check_failures_total|te\w+_instance_restarts_total)(\{[^}]*\})? (\d+)")
# What the log says of harm; a refusal is no harm.
_SHOWN_CHARS = 3000  # of a line in a report
_TRACES = ("Traceback (most recent call last)", "probe failed", "mux is late", "crashed", "event loop held")


class Target:
    """A running daemon under attack. `trust` is for clients of a daemon with TLS, else None."""

    def __init__(self, daemon: DaemonProcess, models_folder: Path, authority: Path | None) -> None:
        self.daemon = daemon
        self.models = models_folder
        self.ca = str(authority or "")
        self.trust = ssl.create_default_context(cafile=authority) if authority else None
        with self.client() as client:
            self.ports = {name: client.get(name).port for name in FLEET}
        self.first_workers = self.workers()
        self._read: dict[Path, int] = {}
        self.new_traces()

    def client(self, key: str = OPERATOR) -> Client:
        """A client with one of `KEYS`."""
        scheme, tls = ("https", Tls(ca=self.ca)) if self.ca else ("http", None)
        api, grpc = (f"{scheme}://127.0.0.1:{port}" for port in (self.daemon.api_port, self.daemon.grpc_port))
        return Client(api, grpc, tls=tls, api_key=KEYS[key])

    def second_client(self, rate: float) -> SteadyTask:
        """The small calls of the second client, `rate` a second of each kind."""
        key, tls = KEYS[SECOND], self.trust is not None
        api, mux = {"port": self.daemon.api_port, "tls": tls}, {"port": self.daemon.grpc_port, "tls": tls}
        calls = [
            SteadyCall(f"mux Embed of {name}", "grpc", path=path, body=_packed(message), key=key, rate=rate, **mux)
            for name in (SHARED, OTHER)
            for path, message in [mux_messages(name, "rain on the harbour")["Embed"]]
        ]
        embeddings = json.dumps({"model": SHARED, "input": "rain on the harbour"}).encode()
        calls += [
            SteadyCall(
                "/v1/embeddings", "http", path="/v1/embeddings", body=_packed(embeddings), key=key, rate=rate, **api
            ),
            SteadyCall("/health", "http", path="/health", fresh=True, rate=rate, **api),
            SteadyCall("/embed", "http", self.ports[SHARED], "/embed", _packed(b'{"inputs": "rain"}'), rate),
            SteadyCall("/health of the port", "http", self.ports[SHARED], "/health", "", rate, fresh=True),
        ]
        return SteadyTask(calls, limit_s=60.0, ca=self.ca)

    def lives(self) -> dict[str, tuple[int, ...]]:
        """Process ids of everything that must live on, and of each worker how often it was restarted."""
        assert self.daemon.process is not None
        daemon = psutil.Process(self.daemon.process.pid)
        muxes = sorted(each.pid for each in daemon.children() if "teimgr.mux.process" in each.cmdline())
        found: dict[str, tuple[int, ...]] = {"daemon": (daemon.pid,), "mux": tuple(muxes)}
        with self.client() as client:
            for name in FLEET:
                instance = client.get(name)
                found[name] = (instance.pid or 0, instance.restarts)
        return found

    def missed(self) -> dict[str, int]:
        """Counters of failed probes and of restarts, as /metrics has them."""
        scheme = "https" if self.ca else "http"
        url = f"{scheme}://127.0.0.1:{self.daemon.api_port}/metrics"
        request = urllib.request.Request(url, headers={"authorization": f"Bearer {KEYS[OPERATOR]}"})
        with urllib.request.urlopen(request, timeout=60, context=self.trust) as reply:
            text = reply.read().decode()
        return {f"{name}{labels or ''}": int(count) for name, labels, count in _MISSED.findall(text)}

    def await_healthy(self) -> None:
        """Return when every instance of the fleet runs."""
        with self.client() as client:
            for name in FLEET:
                client.wait_until_running(name, deadline_s=STARTING_LIMIT_S)
        self.daemon.await_grpc()

    def workers(self) -> list[int]:
        """Process ids of all workers that live, wanted or not."""
        return sorted(int(name.split()[1]) for name in self.memory() if name.startswith("worker"))

    def memory(self) -> dict[str, float]:
        """Resident memory of each process in MiB."""
        assert self.daemon.process is not None
        return resident_mib([psutil.Process(self.daemon.process.pid), *self.daemon.processes()])

    def new_traces(self) -> list[str]:
        """Lines that tell of harm in the logs, since the last time."""
        found = []
        for path in [self.daemon.folder / "daemon.log", *sorted((self.daemon.folder / "logs").glob("*.log"))]:
            begin = self._read.get(path, 0)
            if path.stat().st_size < begin:  # rotated
                begin = 0
            with path.open("rb") as file:
                file.seek(begin)
                data = file.read()
            self._read[path] = begin + len(data)
            text = data.decode(errors="replace")
            found += [f"{path.name}: {_shortened(line)}" for line in text.splitlines() if _tells_of_harm(line)]
        return found


def _shortened(line: str) -> str:
    """Its begin and its end: a stack is told at the end of a line."""
    return line if len(line) <= _SHOWN_CHARS else f"{line[: _SHOWN_CHARS // 3]} … {line[-2 * _SHOWN_CHARS // 3 :]}"


def _tells_of_harm(line: str) -> bool:
    """That a model with broken files fails is right; a traceback is not."""
    own = f'"instance": "{OWN_PREFIX}' in line
    return _TRACES[0] in line or (not own and any(trace in line for trace in _TRACES))


def _packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


@contextmanager
def running(kind: type[DaemonProcess] = DaemonProcess, *, tls: bool = False) -> Iterator[Target]:
    """The daemon with its whole fleet running, for as long as the block runs."""
    with TemporaryDirectory(prefix="tv") as kept:
        folder = Path(kept)
        keys = [{"name": name, "key": KEYS[name], **_RIGHTS[name]} for name in KEYS]
        auth: dict[str, object] = {"enabled": True, "providers": ["api_keys"], "api_keys": keys}
        authority = None
        if tls:
            authority = Authority(folder / "ca")
            files = authority.server()
            auth["tls"] = {"server_cert": str(files.cert), "server_key": str(files.key)}
        found = folder / "models"
        daemon = kind(max_instances=len(FLEET) + 8, auth=auth, local_model_roots=[str(found)])
        with closing(daemon):
            daemon.start({"HF_HOME": str(folder / "hub"), "OMP_NUM_THREADS": "1"})
            daemon.await_grpc()
            operator = _operator(daemon, authority)
            with operator as client:
                for (name, build), port in zip(FLEET.items(), free_ports(len(FLEET)), strict=True):
                    client.create(name, str(build(found / name)), dtype="float32", prometheus_port=port)
                for name in FLEET:
                    client.wait_until_running(name, deadline_s=STARTING_LIMIT_S)
            yield Target(daemon, found, authority.ca if authority else None)


def _operator(daemon: DaemonProcess, authority: Authority | None) -> Client:
    if authority is None:
        return daemon.client(api_key=KEYS[OPERATOR])
    addresses = (f"https://127.0.0.1:{port}" for port in (daemon.api_port, daemon.grpc_port))
    return Client(*addresses, tls=Tls(ca=authority.ca), api_key=KEYS[OPERATOR])
