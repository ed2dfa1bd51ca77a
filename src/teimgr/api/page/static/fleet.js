// The fleet: rows that follow the live stream, a filter, sorting, groups, density.
import { $, $$, alarmItems, follow, prefix, setState } from "./page.js";
import { clock, milliseconds, number, share, size, spark } from "./format.js";
import { offerActions } from "./bulk.js";
import { accepts, fromAddress, lineOf, parse, toAddress } from "./filters.js";
import { arrange, offer, sum, tagsOf } from "./groups.js";

const table = $("#fleet");
const rows = new Map();  // as the live stream has sent them
const lines = new Map($$("tbody tr", table ?? document).map((line) => [line.dataset.name, line]));
const shownAs = {
  device: (row) => row.device,
  workers: (row) => row.workers,
  attempt: (row) => row.attempt,
  as_of: (row) => (row.as_of ? `no answer since ${clock(row.as_of)}` : ""),
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
  line.classList.toggle("stale", row.as_of != null);
  $("[data-field=reason]", line).title = row.reason ?? "";
  if (line.dataset.state !== row.state) {
    line.dataset.state = row.state;
    setState($("[data-field=state]", line), row.state);
  }
  $(".bar .fill", line).setAttribute("width", share(row.memory, row.memory_total));
  line.dataset.tags = JSON.stringify(row.tags);
  draw(line, row);
}

/** The lines of all instances end at the same value. */
let sparkTop = 0;
function draw(line, row) {
  $(".spark path", line).setAttribute("d", spark(row.spark, sparkTop));
}

/** Rows that are new come rendered from the server, as the first ones did. */
async function fetchRows() {
  const text = await (await fetch(`${prefix}/ui/fleet`)).text();
  const page = new DOMParser().parseFromString(text, "text/html");
  for (const line of $$("#fleet tbody tr", page)) {
    if (lines.has(line.dataset.name)) continue;
    lines.set(line.dataset.name, document.adoptNode(line));
  }
  regroup();
}

let fetching = null;
function onFleet({ rows: changed, gone, totals, alarms }) {
  if (!table) { if (changed.length) location.reload(); return; }
  const isRescaled = sparkTop !== totals.spark_top;
  sparkTop = totals.spark_top;
  let isNew = false, isMoved = false, stateChanged = gone.length > 0;
  for (const row of changed) {
    const line = lines.get(row.name);
    rows.set(row.name, row);
    if (!line) { isNew = true; continue; }
    stateChanged ||= line.dataset.state !== row.state;
    isMoved ||= JSON.stringify(tagsOf(line)) !== JSON.stringify(row.tags);
    update(line, row);
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
  if (isRescaled) for (const [name, row] of rows) if (lines.has(name)) draw(lines.get(name), row);
  showAlarms(alarms);
  if (isNew) fetching ??= fetchRows().finally(() => { fetching = null; });
  if (isMoved) regroup();
  else if (stateChanged) filter();
  else sum(table, rows);
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

/** The filter of the field and of the choice of states, one of which says the states. */
function chosen() {
  const found = parse($("#filter").value), state = $("input[name=state]:checked").value;
  return state ? { ...found, status: [state] } : found;
}

function filter() {
  const wanted = chosen(), shown = [];
  for (const line of lines.values()) {
    line.hidden = !accepts(wanted, { name: line.dataset.name, model: $(".model", line).textContent, tags: tagsOf(line), state: line.dataset.state });
    if (!line.hidden) shown.push(line);
  }
  const isFiltered = Object.values(wanted).some((values) => values.length);
  $("#shown").textContent = isFiltered ? `${shown.length} shown` : "";
  $("#none").hidden = shown.length > 0;
  offerActions(shown, isFiltered);
  sum(table, rows);
}

function regroup() {
  offer($("#group"), [...lines.values()]);
  sort();
  filter();
}

/** The filter is in the address, so that a view can be kept and sent. */
function keepFilter({ target }) {
  const entered = parse($("#filter").value);
  if (target.name === "state") $("#filter").value = entered.status.length ? lineOf({ ...entered, status: [] }) : $("#filter").value;
  else if (entered.status.length) $("input[name=state]").checked = true;
  const query = toAddress(chosen());
  if ($("#group").value) query.set("group", $("#group").value);
  history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}${location.hash}`);
  filter();
}

function takeFilter() {
  const query = new URLSearchParams(location.search), choices = $$("input[name=state]");
  const found = fromAddress(query, choices.map((choice) => choice.value)), [state, ...others] = found.status;
  choices.find((choice) => choice.value === (others.length ? "" : state ?? "")).checked = true;
  $("#filter").value = lineOf(others.length ? found : { ...found, status: [] });
  $("#group").value = query.get("group") ?? "";
  if ($("#group").selectedIndex < 0) $("#group").value = "";
  sort();
  filter();
}

const TEXTS = ["name", "state", "device"], collator = new Intl.Collator(undefined, { numeric: true });
let order = null;
/** The lines in the chosen order, by default the server's, within their groups. */
function sort() {
  arrange(table, order ? sorted(order) : [...lines.values()], $("#group").value);
}

function sorted({ key, sign }) {
  const isText = TEXTS.includes(key);
  const compare = isText ? collator.compare : (x, y) => x - y;
  // Without a value, last from the greatest down.
  const keyed = [...lines.values()].map((line) => [rows.get(line.dataset.name)?.[key] ?? (isText ? "" : -1), line]);
  keyed.sort(([x], [y]) => sign * compare(x, y));
  return keyed.map(([, line]) => line);
}

if (table) {
  for (const head of $$("th[data-sort]", table)) {
    $("button", head).addEventListener("click", () => {
      const key = head.dataset.sort;
      order = { key, sign: order?.key === key ? -order.sign : TEXTS.includes(key) ? 1 : -1 };
      for (const other of $$("th[aria-sort]", table)) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order.sign > 0 ? "ascending" : "descending");
      sort();
      sum(table, rows);
    });
  }
  $("#filter").addEventListener("input", keepFilter);
  for (const choice of $$("input[name=state]")) choice.addEventListener("change", keepFilter);
  $("#group").addEventListener("change", (event) => { sort(); keepFilter(event); });
  const dense = $("#dense"), root = document.documentElement;
  dense.checked = root.dataset.density === "dense";
  dense.addEventListener("change", () => {
    root.dataset.density = dense.checked ? "dense" : "";
    try { localStorage.setItem("teimgr-density", root.dataset.density); } catch { /* for this view alone */ }
  });
  document.addEventListener("bulk-done", filter);
  takeFilter();
}
follow("/ui/fleet/live", { fleet: onFleet });
