"""A first incident, played: `python -m tests.faults.incident [--only memory disk …] [--report FOLDER]`.

Six incidents break a live daemon: a worker killed by the kernel for memory, a full disk, a start that fails again and
again, wrong API keys, mistakes of TLS, overload. Of each, one command has to tell the cause: its output must have the
words that name it and what to do. What is printed is to be read by a person, too. The exit status is 0 when every
command told the cause. Memory and disk need root, and cgroups of version 1; without them they are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as pytest's `pythonpath` has it

from bench.forty.catalogue import encoder

from teimgr.control.ledger.system_memory import CgroupMemory
from teimgr.errors import TeimgrError
from tests.faults import long_run
from tests.faults.host_network import SmallDisk
from tests.faults.results import markdown, write
from tests.support.credentials import SECRETS, Authority
from tests.support.daemon_process import MINILM, DaemonProcess
from tests.support.models import build
from tests.support.models.files import edit
from tests.support.polling import until

_HEADER = ("incident", "command", "told", "its output")
_LIMIT_S = 300.0
_HEADROOM_MIB = 150  # for the worker of a model of 430 MiB
_CALLERS = 12
_SHOWN_CHARS = 120  # of a command or a line, in a cell of the table
_LONG_TEXT = "rain harbour fog wind " * 120
_ABORTS = """
import os

os.abort()  # as a library that does not fit this CPU does
"""
# A caller of the tests gives its own; the shell's must not answer for it.
_OF_THE_SHELL = ("TEIMGR_API_KEY", "TEIMGR_CA", "TEIMGR_CERT", "TEIMGR_KEY", "TEIMGR_CONTEXT", "HF_HUB_OFFLINE")


@dataclass(frozen=True)
class Asked:
    """A command, what it printed, and the expressions of `wanted` that are not in that."""

    incident: str
    command: str
    output: str
    missing: tuple[str, ...]


class Daemon(DaemonProcess):
    """A daemon that may take its time to start, as on a machine that others use too."""

    listen_limit_s = _LIMIT_S

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.may_hold_loops = True


class Incident:
    """A daemon with a fault, at `url`, which is asked by commands as a person gives them."""

    def __init__(self, name: str, url: str = "", asked: list[Asked] | None = None) -> None:
        self.name = name
        self.url = url
        self.asked = [] if asked is None else asked

    def ask(self, *command: str, says: tuple[str, ...], what: str = "") -> None:
        """Run `teimgr` with these words; each of `says` is an expression that must be found in what it prints."""
        environ = {key: value for key, value in os.environ.items() if key not in _OF_THE_SHELL}
        done = subprocess.run(
            [sys.executable, "-m", "teimgr", *command],
            env=environ | ({"TEIMGR_URL": self.url} if self.url else {}),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
        output = done.stdout + done.stderr
        missing = tuple(each for each in says if not re.search(each, output))
        shown = " ".join(("teimgr", *(Path(word).name if word.startswith("/") else word for word in command)))
        self.asked.append(Asked(f"{self.name}{f': {what}' if what else ''}", shown, output, missing))
        print(f"--- {self.asked[-1].incident}\n$ {shown}   ({done.returncode})\n{output}", flush=True)
        if missing:
            print(f"NOT TOLD: {missing}", flush=True)


def memory(incident: Incident, folder: Path) -> None:
    """A cgroup with less than a model needs: refused before its start, or killed by the kernel where that is off."""
    model = folder / "model"
    encoder(model, width=1024, layers=6, seed=1)
    for checks in (True, False):
        daemon = Daemon(memory_check=checks)
        with memory_cgroup() as group:
            daemon.within = ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
            with daemon:
                starve(incident, daemon, group, model)


def starve(incident: Incident, daemon: DaemonProcess, group: Path, model: Path) -> None:
    """Have the daemon start a model for which its cgroup has no room."""
    incident.url = daemon.api
    with daemon.client() as client:
        client.create("small", str(build("bert", model.parent / f"small-{daemon.api_port}")))
        client.wait_until_running("small", deadline_s=_LIMIT_S)  # the fork server has imported torch
        used = int((group / "memory.usage_in_bytes").read_text())
        (group / "memory.limit_in_bytes").write_text(str(used + _HEADROOM_MIB * 2**20))
        if daemon.settings["memory_check"]:
            refusal = r"needs \d+ MiB of host memory \(the cgroup allows .*\), \d+ MiB are free"
            says = (refusal, "next: .*memory_check = false")
            incident.ask("create", "large", str(model), "--wait", says=says, what="refused before the start")
            return
        client.create("large", str(model))
        until(lambda: "by the kernel" in (client.get("large").reason or ""), "the kill", _LIMIT_S)
    killed = r"killed by the kernel for memory: the cgroup allows .* [MG]iB"
    for command, says in (("ps", (killed, r"attempt \d+")), ("doctor", (killed,)), ("events", (killed,))):
        incident.ask(command, says=says, what="killed by the kernel")


def disk(incident: Incident, folder: Path) -> None:
    """No room for state, logs and run files."""
    model = build("bert", folder / "model")
    place = folder / "disk"
    with SmallDisk(place, 32) as small, Daemon(state_file=str(place / "state.toml")) as daemon:
        incident.url = daemon.api
        with daemon.client() as client:
            client.create("mini", str(model))
            client.wait_until_running("mini", deadline_s=_LIMIT_S)
            small.fill()
            incident.ask("create", "more", str(model), says=(re.escape(str(place)), "[Nn]o space left|full"))
            full = rf"{re.escape(str(place))}.*over 95 % full"
            until(lambda: re.search(full, " ".join(client.health().details["alarms"])), "the alarm", _LIMIT_S)
            incident.ask("doctor", says=(full, "make room|is left|are left"))
            incident.ask("embed", "it serves on", "-i", "mini", says=(r"^\[-?\d",))
            os.kill(before := client.get("mini").pid or 0, signal.SIGKILL)
            until(lambda: client.get("mini").pid not in (None, before), "another worker", _LIMIT_S)
            until(lambda: client.get("mini").status == "running", "the worker of the full disk", _LIMIT_S)
            incident.ask("embed", "it serves again", "-i", "mini", says=(r"^\[-?\d",), what="after a crash")


def loop(incident: Incident, folder: Path) -> None:
    """A model whose code ends its worker at every start."""
    model = build("bert", folder / "model")
    (model / "own_code.py").write_text(_ABORTS)
    edit(model / "config.json", model_type="own-bert", auto_map={"AutoConfig": "own_code.C", "AutoModel": "own_code.M"})
    with Daemon(allow_remote_code=True, restart_backoff_secs=0.5, restart_backoff_max_secs=30) as daemon:
        incident.url = daemon.api
        with daemon.client() as client:
            client.create("broken", str(model), trust_remote_code=True)
            until(lambda: client.get("broken").restarts >= 5, "five starts", _LIMIT_S)
            until(lambda: client.health().details["alarms"], "the alarm", _LIMIT_S)
        cause = "killed by SIGABRT.*Fatal Python error: Aborted, at .*own_code.py, line 4"
        incident.ask("ps", says=(r"attempt \d+", cause))
        incident.ask("doctor", says=(r"broken.*(start|attempt)", cause, "teimgr logs broken"))
        incident.ask("events", "broken", "-n", "10", says=(r"\b[3-9] times", cause))
        incident.ask("show", "broken", says=(r"attempt\s+\d+", cause))


def key(incident: Incident, folder: Path) -> None:
    """No key, a wrong one, one that may only read, one for other instances."""
    model = build("bert", folder / "model")
    keys = [
        {"name": "boss", "key": SECRETS["admin"], "rights": ["admin", "inference", "read"]},
        {"name": "reader", "key": SECRETS["read"], "rights": ["read"]},
        {"name": "team", "key": SECRETS["team"], "rights": ["inference", "read"], "instances": ["team-*"]},
    ]
    files = {name: folder / f"{name}.key" for name in ("admin", "read", "team", "wrong")}
    for name, file in files.items():
        file.write_text(SECRETS.get(name, "no-key-of-this-daemon-at-all"))
        file.chmod(0o600)
    with Daemon(auth={"enabled": True, "providers": ["api_keys"], "api_keys": keys}) as daemon:
        incident.url = daemon.api
        with daemon.client(api_key=SECRETS["admin"]) as client:
            client.create("mini", str(model))
            client.wait_until_running("mini", deadline_s=_LIMIT_S)

        def given(name: str) -> tuple[str, str]:
            return ("--api-key-file", str(files[name]))

        incident.ask("ps", says=("no key|without a key|no API key|none", "--api-key-file"), what="none")
        incident.ask("ps", *given("wrong"), says=("key", "next:"), what="wrong")
        incident.ask("doctor", *given("wrong"), says=("key", "--api-key-file"), what="wrong")
        incident.ask("rm", "mini", "-y", *given("read"), says=("'reader'", "admin"), what="without the right")
        says = ("'team'", "mini", "team-\\*")
        incident.ask("embed", "a", "-i", "mini", *given("team"), says=says, what="for other instances")


def tls(incident: Incident, folder: Path) -> None:
    """Each way in which an address or a certificate is wrong."""
    authority, stranger = Authority(folder / "ours"), Authority(folder / "other", "other")
    server = authority.server()
    mine, theirs = authority.sign("client"), stranger.sign("client")
    keys = {"ca_cert": authority.ca, "server_cert": server.cert, "server_key": server.key}
    auth = {"enabled": True, "providers": ["mtls"], "mtls": {name: str(file) for name, file in keys.items()}}
    with Daemon(auth=auth) as daemon:
        secure = daemon.api.replace("http:", "https:")

        def ask(what: str, url: str, *options: object, says: tuple[str, ...]) -> None:
            incident.ask("ps", "--url", url, *map(str, options), says=says, what=what)

        ca = ("--ca", authority.ca)
        proof = ("--cert", mine[0], "--key", mine[1])
        ask("http for https", daemon.api, says=("needs https", "use https://"))
        ask("no authority", secure, *proof, says=("unknown authority", "--ca"))
        ask(
            "another authority", secure, "--ca", stranger.ca, *proof, says=("unknown authority", "lacks that authority")
        )
        ask("no client certificate", secure, *ca, says=("wants a client certificate", "--cert FILE --key FILE"))
        foreign = ("--cert", theirs[0], "--key", theirs[1])
        ask("a foreign client certificate", secure, *ca, *foreign, says=("does not accept the client certificate",))
        named = ("--server-name", "elsewhere.example")
        ask("another name", secure, *ca, *proof, *named, says=("for another name", "--server-name"))
        ask("the port of gRPC", daemon.grpc.replace("http:", "https:"), *ca, *proof, says=("is a gRPC port", "9000"))
        ask("nothing wrong", secure, *ca, *proof, says=("no instances|^$",))
    with Daemon() as daemon:
        ask("https for http", daemon.api.replace("http:", "https:"), says=("speaks no TLS", "use http://"))
        ask("the port of gRPC", daemon.grpc, says=("is a gRPC port", "9000"))
    ask("nothing listens", "http://127.0.0.1:1", says=("Connection refused", "teimgr up"))


def overload(incident: Incident, folder: Path) -> None:
    """More calls at a time than an instance takes."""
    with Daemon() as daemon:
        incident.url = daemon.api
        with daemon.client() as client:
            client.create("busy", MINILM, max_concurrent_requests=1, max_waiting=0)
            client.wait_until_running("busy", deadline_s=_LIMIT_S)
        with callers(daemon, "busy") as refused:
            until(lambda: refused() >= 20, "refusals", _LIMIT_S)
            refused_per_second = r"busy\s+running\s.*\s[\d.,]*[1-9][\d.,]*\s+1\s"
            incident.ask("top", "-i", "3", says=(refused_per_second,), what="refused per second")
            says = ("overloaded|would wait", "try again|--replicas|fewer")
            for _ in range(10):
                incident.ask("embed", _LONG_TEXT, "-i", "busy", says=says, what="a call")
                if "overloaded" in incident.asked[-1].output:
                    break
                incident.asked.pop()  # there was room for this one


INCIDENTS: Mapping[str, Callable[[Incident, Path], None]] = {
    each.__name__: each for each in (memory, disk, loop, key, tls, overload)
}


@contextmanager
def memory_cgroup() -> Iterator[Path]:
    """A memory cgroup of version 1 without a limit; its processes go back where they were.

    Raises:
        OSError: it cannot be made here.
    """
    made, home = Path(f"/sys/fs/cgroup/memory/teimgr-incident-{os.getpid()}"), CgroupMemory().groups[0][0]
    made.mkdir()
    try:
        yield made
    finally:
        for pid in (made / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (home / "cgroup.procs").write_text(pid)
        made.rmdir()


@contextmanager
def callers(daemon: DaemonProcess, instance: str) -> Iterator[Callable[[], int]]:
    """Callers without a pause within the block; the function tells how many calls were refused."""
    over, refusals = threading.Event(), [0] * _CALLERS

    def call(number: int) -> None:
        with daemon.client() as client:
            while not over.is_set():
                try:
                    client.embed([_LONG_TEXT] * 8, instance=instance)
                except TeimgrError:
                    refusals[number] += 1
                    over.wait(0.2)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(_CALLERS)]
    for each in threads:
        each.start()
    try:
        yield lambda: sum(refusals)
    finally:
        over.set()
        for each in threads:
            each.join()


def play(names: list[str]) -> tuple[list[Asked], dict[str, str]]:
    """What was asked in each incident, and why others were left out."""
    asked: list[Asked] = []
    left_out = {}
    for name in names:
        if name in ("memory", "disk") and os.geteuid() != 0:
            left_out[name] = "it needs root"
            continue
        with tempfile.TemporaryDirectory(prefix="ti") as folder:
            began = time.monotonic()
            INCIDENTS[name](Incident(name, asked=asked), Path(folder))
            print(f"--- {name}: {time.monotonic() - began:.0f} s", flush=True)
    return asked, left_out


def main() -> int:
    """Play, print the table, write the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.incident", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=INCIDENTS, default=list(INCIDENTS), help="incidents (all)")
    parser.add_argument("--report", type=Path, help="folder for incident.json and incident.md")
    options = parser.parse_args()
    asked, left_out = play(options.only)
    rows = [
        [each.incident, f"`{each.command[:_SHOWN_CHARS]}`", "no" if each.missing else "yes", first_line(each)]
        for each in asked
    ]
    lines = markdown(_HEADER, rows) + [f"{name}: left out, {why}" for name, why in left_out.items()]
    print("\n".join(lines))
    if options.report:
        facts: dict[str, Any] = {"asked": [vars(each) for each in asked], "left_out": left_out}
        write(options.report, "incident", "A first incident", lines, facts)
    return int(any(each.missing for each in asked))


def first_line(asked: Asked) -> str:
    """What a person reads first of the output, for a cell of the table."""
    found = next((line for line in asked.output.splitlines() if line.strip()), "")
    return json.dumps(found[:_SHOWN_CHARS], ensure_ascii=False)[1:-1].replace("|", "/").replace("\\t", " ")


if __name__ == "__main__":
    sys.exit(long_run.run(main))
