"""Keys of an instance: TEI's flags in `extra_args`, and what the settings allow."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from teimgr.config.instance_keys import (
    FLAGS,
    LENGTH_LIMIT_CHARS,
    REDACTED,
    check_allowed,
    check_instance,
    parse,
    shown_args,
)
from teimgr.config.settings import Settings
from teimgr.errors import InvalidConfig, ValidationError
from teimgr.spec import InstanceSpec, WorkerSpec


@pytest.mark.clause("M2.4-extra-args")
def test_flags_become_fields_of_the_workers_orders() -> None:
    flags = ["--dtype", "float16", "--pooling=cls", "--max-batch-requests", "8", "--default-prompt", "query: "]

    assert parse(flags) == {
        "dtype": "float16",
        "pooling": "cls",
        "max_batch_requests": 8,
        "default_prompt": "query: ",
    }


def test_every_flag_with_a_meaning_has_a_field() -> None:
    names = {field.name for field in fields(WorkerSpec)}

    assert {flag.field for flag in FLAGS.values() if flag.field} <= names


def test_what_a_model_is_and_may_run_can_be_said_as_flags() -> None:
    assert parse(["--kind", "reranker", "--trust-remote-code"]) == {"kind": "reranker", "trust_remote_code": True}
    assert parse(["--pooling", "splade", "--kind=sparse", "--trust-remote-code=false"]) == {
        "pooling": "splade",
        "kind": "sparse",
        "trust_remote_code": False,
    }


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--auto-truncate"], True),
        (["--auto-truncate", "false"], False),
        (["--auto-truncate=false"], False),
        (["--auto-truncate", "--json-output"], True),
    ],
)
def test_a_bare_boolean_is_true_and_takes_a_value_if_one_follows(flags: list[str], value: bool) -> None:
    assert parse(flags) == {"auto_truncate": value}


def test_flags_that_mean_nothing_here_are_accepted() -> None:
    flags = ["--json-output", "--hostname", "0.0.0.0", "--otlp-endpoint=http://x", "--tokenization-workers", "2"]

    assert parse(flags) == {}


def test_a_value_may_look_like_a_flag() -> None:
    assert parse(["--default-prompt", "--dtype"]) == {"default_prompt": "--dtype"}


@pytest.mark.clause("M2.4-extra-args")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dytpe", "float16"], "unknown flag '--dytpe'; did you mean --dtype?"),
        (["serve"], "unknown flag 'serve'; known: "),
        (["--dtype"], "--dtype needs a value"),
        (
            ["--kind", "llm"],
            "--kind must be one of embedding, sparse, multi-vector, reranker, classifier, token-classifier (got 'llm')",
        ),
        (["--dtype", "int7"], "--dtype must be one of auto, float32, float16, bfloat16, int8 (got 'int7')"),
        (["--max-batch-tokens", "0"], "--max-batch-tokens must be a positive number (got '0')"),
        (["--payload-limit", "²"], "--payload-limit must be a positive number"),
        (["--auto-truncate=yes"], "--auto-truncate must be true or false (got 'yes')"),
        (["--dtype", "auto", "--dtype=auto"], "--dtype is given twice"),
        (["--default-prompt", "a", "--default-prompt-name", "b"], "exclude each other"),
        (["--port", "80"], "--port is not supported: the port is the instance's own field"),
        (["--hf-token=secret"], "set HF_TOKEN in the daemon's environment"),
        (["--api-key", REDACTED], "--api-key must be the key itself"),
        (["--default-prompt", "x" * LENGTH_LIMIT_CHARS], "longer than"),
    ],
)
def test_what_cannot_be_understood_is_refused_by_name(flags: list[str], message: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse(flags)

    assert message in caught.value.message
    assert "secret" not in caught.value.message


def test_a_key_and_origins_are_the_workers() -> None:
    told = parse(["--api-key", "s3cret", "--cors-allow-origin=https://a.example", "--cors-allow-origin", "*"])

    assert told == {"api_key": "s3cret", "cors_allow_origin": ("https://a.example", "*")}


@pytest.mark.parametrize(
    ("flags", "seen"),
    [
        (["--dtype", "auto", "--api-key", "s3cret", "--kind", "sparse"], "--dtype auto --api-key *** --kind sparse"),
        (["--api-key=s3=cret", "--dtype=auto"], "--api-key=*** --dtype=auto"),
        (["--api-key", "--api-key", "--dtype"], "--api-key *** --dtype"),
        (["--api-key"], "--api-key"),
    ],
)
def test_a_key_is_not_shown(flags: list[str], seen: str) -> None:
    assert " ".join(shown_args(flags)) == seen


def test_the_settings_decide_what_instances_may_be(tmp_path: Path) -> None:
    for name in ("models/a", "outside"):
        (tmp_path / name).mkdir(parents=True)
    coded = InstanceSpec(name="a", model_id="org/m", trust_remote_code=True)
    flagged = replace(coded, trust_remote_code=False, extra_args=("--trust-remote-code",))
    inside, outside = (
        InstanceSpec(name="a", model_id=str(tmp_path / name)) for name in ("models/a", "models/../outside")
    )
    for spec in (coded, flagged, inside, outside):
        check_allowed(spec, Settings(allow_remote_code=True))
    strict = Settings(allow_pickled_weights=False, local_model_roots=(str(tmp_path / "models"),))
    for spec in (coded, flagged):
        with pytest.raises(ValidationError, match="allow_remote_code = true"):
            check_allowed(spec, strict)
    with pytest.raises(ValidationError, match="outside of local_model_roots"):
        check_allowed(outside, strict)
    check_allowed(inside, strict)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (
            {"scale_up_wait_ms": 500, "scale_down_wait_ms": 500},
            "scale_down_wait_ms: must be below scale_up_wait_ms, 500",
        ),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas: must be <= max_replicas, 2"),
        ({"min_replicas": 0}, "min_replicas: 0 needs load = 'on_demand'"),
        ({"replicas": "per-gpu", "max_replicas": 2}, "replicas: 'per-gpu' and max_replicas exclude each other"),
    ],
)
def test_keys_of_autoscaling_that_contradict_each_other_are_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        check_instance(replace(InstanceSpec(name="a", model_id="b"), **keys))


def test_zero_replicas_are_allowed_on_demand() -> None:
    check_instance(InstanceSpec(name="a", model_id="b", load="on_demand", min_replicas=0, max_replicas=3))
