"""The system under test of failures of a cluster: a daemon, two joined hosts in network namespaces, and the truth about
them, as a fault run has it (`world.py`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from teimgr.control.launch.process_handle import WorkerRunFile, all_worker_paths, look_up
from teimgr.errors import TeimgrError
from tests.faults.host_network import HostNetwork, HostSpace, SmallDisk
from tests.faults.world import MODELS, World
from tests.support.cluster import NodeProcess
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess, cluster_table, kill_ray, tail
from tests.support.polling import eventually

HEAD = "one"
NAMES = ("two", "three")
HOSTS = {HEAD, *NAMES}
REPLICAS = 3
LIMIT_S = 240.0
_PAUSE_S = 0.05
_LEFT_OVER_S = 60.0
# What the fleet has besides its workers, by a word of the command line, and how many.
_PARTS = {"teimgr.mux.process": 1, "teimgr.cluster.bridge_process": 1, "ray.scripts.scripts": len(HOSTS)}


@dataclass
class ClusterWorld(World):
    """A cluster. `note` is what the present fault has to tell; `store` is that of Ray's tables."""

    network: HostNetwork = field(default_factory=lambda: HostNetwork(len(NAMES)))
    store: str = "memory"
    nodes: dict[str, NodeProcess] = field(default_factory=dict)
    note: str = ""
    disk: SmallDisk | None = None
    """That of the host `two`."""
    _former: list[DaemonProcess] = field(default_factory=list)

    @classmethod
    def on(cls, network: HostNetwork, folder: Path, store: str) -> ClusterWorld:
        """A started daemon on the head of the network, without other hosts. Blocking."""
        table = cluster_table(network.head, HEAD, store=store)
        daemon = WarmDaemonProcess(
            cluster=table, orphan_grace_secs=60, restart_backoff_secs=0.5, restart_backoff_max_secs=2
        )
        daemon.listen_limit_s = LIMIT_S
        made = cls.make(folder, 1, daemon, list(MODELS))
        made.network, made.store = network, store
        return made

    async def open(self) -> None:
        """Join the hosts. `fleet` gets a replica on each, `neighbour` its only one on the last."""
        self.disk = SmallDisk(self.daemon.folder / "two")
        self.disk.__enter__()
        for name, space in self.spaces.items():
            node = self.nodes[name] = NodeProcess(self.daemon, name, space.address)
            node.program = "teimgr"
            node.within = space.within(self.daemon.folder / "run")
            await asyncio.to_thread(node.start)
        await self.all_hosts()
        await self.create("fleet", "red", replicas=REPLICAS)
        await self.create("neighbour", "blue", node="three")
        await self.whole(HOSTS)
        await self.converged(LIMIT_S)

    def close(self) -> None:
        """Kill what is left. Blocking."""
        for name, space in self.spaces.items():
            space.kill_all()
            if process := self.nodes[name].process if name in self.nodes else None:
                process.wait()
        if self.disk is not None:
            self.disk.__exit__()
        for daemon in (self.daemon, *self._former):
            daemon.close()

    @property
    def spaces(self) -> dict[str, HostSpace]:
        return dict(zip(NAMES, self.network.hosts, strict=True))

    def log(self) -> str:
        """The ends of the logs of all hosts, and of Ray on the head."""
        run = self.daemon.folder / "run"
        files = [path for path in (run / "ray.log", run / "bridge.log") if path.exists()]
        parts = [("the daemon", self.daemon.log(60)), *((path.name, tail(path, 20)) for path in files)]
        parts += [(each.name, each.log()[-4000:]) for each in self.nodes.values()]
        return "\n".join(f"── {name}\n{text}" for name, text in parts)

    # Hosts and workers

    async def hosts(self) -> dict[str, dict[str, Any]]:
        """By name, as REST has them; none where it does not answer."""
        with suppress(TeimgrError, OSError):
            async with self.client(5.0) as client:
                return {each["name"]: dict(each) for each in (await client.hosts())["hosts"]}
        return {}

    async def usable(self, names: set[str]) -> None:
        """Wait until exactly these hosts take workers."""

        async def holds() -> bool:
            await asyncio.sleep(_PAUSE_S)
            return {name for name, each in (await self.hosts()).items() if not each["problem"]} == names

        await eventually(holds, LIMIT_S)

    async def problem_of(self, host: str) -> str:
        """Wait until a host is listed and takes no workers; the result is why."""
        problem = ""

        async def holds() -> bool:
            nonlocal problem
            await asyncio.sleep(_PAUSE_S)
            problem = (await self.hosts()).get(host, {}).get("problem") or ""
            return bool(problem)

        await eventually(holds, LIMIT_S)
        return problem

    async def all_hosts(self) -> None:
        await self.usable(HOSTS)

    async def workers(self, instance: str = "fleet") -> dict[int, str]:
        """Pid and host of each running worker that no fault has ended."""
        with suppress(TeimgrError, OSError):
            async with self.client(5.0) as client:
                found = (await client.get(instance)).details["workers"]
            return {
                each["pid"]: each["node"]
                for each in found
                if each["pid"] and each["state"] == "running" and not self._has_ended(each["pid"])
            }
        return {}

    async def on_host(self, host: str) -> int:
        """The pid of a worker of `fleet` on a host."""
        return next(pid for pid, node in (await self.workers()).items() if node == host)

    async def whole(self, hosts: set[str] | None = None) -> dict[int, str]:
        """Wait for all replicas of `fleet`, on exactly `hosts` where given; their pids and hosts."""
        found: dict[int, str] = {}

        async def holds() -> bool:
            nonlocal found
            await asyncio.sleep(_PAUSE_S)
            found = await self.workers()
            return len(found) == REPLICAS and (hosts is None or set(found.values()) == hosts)

        await eventually(holds, LIMIT_S)
        return found

    async def spread(self) -> None:
        """All hosts take workers, and each has a replica again."""
        await self.all_hosts()
        if set((await self.workers()).values()) != HOSTS:
            async with self.client(LIMIT_S) as client:
                await client.restart("fleet", rolling=True, wait=True)
        await self.whole(HOSTS)

    def end_worker(self, pid: int) -> None:
        """Kill a worker, which does not count from now on."""
        self.end(pid)
        os.kill(pid, signal.SIGKILL)

    async def end_workers_of(self, *hosts: str) -> None:
        """Note that a fault ends all workers of these hosts."""
        for instance in self.wanted:
            for pid, node in (await self.workers(instance)).items():
                if node in hosts:
                    self.end(pid)

    async def gone(self, pid: int) -> None:
        await eventually(lambda: not look_up(pid), LIMIT_S)

    # Changes of the machine

    async def lose_host(self, name: str) -> None:
        """SIGKILL to all processes of a joined host."""
        await self.end_workers_of(name)
        self.spaces[name].kill_all()
        await asyncio.to_thread(self.nodes[name].kill)

    async def lose_head(self) -> None:
        """SIGKILL to all processes of the daemon's host."""
        await self.end_workers_of(*HOSTS)  # with its tables in memory, Ray forgets those of other hosts too
        own = _network_of("self")
        processes = await asyncio.to_thread(self.daemon.processes)
        self.daemon.kill()
        await asyncio.to_thread(kill_ray, self.daemon.folder / "run")
        for process in processes:
            with suppress(psutil.NoSuchProcess, FileNotFoundError):
                if _network_of(str(process.pid)) == own:
                    process.kill()

    async def replace_daemon(self, address: str) -> None:
        """Start a daemon in another folder, as on another host, of the copies that `docs/how-to/cluster.md` names."""
        old, cluster = self.daemon, dict(self.daemon.settings["cluster"])
        cluster["address"] = f"{address}:{cluster['address'].rpartition(':')[2]}"
        new = WarmDaemonProcess(**old.settings | {"cluster": cluster})
        new.api_port, new.grpc_port, new.listen_limit_s = old.api_port, old.grpc_port, old.listen_limit_s
        new.settings["state_file"] = str(new.folder / "state.toml")
        for name in ("state.toml", "ray-token"):
            shutil.copy(old.folder / name, new.folder / name)
        shutil.copytree(old.folder / "fleet", new.folder / "fleet")
        self._former.append(old)
        self.daemon = new
        await asyncio.to_thread(new.start)

    # Invariants

    async def check_left_over(self) -> None:
        """Note a breach unless processes and run files of all hosts are those of the workers that are wanted."""
        end = time.monotonic() + _LEFT_OVER_S
        while wrong := await self._left_over():
            if time.monotonic() > end:
                self.breaches.append(wrong)
                return
            await asyncio.sleep(0.5)

    async def _left_over(self) -> str:
        known: defaultdict[str, set[int]] = defaultdict(set)
        async with self.client() as client:
            for instance in await client.list():
                for each in filter(lambda worker: worker["pid"], instance.details["workers"]):
                    known[each["node"]].add(each["pid"])
        return await asyncio.to_thread(self._difference_of_files, known) or await asyncio.to_thread(
            self._difference_of_processes, set().union(*known.values())
        )

    def _difference_of_files(self, known: Mapping[str, set[int]]) -> str:
        for host in HOSTS:
            folder = self.daemon.folder if host == HEAD else self.nodes[host].state_dir
            files = [WorkerRunFile.read(paths.run_file) for paths in all_worker_paths(folder / "run")]
            found = {each.pid if each else 0 for each in files}
            if found != known.get(host, set()):
                return f"run files on {host} are those of {sorted(found)}, workers are {sorted(known.get(host, ()))}"
        return ""

    def _difference_of_processes(self, known: set[int]) -> str:
        workers, parts = set(), Counter[str]()
        every = {each.pid: each for daemon in (self.daemon, *self._former) for each in daemon.processes()}
        for pid, process in every.items():
            with suppress(psutil.NoSuchProcess):
                if process.name().startswith("tei:"):
                    workers.add(pid)
                command = " ".join(process.cmdline())
                parts.update(part for part in _PARTS if part in command)
        if workers != known:
            return f"worker processes are {sorted(workers)}, those of the fleet {sorted(known)}"
        return "" if dict(parts) == _PARTS else f"processes besides workers are {dict(parts)}, expected {_PARTS}"

    async def end_in_order(self) -> None:
        """Delete the instances, have the hosts leave, stop the daemon; note a breach where anything is left."""
        for name in tuple(self.wanted):
            await self.delete(name)
        for node in self.nodes.values():
            assert node.process is not None
            node.process.send_signal(signal.SIGTERM)
        for node in self.nodes.values():
            assert node.process is not None
            status = await asyncio.to_thread(node.process.wait, LIMIT_S)
            if status != 0:
                self.breaches.append(f"host {node.name} left with status {status}")
        if (status := await asyncio.to_thread(self.daemon.stop)) != 0:
            self.breaches.append(f"the daemon ended with status {status}")

        def left() -> list[str]:
            found = [each for daemon in (self.daemon, *self._former) for each in daemon.processes()]
            return [str(each) for each in found]

        end = time.monotonic() + _LEFT_OVER_S
        while found := await asyncio.to_thread(left):
            if time.monotonic() > end:
                self.breaches.append(f"left after an orderly end: {found}")
                return
            await asyncio.sleep(0.5)


def _network_of(pid: str) -> Path:
    """The network namespace of a process."""
    return Path(f"/proc/{pid}/ns/net").readlink()
