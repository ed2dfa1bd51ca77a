"""Measurements, run from the checkout: `python -m bench NAME`. README.md explains each."""

SCENARIOS = {
    "engine": "bulk texts/s: sentence-transformers, the bare engine, the daemon",
    "peers": "bulk texts/s in process beside OpenVINO and ONNX Runtime, where they are installed",
    "forward": "the native forward against the model's own, with native attention and with torch's operators",
    "start": "create, restart after a kill, memory of a first and a second worker",
    "mux": "latency of single queries, idle and beside bulk work; requests per second",
    "neighbours": "bulk texts/s of one instance alone, beside an idle and beside a busy one",
    "front": "requests per second by interface and callers, with the CPU time of every process",
    "cluster": "calls through a link to another host beside the same calls through a unix socket",
    "guard": "ratios that must not fall below their bounds, in half a minute",
    "fidelity": "every kind of model against the library it was made with: cosines and differences",
    "html": "the newest results as one page, results/report.html",
    "card": "all about a card in ten minutes, on a bare machine: fidelity, forward, latency, bulk, faults, tests",
    "gpu": "bulk texts/s on CUDA: sentence-transformers and the bare engine",
}
