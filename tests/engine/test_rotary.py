"""Dynamic rotary positions, as the library has them for one text."""

from __future__ import annotations

import pytest
import torch
import transformers

from teimgr.engine.rotary import own_rotary, put_own_rotary
from teimgr.errors import ModelLoadFailed

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 8, "num_hidden_layers": 1}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


@pytest.mark.parametrize("length", [4, 32, 33, 100])
def test_dynamic_positions_of_a_text_are_the_librarys(length: int) -> None:
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=4, max_position_embeddings=32, rope_parameters=DYNAMIC
    )
    module, same = (transformers.AutoModel.from_config(config) for _ in range(2))
    put_own_rotary(module)
    own = own_rotary(module)
    assert own is not None

    x, positions = torch.zeros(1, 1), torch.arange(length)[None]
    for found, expected in zip(own(x, positions), same.rotary_emb(x, positions), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_model_that_lays_them_out_in_another_way_is_refused() -> None:
    """Cohere repeats each frequency for two columns side by side."""
    config = transformers.CohereConfig(
        **SIZES, num_key_value_heads=4, max_position_embeddings=32, rope_parameters=DYNAMIC
    )

    with pytest.raises(ModelLoadFailed, match="dynamic rotary positions as in CohereRotaryEmbedding"):
        put_own_rotary(transformers.AutoModel.from_config(config))
