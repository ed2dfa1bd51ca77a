"""Calls over gRPC of classifiers and rerankers, and of the table service `teimgr.v1.Arrow`."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from typing import TypeAlias, Unpack

import pyarrow as pa

from teimgr.client.checks import (
    check_flag,
    check_limit,
    check_options,
    check_sequence,
    check_source,
    check_text,
    check_texts,
)
from teimgr.client.inference_calls import RpcCalls, requests_of
from teimgr.client.payloads import (
    Compression,
    ScoreOptions,
    TableOptions,
    infer_request,
    lane_metadata,
    pack_table,
    score_fields,
    target,
)
from teimgr.client.values import Prediction, Rank
from teimgr.config.schema import quoted
from teimgr.errors import Internal, ValidationError
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2
from teimgr.wire.pb.teimgr.v1 import arrow_pb2


class ScoringCalls(RpcCalls):
    """Calls of classifiers and rerankers."""

    async def predict(
        self, texts: str | Sequence[str], *, in_flight: int = 64, **options: Unpack[ScoreOptions]
    ) -> Sequence[Sequence[Prediction]]:
        """For every text all labels of the model, best first; one text gives one list."""
        check_options(options, ScoreOptions)

        async def predict_one(text: str) -> Sequence[Prediction]:
            types = mux_pb2.PredictRequest, tei_pb2.PredictResponse
            return _predictions(await self._unary("Predict", *types, options, inputs=text, **score_fields(options)))

        return await self._each_text(texts, in_flight, predict_one)

    async def predict_pair(
        self, pairs: Sequence[tuple[str, str]], *, in_flight: int = 64, **options: Unpack[ScoreOptions]
    ) -> Sequence[Sequence[Prediction]]:
        """Like `predict`, for two texts that the model reads together."""
        check_options(options, ScoreOptions)
        check_sequence("pairs", pairs)

        async def predict_one(position: int, pair: tuple[str, str]) -> Sequence[Prediction]:
            check_texts(f"pairs[{position}]", pair)
            if len(pair) != 2:
                raise ValidationError(f"pairs[{position}] must be two texts, not {len(pair)}")
            types = mux_pb2.PredictPairRequest, tei_pb2.PredictResponse
            return _predictions(await self._unary("PredictPair", *types, options, inputs=pair, **score_fields(options)))

        return await self._each(pairs, in_flight, predict_one)

    async def rerank(
        self, query: str, texts: Sequence[str], *, return_text: bool = False, **options: Unpack[ScoreOptions]
    ) -> Sequence[Rank]:
        """Every text's rank for the query, best first; only a reranker serves it."""
        check_options(options, ScoreOptions)
        check_text("query", query)
        check_texts("texts", texts)
        check_flag("return_text", return_text)
        fields = {"query": query, "texts": texts, "return_text": return_text, **score_fields(options)}
        return _ranks(await self._unary("Rerank", mux_pb2.RerankRequest, tei_pb2.RerankResponse, options, **fields))

    async def rerank_stream(
        self,
        query: str,
        texts: Iterable[str] | AsyncIterable[str],
        *,
        return_text: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> Sequence[Rank]:
        """Like `rerank`, with texts that are sent while they are read: more than one message may hold."""
        check_options(options, ScoreOptions)
        check_text("query", query)
        check_source("texts", texts)
        check_flag("return_text", return_text)

        fields = {"query": query, "return_text": return_text, **score_fields(options)}

        def request(name: str, text: str) -> bytes:
            check_text(name, text)
            message = mux_pb2.RerankStreamRequest(target=target(options), request=fields | {"text": text})
            return message.SerializeToString()

        requests, chosen = requests_of("texts", texts, request), lane_metadata(options)
        reply = await self._grpc.collect("RerankStream", requests, idle_s=self._timeout_s, metadata=chosen)
        return _ranks(tei_pb2.RerankResponse.FromString(reply))


def _predictions(reply: tei_pb2.PredictResponse) -> Sequence[Prediction]:
    return [Prediction(prediction.label, prediction.score) for prediction in reply.predictions]


def _ranks(reply: tei_pb2.RerankResponse) -> Sequence[Rank]:
    return [Rank.from_message(rank) for rank in reply.ranks]


Table: TypeAlias = pa.Table | pa.RecordBatch

_SERVICE = "/teimgr.v1.Arrow/"
_INPUTS = ("text", "text_pair", "query", "input_ids", "image", "audio")
_WINDOW = 4


class TableCalls(RpcCalls):
    """Arrow tables in and out: several outputs of one model run, for texts, pairs or token ids, with key columns."""

    async def infer(
        self,
        table: Table,
        *,
        batch_rows: int = 2048,
        in_flight: int = 2,
        compression: Compression | None = None,
        **options: Unpack[TableOptions],
    ) -> pa.Table:
        """A row for every row of `table`, in order: the columns `keys`, a column per output, and `error`.

        The inputs are its column `text`, or `text` with `text_pair`, `query` with `text`, `input_ids`, or `image` or
        `audio` (the bytes of files, with `text` in rows without one); others that are no `keys` are not sent.
        `batch_rows` rows travel per call, `in_flight` calls at a time. A row that fails alone has nulls and its reason
        in `error`; a failing call raises.
        """
        check_options(options, TableOptions)
        check_limit("batch_rows", batch_rows)
        whole, chosen = _sent(table, options, "table"), lane_metadata(options)

        async def infer_slice(_: int, start: int) -> pa.Table:
            piece = whole.slice(start, batch_rows)
            request = infer_request(pack_table(piece, compression), options)
            answer = _unpack(await self._grpc.unary(f"{_SERVICE}Infer", request, self._timeout_s, chosen))
            if answer.num_rows != piece.num_rows:
                raise Internal(f"the server answered {answer.num_rows} rows for {piece.num_rows}")
            return answer

        starts = range(0, max(whole.num_rows, 1), batch_rows)
        return pa.concat_tables(await self._each(starts, in_flight, infer_slice))

    async def infer_stream(
        self,
        tables: Iterable[Table] | AsyncIterable[Table],
        *,
        compression: Compression | None = None,
        window: int = _WINDOW,
        **options: Unpack[TableOptions],
    ) -> AsyncIterator[pa.Table]:
        """One answer per table, in order, while `tables` is still being read.

        Memory is constant: at most `window` tables are sent and not answered. A plain iterable is read on a thread.
        """
        check_options(options, TableOptions)
        check_limit("window", window)
        check_source("tables", tables)

        def request(name: str, table: Table) -> bytes:
            return infer_request(pack_table(_sent(table, options, name), compression), options)

        requests, chosen = requests_of("tables", tables, request, at_once=1), lane_metadata(options)
        replies = self._grpc.stream(
            f"{_SERVICE}InferStream", requests, window=window, idle_s=self._timeout_s, metadata=chosen
        )
        async for reply in replies:
            yield _unpack(reply)


def _sent(table: Table, options: TableOptions, name: str) -> pa.Table:
    """Return the columns that the server needs."""
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    if not isinstance(table, pa.Table):
        raise ValidationError(f"{name} must be a pyarrow Table or RecordBatch, not {quoted(table)}")
    keys = options.get("keys") or ()
    if missing := [key for key in keys if key not in table.column_names]:
        raise ValidationError(f"{name} has no column {missing[0]!r}")
    return table.select([at for at, column in enumerate(table.column_names) if column in _INPUTS or column in keys])


def _unpack(reply: bytes) -> pa.Table:
    try:
        return pa.ipc.open_stream(arrow_pb2.ArrowResponse.FromString(reply).arrow_ipc).read_all()
    except pa.ArrowException as error:
        raise Internal(f"the reply is not an Arrow stream: {error}") from error
