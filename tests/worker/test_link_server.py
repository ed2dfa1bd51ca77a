"""What a real worker answers on its links: replies, typed errors, and what frees its room.

On its port for other hosts: the answers to peers that keep the protocol, and to those that do not.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.cluster import FleetNodes, endpoint_of, worker_on
from tests.support.polling import eventually
from tests.support.worker_process import LIMIT_S, Connect, WorkerLink, WorkerProcess, arrow, embed_request, table

from teimgr.control.launch.control_link import WorkerStatus, open_control_link
from teimgr.errors import Code, Unavailable
from teimgr.spec import WorkerEndpoint
from teimgr.wire.fleet_tls import FleetIdentity, write_removed
from teimgr.wire.frames import Flag, FrameType, Method
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2

INSIDE = 5  # one running and four behind it, by the fixture


# Replies.


async def test_embed_gives_a_unit_vector_and_what_it_cost(link: WorkerLink) -> None:
    answer = await link.answer(link.embed("The quick brown fox"))

    assert len(answer.vector) == 32
    assert np.linalg.norm(answer.vector) == pytest.approx(1.0, abs=1e-5)
    metadata = tei_pb2.EmbedResponse.FromString(answer.reply).metadata
    assert answer.timings.chars == metadata.compute_chars == 19
    assert answer.timings.tokens == metadata.compute_tokens > 2
    assert answer.timings.total_ns >= answer.timings.inference_ns > 0


@pytest.mark.clause("M1.8-rows")
async def test_arrow_keeps_rows_and_tells_of_the_failed_ones(link: WorkerLink) -> None:
    single = await link.answer(link.embed("fog"))

    answer = await link.ask(Method.EMBED_ARROW, arrow(["fog", None, "dog"]) + b"")

    found = table(answer.reply)
    assert found.num_rows == 3
    assert [row is None for row in found["embeddings"].to_pylist()] == [False, True, False]
    assert [row is None for row in found["error"].to_pylist()] == [True, False, True]
    first = np.array(found["embeddings"][0].as_py())
    assert np.allclose(first / np.linalg.norm(first), single.vector, atol=1e-5)


async def test_tokenize_and_decode_undo_each_other(link: WorkerLink) -> None:
    request = tei_pb2.EncodeRequest(inputs="the quick fox", add_special_tokens=True)
    tokens = tei_pb2.EncodeResponse.FromString((await link.ask(Method.TOKENIZE, request.SerializeToString())).reply)
    back = tei_pb2.DecodeRequest(ids=[token.id for token in tokens.tokens], skip_special_tokens=True)

    text = tei_pb2.DecodeResponse.FromString((await link.ask(Method.DECODE, back.SerializeToString())).reply).text

    assert [token.special for token in tokens.tokens][:1] == [True]
    assert not tokens.tokens[0].HasField("start")
    assert text == "the quick fox"


async def test_info_names_the_model_and_the_limits(link: WorkerLink, worker: WorkerProcess) -> None:
    info = tei_pb2.InfoResponse.FromString((await link.ask(Method.INFO)).reply)

    assert info.model_id == worker.spec.model_id
    assert info.model_dtype == "float32"
    assert info.max_concurrent_requests == 1
    assert info.max_client_batch_size == 32


# Control calls of the daemon.


async def test_a_later_watcher_hears_the_facts_at_once(
    worker: WorkerProcess, link: WorkerLink, connect: Connect
) -> None:
    late = await connect(worker)

    facts = (await late.ask(Method.WATCH)).json

    assert facts["state"] == "ready"
    assert facts["pid"] == worker.process.pid
    assert facts["incarnation"] == "inc-1"
    assert facts["spec_hash"] == worker.spec.hash
    assert facts["model"]["dimension"] == 32
    assert facts["permanent"] is False
    assert facts["reason"] is None


async def test_the_probe_is_passed(link: WorkerLink) -> None:
    assert (await link.ask(Method.PROBE)).reply == b""


async def test_a_worker_that_has_run_batches_since_the_last_probe_passes_without_a_self_test(link: WorkerLink) -> None:
    known = (await link.ask(Method.PROBE, b'{"batches": null}')).json["batches"]
    await link.answer(link.embed())
    before = (await link.ask(Method.STATS)).json["texts"]

    counted = (await link.ask(Method.PROBE, json.dumps({"batches": known}).encode())).json["batches"]

    assert (await link.ask(Method.STATS)).json["texts"] == before
    assert counted > known


async def test_stats_count_what_was_done(link: WorkerLink) -> None:
    before = (await link.ask(Method.STATS)).json
    await link.answer(link.embed())

    after = (await link.ask(Method.STATS)).json

    assert after["texts"] == before["texts"] + 1
    assert after["calls"] == 0
    assert after["healthy"]


async def test_a_new_number_of_threads_is_taken_and_told(
    link: WorkerLink, worker: WorkerProcess, connect: Connect
) -> None:
    watcher = await connect(worker)
    watch = watcher.post(Method.WATCH)
    assert (await watcher.answer(watch)).json["threads"] == 1

    assert (await link.ask(Method.THREADS, b'{"threads": 2, "most": 2}')).reply == b""
    assert (await watcher.answer(watch)).json["threads"] == 2
    assert (await link.ask(Method.THREADS, b'{"threads": 1, "most": 1}')).reply == b""

    assert (await watcher.answer(watch)).json["threads"] == 1
    assert len((await link.answer(link.embed())).vector) == 32


@pytest.mark.parametrize("payload", [b"", b"{}", b"[]", b'{"threads": 1}', b'{"threads": "many", "most": 2}', b"\xff"])
async def test_a_malformed_command_is_refused(link: WorkerLink, payload: bytes) -> None:
    answer = await link.ask(Method.THREADS, payload)

    assert answer.error.code is Code.INVALID_INPUT
    assert len((await link.answer(link.embed())).vector) == 32


# Bad requests are answered with an error, and the link goes on.


@pytest.mark.parametrize(
    ("method", "payload", "code"),
    [
        (Method.EMBED, b"\xff\xff", Code.INVALID_INPUT),
        (Method.EMBED_ARROW, b"\x0a\xff", Code.INVALID_INPUT),
        (Method.EMBED_ARROW, b"", Code.INVALID_INPUT),
        (
            Method.EMBED_ARROW,
            multiplexer_pb2.EmbedArrowRequest(arrow_ipc=b"junk").SerializeToString(),
            Code.INVALID_INPUT,
        ),
        (Method.TOKENIZE, b"\x08", Code.INVALID_INPUT),
        (Method.DECODE, b"\x0a\x05", Code.INVALID_INPUT),
        (Method.EMBED, embed_request(""), Code.EMPTY_INPUT),
        (Method.EMBED, embed_request("fog", prompt_name="nobody"), Code.INVALID_INPUT),
        (Method.EMBED, embed_request("fog", dimensions=33), Code.INVALID_INPUT),
        (Method.EMBED, embed_request("fog", truncation_direction=7), Code.INVALID_INPUT),
        (Method.EMBED, embed_request("rain " * 200, truncate=False), Code.INVALID_INPUT),
        (Method.EMBED_ARROW, arrow(["fog"], output_dtype=9), Code.INVALID_INPUT),
        (Method.EMBED_ARROW, arrow(["fog"], compression=9), Code.INVALID_INPUT),
        (Method.EMBED_ARROW, arrow(["fog"], truncation_direction=9), Code.INVALID_INPUT),
        (Method.EMBED_ARROW, arrow(["fog"], dimensions=33, noop=True), Code.INVALID_INPUT),
        (Method.DECODE, tei_pb2.DecodeRequest().SerializeToString(), Code.EMPTY_INPUT),
        (Method.RERANK, b"", Code.EMPTY_INPUT),
        (Method.RERANK_STREAM, b"", Code.WRONG_MODEL_KIND),
        (Method.PREDICT_PAIR, b"", Code.INVALID_INPUT),
        (63, b"", Code.INTERNAL_ERROR),
        (250, b"", Code.INTERNAL_ERROR),
    ],
)
async def test_a_bad_request_gets_a_typed_error_and_the_link_goes_on(
    link: WorkerLink, method: int, payload: bytes, code: Code
) -> None:
    answer = await link.ask(method, payload)

    assert answer.error.code is code
    assert answer.error.message
    assert len((await link.answer(link.embed())).vector) == 32
    assert await link.calls() == 0


async def test_a_frame_of_a_type_that_workers_send_is_passed_over(link: WorkerLink) -> None:
    link.send(FrameType.REPLY, Method.EMBED, 77)
    link.send(FrameType.ERROR, Method.EMBED, 78)

    assert len((await link.answer(link.embed())).vector) == 32


async def test_a_frame_over_the_limit_breaks_its_own_link_only(
    worker: WorkerProcess, link: WorkerLink, connect: Connect
) -> None:
    other = await connect(worker)
    other.send_header_of(64 << 20)

    await other.closed()

    assert len((await link.answer(link.embed())).vector) == 32


@pytest.mark.parametrize("noop", [False, True])
async def test_an_arrow_reply_over_the_limit_is_refused_before_the_work(link: WorkerLink, noop: bool) -> None:
    before = (await link.ask(Method.STATS)).json["texts"]

    answer = await link.ask(Method.EMBED_ARROW, arrow(["a"] * 9000, noop=noop))

    assert answer.error.code is Code.MESSAGE_TOO_LARGE
    assert "fewer rows per batch" in answer.error.message
    assert str(1 << 20) in answer.error.message
    assert (await link.ask(Method.STATS)).json["texts"] == before


async def test_float16_and_fewer_dimensions_make_room_for_more_rows(link: WorkerLink) -> None:
    answer = await link.ask(Method.EMBED_ARROW, arrow(["a"] * 9000, noop=True, dimensions=8, output_dtype=2))

    assert table(answer.reply).num_rows == 9000


# Room.


async def test_calls_beyond_the_room_are_refused_and_the_others_answered(link: WorkerLink) -> None:
    ids = [link.embed() for _ in range(3 * INSIDE)]

    answers = await link.answers(ids)

    assert all(len(answer.vector) == 32 for answer in answers[:INSIDE])
    assert {answer.error.code for answer in answers[INSIDE:]} == {Code.OVERLOADED}
    assert await link.calls() == 0


@pytest.mark.clause("M1.11-overload")
async def test_calls_that_may_wait_are_all_answered_in_order(link: WorkerLink) -> None:
    ids = [link.embed(flags=Flag.WAIT) for _ in range(200)]

    answers = await link.answers(ids)

    assert all(len(answer.vector) == 32 for answer in answers)
    assert link.arrived[-200:] == ids


async def test_a_cancelled_call_frees_its_room_and_is_not_answered(link: WorkerLink) -> None:
    inside = [link.embed() for _ in range(INSIDE)]
    refused = link.embed()
    link.cancel(inside[0])
    let_in = link.embed()

    assert (await link.answer(refused)).error.code is Code.OVERLOADED
    assert len((await link.answer(let_in)).vector) == 32
    await link.answers(inside[1:])
    await link.emptied()
    assert inside[0] not in link.arrived


async def test_a_call_cancelled_in_the_line_is_never_let_in(link: WorkerLink) -> None:
    ids = [link.embed(flags=Flag.WAIT) for _ in range(INSIDE + 3)]
    link.cancel(ids[-2])

    await link.answers([*ids[:-2], ids[-1]])

    await link.emptied()
    assert ids[-2] not in link.arrived


async def test_an_arrow_call_cancelled_while_it_is_decoded_does_no_work(link: WorkerLink) -> None:
    before = (await link.ask(Method.STATS)).json["texts"]
    link.cancel(link.post(Method.EMBED_ARROW, arrow(["fog"] * 4000)))
    await link.emptied()

    assert len((await link.answer(link.embed())).vector) == 32

    assert (await link.ask(Method.STATS)).json["texts"] == before + 1


async def test_a_cancel_of_nothing_is_passed_over(link: WorkerLink) -> None:
    link.cancel(4711)

    assert len((await link.answer(link.embed())).vector) == 32


async def test_a_lost_link_takes_its_calls_with_it(worker: WorkerProcess, link: WorkerLink) -> None:
    other = await worker.link()
    for _ in range(INSIDE):
        other.post(Method.EMBED_ARROW, arrow(["rain " * 30] * 2000), flags=Flag.BULK)
    for _ in range(500):
        other.embed(flags=Flag.WAIT)
    other.close()
    before = (await link.ask(Method.STATS)).json["texts"]  # a fast worker has computed some batches by now

    await link.emptied()

    # What was on the device is finished: a batch of the 10,500 texts, and one behind it.
    assert (await link.ask(Method.STATS)).json["texts"] - before < 4000
    assert len((await link.answer(link.embed())).vector) == 32


async def test_a_deadline_that_passes_in_the_queue_is_answered_so_and_frees_its_room(link: WorkerLink) -> None:
    heavy = [link.post(Method.EMBED_ARROW, arrow(["fog"] * 500)) for _ in range(INSIDE)]
    late = link.embed(flags=Flag.WAIT, deadline_ms=1)

    assert (await link.answer(late)).error.code is Code.TIMEOUT

    for answer in await link.answers(heavy):
        assert table(answer.reply).num_rows == 500
    await link.emptied()


async def test_large_replies_wait_for_a_slow_reader(worker: WorkerProcess, link: WorkerLink, connect: Connect) -> None:
    slow = await connect(worker)
    slow.read(False)
    ids = [slow.post(Method.EMBED_ARROW, arrow(["a"] * 4000, noop=True), flags=Flag.WAIT) for _ in range(30)]

    assert len((await link.answer(link.embed(flags=Flag.WAIT))).vector) == 32
    slow.read(True)

    assert [table(answer.reply).num_rows for answer in await slow.answers(ids)] == [4000] * 30


async def test_commands_in_flight_when_a_link_is_lost_hurt_nobody(worker: WorkerProcess, link: WorkerLink) -> None:
    other = await worker.link()
    for _ in range(20):
        other.post(Method.PROBE)
        other.post(Method.TOKENIZE, tei_pb2.EncodeRequest(inputs="fog").SerializeToString())
    other.close()

    async with asyncio.timeout(LIMIT_S):
        assert (await link.ask(Method.PROBE)).reply == b""
    assert "Traceback" not in worker.log


async def test_the_log_has_no_traceback_and_every_line_is_json(worker: WorkerProcess, link: WorkerLink) -> None:
    for line in worker.log.splitlines():
        assert json.loads(line)["level"] != "error", line


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> FleetNodes:
    return FleetNodes(tmp_path_factory.mktemp("fleet"))


@pytest.fixture(scope="module")
def remote(nodes: FleetNodes, tiny: Path) -> Iterator[WorkerProcess]:
    with worker_on(nodes, "gpu-1", tiny, max_message_bytes=1 << 20) as one:
        yield one


@pytest.fixture
async def endpoint(remote: WorkerProcess) -> WorkerEndpoint:
    local, _ = await remote.watcher("ready")
    local.close()
    return await endpoint_of(remote)


async def connected(endpoint: WorkerEndpoint, identity: FleetIdentity) -> WorkerLink:
    host, _, port = endpoint.address.rpartition(":")
    loop = asyncio.get_running_loop()
    _, link = await loop.create_connection(WorkerLink, host, int(port), ssl=identity.client_context())
    return link


@pytest.fixture
async def node(endpoint: WorkerEndpoint, nodes: FleetNodes) -> AsyncIterator[WorkerLink]:
    """A connection of the node head that has not sent anything."""
    link = await connected(endpoint, nodes.identity("head"))
    yield link
    await ended(link)


async def ended(link: WorkerLink) -> None:
    link.abort()  # at once: the end of a TLS connection takes an answer
    await link.closed()


def hello(incarnation: object = "inc-1") -> bytes:
    return json.dumps({"incarnation": incarnation}).encode()


async def test_hello_is_answered_by_incarnation_and_validity(node: WorkerLink) -> None:
    answer = (await node.ask(Method.HELLO, hello())).json

    assert answer["incarnation"] == "inc-1"
    assert 71 * 3600 < answer["valid_s"] < 73 * 3600


async def test_a_call_before_hello_ends_the_link(node: WorkerLink, remote: WorkerProcess) -> None:
    node.post(Method.EMBED, embed_request("fog"))

    await node.closed()
    await eventually(lambda: "a frame before HELLO" in remote.log)


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (hello("inc-2"), Code.BACKEND_UNAVAILABLE),
        (hello(None), Code.BACKEND_UNAVAILABLE),
        (b"[]", Code.INVALID_INPUT),
        (b"", Code.INVALID_INPUT),
    ],
)
async def test_a_wrong_hello_is_refused_by_name_and_ends_the_link(node: WorkerLink, payload: bytes, code: Code) -> None:
    assert (await node.ask(Method.HELLO, payload)).error.code is code
    await node.closed()


async def test_a_removed_node_loses_its_links_and_gets_no_new_one(
    node: WorkerLink, endpoint: WorkerEndpoint, remote: WorkerProcess, nodes: FleetNodes
) -> None:
    await node.ask(Method.HELLO, hello())
    write_removed(nodes.folder("gpu-1"), {"head": time.time() + 1})
    try:
        await node.closed()
        again = await connected(endpoint, FleetIdentity(nodes.folder("head"), "head"))
        await again.closed()
        await eventually(lambda: remote.log.count("node 'head' was removed from the fleet") == 2)
    finally:
        write_removed(nodes.folder("gpu-1"), {})


@pytest.mark.parametrize("method", [Method.WATCH, Method.DRAIN, Method.THREADS, Method.METRICS, Method.SHARE_PORTS])
async def test_a_node_may_not_control_a_worker(node: WorkerLink, method: Method) -> None:
    await node.ask(Method.HELLO, hello())

    assert (await node.ask(method, b"{}")).error.code is Code.FORBIDDEN
    assert (await node.ask(Method.PROBE)).reply == b""  # the self-test of a replica it may ask for
    assert len((await node.answer(node.embed())).vector) == 32


async def test_descriptors_are_passed_to_no_other_host(endpoint: WorkerEndpoint, nodes: FleetNodes) -> None:
    link = await connected(endpoint, nodes.identity(""))
    await link.ask(Method.HELLO, hello())

    assert (await link.ask(Method.SHARE_PORTS)).error.code is Code.FORBIDDEN
    await ended(link)


async def test_a_frame_over_the_limit_ends_the_link_as_on_the_socket(node: WorkerLink) -> None:
    await node.ask(Method.HELLO, hello())
    node.send_header_of(1 << 30)

    await node.closed()


async def test_a_client_that_sends_nothing_is_dropped_and_others_are_served_meanwhile(
    endpoint: WorkerEndpoint, nodes: FleetNodes, node: WorkerLink, remote: WorkerProcess
) -> None:
    host, _, port = endpoint.address.rpartition(":")
    with socket.create_connection((host, int(port))) as silent:  # no handshake
        assert (await node.ask(Method.HELLO, hello())).json["incarnation"] == "inc-1"
        quiet = await connected(endpoint, nodes.identity("head"))  # a handshake, and no HELLO
        await quiet.closed()
        assert await asyncio.to_thread(silent.recv, 1) == b""
    assert "no HELLO within 5 s" in remote.log


async def test_the_daemon_watches_and_controls_a_worker_of_another_host(
    endpoint: WorkerEndpoint, nodes: FleetNodes
) -> None:
    statuses: asyncio.Queue[WorkerStatus] = asyncio.Queue()
    identity, lost = nodes.identity(""), asyncio.Event()

    link = await open_control_link(endpoint, identity, statuses.put_nowait, lost.set)
    status = await statuses.get()

    assert (status.state, status.incarnation, status.node) == ("ready", "inc-1", "gpu-1")
    assert json.loads(await link.call(Method.STATS, timeout_s=5))["calls"] == 0
    link.abort()
    await lost.wait()


async def test_a_node_cannot_watch_as_the_daemon_does(endpoint: WorkerEndpoint, nodes: FleetNodes) -> None:
    lost = asyncio.Event()

    await open_control_link(endpoint, nodes.identity("head"), lambda status: None, lost.set)

    await asyncio.wait_for(lost.wait(), 10)


async def test_control_of_another_incarnation_is_unavailable(endpoint: WorkerEndpoint, nodes: FleetNodes) -> None:
    wrong = WorkerEndpoint(endpoint.socket, "inc-2", endpoint.node, endpoint.address)

    with pytest.raises(Unavailable, match="is incarnation inc-1, not inc-2"):
        await open_control_link(wrong, nodes.identity(""), lambda status: None, lambda: None)
