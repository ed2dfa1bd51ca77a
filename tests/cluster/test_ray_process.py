"""Ray's process over the ends of who keeps it: adopted by the next one, unless that one has another head."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from tests.support.cluster import OneHost, needs_ray
from tests.support.daemon_process import HEAD_ADDRESS, free_ports
from tests.support.fleet import ROOT
from tests.support.polling import eventually

from teimgr.cluster.ray_process import RayProcess, library, listening_on
from teimgr.config.sections import ClusterSettings
from teimgr.control.launch.process_handle import look_up
from teimgr.spec import WorkerSpec

COMMAND = (sys.executable, "-c", "import time; time.sleep(600)")  # in the place of `ray start --block`
HEAD = "10.0.0.1:6379"


def keeper(folder: Path, head: str = HEAD) -> RayProcess:
    return RayProcess(COMMAND, os.environ, folder, folder, folder / "ray.log", head)


@pytest.fixture
async def first(tmp_path: Path) -> AsyncIterator[RayProcess]:
    """That of a process that was killed: nobody watches it."""
    made = keeper(tmp_path)
    await made.start()
    await made.release()
    yield made
    await made.stop()


async def test_the_next_one_adopts_it(first: RayProcess, tmp_path: Path) -> None:
    after = keeper(tmp_path)
    await after.start()

    assert after.pid == first.pid
    await after.stop()
    assert first.pid is not None
    assert not look_up(first.pid)


async def test_one_of_another_head_is_ended_and_replaced(first: RayProcess, tmp_path: Path) -> None:
    after = keeper(tmp_path, "10.0.0.9:6379")
    await after.start()

    assert first.pid is not None
    assert not look_up(first.pid)
    assert after.pid is not None
    assert look_up(after.pid)
    assert json.loads((tmp_path / "ray.run").read_text())["head"] == "10.0.0.9:6379"
    await after.stop()


async def test_a_run_file_of_an_earlier_version_without_a_head_is_adopted(first: RayProcess, tmp_path: Path) -> None:
    run_file = tmp_path / "ray.run"
    facts = json.loads(run_file.read_text())
    del facts["head"]
    run_file.write_text(json.dumps(facts))

    after = keeper(tmp_path)
    await after.start()

    assert after.pid == first.pid
    await after.stop()


async def test_it_is_started_again_when_it_ends(tmp_path: Path) -> None:
    ray = keeper(tmp_path)
    await ray.start()
    before = ray.pid
    assert before is not None

    os.kill(before, 9)

    await eventually(lambda: ray.pid != before and look_up(ray.pid or 0))
    await ray.stop()


PAGE = ROOT / "docs" / "how-to" / "cluster.md"
pytestmark = pytest.mark.skipif(library() is None, reason="built without a compiler")

LISTENER = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.socket(family, socket.SOCK_STREAM) as opened:
    if family == socket.AF_INET6:
        opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    opened.bind((sys.argv[1], 0))
    print(opened.getsockname()[0])
"""


@pytest.mark.parametrize(
    ("asked", "bound"),
    [("0.0.0.0", "127.0.0.9"), ("::", "::ffff:127.0.0.9"), ("127.0.0.4", "127.0.0.4"), ("::1", "::1")],
)
def test_sockets_for_all_addresses_are_bound_to_one_and_others_stay(asked: str, bound: str) -> None:
    environ = os.environ | listening_on("127.0.0.9")

    done = subprocess.run(
        [sys.executable, "-c", LISTENER, asked], env=environ, capture_output=True, text=True, timeout=30, check=True
    )

    assert done.stdout.strip() == bound


def test_what_is_preloaded_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "other.so")

    assert listening_on("10.0.0.1")["LD_PRELOAD"] == f"{library()}:other.so"


def listeners(run_dir: Path) -> set[tuple[str, int, str]]:
    """Address, port and process of each TCP socket on which Ray's processes and the bridge listen."""
    ray = psutil.Process(json.loads((run_dir / "ray.run").read_text())["pid"])
    children = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    bridges = [each for each in children if "teimgr.cluster.bridge_process" in each.cmdline()]
    assert bridges, "the bridge's sockets are among those that are checked"
    return {
        (each.laddr.ip, each.laddr.port, process.name())
        for process in [ray, *ray.children(recursive=True), *bridges]
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }


@needs_ray
@pytest.mark.slow
async def test_ray_listens_on_the_address_of_the_settings_alone_with_their_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    first, *_, last = free_ports(40)
    host = OneHost(ray_port_start=first, ray_port_end=last + 1)
    head, launcher = host.launcher()
    try:
        await launcher.start()
        await launcher.find()
        worker = await launcher.launch(WorkerSpec(name="a", model_id="fake", host="one"))
        found = listeners(host.settings.run_dir)
        await worker.stop(0)
        await launcher.release()
    finally:
        host.close()

    assert head.alarms() == [] or head.alarms()[0].startswith("cluster: no connection")
    print(sorted(found))
    assert {address.removeprefix("::ffff:") for address, _, _ in found} == {HEAD_ADDRESS}
    outside = {each for each in found if each[1] not in {host.settings.cluster.port, *range(first, last + 1)}}
    assert outside == set(), "the firewall of the document would refuse them"
    processes = {name for _, _, name in found}
    assert {"gcs_server", "raylet"} <= processes


def test_the_rule_of_the_document_has_the_ports_of_its_settings(tmp_path: Path) -> None:
    text = PAGE.read_text()
    (rule,) = re.findall(r"^```text\n(table .*?)^```$", text, re.MULTILINE | re.DOTALL)
    settings = [
        ClusterSettings(**tomllib.loads(block)["cluster"])
        for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    ]
    (named,) = [each for each in settings if each.ray_ports]

    assert f"{{ {named.port}, {named.enrolment}, {named.ray_ports[0]}-{named.ray_ports[-1]} }}" in rule

    if os.geteuid() == 0 and (nft := shutil.which("nft")):
        (tmp_path / "rule").write_text(rule)
        done = subprocess.run([nft, "--check", "--file", tmp_path / "rule"], capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (0, "") or "Operation not permitted" in done.stderr
