"""The page about performance, with every figure taken from the newest committed result of its scenario."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from statistics import median
from typing import Any

from bench import compared
from bench.machine import instruction_set

from docsite.markdown import MADE_BY
from docsite.plots import load, newest

_AUTO = "teimgr engine, auto"


def to_markdown() -> str:
    """The whole page."""
    return f"""# Performance

{MADE_BY}

{_head()}

## Throughput

![Texts per second of sentence-transformers, the engine and the daemon](../images/plots/engine.svg)

{_engine()}

## Beside other runtimes

{_peers()}

![Tokens per second, mixed texts](../images/plots/peers-mixed.svg)

![Tokens per second, short texts](../images/plots/peers-short.svg)

![Tokens per second, long texts](../images/plots/peers-long.svg)

{_int8()}

`python -m bench peers --shape NAME` measures BERT-base and -large, rerankers, SPLADE, ModernBERT and Qwen3 in the same
way, with random weights.

## Latency

![Latency of one query, idle and beside a bulk job](../images/plots/latency.svg)

{_latency()}

## Beside other servers

{_servers()}

## Starts

![Seconds until a worker serves](../images/plots/start.svg)

{_start()}

## The interfaces

{_interfaces()}

## Exactness

{_fidelity()}

## Not measured

GPUs other than one H200, which was tried for a quarter of an hour: [the engine on a GPU](gpu.md).
"""


def _wrapped(*parts: str) -> str:
    """One paragraph of these parts."""
    return textwrap.fill(" ".join(parts), 118, break_long_words=False, break_on_hyphens=False)


def _head() -> str:
    return _wrapped(
        f"Measured on {_machine('engine')}, where no other is named, with the real all-MiniLM-L6-v2.",
        "Figures and pictures are made of the committed",
        "results in [bench/results](../../bench/results), whose [report](../../bench/results/report.html) has every",
        "target with what was measured; [bench/README.md](../../bench/README.md) explains scenarios, texts and how to",
        "read the numbers. Results of your own: `python3.11 dev.py bench NAME`; all of them with the report: its verb",
        "`all`, then `python -m docsite` for this page.",
    )


def _result(scenario: str, words: str = "result") -> str:
    return f"[{words}](../../bench/results/{newest(scenario)}.md)"


def _machine(scenario: str) -> str:
    machine = load(newest(scenario))["machine"]
    cores = {1: "one CPU core", 2: "two CPU cores"}.get(machine["cores"], f"{machine['cores']} CPU cores")
    return f"{cores} ({machine['cpu']}, {instruction_set(machine)})"


def _between(values: Sequence[float], form: str) -> str:
    """The least and the most, or one where they are written the same."""
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


def _engine() -> str:
    document = load(newest("engine"))
    rows = {row["path"]: row for row in document["rows"]}
    auto, served = rows[_AUTO], rows["teimgr daemon, EmbedArrow"]
    count, tokens = int(document["facts"]["texts"].split()[0]), _tokens(document["facts"]["texts"])
    share = median(bare / through for bare, through in zip(auto["seconds"], served["seconds"], strict=False))
    return _wrapped(
        f"{count:,} texts of {tokens / count:.0f} tokens on average; paths take turns in one run. Through the daemon,",
        f"by `EmbedArrow`, the engine keeps {100 * share:.1f} % of its speed,",
        f"{served['ratio_to_baseline']['median']:.1f} times that of sentence-transformers ({_result('engine')}).",
        f'`dtype = "auto"` took {auto["dtype"]}, with a lowest cosine to float32 of {auto["cosine"]["min"]:.5f}.',
    )


def _tokens(fact: str) -> int:
    """The number in "…, 43789 real tokens"."""
    return int(fact.rpartition(", ")[2].split()[0])


def _peers() -> str:
    rows = load(newest("peers"))["rows"]
    texts = compared.corpora(rows)
    ratios = [found for each in texts if (found := compared.of_best_peer(rows, each, _AUTO))]
    shares = [share for each in texts if (share := compared.of_limit(rows, each, _AUTO)) is not None]
    floats = [found for each in texts if (found := compared.of_best_peer(rows, each, "teimgr engine, float32"))]
    return _wrapped(
        f"In process, without any server, on {_machine('peers')};",
        "peers run one traced graph with pooling on sorted texts",
        f"({_result('peers')}). The engine's own choice has {_between([each.times for each in ratios], '.2f')}",
        f"times the rate of the fastest peer in {_dtype(rows)}, which is {_names(ratios)}, and",
        f"{_between([100 * each for each in shares], '.0f')} % of that of the matrix products alone; in float32 it has",
        f"{_between([each.times for each in floats], '.2f')} times the rate of the fastest peer, {_names(floats)}:",
    )


def _dtype(rows: Sequence[dict[str, Any]]) -> str:
    return str(next(row["dtype"] for row in rows if row["path"] == _AUTO))


def _names(ratios: Sequence[compared.Ratio]) -> str:
    return " or ".join(dict.fromkeys(each.other.split(",")[0] for each in ratios))


def _int8() -> str:
    rows = load(newest("peers"))["rows"]
    int8, auto = "teimgr engine, int8", _AUTO
    pairs = [
        (compared.row(rows, each, int8), compared.row(rows, each, auto))
        for each in compared.corpora(rows)
        if compared.row(rows, each, int8) and compared.row(rows, each, auto)
    ]
    faster = [compared.ratio(own, other).times for own, other in pairs if own and other]
    lowest = [float(own["cosine min"]) for own, _ in pairs if own]
    mean = [float(own["cosine mean"]) for own, _ in pairs if own]
    return _wrapped(
        f'`dtype = "int8"`, which `auto` never takes, has {_between(faster, ".2f")} times the rate of bfloat16 at a',
        f"lowest cosine to float32 of {_between(lowest, '.4f')} and a mean of {_between(mean, '.4f')}.",
    )


def _latency() -> str:
    mux = {row["load"]: row for row in load(newest("mux"))["rows"]}
    row = load(newest("bimodal"))["rows"][0]
    alone, beside = (mux[f"one at a time, {when}"]["p50"] for when in ("idle", "beside bulk"))
    return _wrapped(
        f"A query beside a bulk job is computed at the same time, with a higher priority: {beside:.1f} ms where it",
        f"takes {alone:.1f} ms alone ({_result('mux')}). Of 20 queries a second beside bulk half are answered within",
        f"{row['beside_p50_ms']:.1f} ms ({row['idle_p50_ms']:.1f} ms without bulk), 99 % within",
        f"{row['beside_p99_ms']:.0f} ms; the bulk job loses {row['lost']:.1f} %, where at most 5 % is the aim",
        f"({_result('bimodal')}).",
    )


def _interfaces() -> str:
    return _wrapped(
        "Requests per second and processor time of each process around a small model:",
        f"{_result('front')}. A fleet of 1,000 instances idles at 3.5 % of a core ([result](../results/fleet.md)).",
    )


def _servers() -> str:
    rows = load(newest("servers"))["rows"]
    peers = dict.fromkeys(row["peer"] for row in rows)
    lines = []
    for peer in peers:
        singles = [row["times"] for row in rows if row["peer"] == peer and "×" not in row["load"]]
        batches = [row["times"] for row in rows if row["peer"] == peer and "×" in row["load"]]
        words = [f"{_between(singles, '.1f')} times its rate with single texts"] if singles else []
        words += [f"{_between(batches, '.1f')} with batches of 64"] if batches else []
        lines.append(f"* {peer}: {', '.join(words)}")
    return f"The daemon over HTTP beside servers with the same model and texts ({_result('servers')}):\n\n" + "\n".join(
        lines
    )


def _start() -> str:
    workers = load(newest("start"))["workers"][1:]
    running, restart, used = ([each[key] for each in workers] for key in ("running_s", "restart_s", "unique_mib"))
    return _wrapped(
        "The first worker waits for the fork server to import torch; every further one is a fork of it, serves after",
        f"{_between(running, '.2f')} s, is back {_between(restart, '.2f')} s after a kill, and takes",
        f"{_between(used, '.0f')} MiB of its own ({_result('start')}).",
    )


def _fidelity() -> str:
    cases = load(newest("fidelity"))["cases"]
    lines = []
    for dtype in dict.fromkeys(case.get("dtype", "float32") for case in cases):
        served = [case for case in cases if case.get("dtype", "float32") == dtype and "refused" not in case]
        cosines = [case["lowest_cosine"] for case in served if case["lowest_cosine"] is not None]
        same = sum(case["difference_alone"] == 0 for case in served)
        most = max(case["difference_alone"] for case in served)
        digits = 7 if dtype == "float32" else 4
        lines.append(
            f"* {dtype}: {len(served)} models, lowest cosine {min(cosines):.{digits}f}, largest difference "
            f"{max(case['difference'] for case in served):.1e};\n  a text alone gives the numbers it has in a batch, "
            f"bit for bit in {same} of them, else to {most:.0e}"
        )
    return (
        "`bench fidelity` compares every kind of model with the library it was made with, in random batches and alone\n"
        f"({_result('fidelity')}):\n\n" + "\n".join(lines)
    )
