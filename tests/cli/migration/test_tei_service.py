"""Containers of Text Embeddings Inference: every flag and variable, ports, GPUs, directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cli.migration.conftest import Convert

from teimgr.cli.migration.draft import KeyOutcome
from teimgr.cli.migration.tei_service import variable_of
from teimgr.config.instance_keys import FLAGS, REFUSED, parse

IMAGE = "image: ghcr.io/huggingface/text-embeddings-inference:1.9"
# A value of each flag that is not its default, and what it becomes: a key, a flag of extra_args, or nothing.
VALUES: dict[str, tuple[str, Any]] = {
    "--max-batch-tokens": ("32768", {"max_batch_tokens": 32768}),
    "--max-concurrent-requests": ("64", {"max_concurrent_requests": 64}),
    "--pooling": ("cls", {"pooling": "cls"}),
    "--dtype": ("float16", {"dtype": "float16"}),
    "--revision": ("main", {"revision": "main"}),
    "--trust-remote-code": ("true", {"trust_remote_code": True}),
    "--served-model-name": ("other", "extra"),
    "--max-batch-requests": ("4", "extra"),
    "--max-client-batch-size": ("64", "extra"),
    "--auto-truncate": ("false", "extra"),
    "--default-prompt-name": ("query", "extra"),
    "--default-prompt": ("query: ", "extra"),
    "--payload-limit": ("4000000", "extra"),
    "--api-key": ("a-secret-key", "extra"),
    "--cors-allow-origin": ("https://app.example", "extra"),
    "--tokenization-workers": ("3", None),
    "--prometheus-port": ("9200", None),
    "--hostname": ("0.0.0.0", None),
    "--uds-path": ("/tmp/x", None),
    "--otlp-endpoint": ("http://collector:4317", None),
    "--otlp-service-name": ("mine", None),
    "--json-output": ("true", None),
    "--disable-spans": ("true", None),
    "--port": ("8080", None),
    "--dense-path": ("2_Dense", None),
    "--hf-token": ("hf_secret", None),
    "--hf-api-token": ("hf_secret", None),
    "--huggingface-hub-cache": ("/cache", None),
}


def test_every_flag_of_the_declaration_is_tried() -> None:
    assert VALUES.keys() == {*FLAGS, *REFUSED} - {"--kind", "--model-id", "-p"}


@pytest.mark.parametrize("flag", VALUES)
@pytest.mark.parametrize("form", ["command", "environment"])
def test_each_flag_and_its_variable_is_carried_over_or_reported(
    converted_service: Convert, flag: str, form: str
) -> None:
    value, becomes = VALUES[flag]
    given = {
        "command": f'command: ["--model-id", "org/model", "{flag}", "{value}"]',
        "environment": f"command: --model-id=org/model\nenvironment:\n  {variable_of(flag)}: '{value}'",
    }[form]
    done = converted_service(f"{IMAGE}\n{given}\n")

    [instance] = done.instances
    keys = {name: each for name, each in instance.items() if name not in ("name", "model_id", "extra_args")}
    assert keys == (becomes if isinstance(becomes, dict) else {})
    assert instance.get("extra_args", []) == ([flag, value] if becomes == "extra" else [])
    parse(instance.get("extra_args", []))
    if flag != "--huggingface-hub-cache":  # which says what the mount is for
        assert done.found(f"{form} {flag}" if form == "command" else f"{form}.{variable_of(flag)}").note or becomes
    assert not [each for each in done.draft.findings if "secret" in f"{each.target}{each.note}"]


def test_the_first_endpoint_of_traces_is_the_daemons(converted: Convert) -> None:
    service = "{image: text-embeddings-inference, command: --model-id m --otlp-endpoint"
    done = converted(compose_yml=f"services:\n  a: {service} 'http://c:4317'}}\n  b: {service} 'http://d:4317'}}\n")

    assert done.table["otel"] == {"endpoint": "http://c:4317"}
    assert [each.outcome for each in done.draft.findings if each.target == "otel.endpoint"] == [
        KeyOutcome.CARRIED,
        KeyOutcome.DECIDE,
    ]


def test_the_command_is_stronger_than_the_environment(converted_service: Convert) -> None:
    done = converted_service(
        f"{IMAGE}\ncommand: [--model-id=m, --pooling, cls, -p, '9']\nenvironment: [POOLING=mean, MODEL_ID=n]\n"
    )

    assert done.instances == [{"name": "tei", "model_id": "m", "pooling": "cls"}]
    assert done.found("environment.POOLING").note == "the command's --pooling is stronger"


def test_a_dense_by_its_path_needs_a_decision(converted_service: Convert) -> None:
    """stella's compose files choose the width of vectors by it."""
    done = converted_service(f"{IMAGE}\ncommand: --model-id m --dense-path 2_Dense_1024\n")

    assert "services.tei.command --dense-path" in done.decisions()


def test_two_default_prompts_need_a_decision(converted_service: Convert) -> None:
    done = converted_service(f"{IMAGE}\ncommand: --model-id m --default-prompt x --default-prompt-name query\n")

    own = "services.tei.command --default-prompt"
    assert [key for key in done.decisions() if key.startswith(own)] == [own, f"{own}-name"]
    assert done.instances == [{"name": "tei", "model_id": "m"}]


def test_what_is_not_known_is_reported_and_left_out(converted_service: Convert) -> None:
    done = converted_service(
        f"{IMAGE}\ncommand: --model-id m stray --unknown x --dtype int4 --max-batch-tokens 0 --json-output\n"
        "environment: {WHAT: x, LOG_LEVEL: debug}\nprivileged: 'true'\n"
    )

    assert done.instances == [{"name": "tei", "model_id": "m"}]
    own = "services.tei.command"
    assert [key for key in done.decisions() if key.startswith(own)] == [
        own,
        f"{own} --unknown",
        f"{own} --dtype",
        f"{own} --max-batch-tokens",
    ]
    for key in ("environment.WHAT", "environment.LOG_LEVEL", "privileged", "command --json-output"):
        assert done.found(key).outcome is KeyOutcome.NONE


@pytest.mark.parametrize("words", ["--api-key ${KEY} --auto-truncate", "--api-key=${KEY}", "--port ${KEY} --api-key"])
def test_a_flag_is_not_the_value_of_the_one_before_it(converted_service: Convert, words: str) -> None:
    done = converted_service(f"{IMAGE}\ncommand: --model-id m --revision main {words}\n")
    assert done.found("command --api-key").outcome is KeyOutcome.DECIDE
    assert "a variable that is not set" in done.found("command --api-key").note
    assert done.instances[0]["revision"] == "main"
    assert "--api-key" not in done.instances[0].get("extra_args", ())


def test_an_empty_variable_needs_a_decision(converted_service: Convert) -> None:
    done = converted_service(f"{IMAGE}\ncommand: --model-id m\nenvironment: {{API_KEY: '${{KEY}}'}}\n")
    assert done.found("environment.API_KEY").outcome is KeyOutcome.DECIDE
    assert "extra_args" not in done.instances[0]


def test_defaults_are_the_same(converted_service: Convert) -> None:
    done = converted_service(
        f"{IMAGE}\ncommand: --model-id m --max-batch-tokens 16384 --auto-truncate --payload-limit 2000000\n"
    )

    assert done.instances == [{"name": "tei", "model_id": "m"}]
    assert [each.key for each in done.draft.findings if each.outcome is KeyOutcome.SAME] == [
        "command --max-batch-tokens",
        "command --auto-truncate",
        "command --payload-limit",
        "image (no --dtype)",
    ]


def test_several_origins(converted_service: Convert) -> None:
    done = converted_service(f"{IMAGE}\ncommand: --model-id m --cors-allow-origin a --cors-allow-origin b\n")

    assert done.instances[0]["extra_args"] == ["--cors-allow-origin", "a", "--cors-allow-origin", "b"]


@pytest.mark.parametrize(
    ("ports", "command", "port", "settings"),
    [
        ("['127.0.0.1:8081:80']", "", 8081, {}),
        ("['8081:80']", "", 8081, {"instance_host": "0.0.0.0"}),
        ("['192.0.2.1:8081:3000']", "--port 3000", 8081, {"instance_host": "192.0.2.1"}),
        ("['127.0.0.1:9000:80']", "", 9000, {"api_port": 9002}),
        ("['127.0.0.1:9001:80']", "", 9001, {"grpc_port": 9002}),
        ("['127.0.0.1:80:80']", "", None, {"instance_host": "127.0.0.1"}),
        ("['80']", "", None, {}),
        ("[]", "", None, {}),
    ],
)
def test_the_published_port_is_the_instances(
    converted_service: Convert, ports: str, command: str, port: int | None, settings: dict[str, Any]
) -> None:
    done = converted_service(f"{IMAGE}\ncommand: --model-id m {command}\nports: {ports}\n")

    assert done.instances[0].get("port") == port
    expected = {name: value for name, value in settings.items() if value != "127.0.0.1"}
    assert {name: value for name, value in done.table.items() if name != "instances"} == expected
    assert (port is None) == ("services.tei.ports" in done.decisions())


def test_the_metrics_port_of_a_grpc_image(converted_service: Convert) -> None:
    image = IMAGE + "-grpc"
    done = converted_service(
        f"{image}\ncommand: --model-id m\nports: ['127.0.0.1:8081:80', '127.0.0.1:9200:9000', '7:7']\n"
    )

    assert (done.instances[0]["port"], done.instances[0]["prometheus_port"]) == (8081, 9200)
    assert done.found("ports").note == "7 to 7: teimgr has nothing that listens there"


def reserved(device: str) -> str:
    return f"deploy: {{resources: {{reservations: {{devices: [{device}]}}}}}}"


@pytest.mark.parametrize(
    ("table", "gpu"),
    [
        (reserved("{driver: nvidia, device_ids: ['1'], capabilities: [gpu]}"), 1),
        (reserved("{driver: nvidia, count: 1, capabilities: [gpu]}"), None),
        (reserved("{capabilities: [tpu]}"), None),
        ("gpus: all", None),
        ("gpus: [{driver: nvidia, device_ids: ['0', '3']}]\nenvironment: {CUDA_VISIBLE_DEVICES: '1'}", 3),
        ("runtime: nvidia\nenvironment: {NVIDIA_VISIBLE_DEVICES: '2'}", 2),
        ("runtime: nvidia\nenvironment: {NVIDIA_VISIBLE_DEVICES: all}", None),
        ("environment: {CUDA_VISIBLE_DEVICES: '0,1'}", 0),
        ("environment: {CUDA_VISIBLE_DEVICES: GPU-0fda}", None),
    ],
)
def test_the_gpu_of_the_container_is_that_of_the_host(converted_service: Convert, table: str, gpu: int | None) -> None:
    done = converted_service(f"{IMAGE}\ncommand: --model-id m\n{table}\n")

    assert done.instances[0].get("gpu_id") == gpu
    assert ("environment.CUDA_VISIBLE_DEVICES" in str(done.decisions())) == ("GPU-" in table)


def test_directories_and_the_cache_of_models(converted_service: Convert, tmp_path: Path) -> None:
    done = converted_service(f"{IMAGE}\ncommand: --model-id /data/m\nvolumes: ['./data:/data']\n")
    assert done.instances[0]["model_id"] == str(tmp_path / "data" / "m")
    assert done.draft.environment == {"HF_HUB_CACHE": str(tmp_path / "data")}

    done = converted_service(f"{IMAGE}\ncommand: --model-id /baked/in\nvolumes: ['models:/data']\n")
    assert done.instances[0]["model_id"] == "/baked/in"
    assert "services.tei.command --model-id" in done.decisions()
    assert (done.found("volumes /data").outcome, done.draft.environment) == (KeyOutcome.NONE, {})


def test_processors_and_replicas(converted_service: Convert) -> None:
    done = converted_service(
        f"{IMAGE}\ncommand: --model-id m\ncpus: '2.5'\ndeploy: {{replicas: 3, resources: {{limits: {{memory: 2g}}}}}}\n"
    )

    assert done.instances[0] == {"name": "tei", "model_id": "m", "threads": 2, "replicas": 3}
    assert done.found("limits.memory").outcome is KeyOutcome.NONE


def test_a_service_without_a_model_is_left_out(converted: Convert) -> None:
    service = "image: text-embeddings-inference"
    done = converted(compose_yml=f"services:\n  a: {{{service}}}\n  b: {{{service}, command: --model-id m}}\n")

    assert [each["name"] for each in done.instances] == ["b"]
    assert "services.a.command --model-id" in done.decisions()


@pytest.mark.parametrize(
    ("image", "command", "dtype"),
    [("cpu-1.9", "", "float32"), ("cpu-1.9", "--dtype float16", "float16"), ("1.9", "", None), ("89-1.9", "", None)],
)
def test_vectors_of_a_cpu_image_stay_float32(
    converted_service: Convert, image: str, command: str, dtype: str | None
) -> None:
    done = converted_service(f"image: text-embeddings-inference:{image}\ncommand: --model-id m {command}\n")

    assert done.instances[0].get("dtype") == dtype


def test_the_value_of_a_variable_is_left_out_only_where_it_is_a_secret(converted_service: Convert) -> None:
    made = converted_service("""
        image: ghcr.io/huggingface/text-embeddings-inference:cpu-1.9
        command: --model-id org/model
        environment: {HF_TOKEN: hf_of_mine, HF_ENDPOINT: "http://mirror.example"}
    """)

    assert made.draft.environment == {"HF_TOKEN": "", "HF_ENDPOINT": "http://mirror.example"}
    assert made.found("HF_TOKEN").note == "its value is not written anywhere"
    assert made.found("HF_ENDPOINT").note == ""
