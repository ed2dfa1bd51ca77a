"""Forms have a field for every key that REST takes, made from its declaration."""

from __future__ import annotations

from pathlib import Path

from teimgr.api.page.forms import POPULAR, FormField, groups
from teimgr.spec import KEYS, InstanceSpec, updatable


def fields_of(spec: InstanceSpec | None = None) -> dict[str, FormField]:
    chosen = (lambda name: True) if spec is None else updatable
    return {field.name: field for group in groups(chosen, spec, is_cluster=True) for field in group.fields}


def test_every_key_of_rest_has_a_field() -> None:
    assert fields_of().keys() == {name for name, key in KEYS.items() if key.in_rest}
    assert fields_of(InstanceSpec(name="a", model_id="m")).keys() == {name for name in KEYS if updatable(name)}


def test_keys_of_a_cluster_are_shown_in_one_alone() -> None:
    alone = {field.name for group in groups(lambda name: True) for field in group.fields}
    assert fields_of().keys() - alone == {"node", "labels"}


def test_popular_models_are_those_of_the_documents() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/choose-a-model.md").read_text()
    assert all(f"| {model} |" in page for model, _ in POPULAR)


def test_fields_take_what_their_keys_take() -> None:
    widgets = {name: field.widget for name, field in fields_of().items()}
    assert widgets["gpu_id"] == widgets["port"] == widgets["max_concurrent_requests"] == "number"
    assert widgets["max_batch_tokens"] == "auto"
    assert widgets["replicas"] == "count"
    assert widgets["kind"] == widgets["dtype"] == widgets["pooling"] == "choice"
    assert widgets["trust_remote_code"] == "switch"
    assert (widgets["extra_args"], widgets["tags"]) == ("lines", "pairs")
    assert [field.name for field in fields_of().values() if field.required] == ["model_id", "name"]


def test_values_are_as_they_are_entered_and_secrets_are_not_shown() -> None:
    spec = InstanceSpec(
        name="a",
        model_id="m",
        max_batch_tokens=0,
        replicas="per-gpu",
        tags={"team": "search", "x": ""},
        extra_args=("--api-key", "sesame", "--auto-truncate"),
        trust_remote_code=True,
    )
    values = {name: field.value for name, field in fields_of(spec).items()}
    assert values["max_batch_tokens"] == "auto"
    assert values["replicas"] == "per-gpu"
    assert values["tags"] == "team=search\nx="
    assert values["extra_args"] == "--api-key\n***\n--auto-truncate"
    assert values["trust_remote_code"] == "true"
    assert values["gpu_id"] == ""
