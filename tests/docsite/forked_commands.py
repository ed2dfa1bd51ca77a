"""Programs for the path of a test's shell: `teimgr`, `python -c`, `grpcurl`, forks of a process that has their imports.

A page's commands are some hundred; the imports of each are half a second of processor time and more. Tests that are
about the start of the command line start it.
"""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import socket
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

from tests.support.fork_server import ForkServer, daemon_with_copy

import teimgr.cli
from teimgr.spec import WorkerSpec

_MESSAGE_BYTES = 128 * 1024
_PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
service = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
service.connect({path!r})
socket.send_fds(service, [json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
pid = int(service.recv(16))
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
sys.exit(int(service.recv(16)))
"""
NAMES = ("teimgr", "python-c", "grpcurl")


def write_programs(folder: Path, *names: str) -> None:
    """Write those of `NAMES` to `folder`; the fork server of `teimgr serve` is a copy."""
    folder.mkdir(exist_ok=True)
    for name in names:
        program = folder / name
        program.write_text(_PROGRAM.format(python=sys.executable, path=_service(), name=name))
        program.chmod(0o755)


@cache
def _service() -> str:
    """Path of the unix socket where programs send their command line and their streams, and get an exit status."""
    path = f"{tempfile.mkdtemp(prefix='t')}/commands"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    commands = [f"teimgr.cli.{module.name}" for module in pkgutil.iter_modules(teimgr.cli.__path__)]
    modules = ["teimgr.client", "numpy", "pyarrow", "pyarrow.parquet", "teimgr.daemon.process", *commands]
    modules += ["tests.contract.grpcurl"]
    server = ForkServer("--entry", f"{__name__}:_enter", "--preload", ",".join(modules))

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=answer, args=[connection], daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection:
            message, streams, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
            folder = Path(tempfile.mkdtemp(prefix="t"))
            (folder / "command.json").write_bytes(message)
            spec = WorkerSpec(name="command", model_id="none", port=0, nice=0).to_json()
            stdin, stdout, stderr = streams
            try:
                process = server.fork(stdin, stderr, "fork", str(folder), spec, ports={1: stdout})
                connection.send(str(process.pid).encode())
                status = process.wait()
            finally:
                for stream in streams:
                    os.close(stream)
                shutil.rmtree(folder)
            connection.send(str(status if status >= 0 else 128 - status).encode())

    threading.Thread(target=serve, name="commands", daemon=True).start()
    return path


def _enter(stdin: int, incarnation: str, run_dir: str, spec: str, ports: str) -> int:
    """The entry of the server; the log of such a fork is stderr."""
    name, arguments, folder, environ = json.loads(Path(run_dir, "command.json").read_text())
    for given, wanted in ((stdin, 0), (json.loads(ports)["1"], 1)):
        os.dup2(given, wanted)
        os.close(given)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv = [name, *arguments]
    if name == "teimgr":
        sys.orig_argv = [sys.executable, "-m", *sys.argv]
        return daemon_with_copy(sys.argv)
    if name == "grpcurl":
        from tests.contract import grpcurl

        return grpcurl.main()
    option, code = arguments
    assert option == "-c"
    sys.path.insert(0, "")
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    return 0
