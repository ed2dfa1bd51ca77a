// One instance: live charts, life line, log, settings, actions.
import { $, $$, api, ask, attempt, copy, element, follow, instancePath, json, prefix, setState, toast } from "./page.js";
import { clock, duration, gapped, joined, milliseconds, moment, NOTHING, number, size } from "./format.js";
import { clearFaults, fieldsOf, showFaults, textOf, valueOf } from "./forms.js";

const name = $("#instance").dataset.name;
let { row, info } = json("info");

// Charts. A point is [time, requests, failures, texts, tokens, p50, p99, queue, memory, busy, refused].

const percent = (value) => (value == null ? NOTHING : `${Math.round(100 * value)} %`);
const CHARTS = {
  requests: { columns: [1], format: number },
  errors: { columns: [2, 10], format: number, labels: ["failed", "refused"] },
  tokens: { columns: [4], format: number },
  latency: { columns: [5, 6], format: (value) => milliseconds(value == null ? null : value * 1000), labels: ["median", "p99"] },
  queue: { columns: [7], format: number },
  memory: { columns: [8], format: size },
  busy: { columns: [9], format: percent, most: 1 },
};
const points = { fine: [], coarse: [] };
const KEPT = { fine: 150, coarse: 240 };
const SPAN_S = { fine: 300, coarse: 3600 };
const GAP_S = 45;  // some times the pace of the samples while no page is open
const span = () => $("input[name=span]:checked").value;
const charts = new Map();

function colour(variable) {
  const probe = element("span");
  probe.style.color = `var(${variable})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const BINARY = Array.from({ length: 24 }, (_, power) => 2 ** (power + 20));

let shown = [];
const choose = () => { shown = gapped(span() === "fine" ? joined(points.fine, points.coarse) : points.coarse, GAP_S); };

function dataOf({ columns }) {
  return [shown.map((point) => point[0]), ...columns.map((column) => shown.map((point) => point[column] ?? null))];
}

function draw() {
  choose();
  const grid = { stroke: colour("--line"), width: 1 }, text = colour("--muted");
  const strokes = [colour("--accent"), colour("--second")];
  const axis = { stroke: text, grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  for (const [id, chart] of Object.entries(CHARTS)) {
    charts.get(id)?.destroy();
    const box = $(`[data-chart=${id}]`);
    const series = chart.columns.map((_, index) => ({
      stroke: strokes[index], width: 1.6, spanGaps: false, label: chart.labels?.[index] ?? id,
      points: { show: (self, at, from, to) => to - from < 3, size: 4 },
      fill: chart.columns.length === 1 ? strokes[0].replace(/^rgb\((.*)\)$/, "rgba($1, 0.1)") : undefined,
    }));
    const options = {
      width: box.clientWidth, height: 130, legend: { show: false }, cursor: { y: false, points: { size: 6 }, sync: { key: "load" } },
      scales: {
        x: { time: true, range: () => { const end = Date.now() / 1000; return [end - SPAN_S[span()], end]; } },
        y: { range: (self, low, high) => [0, Math.max(chart.most ?? 0, (high || 0) * 1.15, id === "memory" ? 2 ** 20 : id === "latency" ? 1e-3 : 1)] },
      },
      axes: [
        { ...axis, size: 22, space: 48, values: (self, ticks) => ticks.map((tick) => new Date(tick * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false })) },
        { ...axis, size: 62, space: 28, incrs: id === "memory" ? BINARY : undefined, values: (self, ticks) => ticks.map((tick) => chart.format(tick)) },
      ],
      series: [{}, ...series],
      hooks: { setCursor: [(self) => latest(id, self.cursor.idx)] },
    };
    charts.set(id, new uPlot(options, dataOf(chart), box));
    latest(id, null);
  }
}

/** The values at the cursor, which all charts share, or else the last ones; those of several lines have their colours. */
function latest(id, index) {
  const { columns, format, labels } = CHARTS[id], box = $(`[data-chart=${id}]`);
  const point = shown[index ?? shown.length - 1];
  const values = columns.map((column, at) => `${labels ? `${labels[at]} ` : ""}${format(point?.[column])}`);
  const time = index == null || !point ? "" : `${new Date(point[0] * 1000).toLocaleTimeString([], { hour12: false })}  `;
  $(`[data-latest=${id}]`).replaceChildren(time, ...values.flatMap((text, at) => (labels ? [" ", element("span", { class: `key key-${at}` }, text)] : [text])));
  if (index == null) box.setAttribute("aria-label", `${box.previousElementSibling.firstChild.textContent.trim()}: now ${values.join(", ")}`);
}

function refresh() {
  choose();
  for (const [id, chart] of charts) {
    chart.setData(dataOf(CHARTS[id]));
    if (chart.cursor.idx == null) latest(id, null);
  }
}

new ResizeObserver(() => {
  for (const [id, chart] of charts) {
    const width = $(`[data-chart=${id}]`).clientWidth;
    if (width && width !== chart.width) chart.setSize({ width, height: 130 });
  }
}).observe($(".charts"));
document.addEventListener("theme", draw);
for (const choice of $$("input[name=span]")) choice.addEventListener("change", refresh);
if (document.readyState === "complete") draw(); else addEventListener("load", draw);

// The instance as it is now.

const reads = () => info.model?.modalities ?? ["text"];
const facts = {
  kind: () => info.kind ?? NOTHING,
  reads: () => reads().join(", "),
  dimension: () => info.model?.dimension || NOTHING,
  dtype: () => info.dtype,
  max_input_length: () => (info.model ? `${info.model.max_input_length} tokens` : NOTHING),
  device: () => row.device,
  memory: () => size(row.memory),
  port: () => info.port,
  uptime: () => duration(info.uptime_secs),
  restarts: () => info.restarts,
  last_health_check: () => moment(info.last_health_check),
};

// By kind: the route at the daemon's address, and a body.
const CALLS = {
  embedding: ["/v1/embeddings", { model: name, input: "a text" }],
  reranker: ["/v1/rerank", { model: name, query: "a question", documents: ["a text", "another"] }],
  classifier: [`/instances/${name}/predict`, { inputs: "a text" }],
  "token-classifier": [`/instances/${name}/predict`, { inputs: "a text" }],
  sparse: [`/instances/${name}/embed_sparse`, { inputs: "a text" }],
  "multi-vector": [`/instances/${name}/embed_all`, { inputs: "a text" }],
};

function showCall() {
  const box = $("#call");
  if (!box) return;
  const [path, body] = CALLS[info.kind] ?? CALLS.embedding, address = `${location.origin}${prefix}${path}`;
  box.hidden = !info.kind;
  $("[data-address=http]", box).textContent = address;
  const key = "keys" in box.dataset ? ' -H "Authorization: Bearer $TEIMGR_API_KEY"' : "";
  $("pre code", box).textContent = reads().includes("text")
    ? `curl ${address} --json '${JSON.stringify(body)}'${key}`
    : `curl ${address} --json @-${key} <<END\n${JSON.stringify({ model: name, input: [{ image: "$(base64 -w0 picture.png)" }] })}\nEND`;
}
$("#copy")?.addEventListener("click", () => copy($("#call pre code")));

function show() {
  showCall();
  setState($("h1 .state"), info.status);
  $("h1 .attempt").textContent = row.attempt;
  for (const [fact, text] of Object.entries(facts)) {
    const cell = $(`[data-fact=${fact}]`), now = String(text());
    if (cell.textContent !== now) cell.textContent = now;
  }
  $("#reason").textContent = info.reason ?? "";
  $("#reason").hidden = !info.reason;
  $("#reason").classList.toggle("bad", info.status !== "unloaded");
  const warnings = info.model?.warnings ?? [], files = $("#model-warnings");
  files.hidden = !warnings.length;
  $("ul", files).replaceChildren(...warnings.map((text) => element("li", {}, text)));
  const update = info.update, box = $("#update");
  box.hidden = !update || update.state === "done";
  if (update) {
    const what = update.changes.length ? `Change of ${update.changes.join(", ")}` : "Rolling restart";
    box.textContent = update.state === "rolling" ? `${what}: new workers are starting beside the old ones.` : `${what} failed and was rolled back: ${update.reason}`;
    box.classList.toggle("bad", update.state === "failed");
  }
  $("#as-of").textContent = row.as_of ? `no answer since ${clock(row.as_of)}` : "";
  $("#facts").classList.toggle("stale", row.as_of != null);
  $("#replicas tbody").replaceChildren(...info.workers.map((worker, index) => element("tr", { class: row.silent[index] ? "stale" : "" },
    element("th", { scope: "row" }, String(worker.replica)),
    element("td", {}, element("span", { class: `state ${worker.state}` }, worker.state), worker.role === "serving" ? null : element("small", {}, worker.role),
      row.silent[index] ? element("small", { class: "as-of" }, ` no answer since ${clock(row.silent[index])}`) : null),
    element("td", {}, worker.gpu_id != null ? `GPU ${worker.gpu_id}` : worker.pid ? "CPU" : NOTHING),
    element("td", {}, String(worker.pid ?? NOTHING)),
    element("td", { class: "number" }, duration(worker.uptime_secs)),
    element("td", { class: "number" }, String(worker.restarts)))));
  $("#try")?.toggleAttribute("hidden", info.status !== "running");
  const isWanted = info.wanted_running;
  for (const button of $$("[data-action]")) {
    const action = button.dataset.action;
    if (action === "start") button.hidden = isWanted && info.status !== "failed";
    if (action === "stop") button.hidden = !isWanted;
    if (action === "restart") button.hidden = !isWanted || info.status === "failed";
  }
  const test = $("#self-test");
  if (!test.dataset.busy) test.disabled = info.status !== "running";
}

function addEvents(events) {
  for (const each of events) {
    if ($(`#life [data-id="${each.id}"]`)) continue;
    if (each.replaces != null) $(`#life [data-id="${each.replaces}"]`)?.remove();
    $("#life").prepend(element("li", { "data-id": each.id },
      element("time", { datetime: each.timestamp }, moment(each.timestamp)), " ",
      element("b", { class: `kind ${each.event}` }, each.event.replaceAll("_", " ")),
      each.count > 1 ? element("span", { class: "count", title: `since ${moment(each.first_timestamp)}` }, ` ${each.count} times`) : null,
      each.reason ? element("span", { class: "reason" }, each.reason) : null,
      each.by ? element("span", { class: "by" }, ` by ${each.by}`) : null,
      each.crash_report ? element("code", {}, each.crash_report) : null));
  }
  while ($("#life").children.length > 100) $("#life").lastElementChild.remove();
  $("#no-events").hidden = $("#life").children.length > 0;
}

const newest = () => $("#life").firstElementChild?.dataset.id ?? 0;
const live = follow(() => `/ui/instances/${encodeURIComponent(name)}/live?after=${newest()}`, {
  instance(now) {
    ({ row, info } = now);
    for (const [ring, kept] of Object.entries(KEPT)) points[ring] = [...points[ring], ...now.points[ring]].slice(-kept);
    show();
    addEvents(now.events);
    refresh();
    if (!isEdited()) load();
  },
  gone() { live.end(); location.assign(`${prefix}/ui/fleet`); },
}, { opened() { points.fine = []; points.coarse = []; } });
show();

// Actions

const done = { start: "Starting", stop: "Stopping", restart: "Restarting" };
for (const button of $$("[data-action]")) {
  button.addEventListener("click", async () => {
    const action = button.dataset.action;
    if (action === "delete") {
      if (!(await ask(`Delete ${name}?`, "Its workers stop and its settings are removed. Its log stays.", "Delete"))) return;
      if (await attempt(button, () => api("DELETE", instancePath(name)))) location.assign(`${prefix}/ui/fleet`);
      return;
    }
    if (action === "stop" && !(await ask(`Stop ${name}?`, "Its callers are refused until it is started again, also after a restart of the daemon.", "Stop"))) return;
    // A running instance restarts without a gap.
    const body = action === "restart" ? { rolling: info.status === "running" } : undefined;
    await attempt(button, () => api("POST", instancePath(name, `/${action}`), body), `${done[action]} ${name}`);
  });
}

$("#self-test").addEventListener("click", async (event) => {
  const button = event.currentTarget, list = $("#self-test-result");
  button.dataset.busy = "yes";
  list.replaceChildren(element("li", { class: "muted" }, "Running …"));
  await attempt(button, async () => {
    const health = await api("GET", instancePath(name, "/health?probe=true"));
    const proofs = health.proofs ?? [];
    list.replaceChildren(...proofs.map((proof, index) => element("li", {},
      element("span", { class: `state ${proof.ok ? "running" : "failed"}` }, proof.ok ? "passed" : "failed"),
      ` worker ${index}, ${milliseconds(proof.seconds * 1000)}${proof.problem ? `: ${proof.problem}` : ""}`)));
    if (!proofs.length) list.replaceChildren(element("li", {}, "No worker could be asked."));
  });
  delete button.dataset.busy;
  show();
});

// Log

const log = $("#log"), LINES = 1000;
let held = [], isPaused = false;

function logLine(text) {
  let event = null;
  try { event = text.startsWith("{") ? JSON.parse(text) : null; } catch { /* a line of another program */ }
  if (!event?.level) return element("div", {}, text);
  const { ts, timestamp, level, message, msg, event: title, logger, target, fields, ...rest } = event;
  const more = Object.entries({ ...rest, ...(typeof fields === "object" ? fields : {}) }).filter(([key, value]) => key !== "message" && value !== null && value !== "" && !(Array.isArray(value) && !value.length))
    .map(([key, value]) => `${key}=${typeof value === "object" ? JSON.stringify(value) : value}`).join("  ");
  const word = String(level).toLowerCase();
  return element("div", { class: word },
    element("time", {}, moment(ts ?? timestamp ?? "").slice(11)), element("span", { class: "level" }, word),
    String(message ?? msg ?? title ?? fields?.message ?? ""), more ? element("span", { class: "more" }, `  ${more}`) : null);
}

function matches(line) {
  return line.textContent.toLowerCase().includes($("#log-filter").value.trim().toLowerCase());
}

function append(texts) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  for (const text of texts) {
    const line = logLine(text);
    line.hidden = !matches(line);
    log.append(line);
  }
  while (log.children.length > LINES) log.firstElementChild.remove();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

let waiting = [];
function flush() {
  const texts = waiting;
  waiting = [];
  append(texts);
}

const logs = follow(() => {
  const level = $("#log-level").value;
  return instancePath(name, `/logs?follow=true&start=-200${level ? `&level=${level}` : ""}`);
}, {
  line({ line }) {
    if (isPaused) { held = [...held, line].slice(-LINES); return; }
    if (!waiting.length) requestAnimationFrame(flush);
    waiting.push(line);
  },
  gap({ reason }) { append([`… ${reason}`]); },
}, { light: true, opened() { log.replaceChildren(); } });
$("#log-level").addEventListener("change", () => logs.reopen());
$("#log-filter").addEventListener("input", () => { for (const line of log.children) line.hidden = !matches(line); });
$("#log-pause").addEventListener("click", (event) => {
  isPaused = !isPaused;
  event.currentTarget.setAttribute("aria-pressed", String(isPaused));
  event.currentTarget.textContent = isPaused ? "Continue" : "Pause";
  if (!isPaused) { append(held); held = []; }
});

// Settings

const form = $("#settings"), submit = $("button[type=submit]", form), problem = $("#settings-error");
const initial = new Map(fieldsOf(form).map((field) => [field, textOf(field)]));
const changedFields = () => fieldsOf(form).filter((field) => textOf(field) !== initial.get(field));
const isEdited = () => changedFields().length > 0 || form.contains(document.activeElement);

/** Fields that nobody edits follow changes made elsewhere. */
function load() {
  for (const field of fieldsOf(form)) {
    const key = field.dataset.key, value = info[key];
    // Once a model is loaded, these are the ones in use, which may differ from the requested ones.
    if (["dtype", "kind", "pooling", "threads"].includes(key)) continue;
    let text = value == null ? "" : String(value);
    if (field.dataset.widget === "lines") text = (value ?? []).join("\n");
    if (field.dataset.widget === "pairs") text = Object.entries(value ?? {}).map(([tag, word]) => `${tag}=${word}`).join("\n");
    if (field.dataset.widget === "auto" && value === 0) text = "auto";
    if (field.tagName === "SELECT" && ![...field.options].some((option) => option.value === text)) text = "";  // the default
    if (field.dataset.widget === "switch") field.checked = field.defaultChecked = value === true;
    else if (field.value !== text) field.value = field.defaultValue = text;
    initial.set(field, textOf(field));
  }
}

function mark() {
  const changed = changedFields();
  for (const field of fieldsOf(form)) field.closest(".field").classList.toggle("changed", changed.includes(field));
  if (submit) {
    submit.disabled = !changed.length;
    submit.textContent = changed.length > 1 ? `Apply ${changed.length} changes` : "Apply changes";
  }
}

form.addEventListener("input", mark);
form.addEventListener("reset", () => setTimeout(() => { clearFaults(form, problem); mark(); }));
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  clearFaults(form, problem);
  submit.disabled = true;
  try {
    const changed = changedFields();
    const body = Object.fromEntries(changed.map((field) => [field.dataset.key, valueOf(field) ?? null]));
    await api("PATCH", instancePath(name), body);
    for (const field of changed) {
      initial.set(field, textOf(field));
      if (field.type === "checkbox") field.defaultChecked = field.checked;
      else if (field.tagName !== "SELECT") field.defaultValue = field.value;
      else for (const option of field.options) option.defaultSelected = option.selected;
    }
    toast(`Accepted: ${Object.keys(body).join(", ")}`);
  } catch (error) {
    showFaults(form, problem, error);
  }
  mark();
});
