"""Broken TOML, in process: state files and configurations, which are refused with a reason or read."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from teimgr.config.sources import Source, read
from teimgr.control.supervision.store import Store, Unreadable, parse, render
from teimgr.errors import InvalidConfig
from teimgr.spec import InstanceSpec
from tests.fuzz.mutation import Mutator
from tests.fuzz.surface import Report
from tests.fuzz.target import SEED

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_SPECS = (
    InstanceSpec(name="mini", model_id="a/b", port=8080, tags={"team": "search"}, extra_args=("--api-key", "k")),
    InstanceSpec(name="other", model_id="/models/other", port=8081, replicas=2, gpu_id=0),
)
TOKENS = (
    *(b"\n", b"=", b'"', b"'''", b'"""', b"[", b"]", b"[[", b"]]", b"{", b"}", b",", b"#", b".", b"\\", b"\r"),
    *(b"true", b"nan", b"inf", b"-0", b"1e400", b"0x7f", b"9" * 400, b"1979-05-27T07:32:00Z", b"07:32:00"),
    *(b"[" * 300, b"[" * 3000, b'{"a" = ' * 300, b"a." * 3000, b"\\ud800", b"\\U00110000", "🙂".encode(), b"\xc0\x80"),
    *(b"\n[[instances]]\n", b"\n[auth]\n", b'\nname = "a"\n', b"\nlast_updated = 1\n", b'\nsha256 = "0"\n'),
)


def _states() -> list[bytes]:
    whole = render(_SPECS)
    return [whole, render(()), b"\n".join(line for line in whole.split(b"\n") if not line.startswith(b"sha256"))]


def _configurations() -> list[bytes]:
    """The configurations by sections, since a file that is read thousands of times had better be short."""
    found = []
    for path in sorted(CONFIGS.glob("*.toml")):
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("# ")]
        text = "\n".join(line.removeprefix("#") for line in lines)
        found += [f"{part}\n".encode() for part in text.split("\n[") if len(part) < 3000]
        found += [f"[{part}\n".encode() for part in text.split("\n[")[1:] if len(part) < 3000]
    return found


def run(cases: int, report: Report) -> None:
    """Half of the cases state files, of which one in fifty is loaded from disk; the other half configurations."""
    logging.disable(logging.WARNING)
    try:
        with tempfile.TemporaryDirectory() as folder:
            _states_of(Mutator(SEED + report.cases, _states(), TOKENS), cases // 2, Path(folder), report)
            mutator = Mutator(SEED + report.cases, _configurations(), TOKENS)
            _configurations_of(mutator, cases - cases // 2, Path(folder), report)
    finally:
        logging.disable(logging.NOTSET)


def _states_of(mutator: Mutator, cases: int, folder: Path, report: Report) -> None:
    for number, case in enumerate(mutator.cases(cases)):
        try:
            loaded = parse(case)
            outcome = "state read" if loaded.alarm is None else "state read in part"
            assert parse(render(loaded.specs)).specs == loaded.specs
        except Unreadable:
            outcome = "state refused"
        except Exception as error:
            outcome = "failed"
            report.fail(repr(error), case)
        report.count(outcome)
        if number % 50 == 0 and outcome != "failed":
            _load(case, folder, outcome, report)


def _load(case: bytes, folder: Path, outcome: str, report: Report) -> None:
    """The store takes the file, or the generation before it with an alarm."""
    path, previous = folder / "state.toml", folder / "state.toml.prev"
    for each, content in ((path, case), (previous, render(_SPECS))):
        each.unlink(missing_ok=True)  # the store may have made them one file
        each.write_bytes(content)
    loaded = Store(path).load()
    if outcome == "state refused" and (loaded.specs != _SPECS or not loaded.alarm):
        report.fail(f"not the generation before: {loaded}", case)


def _configurations_of(mutator: Mutator, cases: int, folder: Path, report: Report) -> None:
    path = folder / "teimgr.toml"
    for case in mutator.cases(cases):
        path.write_bytes(case)
        try:
            read(Source(file=path, environ={}))
            outcome = "configuration read"
        except InvalidConfig as error:
            outcome = "configuration refused"
            if not error.message:
                report.fail("refused without a reason", case)
        except Exception as error:
            outcome = "failed"
            report.fail(repr(error), case)
        report.count(outcome)
