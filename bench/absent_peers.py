"""Which peers the report has figures of, and why not of the others."""

from __future__ import annotations

from collections.abc import Iterator

from bench.peer_servers import PEERS, PROGRAMS
from bench.provenance import Documents

_VLLM = (
    "no program was given. The wheel of vLLM 0.33.0 on PyPI was looked into: it has kernels for CUDA alone and takes a "
    "CPU for a device only where it was compiled for CPUs, from its sources, which was not done."
)
_WHY_NOT = {
    "tei": "no program was given, and none is on this machine.",
    "tei-manager": "no program was given, and none is on this machine; it starts TEI's.",
    "vllm": _VLLM,
}


def status(documents: Documents) -> Iterator[tuple[str, str, str]]:
    """Peer, how it takes part, and `measured` or the reason why it was not."""
    rows = documents["peers"]["rows"] if "peers" in documents else []
    for name in ("sentence-transformers", "OpenVINO", "ONNX Runtime"):
        paths = dict.fromkeys(row["path"] for row in rows if row["path"].startswith(name))
        kinds = ", ".join(path.removeprefix(f"{name}, ") for path in paths)
        yield name, "in process", f"measured: {kinds}" if paths else _not_in_process(documents, name)
    for name in PEERS:
        yield name, f"its server, {PROGRAMS[PEERS[name].option]}", _server(documents, name)


def _not_in_process(documents: Documents, name: str) -> str:
    if "peers" not in documents:
        return "not measured: no result of `bench peers`"
    facts = documents["peers"]["facts"]
    return f"not measured: not installed: {facts['not installed']}; could not load: {facts['could not load']}"


def _server(documents: Documents, name: str) -> str:
    if "servers" in documents:
        if any(row["peer"] == name for row in documents["servers"]["rows"]):
            return "measured"
        if why := documents["servers"]["facts"].get(f"{name} did not start"):
            return f"not measured: it did not start: {why}"
    untried = "" if name.startswith("infinity") else " Its arguments in bench/peer_servers.py are untried."
    why_not = _WHY_NOT.get(name, "no program was given.")
    return f"not measured: {why_not}{untried} `bench servers --{PEERS[name].option} PATH`"
