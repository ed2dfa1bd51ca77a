"""The launcher of a cluster, on a real Ray of one host, with a scripted worker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest
from tests.support.cluster import OneHost, needs_ray, one_host
from tests.support.fakes.worker import fake_id
from tests.support.fleet import LIMIT_S
from tests.support.polling import eventually

from teimgr.cluster.enrolment import JoinToken
from teimgr.cluster.head import ClusterHead, ClusterInventory, Member
from teimgr.cluster.messages import HeldWorker
from teimgr.cluster.ray_launcher import RayLauncher
from teimgr.control.launch.control_link import identify
from teimgr.control.launch.launcher import WorkerHandle
from teimgr.control.launch.process_handle import LaunchFailed, look_up
from teimgr.errors import Code, NoHost, Unavailable
from teimgr.spec import WorkerSpec

__all__ = ["one_host"]

pytestmark = [needs_ray, pytest.mark.slow]


def spec(flags: str = "", name: str = "a", **values: object) -> WorkerSpec:
    return WorkerSpec(name=name, model_id=fake_id(flags), host="one", **values)  # type: ignore[arg-type]


@pytest.fixture
async def daemon(one_host: OneHost) -> AsyncIterator[tuple[ClusterHead, RayLauncher]]:
    """The part of a new daemon; its predecessor's workers are gone."""
    head, launcher = one_host.launcher()
    await launcher.start()
    found = await launcher.find()
    await launcher.adopt(found.alive, lambda spec: False)
    yield head, launcher
    await launcher.release()


@pytest.fixture
def launcher(daemon: tuple[ClusterHead, RayLauncher]) -> RayLauncher:
    return daemon[1]


async def test_a_worker_is_forked_by_its_hosts_nursery_and_answers_as_itself(launcher: RayLauncher) -> None:
    handle = await launcher.launch(spec())

    status = await identify(handle.socket, LIMIT_S)

    assert status is not None
    assert (status.pid, status.incarnation, status.spec_hash) == (handle.pid, handle.incarnation, handle.spec.hash)
    assert psutil.Process(handle.pid).name() == "tei:a"
    assert (await handle.activity_s() or 0) > 0, "its host tells how much it has worked"
    await handle.stop(0)
    assert await handle.activity_s() is None


async def test_an_exit_has_its_status_and_the_last_lines_of_the_log(launcher: RayLauncher) -> None:
    exit = await (await launcher.launch(spec("exit-at-once=7"))).wait()
    assert (exit.status, exit.report, exit.log_tail) == (7, None, "leaving at once")
    assert exit.log is not None
    assert exit.log.read(1000)[-1] == "leaving at once"

    handle = await launcher.launch(spec())
    os.kill(handle.pid, signal.SIGKILL)
    assert (await handle.wait()).status == -signal.SIGKILL


async def test_a_stop_ends_the_worker_and_its_actor(launcher: RayLauncher) -> None:
    handle = await launcher.launch(spec())
    assert await identify(handle.socket, LIMIT_S)  # before it SIGTERM has no handler

    exit = await handle.stop(LIMIT_S)

    assert exit.status == 0
    assert not look_up(handle.pid)
    assert not (await launcher.find()).alive


async def test_a_replica_runs_at_most_twice_in_the_whole_cluster_and_a_third_waits_for_one_to_end(
    launcher: RayLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [await launcher.launch(spec()), await launcher.launch(spec())]

    with monkeypatch.context() as hasty:
        hasty.setattr(launcher, "_placement_limit_s", 0.1)
        with pytest.raises(LaunchFailed, match=r"two copies of .* still running after 0\.1 s"):
            await launcher.launch(spec())
    waiting = asyncio.create_task(launcher.launch(spec()))
    other = await launcher.launch(spec(replica=1))
    assert not waiting.done()
    await both[0].stop(0)
    third = await waiting

    await asyncio.gather(*(each.stop(0) for each in (both[1], third, other)))


async def test_a_worker_ends_with_its_actor(daemon: tuple[ClusterHead, RayLauncher]) -> None:
    head, launcher = daemon
    handle = await launcher.launch(spec())

    await head.bridge.call("end", name=handle.name)

    exit = await handle.wait()
    assert exit.report is not None
    assert exit.report.code == Code.BACKEND_UNAVAILABLE
    assert "lost with its actor on host one" in exit.report.message
    await eventually(lambda: not look_up(handle.pid))


async def test_a_worker_for_no_host_is_refused_with_the_reason(daemon: tuple[ClusterHead, RayLauncher]) -> None:
    head, launcher = daemon
    with pytest.raises(NoHost, match="host 'two' takes no workers: it is not in the cluster"):
        await launcher.launch(replace(spec(), host="two"))

    head.members = {**head.members, "two": Member(name="two", ray_id="f" * 56, address="10.9.9.9")}
    with pytest.raises(NoHost, match="host 'two'"):
        await launcher.launch(replace(spec(), host="two"))


async def test_what_ray_does_not_place_in_time_is_given_up_and_leaves_nothing(one_host: OneHost) -> None:
    head, launcher = one_host.launcher(placement_limit_s=0.001)
    await launcher.start()
    await launcher.find()

    with pytest.raises(NoHost, match="Ray placed no actor on host 'one' within"):
        await launcher.launch(spec())

    await eventually(lambda: _no_actors(head))
    await launcher.release()


async def _no_actors(head: ClusterHead) -> bool:
    return not await head.bridge.call("names", prefix="worker/")


async def test_a_successor_is_connected_to_ray_before_its_predecessor_leaves_and_finds_all_that_it_left(
    one_host: OneHost,
) -> None:
    head, launcher = one_host.launcher()
    await launcher.start()
    await launcher.find()
    handle = await launcher.launch(spec())
    next_head, successor = one_host.launcher()

    await next_head.prepare()
    token = JoinToken.parse(await head.enrolment.join_token("two", 60))  # of which it learns when it starts
    await launcher.release()
    await successor.start()

    assert [each.pid for each in (await successor.find()).alive] == [handle.pid]
    assert next_head.enrolment.enrolment.check(token, "two").node == "two"
    await successor.adopt((await successor.find()).alive, lambda spec: False)
    await successor.release()


async def test_a_cancelled_launch_leaves_no_process_behind(daemon: tuple[ClusterHead, RayLauncher]) -> None:
    head, launcher = daemon
    launching = asyncio.create_task(launcher.launch(spec(name="cancelled")))
    await eventually(lambda: head.bridge.call("names", prefix="worker/cancelled"))

    launching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launching

    await eventually(lambda: _no_actors(head))
    await eventually(lambda: not [each for each in psutil.process_iter() if each.name() == "tei:cancelled"])


async def test_the_next_daemon_takes_over_what_lives_and_learns_what_ended(one_host: OneHost) -> None:
    _, before = one_host.launcher()
    await before.start()
    await before.find()
    lives, ends = await before.launch(spec()), await before.launch(spec(name="b"))
    await before.release()  # as where the daemon is killed
    os.kill(ends.pid, signal.SIGKILL)
    await eventually(lambda: not look_up(ends.pid))

    _, after = one_host.launcher()
    await after.start()
    found = await after.find()
    (adopted,) = await after.adopt(found.alive, lambda spec: True)

    assert (adopted.handle.pid, adopted.handle.incarnation) == (lives.pid, lives.incarnation)
    assert adopted.status.pid == lives.pid
    assert adopted.handle.spec == lives.spec
    assert [(each.instance, each.pid) for each in found.ended if each.pid == ends.pid] == [("b", ends.pid)]
    assert (await adopted.handle.stop(LIMIT_S)).status is None or not look_up(lives.pid)
    await after.release()


async def test_the_next_agent_takes_over_the_workers_of_one_that_ended(one_host: OneHost) -> None:
    head, launcher = one_host.launcher()
    await launcher.start()
    await launcher.find()
    lives, ends = await launcher.launch(spec()), await launcher.launch(spec(name="b"))
    await head.agent.close()
    assert await identify(lives.socket, LIMIT_S)  # it serves without an agent
    os.kill(ends.pid, signal.SIGKILL)

    await head.agent.start()

    assert (await ends.wait()).status in (None, -signal.SIGKILL)
    await eventually(lambda: head.agent.workers == 1)
    assert look_up(lives.pid)
    await lives.stop(0)
    await launcher.release()


async def test_the_inventory_has_the_host_with_cores_memory_and_versions(
    daemon: tuple[ClusterHead, RayLauncher],
) -> None:
    inventory = await ClusterInventory(daemon[0]).read()

    (host,) = inventory.hosts
    assert (host.name, host.address, host.problem) == ("one", "127.0.0.2", "")
    assert host.cores == len(os.sched_getaffinity(0)) or host.cores >= 1
    assert host.memory_total_bytes > host.memory_free_bytes > 0
    assert set(host.versions) == {"teimgr", "ray", "python", "torch"}
    assert inventory.reason == "one: none in this test"


async def test_a_start_is_by_the_clock_of_the_daemon_and_not_by_that_of_the_host(one_host: OneHost) -> None:
    head, _ = one_host.launcher()
    late = Member(name="two", ray_id="f" * 56, address="10.9.9.9", clock_ahead_s=-7200.0)
    head.members = {"two": late, "three": replace(late, name="three", clock_ahead_s=None)}
    held = HeldWorker(
        spec="", incarnation="i", pid=1, start_time=2, socket="", run_dir="", log_path="", started_at=1000.0
    )

    assert [head.by_own_clock(host, held).started_at for host in ("two", "three", "unknown")] == [
        8200.0,
        1000.0,
        1000.0,
    ]


@pytest.mark.long
async def test_a_killed_ray_is_started_again_without_what_it_left(one_host: OneHost) -> None:
    head, launcher = one_host.launcher()
    await launcher.start()
    await launcher.find()
    run_file = one_host.settings.run_dir / "ray.run"
    ray = psutil.Process(json.loads(run_file.read_text())["pid"])
    (server,) = [each for each in ray.children(recursive=True) if each.name() == "gcs_server"]

    # As where another host of the cluster runs on this machine.
    other = ["raylet", "-c", "import time; time.sleep(600)", f"--gcs-address={one_host.settings.cluster.address}"]

    with subprocess.Popen(other, executable=sys.executable) as other_host:  # noqa: ASYNC220  as fast as any other way
        ray.kill()

        await eventually(lambda: not look_up(server.pid), 10)
        await eventually(lambda: not head.bridge.connected.is_set())
        await head.bridge.connected.wait()
        other_host.kill()
    handle = await _launched(launcher)
    assert await identify(handle.socket, LIMIT_S)
    await handle.stop(0)
    await launcher.release()


async def _launched(launcher: RayLauncher) -> WorkerHandle:
    """A worker, as soon as the host is in the list of the new Ray."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with suppress(NoHost, LaunchFailed, Unavailable):
                return await launcher.launch(spec(name="after"))
            await asyncio.sleep(0.2)
