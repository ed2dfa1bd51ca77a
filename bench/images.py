"""`bench images`: images/s of CLIP and pages/s of ColPali, by stage, and text queries beside a bulk job of images."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import bimodal, corpus, pictures
from bench.contest import Child, Row, child, compete, entrants
from bench.encoders import Task
from bench.fleet import Fleet, fleet
from bench.front import INSTANCE
from bench.progress import partial, rounds, say, until
from bench.report import publish
from bench.table import ratios

HEADER = (
    *("path", "dtype", "images/s median", "× baseline median", "least", "most"),
    *("CPU ms of an image", "decode %", "preprocess %", "forward %", "cosine min", "foreign cores"),
)
_STAGES = ("decode", "preprocess", "forward")
_PHOTOGRAPHS = ((640, 480), (480, 640), (1024, 768), (640, 480))
_PAGE = (1240, 1754)  # A4 at 150 dpi
_BATCH, _STAGED_PAGES = 32, 2
_PARTS = ("images", "beside-images", "pages", "beside-pages")


@dataclass
class Contest:
    """Paths over the files of one kind, the first of which is the baseline; and those whose stages are measured."""

    files: list[str]
    tasks: dict[str, Task]
    staged: tuple[str, ...]
    staged_files: int = _BATCH


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--images", type=int, default=64, help="photographs of a pass (64)")
    parser.add_argument("--bulk", type=int, default=192, help="photographs of a bulk job beside queries (192)")
    parser.add_argument("--pages", type=int, default=3, help="pages of a pass (3)")
    parser.add_argument("--bulk-pages", type=int, default=8, help="pages of a bulk job beside queries (8)")
    parser.add_argument("--rounds", type=int, default=3, help="passes of each path, in turn (3)")
    parser.add_argument("--rate", type=float, default=20.0, help="text queries a second beside the bulk (20)")
    parser.add_argument("--idle", type=float, default=8.0, help="seconds of them without it, in a round (8)")
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=_PARTS, help="the parts to measure (all)")
    parser.add_argument("--tiny", action="store_true", help="models of a few kB, for a test: figures mean nothing")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        say("making models and files")
        has_images, has_pages = (
            {"images", "beside-images"} & {*options.only},
            {"pages", "beside-pages"} & {*options.only},
        )
        models = pictures.models(folder, is_tiny=options.tiny, of_pages="pages" in options.only)
        count = max(options.images, options.bulk) if has_images else 0
        photographs = pictures.photographs(folder / "photographs", count, _PHOTOGRAPHS)
        count = max(options.pages, options.bulk_pages) if has_pages else 0
        pages = pictures.photographs(folder / "pages", count, [_PAGE])
        say("starting the daemon")
        running = stack.enter_context(fleet())
        records, beside_images, beside_pages = list[dict[str, Any]](), bimodal.Found(), bimodal.Found()
        if has_images:
            with partial(), _instance(running, models.clip), until(0.5):
                if "images" in options.only:
                    contest = _of_photographs(models.clip, photographs[: options.images], running)
                    records += _measured(contest, options.rounds, running)
                if "beside-images" in options.only:
                    _beside(running, photographs[-options.bulk :], options, beside_images, folder)
        if "pages" in options.only:
            with partial(), until(0.75):
                records += _measured(_of_pages(models.colpali, pages[: options.pages]), options.rounds, running)
        if "beside-pages" in options.only:
            with partial(), _instance(running, models.narrow_colpali, dtype="bfloat16"), until(0.95):
                _beside(running, pages[-options.bulk_pages :], options, beside_pages, folder, is_late=True)
    facts = {
        "CLIP": "a CLIP of ViT-B/32's sizes with random weights; JPEG files of 640 x 480, 480 x 640 and 1024 x 768",
        "pages": "a ColPali of its widths and a ninth of its depth, 3 layers of the image half and 2 of "
        "the language model, with random weights; JPEG files of A4 at 150 dpi, 1,030 tokens each",
        "method": f"{options.rounds} rounds, one pass of each path in turn, {options.images} photographs or "
        f"{options.pages} pages; × is within a round",
        "stages": f"processor time of decoding, resizing and the forward, of {_BATCH} images or {_STAGED_PAGES} pages; "
        "forward here includes the numbers of pixels, which transformers makes in its preprocessing",
        "size": "tiny models, whose figures mean nothing" if options.tiny else "as named",
        "a text query beside images": _told(beside_images, options),
        "a text query beside pages": _told(beside_pages, options),
        "the pages beside it": "by a ColPali of a quarter of these widths, as many layers and 1,030 tokens a page, so "
        "that queries are no load of their own",
    }
    data = {"rows": records, "beside": vars(beside_images), "beside pages": vars(beside_pages)}
    publish("images", facts, HEADER, [[record.get(key) for key in HEADER] for record in records], data)
    return 0


@contextmanager
def _instance(running: Fleet, model: Path, **settings: Any) -> Iterator[None]:
    """The one instance of the daemon."""
    running.client.create(INSTANCE, str(model), **settings)
    running.client.wait_until_running(INSTANCE, deadline_s=120)
    say(f"{model.name} runs")
    yield
    running.client.delete(INSTANCE)


def _of_photographs(model: Path, files: list[str], running: Fleet) -> Contest:
    engine = Task("engine-images", str(model))
    tasks = {
        "CLIP, sentence-transformers": Task("sentence-transformers-images", str(model), batch_size=_BATCH),
        "CLIP, transformers": Task("transformers-images", str(model), batch_size=_BATCH),
        "CLIP, teimgr engine": engine,
        "CLIP, teimgr engine, auto": Task("engine-images", str(model), dtype="auto"),
        "CLIP, teimgr daemon, Arrow, auto": Task("served-images", grpc=running.grpc, instance=INSTANCE),
    }
    return Contest(files, tasks, (*tasks,)[1:4])


def _of_pages(model: Path, files: list[str]) -> Contest:
    tasks = {
        "page, transformers": Task("transformers-pages", str(model), batch_size=4),
        "page, teimgr engine": Task("engine-images", str(model)),
        "page, teimgr engine, bfloat16": Task("engine-images", str(model), dtype="bfloat16"),
    }
    return Contest(files, tasks, (*tasks,), _STAGED_PAGES)


def _measured(contest: Contest, turns: int, running: Fleet) -> list[dict[str, Any]]:
    """A record of each path."""
    own_cpu = {name: running.cpu_s for name, task in contest.tasks.items() if task.grpc}
    with entrants(contest.tasks, skip_failing=True) as children:
        rows = compete(children, contest.files, turns, own_cpu)
        count = min(len(contest.files), contest.staged_files)
        stages = {name: _stages(children[name], count) for name in contest.staged if name in children}
    return [_record(row, rows[0], len(contest.files), stages.get(row.name, {})) for row in rows]


def _stages(of: Child, count: int) -> dict[str, float]:
    """Processor seconds of each stage for an image, of so many."""
    return {name: seconds / count for name, seconds in of.ask("stages", count).items()}


def _record(row: Row, baseline: Row, files: int, stages: dict[str, float]) -> dict[str, Any]:
    times, whole = ratios(row, baseline), sum(stages.values())
    own: dict[str, Any] = {"path": row.name, "dtype": row.dtype, "images/s median": files / row.median_s}
    own |= {"× baseline median": times["median"], "least": times["least"], "most": times["most"]}
    own |= {"cosine min": f"{row.cosine_min:.5f}", "foreign cores": median(row.foreign_cores), "seconds": row.seconds}
    if not stages:
        return own
    shares = {f"{name} %": 100 * stages[name] / whole for name in _STAGES}
    return own | {"CPU ms of an image": whole * 1e3} | shares


def _beside(
    running: Fleet,
    files: list[str],
    options: argparse.Namespace,
    found: bimodal.Found,
    folder: Path,
    *,
    is_late: bool = False,
) -> None:
    """Text queries at a fixed rate, alone and beside a bulk job of images through the same instance."""
    paths = folder / "beside.json"
    paths.write_text(json.dumps(files))
    texts = corpus.queries(1000)
    own = argparse.Namespace(idle=options.idle, rate=options.rate, texts=len(files))
    with child(Task("served-images", grpc=running.grpc, instance=INSTANCE)) as bulk:
        bulk.ask("texts", str(paths))
        for number in rounds(options.rounds):
            target = bimodal.Target(running.grpc, bulk, is_late=is_late)
            bimodal.measure_round(target, texts, own, found, alone_first=number % 2 == 1)
            say(f"  {found.alone[-1]:.1f} images/s alone, {found.beside[-1]:.1f} beside queries")


def _told(found: bimodal.Found, options: argparse.Namespace) -> str:
    if not found.idle_ms or not found.beside_ms:
        return "not measured"
    (idle_50, idle_99), (beside_50, beside_99) = (
        np.percentile(each, (50, 99)).tolist() for each in (found.idle_ms, found.beside_ms)
    )
    return (
        f"{options.rate:g} a second through the mux: p50 {idle_50:.2f} ms, p99 {idle_99:.2f} ms idle; p50 "
        f"{beside_50:.2f} ms, p99 {beside_99:.2f} ms beside the bulk, {beside_99 / idle_99:.2f} x its idle p99; the "
        f"bulk {median(found.alone):.1f} images/s alone and {median(found.beside):.1f} beside the queries"
    )
