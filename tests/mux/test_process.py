"""The life of the mux process: its control socket, its daemons, its ways of ending."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import h2.events
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.support.cluster import FleetNodes, endpoint_of, worker_on
from tests.support.credentials import Authority, needs_openssl, put
from tests.support.frame_worker import FrameWorker, hold, lengths
from tests.support.http_peers import Peer, head
from tests.support.models import build
from tests.support.mux_process import Control, MuxProcess, client, client_at, embed, mux_pb2, running, stub
from tests.support.polling import eventually

from teimgr.config.mux import MuxConfig
from teimgr.errors import InvalidConfig
from teimgr.http.auth.policy import CertificateRules, Key, Policy, digest
from teimgr.http.auth.tls_files import TlsFiles
from teimgr.http.http2.connection import Connection
from teimgr.http.http2.stream import Stream
from teimgr.http.server import bind
from teimgr.mux.process import GrpcServer, tls_context
from teimgr.spec import RouteEntry, State
from teimgr.wire.grpc_core.rpc import FILES, RPCS, SERVICE, Rpc, Shape
from teimgr.wire.status import CODE_KEY

Status = grpc.StatusCode


async def exit_status(mux: MuxProcess) -> int:
    return await asyncio.to_thread(mux.process.wait, 20)


@asynccontextmanager
async def holding(
    start_mux: Any, start_worker: Any
) -> AsyncIterator[tuple[MuxProcess, Control, FrameWorker, grpc.aio.Channel]]:
    """A mux with a worker that holds its calls, and a client; the mux has ended in order after the block."""
    mux = start_mux()
    control = await Control.connect(mux)
    worker: FrameWorker = await start_worker(hold)
    async with client(await control.push(running("a", worker))) as channel:
        yield mux, control, worker, channel
    assert await exit_status(mux) == 0
    await control.close()


@pytest.mark.clause("M1.1-listener")
async def test_stats_say_who_it_is_and_where_it_listens(mux: MuxProcess, control: Control) -> None:
    stats = await control.push()

    assert stats["pid"] == mux.process.pid
    assert stats["config_hash"] == mux.config.hash
    assert stats["port"] > 0
    assert stats["instances"] == 0


async def test_counters_of_a_deleted_instance_go(control: Control, start_worker: Any) -> None:
    stats = await control.push(running("kept", await start_worker()), running("deleted", await start_worker()))
    async with client(stats) as channel:
        for name in ("kept", "deleted"):
            await stub(channel, "Embed")(embed("x", name))

    def named(stats: dict[str, Any]) -> set[str]:
        return {row["instance"] for kind in ("calls", "latency", "links") for row in stats[kind]} & {"kept", "deleted"}

    assert named(await control.stats()) == {"kept", "deleted"}
    assert named(await control.push(running("kept", await start_worker()))) == {"kept"}


async def test_calls_wait_for_the_first_snapshot(start_mux: Any, start_worker: Any) -> None:
    control = await Control.connect(start_mux())
    async with client(await control.stats()) as channel:
        call = asyncio.ensure_future(stub(channel, "Embed")(embed("x")))
        _, waiting = await asyncio.wait((call,), timeout=0.5)
        assert waiting

        await control.push(running("a", await start_worker()))

        assert list((await call).embeddings) == [1.0]
    await control.close()


async def test_routes_of_a_later_daemon_serve_but_for_an_instance_in_a_state_unknown_here(
    start_mux: Any, start_worker: Any
) -> None:
    """It raised TypeError and dropped the link, for which the daemon killed it: a gap for all calls of gRPC."""
    control = await Control.connect(start_mux())
    known = json.loads(running("a", await start_worker()).to_json())
    endpoints = [each | {"lane": "fast"} for each in known["endpoints"]]
    paused = {"name": "b", "model_id": "n", "state": "paused", "endpoints": [], "pause": 3}
    control.say({"snapshot": [known | {"endpoints": endpoints, "weight": 3}, paused]})
    async with client(await control.stats()) as channel:
        assert list((await stub(channel, "Embed")(embed("x", "a"))).embeddings) == [1.0]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(channel, "Embed")(embed("x", "b"))
        assert caught.value.code() is Status.UNAVAILABLE
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
    async with holding(start_mux, start_worker) as (mux, control, worker, channel):
        call = stub(channel, "Embed")(embed("x"))
        request = await worker.requests.get()

        if how == "signal":
            mux.process.send_signal(signal.SIGTERM)
        else:
            control.say({"stop": 10})
        assert json.loads(await control.reader.readline()) == {"stopping": 10.0}
        assert not Path(mux.config.control_socket).exists(), "a successor may have it"
        lengths(request)

        assert list((await call).embeddings) == [1.0]


async def test_what_does_not_finish_within_the_grace_is_cancelled(start_mux: Any, start_worker: Any) -> None:
    async with holding(start_mux, start_worker) as (_mux, control, worker, channel):
        call = stub(channel, "Embed")(embed("x"))
        request = await worker.requests.get()

        control.say({"stop": 0.05})

        assert await worker.cancels.get() == request.header.id
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE, "clients may repeat the call elsewhere"


async def test_a_second_stop_with_a_shorter_grace_counts(start_mux: Any, start_worker: Any) -> None:
    async with holding(start_mux, start_worker) as (_mux, control, worker, channel):
        call = stub(channel, "Embed")(embed("x"))
        request = await worker.requests.get()

        control.say({"stop": 3600})
        await control.reader.readline()
        control.say({"stop": 7200})
        control.say({"stop": 0.05})

        assert await worker.cancels.get() == request.header.id
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_clients_connect_anew_at_the_greatest_age_and_no_call_fails(start_mux: Any, start_worker: Any) -> None:
    mux = start_mux(max_connection_age_s=0.2)
    control = await Control.connect(mux)
    worker: FrameWorker = await start_worker(lengths)
    stats = await control.push(running("a", worker))
    made = asyncio.Semaphore(0)
    pipes: set[asyncio.Task[None]] = set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def both() -> None:
            there, back = await asyncio.open_connection("127.0.0.1", stats["port"])
            await asyncio.gather(pipe(reader, back), pipe(there, writer))

        made.release()
        pipes.add(asyncio.create_task(both()))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    has_enough = asyncio.Event()
    async with asyncio.timeout(60), client({"port": port}) as channel:
        embed_one = stub(channel, "Embed")

        async def call() -> int:
            calls = 0
            while not has_enough.is_set():
                assert list((await embed_one(embed("four"))).embeddings) == [4.0]
                calls += 1
            return calls

        callers = [asyncio.create_task(call()) for _ in range(8)]
        stream = stub(channel, "EmbedStream")()  # outlives the age of its connection
        for _ in range(6):
            await made.acquire()
            await stream.write(embed("xy"))
            assert list((await stream.read()).embeddings) == [2.0]
        has_enough.set()
        assert min(await asyncio.gather(*callers)) > 0
        await stream.done_writing()
        assert await stream.code() is Status.OK
    server.close()
    await asyncio.gather(*pipes)
    await control.close()


async def test_an_idle_stream_does_not_hold_up_a_drain_and_what_is_in_flight_is_answered(
    start_mux: Any, start_worker: Any
) -> None:
    async with holding(start_mux, start_worker) as (_mux, control, worker, channel):
        idle, waiting = (stub(channel, "EmbedStream")() for _ in range(2))
        for stream in (idle, waiting):
            await stream.write(embed("x"))
        requests = [await worker.requests.get() for _ in range(2)]
        for each in requests[:1]:
            lengths(each)
        first = await asyncio.wait(
            [asyncio.ensure_future(s.read()) for s in (idle, waiting)], return_when="FIRST_COMPLETED"
        )
        assert len(first[0]) == 1

        control.say({"stop": 3600})
        await control.reader.readline()
        ended = [asyncio.ensure_future(stream.code()) for stream in (idle, waiting)]
        done, open_ = await asyncio.wait(ended, return_when="FIRST_COMPLETED")
        assert {each.result() for each in done} == {grpc.StatusCode.UNAVAILABLE}
        assert len(open_) == 1, "its message is in flight"
        lengths(requests[1])
        [reading] = first[1]
        assert list((await reading).embeddings) == [1.0]
        assert {await each for each in ended} == {grpc.StatusCode.UNAVAILABLE}


async def test_a_second_signal_does_not_wait(start_mux: Any, start_worker: Any) -> None:
    async with holding(start_mux, start_worker) as (mux, control, worker, channel):
        call = stub(channel, "Embed")(embed("x"))
        await worker.requests.get()

        control.say({"stop": 3600})
        await control.reader.readline()
        mux.process.send_signal(signal.SIGTERM)

        assert await exit_status(mux) == 0
        call.cancel()


def sockets_in(folder: Path) -> list[str]:
    """The names of its files, but for the lock of those who make sockets there."""
    return [each.name for each in folder.iterdir() if not each.name.startswith(".teimgr-")]


async def test_a_unix_socket_is_served_with_the_port_and_removed_at_the_stop(
    tmp_path: Path, start_mux: Any, start_worker: Any
) -> None:
    path = tmp_path / "grpc #1.sock"
    left = path.with_name(f"{path.name}.7")
    for stale in (path, left):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(stale))
    mux = start_mux(socket=str(path), socket_mode=0o660)
    control = await Control.connect(mux)
    stats = await control.push(running("a", await start_worker()))
    await eventually(lambda: any("mux serves" in line for line in mux.log))

    async with client(stats) as over_tcp, client_at(quote(str(path))) as over_unix:
        for channel in (over_tcp, over_unix):
            assert list((await stub(channel, "Embed")(embed("x"))).embeddings) == [1.0]
        say(control, Policy(keys=(Key("someone", digest("k" * 24), ("inference",)),)))
        await control.stats()
        for channel in (over_tcp, over_unix):
            assert await stub(channel, "Embed")(embed("x")).code() is Status.UNAUTHENTICATED
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert sockets_in(tmp_path) == [path.name]

    mux.process.send_signal(signal.SIGTERM)

    assert await exit_status(mux) == 0
    assert sockets_in(tmp_path) == []
    await control.close()


async def test_a_mux_that_stops_before_it_serves_leaves_no_socket(tmp_path: Path, start_mux: Any) -> None:
    mux = start_mux(socket=str(tmp_path / "grpc.sock"))

    mux.process.send_signal(signal.SIGTERM)

    assert await exit_status(mux) == 0
    assert sockets_in(tmp_path) == []


async def test_no_call_over_the_unix_socket_is_lost_when_a_mux_is_replaced(
    tmp_path: Path, start_mux: Any, start_worker: Any
) -> None:
    path = tmp_path / "grpc.sock"
    answered, lost, over = [0], [], asyncio.Event()

    async def ask() -> None:
        """Calls over connections that are kept, and over a new one for every eighth."""
        while not over.is_set():
            async with client_at(path) as channel:
                for _ in range(8):
                    code = await stub(channel, "Embed")(embed("x")).code()
                    answered[0] += 1
                    if code is not Status.OK:
                        lost.append(code)

    async def more(count: int = 40) -> None:
        wanted = answered[0] + count
        await eventually(lambda: answered[0] >= wanted or bool(lost))

    worker = await start_worker()
    old = start_mux(socket=str(path))
    first = await Control.connect(old)
    await first.push(running("a", worker))
    await eventually(path.exists)
    load = [asyncio.create_task(ask()) for _ in range(4)]
    await more()

    second = await Control.connect(start_mux(socket=str(path)))
    former = path.stat().st_ino
    await second.push(running("a", worker))
    await eventually(lambda: path.stat().st_ino != former)
    await more()
    old.process.send_signal(signal.SIGTERM)
    assert await exit_status(old) == 0
    await more()
    over.set()
    await asyncio.gather(*load)

    assert lost == []
    assert sum(row["count"] for row in (await second.stats())["calls"]) > 0
    assert sockets_in(tmp_path) == [path.name], "the predecessor left the file of its successor"
    for control in (first, second):
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
        await control.reader.readline()

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


LIMIT_S = 20
ASKER, READER, ONLY_A = ("k" * 32 + name for name in ("asker", "reader", "only-a"))
KEYS = (
    Key("asker", digest(ASKER), ("inference",)),
    Key("reader", digest(READER), ("admin", "read")),
    Key("only-a", digest(ONLY_A), ("inference", "read"), ("a", "team-*")),
)
OK, UNAUTHENTICATED, DENIED = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


@asynccontextmanager
async def secure(
    port: int | Path, ca: Path, authority: Authority | None = None, name: str = "client"
) -> AsyncIterator[Any]:
    """A channel to a port or a Unix socket that trusts `ca` and shows this client's certificate."""
    pair = [(authority.folder / f"{name}.{kind}").read_bytes() for kind in ("key", "pem")] if authority else []
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), *pair)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.default_authority", "localhost")]
    target = f"unix:{port}" if isinstance(port, Path) else f"127.0.0.1:{port}"
    async with grpc.aio.secure_channel(target, credentials, options) as channel:
        yield channel


async def code(port: int | Path, *who: Any) -> grpc.StatusCode:
    """What an Embed call over a new connection ends with."""
    async with secure(port, *who) as channel:
        ending: grpc.StatusCode = await stub(channel, "Embed")(embed("x"), timeout=LIMIT_S).code()
        return ending


def say(control: Control, policy: Policy) -> None:
    control.say({"policy": json.loads(policy.to_json())})


@pytest.mark.clause("M6-tls")
@needs_openssl
async def test_only_clients_with_a_certificate_of_the_authority_get_through(
    tmp_path: Path, start_mux: Any, start_worker: Any
) -> None:
    ours, stranger = Authority(tmp_path / "ours"), Authority(tmp_path / "stranger", "stranger")
    control = await Control.connect(start_mux(tls=ours.server()))
    port = (await control.push(running("a", await start_worker())))["port"]
    ours.sign("client")
    ours.sign("late", days=0)
    stranger.sign("client")

    assert await code(port, ours.ca, ours) is OK
    assert await code(port, ours.ca) is grpc.StatusCode.UNAVAILABLE
    assert await code(port, ours.ca, stranger) is grpc.StatusCode.UNAVAILABLE
    assert await code(port, ours.ca, ours, "late") is grpc.StatusCode.UNAVAILABLE
    await control.close()


@pytest.mark.clause("M6-subjects")
@needs_openssl
async def test_subjects_and_alternative_names_are_judged_as_on_rest(
    tmp_path: Path, start_mux: Any, start_worker: Any
) -> None:
    ours = Authority(tmp_path / "ours")
    control = await Control.connect(start_mux(tls=ours.server()))
    port = (await control.push(running("a", await start_worker())))["port"]
    ours.sign("client", "/O=Search, Inc./OU=a+CN=zürich/CN=indexer", "DNS:indexer.local,URI:spiffe://x/i,IP:10.0.0.1")
    async with secure(port, ours.ca, ours) as channel:

        async def ending(subjects: tuple[str, ...] = (), sans: tuple[str, ...] = ()) -> grpc.StatusCode:
            say(control, Policy(CertificateRules(subjects, sans), is_certified=True))
            await control.stats()
            found: grpc.StatusCode = await stub(channel, "Embed")(embed("x")).code()
            return found

        for subject in ("CN=indexer", "O=Search, Inc.", r"CN=indexer,O=Search\, Inc.", "indexer", "CN=zürich"):
            assert await ending((subject,)) is OK, subject
        for subject in ("CN=index", "CN=indexer,O=Other", ""):
            assert await ending((subject,)) is UNAUTHENTICATED, subject
        for name in ("indexer.local", "DNS:indexer.local", "spiffe://x/i", "URI:spiffe://x/i", "IP:10.0.0.1"):
            assert await ending(sans=(name,)) is OK, name
        for name in ("indexer", "URI:indexer.local", "DNS:10.0.0.1"):
            assert await ending(sans=(name,)) is UNAUTHENTICATED, name
        assert await ending(("CN=indexer",), ("other",)) is UNAUTHENTICATED
    await control.close()


@pytest.mark.clause("M6-renewal")
@needs_openssl
async def test_certificates_and_authority_are_renewed_under_live_traffic(
    tmp_path: Path, start_mux: Any, start_worker: Any
) -> None:
    before, after = Authority(tmp_path / "before"), Authority(tmp_path / "after", "after")
    files, new = before.server(), after.server()
    old_ca = tmp_path / "old-ca.pem"
    put(before.ca, old_ca)
    for authority in (before, after):
        authority.sign("client")
    at_socket = tmp_path / "grpc.sock"
    control = await Control.connect(start_mux(tls=files, socket=str(at_socket)))
    port = (await control.push(running("a", await start_worker())))["port"]
    endings: list[grpc.StatusCode] = []
    stop = asyncio.Event()

    async def ask(channel: Any) -> None:
        while not stop.is_set():
            endings.append(await stub(channel, "Embed")(embed("x")).code())

    async with secure(port, old_ca, before) as channel:
        asking = [asyncio.create_task(ask(channel)) for _ in range(4)]
        assert await code(port, old_ca, before) is OK
        assert await code(port, after.ca, after) is grpc.StatusCode.UNAVAILABLE
        await eventually(at_socket.exists)
        assert await code(at_socket, old_ca, before) is OK

        assert files.ca
        put(new.cert, files.cert)
        await alarmed(control, False)  # half of a change is no change yet
        for source, target in ((new.key, files.key), (after.ca, files.ca)):
            put(source, target)
        async with asyncio.timeout(LIMIT_S):
            while await code(port, after.ca, after) is not OK:
                pass
        assert await code(port, old_ca, before) is grpc.StatusCode.UNAVAILABLE
        assert await code(port, after.ca, before) is grpc.StatusCode.UNAVAILABLE
        assert await code(at_socket, after.ca, after) is OK
        assert await code(at_socket, old_ca, before) is grpc.StatusCode.UNAVAILABLE
        seen = len(endings)
        async with asyncio.timeout(LIMIT_S):
            while len(endings) < seen + 50:
                await control.stats()
        stop.set()
        await asyncio.gather(*asking)
    assert set(endings) == {OK}

    put(after.sign("other")[1], files.key)
    await alarmed(control, True)
    assert await code(port, after.ca, after) is OK
    await control.close()


async def alarmed(control: Control, expected: bool) -> None:
    """Return when the mux reports, or no longer reports, that its files cannot be used."""

    async def holds() -> bool:
        return bool((await control.stats())["alarm"]) is expected

    await eventually(holds)


def test_a_mux_does_not_begin_with_files_that_cannot_be_used(tmp_path: Path, start_mux: Any) -> None:
    for name in ("a.pem", "a.key"):
        (tmp_path / name).write_text("nothing")
    with pytest.raises(RuntimeError, match=r"mux cannot serve: .*not a PEM file") as caught:
        start_mux(tls=TlsFiles(tmp_path / "a.pem", tmp_path / "a.key"))
    assert "Traceback" not in caught.value.args[0]


@pytest.fixture
async def keyed(control: Control, start_worker: Any) -> AsyncIterator[Control]:
    """The shared mux with keys, and two running instances, `a` and `b`."""
    say(control, Policy(keys=KEYS))
    await control.push(running("a", await start_worker()), running("b", await start_worker()))
    yield control
    say(control, Policy())
    await control.stats()


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def service_of(rpc: Rpc) -> Any:
    services = (service for file in FILES for service in file.services_by_name.values())
    return next(service for service in services if service.full_name == rpc.service)


def message_of(rpc: Rpc) -> Any:
    """An empty message of this RPC."""
    return GetMessageClass(service_of(rpc).methods_by_name[rpc.name].input_type)()


async def ending_of(rpc: Rpc, channel: Any, metadata: Any) -> tuple[grpc.StatusCode, str]:
    """What a call of this RPC with an empty message ends with."""
    message = message_of(rpc)
    call = stub(channel, rpc.name, service_of(rpc))
    if rpc.shape is Shape.UNARY:
        answered = call(message, metadata=metadata, timeout=LIMIT_S)
    else:
        answered = call(metadata=metadata, timeout=LIMIT_S)
        if metadata in (bearer(ASKER), (("x-api-key", ASKER),)):
            await answered.done_writing()  # the others are refused before they send anything
    return await answered.code(), await answered.details()


@pytest.mark.clause("M6-keys")
@pytest.mark.parametrize("rpc", RPCS, ids=lambda rpc: rpc.path)
async def test_every_rpc_asks_for_a_key_with_the_right_of_inference(keyed: Control, channel: Any, rpc: Rpc) -> None:
    for metadata in ((), bearer("x" * 40), (("authorization", ASKER),), (("authorization", "Bearer"),)):
        assert await ending_of(rpc, channel, metadata) == (UNAUTHENTICATED, "No valid auth token")
    assert await ending_of(rpc, channel, bearer(READER)) == (DENIED, "The key 'reader' lacks the right inference")
    for metadata in (bearer(ASKER), (("x-api-key", ASKER),)):
        assert (await ending_of(rpc, channel, metadata))[0] not in (UNAUTHENTICATED, DENIED)


async def test_a_key_for_some_instances_is_for_no_others(keyed: Control, channel: Any) -> None:
    call = stub(channel, "Embed")

    async def ending(**target: Any) -> grpc.StatusCode:
        request = mux_pb2.EmbedRequest(target=mux_pb2.Target(**target), request=embed("x").request)
        found: grpc.StatusCode = await call(request, metadata=bearer(ONLY_A)).code()
        return found

    assert await ending(instance_name="a") is OK
    assert await ending(instance_name="team-x") is grpc.StatusCode.NOT_FOUND
    assert await ending(instance_name="b") is DENIED
    assert await ending(instance_name="nowhere") is DENIED  # what there is besides is not reported
    assert await ending(instance_index=0) is OK
    assert await ending(instance_index=1) is grpc.StatusCode.NOT_FOUND  # it counts the key's own
    assert await ending(model_id="other") is DENIED
    endings = {await ending(model_id="model") for _ in range(6)}
    assert endings == {OK}  # never the other instance of that model

    async def both() -> AsyncIterator[Any]:
        yield embed("x", "a")
        yield embed("x", "b")

    stream = stub(channel, "EmbedStream")(both(), metadata=bearer(ONLY_A))
    assert await stream.read()
    assert await stream.code() is DENIED


async def test_a_call_without_target_goes_to_the_only_instance_of_its_key(keyed: Control, channel: Any) -> None:
    rpc = next(rpc for rpc in RPCS if rpc.service != SERVICE.full_name and rpc.name == "Embed")
    status, _ = await ending_of(rpc, channel, bearer(ONLY_A))
    assert status not in (grpc.StatusCode.FAILED_PRECONDITION, DENIED)
    assert (await ending_of(rpc, channel, bearer(ASKER)))[0] is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_refused_list_of_names_has_the_error_code_in_its_trailers(keyed: Control, channel: Any) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await health.List(health_pb2.HealthListRequest())
    assert dict(refused.value.trailing_metadata())[CODE_KEY] == "UNAUTHENTICATED"


@pytest.mark.parametrize("key", [None, "unknown", ONLY_A, ASKER, READER])
async def test_the_health_of_instances_is_told_to_keys_that_cover_them(
    keyed: Control, channel: Any, key: str | None
) -> None:
    health, metadata = health_pb2_grpc.HealthStub(channel), bearer(key) if key else ()
    status = health_pb2.HealthCheckResponse
    shown = {"": True, SERVICE.full_name: True, "zz": False}
    shown |= {"a": key in (ONLY_A, ASKER, READER), "b": key in (ASKER, READER)}
    for name, is_shown in shown.items():
        asked = health_pb2.HealthCheckRequest(service=name)
        watch = health.Watch(asked, metadata=metadata)
        assert (await watch.read()).status == (status.SERVING if is_shown else status.SERVICE_UNKNOWN), name
        watch.cancel()
        if is_shown:
            assert (await health.Check(asked, metadata=metadata)).status == status.SERVING
            continue
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(asked, metadata=metadata)
        assert (caught.value.code(), caught.value.details()) == (
            grpc.StatusCode.NOT_FOUND,
            f"Unknown service '{name}'",
        )


async def test_health_and_reflection_are_open_but_a_list_of_names_is_not(keyed: Control, channel: Any) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == serving
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health.List(health_pb2.HealthListRequest())
    assert caught.value.code() is UNAUTHENTICATED
    listed = await health.List(health_pb2.HealthListRequest(), metadata=bearer(ONLY_A))
    assert "a" in listed.statuses
    assert "b" not in listed.statuses
    assert "b" in (await health.List(health_pb2.HealthListRequest(), metadata=bearer(READER))).statuses
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = [answer async for answer in reflection.ServerReflectionInfo(iter([asked]))]
    assert answers[0].list_services_response.service


async def test_keys_are_swapped_under_a_running_mux_and_never_logged(start_mux: Any, start_worker: Any) -> None:
    mux = start_mux(log_level="debug")
    control = await Control.connect(mux)
    say(control, Policy(keys=KEYS))
    port = (await control.push(running("a", await start_worker())))["port"]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = stub(channel, "Embed")
        assert await call(embed("x"), metadata=bearer(ASKER)).code() is OK
        say(control, Policy(keys=KEYS[1:]))
        await control.stats()
        assert await call(embed("x"), metadata=bearer(ASKER)).code() is UNAUTHENTICATED
    await control.close()
    mux.process.send_signal(signal.SIGTERM)  # the log is whole when the process has ended
    mux.process.wait(LIMIT_S)
    mux._emptying.join()
    assert mux.log
    assert not any(secret in line for line in mux.log for secret in (ASKER, KEYS[0].sha256))


CHANGED = {
    "removed": ((), UNAUTHENTICATED),
    "without the right": ((Key("only-a", digest(ONLY_A), ("read",), ("a", "team-*")),), DENIED),
    "for others": ((Key("only-a", digest(ONLY_A), ("inference",), ("b",)),), DENIED),
}


@pytest.mark.parametrize("change", CHANGED)
@pytest.mark.parametrize("rpc", [rpc for rpc in RPCS if rpc.shape is not Shape.UNARY], ids=lambda rpc: rpc.path)
async def test_an_open_stream_ends_at_the_next_message_of_a_key_that_lost_its_right(
    control: Control, channel: Any, start_worker: Any, rpc: Rpc, change: str
) -> None:
    keys, status = CHANGED[change]
    say(control, Policy(keys=KEYS))
    await control.push(running("a", await start_worker(lambda request: request.reply())))
    message, messages = message_of(rpc), asyncio.Queue[Any]()
    fields = message.DESCRIPTOR.fields_by_name
    if "target" in fields:
        message.target.instance_name = "a"
    if "request" in fields:
        message.request.SetInParent()
    if "arrow_ipc" in fields:
        message.arrow_ipc = b"a batch"

    async def feed() -> AsyncIterator[Any]:
        while (found := await messages.get()) is not None:
            yield found

    try:
        call = stub(channel, rpc.name, service_of(rpc))(feed(), metadata=bearer(ONLY_A), timeout=LIMIT_S)
        messages.put_nowait(message)
        if rpc.shape is Shape.BIDI:
            await call.read()
        else:  # it is answered at its end
            await eventually(lambda: _has_a_call(control))
        say(control, Policy(keys=KEYS))  # a reload that leaves the key
        await control.stats()
        messages.put_nowait(message)
        if rpc.shape is Shape.BIDI:
            await call.read()
        say(control, Policy(keys=keys))
        await control.stats()
        messages.put_nowait(message)

        code = await call.code()
        # grpcio's own end of a call that was answered while it wrote; the answer itself is lost in it.
        lost = rpc.shape is not Shape.BIDI and await call.details() == "Internal error from Core"
        assert code is status or lost
    finally:
        messages.put_nowait(None)
        say(control, Policy())
        await control.stats()


async def _has_a_call(control: Control) -> bool:
    return (await control.stats())["in_flight"] == 1


def _has_ended(reader: asyncio.StreamReader) -> bool:
    return reader.at_eof() or reader.exception() is not None


async def test_connections_beyond_the_cap_are_closed_and_a_client_is_served_when_some_go(
    start_mux: Any, start_worker: Any
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, hard))  # the mux inherits it; half of it are for clients
    try:
        control = await Control.connect(start_mux())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    stats = await control.push(running("a", await start_worker()))
    connections = [await asyncio.open_connection("127.0.0.1", stats["port"]) for _ in range(100)]
    for reader, _ in connections:  # each is sent SETTINGS; the oldest give way to the next ones
        with suppress(ConnectionError):
            await reader.read(1 << 16)
    await eventually(lambda: 20 <= sum(_has_ended(reader) for reader, _ in connections) <= 30)
    for _, writer in connections:
        writer.close()
    async with client(stats) as channel:
        assert list((await stub(channel, "Embed")(embed("x"), wait_for_ready=True)).embeddings) == [1.0]
    await control.close()


async def test_a_mux_reaches_a_worker_of_another_host_by_its_certificate(tmp_path: Path) -> None:
    nodes = FleetNodes(tmp_path / "fleet")
    nodes.renew("head")
    with worker_on(nodes, "gpu-1", build("bert", tmp_path / "model")) as worker:
        watching, _ = await worker.watcher("ready")
        watching.close()
        entry = RouteEntry("a", "model", State.RUNNING, None, 32, (await endpoint_of(worker),))
        Path(worker.socket).unlink()  # no way on this host
        mux = MuxProcess(node="head", identity_dir=str(nodes.folder("head")))
        try:
            control = await Control.connect(mux)
            stats = await control.push(entry)
            async with client(stats) as channel:
                reply = await stub(channel, "Embed")(embed("fog"), timeout=60)
            await control.close()
        finally:
            mux.close()
    assert len(reply.embeddings) == 32


@needs_openssl
async def test_a_handshake_that_ends_after_the_stop_began_is_told_to_go_and_after_it_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    files = TlsFiles(*authority.sign("server"))
    asked, release = asyncio.Event(), asyncio.Event()

    async def serve(stream: Stream) -> None:
        asked.set()
        await release.wait()
        await stream.send_headers([(b":status", b"200")], end=True)

    server = GrpcServer(lambda state, ticket: Connection(serve, state, ticket, stays_open=True), tls_context(files))
    sock = bind("127.0.0.1", 0)
    address = sock.getsockname()
    server.add(sock)
    await server.start()
    client = ssl.create_default_context(cafile=authority.ca)
    client.check_hostname = False
    client.set_alpn_protocols(["h2"])

    async with AsyncExitStack() as stack, asyncio.timeout(LIMIT_S):

        def connected() -> socket.socket:
            raw = stack.enter_context(socket.create_connection(address))
            raw.setblocking(False)
            return raw

        async def secured(raw: socket.socket) -> Peer:
            peer = Peer(*await asyncio.open_connection(sock=raw, ssl=client, server_hostname="localhost"))
            stack.callback(peer.writer.close)
            return peer

        late, too_late = connected(), connected()
        first = await secured(connected())  # connections are accepted in their order
        first.open(head("/any"), end=True)
        await asked.wait()

        stop = asyncio.create_task(server.stop(LIMIT_S))
        await first.until(h2.events.ConnectionTerminated)
        told = await (await secured(late)).until(h2.events.ConnectionTerminated)
        assert told.last_stream_id == 0
        assert not stop.done()

        release.set()
        await stop
        assert server._state.total_requests == 1
        try:
            answer = await (await secured(too_late)).reader.read()
        except ConnectionError:
            answer = b""
        assert not answer
