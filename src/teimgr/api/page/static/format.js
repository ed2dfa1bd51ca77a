// Numbers, sizes and times as text; the same as page/format.py, which renders the first view.
export const NOTHING = "–";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function size(count) {
  if (count == null) return NOTHING;
  let power = 0;
  while (count >= 1024 && power < UNITS.length - 1) { count /= 1024; power += 1; }
  return `${count >= 100 || !power ? count.toFixed(0) : count.toFixed(1)} ${UNITS[power]}`;
}

export function number(value) {
  if (value == null) return NOTHING;
  for (const [limit, divisor, unit] of [[1e3, 1, ""], [1e6, 1e3, "k"], [1e9, 1e6, "M"], [Infinity, 1e9, "G"]]) {
    if (Math.abs(value) < limit) {
      const short = value / divisor;
      return `${short >= 100 || Number.isInteger(short) ? short.toFixed(0) : short.toFixed(1)}${unit}`;
    }
  }
  return NOTHING;
}

export function milliseconds(value) {
  if (value == null) return NOTHING;
  if (value >= 248000) return `> ${(value / 1000).toFixed(0)} s`;  // the buckets of durations end there
  if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 10 || value === 0 ? value.toFixed(0) : value.toFixed(1)} ms`;
}

export function duration(seconds) {
  if (seconds == null) return NOTHING;
  const parts = [];
  let rest = Math.trunc(seconds);
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
    const count = Math.floor(rest / length);
    rest %= length;
    if (count || (unit === "s" && !parts.length)) parts.push(`${count} ${unit}`);
  }
  return parts.slice(0, 2).join(" ");
}

export function tags(named) {
  return Object.entries(named).map(([name, value]) => (value ? `${name}=${value}` : name));
}

export function spark(values, top) {
  let path = "", move = "M";
  values.forEach((value, index) => {
    if (value == null) { move = "M"; return; }
    const x = ((20 - values.length + index) * 96) / 19, y = 22 - Math.min(value / top, 1) * 20;
    path += `${move}${x.toFixed(1)},${y.toFixed(1)}`;
    move = "L";
  });
  return path;
}

/** The fine points in time, and between them the coarse ones of times when no page was open. */
export function joined(fine, coarse) {
  const times = new Set(fine.map(([time]) => time));
  return [...coarse.filter(([time]) => !times.has(time)), ...fine].sort(([one], [other]) => one - other);
}

/** The points with an empty one wherever they are further apart than `most` seconds: lines have a gap there. */
export function gapped(points, most) {
  return points.flatMap((point, at) => (at && point[0] - points[at - 1][0] > most ? [[(point[0] + points[at - 1][0]) / 2], point] : [point]));
}

export function clock(moment) {
  return moment == null ? "" : `${new Date(moment * 1000).toISOString().slice(11, 19)} UTC`;
}

export function share(used, total) {
  return total ? Math.min(100, (100 * (used ?? 0)) / total).toFixed(1) : "0";
}

export function moment(timestamp) {
  return timestamp ? timestamp.slice(0, 19).replace("T", " ") : "never";
}
