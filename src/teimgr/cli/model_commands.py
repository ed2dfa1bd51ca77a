"""`teimgr models …`: the model registry of a running daemon. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions
from teimgr.cli.failures import ExitStatus, UsageError
from teimgr.cli.output import say, size, spinner
from teimgr.client.rest import LoadOptions
from teimgr.errors import ModelLoadFailed

_DOWNLOAD_S = 3600.0

HubModel = Annotated[str, typer.Argument(help="Id on the model hub.", show_default=False)]


def list_models(server: DaemonOptions, output: CommandOutput) -> None:
    """List the models: state, size, instances."""
    models = server.rest.models()
    if output.as_json:
        output.value(models)
        return
    output.table(
        ("model", "status", "size", "used by"),
        [
            (each["model_id"], each["status"], size(each.get("cache_size_bytes")), ", ".join(each["used_by"]))
            for each in models
        ],
    )


def pull(
    server: DaemonOptions,
    output: CommandOutput,
    model: HubModel,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    update: Annotated[bool, typer.Option("--update", help="Look for a newer commit on the hub.")] = False,
    code_revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of other repositories whose code it names.")
    ] = None,
) -> None:
    """Download a model.

    Prints its directory. A download that is interrupted here goes on in the daemon.
    """
    rest = server.connection.rest_client(_DOWNLOAD_S)
    events = rest.download_model(model, revision=revision, update=update, code_revision=code_revision)
    if sys.stderr.isatty():
        events = _with_bar(events, model)
    for event in events:
        if event.event == "done":
            output.value(event.data) if output.as_json else say(event.data["cache_path"])


def _with_bar(events: Any, model: str) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(model, total=None)
        for event in events:
            data = event.data
            if event.event == "progress":
                bar.update(task, completed=data["bytes_done"], total=data.get("bytes_total"))
            elif event.event == "done":
                bar.update(task, completed=data.get("cache_size_bytes"), total=data.get("cache_size_bytes"))
                bar.stop()
            yield event


def check(
    server: DaemonOptions,
    output: CommandOutput,
    model: Annotated[
        str, typer.Argument(help="Id on the hub, or a directory on the daemon's host.", show_default=False)
    ],
    gpu: Annotated[
        int | None, typer.Option("--gpu", help="Index of the GPU; default: the one with the most free memory.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run on the CPU, even if there is a GPU.")] = False,
    dtype: Annotated[Literal["auto", "float32", "float16", "bfloat16", "int8"] | None, typer.Option()] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of the model's own repository.")
    ] = False,
    code_revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of other repositories whose code it runs.")
    ] = None,
) -> int:
    """Load a model on trial, measure it, and compare it with the library that its files are made for."""
    if cpu and gpu is not None:
        raise UsageError("--gpu and --cpu exclude each other")
    trial: LoadOptions = {"device": "cpu"} if cpu else {}
    if gpu is not None:
        trial["gpu_id"] = gpu
    if dtype is not None:
        trial["dtype"] = dtype
    if trust_remote_code:
        trial["trust_remote_code"] = True
    if code_revision is not None:
        trial["code_revision"] = code_revision
    rest = server.rest
    with spinner(f"loading {model} in its own worker"):
        rest.add_model(model)  # it may be a directory that is not listed yet
        found = rest.try_model(model, **trial)
    if output.as_json:
        output.value(found)
    if found["status"] != "verified":
        raise ModelLoadFailed(f"{model}: {found.get('verification_error', found['status'])}")
    if not output.as_json:
        output.table(("what", "result"), list(_measurements(found["verification"]).items()))
    return ExitStatus.OK


def remove(server: DaemonOptions, output: CommandOutput, model: HubModel) -> None:
    """Delete a model from the cache of the daemon's host."""
    found = server.rest.delete_model(model)
    if output.as_json:
        output.value(found)
    elif freed := found.get("cache_size_bytes"):
        say(f"deleted {found['model_id']}: {size(freed)}")
    else:
        say(f"{found['model_id']}: it was not in the cache; it is no longer listed")


def _measurements(trial: Mapping[str, Any]) -> dict[str, str]:
    where = trial["device"] if "gpu_id" not in trial else f"{trial['device']} (gpu {trial['gpu_id']})"
    sizes = (("peak_rss_bytes", "resident"), ("private_bytes", "its own"), ("device_bytes", "on the GPU"))
    return {
        "kind": f"{trial['kind']}, dimension {trial['dimension']}, up to {trial['max_input_length']} tokens",
        "runs on": f"{where}, {trial['dtype']}, {trial['batching']}",
        "ready after": f"{trial['start_s']:.2f} s, including {trial['load_s']:.2f} s of loading",
        "speed": f"{trial['texts_per_s']:.0f} texts/s, {trial['tokens_per_s']:.0f} tokens/s",
        **_comparison(trial),
        "peak memory": ", ".join(f"{size(trial[key])} {word}" for key, word in sizes if key in trial) or "not known",
    }


def _comparison(trial: Mapping[str, Any]) -> dict[str, str]:
    """What the results were compared with, and the warnings about the model's files."""
    rows = {}
    distances = []
    if "min_cosine" in trial:
        distances.append(f"lowest cosine {trial['min_cosine']:.7f}")
    if "score_difference" in trial:
        distances.append(f"scores off by {trial['score_difference']:.1e} at most")
    if trial.get("not_compared"):
        rows["not verified"] = f"against a library: {trial['not_compared']}"
        rows["compared with"] = ", ".join((trial["compared_with"], *distances))
    else:
        texts = f"{trial['inputs']} texts of up to {trial['longest_tokens']} tokens"
        rows["verified"] = f"against {trial['compared_with']}: {', '.join((*distances, texts))}"
    for name in ("warnings", "code"):
        if found := trial.get(name):
            rows[name] = "; ".join(found)
    return rows
