"""What concerns a whole import: names, ports, the services that stay, and variables."""

from __future__ import annotations

import pytest
from tests.migration.conftest import Convert

from teimgr.errors import InvalidConfig
from teimgr.migration.draft import Outcome, free_name

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
    assert done.found("services.app.image").outcome is Outcome.NONE
    assert "pw" not in str(done.draft.findings)


def test_variables_without_a_value_need_a_decision(converted: Convert) -> None:
    done = converted(
        {"MODEL": "org/m"},
        compose_yml="services:\n  a: {image: 'text-embeddings-inference:${TAG}', command: '--model-id ${MODEL}'}\n",
    )

    assert done.instances == [{"name": "a", "model_id": "org/m"}]
    assert "${TAG}" in done.decisions()


def test_decisions_are_comments_of_their_instance(converted: Convert) -> None:
    from teimgr.migration.conversion import toml_of

    done = converted(
        compose_yml="services:\n  a: {image: text-embeddings-inference, command: --model-id m --x\u2028y 1}\n"
    )

    assert "# Decide: command --x?y: not a flag of TEI 1.9: left out\n[[instances]]\n" in toml_of(done.draft)


def test_a_file_without_a_model_is_refused_with_what_it_has(converted: Convert) -> None:
    with pytest.raises(InvalidConfig, match="its services are postgres:17"):
        converted(compose_yml="services: {db: {image: 'postgres:17'}}")
    with pytest.raises(InvalidConfig, match="no model is named: the service was left out"):
        converted(compose_yml="services: {a: {image: text-embeddings-inference}}")
