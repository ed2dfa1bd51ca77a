"""What a model directory says of itself: the files of transformers and sentence-transformers, read and judged.

`parts` is what can be said, `reading` finds it out. Reads JSON only; nothing is loaded. What this engine cannot serve
truthfully is refused here, with the reason.
"""

from teimgr.model_files.layout import (
    M3,
    Backbone,
    CausalRerank,
    Dense,
    Kind,
    LateInteraction,
    LayerNorm,
    Layout,
    Normalize,
    Projection,
    ScoringConfig,
    Splade,
)
from teimgr.model_files.reading import read_layout

__all__ = [
    "M3",
    "Backbone",
    "CausalRerank",
    "Dense",
    "Kind",
    "LateInteraction",
    "LayerNorm",
    "Layout",
    "Normalize",
    "Projection",
    "ScoringConfig",
    "Splade",
    "read_layout",
]
