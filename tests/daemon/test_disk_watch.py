"""Alarms of disks that are nearly full."""

from __future__ import annotations

from pathlib import Path

from teimgr.daemon.disk_watch import DiskWatch, disk_usage


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
