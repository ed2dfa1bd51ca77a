// Pictures and sounds of the playground: chosen, dropped, pasted or given as data URIs, within what a request may have.
import { $, element, Refused } from "./page.js";
import { size } from "./format.js";

/** By what a model reads: a name, the endings of files, and what the server decodes. */
const KINDS = {
  image: { title: "Pictures", endings: ["jpg", "jpeg", "png", "webp", "gif"], formats: "JPEG, PNG, WebP or GIF" },
  audio: { title: "Sounds", endings: ["wav", "flac", "ogg", "opus", "mp3"], formats: "WAV, FLAC, OGG or MP3" },
};
const MOST_CHARACTERS = 80 * 2 ** 20;  // of a data URI that is read at all

let files = [], reads = [], bounds = { limit: 0, body_bytes: 0 };

/** Files that the chosen model reads, in the order in which they came. */
export function chosenFiles() {
  return files.filter((file) => reads.includes(file.kind));
}

/** Offers what a model reads besides texts; the field is hidden where that is nothing. */
export function offerFiles(modalities) {
  reads = Object.keys(KINDS).filter((kind) => modalities.includes(kind));
  const kinds = reads.map((kind) => KINDS[kind]);
  $("#files-field").hidden = !reads.length;
  $("#files-label").textContent = kinds.map((kind) => kind.title).join(" and ");
  $("#files").accept = kinds.flatMap((kind) => kind.endings.map((ending) => `.${ending}`)).join(",");
  $("#files-help").textContent = `${kinds.map((kind) => kind.formats).join(", ")}; drop or paste them here too. A request may have ${size(bounds.body_bytes)}, in base64.`;
  $("#data-uri").placeholder = `or data:${reads[0] === "audio" ? "audio/wav" : "image/png"};base64,…`;
  show();
}

function kindOf(file) {
  const ending = file.name.toLowerCase().split(".").pop();
  return Object.keys(KINDS).find((kind) => file.type.startsWith(`${kind}/`) || KINDS[kind].endings.includes(ending));
}

function add(given) {
  for (const file of given) {
    const kind = kindOf(file);
    if (!reads.includes(kind)) throw new Refused(`files: ${file.name}: must be ${reads.map((each) => KINDS[each].formats).join(", ")}`);
    const room = bounds.body_bytes * 0.74;  // base64 takes a third more
    if (file.size > room) throw new Refused(`files: ${file.name}: has ${size(file.size)}, and ${size(room)} are allowed in a request`);
    if (chosenFiles().length >= bounds.limit) throw new Refused(`files: at most ${bounds.limit} at a time (max_client_batch_size)`);
    files.push({ name: file.name, kind, file, url: kind === "image" ? URL.createObjectURL(file) : null });
  }
}

/** The file in a data URI. */
function fileOf(uri) {
  const [, type, base64] = /^data:([a-z]+\/[-+.\w]+)[^,]*;base64,(.*)$/is.exec(uri.slice(0, MOST_CHARACTERS)) ?? [];
  if (!type) throw new Refused("files: a data URI begins with data:image/png;base64, or another type");
  try {
    const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
    return new File([bytes], `data-uri-${files.length + 1}.${type.split("/")[1]}`, { type });
  } catch {
    throw new Refused("files: the data URI is not base64");
  }
}

function remove(file) {
  if (file.url) URL.revokeObjectURL(file.url);
  files = files.filter((each) => each !== file);
  $("#files").dispatchEvent(new Event("input"));  // which ends a fault
  show();
}

function show() {
  $("#picked").replaceChildren(...chosenFiles().map((file) => {
    const button = element("button", { type: "button", class: "icon", "aria-label": `Remove ${file.name}` }, "×");
    button.addEventListener("click", () => { remove(file); $("#files").focus(); });
    return element("li", {}, picture(file), element("span", { class: "name", title: file.name }, file.name), element("small", {}, size(file.file.size)), button);
  }));
}

/** A small view of a file; a sign where the browser cannot draw it. */
export function picture({ kind, url }) {
  const sign = () => element("span", { class: "thumb", "aria-hidden": "true" }, kind === "audio" ? "♪" : "?");
  if (!url) return sign();
  const image = element("img", { class: "thumb", src: url, alt: "" });
  image.addEventListener("error", () => image.replaceWith(sign()), { once: true });
  return image;
}

/** A file as a data URI, as the routes take it. */
export function dataOf({ name, file }) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Refused(`files: ${name}: cannot be read any more`));
    reader.readAsDataURL(file);
  });
}

/** Takes files of the field; `onChoice` is called before each try, and `onFault` with a refusal. */
export function takeFiles(limits, onChoice, onFault) {
  bounds = limits;
  const attempt = (work) => {
    onChoice();
    try { work(); } catch (error) { onFault(error); }
    show();
  };
  const field = $("#files-field"), input = $("#files"), uri = $("#data-uri");
  input.addEventListener("change", () => { attempt(() => add([...input.files])); input.value = ""; });
  const addUri = () => attempt(() => { add([fileOf(uri.value.trim())]); uri.value = ""; });
  $("#add-uri").addEventListener("click", addUri);
  uri.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    addUri();
  });
  const over = (isOver) => (event) => { event.preventDefault(); field.classList.toggle("over", isOver); };
  field.addEventListener("dragover", over(true));
  field.addEventListener("dragleave", over(false));
  field.addEventListener("drop", (event) => { over(false)(event); attempt(() => add([...event.dataTransfer.files])); });
  document.addEventListener("paste", (event) => {
    if (field.hidden || !event.clipboardData.files.length) return;
    event.preventDefault();
    attempt(() => add([...event.clipboardData.files]));
  });
}
