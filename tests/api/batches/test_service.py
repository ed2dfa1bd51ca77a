"""Batches by owner: rights, quotas, which of them run, and the end of old ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.api.batches.conftest import OWNER, Desk, answer, lines, next_of
from tests.support.frame_worker import FrameWorker, Script, hold
from tests.support.polling import eventually

from teimgr.api.batches import service
from teimgr.api.batches.batch_record import Status
from teimgr.api.batches.files import BATCH_OUTPUT, DAY_S
from teimgr.api.batches.service import BatchRequest
from teimgr.errors import InvalidConfig, ObjectInUse, ObjectNotFound, QuotaExceeded, ValidationError
from teimgr.http.auth.policy import Key, Policy

StartWorker = Callable[[Script], Any]


def key(name: str, *instances: str, right: str = "inference") -> Key:
    return Key(name, "0" * 64, (right,), instances or None)


async def test_a_folder_that_cannot_be_used_is_named(desk: Desk) -> None:
    (desk.settings.state_file.parent / "batches").write_text("a file")
    with pytest.raises(InvalidConfig, match=r"Cannot use batches directory: .*batches: File exists"):
        await desk.start()


async def test_a_record_that_cannot_be_read_is_left_where_it_is(at_work: Desk) -> None:
    batch = await at_work.ended(await at_work.begin(lines(1)))
    record = at_work.settings.state_file.parent / "batches" / "records" / f"{batch.id}.json"
    await at_work.stop()
    record.write_text("{")
    await at_work.start()

    assert at_work.batches.of(OWNER) == []
    assert record.read_text() == "{"


async def test_a_batch_is_that_of_its_owner_alone(at_work: Desk) -> None:
    batch = await at_work.begin(lines(1))

    assert at_work.batches.of("other") == []
    for call in (at_work.batches.get, at_work.batches.cancel):
        with pytest.raises(ObjectNotFound, match=f"No such batch: {batch.id}"):
            await call("other", batch.id)  # type: ignore[misc]
    with pytest.raises(ObjectNotFound, match="No such File object"):
        await at_work.batches.create("other", BatchRequest(batch.input_file_id, batch.endpoint, "24h"))


async def test_a_batch_uses_only_what_its_key_may_use(desk: Desk, start_worker: StartWorker) -> None:
    for name in ("mini", "theirs"):
        desk.worker(name, await start_worker(answer))
    desk.policy.swap(Policy(keys=(key(OWNER, "mini"),)))
    await desk.start()

    assert (await desk.ended(await desk.begin(lines(1)))).status is Status.COMPLETED
    batch = await desk.ended(await desk.begin(lines(1, model="theirs")))
    assert [fault.code for fault in batch.faults] == ["model_not_found"]
    assert "'theirs' does not exist" in batch.faults[0].message


@pytest.mark.parametrize(
    ("keys", "why"), [((), "no longer accepted"), ((key(OWNER, right="read"),), "lacks the right inference")]
)
async def test_a_key_that_loses_its_rights_gets_no_further_result(
    desk: Desk, start_worker: StartWorker, keys: tuple[Key, ...], why: str
) -> None:
    worker: FrameWorker = await start_worker(hold)
    desk.worker("mini", worker)
    desk.policy.swap(Policy(keys=(key(OWNER),)))
    await desk.start(concurrency=1)
    batch = await desk.begin(lines(3))
    request = await next_of(worker)
    desk.policy.swap(Policy(keys=keys))
    answer(request)
    batch = await desk.ended(batch)

    found = desk.all_results(batch)
    assert found["r-0"]["response"]["status_code"] == 200
    for name in ("r-1", "r-2"):
        assert found[name]["response"]["status_code"] == 403
        assert why in found[name]["response"]["body"]["error"]["message"]


async def test_what_is_wrong_with_a_request_is_named(at_work: Desk) -> None:
    file, output = await at_work.store(lines(1)), await at_work.store(b"", purpose=BATCH_OUTPUT)
    for request, why in (
        (BatchRequest(file.id, "/v1/chat/completions", "24h"), "endpoint: must be one of /v1/embeddings"),
        (BatchRequest(file.id, "/v1/embeddings", "8d"), "completion_window"),
        (BatchRequest(output.id, "/v1/embeddings", "24h"), "input_file_id: the purpose"),
    ):
        with pytest.raises(ValidationError, match=why):
            await at_work.batches.create(OWNER, request)


async def test_unfinished_batches_are_bounded(desk: Desk) -> None:
    await desk.start(at_work=False, max_batches=2)
    for _ in range(2):
        await desk.begin(lines(1))
    with pytest.raises(QuotaExceeded, match=r"2 batches of this API key have not ended.*batches\.max_batches"):
        await desk.begin(lines(1))
    await desk.begin(lines(1), owner="other")


async def test_the_input_of_an_unfinished_batch_stays(desk: Desk, start_worker: StartWorker) -> None:
    desk.worker("mini", await start_worker(answer))
    await desk.start(at_work=False)
    file = await desk.store(lines(1), lifetime_s=3600)
    batch = await desk.batches.create(OWNER, BatchRequest(file.id, "/v1/embeddings", "24h"))
    with pytest.raises(ObjectInUse, match=batch.id):
        await desk.batches.delete_file(OWNER, file.id)
    desk.now += 2 * 3600
    await desk.work()  # which deletes expired files first

    assert (await desk.ended(batch)).status is Status.COMPLETED
    await desk.batches.sweep()
    assert file.id not in {each.id for each in desk.batches.files.expired()}


async def test_the_owner_with_the_fewest_at_work_comes_first(
    desk: Desk, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_RUNNING", 2)
    desk.worker("mini", await start_worker(hold))
    await desk.start(at_work=False)
    batches = [await desk.begin(lines(1), owner=owner) for owner in ("a", "a", "a", "b")]
    await desk.work()

    await eventually(lambda: [each.status for each in batches].count(Status.IN_PROGRESS) == 2)
    assert [each.status is Status.IN_PROGRESS for each in batches] == [True, False, False, True]


async def test_a_save_under_way_brings_no_removed_batch_back(at_work: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = await at_work.ended(await at_work.begin(lines(1)))
    store, goes_on = at_work.batches._store, threading.Event()
    write = store._write

    def write_late(id: str, record: bytes) -> None:
        assert goes_on.wait(20)
        write(id, record)

    monkeypatch.setattr(store, "_write", write_late)
    saving = asyncio.create_task(store.save(batch))
    await asyncio.sleep(0)
    removing = asyncio.create_task(store.remove(batch))
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.gather(saving, removing, store.save(batch))

    assert list((at_work.settings.state_file.parent / "batches").rglob(f"{batch.id}*")) == []


async def test_old_batches_and_their_files_end(at_work: Desk) -> None:
    batch = await at_work.ended(await at_work.begin(lines(1)))
    at_work.now += 29 * DAY_S
    await at_work.batches.sweep()
    assert len(at_work.batches.files.of(OWNER)) == 2
    at_work.now += 2 * DAY_S
    await at_work.batches.sweep()

    assert at_work.batches.of(OWNER) == []
    folder = at_work.settings.state_file.parent / "batches"
    assert [path.name for path in folder.rglob("*") if path.is_file()] == []
    with pytest.raises(ObjectNotFound):
        at_work.batches.get(OWNER, batch.id)


async def test_a_batch_is_kept_from_its_end_on(desk: Desk, start_worker: StartWorker) -> None:
    desk.worker("mini", await start_worker(answer))
    await desk.start(at_work=False)
    batch = await desk.begin(lines(1), window="7d")
    desk.now += 5 * DAY_S
    await desk.work()
    await desk.ended(batch)
    desk.now += 29 * DAY_S
    await desk.batches.sweep()
    assert [each.id for each in desk.batches.of(OWNER)] == [batch.id]
    desk.now += 2 * DAY_S
    await desk.batches.sweep()

    assert desk.batches.of(OWNER) == []


async def test_ended_batches_are_bounded(at_work: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teimgr.api.batches.batch_store.MAX_ENDED", 2)
    made = [await at_work.ended(await at_work.begin(lines(1))) for _ in range(4)]

    assert [each.id for each in at_work.batches.of(OWNER)] == [each.id for each in made[1:]]
