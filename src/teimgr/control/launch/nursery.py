"""Nursery: the fork server (zygote), which imports the workers' modules once and forks the workers.

    python -m teimgr.control.launch.nursery CONTROL_FD [--entry module:function] [--preload module,module:function…]

It has one thread and never uses CUDA, gRPC or parallel tensor operations, whose thread pool would not exist in a child.
Its control socket (SOCK_SEQPACKET) carries one JSON object per message:

    in    {"id", "incarnation", "run_dir", "spec", "ports"}
                                                     with descriptors: the worker's listener, its log, the socket of
                                                     each of `ports` that another worker shares
          {"id", "standby"}                          with one descriptor: the control socket of the standby to fork
    out   {"threads", "missing", "torch"}            once, when the imports are done; a TorchBuild
          {"id", "pid"}                              with one descriptor: a pidfd of the new process
          {"id", "error"}
          {"pid", "status"}                          a child exited; negative: by that signal

A worker's run file is written before the reply and before the child continues, so the next daemon always finds it. If
the daemon has exited by then, the child is killed, because the next daemon may have ended its adoption already. The
nursery exits when the control socket closes; the workers, each in its own session, continue.

A standby is a fork of the nursery with its own control socket. It shares the imported memory and becomes the nursery
with its first request, after its parent has died. It closes its parent's descriptors so that the daemon sees the
parent's end.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, cast

from teimgr.control.launch.process_handle import WorkerPaths, WorkerRunFile
from teimgr.files import code_id
from teimgr.models.known_keys import declared_keys
from teimgr.observability.memory import resident_bytes, young_collections_alone
from teimgr.spec import WorkerSpec

NAME, STANDBY_NAME = "teimgr-nursery", "teimgr-standby"
"""Names of the processes, as in /proc/PID/comm."""
MESSAGE_LIMIT_BYTES = 128 * 1024
PORTS_LIMIT = 8
ENTRY = "teimgr.worker.process:main"
FAMILIES = ("bert", "roberta", "xlm_roberta", "distilbert", "modernbert", "mpnet")
PRELOAD = (
    "torch",
    "transformers",
    *(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES),
    "teimgr.engine.own_models",
    "teimgr.engine.native_forward.lowering:rehearse",
)
"""Modules to import, and functions to call once."""
# Read by libraries that start threads at import; a worker sets its own number later.
ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # the allocator inside pyarrow
}
LIBRARY_SETTINGS = {
    # Idle OpenMP threads sleep instead of spinning on cores that others need. With spinning and other load, a query
    # after a pause took four times the CPU time, a bulk batch twice.
    "OMP_WAIT_POLICY": "PASSIVE",
    # oneDNN generates about 0.3 MiB of code for each shape of a matrix product, so for each number of tokens in a
    # batch, and keeps 1,024 by default, as does ideep, torch's layer over it. 256, the last 64 batches, are as fast,
    # and ideep's cache is redundant.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    "LRU_CACHE_CAPACITY": "1",
    # pyarrow's own allocator takes 4 MiB for the first message and keeps the pages of large ones even after
    # `release_unused`. Replies above 256 KiB are written into numpy's memory (`write_table`).
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
"""Default environment of workers; libraries read it at import."""
# Imports must not initialise the GPU driver, which does not survive a fork.
NO_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# The OOM killer should choose a worker, which is restarted, not the daemon or the mux.
_OOM_SCORE_ADJ = "300"

Entry = Callable[[int, str, str, str, str], int]
"""Listener descriptor, incarnation, run directory, spec as JSON, shared ports as JSON → exit status."""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """A build of torch. `cuda` is None for a CPU build; `archs` are, for example, `sm_90` and `compute_90`."""

    version: str = ""
    cuda: str | None = None
    archs: tuple[str, ...] = ()

    @classmethod
    def imported(cls) -> TorchBuild:
        """The build that this process has imported, an empty one without torch.

        A child reads the compiled-in list: torch takes who asks for it for one that has initialised the driver, and the
        forks of such a process start afresh.
        """
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return cls()
        flags = getattr(torch._C, "_cuda_getArchFlags", None)
        return cls(str(torch.__version__), torch.version.cuda, tuple(_in_a_child(flags).split()) if flags else ())


def _in_a_child(call: Callable[[], str | None]) -> str:
    """The text that a fork of this process gets from `call`; empty where that fails."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        with suppress(BaseException):
            os.write(write, (call() or "").encode())
        os._exit(0)
    os.close(write)
    found = os.read(read, MESSAGE_LIMIT_BYTES).decode()
    os.close(read)
    os.waitpid(pid, 0)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="teimgr.control.launch.nursery")
    parser.add_argument("control_fd", type=int)
    parser.add_argument("--entry", default=ENTRY)
    parser.add_argument("--preload", default=",".join(PRELOAD))
    options = parser.parse_args(arguments)
    os.environ.update(ONE_THREAD | NO_DRIVER)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # workers set their own; names of MIG partitions would defeat NO_DRIVER
    for name, value in LIBRARY_SETTINGS.items():
        os.environ.setdefault(name, value)
    _name_process(NAME)
    names = [*filter(None, options.preload.split(","))]
    with young_collections_alone():
        missing = preload(names)
        make_tables()
        code_id()  # identifies the imported code, even if the files change later
        entry = find_entry(options.entry)
        missing += call_ahead(names)  # last: `make_tables` would push its patterns out of `re`'s cache
    gc.collect()  # imports collected too: holes freed here are filled, and so copied, in children
    gc.disable()
    gc.freeze()  # collections in a child must not write to, and so copy, the nursery's pages
    control: socket.socket | None = socket.socket(fileno=options.control_fd)
    while control is not None:  # a standby runs the loop again
        control = Nursery(control, entry).serve(missing)
        missing = []  # already reported
    return 0


def preload(names: Sequence[str]) -> list[str]:
    """Import modules, those of functions included; the result lists those that failed, which workers may not need."""
    missing = []
    for name in names:
        try:
            importlib.import_module(name.partition(":")[0])
        except ImportError as error:
            missing.append(f"{name}: {error}")
    return missing


def call_ahead(names: Sequence[str]) -> list[str]:
    """Call the functions among `names`; the result lists those that failed: workers do without what they make."""
    failed = []
    for name in names:
        module, _, function = name.partition(":")
        if function and module in sys.modules:
            try:
                getattr(sys.modules[module], function)()
            except Exception as error:  # library code may raise anything
                failed.append(f"{name}: {type(error).__name__}: {error}")
    return failed


def make_tables() -> None:
    """Make what every load needs: transformers' table of weight names (50 ms, mostly a thousand regular expressions),
    and what it declares about the families (50 ms, read from its source).
    """
    for family in FAMILIES if "transformers" in sys.modules else ():
        declared_keys(family.replace("_", "-"))
    module = sys.modules.get("transformers.conversion_mapping")
    make = getattr(module, "get_checkpoint_conversion_mapping", None)
    if make is not None:  # internal to transformers; without it each worker does this itself
        make("")


def find_entry(path: str) -> Entry:
    module, _, function = path.partition(":")
    return cast(Entry, getattr(importlib.import_module(module), function))


class Nursery:
    """Serves the control socket and reaps its children."""

    def __init__(self, control: socket.socket, entry: Entry) -> None:
        self._control = control
        self._entry = entry
        self._threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208  names are enough
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._pids: dict[int, int] = {}  # pidfd → pid
        self._own_control: socket.socket | None = None  # set in a standby

    def serve(self, missing: list[str]) -> socket.socket | None:
        """Answer requests and report exits until the daemon closes the control socket or is gone; then return None.

        A standby is forked inside this call, so in the standby's process it returns too: with the control socket for
        which that process then makes its own `Nursery`. `missing` is what `preload` and `call_ahead` could not do.
        """
        with suppress(BrokenPipeError, ConnectionResetError):
            self._send({"threads": self._threads, "missing": missing, "torch": asdict(TorchBuild.imported())})
            while self._serve_ready():
                pass
        return self._own_control

    def _serve_ready(self) -> bool:
        for key, _ in self._selector.select():
            if key.fileobj is not self._control:
                self._reap(key.fd)
            elif not self._answer():
                return False
        return True

    def _answer(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_LIMIT_BYTES, 2 + PORTS_LIMIT)
        if not message or self._is_orphaned():
            return False
        request = json.loads(message)
        _name_process(NAME)  # a standby becomes the nursery
        try:
            if "standby" in request:
                (control,) = descriptors
                self._fork_standby(request, control)
            else:
                listener, log, *ports = descriptors
                self._fork(request, listener, log, dict(zip(request["ports"], ports, strict=True)))
        except (OSError, ValueError) as error:
            self._send({"id": request["id"], "error": f"fork: {error}"})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return self._own_control is None

    def _is_orphaned(self) -> bool:
        """True if the daemon has closed its end; its last requests may still be in the queue."""
        poller = select.poll()
        poller.register(self._control, select.POLLRDHUP)
        return bool(poller.poll(0))

    def _fork(self, request: dict[str, Any], listener: int, log: int, ports: dict[int, int]) -> None:
        go_ahead, give_go_ahead = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                os.close(give_go_ahead)
                self._become_worker(request, listener, log, go_ahead, ports)
            self._keep(request, pid, give_go_ahead)
        finally:
            os.close(go_ahead)
            os.close(give_go_ahead)

    def _fork_standby(self, request: dict[str, Any], control: int) -> None:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            _name_process(STANDBY_NAME)
            self._control.close()
            self._selector.close()
            self._own_control = socket.socket(fileno=os.dup(control))
            _close_all_but((self._own_control.fileno(), control))  # the caller closes `control`
        else:
            self._send({"id": request["id"], "pid": pid}, self._watch(pid))

    def _watch(self, pid: int) -> int:
        """A pidfd of the child, whose end is reported; without one it is killed. Raises OSError."""
        # The pid cannot be reused before `_reap`.
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._pids[pidfd] = pid
        self._selector.register(pidfd, selectors.EVENT_READ)
        return pidfd

    def _keep(self, request: dict[str, Any], pid: int, give_go_ahead: int) -> None:
        """Watch the child, write its run file and let it continue; kill it if that fails or the daemon is gone."""
        pidfd = self._watch(pid)
        try:
            write_run_file(request, pid)
            if self._is_orphaned():
                os.kill(pid, signal.SIGKILL)
                return
            with suppress(BrokenPipeError):  # the child has exited
                os.write(give_go_ahead, b"!")
            self._send({"id": request["id"], "pid": pid}, pidfd)
        except (BrokenPipeError, ConnectionResetError):
            raise  # the daemon has exited; the next one finds the worker by its run file
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            self._send({"id": request["id"], "error": f"cannot write the worker's run file: {error}"})

    def _reap(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        pid = self._pids.pop(pidfd)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # kills its children; the group id cannot be reused yet
        _, status, usage = os.wait4(pid, 0)
        own = max(0, (usage.ru_maxrss << 10) - resident_bytes())  # without the memory shared with this process
        self._send({"pid": pid, "status": os.waitstatus_to_exitcode(status), "peak_bytes": own})

    def _send(self, message: dict[str, object], *descriptors: int) -> None:
        socket.send_fds(self._control, [json.dumps(message).encode()], list(descriptors))

    def _become_worker(
        self, request: dict[str, Any], listener: int, log: int, go_ahead: int, ports: dict[int, int]
    ) -> NoReturn:
        """In the child: wait until the run file is written, run the entry, exit; at once if the nursery dies before."""
        status = 1
        try:
            if not os.read(go_ahead, 1):
                raise SystemExit(status)
            self._control.close()
            self._selector.close()
            spec = WorkerSpec.from_json(request["spec"])
            kept = (listener, *ports.values())
            become_worker_process(spec, kept, log)
            arguments = (request["incarnation"], request["run_dir"], request["spec"], json.dumps(ports))
            if self._threads > 1 or driver_was_initialised():
                exec_afresh(self._entry, kept, *arguments)
            status = self._entry(listener, *arguments)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # skips the nursery's exit handlers


def become_worker_process(spec: WorkerSpec, kept: Sequence[int], log: int) -> None:
    """Set session, signals, streams, descriptors, device and priority of the forked process."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _wire_streams(log)
    _close_all_but(kept)
    os.environ["CUDA_VISIBLE_DEVICES"] = spec.gpu or ""
    if spec.nice > 0:
        os.nice(spec.nice)
    _name_process(f"tei:{spec.name}")
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ)
    gc.enable()
    faulthandler.enable(sys.stdout)


def driver_was_initialised() -> bool:
    """In a fork: whether its parent had initialised CUDA's driver, which does not work here any more."""
    torch: Any = sys.modules.get("torch")
    is_bad = getattr(getattr(torch, "_C", None), "_cuda_isInBadFork", None)
    return is_bad is not None and bool(is_bad())


def exec_afresh(entry: Entry, kept: Sequence[int], *arguments: str) -> NoReturn:
    """Run the entry in a new interpreter: seconds slower, but safe where the nursery had several threads or a driver.

    `kept` are the descriptors to inherit, the listener's first. The arguments go by a file in memory, as the spec may
    have secrets and every user can read a command line.
    """
    memory = os.memfd_create("arguments")
    os.write(memory, json.dumps(arguments).encode())
    os.lseek(memory, 0, os.SEEK_SET)
    imports = f"import json, sys; from {entry.__module__} import {entry.__name__} as entry"
    code = f"{imports}; sys.exit(entry(int(sys.argv[1]), *json.load(open(int(sys.argv[2])))))"
    for descriptor in (memory, *kept):
        os.set_inheritable(descriptor, True)
    os.execv(sys.executable, [sys.executable, "-P", "-c", code, str(kept[0]), str(memory)])


def write_run_file(request: dict[str, Any], pid: int) -> None:
    spec = WorkerSpec.from_json(request["spec"])
    paths = WorkerPaths(Path(request["run_dir"]), request["incarnation"])
    run_file = WorkerRunFile.of(
        pid,
        socket=str(paths.socket),
        incarnation=paths.incarnation,
        instance=spec.name,
        spec_hash=spec.hash,
        spec=request["spec"],
    )
    if run_file is not None:
        run_file.write(paths.run_file)


def _wire_streams(log: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)


def _close_all_but(kept: Sequence[int]) -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  names are enough
        if int(name) > 2 and int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))


def _name_process(name: str) -> None:
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name[:15])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
