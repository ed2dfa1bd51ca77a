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

/** The cosine of each vector with each; vectors are lists or maps from index to value. */
export function cosines(vectors) {
  const lengths = vectors.map((vector) => Math.sqrt(dot(vector, vector)) || 1);
  return vectors.map((a, i) => vectors.map((b, j) => dot(a, b) / (lengths[i] * lengths[j])));
}

/** Late interaction: for each token of a text its best cosine among those of another, on average. */
export function maxSimilarities(texts) {
  const unit = texts.map((tokens) => tokens.map((token) => { const length = Math.sqrt(dot(token, token)) || 1; return token.map((value) => value / length); }));
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
