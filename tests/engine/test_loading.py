"""Limits follow from options and model, and what cannot be served is refused by the name of its key."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.support.models import build, build_static

from teimgr.engine.backbone import Batching
from teimgr.engine.loading import EngineOptions, _limits, _serial_tokens, load_parts
from teimgr.errors import InvalidConfig, ModelLoadFailed

TANH = "torch.nn.modules.activation.Tanh"
DENSE = "2_Dense"


def _pickle_dense(root: Path) -> None:
    (root / DENSE / "model.safetensors").rename(root / DENSE / "pytorch_model.bin")


def _link_dense(root: Path) -> None:
    _pickle_dense(root)
    (root / DENSE).rename(root / "elsewhere")
    (root / DENSE).symlink_to("elsewhere")


def _hide_behind_an_index(root: Path) -> None:
    _pickle_dense(root)
    index = {"weight_map": {"linear.weight": "pytorch_model.bin"}}
    (root / DENSE / "model.safetensors.index.json").write_text(json.dumps(index))


def _decoy(root: Path) -> None:
    (root / "model.safetensors").rename(root / "pytorch_model.bin")
    shutil.copy(root / DENSE / "model.safetensors", root / "decoy.safetensors")


def _name_a_shard(root: Path) -> None:
    (root / "model.safetensors").rename(root / "shard.pkl")
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "shard.pkl"}}))


def _name_other_weights(root: Path) -> None:
    shutil.copy(root / "model.safetensors", root / "adapter_model.bin")
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | {"transformers_weights": "adapter_model.bin"}))


def _link_out(root: Path) -> None:
    (root / "model.safetensors").rename(root.parent / "private.safetensors")
    (root / "model.safetensors").symlink_to("../private.safetensors")


def _deep(root: Path) -> None:
    _pickle_dense(root)
    (root / "a/b").mkdir(parents=True)
    (root / DENSE).rename(root / "a/b/c")
    modules = (root / "modules.json").read_text().replace(f'"{DENSE}"', '"a/b/c"')
    (root / "modules.json").write_text(modules)


@pytest.mark.parametrize(
    "change",
    [
        *(_pickle_dense, _link_dense, _hide_behind_an_index, _decoy, _name_a_shard, _name_other_weights, _link_out),
        _deep,
    ],
)
def test_safetensors_only_is_decided_by_what_would_be_opened(
    change: Callable[[Path], None], model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    root = shutil.copytree(model_dir("bert", dense=(8, TANH)), tmp_path / "model")
    options = EngineOptions(path=root, model_id="m", safetensors_only=True)
    assert load_parts(options).info.dimension == 8

    change(root)

    with pytest.raises(InvalidConfig, match=r"only safetensors are allowed|a link out of the model's directory"):
        load_parts(options)


@pytest.mark.parametrize("family", ["bert", "nomic_bert", "qwen3"])
def test_a_gguf_file_is_not_read_beside_safetensors_and_refused_alone(family: str, tmp_path: Path) -> None:
    root = build(family, tmp_path / "model")
    (root / "model-Q8_0.gguf").write_bytes(b"GGUF")
    options = EngineOptions(path=root, model_id="m", pooling="mean", dtype="float32")
    assert load_parts(options).info.min_cosine >= 0.99999

    for name in ("model.safetensors", "config.json"):
        (root / name).unlink()
        with pytest.raises(ModelLoadFailed, match=r"GGUF .llama.cpp. alone .model-Q8_0.gguf.*use the original model"):
            load_parts(options)


@pytest.mark.parametrize(("count", "name"), [(29_999, "x"), (30_001, "x"), (200_000, "x"), (200_000, "x" * 80)])
def test_more_tensors_than_a_model_has_are_refused(
    count: int, name: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """200,000 empty ones did not end loading in minutes."""
    root = shutil.copytree(model_dir("bert", dense=(8, TANH)), tmp_path / "model")
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    head = json.dumps({f"{name}{number}": empty for number in range(count)}).encode()
    (root / DENSE / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)

    refusal = "model.safetensors has more than 30,000 tensors|files of weights have more than 30,000|at most 16,777,216"
    with pytest.raises(ModelLoadFailed, match=refusal):
        load_parts(EngineOptions(path=root, model_id="m"))


@pytest.mark.parametrize(("batch", "beside_queries"), [(16384, 4096), (4096, 2048), (1000, 1000)])
def test_bulk_batches_are_smaller_beside_queries_on_a_gpu_too(batch: int, beside_queries: int) -> None:
    options = EngineOptions(path=Path("x"), model_id="x", device="cuda", max_batch_tokens=batch)
    limits = _limits(options, None)  # type: ignore[arg-type]  # only a CPU's limits look at the model

    assert (limits.tokens, limits.bulk_tokens_beside_interactive) == (batch, beside_queries)


def test_texts_are_cut_to_a_batch_only_where_that_can_be_meant_and_never_silently(
    model_dir: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = model_dir("bert")

    def length(tokens: int, cuts_texts: bool | None) -> int:
        options = EngineOptions(path=path, model_id="x", max_batch_tokens=tokens, cuts_texts=cuts_texts)
        info = load_parts(options).info
        assert info.cut_notice is None or info.cut_notice in caplog.text
        notes.append(info.cut_notice)
        return info.max_input_length

    notes: list[str | None] = []
    whole = length(16384, None)
    assert length(whole, None) == length(whole, False) == whole < 512
    assert notes == [None] * 3
    with pytest.raises(
        InvalidConfig, match=f"max_batch_tokens is 10: .* cut to 10 tokens.* {whole} or more.*--auto-tr"
    ):
        length(10, None)
    with pytest.raises(InvalidConfig, match=f"max_batch_tokens is 10, .*--auto-truncate is false.*{whole}"):
        length(10, False)
    assert length(10, True) == 10
    assert notes[3:] == [f"texts are cut to the 10 tokens of max_batch_tokens; the model reads {whole}"]


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_a_limit_without_room_for_a_text_is_refused_by_name(tokens: int, model_dir: Callable[..., Path]) -> None:
    path = model_dir("bert")
    with pytest.raises(InvalidConfig, match=f"max_batch_tokens is {tokens}.*at least 3"):
        load_parts(EngineOptions(path=path, model_id="x", max_batch_tokens=tokens))
    assert load_parts(EngineOptions(path=path, model_id="x", max_batch_tokens=3)).info.max_input_length == 3

    short = model_dir("bert", max_length=max(tokens, 1))
    with pytest.raises(InvalidConfig, match=f"max_seq_length.* is {max(tokens, 1)}.*at least 3"):
        load_parts(EngineOptions(path=short, model_id="x"))


def test_a_look_up_table_needs_one_thread(tmp_path: Path) -> None:
    parts = load_parts(EngineOptions(path=build_static(tmp_path), model_id="m"))

    assert parts.serial_tokens > 1_000_000


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_look_up_table_reports_no_attention(tmp_path: Path, dtype: str) -> None:
    assert load_parts(EngineOptions(path=build_static(tmp_path), model_id="m", dtype=dtype)).info.attention == "none"


def test_a_model_of_minilms_widths_computes_a_query_with_one_thread_and_a_bulk_batch_with_all() -> None:
    assert 32 <= _serial_tokens(of_widths(384, 1536, Batching.VARLEN)) <= 128
    assert 8 <= _serial_tokens(of_widths(768, 3072, Batching.VARLEN)) <= 32


def test_a_native_forward_shares_all_but_the_shortest_queries_between_threads() -> None:
    assert 4 <= _serial_tokens(of_widths(384, 1536, Batching.NATIVE)) <= 10


def of_widths(hidden: int, widest: int, batching: Batching) -> Any:
    config = SimpleNamespace(hidden_size=hidden, intermediate_size=widest)
    backbone = SimpleNamespace(config=config, batching=batching)
    return SimpleNamespace(backbone=backbone, is_native=batching is Batching.NATIVE)


def _with_nan(root: Path) -> None:
    file = root / "model.safetensors"
    tensors = load_file(file)
    next(tensor for name, tensor in tensors.items() if name.endswith("query.weight"))[0, 0] = float("nan")
    save_file(tensors, file)


def _pointer_at(name: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        (root / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")

    return change


def _with_config(place: str, **keys: Any) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        file = root / place
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_with_nan, r"the weight .*query\.weight in its files has NaN"),
        (_pointer_at("model.safetensors"), "is a pointer of git-lfs"),
        (_pointer_at(f"{DENSE}/model.safetensors"), f"{DENSE}/model.safetensors is a pointer of git-lfs"),
        (_pointer_at("tokenizer.json"), "is a pointer of git-lfs"),
        (
            _with_config(f"{DENSE}/config.json", in_features=24),
            r"linear.weight is \(8, 32\) in the files, and its config.json makes it \(8, 24\)",
        ),
        (_with_config(f"{DENSE}/config.json", out_features=9), r"linear.weight is \(8, 32\) in the files"),
        (lambda root: (root / "model.safetensors").unlink(), "has no weights: neither model.safetensors nor"),
    ],
    ids=["nan", "pointer", "pointer of a module", "pointer of the tokenizer", "width", "outputs", "no weights"],
)
def test_a_load_that_cannot_succeed_ends_with_its_cause(
    change: Callable[[Path], None], why: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    root = shutil.copytree(model_dir("bert", dense=(8, TANH)), tmp_path / "model")
    change(root)

    with pytest.raises(ModelLoadFailed, match=why):
        load_parts(EngineOptions(path=root, model_id="m"))


def test_any_exception_of_a_load_on_the_cpu_is_final(
    model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a head of no size")

    monkeypatch.setattr("teimgr.engine.loading.choose_model", broken)

    with pytest.raises(ModelLoadFailed, match="ZeroDivisionError: a head of no size"):
        load_parts(EngineOptions(path=model_dir("bert"), model_id="m"))


def test_what_the_host_lacks_for_a_time_is_tried_again(
    model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptors(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("teimgr.engine.loading.probe_inputs", no_descriptors)

    with pytest.raises(OSError, match="Too many open files"):
        load_parts(EngineOptions(path=model_dir("bert"), model_id="m"))
