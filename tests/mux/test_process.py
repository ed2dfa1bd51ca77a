"""The life of the mux process: its control socket, its daemons, its ways of ending."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.frame_worker import FrameWorker, hold, lengths
from tests.support.mux_process import Control, MuxProcess, client, embed, running, stub

from teimgr.auth.tls_files import TlsFiles
from teimgr.config.mux import MuxConfig
from teimgr.errors import InvalidConfig

Status = grpc.StatusCode


async def exit_status(mux: MuxProcess) -> int:
    return await asyncio.to_thread(mux.process.wait, 20)


@pytest.mark.clause("M1.1-listener")
async def test_stats_say_who_it_is_and_where_it_listens(mux: MuxProcess, control: Control) -> None:
    stats = await control.push()

    assert stats["pid"] == mux.process.pid
    assert stats["config_hash"] == mux.config.hash
    assert stats["port"] > 0
    assert stats["instances"] == 0


async def test_calls_wait_for_the_first_snapshot(start_mux: Any, start_worker: Any) -> None:
    control = await Control.connect(start_mux())
    async with client(await control.stats()) as channel:
        call = asyncio.ensure_future(stub(channel, "Embed")(embed("x")))
        _, waiting = await asyncio.wait((call,), timeout=0.5)
        assert waiting

        await control.push(running("a", await start_worker()))

        assert list((await call).embeddings) == [1.0]
    await control.close()


async def test_an_empty_snapshot_is_one_too(start_mux: Any) -> None:
    control = await Control.connect(start_mux())
    async with client(await control.push()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(channel, "Embed")(embed("x"))
        assert caught.value.code() is Status.NOT_FOUND
    await control.close()


async def test_it_stops_before_it_ever_served(start_mux: Any) -> None:
    mux = start_mux()

    mux.process.send_signal(signal.SIGTERM)

    assert await exit_status(mux) == 0


async def test_it_serves_on_without_a_daemon_and_the_next_daemon_takes_over(start_mux: Any, start_worker: Any) -> None:
    mux = start_mux()
    first = await Control.connect(mux)
    async with client(await first.push(running("a", await start_worker()))) as channel:
        await first.close()
        assert list((await stub(channel, "Embed")(embed("x"))).embeddings) == [1.0]

        second = await Control.connect(mux)
        assert (await second.stats())["instances"] == 1
        await second.push(running("b", await start_worker()))
        assert list((await stub(channel, "Embed")(embed("xx", "b"))).embeddings) == [2.0]
        await second.close()


async def test_a_line_that_is_no_json_drops_that_connection_only(control: Control, mux: MuxProcess) -> None:
    other = await Control.connect(mux)

    other.writer.write(b"what is this\n")

    assert await other.reader.read() == b""
    await other.close()
    assert (await control.stats())["pid"] == mux.process.pid


async def test_without_any_daemon_it_stops_after_the_grace(start_mux: Any) -> None:
    mux = start_mux(orphan_grace_s=0.1)

    assert await exit_status(mux) == 0
    assert not Path(mux.config.control_socket).exists()


async def test_the_grace_starts_anew_when_the_last_daemon_leaves(start_mux: Any) -> None:
    mux = start_mux(orphan_grace_s=1.0)
    control = await Control.connect(mux)
    await control.stats()
    assert mux.process.poll() is None

    await control.close()

    assert await exit_status(mux) == 0


@pytest.mark.parametrize("how", ["signal", "line"])
async def test_told_to_stop_it_finishes_what_is_in_flight(start_mux: Any, start_worker: Any, how: str) -> None:
    mux = start_mux()
    control = await Control.connect(mux)
    worker: FrameWorker = await start_worker(hold)
    async with client(await control.push(running("a", worker))) as channel:
        call = stub(channel, "Embed")(embed("x"))
        request = await worker.requests.get()

        if how == "signal":
            mux.process.send_signal(signal.SIGTERM)
        else:
            control.say({"stop": 10})
        assert await control.reader.read() == b"", "the control socket closes first"
        lengths(request)

        assert list((await call).embeddings) == [1.0]
    assert await exit_status(mux) == 0
    await control.close()


async def test_what_does_not_finish_within_the_grace_is_cancelled(start_mux: Any, start_worker: Any) -> None:
    mux = start_mux()
    control = await Control.connect(mux)
    worker: FrameWorker = await start_worker(hold)
    async with client(await control.push(running("a", worker))) as channel:
        call = stub(channel, "Embed")(embed("x"))
        request = await worker.requests.get()

        control.say({"stop": 0.05})

        assert await worker.cancels.get() == request.header.id
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await call
    assert await exit_status(mux) == 0
    await control.close()


async def test_a_second_signal_does_not_wait(start_mux: Any, start_worker: Any) -> None:
    mux = start_mux()
    control = await Control.connect(mux)
    worker: FrameWorker = await start_worker(hold)
    async with client(await control.push(running("a", worker))) as channel:
        call = stub(channel, "Embed")(embed("x"))
        await worker.requests.get()

        control.say({"stop": 3600})
        await control.reader.read()
        mux.process.send_signal(signal.SIGTERM)

        assert await exit_status(mux) == 0
        call.cancel()
    await control.close()


async def test_a_successor_may_have_the_control_socket_while_the_old_one_drains(
    start_mux: Any, start_worker: Any
) -> None:
    old = start_mux()
    control = await Control.connect(old)
    worker: FrameWorker = await start_worker(hold)
    async with client(await control.push(running("a", worker))) as channel:
        call = stub(channel, "Embed")(embed("x"))
        request = await worker.requests.get()
        control.say({"stop": 60})
        await control.reader.read()

        new = start_mux(control_socket=old.config.control_socket)
        lengths(request)
        await call
        assert await exit_status(old) == 0

        taken_over = await Control.connect(new)
        assert (await taken_over.stats())["pid"] == new.process.pid
        await taken_over.close()
    await control.close()


@pytest.mark.clause("M3.1-port-taken")
async def test_a_port_that_is_taken_ends_it_with_its_own_status(mux: MuxProcess, control: Control) -> None:
    port = (await control.stats())["port"]

    with pytest.raises(RuntimeError, match=f"cannot listen on 127.0.0.1:{port}") as caught:
        MuxProcess(port=port)

    assert caught.value.args[1] == 4


def test_a_control_socket_that_cannot_be_had_ends_it_too() -> None:
    with pytest.raises(RuntimeError, match=r"cannot listen on /no/such/folder/mux\.sock") as caught:
        MuxProcess(control_socket="/no/such/folder/mux.sock")

    assert caught.value.args[1] == 4


def test_a_bad_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mux.json"
    path.write_text(json.dumps({"host": "127.0.0.1", "port": 0, "control_socket": "x", "grpc_prot": 1}))

    ended = subprocess.run(
        [sys.executable, "-m", "teimgr.mux.process", path], capture_output=True, text=True, timeout=60
    )

    assert ended.returncode == 2
    assert "grpc_prot" in ended.stderr


def test_the_config_survives_the_way_through_its_file() -> None:
    config = MuxConfig(
        host="::1", port=9001, control_socket="/x/mux-0.sock", tls=TlsFiles(Path("c"), Path("k"), Path("a"))
    )

    assert MuxConfig.from_json(config.to_json()) == config
    assert MuxConfig.from_json(config.to_json()).hash == config.hash
    assert MuxConfig(host="::1", port=9002, control_socket="/x/mux-0.sock").hash != config.hash


@pytest.mark.parametrize("text", ["", "[]", "1", '{"host": "x"}'])
def test_what_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="mux config"):
        MuxConfig.from_json(text)
