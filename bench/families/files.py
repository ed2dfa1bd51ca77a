"""Changes to the files of a model that was written: the ways in which repositories on the hub save the same weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.support.models import edit, read, write

Change = Callable[[Path], None]


def built(build: Callable[[Path], Any], changes: Sequence[Change] = ()) -> Change:
    """What writes a model to a folder by `build`, and then makes `changes` to its files."""

    def make(folder: Path) -> None:
        build(folder)
        for change in changes:
            change(folder)

    return make


def as_bin(folder: Path) -> None:
    """Every model.safetensors as pytorch_model.bin, those of modules too."""
    for file in folder.rglob("model.safetensors"):
        torch.save(load_file(file), file.with_name("pytorch_model.bin"))
        file.unlink()


def transformer_as_bin(folder: Path) -> None:
    """The transformer's alone."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def modules_as_bin(folder: Path) -> None:
    """Those of modules alone, as every Dense saved before sentence-transformers 3.0.1."""
    for file in folder.glob("*/model.safetensors"):
        torch.save(load_file(file), file.with_name("pytorch_model.bin"))
        file.unlink()


def beside_bin(folder: Path) -> None:
    """Both formats side by side."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")


def sharded(folder: Path, *, binary: bool = False) -> None:
    """Two shards and their index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    ending = ("pytorch_model-{}-of-00002.bin", "pytorch_model.bin.index.json")
    if not binary:
        ending = ("model-{}-of-00002.safetensors", "model.safetensors.index.json")
    places = {name: ending[0].format(f"{1 + (at * 2 >= len(names)):05}") for at, name in enumerate(names)}
    for place in sorted(set(places.values())):
        part = {name: weights[name] for name in names if places[name] == place}
        if binary:
            torch.save(part, folder / place)
        else:
            save_file(part, folder / place, metadata={"format": "pt"})
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    write(folder / ending[1], {"metadata": {"total_size": size}, "weight_map": places})


def sharded_bin(folder: Path) -> None:
    """Two shards of pytorch_model.bin."""
    sharded(folder, binary=True)


def in_dtype(dtype: torch.dtype) -> Change:
    """The transformer's weights in another type, as config.json says."""

    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        changed = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        edit(folder / "config.json", torch_dtype=str(dtype).removeprefix("torch."))

    return change


def prefixed(prefix: str, *, old_norms: bool = False, heads: bool = True) -> Change:
    """Names of weights as of a checkpoint with a head, and such heads; `old_norms`: norms with gamma and beta."""

    def change(folder: Path) -> None:
        weights = {f"{prefix}{name}": w for name, w in load_file(folder / "model.safetensors").items()}
        if old_norms:
            weights = {
                name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): w
                for name, w in weights.items()
            }
        if heads:
            width = read(folder / "config.json")["hidden_size"]
            weights["cls.predictions.transform.dense.weight"] = torch.randn(width, width)
            weights["cls.seq_relationship.weight"] = torch.randn(2, width)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def with_positions(folder: Path) -> None:
    """The table of position ids that older versions saved."""
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.position_ids"] = torch.arange(128)[None]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def in_first_folder(folder: Path) -> None:
    """The transformer in 0_Transformer, as sentence-transformers 0.3 to 1.x saved it."""
    inner = folder / "0_Transformer"
    inner.mkdir()
    for path in list(folder.iterdir()):
        if path.is_file() and path.name not in ("modules.json", "config_sentence_transformers.json"):
            shutil.move(path, inner / path.name)
    rows = read(folder / "modules.json")
    rows[0]["path"] = inner.name
    write(folder / "modules.json", rows)


def without_modules(folder: Path) -> None:
    """No file of sentence-transformers: a bare transformer."""
    for path in list(folder.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (folder / name).unlink()


def without_fast_tokenizer(folder: Path) -> None:
    """vocab.txt of BERT, and no tokenizer.json."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)) + "\n")
    (folder / "tokenizer.json").unlink()
    edit(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer", do_lower_case=True)


def without_fast_bpe(folder: Path) -> None:
    """vocab.json and merges.txt of RoBERTa, and no tokenizer.json."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    write(folder / "vocab.json", model["vocab"])
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "tokenizer.json").unlink()
    edit(folder / "tokenizer_config.json", tokenizer_class="RobertaTokenizer")


def saved_again(folder: Path) -> None:
    """As the installed sentence-transformers saves it."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    shutil.rmtree(folder)
    model.save_pretrained(str(folder))


def editing(name: str, **changes: object) -> Change:
    """Keys of a JSON file."""
    return lambda folder: edit(folder / name, **changes)


def linked_modules(folder: Path) -> None:
    """Files as the hub's cache has them: links to blobs."""
    blobs = folder.parent / f"{folder.name}-blobs"
    blobs.mkdir()
    for at, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        blob = blobs / str(at)
        shutil.move(file, blob)
        file.symlink_to(blob)
