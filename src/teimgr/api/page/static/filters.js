// The filter of the fleet: tag, status and model_id as `GET /instances` and `teimgr ps` have them, and words to search for.
import { tags as shown } from "./format.js";

const NAMES = { tag: "tag", status: "status", model: "model_id", model_id: "model_id" };
const nothing = () => ({ tag: [], status: [], model_id: [], q: [] });

/** The filter of a line such as `tag=team:search status=failed model_id="/a b" word`. */
export function parse(line) {
  const filter = nothing();
  for (const [word] of line.matchAll(/\w+="[^"]*"?|\S+/g)) {
    const [, name, value] = /^(\w+)=(.*)$/.exec(word) ?? [];
    if (!Object.hasOwn(NAMES, name)) filter.q.push(word.toLowerCase());
    else if (value.replaceAll('"', "")) filter[NAMES[name]].push(value.replaceAll('"', ""));
  }
  return filter;
}

/** The line of a filter. */
export function lineOf({ q, ...named }) {
  const words = Object.entries(named).flatMap(([name, values]) => values.map((value) => `${name}=${/\s/.test(value) ? `"${value}"` : value}`));
  return [...words, ...q].join(" ");
}

/** The filter in the query of an address; a status that does not exist is left out. */
export function fromAddress(query, statuses) {
  const filter = nothing();
  for (const name of ["tag", "status", "model_id"]) filter[name] = query.getAll(name).filter((value) => value && (name !== "status" || statuses.includes(value)));
  filter.q = parse(query.get("q") ?? "").q;
  return filter;
}

/** The query of a filter, without `q` that of `GET /instances`. */
export function toAddress({ q, ...named }) {
  const query = new URLSearchParams(Object.entries(named).flatMap(([name, values]) => values.map((value) => [name, value])));
  if (q.length) query.set("q", q.join(" "));
  return query;
}

/** Whether an instance matches: every tag, one of the statuses, one of the models, every word. */
export function accepts({ tag, status, model_id, q }, { name, model, tags, state }) {
  const hasTag = (each) => {
    const [key, ...value] = each.split(":");
    return Object.hasOwn(tags, key) && (!value.length || tags[key] === value.join(":"));
  };
  const text = [name, model, ...shown(tags)].join(" ").toLowerCase();
  return tag.every(hasTag) && (!status.length || status.includes(state)) && (!model_id.length || model_id.includes(model)) && q.every((word) => text.includes(word));
}
