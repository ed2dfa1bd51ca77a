"""The commands of every page: each block runs on a real daemon, or has a mark with its reason, and good syntax.

The pages share one daemon with the instances that they name: `mini` and `ranker`. Each page has a folder of
its own, in which the folders of the repository are at hand.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docsite.forked_commands import NAMES, write_programs
from tests.docsite.pages import PAGES, ROOT, TESTED_ELSEWHERE, Block, blocks, name_of, without_blocks
from tests.support.daemon_process import MINILM, DaemonProcess, WarmDaemonProcess
from tests.support.models import build_cross_encoder
from typer.main import get_command

from teimgr.cli.main import app
from teimgr.config.sources import Source, read

RUN = ("bash", "python", "toml", "yaml", "json", "typescript", "go", "java")
"""Languages of blocks that are run or checked whole; `console` is for commands that are not run."""
DEBIAN_TOOLS = ("promtool",)
"""What blocks use that `.ci/debian-tools` installs; without it they are left out."""
SHOWN = ("", "text", "proto")
SHELL = ("bash", "console")
LIMIT_S = 100.0
BLOCKS = {page: list(blocks(page)) for page in PAGES}
WITH_COMMANDS = [
    page
    for page, found in BLOCKS.items()
    if name_of(page) not in TESTED_ELSEWHERE and any(block.language in RUN and not block.reason for block in found)
]
# What looks for news elsewhere is switched off.
QUIET = {"HAYSTACK_TELEMETRY_ENABLED": "False", "LANGSMITH_TRACING": "false", "NO_PROXY": "*"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("models")
    models = {
        "mini": MINILM,
        "ranker": str(build_cross_encoder("bert", folder / "ranker")),
    }
    running = WarmDaemonProcess(log_format="pretty")
    first = running.settings["instance_port_start"]
    running.settings["instances"] = [
        {"name": name, "model_id": model, "port": first + index} for index, (name, model) in enumerate(models.items())
    ]
    with running, running.client() as client:
        for name in models:
            client.wait_until_running(name, deadline_s=LIMIT_S)
        yield running


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the path, with programs that have nothing to import, the stand-in for grpcurl among them."""
    folder = tmp_path_factory.mktemp("bin")
    write_programs(folder, *NAMES)
    return folder


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_the_commands_of_a_page_work(page: Path, daemon: DaemonProcess, tools: Path, tmp_path: Path) -> None:
    for entry in ROOT.iterdir():
        if entry.name in ("configs", "deploy", "proto", "docs", "tests", "src", "bench", "packaging"):
            (tmp_path / entry.name).symlink_to(entry)
    left_out = []
    for block in BLOCKS[page]:
        if block.reason or block.language not in RUN:
            continue
        if missing := [tool for tool in DEBIAN_TOOLS if tool in block.code and shutil.which(tool) is None]:
            left_out.append(f"{block.place}: no {missing[0]}")
            continue
        checked = CHECKED.get(block.language)
        if checked is not None:
            checked(block, tmp_path)
        else:
            run(block, daemon, tools, tmp_path)
    with daemon.client() as client:
        assert [each.name for each in client.list()] == ["mini", "ranker"], "the page leaves the fleet as it was"


def test_every_block_that_is_not_run_has_its_reason() -> None:
    faults = [
        f"{block.place}: a block of {block.language!r} needs `<!-- not run: REASON -->` in the line above"
        for found in BLOCKS.values()
        for block in found
        if block.language not in (*RUN, *SHOWN) and not block.reason
    ]
    assert faults == []


def test_blocks_that_are_not_run_have_good_syntax(tmp_path: Path) -> None:
    for found in BLOCKS.values():
        for block in found:
            if block.reason and (check := SYNTAX.get(block.language)):
                check(block, tmp_path)


def test_commands_that_are_not_run_have_options_that_there_are() -> None:
    """Those in a line of prose too."""
    root: Any = get_command(app())
    shown = [(each.place, each.code) for found in BLOCKS.values() for each in found if each.language in SHELL]
    shown += [(name_of(page), code) for page in PAGES for code in re.findall(r"`(teimgr [^`]+)`", without_blocks(page))]
    faults = [
        f"{place}: teimgr {' '.join(words)}: {fault}"
        for place, code in shown
        for words in calls_of_teimgr(code.replace("<(", "FILE; ").replace("\\\n", " "))
        if "COMMAND" not in words and (fault := fault_of(root, words))
    ]
    assert faults == []


def calls_of_teimgr(code: str) -> Iterator[list[str]]:
    """The arguments of each call of teimgr in lines of a shell."""
    for line in code.splitlines() if "`" not in code else ():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        with contextlib.suppress(ValueError):  # a quotation that goes on in the next line
            for _, words in itertools.groupby(lexer, lambda word: word.strip("();<>|&") != ""):
                program, *arguments = itertools.dropwhile(lambda word: "=" in word, words)
                if program.rpartition("/")[2] == "teimgr":
                    yield arguments


def fault_of(command: Any, words: Sequence[str]) -> str:
    """What the parser of the command line finds wrong with names of commands and options; values are placeholders."""
    while words and words[0] in getattr(command, "commands", ()):
        command, words = command.commands[words[0]], words[1:]
    if words and not words[0].startswith("-") and hasattr(command, "commands"):
        return f"no command {words[0]}"
    try:
        command.make_parser(command.context_class(command)).parse_args(args=list(words))
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("page", "test"), TESTED_ELSEWHERE.items())
def test_pages_with_a_test_of_their_own_are_named_there(page: str, test: str) -> None:
    assert Path(page).name in (ROOT / test).read_text() or f'"{Path(page).parent}" / "{Path(page).name}"' in test


def run(block: Block, daemon: DaemonProcess, tools: Path, folder: Path) -> None:
    """Run a block in `folder`, with the daemon's ports in the place of the usual ones."""
    first = daemon.settings["instance_port_start"]
    ports = {"9000": daemon.api_port, "9001": daemon.grpc_port, "8080": first, "8081": first + 1}
    code = re.sub(r"\b(9000|9001|8080|8081)\b", lambda match: str(ports[match[0]]), block.code)
    programs = ROOT / block.environment / "bin" if block.environment else Path(sys.executable).parent
    if not programs.exists():
        pytest.skip(f"no {block.environment}: `dev.py test` makes it")
    python = programs / "python" if block.environment else tools / "python-c"
    command = command_of(block.language, code, python, folder)
    if command is None:
        return
    path = os.pathsep.join([str(tools), str(programs), os.environ["PATH"]])
    environ = os.environ | QUIET | {"PATH": path, "TEIMGR_URL": daemon.api}
    if block.environment:  # as on another machine; offline, the hub's client refuses every address
        environ = {name: value for name, value in environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, env=environ, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{block.place}\n{code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def command_of(language: str, code: str, python: Path, folder: Path) -> list[str] | None:
    """The command that runs a block; None where the language is not installed here."""
    if language == "bash":
        return ["bash", "-euo", "pipefail", "-c", code]
    if language == "python":
        return [str(python), "-c", code]
    others: Mapping[str, tuple[str, str, list[str]]] = {
        "typescript": ("node", "block.mjs", []),
        "go": ("go", "block.go", ["run"]),
        "java": ("java", "Embed.java", []),
    }
    program, name, arguments = others[language]
    if shutil.which(program) is None:
        return None
    (folder / name).write_text(code)
    return [program, *arguments, name]


def is_configuration(block: Block, folder: Path) -> None:
    """A block of TOML is a configuration, with what it names in its folder."""
    file = folder / "block.toml"
    file.write_text(block.code)
    read(Source(file=file, environ={}))


def is_python(block: Block, folder: Path) -> None:
    compile(block.code, block.place, "exec")


def is_shell(block: Block, folder: Path) -> None:
    done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), block.place


def is_yaml(block: Block, folder: Path) -> None:
    assert list(yaml.safe_load_all(block.code)), block.place


def is_json(block: Block, folder: Path) -> None:
    json.loads(block.code)


def is_javascript(block: Block, folder: Path) -> None:
    if node := shutil.which("node"):
        file = folder / "block.mjs"
        file.write_text(block.code.replace(" as any", ""))
        done = subprocess.run([node, "--check", file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block.place}\n{done.stderr}"


def is_go(block: Block, folder: Path) -> None:
    if gofmt := shutil.which("gofmt"):
        done = subprocess.run([gofmt, "-e", "-l"], input=block.code, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, ""), f"{block.place}\n{done.stderr}"


CHECKED: Mapping[str, Callable[[Block, Path], None]] = {
    "toml": is_configuration,
    "yaml": is_yaml,
    "json": is_json,
}
SYNTAX: Mapping[str, Callable[[Block, Path], None]] = {
    **CHECKED,
    "bash": is_shell,
    "console": is_shell,
    "python": is_python,
    "typescript": is_javascript,
    "go": is_go,
}
