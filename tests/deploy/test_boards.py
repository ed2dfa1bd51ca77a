"""Dashboard and alerts against a real Prometheus that scrapes a real daemon under traffic."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess, free_ports
from tests.support.models import build, build_cross_encoder
from tests.support.polling import until

from teimgr.errors import TeimgrError
from teimgr.observability import catalogue as c
from teimgr.observability.catalogue import FAMILIES, Family

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
PROMTOOL, SERVER = shutil.which("promtool"), shutil.which("prometheus")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is missing: apt-get install prometheus")
needs_prometheus = pytest.mark.skipif(SERVER is None, reason="prometheus is missing: apt-get install prometheus")

_NAME = re.compile(r"\b(?:te|teimgr|tei_manager)_\w+")
_SELECTOR = re.compile(r"(\w+)\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|on) \(([^)]*)\)")
# Labels that Prometheus adds.
_ADDED = {"host", "job", "instance", "le"}
# What no traffic of a test makes appear: it takes a card, a hub, or a worker that grows.
_ABSENT_HERE = {f for f in FAMILIES.values() if f.source == "GPU"} | {
    *(c.DOWNLOADS, c.MEMORY_REPLACEMENTS, c.CERTIFICATE_ENDS)
}
# What a test makes no more than appear.
_MAY_BE_ZERO = {
    *(c.BY_STATE, c.ALARMS, c.WORKER_ANSWERS, c.QUEUED_TOKENS, c.WORKER_CALLS, c.LINK_IN_FLIGHT, c.PADDING_SAVED),
    *(
        c.READY,
        c.SCALING_REFUSED,
        c.FAILED_TEXTS,
        c.EXPIRED_TEXTS,
        c.DEVICE_BYTES,
        c.RESTARTS,
        c.WORKER_START,
    ),
}


class Expression(NamedTuple):
    where: str
    text: str

    @property
    def families(self) -> list[Family]:
        """Raises KeyError for a name that the catalogue does not have."""
        return [family_of(name) for name in _NAME.findall(self.text)]


def family_of(name: str) -> Family:
    return FAMILIES.get(name) or FAMILIES[re.sub(r"_(bucket|sum|count)$", "", name)]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboards" / "teimgr.json").read_text())
    return found


def panels() -> list[Expression]:
    found = [
        Expression(f"panel {panel['title']}", target["expr"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    ]
    notes = dashboard()["annotations"]["list"]
    return found + [Expression(f"annotation {note['name']}", note["expr"]) for note in notes]


def filled(text: str, span: str = "20s") -> str:
    """An expression of the board with values for its variables."""
    for variable, value in (("$__rate_interval", span), ("$__range", span), ("$host", ".*"), ("$instance", ".*")):
        text = text.replace(variable, value)
    return text


def alerts() -> list[Expression]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [Expression(f"alert {rule['alert']}", rule["expr"]) for group in groups for rule in group["rules"]]


def test_every_name_and_label_is_one_of_the_catalogue() -> None:
    for expression in (*panels(), *alerts()):
        labels = _ADDED | {label for family in expression.families for label in family.labels}
        for name, matchers in _SELECTOR.findall(expression.text):
            own = _ADDED | set(family_of(name).labels if name != "up" else ())
            assert set(re.findall(r"(\w+)\s*[=!]~?", matchers)) <= own, expression
        for grouping in _GROUPING.findall(expression.text):
            assert {label.strip() for label in grouping.split(",")} <= labels, expression


def test_every_panel_has_a_place_of_its_own_and_an_id() -> None:
    found = dashboard()["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    cells = [
        (x, y)
        for panel in found
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert all(x < 24 for x, _ in cells)


@needs_promtool
@pytest.mark.parametrize(
    "what", [("check", "rules", "alerts.yml"), ("check", "config", "prometheus.yml")], ids=" ".join
)
def test_promtool_accepts_it(what: tuple[str, ...]) -> None:
    promtool(*what)


def test_the_first_row_is_the_service_and_the_table_leads_to_the_page() -> None:
    found = dashboard()["panels"]
    first = sorted((each for each in found if each["gridPos"]["y"] == 1), key=lambda each: each["gridPos"]["x"])
    assert [each["title"] for each in first] == ["Error ratio", "p99", "Saturation", "Refused"]
    [table] = [each for each in found if each["type"] == "table"]
    named = next(each for each in table["fieldConfig"]["overrides"] if each["matcher"]["options"] == "Instance")
    [links] = [each["value"] for each in named["properties"] if each["id"] == "links"]
    assert [each["url"] for each in links] == ["${page}/ui/instances/${__value.text}"]
    assert "page" in {each["name"] for each in dashboard()["templating"]["list"]}


@needs_promtool
def test_the_board_says_what_is_wrong_and_draws_no_more_than_ten_lines_of_a_panel(tmp_path: Path) -> None:
    """Thirty instances, of which the last ten have most; one fails, one refuses, one is busy."""
    series = []
    for number in range(30):
        labels = f'{{host="h", instance="i{number}"}}'
        load = 60 * (number + 1)
        series += [
            (f"te_request_count{labels}", f"0+{load}x30"),
            (f"teimgr_engine_tokens_total{labels}", f"0+{load}x30"),
            (f"teimgr_engine_busy_seconds_total{labels}", f"0+{57 if number == 3 else 6}x30"),
            (f"teimgr_scaling_replicas{labels}", f"{2 if number == 4 else 1}+0x30"),
            (f"teimgr_scaling_refused_per_second{labels}", f"{4 if number == 5 else 0}+0x30"),
            (f"teimgr_worker_calls{labels}", f"{number}+0x30"),
        ]
    series.append(('te_request_failure{host="h", instance="i9", err="inference"}', "0+279x30"))
    series.append(('te_request_failure{host="h", instance="i5", err="overloaded"}', "0+9000x30"))
    series.append(('te_request_duration_bucket{host="h", instance="i9", le="1"}', "0+60x30"))
    series.append(('te_request_duration_bucket{host="h", instance="i9", le="+Inf"}', "0+60x30"))
    of = {
        each["title"]: filled(each["targets"][0]["expr"], "5m") for each in dashboard()["panels"] if "targets" in each
    }
    wanted = {
        of["Error ratio"]: 0.01,  # 279 of 27,900
        of["p99"]: 0.99,
        of["Saturation"]: 0.95,
        of["Refused"]: 4,
        f"count({of['Requests by instance']})": 10,
        f"count({of['Tokens by instance']})": 10,
        f"count({of['Calls in the workers']})": 10,
        f"min({of['Calls in the workers']})": 20,
    }
    checks = [
        {"expr": f"round({expr}, 0.001)", "eval_time": "20m", "exp_samples": [{"labels": "{}", "value": value}]}
        for expr, value in wanted.items()
    ]
    inputs = [{"series": name, "values": values} for name, values in series]
    tests = {"tests": [{"interval": "1m", "input_series": inputs, "promql_expr_test": checks}]}
    (tmp_path / "board.yml").write_text(yaml.safe_dump(tests))
    promtool("test", "rules", str(tmp_path / "board.yml"))


@needs_promtool
def test_prometheus_reads_every_expression_of_the_board(tmp_path: Path) -> None:
    rules = [{"record": f"r{number}", "expr": filled(each.text)} for number, each in enumerate(panels())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    promtool("check", "rules", str(tmp_path / "rules.yml"))


def test_a_panel_by_instance_is_cut_to_the_first_ten() -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            if panel["type"] == "timeseries" and "{{instance}}" in target["legendFormat"]:
                assert "and on (instance) topk(10, " in target["expr"], panel["title"]


def test_each_alert_names_its_page_in_the_documents() -> None:
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            page, _, anchor = rule["annotations"]["runbook"].partition("#")
            titles = re.findall("(?m)^#+ (.+)$", (DEPLOY.parent / page).read_text())
            assert anchor in {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in titles}, rule["alert"]


@needs_promtool
def test_the_alerts_fire_as_they_should() -> None:
    promtool("test", "rules", "alerts_test.yml")


def promtool(*what: str) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *what], cwd=PROMETHEUS, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# Live


class Watched(NamedTuple):
    """A daemon under traffic, and a Prometheus that has scraped it."""

    daemon: DaemonProcess
    address: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.address}/api/v1/query?{query}", timeout=10) as reply:
            result: list[dict[str, Any]] = json.load(reply)["data"]["result"]
            return result


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("boards")
    models = {"dense": build("bert", folder / "dense"), "reranker": build_cross_encoder("bert", folder / "reranker")}
    with WarmDaemonProcess() as daemon:
        with daemon.client() as client:
            for name, path in models.items():
                client.create(name, str(path))
            client.create("gone", str(models["dense"]))
            for name in (*models, "gone"):
                client.wait_until_running(name, deadline_s=60)
        with traffic(daemon), prometheus(daemon, folder) as address:
            with daemon.client() as client:
                os.kill(client.get("gone").pid or 0, signal.SIGKILL)
                until(lambda: client.get("gone").restarts == 1, "a restart")
                client.delete("gone")
            watched = Watched(daemon, address)
            until(lambda: len(watched.query("changes(te_request_count[10s]) > 1")) > 1, "three scrapes", 60)
            yield watched


@contextlib.contextmanager
def traffic(daemon: DaemonProcess) -> Iterator[None]:
    """Calls of every kind until the body ends."""
    stop = threading.Event()

    def call() -> None:
        with daemon.client() as client:
            while not stop.is_set():
                client.embed(["a fox", "a longer text about a fox"], instance="dense")
                client.embed_arrow(["fog"] * 20, instance="dense")
                client.rerank("rain", ["fog", "snow"], instance="reranker")
                with contextlib.suppress(TeimgrError):
                    client.embed("", instance="dense")
                post(daemon, "/v1/embeddings", {"model": "dense", "input": "fog"})
                stop.wait(0.05)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        yield
    finally:
        stop.set()
        caller.join(30)


def post(daemon: DaemonProcess, path: str, body: object) -> None:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(daemon.api + path, json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=30).close()


@contextlib.contextmanager
def prometheus(daemon: DaemonProcess, folder: Path) -> Iterator[str]:
    """A server with our configuration, except that it scrapes this daemon every half second; its address."""
    assert SERVER is not None
    [port] = free_ports(1)
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    job |= {"scrape_interval": "500ms", "scrape_timeout": "500ms"}
    job["static_configs"] = [{"targets": [f"127.0.0.1:{daemon.api_port}"]}]
    shutil.copy(PROMETHEUS / "alerts.yml", folder)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [SERVER, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("wb") as log:
        server = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        until(lambda: is_ready(port), "Prometheus", 60)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@needs_prometheus
@pytest.mark.slow
def test_every_panel_shows_something_that_moves(watched: Watched) -> None:
    for expression in panels():
        if set(expression.families) <= _ABSENT_HERE or expression.where.startswith("annotation"):
            continue
        text = filled(expression.text)
        may_be_zero = bool(set(expression.families) & _MAY_BE_ZERO)
        until(partial(shows, watched, text, may_be_zero), str(expression), 30)


def shows(watched: Watched, text: str, may_be_zero: bool) -> bool:
    values = [float(series["value"][1]) for series in watched.query(text)]
    return bool(values) and (may_be_zero or any(value > 0 for value in values if not math.isnan(value)))


@needs_prometheus
@pytest.mark.slow
def test_every_series_of_an_alert_is_scraped_and_its_expression_runs(watched: Watched) -> None:
    for expression in alerts():
        watched.query(expression.text)
        for name in _NAME.findall(expression.text):
            if family_of(name) not in _ABSENT_HERE:
                assert watched.query(name), (expression, name)


@needs_prometheus
@pytest.mark.slow
def test_the_label_instance_is_ours(watched: Watched) -> None:
    assert {series["metric"]["instance"] for series in watched.query("teimgr_engine_healthy")} >= {"dense", "reranker"}
    assert not watched.query('{exported_instance!=""}')
    assert {series["metric"]["host"] for series in watched.query("teimgr_engine_healthy")} == {"127.0.0.1"}


@needs_promtool
@needs_prometheus
@pytest.mark.slow
def test_promtool_complains_of_the_contracts_names_alone(watched: Watched) -> None:
    with urllib.request.urlopen(f"{watched.daemon.api}/metrics", timeout=10) as reply:
        page = reply.read()
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=page, capture_output=True, timeout=30, check=False)
    complaints = (done.stdout + done.stderr).decode().splitlines()
    assert [line for line in complaints if not line.startswith(("te_", "tei_manager_"))] == []


@needs_prometheus
@pytest.mark.slow
def test_a_scrape_has_few_samples_per_instance(watched: Watched) -> None:
    count = watched.query("count by (instance) ({instance=~'dense|reranker'})")
    assert max(int(series["value"][1]) for series in count) < 280
    with urllib.request.urlopen(f"{watched.daemon.api}/metrics?buckets=all", timeout=10) as reply:
        whole = reply.read().decode().splitlines()
    assert sum('instance="dense"' in line for line in whole) > 400


@needs_promtool
def test_the_commands_of_the_readme_work_and_its_links_lead_somewhere() -> None:
    text = (DEPLOY / "README.md").read_text()
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        done = subprocess.run(
            ["bash", "-euc", block], cwd=DEPLOY.parent, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert link.startswith("http") or (DEPLOY / link).exists(), link
