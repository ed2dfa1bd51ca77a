"""From loading to its exit: a worker's reports, its files, and its exit status."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import struct
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from tests.support.hub_server import SHA, Hub
from tests.support.models import build, build_classifier
from tests.support.models.files import edit
from tests.support.polling import eventually
from tests.support.worker_process import EXEC, FORKED, LIMIT_S, WorkerLink, WorkerProcess, arrow, table

from teimgr.control.launch.control_link import identify
from teimgr.errors import Code
from teimgr.observability.logs import STACKS_SIGNAL
from teimgr.wire.frames import Flag, FrameType, Method


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A model that never finishes loading, where its code is trusted: that sleeps."""
    build("bert", tmp_path)
    edit(tmp_path / "config.json", auto_map={"AutoModel": "endless.Endless"})
    (tmp_path / "endless.py").write_text("import time\n\ntime.sleep(3600)\n")
    return tmp_path


async def test_a_watcher_hears_of_loading_of_ready_and_of_draining(tiny: Path) -> None:
    with WorkerProcess(tiny) as worker:
        link = await worker.link()
        watch = link.post(Method.WATCH)

        loading = (await link.answer(watch)).json
        ready = (await link.answer(watch)).json
        worker.process.send_signal(signal.SIGTERM)
        draining = (await link.answer(watch)).json

        assert await worker.exit() == 0
        await link.closed()
        assert [facts["state"] for facts in (loading, ready, draining)] == ["loading", "ready", "draining"]
        assert loading["model"] is None
        assert ready["model"]["model_id"] == str(tiny)
        assert ready["model"]["dimension"] == 32
        assert ready["model"]["max_input_length"] == 96
        assert not (worker.folder / "inc-1.exit").exists()


async def test_watchers_hear_that_a_download_gets_on(tiny: Path, tmp_path: Path) -> None:
    files = {str(path.relative_to(tiny)): path.read_bytes() for path in tiny.rglob("*") if path.is_file()}
    with Hub("somebody/tiny", files) as hub:
        hub.open.clear()
        environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        with WorkerProcess("somebody/tiny", environ=environ) as worker:
            link, watch = await worker.watcher("downloading")
            hub.open.set()

            ready = await link.state(watch, "ready")

            assert (ready["model"]["model_sha"], ready["model"]["commit"]) == (None, SHA)
            link.close()


async def test_while_it_loads_calls_are_unavailable_and_threads_are_remembered(endless: Path) -> None:
    with WorkerProcess(endless, trust_remote_code=True) as worker:
        link, watch = await worker.watcher("loading")

        for method in (Method.EMBED, Method.INFO, Method.PROBE, Method.DECODE):
            assert (await link.ask(method)).error.code is Code.BACKEND_UNAVAILABLE
        assert (await link.ask(Method.THREADS, b'{"threads": 2, "most": 2}')).reply == b""

        assert (await link.answer(watch)).json["threads"] == 2
        assert (await link.ask(Method.STATS)).json["calls"] == 0
        link.close()


@pytest.mark.parametrize("how", [EXEC, FORKED], ids=["exec", "fork"])
async def test_a_stop_while_it_loads_ends_it_at_once(endless: Path, how: tuple[str, str]) -> None:
    with WorkerProcess(endless, how, trust_remote_code=True) as worker:
        link, _ = await worker.watcher("loading")
        worker.process.send_signal(signal.SIGTERM)

        assert await worker.exit() == 0
        await link.closed()


async def test_drain_answers_what_is_inside_refuses_what_comes_and_exits(tiny: Path) -> None:
    with WorkerProcess(tiny, max_concurrent_requests=1, max_waiting=4) as worker:
        link, _ = await worker.watcher("ready")
        ids = [link.embed(flags=Flag.WAIT) for _ in range(55)]
        drain = link.post(Method.DRAIN, b'{"grace_s": 30}')
        await link.answer(drain)
        late = link.embed(flags=Flag.WAIT)

        answers = await link.answers(ids)

        assert all(len(answer.vector) == 32 for answer in answers)
        assert await worker.exit() == 0
        await link.closed()
        if late in link.arrived:
            assert (await link.answer(late)).error.code is Code.BACKEND_UNAVAILABLE


async def test_a_terminate_signal_drains_too(tiny: Path) -> None:
    with WorkerProcess(tiny, max_concurrent_requests=1, max_waiting=4) as worker:
        link, _ = await worker.watcher("ready")
        ids = [link.embed(flags=Flag.WAIT) for _ in range(300)]
        await link.ask(Method.INFO)  # they are all inside
        worker.process.send_signal(signal.SIGTERM)

        assert all(len(answer.vector) == 32 for answer in await link.answers(ids))
        assert await worker.exit() == 0
        await link.closed()


async def test_large_answers_reach_a_slow_reader_before_the_exit(tiny: Path) -> None:
    with WorkerProcess(tiny) as worker:
        link, _ = await worker.watcher("ready")
        link.read(False)
        large = [link.post(Method.EMBED_ARROW, arrow(["a"] * 40_000, noop=True), flags=Flag.WAIT) for _ in range(4)]
        drain = link.post(Method.DRAIN, b'{"grace_s": 30}')
        other = await worker.link()
        await other.closed()  # it has drained and closes its links
        link.read(True)

        assert [table(answer.reply).num_rows for answer in await link.answers(large)] == [40_000] * 4
        assert (await link.answer(drain)).reply == b""
        assert await worker.exit() == 0
        await link.closed()


async def test_a_second_terminate_signal_ends_the_waiting(tiny: Path) -> None:
    with WorkerProcess(tiny) as worker:
        link, watch = await worker.watcher("ready")
        for _ in range(8):
            link.post(Method.EMBED_ARROW, arrow(["rain " * 40] * 50_000), flags=Flag.WAIT | Flag.BULK)
        await link.calls()  # they are all read: a socket that closes with unread bytes loses what it has to send
        worker.process.send_signal(signal.SIGTERM)
        await link.state(watch, "draining")
        worker.process.send_signal(signal.SIGTERM)

        assert await worker.exit() == 0
        await link.closed()
        assert "drain ended with" not in worker.log  # which is its report when the grace is over


async def test_a_model_that_cannot_load_is_said_and_written_down(tmp_path: Path) -> None:
    build("bert", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    with WorkerProcess(tmp_path) as worker:
        link = await worker.link()
        facts = await link.state(link.post(Method.WATCH), "failed")

        assert await worker.exit() == 3
        await link.closed()
        assert facts == worker.last_words
        assert facts["permanent"] is True
        assert facts["reason"]
        assert Code(facts["code"])


async def test_a_model_that_is_not_there_is_not_tried_again(tmp_path: Path) -> None:
    with WorkerProcess(tmp_path / "nobody") as worker:
        assert await worker.exit() == 3
        assert Code(worker.last_words["code"]) is Code.MODEL_NOT_FOUND


async def test_a_taken_port_may_be_free_later(tiny: Path) -> None:
    """It ends before a watcher connects, so it leaves a file with the reason."""
    with (
        socket.create_server(("127.0.0.1", 0)) as stranger,
        WorkerProcess(tiny, port=stranger.getsockname()[1]) as worker,
    ):
        assert await worker.exit() == 4
        assert worker.last_words["permanent"] is False
        assert Code(worker.last_words["code"]) is Code.PORT_CONFLICT


async def test_without_a_daemon_for_too_long_it_ends_by_itself(tiny: Path) -> None:
    with WorkerProcess(tiny, orphan_grace_s=0.05) as worker:
        assert await worker.exit() == 0
        assert "no daemon for 0.05 s" in worker.log
        assert not (worker.folder / "inc-1.json").exists()


async def test_the_last_watcher_to_go_starts_the_grace(tiny: Path) -> None:
    with WorkerProcess(tiny, orphan_grace_s=0.05) as worker:
        links: list[WorkerLink] = [(await worker.watcher("ready"))[0] for _ in range(2)]
        links[0].close()
        assert (await links[1].ask(Method.PROBE)).reply == b""
        links[1].close()

        assert await worker.exit() == 0
        async with asyncio.timeout(10):
            for link in links:
                await link.lost.wait()
        assert all(json.loads(line)["level"] != "error" for line in worker.log.splitlines())


def spoil(folder: Path, tokens: slice) -> None:
    """Overwrite rows of the embedding table with NaN where the file lies, which workers have mapped into memory."""
    file = folder / "model.safetensors"
    with file.open("r+b") as raw:
        (length,) = struct.unpack("<Q", raw.read(8))
        (table,) = (at for name, at in json.loads(raw.read(length)).items() if "word_embeddings.weight" in name)
        rows, width = table["shape"]
        start = 8 + length + table["data_offsets"][0]
        for row in range(rows)[tokens]:
            raw.seek(start + 4 * width * row)
            raw.write(np.full(width, np.nan, dtype=np.float32).tobytes())


async def test_a_device_that_turns_sick_is_announced_at_once_and_answers_unavailable(tmp_path: Path) -> None:
    build("bert", tmp_path)
    with WorkerProcess(tmp_path) as worker:
        link, watch = await worker.watcher("ready")
        assert len((await link.answer(link.embed("fog"))).vector) == 32
        spoil(tmp_path, slice(None))

        failed = await link.answer(link.embed("fog"))
        announced = await link.state(watch, "failed")
        refused = await link.answer(link.embed("fog"))
        async with aiohttp.ClientSession() as http, http.get(f"{worker.url}/health") as reply:
            health = (reply.status, await reply.json())

    assert (failed.error.code, failed.error.message) == (
        Code.INFERENCE_FAILED,
        "Backend error: the vector has NaN or infinity in it",
    )
    assert announced["reason"] == f"the self-test failed: {failed.error.message}"
    assert (announced["permanent"], Code(announced["code"])) == (False, Code.INFERENCE_FAILED)
    assert (refused.error.code, refused.error.message) == (Code.BACKEND_UNAVAILABLE, announced["reason"])
    assert health == (503, {"error": "unhealthy", "error_type": "Unhealthy"})


async def test_a_text_without_a_vector_fails_alone(tmp_path: Path) -> None:
    build("bert", tmp_path)
    spoil(tmp_path, slice(4, 5))  # [MASK] in the vocabulary
    with WorkerProcess(tmp_path) as worker:
        link, _ = await worker.watcher("ready")
        for _ in range(3):
            answers = await link.answers([link.embed(text) for text in ("fog", "[MASK]", "dog")])
            assert [answer.header.type for answer in answers] == [FrameType.REPLY, FrameType.ERROR, FrameType.REPLY]
        assert (await link.ask(Method.PROBE)).reply == b""
        stats = (await link.ask(Method.STATS)).json

    assert stats["healthy"]
    assert stats["own_texts"] > 1, "no self-test followed"
    assert stats["texts"] == 9


async def test_a_status_has_a_frame_of_bounded_size_however_many_labels_there_are(tmp_path: Path) -> None:
    build_classifier("bert", tmp_path, labels=tuple(f"label {number} {'x' * 100}" for number in range(12_000)))
    with WorkerProcess(tmp_path) as worker:
        await worker.watcher("ready")
        status = await identify(Path(worker.socket), LIMIT_S)

    assert status is not None
    assert (status.state, status.model is not None) == ("ready", True)


async def test_a_signal_writes_the_stacks_of_a_worker_to_its_log(tiny: Path) -> None:
    with WorkerProcess(tiny) as worker:
        link, _ = await worker.watcher("ready")
        worker.process.send_signal(STACKS_SIGNAL)
        await eventually(lambda: "runner.py" in worker.log)

        assert (await link.ask(Method.PROBE)).reply == b""
