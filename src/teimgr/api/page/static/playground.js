// The playground: similarities, reranking, classification and tokens, for one model or two, and the same call elsewhere.
import { $, $$, api, bar, copy, element, instancePath, json, svg } from "./page.js";
import { milliseconds } from "./format.js";
import { callsFor } from "./calls.js";
import { cosines, flatMap, maxSimilarities } from "./vectors.js";

const { playground, chosen } = json("setup");

/** The inference call of a mode: its route and body, and what its answer is. */
const MODES = {
  similarity: {
    takes: (instance) => !["reranker", "classifier"].includes(instance.kind),
    needs: "embedding model",
    hasQuery: false,
    example: ["How do plants turn light into sugar?", "Photosynthesis stores sunlight as chemical energy", "The stock market fell sharply on Monday", "Shares lost a tenth of their value in one day", "Chlorophyll absorbs red and blue light", "Investors moved their money into bonds"],
    call(instance, texts) {
      if (instance.kind === "sparse") return { route: "/embed_sparse", body: { inputs: texts, truncate: true } };
      if (instance.kind === "multi-vector") return { route: "/embed_all", body: { inputs: texts, truncate: true } };
      return { route: "/embed", body: { inputs: texts, truncate: true } };
    },
    show: showSimilarity,
  },
  rerank: {
    takes: (instance) => instance.kind === "reranker",
    needs: "reranker",
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
    takes: () => true,
    needs: "model",
    hasQuery: false,
    example: ["Photosynthesis stores sunlight as chemical energy.", "Donaudampfschifffahrtsgesellschaft, 12.50 €"],
    call: (instance, texts) => ({ route: "/tokenize", body: { inputs: texts } }),
    show: showTokens,
  },
};

let mode = null;
const results = $("#results"), problem = $("#play-error"), status = $("#play-state");
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
  problem.hidden = true;
  status.textContent = "";
  history.replaceState(null, "", `#${mode}`);
}

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

$("#play").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = $("button[type=submit]", event.target), task = MODES[mode];
  const texts = $("#texts").value.split("\n").map((text) => text.trim()).filter(Boolean), query = $("#query").value.trim();
  const names = [$("#model-a").value, $("#model-b").value].filter((name, at, all) => name && all.indexOf(name) === at);
  problem.hidden = true;
  try {
    if (!texts.length) throw new Error("Enter a text");
    if (texts.length > playground.limit) throw new Error(`At most ${playground.limit} texts at a time (max_client_batch_size); there are ${texts.length}`);
    if (task.hasQuery && !query) throw new Error("Enter a query");
    button.disabled = true;
    results.setAttribute("aria-busy", "true");
    status.textContent = "Running …";
    const shown = await Promise.all(names.map(async (name) => {
      const instance = playground.instances.find((each) => each.name === name), call = task.call(instance, texts, query);
      const began = performance.now();
      const answer = await api("POST", instancePath(name, call.route), call.body, { "x-teimgr-lane": "interactive" });
      return article(instance, performance.now() - began, task.show(answer, texts, instance));
    }));
    results.replaceChildren(...shown);
    status.textContent = `${texts.length} text${texts.length === 1 ? "" : "s"}, ${names.length === 1 ? "one model" : "two models"}`;
    const first = playground.instances.find((each) => each.name === names[0]);
    showCalls(callsFor(mode, first, task.call(first, texts, query), playground));
  } catch (error) {
    status.textContent = "";
    problem.textContent = error.message;
    problem.hidden = false;
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

// Results

function showSimilarity(answer, texts, instance) {
  const matrix = instance.kind === "sparse" ? cosines(answer.map(sparseVector)) : instance.kind === "multi-vector" ? maxSimilarities(answer) : cosines(answer);
  const table = element("table", { class: "matrix" },
    element("caption", { class: "hidden" }, "Cosine similarity of each text with each"),
    element("thead", {}, element("tr", {}, element("td", {}), ...texts.map((text, at) => element("th", { scope: "col", title: text }, String(at + 1))))),
    element("tbody", {}, ...texts.map((text, at) => element("tr", {}, element("th", { scope: "row", title: text }, `${at + 1}  ${text}`), ...matrix[at].map(cell)))));
  const parts = [element("div", {}, element("h3", {}, "Cosine similarity"),
    element("div", { class: "scroll bare", tabindex: "0", role: "region", "aria-label": `Similarities by ${instance.name}` }, table))];
  if (texts.length > 2) parts.push(element("div", {}, element("h3", {}, "Map: near texts are similar"), map(flatMap(matrix), texts)));
  return [element("div", { class: "similar" }, ...parts)];
}

function cell(value) {
  const made = element("td", {}, value.toFixed(2)), share = Math.max(0, Math.min(1, value)) ** 2;
  made.style.setProperty("--share", share.toFixed(3));
  // Between the two, neither text colour has enough contrast.
  if (share > 0.45) { made.classList.add("strong"); made.style.setProperty("--share", Math.max(share, 0.82).toFixed(3)); }
  else made.style.setProperty("--share", Math.min(share, 0.3).toFixed(3));
  return made;
}

/** A vector over the vocabulary as a map; cosines() takes both forms. */
function sparseVector(entries) {
  return new Map(entries.map(({ index, value }) => [index, value]));
}

function map(places, texts) {
  const width = 560, height = 300, edge = 34;
  const span = (axis) => { const all = places.map((place) => place[axis]); return [Math.min(...all), Math.max(...all)]; };
  const [x, y] = [span(0), span(1)];
  // One scale for both axes: distances mean something.
  const scale = Math.min((width - 6 * edge) / (x[1] - x[0] || 1), (height - 2 * edge) / (y[1] - y[0] || 1));
  const middle = [(x[0] + x[1]) / 2, (y[0] + y[1]) / 2];
  const labels = [];
  const marks = places.flatMap((place, at) => {
    const [cx, cy] = [width / 2 + (place[0] - middle[0]) * scale, height / 2 - (place[1] - middle[1]) * scale];
    const isRight = cx > width * 0.55, label = `${at + 1}  ${texts[at].length > 28 ? `${texts[at].slice(0, 27)}…` : texts[at]}`;
    const long = label.length * 6.2, left = isRight ? cx - 8 - long : cx + 8;
    // The nearest height at which it covers no other label.
    const covers = (y) => labels.some((other) => Math.abs(other.y - y) < 13 && left < other.right && other.left < left + long);
    const step = [0, 1, -1, 2, -2, 3, -3, 4, -4].find((each) => !covers(cy + 4 + each * 13)) ?? 0;
    const y = cy + 4 + step * 13;
    labels.push({ y, left, right: left + long });
    return [
      svg("circle", { cx, cy, r: 4 }, svg("title", {}, texts[at])),
      svg("text", { x: cx + (isRight ? -8 : 8), y, "text-anchor": isRight ? "end" : "start" }, label),
    ];
  });
  return svg("svg", { class: "map", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Map of the texts by their two main components" }, ...marks);
}

function showRanks(answer, texts) {
  const scores = answer.map((rank) => rank.score), low = Math.min(0, ...scores), top = Math.max(...scores, low + 1e-9);
  return [element("table", { class: "plain ranked" },
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "#"), element("th", { scope: "col" }, "Text"), element("th", { scope: "col", class: "number" }, "Score"))),
    element("tbody", {}, ...answer.map((rank, at) => element("tr", {}, element("td", {}, String(at + 1)), element("td", {}, texts[rank.index]),
      element("td", { class: "number score" }, rank.score.toFixed(4), bar((100 * (rank.score - low) / (top - low)).toFixed(1)))))))];
}

function showClasses(answer, texts) {
  return texts.flatMap((text, at) => [
    element("p", { class: "classified" }, text),
    element("div", { class: "classes" }, ...answer[at].slice(0, 8).flatMap(({ label, score }) => [
      element("span", {}, label), bar((100 * Math.max(0, Math.min(1, score))).toFixed(1)), element("span", { class: "number" }, score.toFixed(3))])),
  ]);
}

function showTokens(answer, texts, instance) {
  return texts.flatMap((text, at) => {
    const tokens = answer[at];
    let colour = 0;
    const count = `${tokens.length} token${tokens.length === 1 ? "" : "s"}${tokens.length > instance.max_input_length ? `, over the limit of ${instance.max_input_length}` : ""}`;
    return [
      element("h3", {}, count),
      element("p", { class: "tokens" }, ...tokens.map((token) => element("span", {
        class: token.special ? "special" : `t${colour++ % 5}`, title: `id ${token.id}`,
      }, token.text))),
    ];
  });
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
