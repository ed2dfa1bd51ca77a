// Forms of an instance's settings as JSON for the REST routes, which validate them.
import { $, $$, Refused } from "./page.js";

export function fieldsOf(form) {
  return $$("[data-key]", form);
}

export function textOf(field) {
  return field.type === "checkbox" ? String(field.checked) : field.value.trim();
}

/** The JSON value of a field; undefined where it is empty. */
export function valueOf(field) {
  const text = textOf(field), name = field.dataset.key;
  if (field.dataset.widget === "switch") return field.checked;
  if (text === "") return undefined;
  switch (field.dataset.widget) {
    case "number": return asNumber(name, text);
    case "auto": return text === "auto" ? text : asNumber(name, text);
    case "count": return /^\d/.test(text) ? asNumber(name, text) : text;
    case "lines": return asWords(name, text);
    case "pairs": return Object.fromEntries(text.split("\n").filter((line) => line.trim()).map((line) => {
      const [key, ...rest] = line.split("=");
      return [key.trim(), rest.join("=").trim()];
    }));
    default: return text;
  }
}

function asNumber(name, text) {
  if (!/^-?\d+$/.test(text)) throw new Refused(`${name}: must be a whole number (got ${JSON.stringify(text)})`);
  return Number(text);
}

function asWords(name, text) {
  const words = text.split("\n").map((word) => word.trim()).filter(Boolean);
  if (words.some((word) => word === "***" || word.endsWith("=***"))) {
    throw new Refused(`${name}: *** stands for a key that is not shown; enter the key itself`);
  }
  return words;
}

// Codes whose message does not begin with the key.
const OF_CODES = { INVALID_INSTANCE_NAME: "name", INSTANCE_EXISTS: "name", INVALID_PORT: "port", PORT_CONFLICT: "port", INVALID_GPU_ID: "gpu_id", MODEL_NOT_FOUND: "model_id" };

/** A refusal at the fields that it names, the first of which gets the focus; what names none is shown in `box`. */
export function showFaults(form, box, error) {
  const fields = new Map(fieldsOf(form).map((field) => [field.dataset.key, field])), faults = new Map();
  let key = OF_CODES[error.code];
  for (const part of error.message.replace(/^Validation error: /, "").split("; ")) {
    const named = /^(?:missing field `)?(\w+)/.exec(part)?.[1];
    if (fields.has(named)) key = named;
    faults.set(key, [...(faults.get(key) ?? []), part.replace(`${key}: `, "").replace(/^missing field.*/, "is required")]);
  }
  for (const [name, parts] of faults) {
    const field = fields.get(name), place = (field && $(`#${field.id}-fault`)) ?? box;
    place.textContent = parts.join("; ");
    place.hidden = false;
    if (place === box) continue;
    field.setAttribute("aria-invalid", "true");
    field.addEventListener("input", () => clear(field), { once: true });
  }
  const first = $("[aria-invalid]", form);
  first?.closest("details")?.setAttribute("open", "");
  first?.focus();
}

export function clearFaults(form, box) {
  box.hidden = true;
  for (const field of $$("[aria-invalid]", form)) clear(field);
}

function clear(field) {
  field.removeAttribute("aria-invalid");
  $(`#${field.id}-fault`).hidden = true;
}
