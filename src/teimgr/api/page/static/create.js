// The form of a new instance.
import { $, api, prefix } from "./page.js";
import { fieldsOf, valueOf } from "./forms.js";

const form = $("#create"), problem = $("#create-error");
const field = (name) => fieldsOf(form).find((each) => each.dataset.key === name);
if (form.dataset.model) {
  field("model_id").value = form.dataset.model;
  field("name").value = form.dataset.model.split("/").filter(Boolean).pop().toLowerCase().replace(/[^a-z0-9._-]/g, "-").slice(0, 64);
}
(field("model_id").value ? field("name") : field("model_id")).focus();

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = $("button[type=submit]", form);
  problem.hidden = true;
  button.disabled = true;
  try {
    const body = {};
    for (const each of fieldsOf(form)) {
      const value = valueOf(each);
      if (value !== undefined && value !== false) body[each.dataset.key] = value;
    }
    const made = await api("POST", "/instances", body);
    location.assign(`${prefix}/ui/instances/${encodeURIComponent(made.name)}`);
  } catch (error) {
    problem.textContent = error.message;
    problem.hidden = false;
    button.disabled = false;
  }
});
