"""The Arrow call of several outputs through a real daemon: a stream of any length in constant memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import psutil
import pyarrow as pa
import pytest
from tests.support.daemon_process import DaemonProcess
from tests.support.models import TOKEN_WIDTH, build_multi_vector, build_static

from teimgr.client import Client
from teimgr.errors import InstanceNotFound, InvalidInput, TooLarge, WrongModelKind

ROWS = 2000
WARM = 15
MIB = 1 << 20
KEY_BYTES = 5000
# What allocators may keep beyond the warm state: less than half of what passes through afterwards in the short run.
GROWTH_BYTES = 56 * MIB


@pytest.fixture(scope="module")
def client(daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of the daemon, which has the instances `static` and `late` for the time of this file."""
    folders = {
        "static": build_static(tmp_path_factory.mktemp("m")),
        "late": build_multi_vector("bert", tmp_path_factory.mktemp("m")),
    }
    with daemon.client() as client:
        for name, folder in folders.items():
            client.create(name, str(folder))
        for name in folders:
            client.wait_until_running(name, deadline_s=60)
        yield client
        for name in folders:
            client.delete(name)


def table(number: int) -> pa.Table:
    first = number * ROWS
    texts = [
        f"the quick brown fox {row} jumps over the lazy dog, {'and the boats lie in fog ' * (row % 4)}"
        for row in range(first, first + ROWS)
    ]
    key = pa.array([bytes(KEY_BYTES)] * ROWS)
    return pa.table({"id": np.arange(first, first + ROWS), "text": texts, "key": key})


def memory(daemon: DaemonProcess) -> dict[int, int]:
    """Resident bytes of every process that a call goes through, and of this one."""
    processes = [*daemon.processes(), psutil.Process()]
    return {process.pid: process.memory_info().rss for process in processes}


@pytest.mark.parametrize("batches", [30, pytest.param(100, marks=pytest.mark.long)])
def test_a_stream_of_any_length_needs_the_memory_of_a_few_batches(
    daemon: DaemonProcess, client: Client, batches: int
) -> None:
    before: dict[int, int] = {}
    sent = rows = 0

    def tables() -> Iterator[pa.Table]:
        nonlocal sent
        for number in range(batches):
            sent += 1
            yield table(number)

    stream = client.infer_stream(tables(), instance="static", keys=["id", "key"], window=4)
    for number, answer in enumerate(stream):
        assert answer["id"][0].as_py() == rows
        assert answer["error"].null_count == answer.num_rows == ROWS
        assert sent - number <= 4 + 2
        rows += answer.num_rows
        if number == WARM:
            before = memory(daemon)
    grown = {pid: after - before[pid] for pid, after in memory(daemon).items() if pid in before}

    assert rows == ROWS * batches
    assert len(grown) >= 3
    assert max(grown.values()) < GROWTH_BYTES, grown


def test_a_slow_reader_holds_the_stream_up_instead_of_filling_memory(client: Client) -> None:
    sent = 0

    def tables() -> Iterator[pa.Table]:
        nonlocal sent
        for number in range(1000):
            sent += 1
            yield table(number)

    stream = client.infer_stream(tables(), instance="static", window=4)
    next(stream)
    other = client.infer(table(0), instance="static")
    stream.close()

    assert other.num_rows == ROWS
    assert sent <= 1 + 4 + 2


def test_vectors_per_token_of_a_late_interaction_model_come_back_typed(client: Client) -> None:
    texts = pa.table({"id": ["a", "b", "c"], "text": ["fog and rain", None, "the lazy dog"]})

    found = client.infer(texts, instance="late", keys=["id"], token_type="ubinary")
    single = client.embed_all(["fog and rain", "the lazy dog"], instance="late")

    assert found.column_names == ["id", "multi_vector", "error"]
    first, none, last = found["multi_vector"].to_pylist()
    assert none is None
    for bits, vectors in ((first, single[0]), (last, single[1])):
        assert vectors.shape[1] == TOKEN_WIDTH
        np.testing.assert_array_equal(bits, np.packbits(vectors > 0, axis=-1))


def test_failures_of_the_whole_call_keep_their_kind(client: Client) -> None:
    texts = pa.table({"text": ["fog"]})

    with pytest.raises(WrongModelKind, match="Model is not a classifier model"):
        client.infer(texts, instance="late", outputs=["scores"])
    with pytest.raises(InvalidInput, match="No column is named `text`"):
        client.infer(pa.table({"query": ["fog"]}), instance="late")
    with pytest.raises(InstanceNotFound):
        client.infer(texts, instance="nope")
    with pytest.raises(TooLarge, match="Arrow batch has 400000 rows, the limit is 100000 rows"):
        client.infer(pa.table({"text": ["fog"] * 400_000}), instance="static", batch_rows=400_000)
    with pytest.raises(WrongModelKind):
        list(client.infer_stream(iter([texts, texts]), instance="late", outputs=["dense"]))


@pytest.mark.clause("N-arrow-stream", "N-arrow-stream-failure")
def test_a_failing_row_is_told_and_the_stream_goes_on(client: Client) -> None:
    tables = [pa.table({"text": ["fog", ""]}), pa.table({"text": [None, "dog"]})]

    first, second = client.infer_stream(tables, instance="static")

    assert [error is None for error in first["error"].to_pylist()] == [True, False]
    assert [error is None for error in second["error"].to_pylist()] == [False, True]
