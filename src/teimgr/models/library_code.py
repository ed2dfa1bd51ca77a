"""What transformers, or `engine/own_models`, declares about a model type, read from its source, never imported.

Each configuration class is a list of fields with defaults, so its syntax tree shows which keys of config.json the
class knows, and what holds where the file has none.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# How code reads a key: of a configuration's own class, and of a model's.
_OWN_READS = re.compile(r"\bself\.([a-z]\w*)|kwargs\.(?:pop|get)\(\"(\w+)\"")
_READS = re.compile(r"\bconfig\.([a-z]\w*)|getattr\((?:self\.)?config, \"(\w+)\"")

_MODEL_PART = re.compile("_(?:text|vision|audio)_model$")
_OWN = Path(__file__).parents[1] / "engine" / "own_models"


@dataclass(frozen=True, slots=True)
class DeclaredKeys:
    """The keys that a configuration class has, and the defaults of those whose default is a literal.

    `aliases`: other names of keys in config.json (`n_positions` of GPT-2 is its `max_position_embeddings`). `read`:
    keys that the model's code reads besides, such as Qwen2's `head_dim`.
    """

    names: frozenset[str]
    defaults: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    read: frozenset[str] = frozenset()


def setting(config: dict[str, Any], key: str) -> Any:
    """The value of a key of config.json by the library's reading: by another name of it, or the class's default."""
    declared = declared_keys(str(config["model_type"])) or DeclaredKeys(frozenset())
    names = [key, *(alias for alias, name in declared.aliases.items() if name == key)]
    given = next((config[name] for name in names if name in config), None)
    if given is not None or any(name in config for name in names):
        return given
    return next((declared.defaults[name] for name in names if name in declared.defaults), None)


@functools.lru_cache(maxsize=512)
def declared_keys(model_type: str) -> DeclaredKeys | None:
    """What the configuration class of a model type declares; None if there is no such class."""
    path = _configuration_file(model_type)
    if path is None:
        return None
    for node in _classes_of(path).values():
        if _literals(node).get("model_type") == model_type:
            return replace(_declared(path, node), read=_read(path))
    return None


def _read(path: Path) -> frozenset[str]:
    """The keys that the code beside a configuration reads from it."""
    found = _OWN_READS.findall(path.read_text(encoding="utf-8"))
    for model in sorted(path.parent.glob("modeling_*.py")):
        found += _READS.findall(model.read_text(encoding="utf-8"))
    return frozenset(name for names in found for name in names if name)


def _configuration_file(model_type: str) -> Path | None:
    name = model_type.replace("-", "_")
    if not name.isidentifier():  # it becomes part of a path
        return None
    own = _OWN / name / f"configuration_{name}.py"
    if own.is_file():
        return own
    models = _library() / "models"
    for folder in (name, name.removesuffix("_text"), name.removesuffix("_gpt"), _MODEL_PART.sub("", name)):
        # gemma3_text, openai-gpt, clip_text_model
        path = models / folder / f"configuration_{folder}.py"
        if path.is_file():
            return path
    return next(models.glob(f"*/configuration_{name}.py"), None)  # data2vec-text


@functools.cache
def _library() -> Path:
    spec = importlib.util.find_spec("transformers")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else Path("/nonexistent")


@functools.cache
def _classes_of(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _declared(path: Path, node: ast.ClassDef) -> DeclaredKeys:
    """The fields of a class, those of its bases in the same file before them."""
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    found = DeclaredKeys(frozenset())
    for base in bases:
        if base == "PreTrainedConfig":
            found = _joined(found, _common())
        elif (parent := _classes_of(path).get(base)) is not None:
            found = _joined(found, _declared(path, parent))
    literals = _literals(node)
    aliases = literals.get("attribute_map")
    own = DeclaredKeys(_fields(node), literals, {ours: theirs for theirs, ours in (aliases or {}).items()})
    return _joined(found, own)


@functools.cache
def _common() -> DeclaredKeys:
    node = _classes_of(_library() / "configuration_utils.py")["PreTrainedConfig"]
    return DeclaredKeys(_fields(node), _literals(node))


def _joined(before: DeclaredKeys, behind: DeclaredKeys) -> DeclaredKeys:
    return DeclaredKeys(
        before.names | behind.names | behind.aliases.keys(),
        before.defaults | behind.defaults,
        before.aliases | behind.aliases,
    )


def _fields(node: ast.ClassDef) -> frozenset[str]:
    """Annotated fields, and plain ones, of which some classes have a few."""
    names = {
        line.target.id for line in node.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    plain = [target for line in node.body if isinstance(line, ast.Assign) for target in line.targets]
    return frozenset(names | {target.id for target in plain if isinstance(target, ast.Name)})


def _literals(node: ast.ClassDef) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in node.body:
        targets = (
            line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
        )
        value = line.value if isinstance(line, (ast.Assign, ast.AnnAssign)) else None
        if value is None:
            continue
        try:
            literal = ast.literal_eval(value)
        except ValueError:  # an expression
            continue
        found.update((target.id, literal) for target in targets if isinstance(target, ast.Name))
    return found
