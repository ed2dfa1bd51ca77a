"""BGE-M3: sparse weights and token vectors beside the dense vector."""

from __future__ import annotations

from teimgr.layout.facts import Facts
from teimgr.layout.parts import M3

_SPARSE, _MULTI_VECTOR = "sparse_linear.pt", "colbert_linear.pt"
_UNUSED = ("cls_token", "eos_token", "pad_token", "unk_token", "bos_token", "sep_token")


def read_m3(facts: Facts) -> M3 | None:
    """The two further layers, where both files lie beside the model."""
    sparse, multi_vector = facts.root / _SPARSE, facts.root / _MULTI_VECTOR
    if not sparse.is_file() or not multi_vector.is_file():
        return None
    ids = {facts.tokens.special(role) for role in _UNUSED}
    return M3(sparse, multi_vector, tuple(sorted(id for id in ids if id is not None)))
