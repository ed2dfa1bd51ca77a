"""`bench images`: its readers have the library's vectors, stage by stage too, and the scenario a row for each path."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from bench import bimodal, images, pictures, report
from bench.child import KINDS
from bench.encoders import Task


def test_readers_have_the_vectors_of_transformers_in_stages_too(tmp_path: Path) -> None:
    clip, colpali, _ = pictures.models(tmp_path, is_tiny=True)
    files = pictures.photographs(tmp_path / "files", 3, [(64, 48)])
    for kind, model in (("transformers-images", clip), ("transformers-pages", colpali)):
        theirs, ours = KINDS[kind](Task(kind, str(model))), KINDS["engine-images"](Task("", str(model), threads=1))
        expected, found = theirs.encode(files), ours.encode(files)
        norms = np.linalg.norm(expected, axis=1) * np.linalg.norm(found, axis=1)
        assert ((expected * found).sum(axis=1) / norms).min() > 0.99999
        for reader in (theirs, ours):
            spent = pictures.staged(reader.stages, files)
            assert list(spent) == ["decode", "preprocess", "forward"]
            assert all(seconds > 0 for seconds in spent.values())
        ours.close()


@pytest.mark.long
def test_every_path_has_its_row_and_queries_are_measured_beside_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(bimodal, "_WARM_S", 0.0)  # a pass of so few images takes less than the second
    command = argparse.ArgumentParser()
    images.arguments(command)
    few = ["--tiny", "--images", "4", "--bulk", "40", "--pages", "1", "--bulk-pages", "40"]
    few += ["--rounds", "1", "--idle", "1.5"]

    assert images.run(command.parse_args(few)) == 0

    (file,) = tmp_path.glob("images-20*.json")
    document = json.loads(file.read_text())
    assert [row["path"].partition(",")[0] for row in document["rows"]] == ["CLIP"] * 5 + ["page"] * 3
    assert all(float(row["cosine min"]) > 0.99 for row in document["rows"])
    for what in ("images", "pages"):
        assert "p99" in document["facts"][f"a text query beside {what}"]
