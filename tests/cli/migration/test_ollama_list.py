"""Ollama's list of models, as its command prints it and as its API has it."""

from __future__ import annotations

import json

import pytest
from tests.cli.migration.conftest import Convert

from teimgr.cli.migration.draft import KeyOutcome
from teimgr.errors import InvalidConfig

LIST = """\
NAME                              ID              SIZE      MODIFIED
nomic-embed-text:latest           0a109f422b47    274 MB    2 weeks ago
nomic-embed-text:v1.5             0a109f422b47    274 MB    2 weeks ago
snowflake-arctic-embed:22m        0f8f2e2f8d2a    46 MB     3 days ago
qwen3-embedding:0.6b-fp16         ac6da0dfba84    1.2 GB    3 days ago
llama3.2:latest                   a80c4f17acd5    2.0 GB    3 days ago
hf.co/org/my-embedder-GGUF:Q4_K_M 6a0746a1ec1a    80 MB     3 days ago
"""


def tags(*models: tuple[str, str, str]) -> str:
    listed = [
        {"name": name, "model": name, "details": {"quantization_level": level, "family": family}}
        for name, level, family in models
    ]
    return json.dumps({"models": listed})


def test_the_output_of_the_command(converted: Convert) -> None:
    done = converted(ollama_txt=LIST)

    assert [(each["name"], each["model_id"]) for each in done.instances] == [
        ("nomic-embed-text", "nomic-ai/nomic-embed-text-v1.5"),
        ("snowflake-arctic-embed-22m", "Snowflake/snowflake-arctic-embed-xs"),
        ("qwen3-embedding-0.6b-fp16", "Qwen/Qwen3-Embedding-0.6B"),
    ]
    assert {(each["load"], each["idle_timeout_secs"]) for each in done.instances} == {("on_demand", 300)}
    assert done.table["aliases"] == {
        "nomic-embed-text:v1.5": "nomic-embed-text",
        "snowflake-arctic-embed:22m": "snowflake-arctic-embed-22m",
        "qwen3-embedding:0.6b-fp16": "qwen3-embedding-0.6b-fp16",
    }
    assert done.found("llama3.2:latest.name").outcome is KeyOutcome.NONE
    unknown = done.found("hf.co/org/my-embedder-GGUF:Q4_K_M.name")
    assert (unknown.outcome, "not known here" in unknown.note) == (KeyOutcome.DECIDE, True)
    assert "not in this list" in done.found("nomic-embed-text:latest.quantization_level").note


def test_the_json_of_the_api_says_what_was_quantised(converted: Convert) -> None:
    models = tags(("all-minilm:latest", "F16", "bert"), ("bge-m3", "Q8_0", "bert"), ("my/own:1", "Q4_0", "nomic-bert"))
    done = converted(tags_json=models)

    assert [each["model_id"] for each in done.instances] == ["sentence-transformers/all-MiniLM-L6-v2", "BAAI/bge-m3"]
    assert "aliases" not in done.table
    assert done.found("all-minilm:latest.quantization_level").outcome is KeyOutcome.CARRIED
    quantised = done.found("bge-m3.quantization_level")
    assert (quantised.outcome, "differ" in quantised.note) == (KeyOutcome.DECIDE, True)
    assert done.decisions() == ["bge-m3.quantization_level", "my/own:1.name"]


@pytest.mark.parametrize(
    ("name", "hub_id"),
    [
        ("all-minilm:33m", "sentence-transformers/all-MiniLM-L12-v2"),
        ("all-minilm:22m-l6-v2-fp16", "sentence-transformers/all-MiniLM-L6-v2"),
        ("nomic-embed-text:137m-v1.5-fp16", "nomic-ai/nomic-embed-text-v1.5"),
        ("mxbai-embed-large:335m", "mixedbread-ai/mxbai-embed-large-v1"),
        ("qwen3-embedding", "Qwen/Qwen3-Embedding-8B"),
        ("granite-embedding:278m", "ibm-granite/granite-embedding-278m-multilingual"),
        ("embeddinggemma:300m", "google/embeddinggemma-300m"),
        ("library/snowflake-arctic-embed2:568m", "Snowflake/snowflake-arctic-embed-l-v2.0"),
    ],
)
def test_a_name_of_the_library_has_its_id_on_the_hub(converted: Convert, name: str, hub_id: str) -> None:
    [instance] = converted(tags_json=tags((name, "F16", ""))).instances
    assert instance["model_id"] == hub_id


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"models": 7}', "not the JSON of /api/tags"),
        ('{"models": [7]}', "not the JSON of /api/tags"),
        ("{", "not JSON"),
        (tags(("llama3.2:latest", "Q4_K_M", "llama")), "no model of TEI, Infinity, Ollama or tei-manager in it"),
        (tags(("snowflake-arctic-embed:9b", "F16", "")), "not known here"),
        (json.dumps({"models": [{"name": f"m{number}"} for number in range(1001)]}), "more than 1000 models"),
    ],
)
def test_what_is_not_a_list_of_embedders_is_refused(converted: Convert, text: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        converted(tags_json=text)
