// What every view has: calls of the REST routes, live streams, messages, questions, the theme.
import { clock } from "./format.js";

export const $ = (selector, within = document) => within.querySelector(selector);
export const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];
/** The path below which a proxy serves this daemon, empty without one: every URL of it begins so. */
export const prefix = document.documentElement.dataset.prefix;
export const isAdmin = document.body.hasAttribute("data-admin");

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function bar(percent) {
  return svg("svg", { class: "bar", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect", { width: 100, height: 6, class: "track" }), svg("rect", { width: percent, height: 6, class: "fill" }));
}

export function json(id) {
  const found = document.getElementById(id);
  return found ? JSON.parse(found.textContent) : null;
}

export class Refused extends Error {}

/** The JSON answer of a REST route; a refusal is an error with the server's sentence. */
export async function api(method, path, body, headers = {}) {
  const options = { method, headers: { ...headers }, credentials: "same-origin" };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["content-type"] = "application/json";
  }
  let reply;
  try {
    reply = await fetch(prefix + path, options);
  } catch {
    throw new Refused("The daemon does not answer");
  }
  const text = await reply.text();
  let value = null;
  try { value = JSON.parse(text); } catch { /* TEI's 401 has no body */ }
  if (reply.status === 401) signIn();
  if (!reply.ok) {
    const error = value?.error ?? value?.message ?? (text || reply.statusText);
    throw Object.assign(new Refused(typeof error === "string" ? error : error?.message ?? reply.statusText), { code: value?.code, input: reply.headers.get("x-teimgr-input") });
  }
  return value;
}

export function instancePath(name, rest = "") {
  return `/instances/${encodeURIComponent(name)}${rest}`;
}

function signIn() {
  location.assign(`${prefix}/ui/sign-in?next=${encodeURIComponent(location.pathname.slice(prefix.length) + location.search)}`);
}

export function toast(text, kind = "good") {
  const note = element("p", { class: kind }, text);
  $("#toasts").append(note);
  setTimeout(() => note.remove(), kind === "bad" ? 9000 : 4000);
}

/** The text of an element to the clipboard. */
export async function copy(from) {
  try {
    await navigator.clipboard.writeText(from.textContent);
    toast("Copied");
  } catch {  // only over TLS and on localhost
    getSelection().selectAllChildren(from);
    toast("Selected: copy it with the keyboard");
  }
}

/** Runs work that a button began: the button waits, a refusal is shown. The result is whether it succeeded. */
export async function attempt(button, work, done) {
  button.disabled = true;
  try {
    await work();
    if (done) toast(done);
    return true;
  } catch (error) {
    toast(error.message, "bad");
    return false;
  } finally {
    button.disabled = false;
  }
}

export function ask(title, text, yes) {
  const dialog = $("#confirm");
  $("#confirm-title").textContent = title;
  $("#confirm-text").textContent = text;
  $("#confirm-yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

/** Whether figures are current, or of which time they are: they are dimmed then. */
export function showLive(isOn, newest) {
  const indicator = $("#live");
  indicator.hidden = false;
  indicator.classList.toggle("off", !isOn);
  document.body.classList.toggle("stale", !isOn);
  $(".live-text", indicator).textContent = isOn ? "Live" : `Reconnecting, figures of ${clock(newest)}`;
}

/** Follows server-sent events while the page is visible: a browser has only six connections for all tabs of a host. */
export function follow(path, handlers, { light = false, opened } = {}) {
  let source = null, retry = null, newest = Date.now() / 1000;
  const show = (isOn) => { if (!light) showLive(isOn, newest); };
  const close = () => { source?.close(); source = null; clearTimeout(retry); };
  const open = () => {
    close();
    source = new EventSource(prefix + (typeof path === "function" ? path() : path));
    source.onopen = () => { show(true); opened?.(); };
    source.onerror = async () => {
      show(false);
      if (source?.readyState !== EventSource.CLOSED) return;
      close();  // refused: find out whether the session has ended, and try again later
      const reply = await fetch(location.pathname, { method: "HEAD" }).catch(() => null);
      if (reply?.status === 401) signIn();
      else retry = setTimeout(() => { if (!document.hidden) open(); }, 5000);
    };
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => {
        newest = Date.now() / 1000;
        handle(JSON.parse(event.data));
      });
    }
  };
  const onVisibility = () => (document.hidden ? close() : source ?? open());
  document.addEventListener("visibilitychange", onVisibility);
  if (!document.hidden) open();
  return { reopen: open, end() { close(); document.removeEventListener("visibilitychange", onVisibility); } };
}

export function setState(span, state) {
  span.className = `state ${state}`;
  span.textContent = state;
}

export function alarmItems(alarms, most = 5) {
  const items = alarms.slice(0, most).map((alarm) => element("li", {},
    alarm.instance ? element("a", { href: `${prefix}/ui/instances/${encodeURIComponent(alarm.instance)}` }, alarm.instance) : null,
    alarm.instance ? ` ${alarm.text}` : alarm.text));
  if (alarms.length > most) items.push(element("li", {}, element("a", { href: `${prefix}/ui/alarms` }, `${alarms.length - most} more`)));
  return items;
}

const theme = $("#theme"), root = document.documentElement;
const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const announce = () => { theme?.setAttribute("aria-pressed", String(isDark())); document.dispatchEvent(new Event("theme")); };
theme?.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  try { localStorage.setItem("teimgr-theme", root.dataset.theme); } catch { /* for this view alone */ }
  announce();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announce);
theme?.setAttribute("aria-pressed", String(isDark()));

document.addEventListener("keydown", (event) => {
  const search = $("#filter");
  if (event.key === "/" && search && !/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) {
    event.preventDefault();
    search.focus();
  }
  if (event.key === "Escape") $(".who")?.removeAttribute("open");
});
document.addEventListener("click", (event) => {
  const who = $(".who");
  if (who?.open && !who.contains(event.target)) who.open = false;
});
