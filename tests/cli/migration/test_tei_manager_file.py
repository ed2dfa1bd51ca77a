"""tei-manager's configuration and its state file."""

from __future__ import annotations

import pytest
from tests.cli.migration.conftest import Convert

from teimgr.cli.migration.draft import KeyOutcome
from teimgr.errors import InvalidConfig

CONFIG = """
api_port = 9100
grpc_port = 9001
state_file = "/data/tei-manager-state.toml"
tei_binary_path = "/usr/local/bin/text-embeddings-router"
health_check_interval_secs = 10
max_instances = 10
models = ["org/a"]
unknown_key = 1

[auth]
enabled = false

[otel]
endpoint = "http://collector:4317"

[[instances]]
name = "bge"
model_id = "org/a"
port = 8080
max_batch_tokens = 16384
gpu_id = 0
extra_args = ["--dtype", "float16", "--api-key=a-secret-key", "--auto-truncate", "--what", "x"]
"""
STATE = """
last_updated = "2026-03-04T12:00:00.123456789Z"

[[instances]]
name = "bge"
model_id = "org/b"
port = 8081
max_batch_tokens = 1024
max_concurrent_requests = 512
prometheus_port = 9101
extra_args = []
created_at = "2026-03-04T11:59:58.000000001Z"

[[instances]]
name = "other"
model_id = "org/c"
port = 8082
max_batch_tokens = 16384
max_concurrent_requests = 512
extra_args = []
"""


def test_a_configuration(converted: Convert) -> None:
    done = converted(config_toml=CONFIG)

    extra = ["--api-key", "a-secret-key"]
    seed = {"name": "bge", "model_id": "org/a", "port": 8080, "gpu_id": 0, "dtype": "float16", "extra_args": extra}
    assert done.table == {
        "auto_restore_on_restart": False,
        "api_port": 9100,
        "max_instances": 10,
        "models": ["org/a"],
        **dict.fromkeys(("api_host", "grpc_host", "instance_host"), "0.0.0.0"),
        "otel": {"endpoint": "http://collector:4317"},
        "instances": [seed],
    }
    assert done.decisions() == ["instances[0].extra_args --what"]
    for key in ("state_file", "tei_binary_path", "unknown_key"):
        assert done.found(key).outcome is KeyOutcome.NONE
    for key in ("grpc_port", "health_check_interval_secs", "auth"):
        assert done.found(key).outcome is KeyOutcome.SAME
    assert "a-secret-key" not in str(done.draft.findings)


@pytest.mark.parametrize("order", [("config_toml", "state_json"), ("state_json", "config_toml")])
def test_of_a_configuration_and_a_state_the_state_counts(converted: Convert, order: tuple[str, str]) -> None:
    texts = {"config_toml": CONFIG, "state_json": STATE}
    done = converted(**{name: texts[name] for name in order})

    assert done.instances == [
        {"name": "bge", "model_id": "org/b", "port": 8081, "max_batch_tokens": 1024, "prometheus_port": 9101},
        {"name": "other", "model_id": "org/c", "port": 8082},
    ]


def test_a_state_alone(converted: Convert) -> None:
    done = converted(state_toml=STATE)

    assert [each["name"] for each in done.instances] == ["bge", "other"]
    assert done.table.keys() == {"instances"}


def test_values_that_are_not_possible_here_are_left_out(converted: Convert) -> None:
    done = converted(
        config_toml="""
        api_port = 80
        auto_restore_on_restart = true
        [[instances]]
        name = "-odd name-"
        model_id = "org/a"
        port = 443
        pooling = "rms"
        [[instances]]
        name = "no-model"
        """
    )

    assert [each["name"] for each in done.instances] == ["odd-name"]
    assert done.decisions() == ["api_port", "instances[0].port", "instances[0].pooling", "instances[1].model_id"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a = [", "no TOML"),
        ("instances = 1", "instances: must be a list of tables"),
        ("api_port = 9100", "no model of TEI, Infinity, Ollama or tei-manager in it"),
        ("[[instances]]\nname = 'a'\nmodel_id = 'm'\n" * 257, "more than 256 instances"),
    ],
)
def test_what_cannot_be_meant_is_refused(converted: Convert, text: str, why: str) -> None:
    with pytest.raises(InvalidConfig, match=why):
        converted(config_toml=text)
