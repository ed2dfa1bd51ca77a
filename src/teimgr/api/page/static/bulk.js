// Start, restart or stop every instance that the filter shows: asks with their number, and tells what was refused.
import { $, $$, api, ask, instancePath, toast } from "./page.js";

const AT_ONCE = 4;  // a browser has six connections for all tabs of a host
const MOST_NAMED = 8;
const ACTIONS = {
  start: { title: "Start", done: "Starting", on: ["stopped", "failed"], text: "" },
  restart: {
    title: "Restart", done: "Restarting", on: ["running", "starting", "failed"],
    text: "Those that run serve on until their successors do.",
  },
  stop: {
    title: "Stop", done: "Stopped", on: ["running", "starting", "failed", "unloaded"],
    text: "Their callers are refused until they are started again, also after a restart of the daemon.",
  },
};

let shown = [], isBusy = false;

const counted = (count) => `${count} instance${count === 1 ? "" : "s"}`;
const concerned = (action) => shown.filter((line) => ACTIONS[action].on.includes(line.dataset.state));

/** Offers the actions for the lines that a filter shows; none where everything is shown. */
export function offerActions(lines, isFiltered) {
  shown = lines;
  const bulk = $("#bulk");
  if (!bulk) return;
  bulk.hidden = !isBusy && (!isFiltered || !lines.length);
  for (const button of $$("button", bulk)) {
    const count = concerned(button.dataset.bulk).length;
    button.textContent = `${ACTIONS[button.dataset.bulk].title} ${count}`;
    button.disabled = isBusy || !count;
  }
}

async function act(action) {
  // Those of this moment: rows may come and go while the question is open.
  const lines = concerned(action).map((line) => ({ name: line.dataset.name, rolling: line.dataset.state === "running" }));
  const { title, done, text } = ACTIONS[action], rest = lines.length - MOST_NAMED;
  const names = lines.slice(0, MOST_NAMED).map((line) => line.name).join(", ") + (rest > 0 ? ` and ${rest} more` : "");
  if (!(await ask(`${title} ${counted(lines.length)}?`, `${names}. ${text}`, `${title} ${lines.length}`))) return;
  const waiting = [...lines], refused = [];
  const work = async () => {
    for (let line = waiting.shift(); line; line = waiting.shift()) {
      $("#bulk-status").textContent = `${lines.length - waiting.length} of ${lines.length}`;
      const body = action === "restart" ? { rolling: line.rolling } : undefined;
      await api("POST", instancePath(line.name, `/${action}`), body).catch((error) => refused.push(`${line.name}: ${error.message}`));
    }
  };
  isBusy = true;
  for (const button of $$("#bulk button")) button.disabled = true;
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  isBusy = false;
  $("#bulk-status").textContent = "";
  const count = lines.length - refused.length;
  if (count) toast(`${done} ${counted(count)}`);
  if (refused.length) toast(`${counted(refused.length)} refused: ${refused.slice(0, 3).join("; ")}${refused.length > 3 ? "; …" : ""}`, "bad");
}

for (const button of $$("[data-bulk]")) {
  button.addEventListener("click", () => act(button.dataset.bulk).then(() => document.dispatchEvent(new Event("bulk-done"))));
}
