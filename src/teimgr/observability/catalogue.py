"""Catalogue of all metrics: names, help, labels and buckets. Metric names are written nowhere else.

`tei_manager_…` are tei-manager's names and `te_…` those of Text Embeddings Inference, so that their dashboards keep
working; `python -m teimgr.observability.catalogue` prints docs/metrics.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

MetricType = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """A metric family. Counters of ours end in `_total`, TEI's do not.

    `source` is the process that counts: daemon, mux or worker; GPU for the driver's figures.
    """

    name: str
    kind: MetricType
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    source: str = "daemon"


FAMILIES: dict[str, Family] = {}

_MS_TO_30_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_START_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# The 35 buckets of TEI, which end at 14.6 s, and seven more, up to 249 s: a multiple of three, as every third is kept.
DURATION_BOUNDS = tuple(1e-5 * 1.5**power for power in range(1, 43))
LENGTH_BOUNDS = tuple(float(2**power) for power in range(20))
BATCH_SIZE_BOUNDS = tuple(float(2**power) for power in range(13))
BATCH_TOKENS_BOUNDS = tuple(float(2**power) for power in range(21))


def _add(
    source: str,
    common: tuple[str, ...],
    name: str,
    kind: MetricType,
    help: str,
    *labels: str,
    bounds: tuple[float, ...] = (),
) -> Family:
    family = FAMILIES[name] = Family(name, kind, help, (*common, *labels), bounds, source)
    return family


_daemon = partial(_add, "daemon", ())
_mux = partial(_add, "mux", ("mux",))
_worker = partial(_add, "worker", ("instance",))
_gpu = partial(_add, "GPU", ())


# Daemon

CREATED = _daemon("tei_manager_instances_created_total", "counter", "Instances created", "instance", "model")
DELETED = _daemon("tei_manager_instances_deleted_total", "counter", "Instances deleted", "instance")
RESTARTS = _daemon("tei_manager_instance_restarts_total", "counter", "Restarts that the daemon decided", "instance")
MEMORY_REPLACEMENTS = _daemon(
    "teimgr_worker_memory_replacements_total", "counter", "Workers replaced for their resident memory", "instance"
)
PROBE_FAILURES = _daemon("tei_manager_health_check_failures_total", "counter", "Failed health probes", "instance")
INSTANCES = _daemon("tei_manager_instances_count", "gauge", "Instances known")
BY_STATE = _daemon("teimgr_instances", "gauge", "Instances by state", "state")
WORKER_START = _daemon(
    "teimgr_worker_start_seconds",
    "histogram",
    "From the launch of a worker to its first passed self-test",
    "instance",
    bounds=_START_S,
)
REST_REQUESTS = _daemon(
    "teimgr_rest_request_seconds",
    "histogram",
    "REST requests, by route and status",
    "method",
    "route",
    "status",
    bounds=_MS_TO_30_S,
)
INFERENCE = _daemon(
    "teimgr_inference_seconds",
    "histogram",
    "Inference over HTTP on the daemon's port, from the head of the request to the head of the answer",
    "dialect",
    "route",
    "status",
    bounds=(*_MS_TO_30_S, 60.0),
)
INFERENCE_BYTES = _daemon(
    "teimgr_inference_bytes_total",
    "counter",
    "Bytes of the bodies of inference over HTTP on the daemon's port",
    "dialect",
    "direction",
)
SCALING_QUEUED = _daemon(
    "teimgr_scaling_queued_tokens", "gauge", "Tokens that wait for replicas; 0 at zero replicas", "instance"
)
SCALING_WAITING = _daemon(
    "teimgr_scaling_waiting_seconds", "gauge", "Seconds that the replicas need for the waiting tokens", "instance"
)
SCALING_REFUSED = _daemon(
    "teimgr_scaling_refused_per_second",
    "gauge",
    "Calls per second that full replicas refused, over the last minute",
    "instance",
)
SCALING_REPLICAS = _daemon("teimgr_scaling_replicas", "gauge", "Replicas that serve", "instance")
SCALING_WANTED = _daemon("teimgr_scaling_wanted_replicas", "gauge", "Target number of replicas", "instance")
DOWNLOADS = _daemon("teimgr_model_downloads_total", "counter", "Downloads by the registry, by outcome", "outcome")
DOWNLOAD_BYTES = _daemon("teimgr_model_download_bytes_total", "counter", "Bytes of models received over the network")
TRIALS = _daemon("teimgr_model_trials_total", "counter", "Trials of models, by outcome", "outcome")
BATCHES_BY_STATUS = _daemon("teimgr_batches", "gauge", "Batches of /v1/batches that are kept, by status", "status")
BATCH_LINES = _daemon("teimgr_batch_lines_total", "counter", "Requests of batches that ended, by outcome", "outcome")
STORED_BYTES = _daemon("teimgr_stored_file_bytes", "gauge", "Bytes of the files of /v1/files, results included")
KEY_TOKENS = _daemon(
    "teimgr_key_tokens_total", "counter", "Tokens of answers by API key, for the 100 keys with the most", "key"
)
KEY_CALLS = _daemon("teimgr_key_calls_total", "counter", "Calls that were answered, by API key", "key")
KEY_REFUSED = _daemon("teimgr_key_refused_total", "counter", "Calls refused for a quota or a full queue", "key")
LOOP_HELD = _daemon(
    "teimgr_daemon_loop_held_total", "counter", "Times that the daemon's event loop was blocked for over 200 ms"
)
READY = _daemon("teimgr_ready", "gauge", "1 while /ready is 200: every instance that should run does")
DISK_USED = _daemon("teimgr_disk_used_ratio", "gauge", "Part of a disk that is in use, by the folders on it", "folders")
CERTIFICATE_ENDS = _daemon(
    "teimgr_certificate_end_seconds", "gauge", "Unix time at which the certificate of the listeners ends", "file"
)
ALARMS = _daemon("teimgr_alarms", "gauge", "Alarms that /health shows")
DAEMON_MEMORY = _daemon("teimgr_daemon_resident_bytes", "gauge", "Resident memory of the daemon")
FORWARDED = _daemon(
    "teimgr_forwarded_connections",
    "gauge",
    "Connections to the instance's port on the head that are forwarded to workers on other hosts",
    "instance",
)
WORKER_ANSWERS = _daemon(
    "teimgr_worker_answers", "gauge", "Workers that sent their metrics for this page, and those that did not", "answer"
)

# Muxes

MUX_IN_FLIGHT = _mux("teimgr_mux_in_flight", "gauge", "Calls that are running")
MUX_CALLS = _mux("teimgr_mux_calls_total", "counter", "Calls by gRPC status", "method", "instance", "status")
MUX_MESSAGES = _mux("teimgr_mux_messages_total", "counter", "Messages answered", "method", "instance")
MUX_SECONDS = _mux(
    "teimgr_mux_call_seconds", "histogram", "Duration of calls", "method", "instance", bounds=_MS_TO_30_S
)
MUX_LOOP_HELD = _mux(
    "teimgr_mux_loop_held_total", "counter", "Times that the mux's event loop was blocked for over 200 ms"
)
MUX_MEMORY = _mux("teimgr_mux_resident_bytes", "gauge", "Resident memory of the mux")
LINK_IN_FLIGHT = _mux("teimgr_link_in_flight", "gauge", "Requests over the links that have no answer yet", "instance")
LINK_IN_FLIGHT_BYTES = _mux(
    "teimgr_link_in_flight_bytes", "gauge", "Bytes of the requests over the links that have no answer yet", "instance"
)
LINK_REQUESTS = _mux("teimgr_link_requests_total", "counter", "Requests sent over the links to workers", "instance")
LINK_SENT = _mux("teimgr_link_sent_bytes_total", "counter", "Bytes of requests over the links", "instance")
LINK_RECEIVED = _mux("teimgr_link_received_bytes_total", "counter", "Bytes of answers over the links", "instance")
LINK_CONNECTS = _mux(
    "teimgr_link_connects_total", "counter", "Connections made to workers, those after a loss included", "instance"
)
LINK_LOST = _mux("teimgr_link_losses_total", "counter", "Links that were lost while in use", "instance")
LINK_EXPIRED = _mux(
    "teimgr_link_deadline_expired_total", "counter", "Requests whose deadline passed before their answer", "instance"
)

# Workers: engine and process

BATCHES = _worker("teimgr_engine_batches_total", "counter", "Batches by lane", "lane")
TEXTS = _worker("teimgr_engine_texts_total", "counter", "Inputs in those batches", "lane")
TOKENS = _worker("teimgr_engine_tokens_total", "counter", "Tokens in those batches, none of them padding", "lane")
PADDING_SAVED = _worker(
    "teimgr_engine_padding_saved_tokens_total",
    "counter",
    "Tokens that padding each batch to its longest input would have added",
)
OWN_TEXTS = _worker(
    "teimgr_engine_self_test_texts_total", "counter", "Inputs of self-tests, which are in no other count"
)
OWN_TOKENS = _worker("teimgr_engine_self_test_tokens_total", "counter", "Tokens of self-tests, likewise")
FAILED_TEXTS = _worker("teimgr_engine_failed_texts_total", "counter", "Inputs that failed")
EXPIRED_TEXTS = _worker(
    "teimgr_engine_deadline_expired_total", "counter", "Inputs whose deadline passed before their batch", "lane"
)
BUSY = _worker("teimgr_engine_busy_seconds_total", "counter", "Time with a batch on the device")
QUEUED_TEXTS = _worker("teimgr_engine_queue_texts", "gauge", "Tokenized inputs that wait for a batch", "lane")
QUEUED_TOKENS = _worker(
    "teimgr_engine_queue_tokens", "gauge", "Tokens that wait, of untokenized inputs by estimate", "lane"
)
RUNNING_TOKENS = _worker("teimgr_engine_running_tokens", "gauge", "Tokens on the device now")
HEALTHY = _worker("teimgr_engine_healthy", "gauge", "1 while the engine's results can be trusted")
WORKER_CALLS = _worker("teimgr_worker_calls", "gauge", "Calls inside the worker that are not answered")
WORKER_LOOP_HELD = _worker(
    "teimgr_worker_loop_held_total", "counter", "Times that something held the worker's event loop for over 200 ms"
)
MODEL_BYTES = _worker("teimgr_model_bytes", "gauge", "Weights and buffers of the model on its device")
DEVICE_BYTES = _worker(
    "teimgr_worker_device_bytes", "gauge", "Device memory that the worker's allocator holds, none on the CPU"
)
RESIDENT = _worker("teimgr_worker_resident_bytes", "gauge", "Memory of the worker in RAM, shared parts included")
UNIQUE = _worker("teimgr_worker_unique_bytes", "gauge", "Memory that would be free again without the worker")
CPU_SECONDS = _worker("teimgr_worker_cpu_seconds_total", "counter", "Processor time of the worker")

# Workers: TEI's metrics. On an instance's own port they have no label `instance`.

REQUESTS = _worker("te_request_count", "counter", "Requests, of one input or of several", "method")
REQUEST_SUCCESS = _worker("te_request_success", "counter", "Requests that were answered in full", "method")
REQUEST_FAILURE = _worker("te_request_failure", "counter", "Failures by their reason", "err")
QUEUE_SIZE = _worker("te_queue_size", "gauge", "Inputs that wait for a batch")
INPUT_LENGTH = _worker("te_request_input_length", "histogram", "Tokens of an input", bounds=LENGTH_BOUNDS)
BATCH_SIZE = _worker("te_batch_next_size", "histogram", "Inputs of a batch", bounds=BATCH_SIZE_BOUNDS)
BATCH_TOKENS = _worker("te_batch_next_tokens", "histogram", "Tokens of a batch", bounds=BATCH_TOKENS_BOUNDS)


Durations = tuple[Family, Family, Family, Family]
"""Histograms of the whole time, and of its parts: tokenization, queue and inference."""


@dataclass(frozen=True, slots=True)
class ItemFamilies:
    """The metric families of one kind of input."""

    count: Family
    success: Family
    durations: Durations


def _durations(name: str, what: str) -> Durations:
    def one(part: str, meaning: str) -> Family:
        return _worker(f"{name}{part}_duration", "histogram", f"{meaning} of {what}, seconds", bounds=DURATION_BOUNDS)

    return (
        one("", "Whole time"),
        one("_tokenization", "Time to be tokenized"),
        one("_queue", "Time in the queue"),
        one("_inference", "Time in a batch on the device"),
    )


def _items(name: str, what: str) -> ItemFamilies:
    return ItemFamilies(
        _worker(f"{name}_count", "counter", f"Inputs that were to be {what}"),
        _worker(f"{name}_success", "counter", f"Inputs that were {what}"),
        _durations(name, f"inputs that were {what}"),
    )


REQUEST_DURATIONS = _durations("te_request", "a request")
EMBEDDINGS = _items("te_embed", "embedded")
PREDICTIONS = _items("te_predict", "classified or scored")

# GPUs. A series is absent where the driver does not report it.

GPU_MEMORY_TOTAL = _gpu("teimgr_gpu_memory_total_bytes", "gauge", "Memory of the card", "gpu", "uuid", "name")
GPU_MEMORY_USED = _gpu("teimgr_gpu_memory_used_bytes", "gauge", "Memory of the card in use, by any process", "gpu")
GPU_UTILIZATION = _gpu("teimgr_gpu_utilization_ratio", "gauge", "Share of time with a kernel running", "gpu")
GPU_TEMPERATURE = _gpu("teimgr_gpu_temperature_celsius", "gauge", "Temperature of the card", "gpu")
GPU_POWER = _gpu("teimgr_gpu_power_watts", "gauge", "Power that the card draws", "gpu")
GPU_INSTANCE_MEMORY = _gpu(
    "teimgr_gpu_instance_memory_bytes",
    "gauge",
    "Memory of the card that the driver gave an instance; absent where the driver has no report, as inside containers",
    "gpu",
    "instance",
)


def to_markdown() -> str:
    """Return the text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "<!-- Made by `python -m teimgr.observability.catalogue > docs/metrics.md`; a test checks it. -->",
        "",
        "`GET /metrics` on the REST port has all of these, as text for Prometheus or, with `?format=json`, as JSON. An",
        "instance's own port (and its `prometheus_port`) has its `te_*` alone and without the label `instance`.",
        "Where an instance has several workers their figures are added up.",
        "",
        "For workers' histograms with more than 15 buckets the page has every third bucket and `+Inf`. Histograms",
        "`te_embed_*` and `te_predict_*` are absent for instances without such an input. `?buckets=all` has them all,",
        "as the instance's own port always does.",
        "",
        "The label `instance` is teimgr's instance, and Prometheus gives that name to the scraped address too. Without",
        "`honor_labels: true` in the scrape configuration it renames ours to `exported_instance`, and the dashboard",
        "and alerts in [deploy/](../deploy/README.md) find nothing. `deploy/prometheus/prometheus.yml` sets it.",
    ]
    titles = {"daemon": "The daemon", "mux": "The gRPC multiplexers", "worker": "Each instance", "GPU": "Each GPU"}
    for source, title in titles.items():
        lines += ["", f"## {title}", "", "| name | type | labels | meaning |", "|---|---|---|---|"]
        lines += [_row(family) for family in FAMILIES.values() if family.source == source]
    return "\n".join(lines) + "\n"


def _row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    span = f"; {len(family.bounds)} buckets, {family.bounds[0]:g} to {family.bounds[-1]:g}" if family.bounds else ""
    return f"| `{family.name}` | {family.kind} | {labels or '–'} | {family.help}{span} |"


if __name__ == "__main__":
    print(to_markdown(), end="")
