// The playground: similarities, reranking, classification and tokens, for one model or two, and the same call elsewhere.
import { $, $$, api, copy, element, instancePath, json, Refused } from "./page.js";
import { milliseconds, size } from "./format.js";
import { callsFor } from "./calls.js";
import { chosenFiles, dataOf, offerFiles, takeFiles } from "./files.js";
import { clearFaults, showFaults } from "./forms.js";
import { labelOf, showClasses, showRanks, showSimilarity, showTokens } from "./results.js";

const { playground, chosen } = json("setup");

/** The inference call of a mode: its route and body, of texts and of files as the routes take them, and what its answer is. */
const MODES = {
  similarity: {
    takes: (instance) => !["reranker", "classifier"].includes(instance.kind),
    needs: "embedding model",
    hasFiles: true,
    hasQuery: false,
    example: ["How do plants turn light into sugar?", "Photosynthesis stores sunlight as chemical energy", "The stock market fell sharply on Monday", "Shares lost a tenth of their value in one day", "Chlorophyll absorbs red and blue light", "Investors moved their money into bonds"],
    call(instance, texts) {
      if (instance.kind === "sparse") return { route: "/embed_sparse", body: { inputs: texts, truncate: true } };
      if (instance.kind === "multi-vector") return { route: "/embed_all", body: { inputs: texts, truncate: true, ...(instance.modalities.includes("image") && { patches: true }) } };
      return { route: "/embed", body: { inputs: texts, truncate: true } };
    },
    show: showSimilarity,
  },
  rerank: {
    takes: (instance) => instance.kind === "reranker",
    needs: "reranker",
    hasFiles: true,
    hasQuery: true,
    query: "How do plants store energy?",
    example: ["The stock market fell sharply on Monday", "Photosynthesis stores sunlight as chemical energy", "Roots take up water and minerals", "Batteries store electrical energy", "Plants keep starch in their leaves"],
    call: (instance, texts, query) => ({ route: "/rerank", body: { query, texts, truncate: true } }),
    show: showRanks,
  },
  classify: {
    takes: (instance) => instance.kind === "classifier",
    needs: "classifier",
    hasQuery: false,
    example: ["What a wonderful evening!", "The delivery was late and the box was empty."],
    call: (instance, texts) => ({ route: "/predict", body: { inputs: texts.map((text) => [text]), truncate: true } }),
    show: showClasses,
  },
  tokens: {
    takes: (instance) => instance.modalities.includes("text"),
    needs: "model",
    hasQuery: false,
    example: ["Photosynthesis stores sunlight as chemical energy.", "Donaudampfschifffahrtsgesellschaft, 12.50 €"],
    call: (instance, texts) => ({ route: "/tokenize", body: { inputs: texts } }),
    show: showTokens,
  },
};

let mode = null;
const form = $("#play"), results = $("#results"), problem = $("#play-error"), status = $("#play-state");
const entered = {};

// Choice of the task and of models

function select(to) {
  if (mode) entered[mode] = { texts: $("#texts").value, query: $("#query").value };
  mode = to;
  const task = MODES[mode];
  for (const tab of $$("#modes [role=tab]")) {
    const is_chosen = tab.dataset.mode === mode;
    tab.setAttribute("aria-selected", String(is_chosen));
    tab.tabIndex = is_chosen ? 0 : -1;
  }
  $("#panel").setAttribute("aria-labelledby", `tab-${mode}`);
  $("#query-field").hidden = !task.hasQuery;
  $("#texts").value = entered[mode]?.texts ?? task.example.join("\n");
  $("#query").value = entered[mode]?.query ?? task.query ?? "";
  const fitting = playground.instances.filter(task.takes);
  const options = () => fitting.map((each) => element("option", { value: each.name }, `${each.name} – ${each.model}`));
  $("#model-a").replaceChildren(...options());
  $("#model-b").replaceChildren(element("option", { value: "" }, "no second model"), ...options());
  if (fitting.some((each) => each.name === chosen)) $("#model-a").value = chosen;
  $("#play").hidden = !fitting.length;
  $("#no-model").hidden = fitting.length > 0;
  $("#no-model").textContent = `No ${task.needs} is running.`;
  results.replaceChildren();
  $("#calls").hidden = true;
  clearFaults(form, problem);
  status.textContent = "";
  offerInputs();
  history.replaceState(null, "", `#${mode}`);
}

const instanceOf = (name) => playground.instances.find((each) => each.name === name);

/** The fields for what the chosen model reads in this mode. */
function offerInputs() {
  const reads = instanceOf($("#model-a").value)?.modalities ?? ["text"];
  $("#texts-field").hidden = !reads.includes("text");
  offerFiles(MODES[mode].hasFiles ? reads : []);
}
$("#model-a").addEventListener("change", offerInputs);
takeFiles(playground, () => clearFaults(form, problem), (error) => showFaults(form, problem, error));

for (const tab of $$("#modes [role=tab]")) {
  tab.addEventListener("click", () => select(tab.dataset.mode));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const tabs = $$("#modes [role=tab]"), next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    select(next.dataset.mode);
    next.focus();
  });
}

// Run

/** The texts and files that are entered, within the bounds of a call; each file with its data. */
async function entries(models, task) {
  const lines = $("#texts-field").hidden ? [] : $("#texts").value.split("\n").map((text) => text.trim()).filter(Boolean);
  const files = chosenFiles(), count = lines.length + files.length;
  if (!count) throw new Refused($("#texts-field").hidden ? "files: choose a file" : "texts: enter a text");
  if (count > playground.limit) throw new Refused(`texts: at most ${playground.limit} at a time (max_client_batch_size); there are ${count}`);
  if (task.hasQuery && !$("#query").value.trim()) throw new Refused("query: enter a query");
  for (const { name, modalities } of models) {
    const unread = [...lines.map(() => "text"), ...files.map((file) => file.kind)].find((kind) => !modalities.includes(kind));
    if (unread) throw new Refused(`second: ${name} reads ${modalities.join(" and ")}, and there is ${unread === "text" ? "a text" : unread}`);
  }
  const read = await Promise.all(files.map(async (file) => ({ ...file, data: await dataOf(file) })));
  const bytes = read.reduce((sum, { data }) => sum + data.length, 0);
  if (bytes > playground.body_bytes) throw new Refused(`files: together ${size(bytes)} in base64, and a request may have ${size(playground.body_bytes)}`);
  return [...lines.map((text) => ({ text })), ...read];
}

/** A refusal that names an entry of the call, at the field of that entry. */
function placed(error, items) {
  const alone = items.length === 1 && error.message.startsWith("Input validation error") ? 0 : null;
  const item = items[error.input ?? /\b(?:inputs|texts)\.(\d+)/.exec(error.message)?.[1] ?? alone];
  if (!item || !(error instanceof Refused)) return error;
  const told = error.message.replace(/^Input validation error: /, "").replace(/^`?(inputs|texts)[.\w]*`?: /, "");
  return new Refused(`${item.file ? "files" : "texts"}: ${labelOf(item)}: ${told}`);
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = $("button[type=submit]", form), task = MODES[mode];
  const models = [...new Set([$("#model-a").value, $("#model-b").value])].filter(Boolean).map(instanceOf);
  const call = (instance, items, dataIn) => task.call(instance, items.map((item, at) => item.text ?? { type: item.kind, data: dataIn(item, at) }), $("#query").value.trim());
  clearFaults(form, problem);
  let items = [];
  try {
    button.disabled = true;
    results.setAttribute("aria-busy", "true");
    items = await entries(models, task);
    status.textContent = "Running …";
    const shown = await Promise.all(models.map(async (instance) => {
      const { route, body } = call(instance, items, ({ data }) => data);
      const began = performance.now();
      const answer = await api("POST", instancePath(instance.name, route), body, { "x-teimgr-lane": "interactive" });
      return article(instance, performance.now() - began, task.show(answer, items, instance));
    }));
    results.replaceChildren(...shown);
    const files = items.filter((item) => item.file).length, texts = items.length - files;
    const counts = [texts && `${texts} text${texts === 1 ? "" : "s"}`, files && `${files} file${files === 1 ? "" : "s"}`].filter(Boolean);
    status.textContent = `${counts.join(" and ")}, ${models.length === 1 ? "one model" : "two models"}`;
    showCalls(callsFor(mode, models[0], call(models[0], items, (item, at) => `@${at}`), items, playground));
  } catch (error) {
    status.textContent = "";
    showFaults(form, problem, placed(error, items));
  } finally {
    button.disabled = false;
    results.setAttribute("aria-busy", "false");
  }
});

function article(instance, ms, content) {
  return element("article", {},
    element("h2", {}, instance.name, element("small", {}, `${instance.kind}${instance.dimension ? `, ${instance.dimension}` : ""} · ${milliseconds(ms)}`)),
    ...content);
}

// The same call elsewhere

let calls = {};
function showCalls(now) {
  calls = now;
  $("#calls").hidden = false;
  showCall();
}
function showCall() {
  $("#call").textContent = calls[$("input[name=language]:checked").value] ?? "";
}
for (const choice of $$("input[name=language]")) choice.addEventListener("change", showCall);
$("#copy").addEventListener("click", () => copy($("#call")));

const wanted = location.hash.slice(1);
const first = playground.instances.find((each) => each.name === chosen);
select(wanted in MODES ? wanted : first ? Object.keys(MODES).find((id) => MODES[id].takes(first)) : "similarity");
if (chosen && !first) status.textContent = `There is no running instance "${chosen}": choose a model`;
