"""The command line, run as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from teimgr import __version__
from teimgr.cli.failures import MEANINGS, ExitStatus
from teimgr.cli.main import main

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def teimgr(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """`python -m teimgr` with these arguments, ended."""
    return subprocess.run(
        [sys.executable, "-m", "teimgr", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environ,
        check=False,
    )


@pytest.mark.clause("M3.1-help", "M8-smoke")
def test_version_and_help_need_nothing_heavy() -> None:
    code = "import sys; from teimgr.cli import main\nassert main(['--help']) == 0\nprint(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("fastapi", "torch", "numpy", "uvicorn", "teimgr.config.settings"):
        assert f"'{heavy}'" not in loaded
    assert teimgr("--version").stdout == f"teimgr {__version__}\n"


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_streams_are_opened_on_dev_null(closed: tuple[int, ...]) -> None:
    code = """if True:
        import os, sys
        from teimgr.cli.main import main
        status = main(["--help"])
        missing = [
            one
            for one in %r
            if os.readlink(f"/proc/self/fd/{one}") != os.devnull or not os.get_inheritable(one)  # by children
        ]
        os._exit(status or len(missing))
    """
    redirections = " ".join(f"{number}>&-" for number in closed)
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirections}', sys.executable, code % (closed,)]
    assert subprocess.run(command, check=False).returncode == 0


def test_a_good_configuration_is_said_to_be_good() -> None:
    done = teimgr("config", "check", CONFIGS / "laptop-cpu.toml")
    assert (done.returncode, done.stderr) == (0, "")
    assert "laptop-cpu.toml: good; 2 seeds, REST on 127.0.0.1:9000" in done.stdout


@pytest.mark.clause("M3.1-config")
def test_a_bad_configuration_is_refused_with_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("api_prot = 1\n")
    done = teimgr("config", "check", file)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"teimgr: {file}:1: api_prot: unknown key 'api_prot'; did you mean 'api_port'?\n"


def test_every_fault_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text('api_port = "x"\n\n[[instances]]\nname = "a"\nmodel = "m"\n')
    done = teimgr("config", "check", file)
    assert done.returncode == 1
    assert [
        line.removeprefix("teimgr: ").removeprefix(str(file)).split(" ")[0] for line in done.stderr.splitlines()
    ] == [
        ":1:",
        ":5:",
        ":3:",
    ]
    assert "instances[0].model: unknown key 'model'; did you mean 'model_id'?" in done.stderr
    assert "instances[0].model_id: is required" in done.stderr


def test_faults_of_every_kind_are_told_in_one_round(tmp_path: Path) -> None:
    """Of types, of keys in their relation, of variables and of TLS files."""
    file = tmp_path / "t.toml"
    tls = '[auth]\nenabled = true\nproviders = []\n[auth.tls]\nserver_cert = "no.pem"\nserver_key = "no.key"\n'
    file.write_text('max_instances = "x"\ninstance_port_start = 9200\ninstance_port_end = 9100\n' + tls)
    done = teimgr("config", "check", file, TEIMGR_LOG_FORMAT="odd")
    assert done.returncode == 1
    relations = "must be greater than instance_port_start", "auth.providers: "
    for says in ("max_instances: must be", *relations, "TEIMGR_LOG_FORMAT", "no.pem", "no.key"):
        assert says in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 6, done.stderr


def test_settings_are_shown_with_who_said_them_and_without_secrets(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text('grpc_port = 9101\n[[webhooks]]\nurl = "http://x"\nsecret = "hush"\n[aliases]\na = "b"\n')
    done = teimgr("config", "show", file, TEIMGR_API_PORT="9100")
    assert done.returncode == 0
    assert "api_port = 9100  # environment TEIMGR_API_PORT\n" in done.stdout
    assert f"grpc_port = 9101  # {file}:1\n" in done.stdout
    assert 'log_level = "info"  # default\n' in done.stdout
    assert "hush" not in done.stdout
    table = tomllib.loads(done.stdout)
    assert table["webhooks"][0]["secret"] == "***"
    assert table["aliases"] == {"a": "b"}

    changed = teimgr("config", "show", file, "--changed", TEIMGR_API_PORT="9100").stdout
    assert tomllib.loads(changed) == {
        "api_port": 9100,
        "grpc_port": 9101,
        "webhooks": [{"url": "http://x", "secret": "***"}],
        "aliases": {"a": "b"},
    }


def test_a_configuration_without_changes_is_said_to_be_one(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("")
    assert teimgr("config", "show", file, "--changed").stdout == f"# {file}: nothing differs from the defaults\n"


def test_every_line_of_a_failure_has_the_name_of_the_program(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text('api_port = "x"\ngrpc_port = "y"\n')
    lines = teimgr("config", "check", file).stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"teimgr: {file}:") for line in lines)


def test_lists_of_rights_follow_one_flag_or_several(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (
        ["--rights", "inference", "read", "--instances", "a", "b"],
        ["--rights=inference", "--rights=read", "--instances", "a", "--instances", "b"],
    ):
        assert main(["key", "new", "team", *flags]) == 0
        [table] = tomllib.loads(capsys.readouterr().out)["auth"]["api_keys"]
        assert (table["rights"], table["instances"]) == (["inference", "read"], ["a", "b"])


def test_help_lists_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for code, meaning in MEANINGS.items():
        assert f"  {int(code):>3}  {meaning}\n" in shown


def test_a_check_judges_the_environment_too_and_warns() -> None:
    done = teimgr("config", "check", CONFIGS / "container.toml")
    assert done.stdout.count("warning: ") == 3
    done = teimgr("config", "check", CONFIGS / "teimgr.toml", TEIMGR_API_PORT="x")
    assert (done.returncode, done.stderr) == (1, "teimgr: Invalid TEIMGR_API_PORT value 'x': must be an integer\n")


@pytest.mark.parametrize("command", [["serve", "-c"], ["-c"], ["serve", "--config"], ["--config"]])
def test_serve_is_meant_where_no_command_is_named(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "nope.toml"
    assert main([*command, str(missing)]) == 1
    assert capsys.readouterr().err == f"teimgr: {missing}: cannot be read: No such file or directory\n"


def test_flags_are_checked_like_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "80"]) == 1
    assert "API port must be >= 1024 (got 80)" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["config"], ["config", "check"], ["serve", "--log-format", "xml"]])
def test_a_wrong_command_line_shows_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "Usage: teimgr" in capsys.readouterr().err


SEED = '[[instances]]\nname = "a"\nmodel_id = "m"\n'


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (SEED + 'extra_args = ["--nope"]\n', "instances[0]"),
        (SEED + 'pooling = "middle"\n', "pooling"),
        (SEED + 'kind = "llm"\n', "kind"),
        ("max_instances = 1\n" + SEED + SEED.replace('"a"', '"b"'), "max_instances is 1"),
    ],
    ids=["flag", "pooling", "kind", "too many"],
)
@pytest.mark.parametrize("command", [["config", "check"], ["serve", "-c"]], ids=["check", "serve"])
def test_a_seed_that_could_not_be_created_is_refused(
    command: list[str], config: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(config)

    assert main([*command, str(path)]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("group", ["models", "config", "key", "context"])
def test_a_group_without_a_command_lists_its_commands(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([group]) == ExitStatus.USAGE
    shown = capsys.readouterr()
    assert "Commands" in shown.out + shown.err
    assert "Missing command" not in shown.err


def test_options_have_the_type_of_their_key(capsys: pytest.CaptureFixture[str]) -> None:
    main(["create", "--help"])
    shown = capsys.readouterr().out
    assert "--trust-remote-code true|false" in shown
    assert "--max-batch-tokens INT" in shown
