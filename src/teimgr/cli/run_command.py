"""`teimgr run MODEL`: an instance of a model that serves, made if it does not exist yet, and how to call it."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions
from teimgr.cli.edit_commands import absolute_model
from teimgr.cli.failures import ExitStatus
from teimgr.cli.instance_commands import Timeout, addresses, await_running
from teimgr.cli.output import say
from teimgr.spec import State

_NAME_CHARS = 32


def run(
    server: DaemonOptions,
    output: CommandOutput,
    model: Annotated[
        str, typer.Argument(help="Id on the model hub, or a directory on the daemon's host.", show_default=False)
    ],
    name: Annotated[str | None, typer.Option(help="Name of the instance; default: the end of the model's id.")] = None,
    timeout: Timeout = 300.0,
) -> int:
    """Serve a model: create an instance, or start the one there is, and wait.

    Shows where to call it. It goes on in the daemon when this command has ended.
    """
    wanted = absolute_model(model) or model
    instances = server.rest.list()
    found = next((each for each in instances if each.model_id == wanted and name in (None, each.name)), None)
    if found is None:
        found = server.rest.create(name or proposed_name(model, {each.name for each in instances}), wanted)
    elif found.status in (State.STOPPED, State.FAILED):
        found = server.rest.start(found.name)
    [instance] = await_running(server.rest, [found.name], timeout, output)
    if output.as_json:
        output.value(instance.details)
    else:
        for line in addresses(instance, server.connection.url):
            say(line)
    return ExitStatus.OK


def proposed_name(model: str, taken: set[str]) -> str:
    """A name for an instance by its model: the end of the id in lower case, with a number where that is taken."""
    end = model.rstrip("/").rpartition("/")[2].lower()
    base = re.sub(r"[^a-z0-9._-]+", "-", end).strip("._-")[:_NAME_CHARS].rstrip("._-") or "model"
    numbered = (f"{base}-{number}" for number in range(2, len(taken) + 3))
    return base if base not in taken else next(each for each in numbered if each not in taken)
