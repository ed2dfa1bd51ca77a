"""The parts of the report that a wrong verdict could come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench import absent_peers, compared, html, latency, machine, provenance, targets
from bench.query_targets import every_50_ms, front, one_query
from bench.reasons import reason
from bench.verdicts import NOT_MEASURED, Form, Line, Value
from docsite.plots import load

ROOT = Path(__file__).parents[2]

_OPENVINO, _LATENCY = "OpenVINO, bfloat16", "OpenVINO, bfloat16, latency hint"


def _row(path: str, rate: float, dtype: str = "bfloat16", texts: str = "short", **more: Any) -> dict[str, Any]:
    return {"texts": texts, "path": path, "dtype": dtype, "tokens/s median": rate, **more}


def _document(rows: list[dict[str, Any]], revision: str = "1111111", **more: Any) -> dict[str, Any]:
    machine = {
        "cores": 2,
        "cpu": "some",
        "memory_gib": 8.0,
        "system": "Linux 6",
        "instruction_sets": [],
        "python": "3.11.7",
        "versions": {"torch": "2.13.0"},
        "revision": revision,
    }
    return {"date": "2026-11-24", "machine": machine, "facts": {}, "rows": rows} | more


def test_the_fastest_peer_is_of_the_same_precision_and_texts_and_is_neither_ours_nor_a_limit() -> None:
    rows = [
        _row(_OPENVINO, 100),
        _row(_LATENCY, 120),
        _row(_LATENCY, 500, texts="mixed"),
        _row("ONNX Runtime, int8", 300, "int8"),
        _row("teimgr engine, auto", 180),
        _row("matrix products alone, bfloat16", 900),
    ]

    peer = compared.best_peer(rows, "short", "bfloat16")

    assert peer is rows[1]
    assert compared.best_peer(rows, "short", "float32") is None
    found = compared.of_best_peer(rows, "short", "teimgr engine, auto")
    assert found == compared.Ratio("teimgr engine, auto", _LATENCY, 1.5, is_paired=False)
    assert found.method == "of medians"
    assert compared.of_best_peer(rows, "short", "teimgr engine, int8") is None


def test_ratios_are_paired_where_the_seconds_of_the_rounds_are_there() -> None:
    ours = _row("teimgr engine, auto", 150, passes_s=[1.0, 10.0, 1.0, 5.0])  # the last round is not whole
    theirs = _row(_OPENVINO, 100, passes_s=[2.0, 21.0, 2.2])

    assert compared.ratio(ours, theirs).times == pytest.approx(2.1)
    assert compared.ratio(ours, theirs).is_paired
    assert compared.ratio(ours, _row(_OPENVINO, 100)).times == pytest.approx(1.5)


def test_the_part_of_the_limit_is_paired_or_that_of_the_result() -> None:
    limit = _row("matrix products alone, bfloat16", 400)
    old = [_row("teimgr engine, auto", 200, **{"of limit": "52%"}), limit]
    assert compared.of_limit(old, "short", "teimgr engine, auto") == pytest.approx(0.52)

    new = [old[0] | {"passes_s": [4.0, 2.0]}, limit | {"passes_s": [3.0, 1.5]}]
    assert compared.of_limit(new, "short", "teimgr engine, auto") == pytest.approx(0.75)


def test_a_figure_is_met_or_missed_by_a_part_of_what_was_asked() -> None:
    bulk = Line("bulk", Form.TIMES, [Value("mixed", 1.35, 1.35), Value("long", 1.2, 1.5)])
    assert bulk.verdict == "missed: long by 20 %"
    assert bulk.asked_text == "at least 1.35 × / 1.5 ×"
    assert Line("bulk", Form.TIMES, [Value("mixed", 1.35, 1.35)]).verdict == "met"
    assert Line("p50", Form.MS, [Value("", 3.3, 3.0)], at_most=True).verdict == "missed by 10 %"
    assert Line("p50", Form.MS, [Value("", 2.9, 3.0)], at_most=True).verdict == "met"
    assert Line("lost", Form.SHARE, [Value("", 0.07, 0.05)], at_most=True).verdict == "missed by 2.0 percentage points"
    assert Line("lowest", Form.COSINE, [Value("", 0.9998, 0.9999)]).verdict == "missed by 0.00010"
    assert Line("beside", Form.MS, [Value("", 1.0, None)]).verdict == ""
    assert Line("rate", Form.RATE, asked="2 M").verdict == NOT_MEASURED


def test_targets_without_any_result_are_not_measured_and_say_what_is_missing() -> None:
    lines = [line for target in targets.targets({}) for line in target.lines]

    assert len(lines) >= 20
    assert {line.verdict for line in lines if not line.figure.startswith("÷ ")} == {NOT_MEASURED}
    assert all(line.unmeasured and line.asked_text for line in lines)


def test_every_target_of_a_card_has_a_row_that_says_why_it_is_empty() -> None:
    of_cards = [target for target in targets.targets({}) if target.what.startswith("GPU")]

    assert [len(target.lines) for target in of_cards] == [2, 1, 1]
    for target in of_cards:
        assert all(line.unmeasured == "no card could be had; `just gpu` is ready" for line in target.lines)


def _lines(documents: dict[str, Any], what: str) -> dict[str, Line]:
    (target,) = (target for target in targets.targets(documents) if target.what.startswith(what))
    return {line.figure: line for line in target.lines}


def test_texts_of_which_no_rate_was_asked_count_for_nothing() -> None:
    peers = [_row(_OPENVINO, 100, texts=texts) for texts in ("mixed", "all-256", "all-512")]
    ours = [
        _row("teimgr engine, auto", 105, texts=texts, **{"cosine min": "0.99997"}) for texts in ("mixed", "all-256")
    ]

    lines = _lines({"peers": _document([*peers, *ours])}, "CPU bulk through EmbedArrow")

    bulk = lines["the bare engine ÷ the fastest peer in bfloat16"]
    assert [(value.label, value.asked) for value in bulk.values] == [("mixed", 1.1), ("all-256", 1.1)]
    assert bulk.verdict == "missed: mixed by 5 %, all-256 by 5 %"


def test_embed_arrow_of_the_result_is_what_the_target_of_bulk_asks_for() -> None:
    rows = [
        _row(_OPENVINO, 100, passes_s=[1.0]),
        _row("teimgr engine, auto", 120, **{"cosine min": "0.99997"}),
        _row("teimgr, EmbedArrow", 118, passes_s=[0.8], **{"cosine min": "0.99991"}),
    ]
    documents = {"peers": _document(rows)}

    through = _lines(documents, "CPU bulk through EmbedArrow")[
        "through EmbedArrow ÷ the fastest peer in bfloat16, in process"
    ]

    assert (through.values[0].measured, through.verdict) == (pytest.approx(1.25), "met")
    assert "paired by round" in through.values[0].note
    share = _lines(documents, "EmbedArrow through the mux")["EmbedArrow ÷ the bare engine"]
    assert [value.label for value in share.values] == ["peers, short"]


def test_bert_base_is_asked_of_short_texts_alone() -> None:
    rows = [_row(_OPENVINO, 100, texts=texts) for texts in ("mixed", "short")]
    rows += [_row("teimgr engine, auto", 110, texts=texts, **{"of limit": "75%"}) for texts in ("mixed", "short")]
    documents = {"peers-base": _document(rows)}

    (line,) = _lines(documents, "CPU bulk, BERT-base short texts").values()
    assert [(value.label, value.asked) for value in line.values] == [("short", 1.2)]
    limits = _lines(documents, "fraction of the measured matrix-product limit")
    assert limits["BERT-base: teimgr engine, auto ÷ the matrix products alone"].verdict == (
        "missed: mixed by 5.0 percentage points, short by 5.0 percentage points"
    )


def test_int8_is_held_against_onnx_runtime_and_against_a_peer_that_is_faster() -> None:
    cosines = {"cosine min": "0.99719", "cosine mean": "0.99899"}
    rows = [
        _row("ONNX Runtime, int8", 100, "int8", **(cosines | {"cosine min": "0.98151"})),
        _row("OpenVINO, int8", 210, "int8", **cosines),
        _row("teimgr engine, auto", 140, **cosines),
        _row("teimgr engine, int8", 200, "int8", **cosines),
    ]

    lines = _lines({"peers": _document(rows)}, "CPU int8 option")

    assert lines["MiniLM: int8 ÷ our own bfloat16"].verdict == "met"
    assert lines["MiniLM: int8 ÷ ONNX Runtime int8"].verdict == "met"
    faster = lines["MiniLM: int8 ÷ a peer that is faster than ONNX Runtime, not asked for"]
    assert (faster.verdict, faster.values[0].measured) == ("", pytest.approx(200 / 210))
    assert lines["MiniLM: lowest cosine, beside ONNX Runtime int8"].verdict == "met"


def test_a_target_of_another_machine_is_asked_as_a_factor_over_the_version_it_was_set_for() -> None:
    def passes(*rates: float) -> list[dict[str, float]]:
        return [{"calls": rate, "seconds": 1.0} for rate in rates]

    rows = [
        {"checkout": "here", "load": "/embed", "callers": 64, "passes": passes(300, 500, 400)},
        {"checkout": "against", "load": "/embed", "callers": 64, "passes": passes(100, 200, 100)},
        {"checkout": "here", "load": "/embed", "callers": 256, "passes": passes(300)},
    ]
    documents = {"front": _document(rows, facts={"against": "534a7b9"})}

    rates, factors = list(front(documents, "/embed", {64: (7_040, 9_000), 256: (5_415, 9_000)}))
    assert [value.measured for value in rates.values] == [400, 300]
    assert [(value.measured, value.asked) for value in factors.values] == [(3.0, 9_000 / 7_040)]


def test_latencies_of_the_latency_scenario_count() -> None:
    mux = latency.Found("teimgr daemon, Embed through the mux", "bfloat16")
    mux.latencies_ms |= {"back to back": [[2.0], [2.0]], "every 50 ms": [[3.3, 3.3], [3.3, 4.9]]}
    onnx = latency.Found("ONNX Runtime, float32", "float32")
    onnx.latencies_ms |= {"back to back": [[1.4], [1.4]], "every 50 ms": [[2.0], [2.0]]}
    rows = [latency.record(each, onnx) for each in (mux, onnx)]
    documents = {"latency": _document(rows)}

    query = {line.figure: line for line in one_query(documents)}
    by_figure = {line.figure: line for line in every_50_ms(documents)}

    assert query["through the mux, p50"].verdict == "met"
    assert by_figure["through the mux, p50"].verdict == "missed by 10 %"
    assert by_figure["through the mux, p99"].verdict == "met"
    assert [value.measured for value in query["ONNX Runtime in process, p50, beside it"].values] == [1.4]


def test_results_of_several_commits_or_of_a_dirty_tree_are_warned_of() -> None:
    one = {"engine": _document([], "1111111"), "mux": _document([], "1111111")}
    assert provenance.warnings(one) == []

    mixed = one | {"front": _document([], "2222222-dirty"), "peers": _document([], "")}
    warnings = " ".join(provenance.warnings(mixed))

    assert "3 commits" in warnings
    assert "2222222-dirty: front" in warnings
    assert "changes that no commit has: front" in warnings
    assert "before results named their commit: peers" in warnings
    page = html.page(mixed | {"peers": _document([], "", facts={"not installed": "x", "could not load": "none"})}, None)
    assert page.index("To be wary of") < page.index("<h2>Targets</h2>")


def test_a_commit_that_changed_under_a_run_and_packages_of_two_versions_are_warned_of() -> None:
    moved = _document([], "2222222")
    moved["machine"] |= {"run_began_at": "1111111", "versions": {"torch": "2.12.0"}}

    warnings = " ".join(provenance.warnings({"mux": moved, "engine": _document([], "2222222")}))

    assert "changed while `bench all` ran: mux" in warnings
    assert "torch 2.12.0, 2.13.0" in warnings


def test_peers_without_figures_have_a_row_with_the_reason() -> None:
    servers = _document([{"peer": "infinity"}], facts={"tei did not start: ": "", "tei did not start": "no such file"})

    status = {peer: figures for peer, _, figures in absent_peers.status({"servers": servers})}

    assert status["infinity"] == "measured"
    assert status["tei"] == "not measured: it did not start: no such file"
    assert "no program was given" in status["tei-manager"]
    assert "PyPI" in status["vllm"]
    assert status["OpenVINO"] == "not measured: no result of `bench peers`"


def test_every_missed_target_of_the_committed_results_has_a_reason() -> None:
    documents = {name: html._read(name) for name in html._NAMES if any(html.RESULTS.glob(f"{name}-20*.json"))}
    lines = [line for target in targets.targets(documents) for line in target.lines]
    missed = [line for line in lines if line.misses]

    assert any(line.verdict == "met" for line in lines)
    assert [line.figure for line in missed if not reason(line.why, documents)] == []


def test_results_are_the_newest_of_each_scenario_or_linked_from_a_document() -> None:
    runs = sorted(path.stem for path in (ROOT / "bench" / "results").glob("*-20*.json"))
    sets = {run: machine.instruction_set(load(run)["machine"]) for run in runs}
    newest = {(run.split("-20")[0], sets[run]): run for run in runs}  # later runs replace earlier ones
    texts = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    assert newest, "bench/results has no runs"
    assert [run for run in runs if run not in newest.values() and run not in texts] == []
