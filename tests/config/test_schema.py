"""Conversion of tables into dataclasses: unknown keys, wrong types and ranges are refused by their path."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.config.loaded_settings import MTLS, SECOND, SEED, refused

from teimgr.config import schema
from teimgr.config.settings import Settings
from teimgr.errors import InvalidConfig
from teimgr.spec import InstanceSpec


@pytest.mark.clause("M3.2-unknown")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("api_prot = 1", "api_prot: unknown key 'api_prot'; did you mean 'api_port'?"),
        ("max_parallel_streams = 1", "unknown key 'max_parallel_streams'; did you mean 'grpc_max_parallel_streams'?"),
        ("[grpc]\nport = 1", "grpc: unknown table 'grpc'; did you mean 'grpc_port'?"),
        ("[[instance]]\nname = 'a'", "instance: unknown key 'instance'; did you mean 'instances'?"),
        ("[auth]\nenabeld = true", "auth.enabeld: unknown key 'enabeld'; did you mean 'enabled'?"),
        ("[auth.mtsl]\nca_cert = 'x'", "auth.mtsl: unknown table 'mtsl'"),
        (MTLS + "ca_certs = 'x'", "auth.mtls.ca_certs: unknown key 'ca_certs'; did you mean 'ca_cert'?"),
        (SEED + "prot = 1", "instances[0].prot: unknown key 'prot'; did you mean 'port'?"),
        (
            SEED + SECOND + "auto_start = true",
            "instances[1].auto_start: unknown key 'auto_start'; known: cache_bytes,",
        ),
        (SEED + "wanted_running = false", "instances[0].wanted_running: unknown key"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(file: Path, text: str, says: str) -> None:
    assert says in refused(file, text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("api_port = '9000'", "api_port: must be an integer (got text '9000')"),
        ("api_port = true", "api_port: must be an integer (got boolean true)"),
        ("api_port = 9000.0", "api_port: must be an integer (got number 9000.0)"),
        ("grpc_enabled = 1", "grpc_enabled: must be true or false (got integer 1)"),
        ("state_file = 1", "state_file: must be a path (got integer 1)"),
        ("restart_backoff_secs = 'x'", "restart_backoff_secs: must be a number"),
        ("models = 'm'", "models: must be a list (got text 'm')"),
        ("models = ['m', 1]", "models[1]: must be text (got integer 1)"),
        ("auth = true", "auth: must be a table (got boolean true)"),
        ("instances = 3", "instances: must be a list of tables"),
        ("instances = [3]", "instances[0]: must be a table (got integer 3)"),
        (SEED + "extra_args = ['--dtype', 1]", "instances[0].extra_args[1]: must be text (got integer 1)"),
        ("aliases = 3", "aliases: must be a table (got integer 3)"),
        ("[default_instances]\nranker = 'a'", "default_instances.ranker: unknown"),
        ("[default_instances]\nreranker = 'a/b'", "default_instances.reranker: "),
        ("[aliases]\na = 3", "aliases.a: must be text (got integer 3)"),
        ("[aliases]\na = ''", "aliases.a: neither an alias nor its target may be empty"),
        ("[aliases]\na = 'b'\nb = 'c'", "aliases.a: 'b' is an alias itself"),
        ("aliases = {a = 'm'}\n" + SEED, "aliases.a: is the name of an instance"),
        ("[otel]\nsample_ratio = 1.5", "otel.sample_ratio: must be <= 1 (got 1.5)"),
        ("[otel]\nendpont = 'x'", "otel.endpont: unknown key 'endpont'; did you mean 'endpoint'?"),
        ("templates = 3", "templates: must be a table of tables"),
        ("templates = {a = 3}", "templates.a: must be a table (got integer 3)"),
        ("[[webhooks]]\nevents = []", "webhooks[0].url: is required"),
        ("[[webhooks]]\nurl = 'x'", "webhooks[0].url: must begin with http:// or https://"),
        (
            "[[webhooks]]\nurl = 'http://x'\nevents = ['run']",
            "webhooks[0].events[0]: unknown 'run'; did you mean 'running'",
        ),
        ("arrow_output_dtype = 'f64'", "arrow_output_dtype: must be one of 'f32', 'f16' (got text 'f64')"),
        ("log_level = 'loud'", "log_level: no level 'loud'"),
        ("api_port = 65536", "api_port: API port must be <= 65535 (got 65536)"),
        ("grpc_port = 0", "grpc_port: must be >= 1 (got 0)"),
        ("health_check_interval_secs = 0", "health_check_interval_secs: must be >= 1 (got 0)"),
        ("cpu_worker_nice = 14", "cpu_worker_nice: must be <= 13 (got 14)"),
        ("grpc_max_message_size_mb = 2048", "grpc_max_message_size_mb: must be <= 2047"),
        ("mux_processes = 0", "mux_processes: must be >= 1"),
        (SEED + "max_batch_tokens = -1", "instances[0].max_batch_tokens: must be >= 0 (got -1)"),
        (SEED + "gpu_id = -1", "instances[0].gpu_id: must be >= 0 (got -1)"),
        ("[[instances]]\nname = 'a'", "instances[0].model_id: is required"),
        ("[[instances]]\nmodel_id = 'm'", "instances[0].name: is required"),
        (SEED + "dtype = 'int3'", "instances[0].dtype: must be one of"),
        (SEED + "kind = 'llm'", "instances[0].kind: must be one of embedding, sparse, multi-vector"),
        (SEED + "trust_remote_code = 1", "instances[0].trust_remote_code: must be"),
    ],
)
def test_a_wrong_type_or_number_is_refused_by_its_path(file: Path, text: str, says: str) -> None:
    assert refused(file, text).startswith(says)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([field.name for field in fields(Settings)]), PLAIN, max_size=3))
def test_any_plain_table_is_read_or_refused_with_a_path(table: dict[str, object]) -> None:
    try:
        values = schema.read(Settings, table)
    except InvalidConfig as error:
        assert any(error.message.startswith(name) for name in table)
    else:
        assert set(values) == set(table)


def test_the_types_of_a_table_are_evaluated_once_not_for_each_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"name": "a", "model_id": "m"}
    first = schema.build(InstanceSpec, entry)
    monkeypatch.delattr(schema, "get_type_hints")
    assert schema.build(InstanceSpec, entry) == first
