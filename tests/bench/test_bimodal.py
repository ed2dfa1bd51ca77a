"""`bench bimodal` run small: a real daemon beside a small server that is started with TEI's arguments."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from bench import bimodal, report, weights
from tests.bench import openai_server


@pytest.mark.long
def test_queries_beside_bulk_are_measured_at_both_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(bimodal, "_WARM_S", 0.0)  # a pass of so small a model takes less than the second
    model = weights.random_static(tmp_path / "static", weights.minilm(), width=32)
    router = tmp_path / "router"
    router.write_text(f"#!{sys.executable}\n{Path(openai_server.__file__).read_text()}".replace('"verb"', '"--verb"'))
    router.chmod(0o755)
    command = argparse.ArgumentParser()
    bimodal.arguments(command)
    small = ["--rounds", "2", "--idle", "1.5", "--texts", "2000", "--model", str(model), "--dtype", "float32"]

    assert bimodal.run(command.parse_args([*small, "--tei", str(router)])) == 0

    (file,) = tmp_path.glob("bimodal-20*.json")
    document = json.loads(file.read_text())
    rows = {row["checkout"]: row for row in document["rows"]}
    assert list(rows) == ["here", "here, HTTP", "tei, HTTP"]
    for row in rows.values():
        assert len(row["samples"]["alone"]) == len(row["samples"]["beside"]) == 2
        assert 0 < row["idle_p50_ms"] <= row["idle_p99_ms"]
        assert row["alone_texts_per_s"] > 0
    assert "--max-client-batch-size" in document["facts"]["arguments of tei"]
