"""`embed_file`: texts or images to vectors in a file, over `EmbedArrowStream`, resumed where an earlier run ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from teimgr.client.clients import Client
from teimgr.client.corpus import outputs
from teimgr.client.corpus.image_files import FolderSource, is_file_to_embed
from teimgr.client.corpus.outputs import PartialOutput, discard
from teimgr.client.corpus.sources import MAX_FILE_BYTES, TEXT, FileKind, TextSource, open_source
from teimgr.client.payloads import space_of
from teimgr.client.values import Embedded
from teimgr.errors import CallOverQuota, InvalidConfig, Refused, TooLarge, TryLater
from teimgr.wire.spaces import reply_headers

_BATCH_ROWS = 2048
_BATCH_BYTES = 4 << 20
_COMMIT_S = 0.5
# A message holds what the model computes in about this time, so that a slow model answers before the timeout and an
# interruption costs little.
_FIRST_ROWS = 64
_ROWS_PER_TOKEN = 32  # with a vector for each token: a page has half a megabyte of them
_QUICK_REPLY_S = 0.5
_SLOW_REPLY_S = 4.0
_RETRY_FIRST_S = 0.25
_RETRY_MAX_S = 10.0


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run: `rows` of `total`, if that is known, and otherwise the `share` of the file that was read.

    `waiting` is the reason of a pause before another attempt.
    """

    rows: int
    failed: int
    total: int | None
    share: float | None
    waiting: str | None = None


@dataclass(frozen=True, slots=True)
class EmbeddedFile:
    """The result of a run. `resumed_at`: rows that an earlier run had done. `failures` is None if no row failed.
    `fingerprint` is the space and the precision of the vectors."""

    output: Path
    rows: int
    failed: int
    dimension: int
    resumed_at: int
    failures: Path | None
    fingerprint: str = ""


def embed_file(
    client: Client,
    source: Path,
    output: Path,
    *,
    text_column: str | None = None,
    keep: Sequence[str] | None = None,
    float16: bool = False,
    batch_rows: int = _BATCH_ROWS,
    retry_s: float = 300.0,
    overwrite: bool = False,
    restart: bool = False,
    commit_s: float = _COMMIT_S,
    progress: Callable[[Progress], None] = lambda progress: None,
    per_token: bool = False,
    **options: Any,
) -> EmbeddedFile:
    """Embed every row of `source` (.parquet, .jsonl, .csv, .txt, .arrow) into `output` (.parquet, .arrow, .npy).

    In place of texts the column may hold files of images or sounds: binary, or the struct of Hugging Face datasets. Of
    a folder each image in it and below, or each sound where the model embeds sounds, is a row, whose `path` is copied,
    and each page of a .pdf, with its `page`; a .pdf alone is read so, too.

    Row i of the output is row i of the source: columns `row`, those of `keep`, and `embedding` (float32, or float16);
    with `per_token`, of a late-interaction model, a list of vectors.
    A row that fails has a null there (NaN in NumPy), and its reason and text or path in `<output>.failed.jsonl`. The
    space of the vectors is in the metadata of the schema, with NumPy in `<output>.space.json`; vectors of another one
    end the run. Memory does not grow with the file. Until the end the rows are in `<output>.partial`; a run that was
    interrupted or killed is resumed by the same call, and repeats at most `commit_s` of work. `batch_rows` bounds one
    message; a slow model gets fewer, and so does a key with a small quota. `options` are those of `Client.embed_arrow`,
    with `instance` or `model`; with `per_token` also `pool_factor`, as of `Client.infer`.

    Raises:
        InvalidConfig: a file cannot be read or written, or lacks a column.
        SpaceDiffers: the server's vectors are of another space than those that are done.
        Refused: `output` exists and not `overwrite`; an unfinished run of another job is there and not `restart`; the
            server refused the call.
        TryLater: the server did not serve for `retry_s` without progress.
    """
    _check_suffix(output, per_token)
    texts, files = _opened(source, text_column, keep, lambda: _files_of(client, options, retry_s))
    form = _Form(files, per_token, float16)
    failures = output.with_name(f"{output.name}.failed.jsonl")
    if restart:
        discard(output, failures)
    partial = PartialOutput(output, failures, _identity(texts, form, options))
    if output.exists() and source.exists() and output.samefile(source):
        raise Refused(f"{output} is the source, and would be replaced by its vectors; name another output")
    if output.exists() and not overwrite and not partial.journal_path.exists():
        raise Refused(f"{output} exists; --overwrite replaces it")
    with partial:
        resumed_at = partial.rows
        try:
            _Work(client, texts, partial, options, batch_rows, form, retry_s, commit_s, progress).run()
        finally:
            partial.commit()
        outputs.write_output(output, partial.batches(), partial.rows, partial.fingerprint)
        partial.remove()
    failed = failures if partial.failed else None
    return EmbeddedFile(
        output, partial.rows, partial.failed, partial.dimension, resumed_at, failed, partial.fingerprint
    )


class _Form(NamedTuple):
    """The form of input and output: the column of files, None for texts; a vector for each token, or one."""

    files: FileKind | None
    per_token: bool
    float16: bool

    @property
    def needs_tables(self) -> bool:
        """True if `EmbedArrow`, of texts and images, cannot be used."""
        return self.per_token or self.files == "audio"


class _Answer(NamedTuple):
    """The vectors of a batch: for each row one, or a list of them; null in rows that failed."""

    vectors: Any
    errors: Mapping[int, str]
    space: str
    precision: str


def _check_suffix(output: Path, per_token: bool) -> None:
    if output.suffix.lower() not in outputs.SUFFIXES:
        raise InvalidConfig(f"{output}: the suffix is not one of {', '.join(outputs.SUFFIXES)}")
    if per_token and output.suffix.lower() == ".npy":
        raise InvalidConfig(f"{output}: NumPy's file has one vector a row, and this model gives several: use .parquet")


def _opened(
    source: Path, text_column: str | None, keep: Sequence[str] | None, files_of_model: Callable[[], FileKind]
) -> tuple[TextSource, FileKind | None]:
    """Open the rows of a file or folder; also return the kind of their files, None for texts."""
    if source.is_dir() or is_file_to_embed(source):
        files = files_of_model()
        return FolderSource(source, text_column, keep, files), files
    texts = open_source(source, text_column, keep)
    if taken := [name for name in texts.keep if name in ("row", outputs.VECTOR)]:
        raise InvalidConfig(f"{source}: the column {taken[0]!r} cannot be kept: the output has its own of that name")
    return texts, files_of_model() if texts.has_files else None


def _files_of(client: Client, options: dict[str, Any], retry_s: float) -> FileKind:
    """Return the kind of files that the model of a call embeds; waits for a model that loads."""
    routing: Any = {name: options[name] for name in ("instance", "model") if options.get(name) is not None}
    end = time.monotonic() + retry_s
    while True:
        try:
            return "audio" if "audio" in client.info(**routing).modalities else "image"
        except TryLater as error:
            if time.monotonic() > end:
                raise
            time.sleep(max(_RETRY_FIRST_S, min(error.retry_after_s or 0.0, _RETRY_MAX_S)))


def _identity(source: TextSource, form: _Form, options: dict[str, Any]) -> dict[str, Any]:
    """Return the facts by which two runs are the same job."""
    return {
        **source.identity(),
        **{"text_column": source.text_column, "keep": list(source.keep), "float16": form.float16},
        **({"per_token": True} if form.per_token else {}),
        **{key: value for key, value in sorted(options.items()) if value is not None},
    }


class _Work:
    """One run: sends batches, writes answers in order, commits at intervals, and restarts a broken stream."""

    def __init__(
        self,
        client: Client,
        source: TextSource,
        partial: PartialOutput,
        options: dict[str, Any],
        batch_rows: int,
        form: _Form,
        retry_s: float,
        commit_s: float,
        progress: Callable[[Progress], None],
    ) -> None:
        self._client = client
        self._source = source
        self._partial = partial
        self._options = options
        self._batch_rows = min(batch_rows, _ROWS_PER_TOKEN) if form.per_token else batch_rows
        self._form = form
        self._type = pa.float16() if form.float16 else pa.float32()
        self._retry_s = retry_s
        self._commit_s = commit_s
        self._progress = progress
        self._rows_now = min(_FIRST_ROWS, self._batch_rows)

    def run(self) -> None:
        last_progress, pause_s = time.monotonic(), _RETRY_FIRST_S
        while True:
            before = self._partial.rows
            try:
                self._stream()
                return
            except TryLater as error:
                now = time.monotonic()
                if self._partial.rows > before:
                    last_progress, pause_s = now, _RETRY_FIRST_S
                if now - last_progress > self._retry_s:
                    raise
                self._report(waiting=error.message)
                time.sleep(max(pause_s, min(error.retry_after_s or 0.0, _RETRY_MAX_S)))
                pause_s = min(pause_s * 2, _RETRY_MAX_S)
            except (CallOverQuota, TooLarge):
                # Quick replies have grown the message beyond what the key or the server accepts.
                if self._rows_now == 1:
                    raise
                self._rows_now = self._batch_rows = self._rows_now // 2

    def _stream(self) -> None:
        """Embed from the first row that is not done to the end, over one stream."""
        sent: deque[pa.RecordBatch] = deque()  # per stream: a broken one may still read texts on its thread
        committed = answered = time.monotonic()
        self._report()
        for answer in self._answers(sent):
            self._write(sent.popleft(), answer)
            now = time.monotonic()
            self._adapt(now - answered)
            answered = now
            if now - committed >= self._commit_s:
                self._partial.commit()
                committed = time.monotonic()
            self._report()

    def _answers(self, sent: deque[pa.RecordBatch]) -> Iterator[_Answer]:
        """Yield the vectors of each batch, while the next ones are sent."""
        if not self._form.needs_tables:
            for found in self._client.embed_arrow_stream(self._texts(sent), **self._options):
                yield self._answer_of(found)
            return
        output, width = ("multi_vector", "token_type") if self._form.per_token else ("dense", "dense_type")
        name = self._form.files or TEXT
        asked = {**self._options, "outputs": [output], width: "float16" if self._form.float16 else "float32"}
        tables = (pa.table({name: texts}) for texts in self._texts(sent))
        for table in self._client.infer_stream(tables, **asked):
            column = table.column(output)
            errors = {row: why for row, why in enumerate(table.column("error").to_pylist()) if why is not None}
            yield _Answer(pa.concat_arrays(column.chunks), errors, *space_of(table.schema))

    def _answer_of(self, found: Embedded) -> _Answer:
        count, dim = found.vectors.shape
        missing = np.zeros(count, bool)
        missing[list(found.errors)] = True
        values = pa.array(found.vectors.reshape(-1).astype(self._type.to_pandas_dtype(), copy=False))
        vectors = pa.FixedSizeListArray.from_arrays(values, dim, mask=pa.array(missing))
        return _Answer(vectors, found.errors, found.space, found.precision)

    def _adapt(self, reply_s: float) -> None:
        """Send more rows in a message after a quick reply, fewer after a slow one."""
        if reply_s < _QUICK_REPLY_S:
            self._rows_now = min(self._rows_now * 2, self._batch_rows)
        elif reply_s > _SLOW_REPLY_S:
            self._rows_now = max(self._rows_now // 2, 1)

    def _texts(self, sent: deque[pa.RecordBatch]) -> Iterator[Any]:
        """Yield the texts of the batches; each is put in `sent` with those that wait for their answer."""
        try:
            for batch in self._source.batches(self._partial.rows, self._batch_rows):
                for piece in _bounded(batch, lambda: self._rows_now):
                    sent.append(piece)
                    yield piece.column(0)  # by position: a kept column may be named `text` too
        except (OSError, pa.ArrowException) as error:
            raise InvalidConfig(f"{self._source.path}: {error}") from error

    def _write(self, batch: pa.RecordBatch, answer: _Answer) -> None:
        self._partial.take_space(answer.space, answer.precision)
        first_row, count, faults = self._partial.rows, batch.num_rows, batch.column(1)
        fields = [("row", pa.int64()), *self._source.kept, (outputs.VECTOR, answer.vectors.type)]
        schema = pa.schema(fields, metadata=reply_headers(answer.space, answer.precision) or None)
        kept = batch.columns[2:]
        rows = pa.array(np.arange(first_row, first_row + count))
        whole = pa.RecordBatch.from_arrays([rows, *kept, answer.vectors], schema=schema)
        failures = (
            {"row": first_row + row, "error": faults[row].as_py() or reason, **self._named(batch, row)}
            for row, reason in sorted(answer.errors.items())
        )
        self._partial.append(whole, failures)

    def _named(self, batch: pa.RecordBatch, row: int) -> dict[str, Any]:
        """Return the text of a row, or its path and page, by column; empty if the row is a file."""
        return {label: batch.column(batch.schema.names.index(label))[row].as_py() for label in self._source.labels}

    def _report(self, waiting: str | None = None) -> None:
        self._progress(
            Progress(self._partial.rows, self._partial.failed, self._source.rows, self._source.position(), waiting)
        )


def _bounded(batch: pa.RecordBatch, most_rows: Callable[[], int]) -> Iterator[pa.RecordBatch]:
    """Split the batch into pieces of bounded rows and bytes; a text beyond the limit of one message is a row that
    fails."""
    lengths = pc.fill_null(pc.binary_length(batch.column(0)), 0).to_numpy(zero_copy_only=False)
    if lengths.max(initial=0) > MAX_FILE_BYTES:
        over = lengths > MAX_FILE_BYTES
        columns = list(batch.columns)
        what = "a text" if pa.types.is_unicode(columns[0].type) else "a file"
        reason = f"{what} of over {MAX_FILE_BYTES >> 20} MiB"
        columns[0] = pc.if_else(pa.array(over), pa.scalar(None, columns[0].type), columns[0])
        columns[1] = pc.if_else(pa.array(over), pa.scalar(reason), columns[1])
        batch = pa.RecordBatch.from_arrays(columns, schema=batch.schema)
        lengths = np.where(over, 0, lengths)
    start, filled = 0, 0
    for row, length in enumerate(lengths):
        if row > start and (filled + length > _BATCH_BYTES or row - start >= most_rows()):
            yield batch.slice(start, row - start)
            start, filled = row, 0
        filled += int(length)
    yield batch.slice(start)
