"""modules.json of sentence-transformers and PyLate: which modules a text goes through, by its role where there are
routes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.models.bounded_json import read_list
from teimgr.models.directory import ROUTERS, folder_in, router_file
from teimgr.models.layout import OwnModule
from teimgr.models.modules import KNOWN_OWN, PACKAGES, SPARSE_TABLE, Chain, Module, own_module

_NOT_SERVED = {
    "BoW": "it counts words and has no transformer",
    "CNN": "it puts a convolution behind the transformer",
    "LSTM": "it puts a recurrent network behind the transformer",
    "SparseAutoEncoder": "its sparse entries are features of an autoencoder, which no surface can name",
    "SparseStaticEmbedding": "it weighs the words of a query without a model, outside of a Router",
    "TokenPooling": "it merges the token vectors of a text",
    "WeightedLayerPooling": "it mixes the layers of the transformer",
    "WordEmbeddings": "it looks words up in its own table and has no tokenizer file",
    "WordWeights": "it weighs words with its own table",
}
_SERVED = {
    *("Transformer", "MLMTransformer", "StaticEmbedding", "Pooling", "SpladePooling", "MultiVectorMask", "LogitScore"),
    *("CLIPModel", "Dense", "Dropout", "LayerNorm", "Normalize"),
}
_READERS = ("Transformer", "MLMTransformer", "StaticEmbedding", "CLIPModel")
QUERY, DOCUMENT = "query", "document"
# Names of the route of documents: the library's, and those of its documentation of Asym.
_DOCUMENTS = (DOCUMENT, "doc", "passage")
_BY_OLD_NAME = {"MLMTransformer": "Transformer"}
_SPARSE_DOCUMENTS = ("Transformer", "SpladePooling")
_OWN = "own code"
_OF_DENSE_ROUTES = {_OWN, "Transformer", "StaticEmbedding", "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout"}


def read_chain(root: Path, trust_remote_code: bool = False) -> Chain:
    """Read modules.json; modules of the model's own code count where it is trusted.

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
    """The chain of modules; raises ModelLoadFailed where it does not start with exactly one transformer."""
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
            f"{file} has {dotted}, code of another repository, which sentence-transformers reads in a route at its "
            "newest revision alone: copy its file into the model's directory, and name it file.Class"
        )
    return module


def _called(module: Module) -> str:
    """The name of a module by which routes are known."""
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
