"""Settings: where they come from, which one wins, and how a wrong one is refused."""

from __future__ import annotations

import re
import stat
from dataclasses import fields
from pathlib import Path

import pytest
from tests.config.loaded_settings import MTLS, SECOND, SEED, load, refused

import teimgr
from teimgr.config.settings import Auth, Mtls, Otel, Settings, Webhook
from teimgr.config.sources import Configuration, Source, effective, plain, read, scalars, unread_variables
from teimgr.errors import InvalidConfig
from teimgr.spec import InstanceSpec, key_of


def certificates(folder: Path) -> str:
    """The three keys of [auth.mtls], naming files that exist."""
    for name in ("ca_cert", "server_cert", "server_key"):
        (folder / name).touch()
    return "".join(f'{name} = "{folder / name}"\n' for name in ("ca_cert", "server_cert", "server_key"))


@pytest.mark.clause("M1.1-listener", "M3.2-keys", "D-restore")
def test_nothing_given_is_the_defaults_of_the_contract() -> None:
    settings = load(None, {})
    assert settings == Settings()
    assert (settings.api_port, settings.grpc_port, settings.grpc_enabled) == (9000, 9001, True)
    assert (settings.instance_port_start, settings.instance_port_end, settings.max_instances) == (8080, 8180, None)
    assert settings.grpc_max_message_size_mb * 2**20 == 41_943_040
    assert {settings.api_host, settings.grpc_host, settings.instance_host} == {"127.0.0.1"}
    assert settings.auto_restore_on_restart
    assert settings.mtls is None
    assert list(settings.warnings()) == []


def test_run_and_log_directories_lie_beside_the_state_file_unless_given() -> None:
    beside = Settings(state_file=Path("/var/lib/t/state.toml"))
    assert (beside.run_dir, beside.log_dir) == (Path("/var/lib/t/run"), Path("/var/lib/t/logs"))
    assert Settings(state_file=Path("/x/s.toml"), run_dir=Path("/run/t")).run_dir == Path("/run/t")


@pytest.mark.clause("M3.1-precedence")
def test_flag_wins_over_environment_over_file_over_default(file: Path) -> None:
    file.write_text("api_port = 7001\ngrpc_port = 7002\nmax_instances = 3\n")
    environ = {"TEI_MANAGER_API_PORT": "7011", "TEIMGR_GRPC_PORT": "7012"}
    settings = load(file, environ, {"api_port": 7021, "log_level": None})
    assert (settings.api_port, settings.grpc_port, settings.max_instances) == (7021, 7012, 3)
    assert settings.log_level == "info"


@pytest.mark.clause("M3.2-environment")
def test_our_variable_wins_over_that_of_tei_manager() -> None:
    environ = {"TEIMGR_API_PORT": "7001", "TEI_MANAGER_API_PORT": "7002"}
    assert load(None, environ).api_port == 7001


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("TEI_MANAGER_API_PORT", "7000", "api_port", 7000),
        ("TEI_MANAGER_STATE_FILE", "/x/s.toml", "state_file", Path("/x/s.toml")),
        ("TEI_MANAGER_HEALTH_CHECK_INTERVAL", "3", "health_check_interval_secs", 3),
        ("TEI_BINARY_PATH", "/bin/sleep", "tei_binary_path", "/bin/sleep"),
        ("TEI_MANAGER_GRPC_PORT", "7001", "grpc_port", 7001),
        ("TEI_MANAGER_GRPC_ENABLED", "false", "grpc_enabled", False),
        ("TEI_MANAGER_LOG_DIR", "/x/logs", "log_dir", Path("/x/logs")),
        ("TEI_MANAGER_GRPC_MAX_STREAMS", "7", "grpc_max_parallel_streams", 7),
        ("TEIMGR_MAX_INSTANCES", "4", "max_instances", 4),
        ("TEIMGR_RESTART_BACKOFF_SECS", "1.5", "restart_backoff_secs", 1.5),
        ("TEIMGR_ARROW_OUTPUT_DTYPE", "f16", "arrow_output_dtype", "f16"),
        ("TEIMGR_RUN_DIR", "/run/t", "run_dir", Path("/run/t")),
        ("TEIMGR_LOG_FORMAT", "pretty", "log_format", "pretty"),
    ],
)
def test_variables_are_read_as_the_type_of_their_key(variable: str, text: str, key: str, value: object) -> None:
    assert getattr(load(None, {variable: text}), key) == value


def test_every_scalar_key_has_its_variable() -> None:
    tables = {
        "instances",
        "models",
        "auth",
        "aliases",
        "default_instances",
        "batches",
        "on_demand",
        "cluster",
        "otel",
        "templates",
        "webhooks",
    }
    tables |= {"allowed_origins", "allowed_hosts", "trusted_proxies", "local_model_roots"}
    tables |= {"media_url_hosts", "media_url_networks"}
    top = {field.name for field in fields(Settings)} - tables
    assert {".".join(scalar.path) for scalar in scalars()} == top | {f"otel.{field.name}" for field in fields(Otel)}


@pytest.mark.clause("N-otel")
def test_a_variable_of_a_table_changes_that_key_of_it(file: Path) -> None:
    file.write_text("[otel]\nendpoint = 'http://a:1'\nsample_ratio = 0.5\n")
    assert load(file, {"TEI_MANAGER_OTEL_ENDPOINT": "http://b:2"}).otel == Otel(endpoint="http://b:2", sample_ratio=0.5)
    assert load(None, {"TEIMGR_OTEL_SAMPLE_RATIO": "0.25"}).otel == Otel(sample_ratio=0.25)
    with pytest.raises(InvalidConfig, match=r"Invalid TEIMGR_OTEL_SAMPLE_RATIO value '2': .*must be <= 1"):
        load(None, {"TEIMGR_OTEL_SAMPLE_RATIO": "2"})


def test_aliases_are_a_table_of_names(file: Path) -> None:
    file.write_text("[aliases]\nsmall = 'BAAI/bge-small-en-v1.5'\n'openai/x' = 'a'\n")
    assert load(file, {}).aliases == {"small": "BAAI/bge-small-en-v1.5", "openai/x": "a"}


@pytest.mark.clause("M3.2-environment")
@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("TEI_MANAGER_API_PORT", "nine", "must be an integer"),
        ("TEI_MANAGER_API_PORT", "", "must be an integer"),
        ("TEIMGR_API_PORT", "80", "API port must be >= 1024 (got 80)"),
        ("TEI_MANAGER_HEALTH_CHECK_INTERVAL", "1.5", "must be an integer"),
        ("TEIMGR_RESTART_BACKOFF_SECS", "x", "must be a number"),
        ("TEI_MANAGER_GRPC_ENABLED", "True", "must be true or false"),
        ("TEIMGR_LOG_FORMAT", "xml", "must be one of 'json', 'pretty'"),
    ],
)
def test_a_bad_variable_is_refused_by_its_name(variable: str, text: str, says: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(None, {variable: text})
    assert caught.value.message.startswith(f"Invalid {variable} value {text!r}")
    assert says in caught.value.message


def test_a_bad_flag_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="API port must be >= 1024"):
        load(None, {}, {"api_port": 80})


@pytest.mark.clause("M3.1-config", "M8-smoke")
def test_a_file_that_is_missing_or_no_toml_is_refused(file: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"nope\.toml: cannot be read: No such file"):
        load(file.with_name("nope.toml"), {})
    assert "line 2" in refused(file, "api_port = 9000\napi_port = = 1\n")
    file.write_bytes(b'log_level = "\xff"')
    with pytest.raises(InvalidConfig, match="utf-8"):
        load(file, {})


@pytest.mark.clause("M3.3-rules", "M3.3-providers")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("api_port = 80", "api_port: API port must be >= 1024 (got 80)"),
        ("grpc_port = 9000", "grpc_port: 9000 is the API port too"),
        ("health_port = 9000", "health_port: 9000 is the API port too"),
        ("ollama_port = 9002\nhealth_port = 9002", "health_port: 9002 is the Ollama port too"),
        ("ollama_port = 9001", "ollama_port: 9001 is the gRPC port too"),
        ("health_port = 9002\n" + SEED + "port = 9002", "Instance 'a' port 9002 conflicts with health port"),
        (
            f"api_socket = '/{'x' * 107}'",
            "api_socket: must be a path of at most 107 bytes (got 108, as an absolute path)",
        ),
        (
            f"grpc_socket = '/{'é' * 50}'",
            "grpc_socket: must be a path of at most 99 bytes (got 101, as an absolute path)",
        ),
        ("api_socket = '/run/a'\ngrpc_socket = '/run/a'", "grpc_socket: /run/a is also the api_socket"),
        ('api_socket = "/run/a\\u0000b"', "api_socket: must not contain a zero byte"),
        ("socket_mode = '0777'", "socket_mode: must be one of '0600', '0660', '0666' (got text '0777')"),
        ("instance_port_start = 80", "instance_port_start must be >= 1024 (got 80)"),
        ("instance_port_end = 8080", "instance_port_end (8080) must be greater than instance_port_start (8080)"),
        (
            "instance_port_end = 8082\nmax_instances = 3",
            "Port range [8080, 8082) only has 2 ports but max_instances is 3",
        ),
        (SEED + SECOND + "port = 80", "instances[1].port: Instance 'b' port must be >= 1024 (got 80)"),
        (SEED + "port = 9000", "instances[0].port: Instance 'a' port 9000 conflicts with API port"),
        (SEED + "port = 9001", "instances[0].port: Instance 'a' port 9001 conflicts with gRPC port"),
        (SEED + "port = 8080\n" + SECOND + "port = 8080", "instances[1].port: Duplicate port 8080 in instance configs"),
        (SEED.replace('"a"', '""'), "instances[0].name: Invalid instance name '': Instance name cannot be empty"),
        (SEED.replace('"a"', "'a/b'"), "cannot contain path separators"),
        (SEED.replace('"a"', "'a\\b'"), "cannot contain path separators"),
        (SEED.replace('"a"', "'actions'"), "the name of a route below /instances"),
        (SEED.replace('"a"', "' a'"), "instances[0].name: Invalid instance name ' a'"),
        (SEED + SEED, "instances[1].name: Duplicate instance name: a"),
        (SEED.replace('"m"', '""'), "instances[0].model_id: cannot be empty"),
        ("restart_backoff_max_secs = 0.01", "restart_backoff_max_secs: must be >= restart_backoff_secs"),
        ("[auth]\nenabled = true", "Authentication is enabled but no providers are configured"),
        ("[auth]\nenabled = true\nproviders = ['oauth']", "auth.providers[0]: unknown provider 'oauth'; known: mtls"),
        ("[auth]\nenabled = true\nproviders = ['mtls']", "mTLS provider enabled but mtls config missing"),
        (
            "[auth]\nenabled = true\nrequire_cert_headers = true\nproviders = ['mtls']",
            "auth.require_cert_headers: must be false",
        ),
        (MTLS + "ca_cert = 'x'\nserver_cert = 'x'", "auth.mtls.server_key: is required"),
    ],
)
def test_a_broken_rule_is_refused_in_the_words_of_the_contract(file: Path, text: str, says: str) -> None:
    assert says in refused(file, text)


@pytest.mark.clause("M3.3-certificates")
@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("ca_cert", "auth.mtls.ca_cert: mTLS CA certificate not found: "),
        ("server_cert", "auth.mtls.server_cert: mTLS server certificate not found: "),
        ("server_key", "auth.mtls.server_key: mTLS server key not found: "),
    ],
)
def test_certificates_must_exist(file: Path, tmp_path: Path, key: str, says: str) -> None:
    text = MTLS + certificates(tmp_path)
    (tmp_path / key).unlink()
    assert says in refused(file, text)


@pytest.mark.clause("M3.3-providers")
def test_mutual_tls_is_on_when_enabled_and_whole(file: Path, tmp_path: Path) -> None:
    file.write_text(MTLS + certificates(tmp_path) + "allowed_sans = ['x']\nallow_self_signed = true\n")
    settings = load(file, {})
    assert settings.mtls == Mtls(
        ca_cert=tmp_path / "ca_cert",
        server_cert=tmp_path / "server_cert",
        server_key=tmp_path / "server_key",
        allowed_sans=("x",),
        allow_self_signed=True,
    )
    warnings = "\n".join(settings.warnings())
    assert "allow_self_signed is ignored" in warnings


@pytest.mark.clause("M6-off")
def test_authentication_that_is_off_is_not_judged(file: Path) -> None:
    file.write_text("[auth]\nenabled = false\nproviders = ['mtls']\n")
    assert load(file, {}).auth == Auth(providers=("mtls",))
    assert load(file, {}).mtls is None


def test_the_grpc_port_is_free_for_seeds_when_grpc_is_off(file: Path) -> None:
    file.write_text("grpc_enabled = false\n" + SEED + "port = 9001\n")
    assert read(Source(file=file, environ={})).settings.instances[0].port == 9001


@pytest.mark.clause("M3.2-seed")
def test_a_whole_seed_becomes_a_spec(file: Path) -> None:
    first = "gpu_id = 0\nextra_args = ['--dtype', 'float16']\nthreads = 2\nkind = 'sparse'\ntrust_remote_code = true\n"
    file.write_text(SEED + first + SECOND + "port = 0\n")
    assert load(file, {}).instances == (
        InstanceSpec(
            name="a",
            model_id="m",
            gpu_id=0,
            extra_args=("--dtype", "float16"),
            threads=2,
            kind="sparse",
            trust_remote_code=True,
            seeded=True,
        ),
        InstanceSpec(name="b", model_id="m", seeded=True),
    )


@pytest.mark.clause("D-bind")
def test_loud_warnings_name_what_is_open_or_ignored(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("ca_cert", "server_cert", "server_key")}
    with_tls = Auth(enabled=True, providers=("mtls",), mtls=Mtls(**files))
    every = {"api_host": "0.0.0.0", "grpc_host": "::", "instance_host": "host.example"}
    assert [text.split()[0] for text in Settings(**every).warnings()] == list(every)
    assert [text.split()[0] for text in Settings(**every, auth=with_tls).warnings()] == ["instance_host"]
    assert list(Settings(api_host="localhost", grpc_host="::1", instance_host="127.0.0.9").warnings()) == []
    assert "tei_binary_path is ignored" in next(Settings(tei_binary_path="/bin/sleep").warnings())


@pytest.mark.clause("M3.3-state-folder")
def test_folders_are_made_and_the_run_directory_is_private(tmp_path: Path) -> None:
    settings = Settings(state_file=tmp_path / "deep" / "er" / "state.toml")
    settings.prepare_folders()
    settings.prepare_folders()
    assert settings.log_dir.is_dir()
    assert stat.S_IMODE(settings.run_dir.stat().st_mode) == 0o700


@pytest.mark.clause("M3.3-state-folder")
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match="Cannot create state file directory: "):
        Settings(state_file=tmp_path / "file" / "state.toml").prepare_folders()


def test_every_fault_is_told_with_its_line(file: Path) -> None:
    file.write_text(
        "api_prot = 1\n\nmodels = [\n  'm',\n]\n[[instances]]\nname = 'a'\n# no model\nport = 'x'\n"
        "[[instances]]\nname = 'b'\nmodel_id = 'm'\ntags = {a = 1}\n"
        "[auth.mtls]\nca_cert = 'x'\n[templates.t]\nqqq = 1\n"
    )
    with pytest.raises(InvalidConfig) as caught:
        load(file, {})
    assert [line.removeprefix(str(file)).split(" ")[0] for line in caught.value.message.split("\n")] == [
        ":1:",
        ":14:",
        ":14:",
        ":17:",
        ":9:",
        ":6:",
        ":13:",
    ]
    assert "templates.t.qqq: unknown key 'qqq'; known: " in caught.value.message


def test_every_broken_rule_is_told(file: Path) -> None:
    told = refused(
        file, "grpc_port = 9000\nlog_level = 'loud'\n" + SEED + "port = 9000\n" + SECOND.replace('"b"', '"a"')
    )
    assert [line.split(":")[0] for line in told.split("\n")] == [
        "grpc_port",
        "log_level",
        "instances[0].port",
        "instances[0].port",
        "instances[1].name",
    ]


def test_seeds_take_from_templates_what_they_do_not_say(file: Path) -> None:
    file.write_text(
        "[templates.big]\nmodel_id = 't'\nmax_batch_tokens = 9\ntags = {a = '1', b = '1'}\n"
        "[[instances]]\nname = 'x'\ntemplate = 'big'\n"
        "[[instances]]\nname = 'y'\ntemplate = 'big'\nmodel_id = 'm'\ntags = {b = '2'}\n"
    )
    settings = load(file, {})
    assert settings.templates == {"big": {"model_id": "t", "max_batch_tokens": 9, "tags": {"a": "1", "b": "1"}}}
    assert settings.instances == (
        InstanceSpec(name="x", model_id="t", max_batch_tokens=9, tags={"a": "1", "b": "1"}, seeded=True),
        InstanceSpec(name="y", model_id="m", max_batch_tokens=9, tags={"a": "1", "b": "2"}, seeded=True),
    )
    says = refused(file, "[templates.big]\n[[instances]]\nname = 'x'\nmodel_id = 'm'\ntemplate = 'bit'\n")
    assert says == "instances[0].template: unknown 'bit'; did you mean 'big'?"
    assert "templates.t.name: unknown key" in refused(file, "[templates.t]\nname = 'x'\n")


def test_who_said_what_is_known(file: Path) -> None:
    file.write_text("grpc_port = 7002\n" + SEED + "[otel]\nendpoint = 'x'\n")
    source = Source(file=file, environ={"TEIMGR_API_PORT": "7001"}, overrides={"log_level": "warn", "api_port": None})
    said = {each.path: each.source for each in effective(read(source))}
    assert said["api_port"] == "environment TEIMGR_API_PORT"
    assert said["grpc_port"] == f"{file}:1"
    assert said["log_level"] == "command line"
    assert said["instances[0].name"] == f"{file}:3"
    assert said["otel.endpoint"] == f"{file}:6"
    assert said["instances[0].port"] == said["otel.sample_ratio"] == said["state_file"] == "default"


def test_secrets_are_not_shown(file: Path) -> None:
    file.write_text("[[webhooks]]\nurl = 'http://x'\nsecret = 'hush'\n")
    shown = {each.path: each.value for each in effective(read(Source(file=file, environ={})))}
    assert shown["webhooks[0].secret"] == "***"
    assert "hush" not in str(shown)


def test_the_key_of_an_instance_is_not_shown() -> None:
    told = ("--api-key", "hush", "--api-key=hush", "--dtype=float16")
    seed = InstanceSpec(name="a", model_id="m", extra_args=told)
    template = {"model_id": "m", "extra_args": told}
    configuration = Configuration(Settings(templates={"t": template}, instances=(seed,)), {})
    shown = {each.path: each.value for each in effective(configuration)}
    seen = ["--api-key", "***", "--api-key=***", "--dtype=float16"]
    assert (shown["templates.t.extra_args"], shown["instances[0].extra_args"]) == (seen, seen)
    assert plain(configuration.settings.templates) == {"t": {"model_id": "m", "extra_args": seen}}
    assert plain({"a": {"extra_args": configuration.settings.instances[0].extra_args}}) == {"a": {"extra_args": seen}}
    assert "hush" not in str(plain(configuration.settings))


def test_every_key_says_what_it_means() -> None:
    for kind in (Settings, Auth, Mtls, Otel, Webhook, InstanceSpec):
        assert [field.name for field in fields(kind) if not key_of(field).meaning] == []


def test_a_misspelt_variable_is_told_with_the_nearest_known_one() -> None:
    promised = list(unread_variables({"TEI_MANAGER_GRPC_TLS_ENABLED": "true", "TEI_MANAGER_GRPC_PORT": "9001"}))
    assert [each.split()[3] for each in promised] == ["TEI_MANAGER_GRPC_TLS_ENABLED"]

    said = list(unread_variables({"TEIMGR_API_PRT": "1", "TEIMGR_API_PORT": "9000", "HOME": "/"}))

    assert len(said) == 1
    assert "TEIMGR_API_PRT" in said[0]
    assert "TEIMGR_API_PORT" in said[0]


def test_no_variable_that_the_code_reads_is_said_to_be_unread() -> None:
    named = {
        found
        for path in Path(teimgr.__file__).parent.rglob("*.py")
        for found in re.findall(r'"(TEIMGR_[A-Z_]*[A-Z])"', path.read_text(encoding="utf-8"))
    }
    assert {"TEIMGR_NATIVE", "TEIMGR_CUDA_GRAPHS"} <= set(named)

    assert list(unread_variables(dict.fromkeys(named, "0"))) == []


def test_origins_and_hosts_of_pages_are_checked(file: Path) -> None:
    told = refused(
        file, 'allowed_origins = ["https://a.example:1", "*", "null", "app.example"]\nallowed_hosts = ["a:1"]'
    )
    assert told == (
        "allowed_origins[3]: must be an origin such as https://app.example:8443, null, or * (got 'app.example')\n"
        "allowed_hosts[0]: must be a host name without scheme and port (got 'a:1')"
    )


def test_auto_is_a_word_of_toml_too(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[[instances]]\nname = "a"\nmodel_id = "m"\nmax_batch_tokens = "auto"\n')
    assert read(Source(file=file, environ={})).settings.instances[0].max_batch_tokens == 0
    file.write_text(file.read_text().replace("auto", "many"))
    with pytest.raises(InvalidConfig, match=r'max_batch_tokens: must be an integer or "auto" \(got text \'many\'\)'):
        read(Source(file=file, environ={}))


def test_state_dir_has_the_state_the_logs_and_the_run_files() -> None:
    settings = read(Source(environ={"TEIMGR_STATE_DIR": "/var/lib/t"})).settings
    assert [str(settings.state_file), str(settings.log_dir), str(settings.run_dir)] == [
        "/var/lib/t/state.toml",
        "/var/lib/t/logs",
        "/var/lib/t/run",
    ]


def test_a_seed_whose_directory_is_missing_is_named_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "tiny-splade").mkdir()
    seeds = (InstanceSpec(name="a", model_id=f"{tmp_path}/tiny-spalde"), InstanceSpec(name="b", model_id="some/model"))
    [fault] = Settings(instances=seeds).missing_models()
    assert str(fault) == (
        f"instances[0].model_id: no such directory: {tmp_path}/tiny-spalde; did you mean '{tmp_path}/tiny-splade'?"
    )
