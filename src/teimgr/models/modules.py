"""Modules of sentence-transformers and PyLate: their order (modules.json) and their configurations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.models.bounded_json import read_list, read_object
from teimgr.models.directory import ROUTERS, folder_in, router_file
from teimgr.models.layout import Dense, LayerNorm, Normalize, OwnModule, Projection
from teimgr.spec import POOLINGS

JINA_TRANSFORMER, INT8_TANH = "custom_st.Transformer", "Int8Tanh"
GME_TRANSFORMER = "custom_st.MultiModalTransformer"
# Known classes of models' own code, the module served in place of each, and the call arguments that it may have:
# those of jina-embeddings-v3 and v5 and of GME are a Transformer, that of pplx-embed-v1 is round(127 · tanh(x)), its
# default.
KNOWN_OWN = {
    JINA_TRANSFORMER: ("Transformer", ["task", "truncate_dim"]),
    GME_TRANSFORMER: ("Transformer", []),
    "st_quantize.FlexibleQuantizer": (INT8_TANH, ["quantization"]),
}
SPARSE_TABLE = "SparseStaticEmbedding"
_CONFIGURED = {"Pooling", "Dense", "LayerNorm", "SpladePooling", "LogitScore"}


# The packages of supported module classes; any other class is code in the model's own repository.
PACKAGES = ("sentence_transformers.", "pylate.")


def is_own_module(dotted: str) -> bool:
    """True if the type of a module is a class of the model's own that is not known here."""
    return bool(dotted) and not dotted.startswith(PACKAGES) and dotted not in KNOWN_OWN


@dataclass(frozen=True, slots=True)
class Module:
    """One module: its class name without the package, and its directory. `code` is set if it is the model's own
    trusted code.
    """

    name: str
    path: Path
    code: OwnModule | None = None

    def config(self) -> dict[str, Any]:
        """Its config.json, {} for a Normalize without one, of which many repositories have no folder.

        Raises:
            ModelLoadFailed: there is no such file, and the module is nothing without it.
        """
        content = read_object(self.path / "config.json")
        if content is None and self.name in _CONFIGURED:
            raise ModelLoadFailed(f"modules.json names a {self.name} module, and its {self._file} is missing")
        return content or {}

    @property
    def _file(self) -> str:
        return f"{self.path.name}/config.json"


# How transformers names code: a file in the model's root or in another repository, and a class in it.
_OWN_CODE = re.compile(r"([\w.-]+(/[\w.-]+)?--)?[A-Za-z_]\w*\.[A-Za-z_]\w*")


def own_module(code: OwnModule, trusts: bool, file: str = "modules.json") -> Module:
    """Return the module whose class `file` names; `trusts` is the instance's setting.

    Raises:
        ModelLoadFailed: it is not trusted, or its name is not that of code in a repository.
    """
    if not trusts:
        raise ModelLoadFailed(
            f"{file} has {code.code}, code in the model's own repository: it is run only where the instance sets "
            "trust_remote_code = true"
        )
    if not _OWN_CODE.fullmatch(code.code):
        raise ModelLoadFailed(
            f"{file} has {code.code or 'a module without a type'}, a class of an installed package, which is not run: "
            "copy its file into the model's directory, and name it file.Class"
        )
    return Module(code.code, code.path, code)


@dataclass(frozen=True, slots=True)
class Chain:
    """The modules in order, without Dropout; none for a bare transformer.

    In a model with a Router they are those of documents, and `queries` those of queries. If `queries_by_default`, a
    text without a role is a query.
    """

    modules: tuple[Module, ...]
    queries: Chain | None = None
    queries_by_default: bool = False

    @property
    def table(self) -> Module | None:
        """The weights of queries of a sparse model (SparseStaticEmbedding), if they do not use a transformer."""
        one = self.queries.modules[0] if self.queries is not None else None
        return one if one is not None and one.name == SPARSE_TABLE else None

    @property
    def first(self) -> str:
        """The name of the first module, "Transformer" for a bare one."""
        return self.modules[0].name if self.modules else "Transformer"

    @property
    def reader(self) -> Module | None:
        """The first module where it is code of the model's own, which reads texts in place of a transformer."""
        return self.modules[0] if self.modules and self.modules[0].code is not None else None

    @property
    def all(self) -> tuple[Module, ...]:
        """With those of queries, each once."""
        return tuple(dict.fromkeys((*self.modules, *(() if self.queries is None else self.queries.modules))))

    @property
    def behind(self) -> tuple[Module, ...]:
        return self.modules[1:]

    def read_by(self, code: str, root: Path, trust_remote_code: bool) -> Chain:
        """With `code`, `file.Class` in the directory `root`, as the first module; raises as `own_module`."""
        place = OwnModule(self.modules[0].path, code, root)
        return replace(self, modules=(own_module(place, trust_remote_code), *self.behind))

    def has(self, name: str) -> bool:
        return any(module.name == name for module in self.modules)

    def split_at(self, name: str) -> tuple[tuple[Module, ...], Module, tuple[Module, ...]]:
        """Return the modules before, at and after the one called `name`.

        Raises:
            ModelLoadFailed: it is missing, or there are several.
        """
        found = [index for index, module in enumerate(self.modules) if module.name == name]
        if len(found) != 1:
            raise ModelLoadFailed(f"modules.json names {len(found)} {name} modules, not one: {self}")
        at = found[0]
        return self.modules[:at], self.modules[at], self.modules[at + 1 :]

    def __str__(self) -> str:
        return " > ".join(module.name for module in self.modules) or "none"


TEXT, TOKENS, SCORES = "sentence_embedding", "token_embeddings", "scores"
_TANH = "torch.nn.modules.activation.Tanh"  # sentence-transformers' default for a Dense module
IDENTITY = "torch.nn.modules.linear.Identity"
# Activations over one dimension; with a vector for each token, torch would take the first, the texts of a batch.
_OVER_TEXTS = ("Softmax", "Softmin", "LogSoftmax")


def read_projections(
    modules: Sequence[Module], works_on: str = TEXT, gives: str | None = None
) -> tuple[Projection, ...]:
    """The projections of the modules in order; all must read and write `works_on`, TEXT or TOKENS, but for the last,
    which writes `gives`.

    Raises:
        ModelLoadFailed: one is not a projection, or works on another input.
    """
    outputs = [*[works_on] * (len(modules) - 1), gives or works_on]
    return tuple(_projection(module, works_on, output) for module, output in zip(modules, outputs, strict=False))


def _projection(module: Module, works_on: str, gives: str) -> Projection:
    if module.code is not None:
        if (works_on, gives) != (TEXT, TEXT):
            raise ModelLoadFailed(
                f"{module.code.code}, code in the model's own repository, is run only after a pooling"
            )
        return module.code
    if module.name not in ("Dense", "LayerNorm", "Normalize"):
        raise ModelLoadFailed(f"a {module.name} module is not served in this place")
    config = module.config()
    # Dense modules of PyLate and of early multi-vector models lack module_input_name.
    default = works_on if module.name == "Dense" else TEXT
    reads = str(config.get("module_input_name") or default)
    writes = str(config.get("module_output_name") or reads)
    if (reads, writes) != (works_on, gives):
        served = works_on if works_on == gives else f"{works_on} into {gives}"
        raise ModelLoadFailed(
            f"the {module.name} module {module.path.name} turns {reads} into {writes}; here only {served} is served"
        )
    if module.name == "Normalize":
        return Normalize()
    if module.name == "LayerNorm":
        return LayerNorm(module.path, _given(module, config, "dimension"))
    activation = config.get("activation_function", _TANH)
    if activation is None:
        activation = IDENTITY
    if not str(activation).startswith("torch."):
        raise ModelLoadFailed(
            f"the Dense module {module.path.name} has the activation {activation}, code of the model's own, which is "
            "not run"
        )
    if works_on == TOKENS and str(activation).endswith(_OVER_TEXTS):
        raise ModelLoadFailed(
            f"the Dense module {module.path.name} has the activation {activation}, which torch computes over the "
            "texts of a batch if each token has a vector: not served"
        )
    return Dense(
        path=module.path,
        in_features=_given(module, config, "in_features"),
        out_features=_given(module, config, "out_features"),
        bias=bool(config.get("bias", True)),
        activation=str(activation),
        residual=bool(config.get("use_residual")),
    )


def _given(module: Module, config: dict[str, object], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        what = "no" if value is None else f"{key} = {value!r} in place of a whole number above 0 as its"
        raise ModelLoadFailed(f"the config.json of the {module.name} module {module.path.name} has {what} {key}")
    return value


_BY_FLAG = {name: name.replace("-", "_") for name in POOLINGS if name != "splade"}
_BY_NAME = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last_token",
}
# In the order of concatenation in sentence-transformers.
_BY_BOOLEAN = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last_token",
}
_BY_KEY = {"avg": "mean", "cls": "cls", "last": "last_token"}
GUESSED_CLS = "no pooling configuration found; `cls` is used. Set the pooling to choose another"


def check_pooling(chosen: str | None) -> None:
    """Raise InvalidConfig for an unknown pooling; the message lists the known ones."""
    if chosen is not None and chosen not in POOLINGS:
        raise InvalidConfig(f"pooling {chosen!r} is not one of {', '.join(sorted(POOLINGS))}")


def read_poolings(
    module: Module | None, folder: Path, config: dict[str, Any], chosen: str | None
) -> tuple[tuple[str, ...], bool, tuple[str, ...]]:
    """The poolings, whether prompts are pooled, and warnings for the log.

    `module` is the Pooling of modules.json; without one, `folder` may have its file. `chosen` is the user's
    choice.

    Raises:
        InvalidConfig: neither files nor user name a pooling.
        ModelLoadFailed: the files name an unknown pooling, or the module's file is missing.
    """
    saved = read_object(folder / "config.json") if module is None else module.config()
    include_prompt = bool((saved or {}).get("include_prompt", True))
    if chosen is not None:
        return (_BY_FLAG[chosen],), include_prompt, ()
    if saved is not None:
        return _saved(saved), include_prompt, ()
    if config.get("pooling") in _BY_KEY and config["model_type"] == "llama":  # NVIDIA's llama_bidirec
        return (_BY_KEY[config["pooling"]],), True, ()
    if "bert" in config["model_type"].lower():
        return ("cls",), True, (GUESSED_CLS,)
    writer = next((name for name in config.get("architectures") or () if str(name).endswith(_WRITERS)), None)
    if writer is not None:
        raise InvalidConfig(
            f"the model ({writer}) reads a text and writes another, which is not served; of rerankers like it monoT5, "
            'InRanker and mT5 on mMARCO are, by their model cards or with kind = "reranker"'
        )
    raise InvalidConfig("the model has no pooling configuration (1_Pooling/config.json): set the pooling explicitly")


_WRITERS = ("ForConditionalGeneration", "WithLMHeadModel")


def _saved(saved: dict[str, Any]) -> tuple[str, ...]:
    named = saved.get("pooling_mode")
    names = [named] if isinstance(named, str) else named or []
    if not isinstance(names, list):
        raise ModelLoadFailed(f"1_Pooling/config.json has pooling_mode = {named!r}, which is not a pooling")
    poolings = tuple(_BY_NAME[name] for name in names if name in _BY_NAME)
    if len(poolings) != len(names):
        raise ModelLoadFailed(f"the pooling {named!r} of 1_Pooling/config.json is not served")
    poolings = poolings or tuple(name for key, name in _BY_BOOLEAN.items() if saved.get(key))
    if not poolings:
        raise ModelLoadFailed("1_Pooling/config.json enables no pooling")
    return poolings


_NOT_SERVED = {
    "BoW": "it counts words and has no transformer",
    "CNN": "it has a convolution after the transformer",
    "LSTM": "it has a recurrent network after the transformer",
    "SparseAutoEncoder": "its sparse entries are features of an autoencoder, which no surface can name",
    "SparseStaticEmbedding": "it weighs the words of a query without a model, outside of a Router",
    "TokenPooling": "it merges the token vectors of a text",
    "WeightedLayerPooling": "it mixes the layers of the transformer",
    "WordEmbeddings": "it has its own table of words and no tokenizer file",
    "WordWeights": "it weighs words with its own table",
}
_SERVED = {
    *("Transformer", "MLMTransformer", "StaticEmbedding", "Pooling", "SpladePooling", "MultiVectorMask", "LogitScore"),
    *("CLIPModel", "Dense", "Dropout", "LayerNorm", "Normalize"),
}
_READERS = ("Transformer", "MLMTransformer", "StaticEmbedding", "CLIPModel")
QUERY, DOCUMENT = "query", "document"
# Names of the route of documents in the library, and in its documentation of Asym.
_DOCUMENTS = (DOCUMENT, "doc", "passage")
_BY_OLD_NAME = {"MLMTransformer": "Transformer"}
_SPARSE_DOCUMENTS = ("Transformer", "SpladePooling")
_OWN = "own code"
_OF_DENSE_ROUTES = {_OWN, "Transformer", "StaticEmbedding", "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout"}


def read_chain(root: Path, trust_remote_code: bool = False) -> Chain:
    """Read modules.json; modules of the model's own code count if it is trusted.

    Raises:
        ModelLoadFailed: it has an unsupported module, or does not start with exactly one transformer.
    """
    rows = read_list(root / "modules.json")
    if not rows and (root / "modules.json").exists():
        raise ModelLoadFailed("modules.json names no module")
    routers = [at for at, row in enumerate(rows) if _has_routes(row)]
    if len(routers) > 1:
        raise ModelLoadFailed(f"modules.json has {len(routers)} modules with routes by role; one is served")
    if not routers:
        return _checked([_module(root, row, trust_remote_code) for row in rows])
    (at,) = routers
    before = [_module(root, row, trust_remote_code) for row in rows[:at]]
    behind = [_module(root, row, trust_remote_code) for row in rows[at + 1 :]]
    return _read_routes(root, rows[at], before, behind, trust_remote_code)


def _checked(modules: list[Module]) -> Chain:
    """Return the chain of modules; raises ModelLoadFailed if it does not start with exactly one transformer."""
    modules = [module for module in modules if module.name != "Dropout"]
    chain = Chain(tuple(modules))
    readers = [module.name for module in modules if module.name in _READERS or module is chain.reader]
    if modules and (len(readers) != 1 or chain.first not in readers):
        raise ModelLoadFailed(f"modules.json should start with one transformer, and names: {chain}")
    return chain


def _read_routes(root: Path, row: dict[str, Any], before: list[Module], behind: list[Module], trusts: bool) -> Chain:
    """The modules of a Router, formerly Asym, that has a route for queries and one for documents: of a sparse model a
    table of weights and a SPLADE model, of a dense one any modules that are served.

    Raises:
        ModelLoadFailed: it has other routes, or chooses among them by something else than the role.
    """
    home = str(row.get("path", ""))
    file, routes = router_file(folder_in(root, home))
    if routes is None:
        raise ModelLoadFailed(f"modules.json names a {_name_of(row)} module, and its router_config.json is missing")
    types, structure, parameters = (routes.get(key) or {} for key in ("types", "structure", "parameters"))
    below = f"{home}/" if home not in ("", ".") else ""
    modules = {
        name: [_routed(root, f"{below}{key}", str(types.get(key, "")), file, name, trusts) for key in keys]
        for name, keys in structure.items()
    }
    names = [_role_of(name) for name in modules]
    if sorted(names) != [DOCUMENT, QUERY] or parameters.get("route_mappings"):
        raise ModelLoadFailed(_other_routes(modules, parameters))
    by_role = {role: [*before, *found, *behind] for role, found in zip(names, modules.values(), strict=True)}
    called = {role: tuple(_called(one) for one in found) for role, found in by_role.items()}
    is_sparse = called == {QUERY: (SPARSE_TABLE,), DOCUMENT: _SPARSE_DOCUMENTS}
    if not is_sparse and not all(_OF_DENSE_ROUTES.issuperset(found) and found for found in called.values()):
        raise ModelLoadFailed(_other_routes(modules, parameters))
    default = parameters.get("default_route")
    if default is None and parameters.get("allow_empty_key", True):
        default = next(iter(structure))
    if default not in modules:
        raise ModelLoadFailed(f"{file} has the default_route {default!r}, which is not one of its routes")
    queries = Chain(tuple(by_role[QUERY])) if is_sparse else _checked(by_role[QUERY])
    return Chain(_checked(by_role[DOCUMENT]).modules, queries, _role_of(str(default)) == QUERY)


def _role_of(route: str) -> str:
    return DOCUMENT if route in _DOCUMENTS else route


def _other_routes(modules: dict[str, list[Module]], parameters: dict[str, Any]) -> str:
    """Why a Router is not served: the routes that it has, and those that are."""
    shown = "; ".join(
        f"{name}: {' > '.join(one.name for one in found) or 'nothing'}" for name, found in modules.items()
    )
    mapped = f", chosen by route_mappings {parameters['route_mappings']}" if parameters.get("route_mappings") else ""
    return (
        f"modules.json has a Router module of {shown or 'no routes'}{mapped}: only a route for queries and one for "
        "documents, by their role, are served, of dense vectors (transformer or StaticEmbedding, Pooling, Dense, "
        "LayerNorm, Normalize, code of the model's own), or SparseStaticEmbedding for queries and a transformer with "
        "SpladePooling for documents"
    )


def _routed(root: Path, path: str, dotted: str, file: str, route: str, trusts: bool) -> Module:
    if dotted.startswith(PACKAGES):
        return Module(dotted.rsplit(".", 1)[-1], folder_in(root, path))
    module = own_module(OwnModule(folder_in(root, path), dotted, root, route), trusts, file)
    if "--" in dotted:
        raise ModelLoadFailed(
            f"{file} has {dotted}, code of another repository, which sentence-transformers reads in a route only at "
            "its newest revision: copy its file into the model's directory, and name it file.Class"
        )
    return module


def _called(module: Module) -> str:
    """Return the name of a module by which routes refer to it."""
    return _OWN if module.code is not None else _BY_OLD_NAME.get(module.name, module.name)


def _has_routes(row: dict[str, Any]) -> bool:
    return _name_of(row) in ROUTERS and str(row.get("type")).startswith(PACKAGES)


def _name_of(row: dict[str, Any]) -> str:
    return str(row.get("type", "")).rsplit(".", 1)[-1]


def _module(root: Path, row: dict[str, Any], trusts: bool) -> Module:
    dotted, path = str(row.get("type", "")), str(row.get("path", ""))
    name = _name_of(row)
    taken_for, arguments = KNOWN_OWN.get(dotted, ("", []))
    given = row.get("kwargs") or []
    if taken_for and isinstance(given, list) and all(one in arguments for one in given):
        return Module(taken_for, folder_in(root, path))
    if not dotted.startswith(PACKAGES):
        return own_module(OwnModule(folder_in(root, path), dotted, root), trusts)
    if name in _NOT_SERVED:
        raise ModelLoadFailed(f"modules.json has a {name} module: {_NOT_SERVED[name]}, which is not served")
    if name not in _SERVED:
        raise ModelLoadFailed(f"modules.json has a {name} module, which is not known here")
    return Module(name, folder_in(root, path))
