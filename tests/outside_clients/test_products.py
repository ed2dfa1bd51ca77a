"""Products that embed and rerank over HTTP: the settings of their how-to pages, and the requests that they then send.

What is not a library of PyPI is replayed: paths, fields and headers are those of the source that each test names.
"""

from __future__ import annotations

from base64 import b64decode
from typing import Any
from urllib.parse import urljoin

import numpy as np
import pytest
from tests.outside_clients.conftest import QUERY, TEXTS, TOLERANCE, Hear, Page, Truth, same
from tests.outside_clients.products import AIOHTTP, GO, HTTPX, OPENAI_JS, REQUESTS
from tests.support.daemon_process import DaemonProcess

KEY = "Bearer none"


@pytest.fixture(scope="module")
def scores(truth: Truth) -> Any:
    """The scores of `TEXTS` in their order."""
    found = dict(truth.ranks())
    return pytest.approx([found[text] for text in TEXTS], abs=TOLERANCE)


def test_open_webui(page: Page, truth: Truth, scores: Any) -> None:
    """open-webui/open-webui: retrieval/utils.py (`agenerate_openai_batch_embeddings`), retrieval/models/external.py
    of ab233f82."""
    user = {
        "X_OpenWebUI_User_Name": "Zo%C3%AB",
        "X_OpenWebUI_User_Id": "1f0c",
        "X_OpenWebUI_User_Email": "zoe@example.org",
        "X_OpenWebUI_User_Role": "user",
    }
    settings = page("open-webui", "Embedding").fields
    url, model = settings["RAG_OPENAI_API_BASE_URL"], settings["RAG_EMBEDDING_MODEL"]
    no_key = f"Bearer {settings['RAG_OPENAI_API_KEY']}"
    assert no_key == "Bearer "
    asked = {"input": TEXTS, "model": model}
    same(AIOHTTP.post(f"{url}/embeddings", asked, Authorization=no_key).vectors, truth.vectors)
    same(AIOHTTP.post(f"{url}/embeddings", asked, Authorization=no_key, **user).vectors, truth.vectors)

    prompts = page("open-webui", "Prompts").fields
    field = prompts["RAG_EMBEDDING_PREFIX_FIELD_NAME"]
    query = asked | {field: prompts["RAG_EMBEDDING_QUERY_PREFIX"]}
    same(AIOHTTP.post(f"{url}/embeddings", query, Authorization=no_key).vectors, truth.embedded(prompt_name="query"))
    document = asked | {field: prompts["RAG_EMBEDDING_CONTENT_PREFIX"]}
    same(AIOHTTP.post(f"{url}/embeddings", document, Authorization=no_key).vectors, truth.vectors)

    settings = page("open-webui", "Reranking").fields
    ranked = {"model": settings["RAG_RERANKING_MODEL"], "query": QUERY, "documents": TEXTS, "top_n": len(TEXTS)}
    reranker = settings["RAG_EXTERNAL_RERANKER_URL"]
    assert REQUESTS.post(reranker, ranked, Authorization=no_key, **user).scores == scores
    incomplete = reranker.removesuffix("/v1/rerank")
    assert REQUESTS.post(incomplete, ranked, Authorization=no_key).status == 405


def test_open_webui_with_ollama(page: Page, truth: Truth) -> None:
    """open-webui/open-webui: retrieval/utils.py (`agenerate_ollama_batch_embeddings`), and its list of models."""
    settings = page("open-webui", "Ollama's engine").fields
    url, model = settings["RAG_OLLAMA_BASE_URL"], settings["RAG_EMBEDDING_MODEL"]
    listed = AIOHTTP.get(f"{url}/api/tags")
    asked = {"input": TEXTS, "model": model, "truncate": True}

    assert model in [each["model"] for each in listed.json["models"]]
    same(AIOHTTP.post(f"{url}/api/embed", asked, Authorization="Bearer ").json["embeddings"], truth.vectors)


def test_anything_llm(page: Page, truth: Truth) -> None:
    """Mintplex-Labs/anything-llm 0ac463e2: EmbeddingEngines/genericOpenAi/index.js; its openai package asks for base64
    or, in older versions, for nothing."""
    settings = page("anythingllm", "Embedding").fields
    url, model = f"{settings['EMBEDDING_BASE_PATH']}/embeddings", settings["EMBEDDING_MODEL_PREF"]
    key = f"Bearer {settings['GENERIC_OPEN_AI_EMBEDDING_API_KEY']}"

    same(OPENAI_JS.post(url, {"model": model, "input": TEXTS}, Authorization=key).vectors, truth.vectors)
    most = [f"chunk {number}" for number in range(int(settings["GENERIC_OPEN_AI_EMBEDDING_MAX_CONCURRENT_CHUNKS"]))]
    in_base64 = {"model": model, "input": most, "encoding_format": "base64"}
    rows = OPENAI_JS.post(url, in_base64, Authorization=key).vectors
    assert len(rows) == len(most)
    assert all(isinstance(row, str) for row in rows)
    unknown = OPENAI_JS.post(url, {"model": "text-embedding-ada-002", "input": TEXTS}, Authorization=key)
    assert unknown.status == 404
    assert "does not exist; did you mean" in unknown.text


def test_libre_chat(page: Page, scores: Any) -> None:
    """danny-avila/rag_api be84df25: app/config.py, replayed with the ids of OpenAI's tokenizer; LangChain's class with
    the page's settings runs in `test_langchain`. @librechat/agents: JinaReranker."""
    settings = page("librechat", "Embedding").fields
    assert settings["RAG_CHECK_EMBEDDING_CTX_LENGTH"] == "false"
    of_openai = {"input": [[15339, 1917]], "model": settings["EMBEDDINGS_MODEL"], "encoding_format": "base64"}
    refused = HTTPX.post(f"{settings['RAG_OPENAI_BASEURL']}/embeddings", of_openai, Authorization=KEY)
    assert refused.status == 400
    assert "another tokenizer" in refused.text

    settings = page("librechat", "Reranking").fields
    asked = {
        "model": "jina-reranker-v2-base-multilingual",
        "query": QUERY,
        "top_n": 5,
        "documents": TEXTS,
        "return_documents": True,
    }
    reply = OPENAI_JS.post(settings["JINA_API_URL"], asked, Authorization=f"Bearer {settings['JINA_API_KEY']}")
    assert reply.scores == scores
    for row in reply.json["results"]:
        assert row["document"]["text"] == TEXTS[row["index"]]


def test_dify(page: Page, truth: Truth, scores: Any) -> None:
    """langgenius/dify-official-plugins 3e1e501c: models/openai_api_compatible; the credentials are validated by
    langgenius/dify-plugin-sdks 97268de8."""
    settings = page("dify", "Embedding").fields
    url, model = settings["API endpoint URL"] + "/embeddings", settings["Model Name"]
    assert "model" in REQUESTS.post(url, {"input": "ping", "model": model}).json
    for place, text in enumerate(TEXTS):
        one = {"model": model, "input": text, "encoding_format": "float"}
        reply = REQUESTS.post(url, one, Authorization="")
        same(reply.vectors, truth.vectors[[place]])
        assert reply.json["usage"]["prompt_tokens"] > 0

    settings = page("dify", "Reranking").fields
    asked = {"model": settings["Model Name"], "query": QUERY, "documents": TEXTS, "top_n": 3, "return_documents": True}
    asked["score_threshold"] = 0.8
    reply = REQUESTS.post(settings["API endpoint URL"] + "/rerank", asked, Authorization="")
    assert reply.scores == scores
    assert [row["document"]["text"] for row in reply.json["results"]] == [text for text, _ in truth.ranks()]
    rootless = REQUESTS.post(settings["API endpoint URL"].removesuffix("/v1") + "/rerank", asked, Authorization="")
    assert isinstance(rootless.json["results"][0]["document"], str)


def test_dify_by_text_embeddings_inference(page: Page, truth: Truth, scores: Any) -> None:
    """langgenius/dify-official-plugins: models/huggingface_tei (models/helper.py: `TeiHelper`)."""
    settings = page("dify", "Text Embedding Inference").fields
    for url, kind in ((settings["Server url"], "embedding"), (settings["Server url of a reranker"], "reranker")):
        info = REQUESTS.get(f"{url}/info").json
        assert list(info["model_type"]) == [kind]
        assert info["max_input_length"] > 0
        assert info["max_client_batch_size"] == 32
    url = settings["Server url"]
    tokens = HTTPX.post(f"{url}/tokenize", {"inputs": TEXTS}).json
    assert len(tokens) == len(TEXTS)
    for text, row in zip(TEXTS, tokens, strict=True):
        assert [token["special"] for token in row].count(True) == 2
        assert "".join(text[token["start"] : token["stop"]] for token in row if not token["special"])
    same(HTTPX.post(f"{url}/v1/embeddings", {"input": TEXTS}).vectors, truth.vectors)
    asked = {"query": QUERY, "texts": TEXTS, "return_text": True}
    rows = HTTPX.post(f"{settings['Server url of a reranker']}/rerank", asked).json
    assert [row["score"] for row in sorted(rows, key=lambda row: int(row["index"]))] == scores
    assert all(row["text"] == TEXTS[row["index"]] for row in rows)


def test_ragflow(page: Page, truth: Truth, scores: Any) -> None:
    """infiniflow/ragflow 0105193a and 5b404a91: rag/llm/embedding_model.py, rag/llm/rerank_model.py. What it does by
    the libraries of OpenAI and Cohere runs in `test_libraries`."""
    settings = page("ragflow", "Reranking").fields
    asked = {"model": settings["Model name"], "query": QUERY, "documents": TEXTS, "top_n": len(TEXTS)}
    base = settings["Base url"]
    for url in (f"{base}/rerank", urljoin(base, "/rerank")):  # newer and older versions
        assert REQUESTS.post(url, asked, Authorization=f"Bearer {settings['API-Key']}").scores == scores

    base = page("ragflow", "Xinference and VLLM").fields["Base url of Xinference"]
    lax = {"model": settings["Model name"], "query": QUERY, "return_documents": "true", "return_len": "true"}
    url = urljoin(base, "/v1/rerank")
    assert REQUESTS.post(url, lax | {"documents": TEXTS}, accept="application/json").scores == scores

    settings = page("ragflow", "HuggingFace").fields
    url = settings["Base url, embedding"]
    same(REQUESTS.post(f"{url}/embed", {"inputs": TEXTS}).json, truth.vectors)
    same(REQUESTS.post(f"{url}/embed", {"inputs": TEXTS[0]}).json[0], truth.vectors[0])
    asked = {"query": QUERY, "texts": TEXTS, "raw_scores": False, "truncate": True}
    rows = REQUESTS.post(f"http://{settings['Base url, reranking']}/rerank", asked).json
    assert [row["score"] for row in sorted(rows, key=lambda row: int(row["index"]))] == scores


def test_weaviate(page: Page, truth: Truth, scores: Any) -> None:
    """weaviate/weaviate d92e46bf: modulecomponents/clients/openai/openai.go; 09f15301: modules/reranker-cohere;
    38c4ed98: modules/text2vec-huggingface."""
    modules = page("weaviate", "Collection").tree["moduleConfig"]
    settings = modules["text2vec-openai"]
    asked = {"input": TEXTS, "model": settings["model"]}
    same(GO.post(settings["baseURL"] + "/v1/embeddings", asked, Authorization=KEY).vectors, truth.vectors)
    short = GO.post(settings["baseURL"] + "/v1/embeddings", asked | {"dimensions": 8}, Authorization=KEY)
    same(short.vectors, truth.short)
    twice = GO.post(settings["baseURL"] + "/v1/v1/embeddings", asked, Authorization=KEY)
    assert twice.status == 404
    default = {"input": TEXTS, "model": "text-embedding-3-small", "dimensions": 1536}
    unknown = GO.post(settings["baseURL"] + "/v1/embeddings", default, Authorization=KEY)
    assert unknown.status == 404  # Weaviate shows the message of OpenAI's error
    assert "text-embedding-3-small" in unknown.error["error"]["message"]

    settings = modules["reranker-cohere"]
    ranked = {"documents": TEXTS, "query": QUERY, "model": settings["model"], "return_documents": False}
    reply = GO.post(
        settings["baseURL"] + "/v2/rerank", ranked, Authorization=KEY, Request_Source="unspecified:weaviate"
    )
    assert reply.scores == scores
    assert isinstance(reply.json["id"], str)
    assert isinstance(reply.json["meta"]["api_version"]["version"], str)
    before = GO.post(settings["baseURL"] + "/v1/rerank", ranked, Authorization=KEY)
    assert before.scores == scores

    [settings] = page("weaviate", "Hugging Face").tree.values()
    one = {"inputs": TEXTS[:1], "options": {"use_cache": True}}
    same(GO.post(settings["endpointURL"], one).json, truth.vectors[:1])


def test_weaviates_own_containers(page: Page, truth: Truth, scores: Any) -> None:
    """weaviate/weaviate 6dba3426: modulecomponents/clients/transformers; f90bfd0f: modules/reranker-transformers."""
    settings = page("weaviate", "The transformers modules").fields
    url = settings["TRANSFORMERS_INFERENCE_API"]
    unnamed = url.removesuffix("/embedding")
    for path in (f"{url}/.well-known/ready", f"{unnamed}/.well-known/live"):
        assert GO.get(path).status == 204
    assert isinstance(GO.get(f"{url}/meta").json, dict)
    asked = {"text": TEXTS[0], "dims": 0, "vector": None, "error": "", "config": {"pooling_strategy": "masked_mean"}}
    for path in (f"{url}/vectors", f"{url}/vectors/", f"{unnamed}/vectors"):
        told = GO.post(path, asked).json
        same([told["vector"]], truth.vectors[:1])
        assert (told["text"], told["dim"]) == (TEXTS[0], truth.vectors.shape[1])
    query = GO.post(f"{url}/vectors", asked | {"config": {"task_type": "query"}}).json
    same([query["vector"]], truth.embedded(prompt_name="query")[:1])
    refused = GO.post(f"{url}/vectors", asked | {"config": {"pooling_strategy": "last"}})
    assert (refused.status, list(refused.error)) == (400, ["error"])
    unknown = GO.get(f"{unnamed}/nothing/.well-known/ready")
    assert (unknown.status, list(unknown.error)) == (404, ["error"])

    url = settings["RERANKER_INFERENCE_API"]
    told = GO.post(f"{url}/rerank", {"query": QUERY, "documents": TEXTS, "property": ""}).json
    assert (told["query"], [row["document"] for row in told["scores"]]) == (QUERY, TEXTS)
    assert [row["score"] for row in told["scores"]] == scores
    assert GO.post(f"{url}/rerank", {"query": QUERY, "property": TEXTS[0]}).json["score"] == told["scores"][0]["score"]


def test_milvus(page: Page, truth: Truth, scores: Any) -> None:
    """milvus-io/milvus 3ae9ca06 and f3d7e472: internal/util/function/models (tei, vllm, openai); maps are written with
    sorted keys."""
    settings = page("milvus", "Embedding").fields
    assert (settings["provider"], settings["truncate"]) == ("tei", "true")
    asked = {"inputs": TEXTS, "truncate": True}
    same(GO.post(urljoin(settings["endpoint"], "/embed"), asked).json, truth.vectors)
    left = asked | {"truncation_direction": "Left"}
    same(GO.post(urljoin(settings["endpoint"], "/embed"), left).json, truth.vectors)

    settings = page("milvus", "Reranking").fields
    url = urljoin(settings["endpoint"], "/rerank")
    rows = GO.post(url, {"query": QUERY, "texts": TEXTS}).json
    assert [row["score"] for row in sorted(rows, key=lambda row: int(row["index"]))] == scores
    wrong = GO.post(url, {"documents": TEXTS, "query": QUERY})  # the provider `vllm` here
    assert wrong.status == 422
    assert "missing field `texts`" in wrong.text

    settings = page("milvus", "vLLM").fields
    cut = {"truncate_prompt_tokens": int(settings["truncate_prompt_tokens"])}
    for more in ({}, cut):
        ranked = {"documents": TEXTS, "query": QUERY, **more}
        assert GO.post(urljoin(settings["endpoint"], "/rerank"), ranked).scores == scores
        embedded = {"encoding_format": "float", "input": TEXTS, **more}
        same(GO.post(urljoin(settings["endpoint"], "/v1/embeddings"), embedded).vectors, truth.vectors)
    assert GO.post(urljoin(settings["endpoint"], "/embed"), asked).status == 404  # the provider `tei` here

    openai = page("milvus", "OpenAI")
    [url] = openai.tree["function"]["textEmbedding"]["providers"]["openai"].values()
    asked = {"model": openai.fields["model_name"], "input": TEXTS, "encoding_format": "float"}
    same(GO.post(url, asked, Authorization=KEY).vectors, truth.vectors)


def test_clients_of_jina(served: DaemonProcess, truth: Truth) -> None:
    """HKUDS/LightRAG: lightrag/llm/jina.py, whose default task has no prompt; infiniflow/ragflow 0105193a:
    `JinaMultiVecEmbed`, whose inputs are objects. The model has prompts."""
    url = f"{served.api}/jina/v1/embeddings"
    asked = {"model": "embedding", "task": "text-matching", "embedding_type": "base64", "input": TEXTS}
    rows = AIOHTTP.post(url, asked, Authorization=KEY).vectors
    same([np.frombuffer(b64decode(row), np.float32) for row in rows], truth.vectors)

    asked = {
        "model": "embedding",
        "input": [{"text": text} for text in TEXTS],
        "task": "retrieval.query",
        "truncate": True,
    }
    same(REQUESTS.post(url, asked, Authorization=KEY).vectors, truth.embedded(prompt_name="query"))
    refused = REQUESTS.post(url, asked | {"input": [{"image": "aGVsbG8="}]}, Authorization=KEY)
    assert refused.status == 400
    assert "detail" in refused.error


def test_libraries(page: Page, hear: Hear, truth: Truth, scores: Any) -> None:
    """What RAGFlow and Dify do by libraries of PyPI, by these libraries."""
    told = hear(
        "products",
        ragflow=page("ragflow", "Embedding").fields,
        ragflow_others=page("ragflow", "Xinference and VLLM").fields,
        xinference=page("dify", "Xinference").fields,
    )

    for name in ("ragflow_by_openai", "ragflow_by_xinference", "ragflow_by_vllm", "dify_by_xinference"):
        same(told[name], truth.vectors)
    for name in ("ragflow_ranks_by_vllm", "dify_ranks_by_xinference"):
        assert told[name] == scores
    assert told["ragflow_wrong_base_url"].startswith("NotFoundError")
