"""The targets of speed as they were asked for, each with what the results have of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from bench import compared
from bench.provenance import Documents
from bench.query_targets import every_50_ms, front, one_query
from bench.verdicts import Form, Line, Target, Value

AUTO, FLOAT32, INT8 = "teimgr engine, auto", "teimgr engine, float32", "teimgr engine, int8"
ARROW = "teimgr, EmbedArrow"
MODELS = {
    "peers": "MiniLM",
    "peers-base": "BERT-base",
    "peers-large": "BERT-large",
    "peers-xlm-r-reranker": "XLM-R reranker",
    "peers-splade": "SPLADE",
    "peers-modernbert": "ModernBERT",
    "peers-qwen3": "Qwen3-0.6B",
}
_TEXTS = ("mixed", "short", "all-256")
"""Corpora whose rates were asked for."""
_BATCH_TOKENS = 512  # of a batch of bulk beside queries on a CPU, by which "one batch" is counted
_BYTES_OF_MIB, _BYTES_OF_MB = 2**20, 1e6
NO_CARD = "no card could be had; `just gpu` is ready"


def targets(documents: Documents) -> Iterator[Target]:
    """Every row of the table of targets, in its order."""
    yield Target(
        "CPU bulk through EmbedArrow, MiniLM mixed / short / long, lowest cosine ≥ 0.9999",
        "1.1 × OpenVINO with the bf16 hint in process",
        [*_bulk(documents), *_cosines(documents)],
    )
    yield Target("CPU bulk, BERT-base short texts", "1.2 × OpenVINO bf16", [*_base_short(documents)])
    yield Target("CPU float32", "ahead of OpenVINO fp32 and ORT fp32 on every corpus", [*_float32(documents)])
    yield Target(
        "CPU int8 option",
        "1.4 × our own bf16 at lowest cosine ≥ 0.98 (mean ≥ 0.997), ahead of ORT int8 in both",
        [*_int8(documents)],
    )
    yield Target(
        "one short query, back to back, in the worker / through the mux", "1.3 ms / 2.1 ms p50", [*one_query(documents)]
    )
    yield Target("one short query every 50 ms through the mux", "3 ms p50, 5 ms p99", [*every_50_ms(documents)])
    yield Target(
        "fraction of the measured matrix-product limit, CPU bulk", "MiniLM 70 %, BERT-base 80 %", [*_limits(documents)]
    )
    yield Target("EmbedArrow through the mux against the bare engine", "98 %", [*_through_the_mux(documents)])
    yield Target(
        "unary Embed through the mux, static model, 256 callers",
        "12,000 req/s on these two cores",
        [*front(documents, "mux Embed", {256: (10_528, 12_000)})],
    )
    yield Target(
        "/v1/embeddings on 9000, static model, 64 / 256 connections",
        "8,000 req/s, p99 ≤ 60 ms",
        [*front(documents, "/v1/embeddings", {64: (3_541, 8_000), 256: (4_147, 8_000)}, p99_ms=60.0)],
    )
    yield Target(
        "/embed on the instance port, 64 / 256 connections",
        "9,000 req/s, p99 ≤ 60 ms",
        [*front(documents, "/embed", {64: (7_040, 9_000), 256: (5_415, 9_000)}, p99_ms=60.0)],
    )
    yield Target("OpenAI base64 route against Arrow, batches of 64 texts", "85 %", [*_base64(documents)])
    yield Target(
        "static model through EmbedArrow",
        "150,000 texts/s",
        [*front(documents, "EmbedArrow by the client", {1: (59_000, 150_000)})],
    )
    yield Target(
        "20 queries a second beside saturating bulk",
        "p99 ≤ 2 × idle p99 + one batch; bulk loses under 5 %",
        [*_beside_bulk(documents)],
    )
    yield Target("two instances, one idle", "the busy one within 3 % of its speed alone", [*_idle_neighbour(documents)])
    yield Target(
        "POST to running, MiniLM from cache; restart of a crashed worker",
        "0.4 s; 0.5 s (warm nursery); 100 MB USS",
        [*_start(documents)],
    )
    yield from _gpu(documents)


def _gpu(documents: Documents) -> Iterator[Target]:
    """From the step `served` of `bench card`."""
    served = documents.get("card", {}).get("steps", {}).get("served", {})
    of = "daemon, {}, {}".format
    for what, at_least, figures in (
        (
            "GPU, BERT-base size, Arrow, H200 (H100 in brackets)",
            "2.2 M (2.0 M) tokens/s at 512 tokens, 2.0 M (1.8 M) at 50",
            [
                ("at 512 tokens", Form.RATE, of("base", "up to 512 tokens"), "tokens/s, median", 2_200_000),
                ("at 50 tokens", Form.RATE, of("base", "some 50 tokens"), "tokens/s, median", 2_000_000),
            ],
        ),
        (
            "GPU, BERT-large size at 512 tokens",
            "55 % of the measured bf16 matrix rate",
            [
                (
                    "of the measured bf16 matrix rate",
                    Form.SHARE,
                    of("large", "up to 512 tokens"),
                    "of the bfloat16 matrix rate",
                    0.55,
                )
            ],
        ),
        (
            "GPU, one short query through the worker",
            "1.2 ms p50",
            [("p50", Form.MS, of("minilm", "one query, ms"), "p50_ms", 1.2)],
        ),
    ):
        yield Target(what, at_least, [_of_card(served, *figure) for figure in figures])


def _of_card(served: dict[str, Any], name: str, form: Form, part: str, key: str, asked: float) -> Line:
    at_most = form is Form.MS
    found = served.get(part, {})
    measured = found.get("worker, /embed", found).get(key)
    if measured is None:
        word = "at most" if at_most else "at least"
        return Line(name, form, asked=f"{word} {form.asked(asked)}", unmeasured=NO_CARD)
    return Line(name, form, [Value("", measured, asked)], at_most, why=f"card {'query' if at_most else 'bulk'}")


def _missing(scenario: str) -> str:
    return f"no result of `bench {scenario}`"


def _ratios(
    document: dict[str, Any], path: str, asked: dict[str, float] | float | None, of: str = ""
) -> Iterator[Value]:
    """A path against the fastest peer of its precision, for each of the texts."""
    rows = document["rows"]
    for texts in compared.corpora(rows):
        wanted = asked.get(texts) if isinstance(asked, dict) else asked
        if (isinstance(asked, dict) and wanted is None) or (
            found := compared.of_best_peer(rows, texts, path, of)
        ) is None:
            continue
        yield Value(texts, found.times, wanted, f"÷ {found.other}, {found.method}")


def _bulk(documents: Documents) -> Iterator[Line]:
    """MiniLM through EmbedArrow, and in process beside it, since that is how OpenVINO runs."""
    if not documents.get("peers", {}).get("rows"):
        yield Line(
            "÷ the faster hint of OpenVINO, bfloat16", Form.TIMES, unmeasured=_missing("peers"), asked="at least 1.1 ×"
        )
        return
    asked = dict.fromkeys(_TEXTS, 1.1)
    through = list(_ratios(documents["peers"], ARROW, asked))
    if through:
        yield Line("through EmbedArrow ÷ the fastest peer in bfloat16, in process", Form.TIMES, through, why="bulk")
    engine = list(_ratios(documents["peers"], AUTO, asked))
    notes = [] if through else ["EmbedArrow is not in this result; it keeps what the row of the bare engine below has"]
    yield Line("the bare engine ÷ the fastest peer in bfloat16", Form.TIMES, engine, why="bulk", notes=notes)


def _cosines(documents: Documents) -> Iterator[Line]:
    rows = documents["peers"]["rows"] if "peers" in documents else []
    for path in (ARROW, AUTO):
        values = [
            Value(texts, float(row["cosine min"]), 0.9999)
            for texts in compared.corpora(rows)
            if (row := compared.row(rows, texts, path))
        ]
        if values:
            yield Line(f"lowest cosine to float32, {path}", Form.COSINE, values)
            return


def _base_short(documents: Documents) -> Iterator[Line]:
    if not documents.get("peers-base", {}).get("rows"):
        yield Line(
            "÷ the fastest peer in bfloat16",
            Form.TIMES,
            unmeasured=_missing("peers --shape base"),
            asked="at least 1.2 ×",
        )
        return
    for path in (ARROW, AUTO):
        if values := list(_ratios(documents["peers-base"], path, {"short": 1.2})):
            yield Line(f"{path} ÷ the fastest peer in bfloat16", Form.TIMES, values, why="bulk")


def _float32(documents: Documents) -> Iterator[Line]:
    for name, model in MODELS.items():
        if name in documents and (values := list(_ratios(documents[name], FLOAT32, 1.0))):
            yield Line(f"{model}: the engine ÷ the fastest peer in float32", Form.TIMES, values, why="bulk")


def _int8(documents: Documents) -> Iterator[Line]:
    for name, model in MODELS.items():
        if name not in documents:
            continue
        rows = documents[name]["rows"]
        values = []
        for texts in compared.corpora(rows):
            own, other = compared.row(rows, texts, INT8), compared.row(rows, texts, AUTO)
            if own and other and other["dtype"] == "bfloat16":
                found = compared.ratio(own, other)
                values.append(Value(texts, found.times, 1.4, found.method))
        if values:
            yield Line(f"{model}: int8 ÷ our own bfloat16", Form.TIMES, values, why="int8")
        if peers := list(_ratios(documents[name], INT8, 1.0, "ONNX Runtime")):
            yield Line(f"{model}: int8 ÷ ONNX Runtime int8", Form.TIMES, peers, why="int8")
        best = [value for value in _ratios(documents[name], INT8, None) if "ONNX Runtime" not in value.note]
        if best:
            yield Line(f"{model}: int8 ÷ a peer that is faster than ONNX Runtime, not asked for", Form.TIMES, best)
        if name == "peers":
            yield from _int8_cosines(rows)


def _int8_cosines(rows: Sequence[dict[str, Any]]) -> Iterator[Line]:
    """Of real weights: random ones give all texts similar results."""
    for key, words, asked in (("cosine min", "lowest", 0.98), ("cosine mean", "mean", 0.997)):
        own, against = [], []
        for texts in compared.corpora(rows):
            row, other = compared.row(rows, texts, INT8), compared.row(rows, texts, "ONNX Runtime, int8")
            if row:
                own.append(Value(texts, float(row[key]), asked))
            if row and other:
                against.append(
                    Value(texts, float(row[key]), float(other[key]), f"ONNX Runtime {float(other[key]):.5f}")
                )
        if own:
            yield Line(f"MiniLM: {words} cosine of int8 to float32", Form.COSINE, own, why="int8")
        if against:
            yield Line(f"MiniLM: {words} cosine, beside ONNX Runtime int8", Form.COSINE, against, why="int8")


def _limits(documents: Documents) -> Iterator[Line]:
    for name, asked in {"peers": 0.7, "peers-base": 0.8}.items():
        rows = documents[name]["rows"] if name in documents else []
        for path in (ARROW, AUTO):
            values = [
                Value(texts, share, asked)
                for texts in compared.corpora(rows)
                if (share := compared.of_limit(rows, texts, path)) is not None
            ]
            if values:
                yield Line(f"{MODELS[name]}: {path} ÷ the matrix products alone", Form.SHARE, values, why="bulk")
        if not rows:
            unmeasured = _missing("peers" + (" --shape base" if name == "peers-base" else ""))
            yield Line(MODELS[name], Form.SHARE, asked=f"at least {100 * asked:g} %", unmeasured=unmeasured)


def _through_the_mux(documents: Documents) -> Iterator[Line]:
    values = []
    if "engine" in documents:
        seconds = {row["path"]: row["seconds"] for row in documents["engine"]["rows"]}
        pairs = zip(seconds.get(AUTO, []), seconds.get("teimgr daemon, EmbedArrow", []), strict=False)
        if shares := [bare / served for bare, served in pairs]:
            values.append(Value("engine", median(shares), 0.98, "MiniLM, mixed texts, paired by round"))
    rows = documents["peers"]["rows"] if "peers" in documents else []
    for texts in compared.corpora(rows):
        own, bare = compared.row(rows, texts, ARROW), compared.row(rows, texts, AUTO)
        if own and bare:
            found = compared.ratio(own, bare)
            values.append(Value(f"peers, {texts}", found.times, 0.98, found.method))
    yield Line(
        "EmbedArrow ÷ the bare engine",
        Form.SHARE,
        values,
        why="mux",
        unmeasured=_missing("engine"),
        asked="at least 98 %",
    )


def _base64(documents: Documents) -> Iterator[Line]:
    rows = documents["front"]["rows"] if "front" in documents else []
    passes = {(row["load"], row["callers"]): row["passes"] for row in rows if row["checkout"] == "here"}
    values = []
    for callers in (callers for load, callers in passes if load == "/v1/embeddings base64 × 64"):
        other = passes.get(("mux EmbedArrow × 64", callers), [])
        pairs = zip(passes["/v1/embeddings base64 × 64", callers], other, strict=False)
        shares = [own["calls"] / own["seconds"] * arrow["seconds"] / arrow["calls"] for own, arrow in pairs]
        if shares:
            values.append(Value(f"{callers} callers", median(shares), 0.85, "a look-up table, paired by round"))
    yield Line("base64 ÷ Arrow", Form.SHARE, values, why="front", unmeasured=_missing("front"), asked="at least 85 %")


def _beside_bulk(documents: Documents) -> Iterator[Line]:
    if not documents.get("bimodal", {}).get("rows"):
        yield Line("p99 beside bulk, and what bulk loses", Form.MS, unmeasured=_missing("bimodal"), asked="as above")
        return
    row = documents["bimodal"]["rows"][0]
    batch_ms = _BATCH_TOKENS * row["over_ms"] / row["over_tokens"] if row["over_tokens"] else 0.0
    asked = 2 * row["idle_p99_ms"] + batch_ms
    note = f"2 × {row['idle_p99_ms']:.1f} ms + a batch of {_BATCH_TOKENS:,} tokens, {batch_ms:.0f} ms"
    yield Line(
        "p99 beside bulk", Form.MS, [Value("p99", row["beside_p99_ms"], asked, note)], at_most=True, why="beside"
    )
    lost = Value("lost", row["lost"] / 100, 0.05, f"{row['lost_least']:.1f} to {row['lost_most']:.1f} % by the round")
    yield Line("what bulk loses", Form.SHARE, [lost], at_most=True, why="beside")


def _idle_neighbour(documents: Documents) -> Iterator[Line]:
    rows = documents["neighbours"]["rows"] if "neighbours" in documents else []
    values = [
        Value("idle", row["of_alone"], 0.97) for row in rows if row["checkout"] == "this" and "idle" in row["beside"]
    ]
    yield Line(
        "beside an idle instance ÷ alone", Form.SHARE, values, unmeasured=_missing("neighbours"), asked="at least 97 %"
    )


def _start(documents: Documents) -> Iterator[Line]:
    workers = documents.get("start", {}).get("workers", [])[1:]  # the first waits for the fork server to import torch
    if not workers:
        yield Line("seconds and memory", Form.SECONDS, unmeasured=_missing("start"), asked="as above")
        return
    for key, figure, asked in (
        ("running_s", "POST to running, workers after the first", 0.4),
        ("restart_s", "killed to running again", 0.5),
    ):
        values = [Value("median", median(each[key] for each in workers), asked, f"of {len(workers)} workers")]
        yield Line(figure, Form.SECONDS, values, at_most=True, why="start")
    used = median(each["unique_mib"] for each in workers) * _BYTES_OF_MIB / _BYTES_OF_MB
    yield Line("memory of an added worker (USS)", Form.MB, [Value("median", used, 100.0)], at_most=True, why="start")
