// Forms of an instance's settings as JSON for the REST routes, which validate them.
import { $$, Refused } from "./page.js";

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
