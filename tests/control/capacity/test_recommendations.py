"""The rules of recommendations, each with an observation that it is about and one that it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from teimgr.control.capacity.recommendations import Card, Expectation, Observation, recommend, verdict
from teimgr.spec import InstanceSpec, LoadedModel

MODEL = LoadedModel(
    model_id="m",
    model_sha=None,
    dtype="float32",
    device="cpu",
    kind="embedding",
    pooling="mean",
    dimension=384,
    max_input_length=512,
    max_batch_tokens=16384,
    batching="packed",
)
MIB = 2**20


def seen(keys: dict[str, Any] | None = None, **figures: Any) -> Observation:
    """Ten minutes of an instance that has some work, and nothing that should be changed."""
    spec = InstanceSpec(name="a", model_id="m", **keys or {})
    calm = Observation(
        spec=spec,
        model=MODEL,
        span_s=600,
        replicas=1,
        calls=1000,
        texts=1000,
        tokens=60_000,
        batches=500,
        busy_s=60,
        by_tokens=(*[0] * 14, 500),
        held_bytes=400 * MIB,
        batch_bytes=200 * MIB,
    )
    return replace(calm, **figures)


SHORT: dict[str, Any] = {"busy_s": 590, "waiting_s": 8.0, "waited_share": 0.9}
FULL: dict[str, Any] = {"by_tokens": (*[0] * 14, 500), "batches": 500}


@pytest.mark.parametrize(
    ("observation", "id", "patch", "expects"),
    [
        (
            seen(calls=0),
            "idle.a",
            {"load": "on_demand", "idle_timeout_secs": 300},
            Expectation("held_bytes", "at_most", 200 * MIB),
        ),
        (seen(**SHORT), "replicas.a", {"max_replicas": 2}, Expectation("waiting_seconds", "at_most", 4.0)),
        (
            seen({"max_replicas": 3}, replicas=3, **SHORT | {"busy_s": 1790}),
            "replicas.a",
            {"max_replicas": 4},
            Expectation("waiting_seconds", "at_most", 4.0),
        ),
        (
            seen({"replicas": 4}, replicas=4),
            "replicas.a",
            {"replicas": 1},
            Expectation("waiting_seconds", "at_most", 2.0),
        ),
        (
            seen(on_card=True, pays=False, **SHORT),
            "batch_tokens.a",
            {"max_batch_tokens": 32768},
            Expectation("tokens_per_second", "at_least", 1.05 * 60_000 / 590),
        ),
        (
            seen(by_tokens=(0, 0, 0, 500)),
            "batch_tokens.a",
            {"max_batch_tokens": 512},
            Expectation("held_bytes", "at_most", 303.125 * MIB),
        ),
        (
            seen({"dtype": "float32"}, on_card=True, busy_s=400),
            "dtype.a",
            {"dtype": "auto"},
            Expectation("tokens_per_second", "at_least", 1.3 * 150),
        ),
        (
            seen(pays=False, **SHORT),
            "dtype.a",
            {"dtype": "int8"},
            Expectation("tokens_per_second", "at_least", 1.1 * 60_000 / 590),
        ),
        (seen(full_texts=60), "truncated.a", None, None),
        (
            seen(sampled_texts=100, repeated_texts=40),
            "duplicates.a",
            {"cache_bytes": 3 * MIB},
            Expectation("known_share", "at_least", 0.2),
        ),
        (
            seen(busy_s=300, card=Card(1, "H100", 2**33)),
            "device.a",
            {"gpu_id": 1},
            Expectation("tokens_per_second", "at_least", 400.0),
        ),
    ],
)
def test_a_finding_has_its_patch_and_what_it_should_bring(
    observation: Observation, id: str, patch: dict[str, Any] | None, expects: Expectation | None
) -> None:
    (found,) = recommend(observation)
    assert (found.id, found.patch) == (id, patch)
    assert (found.expects is None) == (expects is None)
    if expects is not None:
        assert found.expects is not None
        assert found.expects[:2] == expects[:2]
        assert found.expects.value == pytest.approx(expects.value)
    assert found.evidence
    assert found.effect
    assert found.instance == "a"


@pytest.mark.parametrize(
    "observation",
    [
        seen(),
        seen({"load": "on_demand"}, calls=0),
        seen(waited_share=0.9, waiting_s=8.0),  # it does not compute all the time: something else is slow
        seen({"max_replicas": 3}, replicas=2, **SHORT | {"busy_s": 1190}),  # the load decides, and has room
        seen({"replicas": 2}, replicas=2, busy_s=1150, tokens=1_000_000),
        seen({"dtype": "float32"}, busy_s=400),  # on a CPU
        seen(full_texts=40),
        seen(sampled_texts=100, repeated_texts=9),
        seen({"cache_bytes": MIB}, sampled_texts=100, repeated_texts=40),
        seen(card=Card(1, "H100", 2**33)),  # has next to nothing to do
        seen(replicas=0),
        replace(seen(calls=0), span_s=0.0),
    ],
)
def test_nothing_is_recommended_without_evidence(observation: Observation) -> None:
    assert recommend(observation) == []


def test_a_change_is_judged_by_what_it_should_bring() -> None:
    expects = Expectation("tokens_per_second", "at_least", 1500.0)
    assert verdict(expects, seen(busy_s=30)) == (True, "tokens_per_second is 2,000, expected at least 1,500")
    assert verdict(expects, seen())[0] is False
    assert verdict(expects, seen(texts=3))[0] is None
    waits = Expectation("waiting_seconds", "at_most", 1.0)
    assert verdict(waits, seen(span_s=299.0), min_span_s=300.0) == (None, "299 s are too short to judge")
    assert verdict(waits, seen(span_s=300.0), min_span_s=300.0)[0] is True
    assert verdict(Expectation("held_bytes", "at_most", 400.0 * MIB), seen(span_s=0.0), min_span_s=300.0)[0] is True
    assert verdict(Expectation("held_bytes", "at_most", 300.0 * MIB), seen())[0] is False
    assert verdict(Expectation("held_bytes", "at_most", 400.0 * MIB), seen(texts=0))[0] is True
