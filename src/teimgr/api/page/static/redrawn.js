// Views without a stream: drawn again every few seconds, and their figures dimmed once that fails.
import { $, showLive } from "./page.js";

const AGAIN_MS = 5000;
const view = $("[data-redrawn]");
let newest = Date.now() / 1000;

export async function redraw() {
  const reply = await fetch(location.href, { headers: { Accept: "text/html" } }).catch(() => null);
  if (reply?.redirected) { location.reload(); return; }  // the session has ended
  const next = reply?.ok ? $("[data-redrawn]", new DOMParser().parseFromString(await reply.text(), "text/html")) : null;
  if (next) {
    newest = Date.now() / 1000;
    view.replaceChildren(...next.children);
  }
  showLive(next !== null, newest);
}

/** Not while someone uses what would be replaced, or has marked a part of it. */
function again() {
  const marked = getSelection();
  if (!document.hidden && !view.contains(document.activeElement) && (marked.isCollapsed || !view.contains(marked.anchorNode))) redraw();
}

showLive(true, newest);
setInterval(again, AGAIN_MS);
document.addEventListener("visibilitychange", again);
