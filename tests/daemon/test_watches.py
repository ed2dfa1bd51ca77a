"""A watched configuration file: swapped as Kubernetes swaps a ConfigMap, and written in place. Alarms of full disks."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from teimgr.config.sources import digest_of
from teimgr.daemon.watches import BY, ConfigWatch, DiskWatch, Notifier, disk_usage
from teimgr.errors import InvalidConfig
from tests.support import models
from tests.support.daemon_process import WarmDaemonProcess, toml
from tests.support.polling import until


class Mount:
    """A volume of a ConfigMap: the file is a link to `..data/FILE`, and `..data` one to a folder of this version."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file = folder / name
        self._folder = folder
        self._versions = 0

    def swap(self, content: str) -> None:
        """Have the file be another, as the kubelet does: a new folder, and its link renamed over the one before."""
        self._versions += 1
        version = self._folder / f"..2026_{self._versions}"
        version.mkdir()
        (version / self.file.name).write_text(content)
        link = self._folder / "..data_tmp"
        link.symlink_to(version.name)
        link.rename(self._folder / "..data")
        if not self.file.is_symlink():
            self.file.unlink(missing_ok=True)
            self.file.symlink_to(Path("..data") / self.file.name)


class Seen:
    """What was reloaded, and by whom; a content that is "broken" is refused."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.tried = digest_of(file.read_bytes())
        self.contents: list[str] = []

    async def reload(self) -> object:
        content = self._file.read_text()
        self.tried = digest_of(content.encode())
        self.contents.append(content)
        if content == "broken":
            raise InvalidConfig("it is broken")
        return None


def watched(folder: Path) -> tuple[Path, Seen, ConfigWatch]:
    """A file, what is reloaded of it, and its watch."""
    file = folder / "t.toml"
    file.write_text("a")
    seen = Seen(file)
    return file, seen, ConfigWatch(file, 5, seen)


async def look_twice(watch: ConfigWatch) -> None:
    await watch.look()
    await watch.look()


async def test_a_swapped_link_is_reloaded_once(tmp_path: Path) -> None:
    mount = Mount(tmp_path, "t.toml")
    mount.swap("a")
    seen = Seen(mount.file)
    watch = ConfigWatch(mount.file, 5, seen)
    await look_twice(watch)
    assert seen.contents == []
    mount.swap("b")
    for _ in range(3):
        await look_twice(watch)
    assert seen.contents == ["b"]
    mount.swap("b")  # another object of the same content
    await look_twice(watch)
    assert seen.contents == ["b"]


async def test_a_refused_file_is_tried_once_and_the_one_before_is_taken_again(tmp_path: Path) -> None:
    mount = Mount(tmp_path, "t.toml")
    mount.swap("a")
    seen = Seen(mount.file)
    watch = ConfigWatch(mount.file, 5, seen)
    for content in ("broken", "a"):
        mount.swap(content)
        await look_twice(watch)
        await look_twice(watch)
    assert seen.contents == ["broken", "a"]  # the second one ends the alarm


async def test_a_file_that_is_being_written_is_left_until_it_stays_the_same(tmp_path: Path) -> None:
    file, seen, watch = watched(tmp_path)
    await look_twice(watch)
    for content in ("ab", "abc"):
        file.write_text(content)
        await watch.look()
    assert seen.contents == []
    await watch.look()
    assert seen.contents == ["abc"]


async def test_what_someone_else_has_reloaded_is_not_reloaded_again(tmp_path: Path) -> None:
    file, seen, watch = watched(tmp_path)
    file.write_text("ab")
    await seen.reload()
    await look_twice(watch)
    assert seen.contents == ["ab"]


async def test_a_file_that_is_gone_or_no_file_is_an_alarm_while_it_is(tmp_path: Path) -> None:
    file, seen, watch = watched(tmp_path)
    file.unlink()
    await watch.look()
    assert watch.alarms() == [f"{file}: changes of the configuration are not seen: No such file or directory"]
    os.mkfifo(file)
    await watch.look()
    assert watch.alarms() == [f"{file}: changes of the configuration are not seen: {file} is not a regular file"]
    file.unlink()
    file.write_text("ab")
    await look_twice(watch)
    assert (watch.alarms(), seen.contents) == ([], ["ab"])


async def test_the_task_ends_with_its_block_and_there_is_none_without_a_file_or_an_interval(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("a")
    before = asyncio.all_tasks()
    async with ConfigWatch(file, 5, Seen(file)).running():
        assert len(asyncio.all_tasks() - before) == 1
    assert asyncio.all_tasks() == before
    for of, interval_s in ((None, 5), (file, 0)):
        async with ConfigWatch(of, interval_s, Seen(file)).running():
            assert asyncio.all_tasks() == before


def _last(client: Any, kind: str) -> Any:
    found = list(client.events(kinds=[kind], last=10, follow=False))
    return found[-1] if found else None


@pytest.mark.timeout(180)
def test_a_daemon_takes_a_swapped_config_map_and_leaves_all_as_it_was_for_a_broken_one(tmp_path: Path) -> None:
    seed = {"name": "mini", "model_id": str(models.build("bert", tmp_path))}
    with WarmDaemonProcess(config_watch_secs=1, prune_seeds=True) as daemon, daemon.client() as client:
        mount = Mount(daemon.folder, "teimgr.toml")
        good = daemon.settings | {"instances": [seed]}

        mount.swap(toml(good | {"aliases": {"x": "mini"}, "max_instances": 5}))
        event = until(lambda: _last(client, "reloaded"), "the event")
        assert (event.reason, event.by) == (
            "created mini; at once: aliases.x; at the next start: max_instances",
            BY,
        )
        assert [each.name for each in client.list()] == ["mini"]

        mount.swap(toml(good | {"instances": [seed, {"name": "other"}]}))
        refused = until(lambda: _last(client, "reload_refused"), "the refusal")
        assert "model_id" in refused.reason
        assert refused.by == BY
        assert [each.name for each in client.list()] == ["mini"]
        (alarm,) = [each for each in client.health().details["alarms"] if "not reloaded" in each]
        assert refused.reason in alarm

        mount.swap(toml(daemon.settings))
        until(lambda: client.list() == [], "the end of the instance")
        until(lambda: "not reloaded" not in str(client.health().details["alarms"]), "the end of the alarm")
        assert _last(client, "reloaded").reason == "deleted mini; at once: aliases.x"


async def test_a_disk_is_an_alarm_at_90_and_at_95_percent_with_its_folders_by_name_and_path() -> None:
    used = {"/var/state": (1, 0.91), "/var/logs": (1, 0.91), "/models": (2, 0.96), "/run/teimgr": (3, 0.5)}

    def usage(folder: Path) -> tuple[int, float, int]:
        if str(folder) not in used:
            raise PermissionError(folder)
        return *used[str(folder)], 3 << 20

    folders = {name: Path(path) for name, path in zip("abcd", used, strict=True)} | {"e": Path("/forbidden")}
    watch = DiskWatch(folders, usage)
    watch.look()
    assert watch.alarms() == [
        "the disk of a (/var/state), b (/var/logs) is over 90 % full: 3 MiB are left",
        "the disk of c (/models) is over 95 % full: 3 MiB are left",
    ]
    [samples] = (await watch.page()).values()
    assert {each.labels["folders"]: each.value for each in samples}["c (/models)"] == 0.96
    used |= {"/var/state": (1, 0.5), "/models": (2, 0.5)}
    watch.look()
    assert watch.alarms() == []


def test_a_folder_that_is_still_to_be_made_counts_as_the_disk_it_will_be_on(tmp_path: Path) -> None:
    disk, used, left = disk_usage(tmp_path / "a" / "b")
    assert (disk, 0 <= used <= 1, left > 0) == (tmp_path.stat().st_dev, True, True)


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket that systemd would listen on, named in the environment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(10.0)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield sock


def received(systemd: socket.socket) -> list[str]:
    return systemd.recv(4096).decode().split("\n")


async def test_ready_while_the_body_runs_and_stopping_after_it(systemd: socket.socket) -> None:
    notifier = Notifier()
    async with notifier.serving("2 instances"):
        assert received(systemd) == ["READY=1", "STATUS=2 instances"]
    assert received(systemd) == ["STOPPING=1"]


async def test_the_watchdog_is_fed_from_the_event_loop(systemd: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    notifier = Notifier()
    async with notifier.serving(""):
        received(systemd)
        for _ in range(3):
            assert await asyncio.to_thread(received, systemd) == ["WATCHDOG=1"]


def test_a_watchdog_of_another_process_is_not_ours(systemd: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert Notifier().watchdog_s is None


def test_children_do_not_inherit_the_socket(systemd: socket.socket) -> None:
    Notifier()
    assert "NOTIFY_SOCKET" not in os.environ


def test_a_reload_names_its_moment(systemd: socket.socket) -> None:
    Notifier().reloading()
    first, second = received(systemd)
    assert first == "RELOADING=1"
    assert int(second.removeprefix("MONOTONIC_USEC=")) > 0


def test_without_systemd_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    Notifier().send("READY=1")


def test_a_systemd_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    Notifier().send("READY=1")
