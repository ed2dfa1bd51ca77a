"""A second load takes the reference of the first, proves itself against it, and trusts no file that it should not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.models import build
from tests.support.native import needs_native_forward

from teimgr.engine import model
from teimgr.engine.batching.batch import Encoded, pack
from teimgr.engine.fidelity import fidelity_gate, reference_cache
from teimgr.engine.fidelity.dtype_speed import Preference
from teimgr.engine.fidelity.reference_cache import MAX_BYTES, MAX_FILES, KnownReference, ReferenceCache, reference_key
from teimgr.engine.job import Output
from teimgr.engine.loading import EngineOptions, EngineParts, load_parts
from teimgr.engine.native_forward.kernel import ForwardKernel
from teimgr.engine.native_library import LEVELS, native_library
from teimgr.models.reading import read_layout

INPUT = Encoded(np.array([2, 7, 5, 3], dtype=np.int32))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the inputs whose reference was computed."""
    lengths: list[int] = []
    compute = fidelity_gate.reference_of

    def counted(model: Any, encoded: Encoded) -> Any:
        lengths.append(len(encoded.ids))
        return compute(model, encoded)

    monkeypatch.setattr(fidelity_gate, "reference_of", counted)
    return lengths


def loaded(path: Path, folder: Path, dtype: str = "float32") -> EngineParts:
    return load_parts(EngineOptions(path=path, model_id="m", dtype=dtype, references=folder))


def vector(parts: EngineParts) -> torch.Tensor:
    return parts.model.run(pack([INPUT]), [Output.DENSE])[Output.DENSE].values


@needs_native_forward
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_second_load_computes_no_reference_and_has_the_same_vectors_and_proof(
    dtype: str,
    model_dir: Callable[..., Path],
    tmp_path: Path,
    computed: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Measured, it may be either; a reference is kept only of a native forward, which has bfloat16 on some CPUs.
    library = native_library()
    fastest = torch.bfloat16 if library and library.level >= LEVELS.index("avx512_bf16") else torch.float32
    why = Preference(fastest, "a test", {"float32": 2.0, "bfloat16": 1.0})
    monkeypatch.setattr(fidelity_gate, "preference", lambda _: why)
    first = loaded(model_dir("bert"), tmp_path / "r", dtype)
    assert len(computed) == len(fidelity_gate.PROBE_TEXTS)

    computed.clear()
    second = loaded(model_dir("bert"), tmp_path / "r", dtype)

    assert computed == []
    assert torch.equal(vector(second), vector(first))
    facts = ("dtype", "forward", "mean_cosine", "min_cosine", "dtype_reason", "dtype_candidates")
    assert [getattr(second.info, fact) for fact in facts] == [getattr(first.info, fact) for fact in facts]


@needs_native_forward
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_what_auto_came_to_is_not_measured_again(
    name: str, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other load on the machine would disturb a second measurement, and the vectors would change between starts."""
    measured: list[str] = []

    def preferred(_: Any) -> Preference:
        measured.append(name)
        return Preference(getattr(torch, name), "a test", {"float32": 2.0, "bfloat16": 1.0, "int8": 0.5})

    monkeypatch.setattr(fidelity_gate, "preference", preferred)
    found = [loaded(model_dir("bert"), tmp_path / "r", "auto").info for _ in range(3)]

    assert len({info.dtype for info in found}) == 1
    assert all(info.dtype_candidates == found[0].dtype_candidates for info in found)
    # Without instructions for bfloat16 the forward is not native in it, and nothing is kept.
    assert len(measured) == (1 if any((tmp_path / "r").glob("*")) else 3)


@needs_native_forward
def test_a_known_model_is_loaded_the_short_way_where_its_files_are_plain(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[str] = []
    for name in ("load_module", "load_plain_module"):
        way = getattr(model, name)
        monkeypatch.setattr(model, name, lambda *args, name=name, way=way: ways.append(name) or way(*args))

    vectors = [vector(loaded(model_dir("bert"), tmp_path / "r")) for _ in range(2)]

    assert torch.equal(*vectors)
    assert ways == ["load_module", "load_plain_module"]


def test_nothing_is_kept_of_a_model_that_its_own_code_computes(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEIMGR_NATIVE", "attention")

    assert loaded(model_dir("bert"), tmp_path / "r").info.forward == "library"
    assert not list((tmp_path / "r").glob("*"))


@needs_native_forward
def test_a_wrong_native_forward_is_refused_with_a_known_reference_too(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computed: list[int]
) -> None:
    assert loaded(model_dir("bert"), tmp_path / "r").info.forward == "native"
    run = ForwardKernel.__call__
    monkeypatch.setattr(ForwardKernel, "__call__", lambda *args: run(*args).flip(-1))
    computed.clear()

    assert loaded(model_dir("bert"), tmp_path / "r").info.forward == "library"
    assert computed


@needs_native_forward
def test_a_reference_of_other_weights_makes_no_good_model_fail(
    model_dir: Callable[..., Path], tmp_path: Path, computed: list[int]
) -> None:
    folder = tmp_path / "r"
    loaded(model_dir("bert"), folder)
    (path,) = folder.iterdir()
    cache = ReferenceCache(folder, path.stem)
    known = cache.read()
    assert known is not None
    wrong = [{output: -rows for output, rows in result.items()} for result in known.results]
    cache.write(KnownReference(wrong, known.dtype))
    computed.clear()

    assert loaded(model_dir("bert"), folder).info.forward == "native"
    assert computed
    again = cache.read()
    assert again is not None
    assert all(
        torch.equal(ours[output], theirs[output])
        for ours, theirs in zip(again.results, known.results, strict=True)
        for output in theirs
    )


@needs_native_forward
@pytest.mark.parametrize("result", [[], [{}], [{Output.DENSE: torch.ones(1, 3)}] * 8])
def test_a_reference_without_all_results_proves_nothing(
    result: list[dict[Output, torch.Tensor]], model_dir: Callable[..., Path], tmp_path: Path, computed: list[int]
) -> None:
    loaded(model_dir("bert"), tmp_path / "r")
    (path,) = (tmp_path / "r").iterdir()
    ReferenceCache(path.parent, path.stem).write(KnownReference(result, None))
    computed.clear()

    loaded(model_dir("bert"), tmp_path / "r")

    assert len(computed) == len(fidelity_gate.PROBE_TEXTS)


def test_the_key_is_that_of_the_files_the_options_and_the_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = read_layout(build("bert", tmp_path))
    weights = tmp_path / "model.safetensors"
    os.utime(weights, ns=(1, 1))  # or it may be written again within the same tick of the clock
    keys = [reference_key(layout, "auto", [INPUT])]
    assert keys[0] == reference_key(layout, "auto", [INPUT])

    keys.append(reference_key(layout, "float32", [INPUT]))
    keys.append(reference_key(layout, "auto", [INPUT, INPUT]))
    keys.append(reference_key(read_layout(tmp_path, "cls"), "auto", [INPUT]))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    keys.append(reference_key(layout, "auto", [INPUT]))
    os.utime(weights, ns=(0, 0))
    keys.append(reference_key(layout, "auto", [INPUT]))
    monkeypatch.setattr(reference_cache.transformers, "__version__", "another")
    keys.append(reference_key(layout, "auto", [INPUT]))

    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_nothing_is_kept_of_code_that_comes_with_a_model_or_of_a_folder_of_many_files(tmp_path: Path) -> None:
    build("bert", tmp_path)
    assert reference_key(read_layout(tmp_path, trust_remote_code=True), "auto", [INPUT]) is None

    for number in range(1000):
        (tmp_path / f"{number}.txt").touch()
    assert reference_key(read_layout(tmp_path), "auto", [INPUT]) is None


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-10] ^= 64
    path.write_bytes(content)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGES: list[Callable[[Path], object]] = [
    cut,
    flip,
    replace_by_link,
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b'{"digest": 1}\n'),
    lambda path: path.write_bytes(b"[]\n"),
    lambda path: path.write_bytes(b"\x80\x04K\x01."),
    lambda path: path.write_bytes(bytes(MAX_BYTES + 1)),
    lambda path: path.chmod(0o620),
    lambda path: path.parent.chmod(0o770),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_file_counts_as_missing(damage: Callable[[Path], object], tmp_path: Path) -> None:
    cache = ReferenceCache(tmp_path / "r", "k")
    known = KnownReference([{Output.DENSE: torch.ones(1, 3)}], torch.bfloat16)
    cache.write(known)
    found = cache.read()
    assert found is not None
    assert (found.dtype, found.results[0][Output.DENSE].tolist()) == (torch.bfloat16, [[1.0, 1.0, 1.0]])

    damage(tmp_path / "r" / "k.reference")

    assert cache.read() is None


@needs_native_forward
def test_a_damaged_file_is_made_again(model_dir: Callable[..., Path], tmp_path: Path, computed: list[int]) -> None:
    loaded(model_dir("bert"), tmp_path / "r")
    (path,) = (tmp_path / "r").iterdir()
    flip(path)
    loaded(model_dir("bert"), tmp_path / "r")
    computed.clear()

    loaded(model_dir("bert"), tmp_path / "r")

    assert computed == []


def test_files_are_private_and_bounded_in_number_and_size(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    for number in range(MAX_FILES + 3):
        ReferenceCache(folder, f"{number}").write(KnownReference([{Output.DENSE: torch.ones(1, 3)}], None))
        os.utime(folder / f"{number}.reference", (number, number))
        if number == 10:
            os.utime(folder / "0.reference", (1000, 1000))  # as a load does that uses it
    ReferenceCache(folder, "large").write(KnownReference([{Output.DENSE: torch.ones(1, MAX_BYTES // 4)}], None))

    names = {path.name for path in folder.iterdir()}
    assert len(names) == MAX_FILES
    assert {"0.reference", f"{MAX_FILES + 2}.reference"} <= names
    assert {folder.stat().st_mode & 0o777, *(path.stat().st_mode & 0o777 for path in folder.iterdir())} == {
        0o700,
        0o600,
    }


@needs_native_forward
def test_a_disk_that_refuses_fails_no_load(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "r").touch()

    assert loaded(model_dir("bert"), tmp_path / "r").info.forward == "native"
