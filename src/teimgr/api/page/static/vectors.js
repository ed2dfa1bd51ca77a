// Similarities of vectors, and a flat map of them.

function dot(a, b) {
  let sum = 0;
  if (a instanceof Map) {
    for (const [index, value] of a) sum += value * (b.get(index) ?? 0);
  } else {
    for (let at = 0; at < a.length; at += 1) sum += a[at] * b[at];
  }
  return sum;
}

/** A vector over the vocabulary as a map from index to value. */
export function sparseVector(entries) {
  return new Map(entries.map(({ index, value }) => [index, value]));
}

const SHOWN = 8;

/** The length and the first numbers of an answer for one input: a vector, one for each token, or a sparse one. */
export function summary(answer) {
  const some = (numbers, text) => numbers.slice(0, SHOWN).map(text).join("  ") + (numbers.length > SHOWN ? "  …" : "");
  const plain = (value) => value.toFixed(4);
  if (answer.length && answer[0].index !== undefined) return `${answer.length} weights: ${some([...answer].sort((x, y) => y.value - x.value), ({ index, value }) => `${index}: ${plain(value)}`)}`;
  if (Array.isArray(answer[0])) return `${answer.length} vectors of ${answer[0].length}, the first: ${some(answer[0], plain)}`;
  return `length ${Math.sqrt(dot(answer, answer)).toFixed(3)}, ${answer.length} numbers: ${some(answer, plain)}`;
}

/** The cosine of each vector with each; vectors are lists or maps from index to value. */
export function cosines(vectors) {
  const lengths = vectors.map((vector) => Math.sqrt(dot(vector, vector)) || 1);
  return vectors.map((a, i) => vectors.map((b, j) => dot(a, b) / (lengths[i] * lengths[j])));
}

const ofLength1 = (tokens) => tokens.map((token) => { const length = Math.sqrt(dot(token, token)) || 1; return token.map((value) => value / length); });

/** How a page answers a query: the sum of the best cosines (MaxSim), of each patch the best cosine with a vector of the
 * query, and the places of patches that are the best of all vectors of the page for one. */
export function patchMatches(query, page, patches) {
  const [asked, found] = [query, page].map(ofLength1), places = new Map(patches.vectors.map((vector, place) => [vector, place]));
  const shares = patches.vectors.map(() => -1), winners = new Set();
  let score = 0;
  for (const token of asked) {
    const cosines = found.map((other) => dot(token, other)), best = Math.max(...cosines);
    score += best;
    patches.vectors.forEach((vector, place) => { shares[place] = Math.max(shares[place], cosines[vector]); });
    const winner = places.get(cosines.indexOf(best));
    if (winner !== undefined) winners.add(winner);
  }
  return { score, shares, winners };
}

/** Late interaction: for each token of a text its best cosine among those of another, on average. */
export function maxSimilarities(texts) {
  const unit = texts.map(ofLength1);
  return unit.map((a) => unit.map((b) => a.reduce((sum, token) => sum + Math.max(...b.map((other) => dot(token, other))), 0) / a.length));
}

/** Places on a plane by the two main components (PCA) of vectors, from the matrix of their products. */
export function flatMap(products) {
  const count = products.length;
  const symmetric = products.map((row, i) => row.map((value, j) => (value + products[j][i]) / 2));
  const means = symmetric.map((row) => row.reduce((sum, value) => sum + value, 0) / count);
  const mean = means.reduce((sum, value) => sum + value, 0) / count;
  const centred = symmetric.map((row, i) => row.map((value, j) => value - means[i] - means[j] + mean));
  const axes = [0, 1].map(() => mainComponent(centred));
  return centred.map((_, at) => axes.map(({ vector, value }) => vector[at] * Math.sqrt(Math.max(value, 0))));
}

/** The largest eigenvalue and its vector by power iteration; it is then taken out of the matrix. */
function mainComponent(matrix) {
  let vector = matrix.map((_, at) => Math.cos(at * 1.7 + 0.3)), value = 0;
  for (let step = 0; step < 300; step += 1) {
    const next = matrix.map((row) => dot(row, vector)), length = Math.sqrt(dot(next, next));
    if (length < 1e-12) break;
    vector = next.map((each) => each / length);
    value = length;
  }
  matrix.forEach((row, i) => row.forEach((_, j) => { matrix[i][j] -= value * vector[i] * vector[j]; }));
  return { vector, value };
}
