"""Models with adversarial files are refused by name or served as the library computes them; never a crash."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# In the gate; the other families by `python -m tests.engine.hostile_models FOLDER OTHER_FOLDER`.
FAMILIES = ("bert",)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.timeout(400)
def test_hostile_files_are_refused_or_served_exactly(
    family: str, tmp_path: Path, model_dir: Callable[..., Path]
) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.engine.hostile_models"]
    done = subprocess.run(
        [*command, str(model_dir(family)), str(tmp_path)], capture_output=True, text=True, timeout=380, check=False
    )
    case, outcomes = "none", {}
    for line in map(json.loads, done.stdout.splitlines()):
        case = line.get("case", case)
        if "outcome" in line:
            outcomes[case] = line["outcome"]
    assert done.returncode == 0, f"{case}: {done.returncode}\n{done.stderr[-2000:]}"
    assert case in outcomes
    wrong = {each: said for each, said in outcomes.items() if not said.startswith(("refused ", "served ", "not made"))}
    assert wrong == {}
    unnamed = [each for each, said in outcomes.items() if each.startswith("tokenizer") and "refused" in said]
    assert all("tokenizer" in outcomes[each] for each in unnamed)
    assert sum(said.startswith("refused") for said in outcomes.values()) > 60
    assert sum(said.startswith("served ") for said in outcomes.values()) > 15
