// Rows of the fleet under the values of a tag: one table body each, headed by a line with its name and sums.
import { $, $$, element } from "./page.js";
import { number } from "./format.js";

const closed = new Set();  // names of groups that are folded
const collator = new Intl.Collator(undefined, { numeric: true });

export function tagsOf(line) {
  return JSON.parse(line.dataset.tags);
}

/** Offers the names of the lines' tags, and keeps the choice. */
export function offer(select, lines) {
  const names = [...new Set(lines.flatMap((line) => Object.keys(tagsOf(line))))].sort(), chosen = select.value;
  const options = names.map((name) => element("option", {}, name));
  select.replaceChildren(element("option", { value: "" }, "nothing"), ...options);
  select.value = names.includes(chosen) ? chosen : "";
  select.parentElement.hidden = !names.length;
}

/** Puts the lines, in the given order, into one body for each value of the tag; into a single one without a tag. */
export function arrange(table, lines, tag) {
  const byValue = new Map(), focused = document.activeElement;
  for (const line of lines) {
    const tags = tag ? tagsOf(line) : {};
    const value = !tag || Object.hasOwn(tags, tag) ? tags[tag] ?? "" : undefined;  // the tag is missing
    if (!byValue.has(value)) byValue.set(value, []);
    byValue.get(value).push(line);
  }
  const values = [...byValue.keys()].sort((x, y) => (x === undefined) - (y === undefined) || collator.compare(x, y));
  const bodies = values.map((value) => {
    const body = element("tbody");
    if (tag) body.append(heading(body, value === undefined ? `without ${tag}` : value || tag, table));
    body.append(...byValue.get(value));
    return body;
  });
  for (const body of $$("tbody", table)) body.remove();
  table.append(...bodies);
  if (table.contains(focused)) focused.focus({ preventScroll: true });
}

function heading(body, name, table) {
  const button = element("button", { type: "button", "aria-expanded": true }, name);
  const fold = (isClosed) => {
    body.classList.toggle("closed", isClosed);
    button.setAttribute("aria-expanded", String(!isClosed));
  };
  button.addEventListener("click", () => {
    if (!closed.delete(name)) closed.add(name);
    fold(closed.has(name));
  });
  fold(closed.has(name));
  const cell = element("th", { scope: "rowgroup", colspan: $$("thead th", table).length }, button, element("small"));
  return element("tr", { class: "group" }, cell);
}

/** Writes the sums of the shown lines into the headings; a group without one is hidden. */
export function sum(table, rows) {
  for (const body of $$("tbody", table)) {
    const head = $(".group", body);
    if (!head) continue;
    const shown = $$("tr[data-name]:not([hidden])", body);
    const failed = shown.filter((line) => line.dataset.state === "failed").length;
    const tokens = shown.reduce((all, line) => all + (rows.get(line.dataset.name)?.tokens ?? 0), 0);
    head.hidden = !shown.length;
    $("small", head).textContent = [
      `${shown.length} instance${shown.length === 1 ? "" : "s"}`,
      failed ? `${failed} failed` : "",
      `${number(tokens)} tokens/s`,
    ].filter(Boolean).join(" · ");
  }
}
