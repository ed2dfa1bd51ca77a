"""Infinity servers: several models in one service, options of each, the address and the key."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from tests.cli.migration.conftest import Convert

from teimgr.cli.migration.draft import KeyOutcome

IMAGE = "image: michaelf34/infinity:0.0.77"
FLAGS = """
command: >-
  v2 --model-id org/a --model-id org/b --served-model-name first --served-model-name second
  --batch-size 8 --batch-size 64 --revision main --dtype float16 --pooling-method cls --port 7997
"""
VARIABLES = """
environment:
  INFINITY_MODEL_ID: "org/a;org/b;"
  INFINITY_SERVED_MODEL_NAME: first;second
  INFINITY_BATCH_SIZE: 8;64
  INFINITY_REVISION: main
  INFINITY_DTYPE: float16
  INFINITY_POOLING_METHOD: cls
  INFINITY_PORT: 7997
"""


@pytest.mark.parametrize("given", [FLAGS, VARIABLES])
def test_an_instance_for_each_model(converted_service: Convert, given: str) -> None:
    done = converted_service(f"{IMAGE}\nports: ['127.0.0.1:7000:7997']\n{given}")

    of_all: dict[str, Any] = {"revision": "main", "dtype": "float16", "pooling": "cls"}
    assert done.instances == [
        {"name": "tei-first", "model_id": "org/a", **of_all, "extra_args": ["--max-batch-requests", "8"]},
        {"name": "tei-second", "model_id": "org/b", **of_all, "extra_args": ["--max-batch-requests", "64"]},
    ]
    assert done.table["aliases"] == {"first": "tei-first", "second": "tei-second"}
    assert (done.table["api_port"], "api_host" in done.table) == (7000, False)
    assert done.decisions() == []


def test_an_address_that_others_reach_needs_a_key(converted_service: Convert) -> None:
    open_ = converted_service(f"{IMAGE}\nports: ['7997:7997']\ncommand: v2 --model-id org/a\n")
    assert "api_host" not in open_.table
    assert open_.found("ports").outcome is KeyOutcome.DECIDE

    key = "k" * 20
    done = converted_service(f"{IMAGE}\nports: ['7997:7997']\ncommand: v2 --model-id org/a --api-key {key}\n")
    assert done.table["api_host"] == "0.0.0.0"
    digest = hashlib.sha256(key.encode()).hexdigest()
    assert done.table["auth"] == {
        "enabled": True,
        "providers": ["api_keys"],
        "api_keys": [{"name": "tei", "key_sha256": digest, "rights": ["inference", "read"]}],
    }
    assert key not in str(done.table) + str(done.draft.findings)
    assert "services.tei.command --api-key" in done.decisions()


def test_a_served_directory_has_its_names_as_aliases(converted_service: Convert, tmp_path: Path) -> None:
    done = converted_service(f"{IMAGE}\nvolumes: ['./m:/models']\ncommand: v2 --model-id /models/a\n")

    assert done.instances == [{"name": "tei", "model_id": str(tmp_path / "m" / "a")}]
    assert done.table["aliases"] == {"models/a": "tei"}


def test_a_value_that_an_instance_cannot_have_is_left_to_decide(converted_service: Convert) -> None:
    done = converted_service(f"{IMAGE}\ncommand: [v2, --model-id, org/a, --revision, -engine]\n")

    assert done.instances == [{"name": "tei", "model_id": "org/a"}]
    assert "must be the name of a branch, tag or commit" in done.found("command --revision").note


def test_options_without_a_counterpart(converted_service: Convert) -> None:
    done = converted_service(
        f"{IMAGE}\ncommand: v2 --model-id org/a --engine optimum --no-model-warmup --dtype int8 --device-id 0,1"
        " --url-prefix /v1 --trust-remote-code --what x --permissive-cors\n"
        "environment: {INFINITY_QUEUE_SIZE: '1', DO_NOT_TRACK: '1'}\n"
    )

    assert done.instances == [{"name": "tei", "model_id": "org/a", "trust_remote_code": True, "replicas": 2}]
    assert done.table["allowed_origins"] == ["*"]
    own = "services.tei.command "
    assert [key.removeprefix(own) for key in done.decisions() if key.startswith(own)] == [
        "--url-prefix",
        "--dtype",
        "--trust-remote-code",
        "--what",
    ]
    for key in ("--engine", "--no-model-warmup", "environment.INFINITY_QUEUE_SIZE", "environment.DO_NOT_TRACK"):
        assert done.found(key).outcome is KeyOutcome.NONE


def test_two_servers_share_the_one_rest_port(converted: Convert) -> None:
    service = "{image: michaelf34/infinity, command: v2 --model-id org/a, ports: ['127.0.0.1:%d:7997']}"
    done = converted(compose_yml=f"services:\n  a: {service % 7997}\n  b: {service % 7998}\n")

    assert done.table["api_port"] == 7997
    assert [each["name"] for each in done.instances] == ["a", "b"]
    assert "services.b.ports" in done.decisions()


def test_a_number_of_values_that_does_not_fit(converted_service: Convert) -> None:
    done = converted_service(
        f"{IMAGE}\nenvironment: {{INFINITY_MODEL_ID: a/1;a/2;a/3, INFINITY_BATCH_SIZE: 1;2, INFINITY_DTYPE: float32}}\n"
    )

    assert [each["extra_args"][1] for each in done.instances] == ["1", "1", "1"]
    assert "services.tei.environment.INFINITY_BATCH_SIZE" in done.decisions()
    assert [each["dtype"] for each in done.instances] == ["float32"] * 3


def test_the_database_of_the_same_name_is_another_product(converted: Convert) -> None:
    done = converted(
        compose_yml="services:\n  db: {image: infiniflow/infinity}\n  a: {image: text-embeddings-inference,"
        " command: --model-id m}\n"
    )

    assert [each["name"] for each in done.instances] == ["a"]
    assert done.found("services.db.image").outcome is KeyOutcome.NONE


@pytest.mark.parametrize("words", ["--api-key ${KEY} --device cpu", "--api-key=${KEY}", "--revision main --api-key"])
def test_a_flag_is_not_the_value_of_the_one_before_it(converted_service: Convert, words: str) -> None:
    done = converted_service(f"{IMAGE}\ncommand: v2 --model-id org/a {words}\n")
    assert done.found("command --api-key").outcome is KeyOutcome.DECIDE
    assert "a variable that is not set" in done.found("command --api-key").note
