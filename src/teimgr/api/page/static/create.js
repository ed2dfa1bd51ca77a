// The form of a new instance.
import { $, $$, api, prefix } from "./page.js";
import { size } from "./format.js";
import { clearFaults, fieldsOf, showFaults, valueOf } from "./forms.js";

const form = $("#create"), problem = $("#create-error"), estimate = $("#estimate");
const field = (name) => fieldsOf(form).find((each) => each.dataset.key === name);
const model = field("model_id"), name = field("name");

/** A name made from the model, until the user gives one. */
let proposed = "";
function propose() {
  if (name.value && name.value !== proposed) return;
  const last = model.value.trim().split("/").filter(Boolean).pop() ?? "";
  name.value = proposed = last.toLowerCase().replace(/[^a-z0-9._-]/g, "-").replace(/^[^a-z0-9]+/, "").slice(0, 64);
}

function entered() {
  const values = fieldsOf(form).map((each) => [each.dataset.key, valueOf(each)]);
  return Object.fromEntries(values.filter(([, value]) => value !== undefined && value !== false));
}

const SOURCES = { measured: "measured on earlier workers", predicted: "from the sizes in its files", assumed: "assumed, as its files are not here yet" };
const OUTCOMES = { starts: "It fits.", waits: "It waits until models on demand can be unloaded.", on_demand: "Its first call loads it." };

/** What the instance would take here, by a plan of it; nothing where the form is not complete. */
let asked = 0;
async function showEstimate() {
  const number = ++asked;
  let text = "", isBad = false;
  try {
    const body = { ...entered(), name: "the-new-one" };
    const workers = body.model_id || body.template ? (await api("POST", "/plan", { instances: [body] })).workers.filter((each) => each.instance === body.name) : [];
    const total = (key) => workers.reduce((sum, each) => sum + each[key], 0), refused = workers.find((each) => each.outcome === "refused");
    const parts = [total("host_bytes") && `${size(total("host_bytes"))} of memory`, total("device_bytes") && `${size(total("device_bytes"))} on the GPU`].filter(Boolean);
    isBad = Boolean(refused);
    if (workers.length) text = [parts.length ? `Takes about ${parts.join(" and ")} (${SOURCES[workers[0].source] ?? "unknown"}).` : "", refused ? `It does not fit: ${refused.reason}` : OUTCOMES[workers[0].outcome] ?? ""].join(" ").trim();
  } catch { /* the answer to the form says what is wrong */ }
  if (number !== asked) return;
  estimate.textContent = text;
  estimate.hidden = !text;
  estimate.classList.toggle("bad", isBad);
}

if (form.dataset.model) { model.value = form.dataset.model; propose(); }
(model.value ? name : model).focus();
model.addEventListener("input", propose);
if (estimate) { form.addEventListener("change", showEstimate); showEstimate(); }
for (const button of $$("[data-popular]")) {
  button.addEventListener("click", () => {
    model.value = button.dataset.popular;
    for (const type of ["input", "change"]) model.dispatchEvent(new Event(type, { bubbles: true }));
    name.focus();
  });
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = $("button[type=submit]", form);
  clearFaults(form, problem);
  button.disabled = true;
  try {
    const made = await api("POST", "/instances", entered());
    location.assign(`${prefix}/ui/instances/${encodeURIComponent(made.name)}`);
  } catch (error) {
    showFaults(form, problem, error);
    button.disabled = false;
  }
});
