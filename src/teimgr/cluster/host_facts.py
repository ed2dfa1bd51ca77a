"""The description of a host: its name, versions, labels, cores, memory and cards."""

from __future__ import annotations

import asyncio
import platform
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from teimgr import __version__
from teimgr.cluster.messages import NodeFacts, Versions
from teimgr.control.ledger.system_memory import free_memory_bytes, host_memory
from teimgr.control.placement.hosts import GpuInventory
from teimgr.control.placement.planner import usable_cores
from teimgr.errors import InvalidConfig, ValidationError
from teimgr.wire.fleet_tls import check_node_name

MIN_FREE_BYTES = 4 << 20
"""Minimum free disk space for the folder of a worker's socket, run file and log; below it, the host starts none."""


class HostDescription:
    """Describes this host. `name` is its name in the fleet, or empty for its host name; `folders` those of workers.

    Raises:
        InvalidConfig: the name is not a node name, as `fleet_tls` has them.
    """

    def __init__(self, name: str, labels: Mapping[str, str], cards: GpuInventory, folders: Sequence[Path] = ()) -> None:
        self.name = name or socket.gethostname().lower()
        try:
            check_node_name(self.name)
        except ValidationError as error:
            raise InvalidConfig(f"cluster.node: {error.message}") from error
        self._labels = labels
        self._cards = cards
        self._folders = folders

    async def facts(self, workers: int, *, draining: bool, service: str = "") -> NodeFacts:
        """The host as it is now; `service` as in `NodeFacts`."""
        inventory = await self._cards.read()
        total, used = host_memory()
        free = free_memory_bytes()
        return NodeFacts(
            name=self.name,
            versions=own_versions(),
            labels=dict(self._labels),
            cores=usable_cores(),
            memory_total_bytes=total,
            memory_free_bytes=total - used if free is None else free,
            cards=[asdict(card) for card in inventory.gpus],
            no_cards_reason=inventory.reason,
            workers=workers,
            draining=draining,
            service=service,
            disk_free_bytes=await asyncio.to_thread(_free_for_models),
            clock=time.time(),
            problem=await asyncio.to_thread(disk_problem, self._folders),
        )


def disk_problem(folders: Sequence[Path]) -> str:
    """Return which folder is on a full disk and what is free there; empty if none is. Blocking."""
    for folder in folders:
        free = _free_bytes(folder)
        if free is not None and free < MIN_FREE_BYTES:
            return f"its disk is full: {free >> 10} KiB are free in {folder}, {MIN_FREE_BYTES >> 10} are needed"
    return ""


def _free_for_models() -> int | None:
    """Return the free bytes in the hub's cache; None if the file system cannot be read."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return _free_bytes(Path(HF_HUB_CACHE))


def _free_bytes(folder: Path) -> int | None:
    """Return the free bytes at the place of a folder, which may be missing; None if the file system cannot be read."""
    path = folder.absolute()
    try:
        return shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free
    except OSError:
        return None


@cache
def own_versions() -> Versions:
    """Return the versions of the packages installed here, from their metadata.

    Raises:
        InvalidConfig: ray is not installed.
    """
    try:
        return Versions(
            teimgr=__version__, ray=version("ray"), python=platform.python_version(), torch=version("torch")
        )
    except PackageNotFoundError as error:
        raise InvalidConfig(
            f"cluster.address: the package {error.name} is not installed: pip install 'teimgr[cluster]'"
        ) from error
