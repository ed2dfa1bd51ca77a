"""`teimgr bench`: the load generator `bench-client` on the daemon of the connection."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions, Name
from teimgr.cli.inference_commands import wrong_command
from teimgr.errors import WrongModelKind

_COMMANDS = {"embedding": "`teimgr bench {name}`", "reranker": "`teimgr bench {name} --mode rerank`"}


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
        raise wrong_command(server.rest, name, method, error, _COMMANDS) from error
