"""Typical mistakes at the command line and over REST, each with a part of what a person must be told."""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    """A command line on a daemon with `static`, `ranker` and `classes`, and what its output must have.

    `{folder}` stands for a folder with `texts.txt`, `bad.toml`, `broken.parquet` and the empty `empty.txt`.
    """

    line: str
    says: str


MISTAKES = (
    Mistake("pss", "No such command"),
    Mistake("create", "Missing argument"),
    Mistake("create x", "name a model"),
    Mistake("create static m", "`teimgr edit`"),
    Mistake("create a/b {folder}", "choose another name"),
    Mistake("create x {folder}/none --wait --timeout 60", "none"),
    Mistake("create x {folder} --wait --timeout 60", "config.json"),
    Mistake("create x m --dtype float8", "one of"),
    Mistake("create x m --port 80", "1024"),
    Mistake("create x m --port no", "port"),
    Mistake("create x m --replicas 0", "replicas"),
    Mistake("create x m --gpu-id 7", "GPU"),
    Mistake("create x m --pooling avg", "pooling"),
    Mistake("create x m --tag a", "KEY=VALUE"),
    Mistake("create x m --pinned yes", "true or false"),
    Mistake("create x m --template none", "template"),
    Mistake("create x m --max-batch-tokens many", "max_batch_tokens"),
    Mistake("create x m --dtpye float32", "--dtype"),
    Mistake("edit statik --replicas 2", "did you mean 'static'?"),
    Mistake("edit static --port 8081", "port"),
    Mistake("edit static --kind nope", "kind"),
    Mistake("edit static", "--replicas 2"),
    Mistake("rm nope -y", "`teimgr ps`"),
    Mistake("rm static static -y", "twice"),
    Mistake("start static", "already running"),
    Mistake("start nope", "not found"),
    Mistake("stop nope", "not found"),
    Mistake("wait nope", "not found"),
    Mistake("show nope", "the daemon's instances are"),
    Mistake("logs nope", "not found"),
    Mistake("logs static --level loud", "level"),
    Mistake("logs static --since yesterday", "since"),
    Mistake("events --kind crushed", "crashed"),
    Mistake("events nope", "nope"),
    Mistake("embed hi -i nope", "not found"),
    Mistake("embed hi -i ranker", "`teimgr rerank QUERY TEXT… -i ranker`"),
    Mistake("embed hi -i static --dimensions 100000", "dimensions"),
    Mistake("embed hi -i static --prompt-name none", "prompt"),
    Mistake("embed hi -i static --expect-fingerprint 12", "fingerprint"),
    Mistake("embed {folder}/no.txt -o {folder}/v.npy -i static", "no such file"),
    Mistake("embed {folder}/broken.parquet -o {folder}/v.npy -i static", "broken.parquet"),
    Mistake("embed {folder}/texts.txt -o {folder}/v.xyz -i static", ".parquet"),
    Mistake("embed {folder}/texts.txt -o {folder}/w.npy -i ranker", "embedding"),
    Mistake("rerank a b -i static", "`teimgr embed TEXT -i static`"),
    Mistake("classify a -i static", "`teimgr embed TEXT -i static`"),
    Mistake("similarity a b -i classes", "`teimgr classify TEXT -i classes`"),
    Mistake("edit static --prompt-name query", "No such option"),
    Mistake("bench nope", "not found"),
    Mistake("bench static --mode rerank", "rerank"),
    Mistake("models rm never/was", "never/was"),
    Mistake("models pull never/was", "never/was"),
    Mistake("models check {folder}/none", "none"),
    Mistake("plan --nope", "No such option"),
    Mistake("plan --apply", "--apply needs FILE"),
    Mistake("recommendations --apply x", "no longer recommended"),
    Mistake("explain OVERLODED", "OVERLOADED"),
    Mistake("usage --by colour", "key"),
    Mistake("config check {folder}/bad.toml", "api_port"),
    Mistake("config check {folder}/none.toml", "none.toml"),
    Mistake("context use nope", "no context 'nope'"),
    Mistake("context add a htp://x", "http://host:port"),
    Mistake("import {folder}/texts.txt -o {folder}/out.toml", "texts.txt"),
    Mistake("ps --url http://127.0.0.1:1", "Connection refused"),
    Mistake("ps --status sleeping", "running"),
    Mistake("ps --context nope", "no context 'nope'"),
    Mistake("ps --api-key-file {folder}/none.key", "none.key"),
    Mistake("ps --ca {folder}/none.pem --url https://127.0.0.1:1", "none.pem"),
)


class RestMistake(NamedTuple):
    """A request to the same daemon, and what its answer must have; a body that is no text is sent as JSON."""

    method: str
    path: str
    says: str
    body: object = None
    content_type: str = "application/json"


_NEW = {"name": "x", "model_id": "m"}

REST_MISTAKES = (
    RestMistake("GET", "/instance", "did you mean /instances?"),
    RestMistake("GET", "/api/v1/instances", "did you mean /instances?"),
    RestMistake("PUT", "/instances", "allowed: GET, HEAD, POST"),
    RestMistake("GET", "/instances?state=running", "did you mean 'status'?"),
    RestMistake("GET", "/instances?status=up", "running"),
    RestMistake("GET", "/instances/nope", "'nope'"),
    RestMistake("POST", "/instances", "name", {}),
    RestMistake("POST", "/instances", "JSON", "name=x"),
    RestMistake("POST", "/instances", "application/json", "name=x", "application/x-www-form-urlencoded"),
    RestMistake("POST", "/instances", "list", [_NEW]),
    RestMistake("POST", "/instances", "model_id", {"name": "x"}),
    RestMistake("POST", "/instances", "did you mean 'model_id'?", {"name": "x", "model": "m"}),
    RestMistake("POST", "/instances", "port", _NEW | {"port": "8080a"}),
    RestMistake("POST", "/instances", "port", _NEW | {"port": 80}),
    RestMistake("POST", "/instances", "float32", _NEW | {"dtype": "fp32"}),
    RestMistake("POST", "/instances", "'per-gpu' or a valid integer", _NEW | {"replicas": "two"}),
    RestMistake("POST", "/instances", "tags", _NEW | {"tags": ["a"]}),
    RestMistake("POST", "/instances", "GPU", _NEW | {"gpu_id": 3}),
    RestMistake("POST", "/instances", "extra_args", _NEW | {"extra_args": "--dtype float32"}),
    RestMistake("POST", "/instances", "'static' already exists", _NEW | {"name": "static"}),
    RestMistake("PATCH", "/instances/static", "port", {"port": 9999}),
    RestMistake("PATCH", "/instances/static", "replicas", {"replica": 2}),
    RestMistake("POST", "/instances/static/start", "already running"),
    RestMistake("POST", "/instances/static/reload", "No route"),
    RestMistake("GET", "/instances/static/logs?start=first", "start"),
    RestMistake("GET", "/instances/static/logs?level=loud", "level"),
    RestMistake("GET", "/events?event=crushed", "crashed"),
    RestMistake("GET", "/events?last=many", "last"),
    RestMistake("DELETE", "/models/never/seen", "never/seen"),
    RestMistake("POST", "/models", "model_id", {}),
    RestMistake("POST", "/v1/embeddings", "input", {"model": "static"}),
    RestMistake("POST", "/v1/embeddings", "nope", {"model": "nope", "input": "a"}),
    RestMistake("POST", "/v1/embeddings", "static", {"model": "statik", "input": "a"}),
    RestMistake("POST", "/v1/embeddings", "empty", {"model": "static", "input": []}),
    RestMistake("POST", "/v1/embeddings", "dimensions", {"model": "static", "input": "a", "dimensions": -1}),
    RestMistake("POST", "/v1/embeddings", "base64", {"model": "static", "input": "a", "encoding_format": "int4"}),
    RestMistake("POST", "/v1/embeddings", "embedding", {"model": "ranker", "input": "a"}),
    RestMistake("POST", "/v1/embeddings", "JSON", "{'model': 'static'}"),
    RestMistake("POST", "/v1/embedding", "did you mean /v1/embeddings?", {"model": "static", "input": "a"}),
    RestMistake("POST", "/v1/chat/completions", "generates no texts", {"model": "static", "messages": []}),
    RestMistake("POST", "/v1/rerank", "documents", {"model": "ranker", "query": "a"}),
    RestMistake("POST", "/v1/rerank", "rerank", {"model": "static", "query": "a", "documents": ["b"]}),
    RestMistake("POST", "/v1/rerank", "top_n", {"model": "ranker", "query": "a", "documents": ["b"], "top_n": "x"}),
    RestMistake("GET", "/v1/embeddings", "POST"),
    RestMistake("POST", "/instances/static/embed", "inputs", {"input": "a"}),
    RestMistake("POST", "/instances/static/embed", "inputs", {"inputs": 5}),
    RestMistake("POST", "/instances/static/rerank", "re-ranker", {"query": "a", "texts": ["b"]}),
    RestMistake("POST", "/instances/ranker/rerank", "texts", {"query": "a", "documents": ["b"]}),
    RestMistake("POST", "/instances/nope/embed", "nope", {"inputs": "a"}),
    RestMistake("POST", "/plan", "instances", {"instance": []}),
    RestMistake("GET", "/usage?by=colour", "key"),
)
