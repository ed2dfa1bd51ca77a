"""`teimgr.v1.Arrow`: tables in, tables out."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import TypeAlias, Unpack

import pyarrow as pa

from teimgr.client.asking import Asking
from teimgr.client.batches import Compression, check_compression
from teimgr.client.checks import check_keywords, check_limit, check_source
from teimgr.client.messages import HOW_INFER, HowInfer, infer_request
from teimgr.client.sources import items
from teimgr.errors import Internal, ValidationError
from teimgr.pb.teimgr.v1 import arrow_pb2
from teimgr.typed import said

Table: TypeAlias = pa.Table | pa.RecordBatch

_SERVICE = "/teimgr.v1.Arrow/"
_INPUTS = ("text", "text_pair", "query", "input_ids")
_WINDOW = 4


class Tables(Asking):
    """Several outputs of one run of the model, for texts, pairs or token ids, beside keys of the caller's own."""

    async def infer(
        self,
        table: Table,
        *,
        batch_rows: int = 2048,
        in_flight: int = 2,
        compression: Compression | None = None,
        **how: Unpack[HowInfer],
    ) -> pa.Table:
        """A row for every row of `table`, in order: the columns `keys`, a column per output, and `error`.

        The inputs are its column `text`, or `text` with `text_pair`, `query` with `text`, or `input_ids`; others that
        are no `keys` are not sent. `batch_rows` rows travel per call, `in_flight` calls at a time. A row that fails
        alone has nulls and its reason in `error`; a failing call raises.
        """
        check_keywords(how, HOW_INFER)
        check_limit("batch_rows", batch_rows)
        whole = _sent(table, how, "table")
        starts = range(0, max(whole.num_rows, 1), batch_rows)

        async def ask(_: int, start: int) -> pa.Table:
            piece = whole.slice(start, batch_rows)
            request = infer_request(_pack(piece, compression), how)
            answer = _unpack(await self._calls.unary(f"{_SERVICE}Infer", request, self._timeout_s))
            if answer.num_rows != piece.num_rows:
                raise Internal(f"the server answered {answer.num_rows} rows for {piece.num_rows}")
            return answer

        return pa.concat_tables(await self._each(starts, in_flight, ask))

    async def infer_stream(
        self,
        tables: Iterable[Table] | AsyncIterable[Table],
        *,
        compression: Compression | None = None,
        window: int = _WINDOW,
        **how: Unpack[HowInfer],
    ) -> AsyncIterator[pa.Table]:
        """One answer per table, in order, while `tables` is still being read.

        Memory is constant: at most `window` tables are sent and not answered. A plain iterable is read on a thread.
        """
        check_keywords(how, HOW_INFER)
        check_limit("window", window)
        check_source("tables", tables)

        async def requests() -> AsyncIterator[bytes]:
            number = 0
            async for table in items(tables, at_once=1):
                yield infer_request(_pack(_sent(table, how, f"tables[{number}]"), compression), how)
                number += 1

        replies = self._calls.stream(f"{_SERVICE}InferStream", requests(), window=window, idle_s=self._timeout_s)
        async for reply in replies:
            yield _unpack(reply)


def _sent(table: Table, how: HowInfer, name: str) -> pa.Table:
    """The columns that the server needs."""
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    if not isinstance(table, pa.Table):
        raise ValidationError(f"{name} must be a pyarrow Table or RecordBatch, not {said(table)}")
    keys = how.get("keys") or ()
    if missing := [key for key in keys if key not in table.column_names]:
        raise ValidationError(f"{name} has no column {missing[0]!r}")
    return table.select([at for at, column in enumerate(table.column_names) if column in _INPUTS or column in keys])


def _pack(table: pa.Table, compression: Compression | None) -> bytes:
    check_compression(compression)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
        if not table.num_rows:
            writer.write_batch(pa.RecordBatch.from_pylist([], schema=table.schema))
    return bytes(sink.getvalue())


def _unpack(reply: bytes) -> pa.Table:
    try:
        return pa.ipc.open_stream(arrow_pb2.ArrowResponse.FromString(reply).arrow_ipc).read_all()
    except pa.ArrowException as error:
        raise Internal(f"the reply is no Arrow stream: {error}") from error
