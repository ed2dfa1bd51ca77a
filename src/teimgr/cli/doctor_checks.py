"""Checks of this host for `teimgr doctor`, with advice."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from teimgr.config.settings import Settings, is_loopback
from teimgr.errors import TeimgrError
from teimgr.http.server import bind

# More than enough descriptors for a daemon with a hundred instances and their clients.
_OPEN_FILES = 8192
_LOW_DISK_BYTES = 5 * 2**30
_LOW_MEMORY_BYTES = 2 * 2**30
# Memory of a worker besides its weights: measured on CPUs with `bench start`; estimated on a card (CUDA context).
_WORKER_BYTES = 100 * 2**20
_WORKER_BYTES_ON_A_CARD = 600 * 2**20
_CONNECT_LIMIT_S = 1.0
_TORCH_LIMIT_S = 120.0
_EARLIEST_CLOCK = 1_735_689_600.0  # 2025-01-01; TLS fails with an unset clock
_TORCH_FACTS = (
    "import json, torch; print(json.dumps({'version': torch.__version__, 'cuda': torch.version.cuda,"
    " 'archs': torch.cuda.get_arch_list(), 'devices': torch.cuda.device_count()}))"
)

Outcome = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, and advice."""

    check: str
    outcome: Outcome
    text: str
    advice: str = ""


Check = Callable[[Settings], Iterator[Finding]]


def _folders(settings: Settings) -> Iterator[Finding]:
    """The folders of state, logs and run files can be written."""
    for noun, folder in (("state", settings.state_file.parent), ("logs", settings.log_dir), ("run", settings.run_dir)):
        if not is_writable(folder):
            advice = (
                f"give {_present(folder)} to the user {os.geteuid()}, or set another state_file, log_dir or run_dir"
            )
            yield Finding(noun, "fail", f"{folder.absolute()} cannot be written", advice)
        else:
            yield Finding(noun, "ok", str(folder.absolute()))


def is_writable(folder: Path) -> bool:
    """True if files can be made in the folder, or it can be made."""
    present = _present(folder)
    return present.is_dir() and os.access(present, os.W_OK | os.X_OK)


def enough_memory(free_bytes: int) -> bool:
    return free_bytes >= _LOW_MEMORY_BYTES


def enough_disk(free_bytes: int) -> bool:
    return free_bytes >= _LOW_DISK_BYTES


def _present(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())


def _ports(settings: Settings) -> Iterator[Finding]:
    """The daemon's ports are free, or its own."""
    for key, _, host, port in settings.listeners():
        try:
            bind(host, port).close()
        except TeimgrError as error:
            if _answers(host, port):
                yield Finding("ports", "warn", f"{key} {host}:{port} is in use", "fine if by this daemon itself")
            else:
                yield Finding("ports", "fail", f"{key} {host}:{port}: {error.message}", f"choose another {key}")
        else:
            yield Finding("ports", "ok", f"{key} {host}:{port} is free")
        if not is_loopback(host) and settings.auth is None and key != "health_port":
            yield Finding("ports", "warn", f"{key} listens on {host} without authentication", "see docs/api-keys.md")


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1" if host == "0.0.0.0" else host, port), timeout=_CONNECT_LIMIT_S):
            return True
    except OSError:
        return False


def check_limits(settings: Settings) -> Iterator[Finding]:
    """Descriptors, CPU cores, memory and disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _OPEN_FILES:
        yield Finding(
            "limits", "warn", f"{hard} open files at most", f"raise it: ulimit -Hn {_OPEN_FILES}, LimitNOFILE="
        )
    else:
        yield Finding("limits", "ok", f"{'any number of' if hard < 0 else hard} open files")
    from teimgr.control.ledger.system_memory import free_memory_bytes
    from teimgr.control.placement.planner import usable_cores

    yield Finding("cpu", "ok", f"{usable_cores()} cores")
    available = free_memory_bytes() or 0
    outcome: Outcome = "ok" if enough_memory(available) else "warn"
    yield Finding("memory", outcome, f"{available / 2**30:.1f} GiB available")
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    present = _present(cache)
    free = shutil.disk_usage(present).free
    text = f"{cache}: {free / 2**30:.0f} GiB free"
    if not os.access(present, os.W_OK):
        yield Finding("cache", "fail", f"{cache} cannot be written", "set HF_HOME to a folder of this user")
    elif not enough_disk(free):
        yield Finding("cache", "warn", text, "models that are not here yet may not fit; set HF_HOME, or delete some")
    else:
        yield Finding("cache", "ok", text)


def check_clock(settings: Settings) -> Iterator[Finding]:
    """The clock was set, and the state file is not of the future."""
    now = time.time()
    if now < _EARLIEST_CLOCK:
        yield Finding("clock", "fail", time.strftime("%Y-%m-%d", time.gmtime(now)), "set it: certificates fail")
    elif settings.state_file.exists() and settings.state_file.stat().st_mtime > now + 60.0:
        yield Finding(
            "clock", "warn", f"{settings.state_file} has a modification time in the future", "was the clock set back?"
        )
    else:
        yield Finding("clock", "ok", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)))


def check_devices(settings: Settings) -> Iterator[Finding]:
    """Driver and torch, each asked in its own way, agree on the GPUs, and torch has code for them."""
    from teimgr.control.launch.nursery import TorchBuild
    from teimgr.control.placement.hosts import only_visible, problems, read_nvml

    inventory = only_visible(read_nvml(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    command = [sys.executable, "-c", _TORCH_FACTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_LIMIT_S, check=True)
        facts = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError, OSError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        yield Finding("torch", "fail", f"cannot be imported: {reason[-1] if reason else error}", "reinstall teimgr")
        return
    yield Finding("torch", "ok", f"{facts['version']}, {'CUDA ' + facts['cuda'] if facts['cuda'] else 'CPU only'}")
    if not inventory.gpus:
        yield Finding("gpus", "ok", f"none, models run on the CPU ({inventory.reason})")
        return
    for problem in problems(inventory.gpus, TorchBuild(facts["version"], facts["cuda"], tuple(facts["archs"]))):
        yield Finding("gpus", "fail", problem.removeprefix("gpu_preflight: "))
    if facts["devices"] != len(inventory.gpus):
        text = f"the driver shows {len(inventory.gpus)} cards, torch {facts['devices']}"
        yield Finding(
            "gpus", "fail", text, "the driver may be too old for this torch: nvidia-smi shows its CUDA version"
        )
    for card in inventory.gpus:
        yield Finding("gpus", "ok", f"{card.index}: {card.name}")


def _models(settings: Settings) -> Iterator[Finding]:
    """The models of the seeds, with all replicas, fit into the free memory: that of the cards, or of the host."""
    from teimgr.control.ledger.system_memory import free_memory_bytes
    from teimgr.control.placement.hosts import only_visible, read_nvml
    from teimgr.control.placement.planner import replica_count

    inventory = only_visible(read_nvml(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    beside = _WORKER_BYTES_ON_A_CARD if inventory.gpus else _WORKER_BYTES
    workers, needed, absent = 0, 0, []
    for seed in settings.instances:
        if (weights := weight_bytes(seed.model_id, seed.revision)) is None:
            absent.append(seed.model_id)
            continue
        replicas = replica_count(seed, inventory)
        workers += replicas
        needed += replicas * (weights + beside)
    if absent:
        text = f"not downloaded, so of unknown size: {', '.join(dict.fromkeys(absent))}"
        yield Finding("models", "warn", text, "`teimgr models check MODEL` downloads one and measures it")
    if workers:
        free = sum(card.memory_free_bytes for card in inventory.gpus) if inventory.gpus else free_memory_bytes() or 0
        place = "the cards" if inventory.gpus else "this host"
        text = f"{workers} workers of the seeds need about {gib(needed)}, {gib(free)} are free on {place}"
        if needed <= free:
            yield Finding("models", "ok", text)
        else:
            advice = "fewer replicas, smaller models or dtypes; right if the seeds run now and are what fills it"
            yield Finding("models", "warn", text, advice)


def weight_bytes(model_id: str, revision: str | None = None) -> int | None:
    """The size of the weight files that a worker would load, as they are stored; None if the model is not here."""
    from teimgr.models import hub

    try:
        local = Path(model_id) if Path(model_id).is_dir() else None
        source = None if local else hub.find_cached(model_id, revision) or hub.find_packaged(model_id)
    except TeimgrError:
        return None
    folder = local or (source.path if source else None)
    if folder is None:
        return None
    kinds = ("*.safetensors", "*.bin", "*.pt")  # by preference
    found = ([*folder.glob(kind), *folder.glob(f"*/{kind}")] for kind in kinds)
    return sum(file.stat().st_size for file in next(filter(None, found), []))


def gib(size_bytes: int) -> str:
    """Such as `1.5 GiB`."""
    return f"{size_bytes / 2**30:.1f} GiB"


CHECKS: tuple[Check, ...] = (_folders, _ports, check_limits, check_clock, _models, check_devices)
