"""Dense, LayerNorm and Normalize modules, behind a pooling or on every token."""

from __future__ import annotations

from collections.abc import Iterable

from teimgr.errors import ModelLoadFailed
from teimgr.layout.chain import Module
from teimgr.layout.parts import Dense, LayerNorm, Normalize, Projection

TEXT, TOKENS = "sentence_embedding", "token_embeddings"
_TANH = "torch.nn.modules.activation.Tanh"  # sentence-transformers' own, where a Dense module names none it may load
_IDENTITY = "torch.nn.modules.linear.Identity"


def read_projections(modules: Iterable[Module], works_on: str = TEXT) -> tuple[Projection, ...]:
    """What the modules do, in order; all must read and write `works_on`, TEXT or TOKENS.

    Raises:
        ModelLoadFailed: one is no projection, or works on something else.
    """
    return tuple(_projection(module, works_on) for module in modules)


def _projection(module: Module, works_on: str) -> Projection:
    if module.name not in ("Dense", "LayerNorm", "Normalize"):
        raise ModelLoadFailed(f"a {module.name} module is not served in this place")
    config = module.config()
    # Dense modules of PyLate and of early multi-vector models do not say that they work on tokens.
    default = works_on if module.name == "Dense" else TEXT
    reads = str(config.get("module_input_name") or default)
    writes = str(config.get("module_output_name") or reads)
    if {reads, writes} != {works_on}:
        raise ModelLoadFailed(
            f"the {module.name} module {module.path.name} turns {reads} into {writes}; here only {works_on} is served"
        )
    if module.name == "Normalize":
        return Normalize()
    if module.name == "LayerNorm":
        return LayerNorm(module.path, int(_given(module, config, "dimension")))
    return _dense(module, config)


def _dense(module: Module, config: dict[str, object]) -> Dense:
    activation = config.get("activation_function", _TANH)
    if activation is None:
        activation = _IDENTITY
    return Dense(
        path=module.path,
        in_features=int(_given(module, config, "in_features")),
        out_features=int(_given(module, config, "out_features")),
        bias=bool(config.get("bias", True)),
        activation=str(activation) if str(activation).startswith("torch.") else _TANH,
        residual=bool(config.get("use_residual")),
    )


def _given(module: Module, config: dict[str, object], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise ModelLoadFailed(f"the config.json of the {module.name} module {module.path.name} has no {key}")
    return value
