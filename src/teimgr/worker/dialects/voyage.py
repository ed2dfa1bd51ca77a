"""Voyage's embeddings and reranking: https://docs.voyageai.com/reference.

Its fields are honoured on the shared paths `/v1/embeddings` and `/v1/rerank` too; `/voyage/v1` has its defaults and
errors.
"""

from __future__ import annotations

from teimgr.worker import http_inference as http
from teimgr.worker.dialects import openai, rerank

ROUTES: http.RouteTable = {
    ("POST", "/v1/embeddings"): openai.embeddings,
    ("POST", "/v1/rerank"): rerank.handler(rerank.VOYAGE),
}
