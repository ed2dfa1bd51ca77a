"""Kubernetes, compose, systemd and image files: valid by their schemas, and true about this program."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.deploy.kustomization import build

from teimgr.api.rest.recommendations import Scaling, ScalingFigures, scaling_alias
from teimgr.config.settings import Settings
from teimgr.config.sources import Source, read
from teimgr.observability.catalogue import FAMILIES

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SYSTEMD = ROOT / "configs" / "systemd" / "teimgr.service"
VERSION = "1.33"  # of Kubernetes


def documents(overlay: str) -> list[dict[str, Any]]:
    return build(KUBERNETES / "overlays" / overlay)


def of_kind(kind: str, overlay: str = "keda") -> dict[str, Any]:
    [found] = [each for each in documents(overlay) if each["kind"] == kind]
    return found


def container(overlay: str = "keda") -> dict[str, Any]:
    [found] = of_kind("Deployment", overlay)["spec"]["template"]["spec"]["containers"]
    return dict(found)


# Kubernetes


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_METADATA = _object(["name"], name=_TEXT, namespace=_TEXT, labels=_TEXTS, annotations=_TEXTS)
_RELABELING = _object([], sourceLabels={"type": "array", "items": _TEXT}, targetLabel=_TEXT, replacement=_TEXT)
_ENDPOINT = _object(
    ["port"],
    port=_TEXT,
    path=_TEXT,
    interval={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
    honorLabels={"const": True},
    relabelings={"type": "array", "items": _RELABELING},
)
_NUMBER, _BOOLEAN = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}, {"enum": ["true", "false"]}
# The fields of the two triggers as KEDA 2.20 documents them; values are texts.
_PROMETHEUS = _object(
    ["serverAddress", "query", "threshold"],
    **dict.fromkeys(("serverAddress", "query", "namespace", "customHeaders", "queryParameters", "authModes"), _TEXT),
    **dict.fromkeys(("threshold", "activationThreshold"), _NUMBER),
    **dict.fromkeys(("ignoreNullValues", "unsafeSsl"), _BOOLEAN),
    timeout=_TEXT,
)
_METRICS_API = _object(
    ["url", "valueLocation", "targetValue"],
    **dict.fromkeys(("url", "valueLocation", "authMode", "keyParamName", "timeout"), _TEXT),
    **dict.fromkeys(("targetValue", "activationTargetValue"), _NUMBER),
    **dict.fromkeys(("unsafeSsl", "aggregateFromKubeServiceEndpoints"), _BOOLEAN),
    format={"enum": ["json", "xml", "yaml", "prometheus"]},
    method={"enum": ["header", "query"]},
    aggregationType={"enum": ["average", "sum", "max", "min"]},
)
_METRIC_TYPE = {"enum": ["AverageValue", "Value"]}
_TRIGGER = {
    "oneOf": [
        _object(["type", "metadata"], type={"const": "prometheus"}, metricType=_METRIC_TYPE, metadata=_PROMETHEUS),
        _object(["type", "metadata"], type={"const": "metrics-api"}, metricType=_METRIC_TYPE, metadata=_METRICS_API),
    ]
}
_BEHAVIORS = ("static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower", "scalingModifiers")
_FALLBACK = _object(
    ["failureThreshold", "replicas"], failureThreshold=_COUNT, replicas=_COUNT, behavior={"enum": [*_BEHAVIORS]}
)
_HPA = _object([], behavior=_object([], scaleDown=_object([], stabilizationWindowSeconds=_COUNT)))
# The keys of the two custom resources that the manifests use, by their CustomResourceDefinitions.
CUSTOM = {
    "PodMonitor": _object(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": "monitoring.coreos.com/v1"},
        kind=_TEXT,
        metadata=_METADATA,
        spec=_object(
            ["selector", "podMetricsEndpoints"],
            selector=_object([], matchLabels=_TEXTS),
            podMetricsEndpoints={"type": "array", "items": _ENDPOINT, "minItems": 1},
        ),
    ),
    "ScaledObject": _object(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": "keda.sh/v1alpha1"},
        kind=_TEXT,
        metadata=_METADATA,
        spec=_object(
            ["scaleTargetRef", "triggers"],
            scaleTargetRef=_object(["name"], name=_TEXT),
            minReplicaCount=_COUNT,
            maxReplicaCount=_COUNT,
            pollingInterval=_COUNT,
            cooldownPeriod=_COUNT,
            fallback=_FALLBACK,
            advanced=_object([], horizontalPodAutoscalerConfig=_HPA),
            triggers={"type": "array", "items": _TRIGGER, "minItems": 1},
        ),
    ),
}


@pytest.mark.parametrize("overlay", ["cpu", "gpu", "keda", "keda-metrics-api", "three-models"])
def test_manifests_are_valid_by_the_schemas_of_kubernetes_and_of_the_custom_resources(overlay: str) -> None:
    for document in documents(overlay):
        if document["kind"] in CUSTOM:
            jsonschema.validate(document, CUSTOM[document["kind"]])
        else:
            kubernetes_validate.validate(document, VERSION, strict=True)


def test_the_configuration_of_the_pods_is_one_of_teimgr(tmp_path: Path) -> None:
    file = tmp_path / "teimgr.toml"
    file.write_text(of_kind("ConfigMap")["data"]["teimgr.toml"])
    settings = read(Source(file=file, environ={})).settings
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert (settings.api_port, settings.grpc_port, settings.health_port) == (
        ports["rest"],
        ports["grpc"],
        ports["health"],
    )
    for probe, path in (("startup", "/livez"), ("liveness", "/livez"), ("readiness", "/readyz")):
        get = container()[f"{probe}Probe"]["httpGet"]
        assert (get["path"], get["port"]) == (path, "health")  # which needs neither key nor certificate
    assert settings.grpc_max_connection_age_secs > 0
    assert settings.instances[0].port == ports["tei"]
    assert (
        settings.graceful_shutdown_timeout_secs
        < of_kind("Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    )
    in_memory = {
        each["name"] for each in of_kind("Deployment")["spec"]["template"]["spec"]["volumes"] if "Memory" in str(each)
    }
    run = [
        mount["name"] for mount in container()["volumeMounts"] if settings.run_dir.is_relative_to(mount["mountPath"])
    ]
    assert set(run) <= in_memory
    writable = {mount["mountPath"] for mount in container()["volumeMounts"] if not mount.get("readOnly")}
    for path in (settings.state_file, settings.log_dir, settings.run_dir):
        assert any(path.is_relative_to(mount) for mount in writable), path


def test_names_of_manifests_fit_one_another() -> None:
    deployment = of_kind("Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    names = {port["name"] for port in container()["ports"]}
    services = [each for each in documents("keda") if each["kind"] == "Service"]
    for service in services:
        assert service["spec"]["selector"] == labels
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    assert of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    policy = of_kind("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    opened = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert opened == {port["targetPort"] for service in services for port in service["spec"]["ports"]}
    monitor = of_kind("PodMonitor")
    assert monitor["spec"]["selector"]["matchLabels"] == labels
    assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} <= names
    for overlay in ("keda", "keda-metrics-api"):
        scaled = of_kind("ScaledObject", overlay)
        assert scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


def test_the_example_opens_the_port_of_each_of_its_models_and_keeps_them_on_a_claim(tmp_path: Path) -> None:
    objects = {(each["kind"], each["metadata"]["name"]): each for each in documents("three-models")}
    file = tmp_path / "teimgr.toml"
    file.write_text(objects["ConfigMap", "teimgr"]["data"]["teimgr.toml"])
    written, base = (tomllib.loads(text) for text in (file.read_text(), (KUBERNETES / "base/teimgr.toml").read_text()))
    assert {**written, "instances": base["instances"], "auth": None} == {**base, "auth": None}

    found, pod = container("three-models"), objects["Deployment", "teimgr"]["spec"]["template"]["spec"]
    ports = {port["containerPort"]: port["name"] for port in found["ports"]}
    names = {ports[each.port] for each in read(Source(file=file, environ={})).settings.instances if each.port}
    assert len(names) == 3
    assert names <= {port["targetPort"] for port in objects["Service", "teimgr"]["spec"]["ports"]}
    inside, outside = (objects["NetworkPolicy", name]["spec"]["ingress"][0] for name in ("teimgr", "teimgr-ingress"))
    assert names <= {port["port"] for port in inside["ports"]}
    assert outside["ports"] == [{"port": "rest"}]

    [home] = [each["value"] for each in found["env"] if each["name"] == "HF_HOME"]
    [volume] = [each["name"] for each in found["volumeMounts"] if each["mountPath"] == home]
    [claim] = [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if each["name"] == volume]
    assert ("PersistentVolumeClaim", claim) in objects
    [path] = objects["Ingress", "teimgr"]["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"] == {"name": "teimgr", "port": {"name": "rest"}}


def test_a_rollout_needs_no_spare_card() -> None:
    assert of_kind("Deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def triggers(overlay: str) -> list[dict[str, str]]:
    return [dict(each["metadata"]) for each in of_kind("ScaledObject", overlay)["spec"]["triggers"]]


def test_keda_asks_for_series_and_fields_that_there_are() -> None:
    for asked in triggers("keda"):
        names = re.findall(r"teimgr_\w+", asked["query"])
        assert names
        assert set(names) <= FAMILIES.keys()
        assert asked["ignoreNullValues"] == "false"  # an outage of Prometheus is no load of 0

    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    seeds = tomllib.loads(of_kind("ConfigMap")["data"]["teimgr.toml"])["instances"]
    for asked in triggers("keda-metrics-api"):
        assert asked["url"] == f"http://teimgr.default.svc.cluster.local:{ports['rest']}/metrics/scaling"
        assert asked["aggregationType"] == "sum"
        top, alias, field = asked["valueLocation"].split(".")
        assert alias in {scaling_alias(each["name"]) for each in seeds}
        assert top in Scaling.model_fields
        assert ScalingFigures.model_fields[field].annotation in (int, float)


@pytest.mark.parametrize("overlay", ["keda", "keda-metrics-api"])
def test_keda_counts_what_waits_by_pod_and_multiplies_the_pods_while_calls_are_refused(overlay: str) -> None:
    waiting, refused = of_kind("ScaledObject", overlay)["spec"]["triggers"]
    assert ("queued_tokens" in str(waiting), "metricType" in waiting) == (True, False)
    assert ("refused_per_second" in str(refused), refused["metricType"]) == (True, "Value")


# Compose and images


def stages() -> dict[str, str]:
    """The text of each stage of the Dockerfile, by its name."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    parts = re.split(r"^FROM \S+ AS (\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_compose_builds_stages_and_mounts_files_that_there_are(name: str) -> None:
    services = yaml.safe_load((DEPLOY / name).read_text())["services"]
    for service in services.values():
        if "build" in service:
            target = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", service["build"]["target"])
            assert target in stages()
            assert service["image"].replace("${TEIMGR_TARGET:-cpu}", target) == f"teimgr:{target}"
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), volume
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), port


def test_compose_gives_the_daemon_its_time_to_stop() -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["teimgr"]
    grace_s = int(service["environment"]["TEIMGR_GRACEFUL_SHUTDOWN_TIMEOUT_SECS"])
    assert grace_s < int(service["stop_grace_period"].removesuffix("s"))
    read(Source(file=ROOT / "configs" / "container.toml", environ={"TEIMGR_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "30"}))


def test_grafana_reads_the_dashboard_where_compose_puts_it() -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["grafana"]
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/teimgr.yml").read_text())["providers"][0]
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}
    folder = DEPLOY / mounted[provider["options"]["path"]]
    assert (folder / "teimgr.json").exists()
    home = service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/teimgr.json"


def test_images_have_labels_a_health_check_and_files_that_there_are() -> None:
    found = stages()
    assert set(found) == {"build", "base", "cpu", "cuda"}
    assert "HEALTHCHECK" in found["base"]
    port = read(Source(file=ROOT / "configs" / "container.toml", environ={})).settings.health_port
    assert f"127.0.0.1:{port}/livez" in found["base"]
    assert {"title", "description", "licenses", "version", "revision"} <= set(
        re.findall(r"org\.opencontainers\.image\.(\w+)=", found["base"])
    )
    for name, text in found.items():
        for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
            assert all((ROOT / source).exists() for source in sources.split()), sources
        if name in ("cpu", "cuda"):
            assert text.rstrip().endswith("USER teimgr")
    pin = re.search(r"torch==[0-9.]*", (ROOT / "pyproject.toml").read_text())
    assert pin is not None


# systemd


def unit() -> dict[str, str]:
    lines = (line.partition("=") for line in SYSTEMD.read_text().splitlines() if line and line[0].isalpha())
    return {name: value for name, _, value in lines}


def test_the_unit_lets_workers_live_and_the_daemon_stop_in_time() -> None:
    found = unit()
    assert (found["KillMode"], found["Type"], found["Restart"]) == ("process", "notify", "on-failure")
    assert int(found["WatchdogSec"]) >= 10
    assert int(found["TimeoutStopSec"]) > Settings().graceful_shutdown_timeout_secs
    folders = dict(part.split("=", 1) for part in found["Environment"].split())
    # In memory, and kept for the daemon that adopts.
    assert folders.pop("TEIMGR_RUN_DIR") == f"/run/{found['RuntimeDirectory']}"
    assert (found["RuntimeDirectoryPreserve"], found["RuntimeDirectoryMode"]) == ("yes", "0700")
    home = f"/var/lib/{found['StateDirectory']}/"  # what ProtectSystem leaves writable
    assert all(folder.startswith(home) for folder in folders.values())
    assert set(folders) == {"TEIMGR_STATE_DIR", "HF_HOME"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "teimgr.service"
    file.write_text(SYSTEMD.read_text().replace("/opt/teimgr/bin/teimgr", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(file)], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
