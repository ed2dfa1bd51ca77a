"""Files embedded: outputs, failed rows, broken streams, and runs that are killed."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.polling import eventually
from tests.support.small_servers import DIM, INSTANCE, Multiplexer, vector_of

from teimgr.client import Client
from teimgr.client.corpus import EmbeddedFile, embed_file, job
from teimgr.errors import CallOverQuota, InstanceNotFound, InvalidConfig, Refused, SpaceDiffers, Unavailable
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2
from teimgr.wire.spaces import PRECISION_KEY, SPACE_KEY

LIMIT_S = 60


async def embed(url: str, source: Path, output: Path, **options: Any) -> EmbeddedFile:
    def body() -> EmbeddedFile:
        with Client(grpc=url) as client:
            return embed_file(client, source, output, **({"instance": INSTANCE} | options))

    return await asyncio.wait_for(asyncio.to_thread(body), LIMIT_S)


def texts_file(folder: Path, count: int, refused: frozenset[int] = frozenset()) -> Path:
    """Lines `text 0`, `text 1`, …; those in `refused` are refused by the server."""
    file = folder / "texts.txt"
    file.write_text("".join("refuse\n" if row in refused else f"text {row}\n" for row in range(count)))
    return file


def vectors(output: Path) -> np.ndarray:
    if output.suffix == ".npy":
        return np.load(output)
    table = pq.read_table(output) if output.suffix == ".parquet" else pa.ipc.open_file(output).read_all()
    assert table["row"].to_pylist() == list(range(table.num_rows))
    rows = [row if row is not None else [np.nan] * DIM for row in table["embedding"].to_pylist()]
    return np.array(rows, np.float32)


def expected(count: int, refused: frozenset[int] = frozenset()) -> np.ndarray:
    rows = [np.full(DIM, np.nan) if row in refused else vector_of(f"text {row}") for row in range(count)]
    return np.array(rows, np.float32)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".npy"])
async def test_row_i_of_the_output_is_row_i_of_the_source(suffix: str, mux_url: str, tmp_path: Path) -> None:
    refused = frozenset({3, 64, 499})
    output = tmp_path / f"v{suffix}"

    done = await embed(mux_url, texts_file(tmp_path, 500, refused), output, batch_rows=64)

    assert (done.rows, done.failed, done.dimension, done.resumed_at) == (500, 3, DIM, 0)
    np.testing.assert_array_equal(vectors(output), expected(500, refused))
    failures = [json.loads(line) for line in (done.failures or tmp_path).read_text().splitlines()]
    assert [(each["row"], each["text"], each["error"]) for each in failures] == [
        (row, "refuse", "no such text") for row in sorted(refused)
    ]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["texts.txt", f"v{suffix}", f"v{suffix}.failed.jsonl"]


async def test_columns_are_copied_and_half_precision_is_stored(mux_url: str, tmp_path: Path) -> None:
    source, output = tmp_path / "a.parquet", tmp_path / "v.parquet"
    pq.write_table(pa.table({"key": ["a", "b"], "body": ["x", "y"], "row": [7, 8]}), source)
    await embed(mux_url, source, output, text_column="body", keep=["key"], float16=True)
    table = pq.read_table(output)
    assert table["key"].to_pylist() == ["a", "b"]
    assert table.schema.field("embedding").type == pa.list_(pa.float16(), DIM)


async def test_kept_columns_with_dictionaries_are_copied_as_their_values(mux_url: str, tmp_path: Path) -> None:
    source, output = tmp_path / "a.parquet", tmp_path / "v.parquet"
    words = [f"w{row // 50}" for row in range(300)]
    flat = pa.array(words).dictionary_encode()
    table = pa.table({"text": [f"text {row}" for row in range(300)], "id": flat})
    pq.write_table(table, source, row_group_size=100)
    await embed(mux_url, source, output, batch_rows=64)
    assert pq.read_table(output)["id"].to_pylist() == words
    np.testing.assert_array_equal(vectors(output), expected(300))

    source, output = tmp_path / "a.arrow", tmp_path / "v.arrow"
    lists = pa.ListArray.from_arrays(pa.array(range(301), pa.int32()), flat)
    table = table.append_column("nested", pa.StructArray.from_arrays([lists], ["in"]))
    with pa.ipc.new_file(source, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    await embed(mux_url, source, output, keep=["id", "nested"], batch_rows=64)
    found = pa.ipc.open_file(output).read_all()
    assert found["id"].to_pylist() == words
    assert found["nested"].to_pylist() == [{"in": [word]} for word in words]


@pytest.mark.parametrize("name", ["row", "embedding"])
async def test_columns_of_the_output_cannot_be_kept(
    name: str, mux_url: str, multiplexer: Breaking, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"text": ["a"], name: [1]}), tmp_path / "a.parquet")
    with pytest.raises(InvalidConfig, match=f"the column '{name}' cannot be kept"):
        await embed(mux_url, tmp_path / "a.parquet", tmp_path / "v.parquet", keep=[name])
    assert [each.name for each in tmp_path.iterdir()] == ["a.parquet"]
    assert multiplexer.streams == 0


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
async def test_a_column_is_kept_once_whatever_its_name(suffix: str, mux_url: str, tmp_path: Path) -> None:
    source, output = tmp_path / f"a{suffix}", tmp_path / "v.parquet"
    rows = [{"body": "x", "text": "t0", "fault": "f0"}, {"body": "refuse", "text": "t1", "fault": "f1"}]
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), source)
    elif suffix == ".csv":
        source.write_text("body,text,fault\nx,t0,f0\nrefuse,t1,f1\n")
    else:
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    done = await embed(mux_url, source, output, text_column="body", keep=["text", "fault", "text", "body"])

    found = pq.read_table(output)
    assert found.column_names == ["row", "text", "fault", "body", "embedding"]
    assert found.drop_columns(["row", "embedding"]).to_pylist() == rows
    assert [each is None for each in found["embedding"].to_pylist()] == [False, True]
    [failure] = (done.failures or tmp_path).read_text().splitlines()
    assert json.loads(failure) == {"row": 1, "error": "no such text", "text": "refuse"}


async def test_an_empty_file_gives_an_empty_file(mux_url: str, tmp_path: Path) -> None:
    for suffix in (".parquet", ".arrow", ".npy"):
        done = await embed(mux_url, texts_file(tmp_path, 0), tmp_path / f"v{suffix}")
        assert (done.rows, len(vectors(tmp_path / f"v{suffix}"))) == (0, 0)


async def test_a_source_is_not_replaced_by_its_vectors(mux_url: str, tmp_path: Path) -> None:
    source, link = tmp_path / "a.parquet", tmp_path / "b.parquet"
    pq.write_table(pa.table({"text": ["a"]}), source)
    link.symlink_to(source)
    for output in (source, link):
        with pytest.raises(Refused, match="is the source"):
            await embed(mux_url, source, output, overwrite=True)
    assert pq.read_table(source).column_names == ["text"]
    assert len(list(tmp_path.iterdir())) == 2


async def test_a_run_that_was_refused_is_corrected_by_the_next(mux_url: str, tmp_path: Path) -> None:
    source, output = texts_file(tmp_path, 3), tmp_path / "v.npy"
    with pytest.raises(InstanceNotFound):
        await embed(mux_url, source, output, instance="nope")
    assert [each.name for each in tmp_path.iterdir()] == ["texts.txt"]
    await embed(mux_url, source, output)


class Breaking(Multiplexer):
    """Ends each stream as unavailable after some answers, or holds it."""

    breaks_after: int | None = None
    holds_after: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.held = asyncio.Event()
        self.streams = 0

    async def EmbedArrowStream(
        self, requests: AsyncIterator[mux_pb2.EmbedArrowRequest], context: Any
    ) -> AsyncIterator[mux_pb2.EmbedArrowResponse]:
        self.streams += 1
        answered = 0
        async for answer in super().EmbedArrowStream(requests, context):
            if self.breaks_after is not None and answered >= self.breaks_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker ended")
            if answered == self.holds_after:
                self.held.set()
                await asyncio.Event().wait()
            answered += 1
            yield answer


@pytest.fixture
def multiplexer() -> Breaking:
    return Breaking()


async def test_a_broken_stream_is_begun_again_where_it_was(mux_url: str, multiplexer: Breaking, tmp_path: Path) -> None:
    multiplexer.breaks_after = 2
    done = await embed(mux_url, texts_file(tmp_path, 500), tmp_path / "v.npy", batch_rows=64)
    assert done.rows == 500
    assert multiplexer.streams >= 4  # more where replies are slow and messages become shorter
    np.testing.assert_array_equal(vectors(tmp_path / "v.npy"), expected(500))


class Limited(Multiplexer):
    """Takes messages of some rows."""

    rows, code = 100, "CALL_OVER_QUOTA"

    async def EmbedArrowStream(
        self, requests: AsyncIterator[mux_pb2.EmbedArrowRequest], context: Any
    ) -> AsyncIterator[mux_pb2.EmbedArrowResponse]:
        async for answer in super().EmbedArrowStream(requests, context):
            if pa.ipc.open_stream(answer.arrow_ipc).read_all().num_rows > self.rows:
                details = (("x-teimgr-code", self.code),)
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "more than the burst", details)
            yield answer


class TestALimitOfOneMessage:
    @pytest.fixture
    def multiplexer(self) -> Limited:
        return Limited()

    @pytest.mark.parametrize(
        ("rows", "code"), [(100, "CALL_OVER_QUOTA"), (20, "MESSAGE_TOO_LARGE"), (1, "CALL_OVER_QUOTA")]
    )
    async def test_messages_become_shorter_than_it(
        self, mux_url: str, multiplexer: Limited, rows: int, code: str, tmp_path: Path
    ) -> None:
        multiplexer.rows, multiplexer.code = rows, code
        await embed(mux_url, texts_file(tmp_path, 500), tmp_path / "v.npy")
        np.testing.assert_array_equal(vectors(tmp_path / "v.npy"), expected(500))

    async def test_a_row_beyond_it_ends_the_run(self, mux_url: str, multiplexer: Limited, tmp_path: Path) -> None:
        multiplexer.rows = 0
        with pytest.raises(CallOverQuota, match="more than the burst"):
            await embed(mux_url, texts_file(tmp_path, 500), tmp_path / "v.npy")


async def test_without_progress_it_ends_and_can_be_resumed(mux_url: str, multiplexer: Breaking, tmp_path: Path) -> None:
    source, output = texts_file(tmp_path, 300), tmp_path / "v.parquet"
    multiplexer.breaks_after = 1
    first = asyncio.create_task(embed(mux_url, source, output, batch_rows=64, retry_s=0.3))
    await eventually(lambda: multiplexer.streams >= 2)
    multiplexer.breaks_after = 0
    with pytest.raises(Unavailable, match="the worker ended"):
        await first

    with pytest.raises(Refused, match=r"another job \(normalize differ\).*--restart"):
        await embed(mux_url, source, output, normalize=False)
    multiplexer.breaks_after = None
    done = await embed(mux_url, source, output)

    assert 0 < done.resumed_at < 300
    np.testing.assert_array_equal(vectors(output), expected(300))
    with pytest.raises(Refused, match="exists; --overwrite"):
        await embed(mux_url, source, output)
    assert (await embed(mux_url, source, output, overwrite=True)).resumed_at == 0


def rows_of(journal: Path) -> int:
    """Rows that were committed."""
    return int(json.loads(journal.read_bytes())["rows"]) if journal.exists() else 0


async def test_a_run_that_is_killed_loses_no_row_and_writes_none_twice(
    mux_url: str, multiplexer: Breaking, tmp_path: Path
) -> None:
    refused = frozenset({5, 130, 700})
    source, output = texts_file(tmp_path, 1000, refused), tmp_path / "v.parquet"
    code = (
        "import sys; from pathlib import Path; from teimgr.client.clients import Client\n"
        "from teimgr.client.corpus import embed_file\n"
        "with Client(grpc=sys.argv[1]) as client:\n"
        "    embed_file(client, Path(sys.argv[2]), Path(sys.argv[3]), batch_rows=64, commit_s=float(sys.argv[4]),"
        f" instance={INSTANCE!r})\n"
    )
    resumed_at = []
    # Killed with everything committed, then with nothing of the run committed, then with the files torn.
    for commit_s, committed, torn in ((0.0, 192, b""), (60.0, 192, b""), (0.0, 384, b"half a batch")):
        multiplexer.held.clear()
        multiplexer.holds_after = 3
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, mux_url, str(source), str(output), str(commit_s))
        )
        await asyncio.wait_for(multiplexer.held.wait(), LIMIT_S)
        journal = output.with_name("v.parquet.journal")
        await eventually(lambda: rows_of(journal) >= committed)  # noqa: B023 - awaited at once
        process.send_signal(signal.SIGKILL)
        await process.wait()
        resumed_at.append(json.loads(journal.read_bytes())["rows"])
        with output.with_name("v.parquet.partial").open("ab") as file:
            file.write(torn)
    multiplexer.holds_after = None

    done = await embed(mux_url, source, output)

    assert resumed_at == [192, 192, 384]
    assert (done.resumed_at, done.rows, done.failed) == (384, 1000, 3)
    np.testing.assert_array_equal(vectors(output), expected(1000, refused))
    failures = output.with_name("v.parquet.failed.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in failures] == sorted(refused)


async def test_two_processes_do_not_write_one_output(mux_url: str, multiplexer: Breaking, tmp_path: Path) -> None:
    source, output = texts_file(tmp_path, 300), tmp_path / "v.npy"
    multiplexer.breaks_after = 1
    first = asyncio.create_task(embed(mux_url, source, output, batch_rows=64, retry_s=2.0))
    await eventually(lambda: multiplexer.streams)
    with pytest.raises(Refused, match="another process is writing it"):
        await embed(mux_url, source, output)
    multiplexer.breaks_after = None
    await first


class Spaced(Breaking):
    """Tells the space of its vectors."""

    space = "a" * 64

    async def EmbedArrowStream(
        self, requests: AsyncIterator[mux_pb2.EmbedArrowRequest], context: Any
    ) -> AsyncIterator[mux_pb2.EmbedArrowResponse]:
        async for answer in super().EmbedArrowStream(requests, context):
            table = pa.ipc.open_stream(answer.arrow_ipc).read_all()
            table = table.replace_schema_metadata({SPACE_KEY: self.space, PRECISION_KEY: "fp32"})
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            yield mux_pb2.EmbedArrowResponse(arrow_ipc=sink.getvalue().to_pybytes())


class TestTheSpace:
    @pytest.fixture
    def multiplexer(self) -> Spaced:
        return Spaced()

    @pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".npy"])
    async def test_an_output_names_the_space_of_its_vectors(self, suffix: str, mux_url: str, tmp_path: Path) -> None:
        output = tmp_path / f"v{suffix}"
        done = await embed(mux_url, texts_file(tmp_path, 200), output, batch_rows=64)
        assert done.fingerprint == f"{Spaced.space}/fp32"
        if suffix == ".npy":
            told = json.loads(output.with_name("v.npy.space.json").read_text())
            assert told == {"space": Spaced.space, "precision": "fp32"}
            return
        schema = pq.read_schema(output) if suffix == ".parquet" else pa.ipc.open_file(output).schema
        told = {SPACE_KEY.encode(): Spaced.space.encode(), PRECISION_KEY.encode(): b"fp32"}
        assert told.items() <= schema.metadata.items()

    async def test_a_file_is_never_filled_from_two_spaces(
        self, mux_url: str, multiplexer: Spaced, tmp_path: Path
    ) -> None:
        source, output = texts_file(tmp_path, 300), tmp_path / "v.parquet"
        multiplexer.breaks_after = 1
        first = asyncio.create_task(embed(mux_url, source, output, batch_rows=64, retry_s=0.3))
        await eventually(lambda: multiplexer.streams >= 2)
        multiplexer.breaks_after = 0
        with pytest.raises(Unavailable):
            await first

        multiplexer.breaks_after, multiplexer.space = None, "b" * 64
        with pytest.raises(SpaceDiffers, match=rf"{'a' * 64}/fp32.*{'b' * 64}/fp32.*--restart"):
            await embed(mux_url, source, output)
        multiplexer.space = Spaced.space
        assert (await embed(mux_url, source, output)).resumed_at > 0
        multiplexer.space = "b" * 64
        again = await embed(mux_url, source, output, overwrite=True)
        assert again.fingerprint == f"{'b' * 64}/fp32"


def test_the_files_of_a_model_are_asked_for_until_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading:
        calls = 0

        def info(self, *, instance: str) -> Any:
            self.calls += 1
            if self.calls % 2:
                raise Unavailable(f"{instance} is loading")
            return SimpleNamespace(modalities=("text", "audio"))

    monkeypatch.setattr(job, "_RETRY_FIRST_S", 0.0)
    client: Any = Loading()
    assert job._files_of(client, {"instance": INSTANCE, "truncate": True}, 60.0) == "audio"
    with pytest.raises(Unavailable):
        job._files_of(client, {"instance": INSTANCE}, -1.0)
