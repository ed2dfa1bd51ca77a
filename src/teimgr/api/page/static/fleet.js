// The fleet: rows that follow the live stream, a filter, sorting.
import { $, $$, alarmItems, follow, prefix, setState } from "./page.js";
import { milliseconds, number, share, size, spark } from "./format.js";

const table = $("#fleet");
const rows = new Map();  // as the live stream has sent them
const lines = new Map($$("tbody tr", table ?? document).map((line) => [line.dataset.name, line]));
const shownAs = {
  device: (row) => row.device,
  workers: (row) => row.workers,
  attempt: (row) => row.attempt,
  reason: (row) => row.reason ?? "",
  memory: (row) => size(row.memory),
  tokens: (row) => number(row.tokens),
  requests: (row) => number(row.requests),
  errors: (row) => number(row.errors),
  refused: (row) => number(row.refused),
  queue: (row) => number(row.queue),
  p99: (row) => milliseconds(row.p99),
};

function update(line, row) {
  for (const [name, text] of Object.entries(shownAs)) {
    const cell = $(`[data-field=${name}]`, line), now = text(row);
    if (cell.textContent !== now) cell.textContent = now;
  }
  $("[data-field=reason]", line).title = row.reason ?? "";
  if (line.dataset.state !== row.state) {
    line.dataset.state = row.state;
    setState($("[data-field=state]", line), row.state);
  }
  $(".bar .fill", line).setAttribute("width", share(row.memory, row.memory_total));
  $(".spark polyline", line).setAttribute("points", spark(row.spark));
}

/** Rows that are new come rendered from the server, as the first ones did. */
async function fetchRows() {
  const text = await (await fetch(`${prefix}/ui/fleet`)).text();
  const page = new DOMParser().parseFromString(text, "text/html");
  for (const line of $$("#fleet tbody tr", page)) {
    if (lines.has(line.dataset.name)) continue;
    $("tbody", table).append(document.adoptNode(line));
    lines.set(line.dataset.name, line);
  }
  sort();
  filter();
}

let fetching = null;
function onFleet({ rows: changed, gone, totals, alarms }) {
  if (!table) { if (changed.length) location.reload(); return; }
  let isNew = false, stateChanged = gone.length > 0;
  for (const row of changed) {
    const line = lines.get(row.name);
    stateChanged ||= rows.get(row.name)?.state !== row.state;
    rows.set(row.name, row);
    if (line) update(line, row);
    else isNew = true;
  }
  for (const name of gone) {
    lines.get(name)?.remove();
    lines.delete(name);
    rows.delete(name);
  }
  for (const cell of $$("[data-total]")) {
    const name = cell.dataset.total;
    const value = name in totals.states ? totals.states[name] : totals[name];
    cell.textContent = name === "memory" ? size(value) : number(value);
  }
  showAlarms(alarms);
  if (isNew) fetching ??= fetchRows().finally(() => { fetching = null; });
  if (stateChanged) filter();
}

let alarmsShown = null;
function showAlarms(alarms) {
  const now = JSON.stringify(alarms);
  if (now === alarmsShown) return;
  alarmsShown = now;
  $("#alarms").hidden = !alarms.length;
  $("#alarms h2").textContent = `${alarms.length} alarm${alarms.length === 1 ? "" : "s"}`;
  $("#alarm-list").replaceChildren(...alarmItems(alarms));
}

function filter() {
  const words = $("#filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const state = $("input[name=state]:checked").value;
  let shown = 0;
  for (const line of lines.values()) {
    const matches = (!state || line.dataset.state === state) && words.every((word) => line.dataset.find.includes(word));
    line.hidden = !matches;
    shown += matches;
  }
  $("#shown").textContent = words.length || state ? `${shown} shown` : "";
  $("#none").hidden = shown > 0;
}

/** The filter is in the address, so that a view can be kept and sent. */
function keepFilter() {
  const query = new URLSearchParams({ q: $("#filter").value, status: $("input[name=state]:checked").value });
  for (const [key, value] of [...query]) if (!value) query.delete(key);
  history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}${location.hash}`);
  filter();
}

function takeFilter() {
  const query = new URLSearchParams(location.search);
  $("#filter").value = query.get("q") ?? "";
  for (const choice of $$("input[name=state]")) choice.checked = choice.value === (query.get("status") ?? "");
  if (!$("input[name=state]:checked")) $("input[name=state]").checked = true;
  filter();
}

const TEXTS = ["name", "state", "device"], collator = new Intl.Collator(undefined, { numeric: true });
let order = null;
function sort() {
  if (!order) return;
  const { key, sign } = order, isText = TEXTS.includes(key);
  const compare = isText ? collator.compare : (x, y) => x - y;
  // Without a value, last from the greatest down.
  const keyed = [...lines.values()].map((line) => [rows.get(line.dataset.name)?.[key] ?? (isText ? "" : -1), line]);
  keyed.sort(([x], [y]) => sign * compare(x, y));
  $("tbody", table).append(...keyed.map(([, line]) => line));
}

if (table) {
  for (const head of $$("th[data-sort]", table)) {
    $("button", head).addEventListener("click", () => {
      const key = head.dataset.sort;
      order = { key, sign: order?.key === key ? -order.sign : TEXTS.includes(key) ? 1 : -1 };
      for (const other of $$("th[aria-sort]", table)) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order.sign > 0 ? "ascending" : "descending");
      sort();
    });
  }
  $("#filter").addEventListener("input", keepFilter);
  for (const choice of $$("input[name=state]")) choice.addEventListener("change", keepFilter);
  takeFilter();
}
follow("/ui/fleet/live", { fleet: onFleet });
