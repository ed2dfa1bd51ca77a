// Results of the playground as tables, a map and bars. An entry is a text or a file, `{ text }` or `{ name, kind, url, … }`.
import { bar, element, svg } from "./page.js";
import { picture } from "./files.js";
import { cosines, flatMap, maxSimilarities, patchMatches, sparseVector, summary } from "./vectors.js";

export function labelOf(item) {
  return item.text ?? item.name;
}

export function showSimilarity(given, items, instance) {
  const answer = given.map((each) => each.vectors ?? each);
  const matrix = instance.kind === "sparse" ? cosines(answer.map(sparseVector)) : instance.kind === "multi-vector" ? maxSimilarities(answer) : cosines(answer);
  const all = [...items.keys()], files = all.filter((at) => items[at].file), texts = all.filter((at) => !items[at].file);
  const parts = [block("Cosine similarity", table(matrix, items, all, all, false), instance)];
  if (items.length > 2) parts.unshift(element("div", {}, element("h3", {}, "Map: what is near is similar"), map(flatMap(matrix), items)));
  if (files.length && texts.length) parts.unshift(block("Texts with files, shaded from the least similar to the most", table(matrix, items, texts, files, true), instance));
  else parts.reverse();
  const pages = files.filter((at) => given[at].patches), asked = pages.flatMap((page) => texts.map((text) => ({ page, text })));
  if (asked.length) parts.unshift(patchMaps(asked, given, items));
  return [element("div", { class: "similar" }, ...parts), vectors(answer, items, instance)];
}

const MOST_MAPS = 12;

/** Pages with the patches that answer a query, the best answers first. */
function patchMaps(asked, given, items) {
  const found = asked.map(({ page, text }) => ({ page, text, ...patchMatches(given[text].vectors, given[page].vectors, given[page].patches) }));
  found.sort((a, b) => b.score - a.score);
  const title = `Patches that answer a text${found.length > MOST_MAPS ? `, the best ${MOST_MAPS} of ${found.length}` : ""}`;
  return element("div", { class: "answers" }, element("h3", {}, title), ...found.slice(0, MOST_MAPS).map((each) => patchMap(each, given[each.page].patches, items)));
}

/** A page below its patches: shaded from the least like the query to the most, framed where one of its vectors matches best. */
function patchMap({ page, text, score, shares, winners }, { rows, columns }, items) {
  const low = Math.min(...shares), span = Math.max(...shares) - low || 1, best = shares.indexOf(low + span);
  const query = labelOf(items[text]), where = `best at row ${Math.floor(best / columns) + 1} of ${rows}, column ${best % columns + 1} of ${columns}`;
  const patch = (share, place) => svg("rect", { x: place % columns, y: Math.floor(place / columns), width: 1, height: 1, "fill-opacity": (0.75 * (share - low) / span).toFixed(3), ...(winners.has(place) && { class: "winner" }) }, svg("title", {}, share.toFixed(3)));
  return element("figure", { class: "patches" },
    element("div", {}, element("img", { src: items[page].url, alt: "" }),
      svg("svg", { viewBox: `0 0 ${columns} ${rows}`, preserveAspectRatio: "none", role: "img", "aria-label": `${labelOf(items[page])}, by “${query}”: ${where}` }, ...shares.map(patch))),
    element("figcaption", {}, `${labelOf(items[page])}: “${query}”, MaxSim ${score.toFixed(2)}, ${where}; framed: the ${winners.size} that match a vector of the text best`));
}

function block(title, content, instance) {
  return element("div", {}, element("h3", {}, title),
    element("div", { class: "scroll bare", tabindex: "0", role: "region", "aria-label": `${title}, by ${instance.name}` }, content));
}

/** Similarities of some entries with others; shaded by their values, or by their places between the least and the greatest. */
function table(matrix, items, rows, columns, isRelative) {
  const values = isRelative ? rows.flatMap((row) => columns.map((column) => matrix[row][column])).sort((x, y) => x - y) : [0];
  const low = values[0], span = values.at(-1) - low;
  const shade = (value) => (isRelative ? (span ? (value - low) / span : 0) : Math.max(0, Math.min(1, value)) ** 2);
  const head = (at) => element("th", { scope: "col", title: labelOf(items[at]) }, items[at].file ? picture(items[at]) : null, String(at + 1));
  return element("table", { class: "matrix" },
    element("caption", { class: "hidden" }, "Cosine similarity of each with each"),
    element("thead", {}, element("tr", {}, element("td", {}), ...columns.map(head))),
    element("tbody", {}, ...rows.map((row) => element("tr", {},
      element("th", { scope: "row", title: labelOf(items[row]) }, `${row + 1}  `, items[row].file ? picture(items[row]) : null, labelOf(items[row])),
      ...columns.map((column) => cell(matrix[row][column], shade(matrix[row][column])))))));
}

/** What the vectors are: their lengths and first numbers. */
function vectors(answer, items, instance) {
  return element("details", { class: "vectors" }, element("summary", {}, "Vectors"),
    element("div", { class: "scroll bare", tabindex: "0", role: "region", "aria-label": `Vectors by ${instance.name}` },
      element("table", { class: "plain" }, element("tbody", {}, ...items.map((item, at) => element("tr", {},
        element("th", { scope: "row" }, `${at + 1}  ${labelOf(item)}`), element("td", {}, element("code", {}, summary(answer[at])))))))));
}

function cell(value, share) {
  const made = element("td", {}, value.toFixed(2).replace(/^-0.00$/, "0.00"));
  made.style.setProperty("--share", share.toFixed(3));
  // Between the two, neither text colour has enough contrast.
  if (share > 0.45) { made.classList.add("strong"); made.style.setProperty("--share", Math.max(share, 0.9).toFixed(3)); }
  else made.style.setProperty("--share", Math.min(share, 0.3).toFixed(3));
  return made;
}

const HALF = 16;  // of the side of a picture on the map

function map(places, items) {
  const width = 560, height = 300, edge = 34;
  const span = (axis) => { const all = places.map((place) => place[axis]); return [Math.min(...all), Math.max(...all)]; };
  const [x, y] = [span(0), span(1)];
  // One scale for both axes: distances mean something.
  const scale = Math.min((width - 6 * edge) / (x[1] - x[0] || 1), (height - 2 * edge) / (y[1] - y[0] || 1));
  const middle = [(x[0] + x[1]) / 2, (y[0] + y[1]) / 2];
  const labels = [];
  const marks = places.map((place, at) => {
    const [cx, cy] = [width / 2 + (place[0] - middle[0]) * scale, height / 2 - (place[1] - middle[1]) * scale];
    const isRight = cx > width * 0.55, whole = labelOf(items[at]), { url } = items[at];
    const label = `${at + 1}  ${whole.length > 28 ? `${whole.slice(0, 27)}…` : whole}`, beside = url ? HALF + 4 : 8;
    const long = label.length * 6.2, left = isRight ? cx - beside - long : cx + beside;
    // The nearest height at which it covers no other label.
    const covers = (y) => labels.some((other) => Math.abs(other.y - y) < 13 && left < other.right && other.left < left + long);
    const step = [0, 1, -1, 2, -2, 3, -3, 4, -4].find((each) => !covers(cy + 4 + each * 13)) ?? 0;
    const y = cy + 4 + step * 13;
    labels.push({ y, left, right: left + long });
    return [
      url ? svg("image", { href: url, x: cx - HALF, y: cy - HALF, width: 2 * HALF, height: 2 * HALF }, svg("title", {}, whole))
        : svg("circle", { cx, cy, r: 4 }, svg("title", {}, whole)),
      svg("text", { x: cx + (isRight ? -beside : beside), y, "text-anchor": isRight ? "end" : "start" }, label),
    ];
  });
  return svg("svg", { class: "map", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Map of the entries by their two main components" }, ...marks.map(([mark]) => mark), ...marks.map(([, label]) => label));
}

export function showRanks(answer, items) {
  const scores = answer.map((rank) => rank.score), low = Math.min(0, ...scores), top = Math.max(...scores, low + 1e-9);
  return [element("table", { class: "plain ranked" },
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "#"), element("th", { scope: "col" }, "Text"), element("th", { scope: "col", class: "number" }, "Score"))),
    element("tbody", {}, ...answer.map((rank, at) => element("tr", {}, element("td", {}, String(at + 1)), element("td", {}, items[rank.index].file ? picture(items[rank.index]) : null, labelOf(items[rank.index])),
      element("td", { class: "number score" }, rank.score.toFixed(4), bar((100 * (rank.score - low) / (top - low)).toFixed(1)))))))];
}

export function showClasses(answer, items) {
  return items.flatMap(({ text }, at) => [
    element("p", { class: "classified" }, text),
    element("div", { class: "classes" }, ...answer[at].slice(0, 8).flatMap(({ label, score }) => [
      element("span", {}, label), bar((100 * Math.max(0, Math.min(1, score))).toFixed(1)), element("span", { class: "number" }, score.toFixed(3))])),
  ]);
}

export function showTokens(answer, items, instance) {
  return items.flatMap((item, at) => {
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

