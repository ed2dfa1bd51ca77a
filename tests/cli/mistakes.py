"""Sixty typical mistakes at the command line, each with a part of what a person must be told."""

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
    Mistake("bench nope", "not found"),
    Mistake("bench static --mode rerank", "rerank"),
    Mistake("models rm never/was", "never/was"),
    Mistake("models pull never/was", "never/was"),
    Mistake("models check {folder}/none", "none"),
    Mistake("plan --nope", "No such option"),
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
