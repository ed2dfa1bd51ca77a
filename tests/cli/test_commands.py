"""The commands of a running daemon: in a pipe, as JSON, and their exit statuses and failures."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.mistakes import MISTAKES, REST_MISTAKES, RestMistake
from tests.support.daemon_process import WarmDaemonProcess
from tests.support.models import build_static

from teimgr.cli.failures import ExitStatus
from teimgr.cli.main import main
from teimgr.client.connection import Contexts
from teimgr.client.corpus.sources import SUFFIXES


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        return [line.split("\t") for line in self.out.splitlines()]

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(named_fleet: WarmDaemonProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process against the daemon."""

    def call(*arguments: object, stdin: str | bytes = "") -> Ran:
        given = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return Ran(status, *capsys.readouterr())

    return call


def test_ps_lists_instances_in_columns_by_filters_and_as_json(run: Run) -> None:
    rows = run("ps").rows
    assert [row[:2] for row in rows] == [["static", "running"], ["ranker", "running"], ["classes", "running"]]
    assert [row[3] for row in rows] == ["embedding", "reranker", "classifier"]
    assert rows[0][6:8] == ["1/1", "cpu"]
    assert 5 < int(rows[0][10].removesuffix(" MiB")) < 60, "without what it shares with the fork server"
    assert run("ps", "-q", "--tag", "of:tests", "--status", "running").out == "static\nranker\nclasses\n"
    assert run("ps", "-q", "--tag", "of:others").out == ""
    assert [each["name"] for each in run("ps", "--json").json] == ["static", "ranker", "classes"]


def test_an_instance_is_created_changed_stopped_started_and_deleted(run: Run, fleet: WarmDaemonProcess) -> None:
    model = run("show", "static", "--json").json["model_id"]
    made = run("create", "extra", model, "--max-batch-tokens", "512", "--tag", "a=b", "--wait", "--json")
    assert made.status == ExitStatus.OK, made.err
    assert (made.json["status"], made.json["max_batch_tokens"], made.json["tags"]) == ("running", 512, {"a": "b"})

    exists = run("create", "extra", model)
    assert exists.status == ExitStatus.REFUSED
    assert exists.err == (
        "teimgr: Instance 'extra' already exists\n"
        "  why:  a name belongs to one instance of a daemon, stopped ones included\n"
        "  next: `teimgr edit` changes it without a gap, `teimgr rm` deletes it\n"
    )
    assert run("edit", "extra", "--max-concurrent-requests", "7", "--tag", "default", "--wait").status == ExitStatus.OK
    shown = run("show", "extra", "--json").json
    assert (shown["max_concurrent_requests"], shown["tags"]) == (7, {})
    assert ["max_concurrent_requests", "7"] in run("show", "extra").rows

    assert run("stop", "extra").rows == [["extra", "stopped"]]
    embedded = run("embed", "x", "-i", "extra")
    assert (embedded.status, "not running" in embedded.err) == (ExitStatus.NOT_NOW, True)
    waited = run("wait", "extra")
    assert (waited.status, "not running (status: stopped)" in waited.err) == (ExitStatus.REFUSED, True)
    assert run("start", "extra", "--wait").rows[0][:2] == ["extra", "running"]
    assert run("restart", "extra", "--rolling", "--wait").status == ExitStatus.OK
    assert run("rm", "extra", "nope", "-y").status == ExitStatus.NOT_FOUND
    assert "extra" not in run("ps", "-q").out


def test_a_batch_that_cuts_every_text_is_refused_until_it_is_allowed_and_then_told(
    run: Run, fleet: WarmDaemonProcess
) -> None:
    model = run("show", "ranker", "--json").json["model_id"]
    few = ("create", "short", model, "--max-batch-tokens", "10", "--wait", "--timeout", "60")
    refused = run(*few)
    assert refused.status in (ExitStatus.FAILED, ExitStatus.REFUSED)
    assert "each text would be cut to 10 tokens" in refused.err
    assert 'extra_args = ["--auto-truncate"]' in refused.err
    run("rm", "short", "-y")

    notice = "short: texts are cut to the 10 tokens of max_batch_tokens"
    allowed = run(*few, "--extra-arg=--auto-truncate")
    assert (allowed.status, notice in allowed.err) == (ExitStatus.OK, True), allowed.err
    for path in ("/health", "/ui/alarms"):
        with urllib.request.urlopen(fleet.api + path) as reply:
            assert notice in reply.read().decode(), path
    run("rm", "short", "-y")


def test_wait_without_names_waits_for_all(run: Run) -> None:
    waited = run("wait")
    assert [row[0] for row in waited.rows] == ["static", "ranker", "classes"]
    assert "static: running" in waited.err


def test_wait_ends_with_the_reason_of_a_failed_instance(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    failed = run("create", "broken", tmp_path, "--wait", "--timeout", "60")
    run("rm", "broken", "-y")
    assert failed.status in (ExitStatus.FAILED, ExitStatus.REFUSED)
    assert str(tmp_path) in failed.err


def test_texts_of_arguments_stdin_and_files_are_embedded(run: Run, tmp_path: Path) -> None:
    [first, second] = [
        json.loads(line) for line in run("embed", "one text", "another", "-i", "static").out.splitlines()
    ]
    assert len(first) == len(second) == 32
    assert np.linalg.norm(first) == pytest.approx(1.0, abs=1e-5)
    assert json.loads(run("embed", "-", stdin="one text\n").out) == pytest.approx(first, abs=1e-6)
    file = tmp_path / "texts.txt"
    file.write_text("one text\n" * 40)
    assert len(run("embed", file, "-i", "static").out.splitlines()) == 40
    picture = tmp_path / "0.PNG"
    picture.write_bytes(b"")
    told = run("embed", picture, "-i", "static")
    assert f"{picture}: this text is embedded, and not the file of that name: use -o" in told.err
    assert len(told.out.splitlines()) == 1
    told = run("embed", f"{tmp_path}/", "-i", "static")
    assert f"{tmp_path}/: this text is embedded, and not the folder of that name" in told.err
    told = run("similarity", "one text", picture, "another", "-i", "static")
    assert f"{picture}: this text is compared, and not the file of that name: the playground" in told.err
    assert len(told.out.splitlines()) == 2


def test_every_line_is_a_text_or_is_named(run: Run, tmp_path: Path) -> None:
    """Outputs align with the lines that are read, of stdin as of a file."""
    file = tmp_path / "a.txt"
    for content, count, status, says in (
        (b"a\rb\r\nc\n", 2, ExitStatus.OK, ""),
        (b"", 0, ExitStatus.OK, ""),
        (b"a\n\nb\n", 0, ExitStatus.REFUSED, "line 2 is empty"),
        (b"a\n \t\n", 0, ExitStatus.REFUSED, "line 2 is empty"),
        (b"a\n" * 40 + b"\n", 32, ExitStatus.REFUSED, "line 41 is empty"),
        (b"a\n\xff\xfe bad\n", 0, ExitStatus.REFUSED, "line 2 is not UTF-8, at byte 0"),
    ):
        file.write_bytes(content)
        for given in ("-", file):
            for command in (["embed"], ["classify"]) if says else (["embed"],):
                done = run(*command, given, "-i", {"embed": "static", "classify": "classes"}[command[0]], stdin=content)
                assert (done.status, says in done.err) == (status, True), done.err
                assert command == ["classify"] or len(done.out.splitlines()) == count
    plain = run("embed", "one text", "-i", "static").out
    file.write_bytes(b"\xef\xbb\xbfone text\r\n")
    assert run("embed", file, "-i", "static").out == plain
    for command in (["rerank", "q"], ["similarity", "q"]):
        done = run(*command, "-", "-i", {"rerank": "ranker", "similarity": "static"}[command[0]], stdin="a\n\nb\n")
        assert (done.status, "stdin: line 2 is empty" in done.err) == (ExitStatus.REFUSED, True)


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".jpg", ".pdf", ".flac"])
def test_a_file_that_does_not_exist_is_not_a_text(suffix: str, run: Run, tmp_path: Path) -> None:
    missing = f"nosuch{suffix.upper()}"
    for command in (["embed"], ["classify"], ["rerank", "q"], ["similarity", "q"]):
        done = run(*command, missing)
        assert (done.status, f"{missing}: no such file; for a text" in done.err) == (ExitStatus.USAGE, True), done.err
    assert run("embed", f"see {missing}", "x" * 5000 + suffix + " y", "-i", "static").status == ExitStatus.OK
    assert len(run("embed", "-", "-i", "static", stdin=missing).out.splitlines()) == 1
    if suffix in SUFFIXES and suffix != ".txt":
        (tmp_path / f"a{suffix}").write_text("")
        assert "-o vectors.parquet" in run("embed", tmp_path / f"a{suffix}", "-i", "static").err


def test_a_file_is_embedded_into_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "text": "one text"}\n{"id": 2}\n')
    done = run("embed", tmp_path / "rows.jsonl", "-o", tmp_path / "v.npy", "-i", "static", "--json")
    assert (done.status, done.json["rows"], done.json["failed"]) == (ExitStatus.INCOMPLETE, 2, 1)
    vectors = np.load(tmp_path / "v.npy")
    [single] = [json.loads(line) for line in run("embed", "one text", "-i", "static").out.splitlines()]
    np.testing.assert_allclose(vectors[0], single, atol=1e-6)
    assert np.isnan(vectors[1]).all()
    assert "no key 'text'" in Path(done.json["failures"]).read_text()
    again = run("embed", tmp_path / "rows.jsonl", "-o", tmp_path / "v.npy", "-i", "static")
    assert (again.status, "--overwrite" in again.err) == (ExitStatus.REFUSED, True)


def test_an_interrupted_file_is_resumed(run: Run, fleet: WarmDaemonProcess, tmp_path: Path) -> None:
    """Ctrl-C while vectors arrive: one line with what to do, exit status 130, and no row is computed twice."""
    rows = 200_000
    (tmp_path / "rows.txt").write_text("".join(f"text {number}\n" for number in range(rows)))
    target = tmp_path / "v.npy"
    command = ["embed", tmp_path / "rows.txt", "-o", target, "-i", "static", "--url", fleet.api, "--batch-rows", "512"]
    ours, theirs = pty.openpty()  # the bar on it has each batch
    with subprocess.Popen(
        [sys.executable, "-m", "teimgr", *map(str, command)], stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        while b"rows, " not in shown or b" 0 rows" in shown[-200:]:
            shown += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # the other end is closed
            while part := os.read(ours, 65536):
                shown += part
        assert process.wait(30) == ExitStatus.INTERRUPTED, shown
    os.close(ours)
    assert b"run the same command to resume" in shown
    assert b"Traceback" not in shown
    done = run(*command, "--json")
    assert (done.status, done.json["rows"]) == (ExitStatus.OK, rows), done.err
    assert 0 < done.json["resumed_at"] < rows


def test_texts_are_ranked_classified_and_compared(run: Run) -> None:
    ranks = run("rerank", "fox", "a text", "the fox", "more", "--json").json
    assert [each["score"] for each in ranks] == sorted((each["score"] for each in ranks), reverse=True)
    assert {each["index"]: each["text"] for each in ranks} == {0: "a text", 1: "the fox", 2: "more"}
    assert len(run("rerank", "fox", *(f"text {number}" for number in range(70)), "-n", 3).rows) == 3
    labels = run("classify", "good day", "bad day").rows
    assert [row[0] for row in labels] == ["good day"] * 3 + ["bad day"] * 3
    assert {row[1] for row in labels} == {"anger", "joy", "surprise"}
    assert run("similarity", "fox", "day", "fox").rows[0] == ["1.000000", "1", "fox"]


def test_logs_and_events_are_readable_or_json(run: Run) -> None:
    lines = run("logs", "static", "-n", 2).out.splitlines()
    assert len(lines) == 2
    assert any("INFO" in line and "worker ready  instance=static" in line for line in lines)
    assert all(json.loads(line)["ts"] for line in run("logs", "static", "-n", 2, "--json").out.splitlines())
    several = run("logs", "static", "classes", "--daemon", "-n", 3).out.splitlines()
    assert {line.partition("|")[0].strip() for line in several} == {"static", "classes", "(daemon)"}
    assert [line.partition("| ")[2][:23] for line in several] == sorted(
        line.partition("| ")[2][:23] for line in several
    )
    assert "change  method=POST path=/instances status=201 by=local" in run("logs", "--daemon", "-n", 0).out
    assert run("logs").status == ExitStatus.USAGE
    created = run("events", "--kind", "created", "-n", 1000, "--json").out.splitlines()
    assert {json.loads(line)["by"] for line in created} == {"local"}
    events = run("events", "static", "--kind", "running", "-n", 50).rows
    assert {(row[1], row[2]) for row in events} == {("running", "static")}
    assert run("events", "-n", 1, "--json").json["event"]


def test_following_gives_new_events_and_ends_with_an_interrupt(fleet: WarmDaemonProcess, run: Run) -> None:
    command = ["events", "classes", "-f", "-n", "1", "--kind", "running", "--kind", "stopping", "--url", fleet.api]
    with subprocess.Popen(
        [sys.executable, "-m", "teimgr", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "\trunning\tclasses\t" in process.stdout.readline()
        run("stop", "classes")
        assert "\tstopping\tclasses\t" in process.stdout.readline()
        run("start", "classes", "--wait")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (ExitStatus.INTERRUPTED, "")


def test_top_measures_load(run: Run) -> None:
    run("embed", *["a text"] * 32, "-i", "static")
    [row] = run("top", "static", "-i", "0.2").rows
    assert row[:2] == ["static", "running"]
    assert row[12].endswith("MiB")
    sample = run("top", "-i", "0.2", "--json").json["instances"]
    assert [each["name"] for each in sample] == ["static", "ranker", "classes"]
    assert sample[0]["resident_bytes"] > 2**20
    assert run("top", "nope").status == ExitStatus.NOT_FOUND


def test_the_fleet_as_a_whole(run: Run) -> None:
    assert run("gpus", "--json").json["gpus"] == []
    assert run("gpus").out == ""
    assert "no GPUs: " in run("gpus").err
    assert "no changes" in run("reload", "--plan").err
    assert run("templates").out == ""
    for options in ((), ("--plan",)):
        done = run("rebalance", *options)
        assert "nothing to move" in done.err
        assert {row[-1] for row in done.rows} == {"there is one device: the CPU of one host"}
    assert run("recommendations", "--json").json["window_secs"] == 600
    assert run("recommendations", "--window", 1).status == ExitStatus.OK
    assert run("recommendations", "--apply", "idle.nope").status == ExitStatus.NOT_FOUND
    assert len(run("models", "list").rows) == 3


def test_bench_loads_every_kind_of_call(run: Run) -> None:
    for mode, name in (("standard", "static"), ("arrow", "static"), ("rerank", "ranker")):
        done = run("bench", name, "--mode", mode, "-n", 20, "-b", 10)
        assert (done.status, done.json["successful"], done.json["mode"]) == (0, 20, mode), done.err


def test_a_load_that_would_be_refused_whole_stops_after_one_call(run: Run) -> None:
    for arguments, says in ((("statik",), "did you mean 'static'?"), (("static", "-m", "rerank"), "")):
        done = run("bench", *arguments)
        assert done.status in (ExitStatus.NOT_FOUND, ExitStatus.REFUSED, ExitStatus.FAILED), done.err
        assert (done.out, says in done.err) == ("", True), done.err


def test_typical_mistakes_are_told_with_cause_and_remedy(run: Run, tmp_path: Path) -> None:
    """What a person reads is written to `build/mistakes.txt`."""
    (tmp_path / "texts.txt").write_text("one\ntwo\n")
    (tmp_path / "bad.toml").write_text('api_port = "x"\nnope = 1\n')
    (tmp_path / "broken.parquet").write_bytes(b"PAR1no")
    shown, wrong = [], []
    for line, says in MISTAKES:
        done = run(*line.replace("{folder}", str(tmp_path)).split())
        shown.append(f"$ teimgr {line}   ({done.status})\n{done.out}{done.err}")
        is_told = says in done.err and (done.status or "no such events" in done.err)
        wrong += [] if is_told and not of_a_library(done.err) else [shown[-1]]
    write_report("mistakes", shown)
    assert not wrong, "\n".join(wrong)


def test_typical_mistakes_over_rest_are_told_with_cause_and_remedy(fleet: WarmDaemonProcess) -> None:
    """What a person reads is written to `build/rest_mistakes.txt`."""
    shown, wrong = [], []
    for each in REST_MISTAKES:
        status, text = refused(fleet, each)
        shown.append(f"{each.method} {each.path} {json.dumps(each.body)}   ({status})\n{text}\n")
        is_told = each.says in text and 400 <= status < 500
        wrong += [] if is_told and not of_a_library(text) else [shown[-1]]
    write_report("rest_mistakes", shown)
    assert not wrong, "\n".join(wrong)


def of_a_library(text: str) -> list[str]:
    """What no message for people has: words of pydantic and of Python, numbers of codes, control characters."""
    words = ("error code", "Traceback", "Value error", "Input should", "Field required", "type=", "NoneType", "\x1b")
    return [word for word in words if word in text]


def refused(daemon: WarmDaemonProcess, mistake: RestMistake) -> tuple[int, str]:
    """Status and body of the answer."""
    body = mistake.body if isinstance(mistake.body, str) else json.dumps(mistake.body)
    data = None if mistake.body is None else body.encode()
    headers = {"content-type": mistake.content_type}
    request = urllib.request.Request(daemon.api + mistake.path, data, headers, method=mistake.method)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def write_report(name: str, shown: list[str]) -> None:
    report = Path(__file__).parents[2] / "build" / f"{name}.txt"
    report.parent.mkdir(exist_ok=True)
    report.write_text("\n".join(shown))


def test_run_serves_a_model_once_and_says_how_to_call_it(run: Run, fleet: WarmDaemonProcess, tmp_path: Path) -> None:
    model = build_static(tmp_path / "Tiny Static")
    first = run("run", model)
    assert first.status == ExitStatus.OK, first.err
    assert f"curl {fleet.api}/v1/embeddings -H" in first.out
    assert "teimgr embed 'some text' -i tiny-static" in first.out
    assert run("run", model).status == ExitStatus.OK
    assert "-i tiny-static" in run("run", "tiny-static").out, "an instance by its name"
    assert [row[0] for row in run("list").rows] == ["static", "ranker", "classes", "tiny-static"]
    run("rm", "tiny-static")


def test_doctor_judges_the_daemon_and_writes_a_bundle(run: Run, fleet: WarmDaemonProcess, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    failed = run("create", "broken", tmp_path, "--wait", "--timeout", "60")
    bundle = tmp_path / "support.tar.gz"
    findings = run("doctor", "--bundle", bundle, "--json").json
    run("rm", "broken", "-y")
    told = {(each["check"], each["outcome"]): each for each in findings}
    assert fleet.api in told["daemon", "ok"]["text"]
    assert ("instance", "fail") in told, failed
    assert "broken failed" in told["instance", "fail"]["text"]
    assert told["instance", "fail"]["advice"] == "`teimgr logs broken` and `teimgr events broken`"
    assert {check for check, _ in told} >= {"alarms", "disk", "clock"}
    with tarfile.open(bundle) as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {"doctor.json", "settings.json", "events.json", "metrics.txt", "static.log", "_daemon.log"} <= names
    assert bundle.stat().st_mode & 0o077 == 0


def test_an_address_of_grpc_is_told_from_that_of_rest(run: Run, fleet: WarmDaemonProcess) -> None:
    wrong = run("ps", "--url", fleet.grpc)
    assert wrong.status == ExitStatus.UNREACHABLE
    assert wrong.err.startswith(f"teimgr: {fleet.grpc} is a gRPC port, not REST\n")
    assert "does not speak gRPC: is it the port of REST?" in run("bench", "static", "--grpc-url", fleet.api).err


def test_failures_have_a_status_each_and_three_parts(run: Run, tmp_path: Path) -> None:
    unknown = run("logs", "statik")
    assert unknown.status == ExitStatus.NOT_FOUND
    assert "did you mean 'static'?" in unknown.err
    assert run("show", "x", "--url", "http://127.0.0.1:1").status == ExitStatus.UNREACHABLE
    refused = run("ps", "--url", "http://127.0.0.1:1", "--json")
    failure = json.loads(refused.err)["error"]
    assert failure["what"] == "no daemon answers at http://127.0.0.1:1"
    assert failure["why"] == "Connection refused; the address is from --url"
    assert "teimgr up" in failure["do"]
    assert run("create", "x").status == ExitStatus.USAGE
    assert run("create", "x", "m", "--dtype", "float8").status == ExitStatus.REFUSED
    assert run("rerank", "a", "b", "-i", "static").status in (ExitStatus.REFUSED, ExitStatus.FAILED)
    assert run("ps", "--context", "nope").status == ExitStatus.FAILED
    kind = run("embed", tmp_path / "no.txt", "-o", tmp_path / "v.npy", "-i", "static")
    assert (kind.status, kind.err) == (ExitStatus.FAILED, f"teimgr: {tmp_path / 'no.txt'}: no such file or folder\n")


def test_contexts_name_daemons(run: Run, fleet: WarmDaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEIMGR_URL")
    assert run("context", "add", "here", fleet.api).status == ExitStatus.OK
    run("context", "add", "there", "http://127.0.0.1:1")
    assert run("context", "list").rows == [["*", "here", fleet.api, ""], ["", "there", "http://127.0.0.1:1", ""]]
    assert run("ps", "-q").out.startswith("static\n")
    run("context", "use", "there")
    assert "the context 'there'" in run("ps").err
    assert run("ps", "-q", "--context", "here").status == ExitStatus.OK
    assert "`teimgr context use NAME` selects one of here" in run("context", "rm", "there").err
    assert [row[1] for row in run("context", "list").rows] == ["here"]


def test_files_of_a_context_are_kept_by_their_whole_path(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = run("context", "add", "far", "https://teimgr.example:9000", "--ca", "ca.pem", "--api-key-file", "../key")
    assert f"{tmp_path / 'ca.pem'} does not exist; commands with this context fail until it does" in made.err
    (told,) = [each for each in json.loads(run("context", "list", "--json").out) if each["name"] == "far"]
    assert told["ca"] == str(tmp_path / "ca.pem")
    assert f'"{tmp_path / ".." / "key"}"' in Contexts.load().path.read_text()
    run("context", "rm", "far")


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("teimgr logs st", ["static"]),
        ("teimgr explain OVER", ["OVERLOADED"]),
        ("teimgr create x m --dtype bf", ["bfloat16"]),
        ("teimgr edit static --kind token", ["token-classifier"]),
        ("teimgr events --kind crash", ["crashed"]),
    ],
)
def test_names_and_words_are_completed(
    run: Run, monkeypatch: pytest.MonkeyPatch, line: str, completed: list[str]
) -> None:
    asked = {"_TEIMGR_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert run().out.split() == completed


def test_a_terminal_gets_tables(fleet: WarmDaemonProcess) -> None:
    """Headings and state on a pseudo-terminal; `top` is live there, and Ctrl-C ends it."""
    shown = terminal("ps", "--url", fleet.api)
    assert "NAME" in shown
    assert "running" in shown
    lines = terminal("show", "static", "--url", fleet.api).splitlines()
    assert [line for line in lines[-9:] if line.startswith("20") and "  static  " in line]
    assert f"call it:   curl {fleet.api}/v1/embeddings" in "".join(lines[-6:])
    live = terminal("top", "-i", "0.2", "-n", "2", "--url", fleet.api)
    assert "TOKENS/S" in live
    assert "Ctrl-C ends" in live


def test_reasons_are_lines_below_the_table_of_a_terminal(run: Run, fleet: WarmDaemonProcess) -> None:
    failed = run("create", "broken", "an-organisation-with-a-long-name/the-model", "--wait", "--timeout", "60")
    shown = terminal("ps", "--url", fleet.api).splitlines()
    run("rm", "broken", "-y")
    assert (failed.status, "copy the model to its host" in failed.err) == (ExitStatus.FAILED, True), failed.err
    assert "REASON" not in shown[0]
    assert any(line.startswith("broken: ") for line in shown)
    assert any("…/the-model" in line for line in shown)


def test_a_fixed_key_has_the_daemons_reason(run: Run) -> None:
    refused = run("edit", "static", "--port", "9999")
    assert (refused.status, "port" in refused.err) == (ExitStatus.REFUSED, True), refused.err
    assert "cannot be changed" in refused.err


def terminal(*arguments: str) -> str:
    """What a command prints on a terminal of 200 columns."""
    ours, theirs = pty.openpty()
    environ = os.environ | {"COLUMNS": "200", "TERM": "xterm"}
    command = [sys.executable, "-m", "teimgr", *arguments]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    parts = []
    try:
        while part := os.read(ours, 65536):
            parts.append(part)
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(30) == 0, b"".join(parts)
    return b"".join(parts).decode()


def test_edit_without_keys_opens_an_editor(fleet: WarmDaemonProcess, tmp_path: Path) -> None:
    editor = tmp_path / "editor.py"
    editor.write_text(
        "import sys; from pathlib import Path; file = Path(sys.argv[1]); text = file.read_text()\n"
        "assert 'max_concurrent_requests = 512' in text and '# revision = ' in text\n"
        "file.write_text(text.replace('max_concurrent_requests = 512', 'max_concurrent_requests = 9'))\n"
    )
    os.environ["EDITOR"] = f"{sys.executable} {editor}"
    try:
        assert "updat" in terminal("edit", "ranker", "--wait", "--url", fleet.api)
    finally:
        del os.environ["EDITOR"]
    with fleet.client() as client:
        assert client.get("ranker").max_concurrent_requests == 9
