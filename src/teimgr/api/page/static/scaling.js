// Scaling: applies recommendations, and draws the view again every few seconds while nothing in it has the focus.
import { $, api, attempt, toast } from "./page.js";

const AGAIN_MS = 5000;

async function draw() {
  const reply = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (!reply.ok || reply.redirected) return;
  const fresh = new DOMParser().parseFromString(await reply.text(), "text/html");
  const next = $("#scaling", fresh);
  if (next) $("#scaling").replaceChildren(...next.children);
}

$("#scaling").addEventListener("click", (event) => {
  const button = event.target.closest("[data-apply]");
  if (!button) return;
  attempt(button, async () => {
    await api("POST", `/recommendations/${encodeURIComponent(button.dataset.apply)}/apply`, {});
    toast("Applied: it is judged after ten minutes.");
    await draw();
  });
});

setInterval(() => {
  if (!document.hidden && !$("#scaling").contains(document.activeElement)) draw().catch(() => {});
}, AGAIN_MS);
