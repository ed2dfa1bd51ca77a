"""The run on a card: what travels to it, its installation without a network, and its steps."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from bench import card, card_pack, card_served, card_steps, corpus, weights
from bench.card_pack import Wheel, chosen, package_of

_WHEEL = "carried_by_hand-1.0-py3-none-any.whl"


def _made_wheel(folder: Path) -> None:
    folder.mkdir(parents=True)
    info = "carried_by_hand-1.0.dist-info"
    with zipfile.ZipFile(folder / _WHEEL, "w") as file:
        file.writestr("carried_by_hand.py", "NUMBER = 7\n")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carried-by-hand\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("grpcio-health-checking==1.85.1", "grpcio-health-checking"),
        ("torch==2.13.0", "torch"),
        ("huggingface-hub>=2.4,<3", "huggingface-hub"),
        ("grpcio_reflection-1.85.1-py3-none-any.whl", "grpcio-reflection"),
        ("pydantic_core-2.50.5-cp312-cp312-manylinux2014_x86_64.whl", "pydantic-core"),
    ],
)
def test_the_package_of_a_requirement_and_of_a_wheel_have_one_name(name: str, package: str) -> None:
    assert package_of(name) == package


def test_what_the_image_has_is_left_out_first_and_the_largest_of_it() -> None:
    sizes = {"grpcio": 7, "orjson": 1, "pyarrow": 55, "uvloop": 4, "click": 2}
    wheels = [Wheel(name, f"{name}.whl", size) for name, size in sizes.items()]

    def names(room: int) -> tuple[list[str], list[str]]:
        taken, left_out = chosen(wheels, room)
        return [each.package for each in taken], [each.package for each in left_out]

    assert names(100) == (["orjson", "grpcio", "click", "uvloop", "pyarrow"], [])
    assert names(20) == (["orjson", "grpcio", "click", "uvloop"], ["pyarrow"])
    assert names(10) == (["orjson", "grpcio", "click"], ["uvloop", "pyarrow"])
    assert names(5) == (["orjson", "click"], ["grpcio", "uvloop", "pyarrow"])


def test_what_computes_is_not_carried_and_everything_else_of_the_daemon_is_asked_for() -> None:
    asked = {package_of(each) for each in card_pack.requirements()}

    assert {"fastapi", "uvicorn", "httptools", "orjson", "grpcio", "protobuf", "pyarrow", "lz4", "aiohttp"} <= asked
    assert not asked & {"torch", "transformers", "tokenizers", "numpy"}


def test_carried_wheels_are_installed_without_a_network(tmp_path: Path) -> None:
    _made_wheel(tmp_path / "pack" / "wheels")
    target = tmp_path / "site"

    said = card_pack.install(tmp_path / "pack", target)

    assert said["wheels"] == 1
    code = "import carried_by_hand; print(carried_by_hand.NUMBER)"
    assert subprocess.check_output([sys.executable, "-c", code], env={"PYTHONPATH": str(target)}, text=True) == "7\n"


def test_a_wheel_of_another_interpreter_is_a_failure(tmp_path: Path) -> None:
    _made_wheel(tmp_path / "pack" / "wheels")
    wheels = tmp_path / "pack" / "wheels"
    (wheels / _WHEEL).rename(wheels / "carried_by_hand-1.0-cp27-cp27m-win32.whl")

    with pytest.raises(RuntimeError, match="not a supported wheel"):
        card_pack.install(tmp_path / "pack", tmp_path / "site")


def test_the_carried_model_is_half_as_large_and_whole(tmp_path: Path) -> None:
    source = weights.minilm()
    card_pack._write_half(source, tmp_path / "pack" / "minilm")
    target = card_pack.unpacked_model(tmp_path / "pack", tmp_path / "minilm")

    assert target is not None
    assert card_pack.unpacked_model(tmp_path / "nothing", tmp_path / "none") is None
    full, half = ((each / "model.safetensors").stat().st_size for each in (source, target))
    assert half < 0.51 * full
    assert weights.count_tokens(target, ["one text"]) == weights.count_tokens(source, ["one text"])


def test_where_the_daemon_cannot_run_the_engine_stands_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'fastapi'")

    monkeypatch.setattr(card_served, "_daemon", missing)
    monkeypatch.setattr(card_served, "corpora", lambda is_card: {"some 50 tokens": ["one text", "another"] * 4})
    monkeypatch.setattr(corpus, "queries", lambda count: ["a query"] * 3)
    monkeypatch.setattr(weights, "random_bert", lambda folder, like, shape: like)

    card_served.served("cpu", weights.minilm())

    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert "fastapi" in found["daemon failed"]
    assert found["engine in process, base, some 50 tokens"]["tokens/s, best"] > 0
    assert found["engine in process, minilm, one query, ms"]["engine"]["p50"] > 0


def test_flop_of_a_token_are_those_of_the_layers() -> None:
    """all-MiniLM-L6-v2: 6 × (4 × 384² + 2 × 384 × 1536) weights in linear layers, and attention over 100 tokens."""
    linear = 6 * (4 * 384**2 + 2 * 384 * 1536)
    assert card_served.flop_of_token(weights.minilm(), 100) == 2 * linear + 6 * 4 * 100 * 384


@pytest.mark.long
def test_a_step_that_fails_hides_no_other(tmp_path: Path) -> None:
    command = argparse.ArgumentParser()
    card.arguments(command)
    steps = ["--steps", "fidelity,facts,tests", "--device", "cpu", "--out", str(tmp_path)]
    options = command.parse_args([*steps, "--model", str(tmp_path / "none")])
    assert card.STEPS.keys() == card_steps.STEPS.keys()

    assert card.run(options) == 1

    found = json.loads((tmp_path / "card.json").read_text())["steps"]
    assert list(found) == ["fidelity", "facts", "tests"]
    assert "ModelNotFound" in found["fidelity"]["failed"] or "ModelLoadFailed" in found["fidelity"]["failed"]
    assert found["facts"]["kernel is taken"] is True
    assert (found["tests"]["status"], "failed" in found["tests"]) == (0, False)
    assert "==== tests" in (tmp_path / "card.log").read_text()
    assert (tmp_path / "card-tests.xml").read_text().count("<testcase") > 5
