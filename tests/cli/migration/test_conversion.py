"""What concerns a whole import: names, ports, the services that stay, and variables."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cli.migration.conftest import Convert

from teimgr.cli.migration.conversion import convert, toml_of
from teimgr.cli.migration.draft import KeyOutcome, free_name
from teimgr.config.instance_keys import FLAGS, REFUSED
from teimgr.config.sources import Source, read
from teimgr.errors import InvalidConfig

IMAGES = ("text-embeddings-inference:cpu-1.9-grpc", "michaelf34/infinity")
_SERVICE = "command entrypoint environment env_file ports volumes deploy gpus runtime cpus scale network_mode"
_BELOW = "replicas resources limits reservations devices device_ids capabilities count driver memory source target type"
_VARIABLES = "MODEL_ID PORT API_KEY POOLING CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES OMP_NUM_THREADS HF_HOME"
_INFINITY = "INFINITY_MODEL_ID INFINITY_PORT INFINITY_BATCH_SIZE INFINITY_DEVICE_ID published path"
KEYS = st.sampled_from(f"{_SERVICE} {_BELOW} {_VARIABLES} {_INFINITY}".split())
TEI = "image: text-embeddings-inference, command: --model-id m"


@pytest.mark.parametrize(
    ("wanted", "taken", "name"),
    [
        ("embedder", [], "embedder"),
        ("embedder", ["embedder", "embedder-2"], "embedder-3"),
        ("_odd näme_", [], "odd-n-me"),
        ("actions", [], "actions-model"),
        ("---", [], "model"),
        ("x" * 100, ["x" * 60], "x" * 60 + "-2"),
    ],
)
def test_names_are_made_valid_and_unique(wanted: str, taken: list[str], name: str) -> None:
    assert free_name(wanted, taken) == name


def test_files_with_services_of_the_same_name(converted: Convert) -> None:
    text = f"services:\n  embedder: {{{TEI}, ports: ['127.0.0.1:8081:80']}}\n"
    done = converted(one_yml=text, two_yml=text)

    assert [(each["name"], each.get("port")) for each in done.instances] == [("embedder", 8081), ("embedder-2", None)]
    assert "8081 is the port of embedder" in done.found("ports").note


def test_services_that_stay_and_name_one_that_moves(converted: Convert) -> None:
    done = converted(
        compose_yml=f"""
        services:
          embed: {{{TEI}}}
          app:
            image: example/app
            command: run --url http://user:pw@embed:80/embed
            environment: {{EMBED_URL: "http://embed/embed", OTHER: "http://embedder"}}
          manager: {{image: ghcr.io/nazq/tei-manager}}
          mirror: {{image: registry.local/tei, command: --model-id m}}
        """
    )

    assert [key for key in done.decisions() if not key.startswith("services.embed.")] == [
        "services.app.environment.EMBED_URL",
        "services.app.command",
        "services.manager.image",
        "services.mirror.image",
    ]
    assert done.found("services.app.image").outcome is KeyOutcome.NONE
    assert "pw" not in str(done.draft.findings)


def test_variables_without_a_value_need_a_decision(converted: Convert) -> None:
    done = converted(
        {"MODEL": "org/m"},
        compose_yml="services:\n  a: {image: 'text-embeddings-inference:${TAG}', command: '--model-id ${MODEL}'}\n",
    )

    assert done.instances == [{"name": "a", "model_id": "org/m"}]
    assert "${TAG}" in done.decisions()


def test_decisions_are_comments_of_their_instance(converted: Convert) -> None:
    done = converted(
        compose_yml="services:\n  a: {image: text-embeddings-inference, command: --model-id m --x\u2028y 1}\n"
    )

    assert "# Decide: command --x?y: not a flag of TEI 1.9: left out\n[[instances]]\n" in toml_of(done.draft)


def test_a_file_without_a_model_is_refused_with_what_it_has(converted: Convert) -> None:
    with pytest.raises(InvalidConfig, match="its services are postgres:17"):
        converted(compose_yml="services: {db: {image: 'postgres:17'}}")
    with pytest.raises(InvalidConfig, match="no model is named: the service was left out"):
        converted(compose_yml="services: {a: {image: text-embeddings-inference}}")


def test_files_that_docker_merges_need_a_decision(converted: Convert, tmp_path: Path) -> None:
    (tmp_path / "compose.override.yml").write_text("services: {}\n")
    done = converted(
        compose_yml=f"include: [other.yml]\nvolumes: {{data: }}\nservices:\n  a: {{{TEI}}}\n  b: {{ports: ['1:1']}}\n"
    )

    assert [key for key in done.decisions() if not key.startswith("services.a.")] == [
        "include",
        "compose.override.yml",
        "services.b.image",
    ]
    assert done.found("volumes").outcome is KeyOutcome.NONE


def test_the_output_of_docker_compose_config(converted: Convert) -> None:
    done = converted(
        merged_yml="""
        name: search
        services:
          embedder:
            command: [--model-id, /models/a, --pooling, mean]
            deploy:
              resources:
                reservations:
                  devices: [{capabilities: [gpu], driver: nvidia, count: -1}]
              placement: {}
            environment: {MAX_BATCH_TOKENS: "32768"}
            image: ghcr.io/huggingface/text-embeddings-inference:1.9
            networks: {default: null}
            ports: [{mode: ingress, host_ip: 127.0.0.1, target: 80, published: "8081", protocol: tcp}]
            volumes: [{type: bind, source: /srv/models, target: /models, bind: {create_host_path: true}}]
        networks: {default: {name: search_default}}
        """
    )

    assert done.instances == [
        {
            "name": "embedder",
            "model_id": "/srv/models/a",
            "port": 8081,
            "max_batch_tokens": 32768,
            "pooling": "mean",
        }
    ]
    assert done.decisions() == []


WORDS = st.sampled_from(
    [*FLAGS, *REFUSED, "--model-id", "--model-id=a/b", "v2", "--device-id", "0,1", "cls", "8080", "x", "", "9" * 5000]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | WORDS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(KEYS, VALUES | st.lists(WORDS, max_size=8), max_size=8), st.sampled_from(IMAGES))
def test_any_service_is_converted_to_a_good_configuration_or_refused(
    tmp_path: Path, table: dict[str, object], image: str
) -> None:
    file = tmp_path / "compose.yml"
    file.write_text(yaml.safe_dump({"services": {"a": {"command": "--model-id a/b", **table, "image": image}}}))
    try:
        text = toml_of(convert([file], {}))
    except InvalidConfig:
        return
    (tmp_path / "out.toml").write_text(text)
    read(Source(file=tmp_path / "out.toml", environ={}))
