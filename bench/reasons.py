"""Where the time goes where a target is missed: from the results where they have it, else from a trace in DESIGN.md."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from bench.provenance import Documents
from bench.query_targets import BACK_TO_BACK, EVERY_50_MS

_DESIGN = "DESIGN.md, “Where the microseconds go”"
_CORES = 2
_ENGINE, _THROUGH_MUX = "teimgr engine, auto", "teimgr daemon, Embed through the mux"
_DIRECT = ", without gRPC's library"
_ASKED_PER_S = {
    "mux Embed": 12_000,
    "/v1/embeddings": 8_000,
    "/embed": 9_000,
    "EmbedArrow by the client": 150_000,
}


def reason(key: str, documents: Documents) -> str:
    """HTML for the reason of this key; empty where there is none."""
    if key.startswith("front "):
        return _interface(key.removeprefix("front "), documents)
    make = _REASONS.get(key)
    return make(documents) if make else ""


def _link(scenario: str, documents: Documents) -> str:
    return f'<a href="#{scenario}">{scenario}</a>' if scenario in documents else scenario


def _stages(documents: Documents) -> dict[str, float]:
    """µs by the name of the stage."""
    return {row["stage"]: row["µs"] for row in documents.get("stages", {}).get("rows", [])}


def _query(documents: Documents) -> str:
    us = _stages(documents)
    if not us:
        return _DESIGN
    whole, engine, forward = (us[f"one query: {name}"] / 1e3 for name in ("mux Embed, whole", "engine", "forward"))
    return (
        f"Of {whole:.1f} ms through the mux the forward takes {forward:.1f} (weights from memory, two threads), what "
        f"the engine adds around it {engine - forward:.1f} (threads; code that finds its caches overwritten by the "
        f"forward), mux, two frames and the client {whole - engine:.1f} ({_link('stages', documents)}, {_DESIGN})."
    )


def _p50_ms(documents: Documents, path: str) -> tuple[float, float] | None:
    """p50 of a path of `bench latency`, back to back and every 50 ms."""
    for row in documents.get("latency", {}).get("rows", []):
        if row["path"] == path:
            return row["loads"][BACK_TO_BACK]["p50_ms"], row["loads"][EVERY_50_MS]["p50_ms"]
    return None


def _paused(documents: Documents) -> str:
    words = ""
    engine, through, direct = (_p50_ms(documents, path) for path in (_ENGINE, _THROUGH_MUX, f"{_THROUGH_MUX}{_DIRECT}"))
    if engine and through and direct:
        words = (
            f"Of {through[1]:.1f} ms in the eyes of gRPC's library {through[1] - direct[1]:.1f} are its own, and the "
            f"engine in a process by itself takes {engine[1]:.1f}, where it takes {engine[0]:.1f} back to back "
            f"({_link('latency', documents)}). "
        )
    return (
        f"{words}After the pause three processes wake up on idle cores with cold caches: weights and code come from "
        "memory. Tried, each a gain: helper threads off the caller's CPU, no hand-overs of a lone query, native "
        "post-processing, an HTTP/2 of our own. Tried without one: threads kept awake, weights fetched before the "
        f"forward, huge pages ({_DESIGN})."
    )


def _bulk(documents: Documents) -> str:
    return f"The forward is nearly all of a bulk text ({_link('stages', documents)}, {_DESIGN})."


def _int8(documents: Documents) -> str:
    return (
        "Only the linear layers multiply bytes: attention, norms and activations stay in float32 or bfloat16. SPLADE's "
        "head writes 30,522 float32 numbers for every token and pools them, whatever the precision of the layers; no "
        f"profile of it was made ({_link('peers-splade', documents)})."
    )


def _mux(documents: Documents) -> str:
    us = _stages(documents)
    cpu = sum(us.get(f"one bulk text: EmbedArrow, CPU of the {name}", 0.0) for name in ("mux", "daemon"))
    return f"Mux and daemon take {cpu:.0f} µs of processor time a text ({_link('stages', documents)})." if us else ""


def _beside(documents: Documents) -> str:
    us = _stages(documents)
    if not us:
        return _DESIGN
    cpu_us = sum(us[f"one query: mux Embed, CPU of the {name}"] for name in ("mux", "worker"))
    paces = _p50_ms(documents, _THROUGH_MUX)
    longer = f", and after a pause a query takes {paces[1] / paces[0]:.1f} times as long" if paces else ""
    return (
        f"The queries take it: 20 a second with {cpu_us / 1e3:.1f} ms of processor time each are "
        f"{100 * 20 * cpu_us / 1e6 / _CORES:.1f} % of two cores back to back "
        f"({_link('stages', documents)}){longer}; the load generator's own calls come on top."
    )


def _interface(load: str, documents: Documents) -> str:
    """The processor time of a call, and what two cores can do with it."""
    rows = documents["front"]["rows"] if "front" in documents else []
    here = {row["callers"]: row["passes"] for row in rows if row["load"] == load and row["checkout"] == "here"}
    if not here:
        return _DESIGN
    callers = max(here)
    parts_us = {
        name: median(each[key] / each["all_calls"] for each in here[callers]) * 1e6
        for name, key in (
            ("daemon", "daemon_cpu_s"),
            ("mux", "mux_cpu_s"),
            ("worker", "worker_cpu_s"),
            ("the client", "cpu_seconds"),
        )
    }
    whole_us = sum(parts_us.values())
    asked = _ASKED_PER_S[load]
    words = " + ".join(f"{name} {us:.0f}" for name, us in parts_us.items() if us >= 0.5)
    is_texts = load.startswith("EmbedArrow")
    text = (
        f"{'A text' if is_texts else 'A call'} takes {whole_us:.0f} µs of processor time ({words}; "
        f"{_link('front', documents)}), so {_CORES} cores do at most {_CORES * 1e6 / whole_us:,.0f} a second; "
        f"{asked:,} need {_CORES * 1e6 / asked:.0f} µs. The client shares the cores."
    )
    if callers >= 64:
        text += (
            f" {callers} calls in a closed loop are {callers * whole_us / _CORES / 1e3:.0f} ms of work a round, which "
            "the p99 cannot be below."
        )
    return f"{text} {_DESIGN}."


def _card_bulk(documents: Documents) -> str:
    return (
        f"The engine alone does 2.1 M tokens/s there at 97 % busy ({_link('card', documents)}). Served, part of the "
        "batches were launched kernel by kernel, since large graphs had used up the room for graphs; and one thread "
        "tokenizes, half of its time through the library, for texts that are not ASCII. The first was mended after the "
        "last device time."
    )


def _card_query(documents: Documents) -> str:
    return (
        f"The forward of a query takes 0.6 ms as a graph ({_link('card', documents)}); the rest is Python on the "
        "host's cores: tokenizing, packing, copies, and three changes of thread."
    )


_REASONS: dict[str, Callable[[Documents], str]] = {
    "query": _query,
    "paused": _paused,
    "bulk": _bulk,
    "int8": _int8,
    "mux": _mux,
    "beside": _beside,
    "card bulk": _card_bulk,
    "card query": _card_query,
}
