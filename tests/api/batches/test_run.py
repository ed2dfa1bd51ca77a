"""Batches at work: results once each, failures, cancellation, expiry, back-pressure, and daemons that are killed."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from tests.api.batches.conftest import OWNER, Desk, answer, input_of, line, lines, next_of, refuse_with
from tests.support.frame_worker import FrameWorker, Request, Script, hold, pack_reply
from tests.support.mux_process import running
from tests.support.polling import eventually

from teimgr.api.batches import disk
from teimgr.api.batches import lines as lines_module
from teimgr.api.batches import run as batch_run
from teimgr.api.batches.batch_record import ResultPart, Status
from teimgr.api.batches.files import DAY_S
from teimgr.errors import Code, InferenceFailed, Overloaded, error_from_code
from teimgr.observability import catalogue
from teimgr.observability.exposition import Page
from teimgr.spec import RouteEntry, State
from teimgr.wire.frames import Flag, HttpReply

StartWorker = Callable[[Script], Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses before further attempts are short."""
    monkeypatch.setattr(lines_module, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(lines_module, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(batch_run, "NO_ROOM_PAUSE_S", 0.01)


def append(desk: Desk, part: ResultPart, data: bytes) -> None:
    """Write behind the committed results."""
    with desk.batches.files.path(part.id).open("ab") as file:
        file.write(data)


async def test_every_request_has_one_result(at_work: Desk) -> None:
    batch = await at_work.begin([line("good", "fog"), line("bad", "refuse"), *lines(1000)])
    assert batch.status is Status.VALIDATING
    batch = await at_work.ended(batch)

    shown = batch.as_object()
    assert shown["status"] == "completed"
    assert shown["request_counts"] == {"total": 1002, "completed": 1001, "failed": 1}
    assert shown["model"] == "mini"
    results_by_id = at_work.all_results(batch)
    assert len(results_by_id) == 1002
    for number in range(1000):
        response = results_by_id[f"r-{number}"]["response"]
        assert (response["status_code"], response["body"]) == (200, {"echo": f"text {number}"})
    [failed] = at_work.results(batch.error_file_id)
    assert failed["custom_id"] == "bad"
    assert (failed["response"]["status_code"], failed["error"]) == (400, None)
    assert [each.purpose for each in at_work.batches.files.of(OWNER)] == ["batch", "batch_output", "batch_output"]


async def test_requests_go_to_the_bulk_lane(desk: Desk, start_worker: StartWorker) -> None:
    worker: FrameWorker = await start_worker(answer)
    desk.worker("mini", worker)
    await desk.start()
    await desk.ended(await desk.begin(lines(3)))

    assert [(await next_of(worker)).flags for _ in range(3)] == [Flag.BULK] * 3


async def test_a_faulty_file_fails_as_a_whole(at_work: Desk) -> None:
    requests = [line("a"), b"{", line("a"), line("b", model="nobody"), line("c", model="nobody")]
    data = b"\n".join(each if isinstance(each, bytes) else orjson.dumps(each) for each in requests)
    batch = await at_work.ended(await at_work.begin(data))

    shown = batch.as_object()
    assert (shown["status"], shown["output_file_id"]) == ("failed", None)
    errors = shown["errors"]["data"]
    assert [(each["line"], each["code"], each["param"]) for each in errors] == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "model_not_found", "body.model"),
        (5, "model_not_found", "body.model"),
    ]
    assert "'mini'" in errors[2]["message"]


@pytest.mark.parametrize(
    ("data", "code"), [(b"\n \n", "empty_file"), (b"{\n" * 500, "invalid_json_line")], ids=["empty", "broken"]
)
async def test_faults_are_bounded(at_work: Desk, data: bytes, code: str) -> None:
    batch = await at_work.ended(await at_work.begin(data))
    assert batch.faults[-1].code == code
    assert len(batch.faults) in (1, 100)


async def test_too_many_lines_are_refused(desk: Desk, start_worker: StartWorker) -> None:
    desk.worker("mini", await start_worker(answer))
    await desk.start(max_lines=10)
    assert (await desk.ended(await desk.begin(lines(10)))).status is Status.COMPLETED
    batch = await desk.ended(await desk.begin(lines(11)))
    assert [fault.code for fault in batch.faults] == ["too_many_requests"]


async def test_failures_that_pass_are_tried_again(desk: Desk, start_worker: StartWorker) -> None:
    attempts: Counter[str] = Counter()

    def sometimes(request: Request) -> None:
        text = input_of(request)
        attempts[text] += 1
        if attempts[text] <= 2:
            refuse_with(request, Overloaded())
        else:
            answer(request)

    desk.worker("mini", await start_worker(sometimes))
    await desk.start()
    batch = await desk.ended(await desk.begin(lines(2)))

    assert batch.progress.output.lines == 2
    assert set(attempts.values()) == {3}


async def test_a_request_that_always_fails_is_given_up(desk: Desk, start_worker: StartWorker) -> None:
    attempts: Counter[str] = Counter()

    def failing(request: Request) -> None:
        text = input_of(request)
        attempts[text] += 1
        if text == "text 0":
            refuse_with(request, InferenceFailed("NaN"))
        elif text == "text 1":
            request.fail(error_from_code(Code.TIMEOUT, "Request timeout"))
        else:
            answer(request)

    desk.worker("mini", await start_worker(failing))
    await desk.start()
    batch = await desk.ended(await desk.begin(lines(3)))

    found = desk.all_results(batch)
    assert attempts == {"text 0": 4, "text 1": 4, "text 2": 1}
    assert found["r-0"]["response"]["status_code"] == 500
    assert (found["r-1"]["response"], found["r-1"]["error"]["code"]) == (None, "request_timeout")


async def test_a_request_that_ends_its_worker_is_given_up(desk: Desk, start_worker: StartWorker) -> None:
    def deadly(request: Request) -> None:
        if input_of(request) == "text 0":
            request.link.close()
        else:
            answer(request)

    desk.worker("mini", await start_worker(deadly))
    await desk.start()
    batch = await desk.ended(await desk.begin(lines(1)))

    assert desk.all_results(batch)["r-0"]["response"]["status_code"] == 503


async def test_vectors_as_bytes_are_an_error_of_the_line(desk: Desk, start_worker: StartWorker) -> None:
    def binary(request: Request) -> None:
        request.reply(pack_reply(HttpReply(200, {"content-type": "application/octet-stream"}, b"\x00\xff")))

    desk.worker("mini", await start_worker(binary))
    await desk.start()
    batch = await desk.ended(await desk.begin(lines(1)))

    [found] = desk.results(batch.error_file_id)
    assert "encoding_format" in found["response"]["body"]["error"]["message"]


async def test_the_tokens_of_all_replies_are_summed(desk: Desk, start_worker: StartWorker) -> None:
    def counted(request: Request) -> None:
        usage = {"prompt_tokens": 7, "total_tokens": 7}
        body = orjson.dumps({"data": [{"embedding": [0.5] * 500}], "usage": usage})
        request.reply(pack_reply(HttpReply(200, {"content-type": "application/json"}, body)))

    desk.worker("mini", await start_worker(counted))
    await desk.start()
    batch = await desk.ended(await desk.begin(lines(30)))

    assert batch.as_object()["usage"]["input_tokens"] == 7 * 30


async def test_a_daemon_that_stops_keeps_what_was_answered(
    desk: Desk, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "_COMMIT_S", 3600)
    worker: FrameWorker = await start_worker(hold)
    desk.worker("mini", worker)
    await desk.start()
    batch = await desk.begin(lines(2))
    answer(await next_of(worker))
    [run] = desk.batches._runs.values()
    await eventually(lambda: run._results.rows())
    await desk.stop()
    await desk.start(at_work=False)

    assert desk.batches.get(OWNER, batch.id).progress.output.lines == 1


async def test_a_batch_waits_for_its_model(desk: Desk, start_worker: StartWorker) -> None:
    desk.directory.publish(RouteEntry("mini", "model", State.STARTING, None, 1, ()))
    await desk.start()
    batch = await desk.begin(lines(3))
    await eventually(lambda: batch.status is Status.IN_PROGRESS)
    desk.directory.publish(running("mini", await start_worker(answer)))

    assert (await desk.ended(batch)).progress.output.lines == 3


async def test_cancelling_keeps_what_is_done(desk: Desk, start_worker: StartWorker) -> None:
    def some(request: Request) -> None:
        if int(input_of(request).split()[1]) < 10:
            answer(request)

    worker: FrameWorker = await start_worker(some)
    desk.worker("mini", worker)
    await desk.start(concurrency=20)
    batch = await desk.begin(lines(100))
    await eventually(lambda: batch.progress.output.lines == 10)
    shown = await desk.batches.cancel(OWNER, batch.id)
    assert shown.as_object()["status"] == "cancelling"
    batch = await desk.ended(batch)

    assert batch.as_object()["request_counts"] == {"total": 100, "completed": 10, "failed": 90}
    assert batch.as_object()["cancelled_at"] is not None
    found = desk.all_results(batch)
    assert {found[f"r-{number}"]["error"]["code"] for number in range(10, 100)} == {"batch_cancelled"}
    assert await asyncio.wait_for(worker.cancels.get(), 20)


async def test_a_batch_that_is_validating_can_be_cancelled(desk: Desk) -> None:
    await desk.start(at_work=False)
    batch = await desk.begin(lines(3))
    await desk.batches.cancel(OWNER, batch.id)
    await desk.work()
    batch = await desk.ended(batch)

    assert (batch.status, batch.output_file_id, batch.error_file_id) == (Status.CANCELLED, None, None)


async def test_a_batch_expires(desk: Desk, start_worker: StartWorker) -> None:
    def some(request: Request) -> None:
        if input_of(request) == "text 0":
            answer(request)

    desk.worker("mini", await start_worker(some))
    await desk.start()
    batch = await desk.ended(await desk.begin(lines(5), window="1s"))

    assert batch.status is Status.EXPIRED
    assert batch.as_object()["expired_at"] is not None
    found = desk.all_results(batch)
    assert len(found) == 5
    assert found["r-0"]["response"]["status_code"] == 200
    assert {found[f"r-{number}"]["error"]["code"] for number in range(1, 5)} == {"batch_expired"}


async def test_few_requests_are_in_the_worker_at_a_time(desk: Desk, start_worker: StartWorker) -> None:
    worker: FrameWorker = await start_worker(hold)
    desk.worker("mini", worker)
    await desk.start(concurrency=4)
    batches = [await desk.begin(lines(20)), await desk.begin(lines(20))]
    held = [await next_of(worker) for _ in range(4)]
    for _ in range(36):
        assert worker.requests.empty()
        answer(held.pop())
        held.append(await next_of(worker))
    for request in held:
        answer(request)

    assert [(await desk.ended(batch)).progress.output.lines for batch in batches] == [20, 20]


async def test_large_requests_are_bounded_by_their_bytes(desk: Desk, start_worker: StartWorker) -> None:
    worker: FrameWorker = await start_worker(hold)
    desk.worker("mini", worker)
    await desk.start()
    many = [line(f"r-{number}") | {"body": {"model": "mini", "input": ["x"] * 2048}} for number in range(5)]
    batch = await desk.begin(many)
    for _ in range(5):
        request = await next_of(worker)
        assert worker.requests.qsize() <= 1
        answer(request)

    assert (await desk.ended(batch)).progress.output.lines == 5


async def test_a_killed_daemon_is_resumed_without_doing_anything_twice(desk: Desk, start_worker: StartWorker) -> None:
    asked: Counter[str] = Counter()

    def half(request: Request) -> None:
        asked[input_of(request)] += 1
        if len(asked) <= 500:
            answer(request)

    desk.worker("mini", await start_worker(half))
    await desk.start()
    batch = await desk.begin([line("bad", "refuse"), *lines(999)])
    await eventually(lambda: batch.progress.output.lines == 499 and batch.progress.error.lines == 1)
    await desk.stop()
    # What a kill between the write of results and that of the record leaves.
    append(desk, batch.progress.output, b'{"custom_id":"torn')
    append(desk, batch.progress.error, b'{"custom_id":"torn')
    first = set(asked)

    again: Counter[str] = Counter()

    def rest(request: Request) -> None:
        again[input_of(request)] += 1
        answer(request)

    desk.worker("mini", await start_worker(rest))
    await desk.start()
    batch = await desk.ended(batch)

    assert batch.status is Status.COMPLETED
    assert len(desk.all_results(batch)) == 1000
    assert len(again) == 500
    assert set(again.values()) == {1}
    assert len(first & set(again)) <= 64  # those that were in the worker


@pytest.mark.parametrize("end", [Status.EXPIRED, Status.CANCELLED])
async def test_results_that_a_kill_left_uncommitted_are_not_served(
    desk: Desk, start_worker: StartWorker, end: Status
) -> None:
    def some(request: Request) -> None:
        if input_of(request) == "text 0":
            answer(request)

    desk.worker("mini", await start_worker(some))
    await desk.start()
    batch = await desk.begin(lines(3))
    await eventually(lambda: batch.progress.output.lines == 1)
    await desk.stop()
    append(desk, batch.progress.output, b'{"custom_id":"r-1","response":{"status_code":200,"body":{}},"error":null}\n')
    await desk.start(at_work=False)
    if end is Status.CANCELLED:
        await desk.batches.cancel(OWNER, batch.id)
    else:
        desk.now += 2 * DAY_S
    await desk.work()
    batch = await desk.ended(batch)

    assert batch.status is end
    found = desk.all_results(batch)
    assert [found[f"r-{number}"]["error"] is None for number in range(3)] == [True, False, False]


async def test_a_batch_that_was_being_published_is_published(at_work: Desk) -> None:
    batch = await at_work.ended(await at_work.begin(lines(3)))
    record = at_work.settings.state_file.parent / "batches" / "records" / f"{batch.id}.json"
    await at_work.stop()
    # As a kill leaves it: the results are files already, the record is that of before.
    record.write_bytes(orjson.dumps(orjson.loads(record.read_bytes()) | {"status": "finalizing"}))
    await at_work.start()
    batch = await at_work.ended(batch)

    assert batch.status is Status.COMPLETED
    assert len(at_work.all_results(batch)) == 3
    assert at_work.batches.files.stored_bytes == sum(each.size for each in at_work.batches.files.of(OWNER))


async def test_a_full_disk_holds_a_batch_up_and_is_an_alarm(
    desk: Desk, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.worker("mini", await start_worker(answer))
    await desk.start(at_work=False)
    batch = await desk.begin(lines(3000))

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(disk.os, "pwrite", full)
        await desk.work()
        await eventually(lambda: desk.batches.alarms() != [])
        assert desk.batches.alarms() == ["1 batches cannot continue: No room on the disk: No space left on device"]
    batch = await desk.ended(batch)

    assert len(desk.all_results(batch)) == 3000
    assert desk.batches.alarms() == []


async def test_the_quota_holds_a_batch_up_until_files_are_deleted(desk: Desk, start_worker: StartWorker) -> None:
    desk.worker("mini", await start_worker(answer))
    await desk.start(max_key_mb=1)
    ballast = await desk.store(bytes(900 * 1024))
    batch = await desk.begin(lines(700))
    await eventually(lambda: desk.batches.alarms() != [])
    assert "batches.max_key_mb" in desk.batches.alarms()[0]
    await desk.batches.delete_file(OWNER, ballast.id)

    assert len(desk.all_results(await desk.ended(batch))) == 700


async def test_the_metrics_show_batches_and_lines(at_work: Desk) -> None:
    await at_work.ended(await at_work.begin([line("bad", "refuse"), *lines(9)]))

    page: Page = await at_work.metrics.page() | await at_work.batches.page()
    by_status = {sample.labels["status"]: sample.value for sample in page[catalogue.BATCHES_BY_STATUS]}
    assert by_status == dict.fromkeys((status.value for status in Status), 0) | {"completed": 1}
    by_outcome = {sample.labels["outcome"]: sample.value for sample in page[catalogue.BATCH_LINES]}
    assert by_outcome == {"completed": 9, "failed": 1}
    assert page[catalogue.STORED_BYTES][0].value == at_work.batches.files.stored_bytes
