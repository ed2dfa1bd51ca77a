"""The types of TEI's parser and the request classes of teimgr have the same fields."""

from __future__ import annotations

import pytest

from teimgr.worker.dialects import tei, tei_types
from teimgr.worker.dialects.serde_types import Optional, Struct
from teimgr.worker.http_inference import Body

PAIRS = [
    (tei.TeiEmbedRequest, tei_types.EMBED),
    (tei.TeiEmbedAllRequest, tei_types.EMBED_ALL),
    (tei.TeiEmbedSparseRequest, tei_types.EMBED_SPARSE),
    (tei.TeiPredictRequest, tei_types.PREDICT),
    (tei.TeiRerankRequest, tei_types.RERANK),
    (tei.TeiSimilarityRequest, tei_types.SIMILARITY),
    (tei.OpenAICompatRequest, tei_types.OPENAI),
    (tei.TokenizeRequest, tei_types.TOKENIZE),
    (tei.DecodeRequest, tei_types.DECODE),
    (tei.TeiVertexRequest, tei_types.VERTEX),
]


@pytest.mark.parametrize(("kind", "struct"), PAIRS, ids=[struct.name for _, struct in PAIRS])
def test_fields_and_those_required_are_the_same(kind: type[Body], struct: Struct) -> None:
    assert set(kind.model_fields) == set(struct.fields)
    required = {
        name
        for name, (field, has_default) in struct.fields.items()
        if not has_default and not isinstance(field, Optional)
    }
    assert {name for name, field in kind.model_fields.items() if field.is_required()} == required
