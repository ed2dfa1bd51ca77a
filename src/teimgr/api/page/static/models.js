// Models: add, download with progress, measure, delete.
import { $, $$, api, ask, attempt, prefix, setState, toast } from "./page.js";
import { duration, share, size } from "./format.js";

// The path of a model's routes: its id may have slashes.
const path = (id, rest = "") => `/models/${encodeURIComponent(id)}${rest}`;

function watch(line) {
  const box = $("[data-field=progress]", line);
  const source = new EventSource(prefix + path(line.dataset.model, "/download/events"));
  box.hidden = false;
  const finish = () => { source.close(); box.hidden = true; };
  source.addEventListener("progress", (event) => {
    const now = JSON.parse(event.data);
    $(".fill", box).setAttribute("width", share(now.bytes_done, now.bytes_total));
    const parts = [now.phase === "fetching" ? `${size(now.bytes_done)} of ${size(now.bytes_total)}` : now.phase];
    if (now.rate_bytes_per_s) parts.push(`${size(now.rate_bytes_per_s)}/s`);
    if (now.eta_s) parts.push(`${duration(now.eta_s)} left`);
    $("small", box).textContent = parts.join(", ");
    setState($("[data-field=status]", line), "downloading");
  });
  source.addEventListener("done", (event) => { finish(); show(line, JSON.parse(event.data)); });
  source.addEventListener("model", (event) => { finish(); show(line, JSON.parse(event.data)); });
  source.addEventListener("failed", (event) => {
    finish();
    const { error } = JSON.parse(event.data);
    setState($("[data-field=status]", line), "failed");
    $("[data-field=problem]", line).textContent = error;
    toast(error, "bad");
  });
  source.onerror = () => { if (source.readyState === EventSource.CLOSED) finish(); };
}

// REST calls a model "available" that is not on this host; nobody knows yet whether there is one of that name.
function showStatus(line, status) {
  const shown = $("[data-field=status]", line);
  setState(shown, status);
  if (status === "available") shown.textContent = "not downloaded";
}

function show(line, model) {
  line.dataset.status = model.status;
  showStatus(line, model.status);
  $("[data-field=problem]", line).textContent = model.download_error ?? model.verification_error ?? "";
  const download = $("[data-do=download]", line);
  if (download) {
    download.hidden = model.downloaded;
    $("[data-do=load]", line).hidden = !model.downloaded;
  }
}

const actions = {
  async download(line) {
    await api("POST", path(line.dataset.model, "/download?wait=false"), {});
    watch(line);
  },
  async load(line) {
    setState($("[data-field=status]", line), "loading");
    const model = await api("POST", path(line.dataset.model, "/load"), {});
    if (model.verification_error) throw new Error(model.verification_error);
    location.reload();
  },
  async delete(line) {
    const sure = await ask("Delete this model?", `The files of ${line.dataset.model} in the hub's cache are removed. A directory of your own stays.`, "Delete");
    if (!sure) return;
    await api("DELETE", path(line.dataset.model));
    line.remove();
  },
};

for (const line of $$("#models tbody tr")) {
  if (line.dataset.status === "downloading") watch(line);
  for (const button of $$("[data-do]", line)) {
    button.addEventListener("click", async () => {
      const before = line.dataset.status;
      if (!(await attempt(button, () => actions[button.dataset.do](line)))) showStatus(line, before);
    });
  }
}

$("#add-model")?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const id = event.target.elements.model.value.trim();
  const added = await attempt($("button", event.target), async () => {
    await api("POST", "/models", { model_id: id });
    await api("POST", path(id, "/download?wait=false"), {});
  });
  if (added) location.reload();
});
