// Scaling: applies recommendations.
import { $, api, attempt, toast } from "./page.js";
import { redraw } from "./redrawn.js";

$("[data-redrawn]").addEventListener("click", (event) => {
  const button = event.target.closest("[data-apply]");
  if (!button) return;
  attempt(button, async () => {
    await api("POST", `/recommendations/${encodeURIComponent(button.dataset.apply)}/apply`, {});
    toast("Applied: it is judged after ten minutes.");
    await redraw();
  });
});
