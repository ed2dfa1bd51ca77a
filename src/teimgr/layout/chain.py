"""The chain of modules that sentence-transformers and PyLate list in modules.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.layout.files import read_list, read_object

# Where a module's class may come from; anything else is code in the model's own repository.
_PACKAGES = ("sentence_transformers.", "pylate.")
_NOT_SERVED = {
    "Asym": "it sends queries and documents through different modules",
    "Router": "it sends queries and documents through different modules",
    "BoW": "it counts words and has no transformer",
    "CLIPModel": "it embeds images",
    "CNN": "it puts a convolution behind the transformer",
    "LSTM": "it puts a recurrent network behind the transformer",
    "SparseAutoEncoder": "its sparse entries are features of an autoencoder, which no surface can name",
    "SparseStaticEmbedding": "it weighs the words of a query without a model",
    "TokenPooling": "it merges the token vectors of a text",
    "WeightedLayerPooling": "it mixes the layers of the transformer",
    "WordEmbeddings": "it looks words up in a table of its own and has no tokenizer file",
    "WordWeights": "it weighs words by a table of its own",
}
_SERVED = {
    "Dense",
    "Dropout",
    "LayerNorm",
    "LogitScore",
    "MLMTransformer",
    "MultiVectorMask",
    "Normalize",
    "Pooling",
    "SpladePooling",
    "StaticEmbedding",
    "Transformer",
}


@dataclass(frozen=True, slots=True)
class Module:
    """One module: the last word of its class, and its directory."""

    name: str
    path: Path

    def config(self) -> dict[str, Any]:
        """Its config.json, {} where it has none."""
        return read_object(self.path / "config.json") or {}


@dataclass(frozen=True, slots=True)
class Chain:
    """The modules in order; none for a bare transformer. What does nothing at inference is left out."""

    modules: tuple[Module, ...]

    @property
    def first(self) -> str:
        """The name of the first module, "Transformer" for a bare one."""
        return self.modules[0].name if self.modules else "Transformer"

    @property
    def behind(self) -> tuple[Module, ...]:
        """All modules but the first."""
        return self.modules[1:]

    def has(self, name: str) -> bool:
        """Whether there is a module of that name."""
        return any(module.name == name for module in self.modules)

    def split_at(self, name: str) -> tuple[tuple[Module, ...], Module, tuple[Module, ...]]:
        """The modules before, at and behind the one called `name`.

        Raises:
            ModelLoadFailed: there is none, or more than one.
        """
        found = [index for index, module in enumerate(self.modules) if module.name == name]
        if len(found) != 1:
            raise ModelLoadFailed(f"modules.json names {len(found)} {name} modules, not one: {self}")
        at = found[0]
        return self.modules[:at], self.modules[at], self.modules[at + 1 :]

    def __str__(self) -> str:
        return " > ".join(module.name for module in self.modules) or "none"


def read_chain(root: Path) -> Chain:
    """Read modules.json.

    Raises:
        ModelLoadFailed: it names a module that is not served, or does not start with one that reads text.
    """
    modules = [_module(root, row) for row in read_list(root / "modules.json")]
    modules = [module for module in modules if module.name != "Dropout"]
    chain = Chain(tuple(modules))
    readers = [module.name for module in modules if module.name in ("Transformer", "MLMTransformer", "StaticEmbedding")]
    if modules and (len(readers) != 1 or chain.first not in readers):
        raise ModelLoadFailed(f"modules.json should start with one transformer, and names: {chain}")
    return chain


def _module(root: Path, row: dict[str, Any]) -> Module:
    dotted, path = str(row.get("type", "")), str(row.get("path", ""))
    name = dotted.rsplit(".", 1)[-1]
    if not dotted.startswith(_PACKAGES):
        raise ModelLoadFailed(f"modules.json has {dotted}, code in the model's own repository, which is not run here")
    if name in _NOT_SERVED:
        raise ModelLoadFailed(f"modules.json has a {name} module: {_NOT_SERVED[name]}, which is not served")
    if name not in _SERVED:
        raise ModelLoadFailed(f"modules.json has a {name} module, which is not known here")
    place = (root / path).resolve()
    if not place.is_relative_to(root.resolve()):
        raise ModelLoadFailed(f"modules.json points out of the model's directory: {path}")
    return Module(name, root / path)
