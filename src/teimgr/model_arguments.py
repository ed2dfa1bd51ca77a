"""The arguments of `teimgr models …`; what they do is imported when it is done."""

from __future__ import annotations

import argparse


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verbs to the parser of `teimgr models`."""
    _add(commands, "list", "all models the daemon knows").add_argument("--json", action="store_true")
    pulling = _add(commands, "pull", "download a model")
    pulling.add_argument("model", help="id on the model hub")
    pulling.add_argument("--revision", help="branch, tag or commit")
    pulling.add_argument("--update", action="store_true", help="ask the hub also where the model is here")
    checking = _add(commands, "check", "load a model in a throw-away worker, and measure it")
    checking.add_argument("model", help="id on the model hub, or a directory on the daemon's host")
    place = checking.add_mutually_exclusive_group()
    place.add_argument("--gpu", dest="gpu_id", type=int, help="index of the GPU; default: the freest, or the CPU")
    place.add_argument("--cpu", action="store_true", help="on the CPU, even if there is a GPU")
    checking.add_argument("--dtype", choices=("auto", "float32", "float16", "bfloat16"))
    checking.add_argument("--json", action="store_true")
    _add(commands, "rm", "delete a model from the cache").add_argument("model")


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, meaning: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=meaning)
    parser.add_argument("--url", default="http://127.0.0.1:9000", help="the daemon's REST address")
    parser.add_argument("--ca", metavar="FILE", help="authority of the daemon's certificate")
    parser.add_argument("--cert", metavar="FILE", help="our certificate, where the daemon asks for one")
    parser.add_argument("--key", metavar="FILE", help="its key")
    parser.set_defaults(run=_run, command=name)
    return parser


def _run(options: argparse.Namespace) -> int:
    from teimgr.model_commands import run

    return run(options)
