"""Measurements, run from the checkout: `python -m bench NAME`. README.md explains each."""

SCENARIOS = {
    "engine": "bulk texts/s: sentence-transformers, the bare engine, the daemon",
    "peers": "bulk texts/s in process beside OpenVINO and ONNX Runtime, where they are installed",
    "forward": "the native forward against the model's own, with native attention and with torch's operators",
    "start": "create, restart after a kill, memory of a first and a second worker",
    "mux": "latency of single queries, idle and beside bulk work; requests per second",
    "rerank": "100 candidates reranked: sentence-transformers' CrossEncoder, the daemon",
    "stages": "where the microseconds of one query and of one bulk text go",
    "bimodal": "20 queries a second beside saturating bulk: what each costs the other",
    "neighbours": "bulk texts/s of one instance alone, beside an idle and beside a busy one",
    "front": "requests per second by interface and callers, with the CPU time of every process",
    "versions": "MiniLM in bulk and as single queries, beside another checkout of teimgr",
    "growth": "10² to 10⁶ texts, 8 to 8,192 tokens, 1 to 64 instances, memory of each added model",
    "cluster": "calls through a link to another host beside the same calls through a unix socket",
    "guard": "ratios that must not fall below their bounds, in less than a minute",
    "fidelity": "every kind of model against the library it was made with: cosines and differences",
    "html": "the newest results as one page, results/report.html",
    "card": "all about a card in ten minutes, on a bare machine: fidelity, forward, latency, bulk, faults, tests",
    "gpu": "bulk texts/s on CUDA: sentence-transformers and the bare engine",
}

LIMITS_S: dict[str, float] = {
    "engine": 300,
    "peers": 900,
    "forward": 300,
    "start": 180,
    "mux": 180,
    "rerank": 240,
    "stages": 240,
    "bimodal": 300,
    "neighbours": 300,
    "front": 420,
    "versions": 420,
    "growth": 600,
    "cluster": 420,
    "guard": 110,
    "fidelity": 1800,
    "html": 60,
    "gpu": 600,
}
"""Seconds after which a scenario is ended and what it measured until then is written; `card` has limits of its own."""
