"""`teimgr embed`, `rerank`, `classify` and `similarity`: texts of the command line over HTTP, files over gRPC."""

from __future__ import annotations

import json
import os.path
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import quote

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions, Name, complete_instance
from teimgr.cli.failures import ExitStatus, UsageError, WrongCommand
from teimgr.cli.output import say
from teimgr.client.rest_client import RestClient
from teimgr.errors import (
    AmbiguousInstance,
    Forbidden,
    InstanceNotFound,
    InvalidConfig,
    Refused,
    TeimgrError,
    WrongModelKind,
)

# TEI's default limit of inputs in one request.
_AT_ONCE = 32
_SHOWN_VALUES = 5
# Copied from `client.corpus.sources`, whose import takes a second.
_TEXT_FILES = (".parquet", ".jsonl", ".ndjson", ".csv", ".txt", ".arrow", ".feather")
_EMBEDDING_FILES = ("embedding", "multi-vector")
_EMBEDDING, _RERANKER, _CLASSIFIER = ("embedding",), ("reranker",), ("classifier",)

Instance = Annotated[
    str | None,
    typer.Option(
        "--instance",
        "-i",
        metavar="NAME",
        help="Instance or model id; optional if only one fits.",
        autocompletion=complete_instance,
    ),
]
Texts = Annotated[
    list[str],
    typer.Argument(
        metavar="TEXT|-|FILE", help="Texts; `-`: the lines of stdin; a .txt: its lines.", show_default=False
    ),
]
Truncate = Annotated[
    bool, typer.Option("--truncate/--no-truncate", help="Truncate texts that are too long, or refuse them.")
]


def embed(
    server: DaemonOptions,
    output: CommandOutput,
    texts: Annotated[
        list[str],
        typer.Argument(
            metavar="TEXT|-|FILE",
            help="Texts; `-`: the lines of stdin; a .txt: its lines; with -o a file: .parquet, .jsonl, .csv, .txt or "
            ".arrow, an image, a .pdf, a sound, or a folder of these.",
            show_default=False,
        ),
    ],
    instance: Instance = None,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Vectors of a file: .parquet, .arrow or .npy.")
    ] = None,
    normalize: Annotated[bool, typer.Option("--normalize/--no-normalize", help="Vectors of length 1.")] = True,
    truncate: Truncate = True,
    dimensions: Annotated[int | None, typer.Option(help="Cut the vectors (Matryoshka models).", min=1)] = None,
    prompt_name: Annotated[str | None, typer.Option(help="One of the model's prompts, such as query.")] = None,
    column: Annotated[
        str | None, typer.Option(help="Column of the texts or files of a file.  [default: text, else image or audio]")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Columns of a file to copy; '' for none.  [default: id, where there is one]"),
    ] = None,
    float16: Annotated[bool, typer.Option("--float16", help="Half-precision vectors in the output file.")] = False,
    pool_factor: Annotated[
        float | None, typer.Option(help="Keep one of this many token vectors of each document.", min=1.0)
    ] = None,
    batch_rows: Annotated[int, typer.Option(help="Rows of a file in one message.", min=1, max=65536)] = 2048,
    retry: Annotated[
        float, typer.Option(metavar="S", help="How long to retry while the daemon does not serve.", min=0)
    ] = 300.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard an unfinished run for this output.")] = False,
    expect_fingerprint: Annotated[
        str | None,
        typer.Option(metavar="SPACE", help="Refuse vectors of another space: 64 hex digits, or SPACE/PRECISION."),
    ] = None,
) -> int:
    """Embed texts, or a whole file, or the images, pages or sounds of a folder.

    A file is streamed in constant memory. A run that was interrupted or killed goes on where it was when the same
    command is given again. Row i of the output is row i of the file; rows that fail have no vector there, and their
    reason in OUTPUT.failed.jsonl, and the exit status is 8.
    """
    options = {"normalize": normalize, "truncate": truncate, "dimensions": dimensions, "prompt_name": prompt_name}
    if out is not None:
        columns = {"text_column": column, "keep": _names(keep)}
        form = {"float16": float16, "pool_factor": pool_factor}
        run = {"batch_rows": batch_rows, "retry_s": retry, "overwrite": overwrite, "restart": restart}
        choices = {**options, **columns, **form, **run}
        return _embed_file(server, output, texts, out, instance, choices, expect_fingerprint)
    rest = server.connection.rest_client(server.timeout_s, expect_fingerprint)
    name = chosen(rest, instance, _EMBEDDING)
    _warn_of_files(output, texts, "embedded", "use -o OUTPUT for the file")
    for piece in _pieces(_lines_or(texts)):
        for vector in _asked(rest, name, "embed", {"inputs": piece, **_given(options)}):
            _show_vector(output, vector)
    return ExitStatus.OK


def _names(given: str | None) -> list[str] | None:
    """The names between commas; none of an empty text."""
    return None if given is None else [name for name in given.split(",") if name]


def _warn_of_files(output: CommandOutput, texts: Sequence[str], done: str, instead: str) -> None:
    """Say which texts are the paths of images, documents or sounds, or of folders, which may be meant."""
    for path in filter(os.path.exists, texts):
        is_folder = Path(path).is_dir()
        if os.sep in path if is_folder else _is_file_to_embed(Path(path)):  # a bare word may be a folder's name
            kind = "folder" if is_folder else "file"
            output.note(f"{path}: this text is {done}, and not the {kind} of that name: {instead}")


def _is_file_to_embed(path: Path) -> bool:
    if not path.suffix:
        return False
    from teimgr.client.corpus.image_files import is_file_to_embed  # imports pyarrow

    return is_file_to_embed(path)


def _embed_file(
    server: DaemonOptions,
    output: CommandOutput,
    sources: list[str],
    out: Path,
    instance: str | None,
    choices: dict[str, Any],
    fingerprint: str | None,
) -> int:
    from teimgr.cli.corpus_command import embed_corpus

    if len(sources) != 1 or sources[0] == "-":
        raise UsageError("with -o, name one file of texts, images or pages, or a folder of images")
    name = chosen(server.rest, instance, _EMBEDDING_FILES)
    try:
        return embed_corpus(server, output, Path(sources[0]), out, name, choices, fingerprint)
    except WrongModelKind as error:
        raise wrong_command(server.rest, name, "embed", error) from error


def _show_vector(output: CommandOutput, vector: list[float]) -> None:
    if output.is_terminal and not output.as_json:
        values = ", ".join(f"{value:.6f}" for value in vector[:_SHOWN_VALUES])
        say(f"[{values}, …]  {len(vector)} values; --json prints all")
    else:
        say(json.dumps(vector), flush=True)


def rerank(
    server: DaemonOptions,
    output: CommandOutput,
    query: Annotated[str, typer.Argument(help="What is sought.", show_default=False)],
    texts: Texts,
    instance: Instance = None,
    top: Annotated[int | None, typer.Option("--top", "-n", help="Only the best.", min=1)] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Scores before the activation.")] = False,
    truncate: Truncate = True,
) -> None:
    """Order texts by how well they answer a query.

    Prints score, position and text, best first.
    """
    given = list(_lines_or(texts))
    name = chosen(server.rest, instance, _RERANKER)
    _warn_of_files(output, [query, *texts], "ranked", "the playground of the page ranks pictures")
    ranks = []
    rest, offset = server.rest, 0
    for piece in _pieces(iter(given)):
        body = {"query": query, "texts": piece, "raw_scores": raw, "truncate": truncate}
        ranks += [{**rank, "index": rank["index"] + offset} for rank in _asked(rest, name, "rerank", body)]
        offset += len(piece)
    ranks.sort(key=lambda rank: -rank["score"])
    shown = [{"score": rank["score"], "index": rank["index"], "text": given[rank["index"]]} for rank in ranks[:top]]
    if output.as_json:
        output.value(shown)
    else:
        output.table(
            ("score", "index", "text"), [(_score(each["score"]), each["index"], each["text"]) for each in shown]
        )


def classify(
    server: DaemonOptions,
    output: CommandOutput,
    texts: Texts,
    instance: Instance = None,
    raw: Annotated[bool, typer.Option("--raw", help="Scores before the activation.")] = False,
    truncate: Truncate = True,
) -> None:
    """Print the labels of texts with their scores."""
    rest = server.rest
    name = chosen(rest, instance, _CLASSIFIER)
    found = []
    for piece in _pieces(_lines_or(texts)):
        # Lists of one text, since TEI treats a plain list of two texts as a pair.
        body = {"inputs": [[text] for text in piece], "raw_scores": raw, "truncate": truncate}
        found += [
            {"text": text, "labels": labels}
            for text, labels in zip(piece, _asked(rest, name, "predict", body), strict=True)
        ]
    if output.as_json:
        output.value(found)
        return
    rows = [(each["text"], label["label"], _score(label["score"])) for each in found for label in each["labels"]]
    output.table(("text", "label", "score"), rows)


def similarity(
    server: DaemonOptions,
    output: CommandOutput,
    source: Annotated[str, typer.Argument(metavar="TEXT", help="The text to compare with.", show_default=False)],
    texts: Texts,
    instance: Instance = None,
) -> None:
    """Compare texts with one text.

    Prints the cosine of their vectors, best first.
    """
    given = list(_lines_or(texts))
    rest = server.rest
    name = chosen(rest, instance, _EMBEDDING)
    _warn_of_files(output, [source, *texts], "compared", "the playground of the page compares pictures and sounds")
    scores: list[float] = []
    for piece in _pieces(iter(given), _AT_ONCE - 1):  # the source is an input too
        body = {"inputs": {"source_sentence": source, "sentences": piece}}
        scores += _asked(rest, name, "similarity", body)
    order = sorted(range(len(given)), key=lambda at: -scores[at])
    if output.as_json:
        output.value([{"score": scores[at], "index": at, "text": given[at]} for at in order])
    else:
        output.table(("score", "index", "text"), [(_score(scores[at]), at, given[at]) for at in order])


def chosen(rest: RestClient, wanted: str | None, kinds: Sequence[str]) -> str:
    """The name of the instance that serves: the one named, one of the model named, or the only one of these kinds.

    Raises:
        InstanceNotFound: neither instance nor model is there.
        AmbiguousInstance: none is named, and there is not exactly one.
    """
    if wanted is not None and "/" not in wanted:
        return wanted
    try:
        instances = [each for each in rest.list() if each.status.value == "running"]
    except Forbidden as error:  # a key with only the right inference cannot list instances
        raise AmbiguousInstance(f"which instance? {error.message}, which choosing one needs") from error
    if wanted is not None:
        fitting = [each.name for each in instances if each.model_id == wanted]
        if not fitting:
            raise InstanceNotFound(wanted)
        return fitting[0]
    fitting = [each.name for each in instances if each.kind in kinds]
    if len(fitting) != 1:
        names = f"there are {', '.join(fitting)}" if fitting else f"no {kinds[0]} model runs"
        raise AmbiguousInstance(f"which instance? {names}")
    return fitting[0]


# Commands for each kind of model.
_COMMANDS = {
    "embedding": "`teimgr embed TEXT -i {name}` or `teimgr similarity`",
    "reranker": "`teimgr rerank QUERY TEXT… -i {name}`",
    "classifier": "`teimgr classify TEXT -i {name}`",
    "multi-vector": "`teimgr embed FILE -o vectors.parquet -i {name}`",
}
_WANTED = {"embed": "embedding", "similarity": "embedding", "rerank": "reranker", "predict": "classifier"}


def _asked(rest: RestClient, name: str, method: str, body: dict[str, Any]) -> Any:
    """The reply of an instance's route of inference.

    Raises:
        WrongCommand: the instance's kind of model has another command, which the message names.
    """
    try:
        return rest.request("POST", f"/instances/{quote(name, safe='')}/{method}", body=body)
    except WrongModelKind as error:
        raise wrong_command(rest, name, method, error) from error


def wrong_command(
    rest: RestClient, name: str, method: str, error: WrongModelKind, commands: Mapping[str, str] = _COMMANDS
) -> WrongModelKind:
    """The error with the kinds of model that the instance has and that are asked for, and one of `commands` by kind."""
    try:
        instances = rest.list()
    except TeimgrError:  # a key with only the right inference
        return error
    kind = next((each.kind for each in instances if each.name == name), None)
    if kind is None or kind not in commands or kind == _WANTED[method]:
        return error
    fitting = [each.name for each in instances if each.kind == _WANTED[method]]
    others = f"; of the kind {_WANTED[method]}: {', '.join(fitting)}" if fitting else ""
    return WrongCommand(
        f"instance {name!r} has a model of the kind {kind}, and this command needs the kind {_WANTED[method]}",
        error.message.removeprefix("Backend error: "),
        f"use {commands[kind].format(name=name)}{others}",
    )


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _lines_or(texts: Sequence[str]) -> Iterator[str]:
    """The texts; `-` stands for the lines of stdin, a file that exists for its lines.

    Raises:
        UsageError: a text is named as a file of texts that cannot be meant, or that does not exist.
        Refused: a line has no text, so what is printed would not be as many lines as were read.
    """
    for text in texts:
        path, is_file = Path(text), os.path.isfile(text)  # noqa: PTH113 - a text may be longer than a path
        has_texts = path.suffix.lower() in _TEXT_FILES
        if text == "-":
            yield from _lines("stdin", sys.stdin.buffer)
        elif not is_file and len(text.split()) > 1:
            yield text
        elif not is_file and (has_texts or _is_file_to_embed(path)):
            raise UsageError(f"{text}: no such file; for a text of this name: `echo {text} | teimgr embed -`")
        elif not has_texts:
            yield text
        elif path.suffix.lower() == ".txt":
            try:
                with path.open("rb") as file:
                    yield from _lines(text, file)
            except OSError as error:
                raise InvalidConfig(f"{text}: {error.strerror}") from error
        else:
            raise UsageError(f"{text} is a file: `teimgr embed {text} -o vectors.parquet` embeds its rows")


def _lines(name: str, file: BinaryIO) -> Iterator[str]:
    """The lines of a file as `embed FILE -o OUTPUT` reads them: they end at line feeds alone."""
    for number, line in enumerate(file, 1):
        line = line.removeprefix(BOM_UTF8) if number == 1 else line
        try:
            text = line.rstrip(b"\r\n").decode()
        except UnicodeDecodeError as error:
            raise Refused(f"{name}: line {number} is not UTF-8, at byte {error.start}") from error
        if not text.strip():
            raise Refused(
                f"{name}: line {number} is empty, and a model takes no empty text; remove the line, or give the file "
                "with -o, where it is a row without a vector"
            )
        yield text


def _pieces(texts: Iterator[str], size: int = _AT_ONCE) -> Iterator[list[str]]:
    while piece := list(islice(texts, size)):
        yield piece


def _score(value: float) -> str:
    return f"{value:.6f}"


_BENCHES = {"embedding": "`teimgr bench {name}`", "reranker": "`teimgr bench {name} --mode rerank`"}


def bench(
    server: DaemonOptions,
    output: CommandOutput,
    name: Name,
    mode: Annotated[
        Literal["standard", "arrow", "rerank"],
        typer.Option("--mode", "-m", help="Single Embed calls, EmbedArrow batches, or Rerank batches."),
    ] = "standard",
    num_texts: Annotated[int | None, typer.Option("--num-texts", "-n", help="Texts to send; 10000.", min=1)] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", help="Calls in flight, or texts per batch.", min=1)
    ] = 100,
    texts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Send the lines of this file, plain or .lz4.")
    ] = None,
    noop: Annotated[bool, typer.Option("--noop", help="Arrow: replies of zeros, without running the model.")] = False,
    normalize: Annotated[bool, typer.Option("--normalize/--no-normalize", help="Vectors of length 1.")] = True,
) -> int:
    """Put load on an instance, and measure.

    Over gRPC; throughput and latencies are printed as JSON.
    """
    from teimgr.cli.bench_client.command import Load, run_load

    connection = server.connection
    load = Load(name, mode, num_texts, batch_size, texts, noop, normalize, timeout_s=server.timeout_s, tried_first=True)
    try:
        return run_load(load, connection.grpc(), connection.tls, connection.api_key)
    except WrongModelKind as error:
        method = "rerank" if mode == "rerank" else "embed"
        raise wrong_command(server.rest, name, method, error, _BENCHES) from error
