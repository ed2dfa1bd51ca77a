"""`bench-client`: flags, result, exit status, one-line failures."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lz4.frame
import pyarrow as pa
import pytest
from tests.support.small_servers import INSTANCE, Certificates, Multiplexer

from teimgr.cli.bench_client.command import made_texts, main
from teimgr.wire.pb.tei.v1 import tei_pb2

KEYS = [
    "mode",
    "instance_name",
    "num_texts",
    "batch_size",
    "num_requests",
    "total_duration_secs",
    "throughput_per_sec",
    "successful",
    "failed",
    "latency_ms",
]


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        return json.loads(self.out)


async def bench(*arguments: object) -> Ran:
    """Run it in a thread of this process, which has imported what it needs; one test starts the real command."""

    def run() -> Ran:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                status = main([str(argument) for argument in arguments])
            except SystemExit as ended:
                status = int(ended.code or 0)
        return Ran(status, out.getvalue(), err.getvalue())

    return await asyncio.wait_for(asyncio.to_thread(run), 60)


async def bench_process(*arguments: object) -> Ran:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "teimgr.cli.bench_client", *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


@pytest.mark.clause("M7.2-standard", "M7.3-output")
async def test_standard_mode_sends_one_call_per_text_and_prints_the_result(
    mux_url: str, multiplexer: Multiplexer
) -> None:
    ran = await bench_process("-e", mux_url, "-i", INSTANCE, "-n", 40, "-b", 8)
    assert ran.status == 0, ran.err
    assert list(ran.result) == KEYS
    assert '\n  "throughput_per_sec": ' in ran.out
    assert (ran.result["mode"], ran.result["num_requests"], ran.result["successful"]) == ("standard", 40, 40)
    assert list(ran.result["latency_ms"]) == ["p50", "p90", "p95", "p99", "max", "mean"]
    assert "standard mini: 40/40 texts" in ran.err
    assert multiplexer.seen.most_in_flight <= 8
    first = multiplexer.seen.embeds[0]
    assert first.target.instance_name == INSTANCE
    assert first.request == tei_pb2.EmbedRequest(inputs=made_texts(1)[0], truncate=True, normalize=True)


@pytest.mark.clause("M7.2-standard")
async def test_standard_mode_keeps_batch_size_calls_in_flight(mux_url: str, multiplexer: Multiplexer) -> None:
    multiplexer.together = asyncio.Barrier(100)
    ran = await bench("--endpoint", mux_url, "--instance", INSTANCE, "--num-texts", 200)
    assert ran.result["successful"] == 200
    assert multiplexer.seen.most_in_flight == 100


@pytest.mark.clause("M7.2-arrow")
async def test_arrow_mode_sends_lz4_batches_of_a_column_without_nulls(mux_url: str, multiplexer: Multiplexer) -> None:
    ran = await bench("-e", mux_url, "-i", INSTANCE, "-m", "arrow", "-n", 250, "--noop")
    assert ran.status == 0, ran.err
    assert (ran.result["num_requests"], ran.result["successful"], ran.result["batch_size"]) == (3, 250, 100)
    request = multiplexer.seen.arrows[0]
    assert (request.truncate, request.normalize, request.noop) == (True, True, True)
    stream = pa.ipc.open_stream(request.arrow_ipc)
    assert stream.schema == pa.schema([pa.field("text", pa.utf8(), nullable=False)])
    assert len(list(stream)) == 1
    assert b"sample 99" not in request.arrow_ipc  # the text itself is compressed


async def test_vectors_may_stay_as_they_are(mux_url: str, multiplexer: Multiplexer) -> None:
    for mode in ("standard", "arrow"):
        assert (await bench("-e", mux_url, "-i", INSTANCE, "-m", mode, "-n", 5, "--no-normalize")).status == 0
    assert not multiplexer.seen.embeds[0].request.normalize
    assert not multiplexer.seen.arrows[0].normalize


async def test_rerank_mode_sends_batches_of_texts_for_one_query(mux_url: str) -> None:
    ran = await bench("-e", mux_url, "-i", INSTANCE, "-m", "rerank", "-n", 25, "-b", 10)
    assert (ran.status, ran.result["num_requests"], ran.result["successful"]) == (0, 3, 25), ran.err


async def test_the_environment_names_the_daemon(mux_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEIMGR_GRPC_URL", mux_url)
    assert (await bench("-i", INSTANCE, "-n", 5)).status == 0


async def test_noop_outside_arrow_mode_runs_with_a_warning(mux_url: str) -> None:
    ran = await bench("-e", mux_url, "-i", INSTANCE, "-n", 5, "--noop")
    assert (ran.status, ran.result["successful"]) == (0, 5)
    assert "bench-client: --noop has no effect in standard mode: the model runs" in ran.err.splitlines()


@pytest.mark.parametrize(
    ("endpoint", "instance", "says"),
    [
        ("http://127.0.0.1:1/x", INSTANCE, "gRPC has no path: 'http://127.0.0.1:1/x'"),
        ("http://127.0.0.1:1", "\udcff", "instance is not Unicode"),
    ],
    ids=["path", "name"],
)
async def test_an_address_that_cannot_be_meant_is_refused_in_one_line(endpoint: str, instance: str, says: str) -> None:
    ran = await bench("-e", endpoint, "-i", instance)
    assert (ran.status, ran.out) == (1, "")
    assert says in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.clause("M7.3-output")
async def test_any_failed_text_gives_a_nonzero_status_and_the_reason(mux_url: str) -> None:
    ran = await bench("-e", mux_url, "-i", "nope", "-n", 5)
    assert ran.status == 1
    assert (ran.result["successful"], ran.result["failed"], ran.result["latency_ms"]) == (0, 5, None)
    assert "5 × Instance 'nope' not found" in ran.err
    assert "Traceback" not in ran.err


async def test_a_file_of_texts_is_sent_line_by_line_and_failed_rows_are_counted(
    mux_url: str, multiplexer: Multiplexer, tmp_path: Path
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("first\n\nrefuse\n  third  \n")
    ran = await bench("-e", mux_url, "-i", INSTANCE, "-m", "arrow", "--texts", file)
    assert ran.status == 1
    assert (ran.result["num_texts"], ran.result["successful"], ran.result["failed"]) == (3, 2, 1)
    assert "1 × no such text" in ran.err
    texts = pa.ipc.open_stream(multiplexer.seen.arrows[0].arrow_ipc).read_all().column(0).to_pylist()
    assert texts == ["first", "refuse", "third"]


async def test_a_compressed_file_of_texts_is_read_and_repeated(
    mux_url: str, multiplexer: Multiplexer, tmp_path: Path
) -> None:
    file = tmp_path / "texts.txt.lz4"
    file.write_bytes(lz4.frame.compress("één\nzwei\n".encode()))
    ran = await bench("-e", mux_url, "-i", INSTANCE, "-n", 5, "-b", 1, "--texts", file)
    assert ran.status == 0, ran.err
    assert [request.request.inputs for request in multiplexer.seen.embeds] == ["één", "zwei", "één", "zwei", "één"]


@pytest.mark.clause("M7.1-tls")
async def test_mtls_with_the_name_localhost(mtls_url: str, certificates: Certificates) -> None:
    proof = ("--ca", certificates.ca, "--cert", certificates.client_cert, "--key", certificates.client_key)
    ran = await bench("-e", mtls_url, "-i", INSTANCE, "-n", 20, "--insecure", *proof)
    assert ran.status == 0, ran.err
    assert ran.result["successful"] == 20


@pytest.mark.clause("M7.1-tls")
@pytest.mark.parametrize(
    ("leave_out", "says"),
    [
        ("--ca", "CERTIFICATE_VERIFY_FAILED"),
        ("--cert", "client certificate"),
        ("--insecure", "Hostname Verification Check failed"),
    ],
)
async def test_tls_failures_are_one_line_and_a_nonzero_status(
    mtls_url: str, certificates: Certificates, leave_out: str, says: str
) -> None:
    flags: dict[str, tuple[object, ...]] = {
        "--ca": ("--ca", certificates.ca),
        "--cert": ("--cert", certificates.client_cert, "--key", certificates.client_key),
        "--insecure": ("--insecure",),
    }
    kept = [part for name, parts in flags.items() if name != leave_out for part in parts]
    address = mtls_url.replace("127.0.0.1", "localhost") if leave_out != "--insecure" else mtls_url
    ran = await bench("-e", address, "-i", INSTANCE, "-n", 3, *kept)
    assert ran.status == 1
    assert "Traceback" not in ran.err
    (line,) = ran.err.splitlines()
    assert line.startswith(f"bench-client: {address}: ")
    assert says in line


async def test_a_refused_connection_is_one_line_and_a_nonzero_status(unused_port: int) -> None:
    ran = await bench("-e", f"http://127.0.0.1:{unused_port}", "-i", INSTANCE)
    assert (ran.status, ran.out) == (1, "")
    assert "Connection refused" in ran.err
    assert len(ran.err.splitlines()) == 1


async def test_an_undecodable_reply_ends_the_program(mux_url: str, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("garbage\n")
    ran = await bench("-e", mux_url, "-i", INSTANCE, "-m", "arrow", "--texts", file)
    assert (ran.status, ran.out) == (1, "")
    assert "not an Arrow stream of vectors" in ran.err


@pytest.mark.clause("M7.1-flags", "M8-smoke")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--endpoint"),
        (["-e", "http://127.0.0.1:1"], "--instance"),
        (["-e", "x", "-i", "y", "-b", "0"], "at least 1"),
        (["-e", "x", "-i", "y", "-n", "abc"], "--num-texts: 'abc' is not a whole number of at least 1"),
        (["-e", "x", "-i", "y", "--timeout-secs", "abc"], "--timeout-secs: 'abc' is not a number of seconds above 0"),
        (["-e", "x", "-i", "y", "--timeout-secs", "nan"], "--timeout-secs: 'nan' is not a number of seconds above 0"),
        (["-e", "x", "-i", "y", "-m", "other"], "invalid choice"),
    ],
)
async def test_wrong_arguments_are_explained(arguments: list[str], says: str) -> None:
    ran = await bench(*arguments)
    assert (ran.status, ran.out) == (2, "")
    assert says in ran.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cert", "a.pem"], "must be given together"),
        (["--texts", "nowhere.txt"], "nowhere.txt: No such file"),
        (["--ca", "nowhere.pem"], "nowhere.pem: No such file"),
    ],
)
async def test_unusable_files_are_named(arguments: list[str], says: str) -> None:
    ran = await bench("-e", "https://localhost:1", "-i", "y", *arguments)
    assert (ran.status, ran.out) == (1, "")
    assert says in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.clause("M7.2-texts")
def test_made_texts_differ_and_every_third_is_longer() -> None:
    texts = made_texts(30)
    assert len(set(texts)) == 30
    assert texts[11].endswith(" - sample 12")
    assert " - sample 13, " in texts[12]
    assert texts[11].split(" - ")[0] == texts[21].split(" - ")[0]
