// SPDX-License-Identifier: Apache-2.0
// The view "Collections": files that are kept as passages, and a conversation about them.

import { Action } from "./action.js";
import { getJson, send } from "./api.js";
import { Conversation } from "./conversation.js";
import { byId, el, number, say, table } from "./dom.js";
import { loadExample } from "./example.js";
import { readable, takeDrops } from "./files.js";
import { count, several, tokens } from "./format.js";
import { upload } from "./upload.js";

const MOST_ERRORS = 10;

let known = []; // the server's collections, by name
let isLoaded = false;
const conversation = new Conversation({ collection, choose: chooseLinked });
const uploading = new Action({
  show: showUploading,
  fail: (error) => (say(byId("upload-problem"), error.message), say(byId("upload-status"), "")),
  stopped: () => say(byId("upload-status"), "Stopped. Stored files are kept; the same files go on from here."),
});

export function startCollections() {
  byId("collection").addEventListener("change", () => (showChosen(), conversation.clear()));
  byId("collection-namespace").addEventListener("change", async () => {
    await reload();
    conversation.clear();
  });
  byId("turn-passages").addEventListener("change", () => conversation.showLink());
  takeDrops(byId("collection-card"), add);
  for (const [button, input] of [["upload-files-button", "upload-files"], ["upload-folder-button", "upload-folder"]]) {
    byId(button).addEventListener("click", () => byId(input).click());
    byId(input).addEventListener("change", ({ target }) => {
      const files = [...target.files];
      target.value = "";
      add(input === "upload-folder" ? readable(files) : files);
    });
  }
  byId("upload-stop").addEventListener("click", () => uploading.stop());
  byId("collection-delete").addEventListener("click", askToDelete);
  byId("delete-dialog").addEventListener("close", ({ target }) => target.returnValue === "delete" && removeAll());
}

/** Loads the collections unless they are loaded, then opens the conversation of the address. */
export async function loadCollections() {
  if (!isLoaded) {
    isLoaded = true;
    await reload();
  }
  conversation.open(); // asks its questions meanwhile
}

/** Loads the collections again when the server is back. */
export function forgetCollections() {
  isLoaded = false;
}

/** The chosen collection with its fields in requests, or null. */
function collection() {
  const about = chosen();
  return about === undefined ? null : { name: about.name, query: scope() };
}

const chosen = () => known.find((each) => each.name === byId("collection").value);
const scope = () => (byId("collection-namespace").value ? { namespace: byId("collection-namespace").value } : {});
const path = (name, more = {}) => `v1/rag/collections/${encodeURIComponent(name)}?${new URLSearchParams({ ...scope(), ...more })}`;

/** Chooses the collection of a link's fields; resolves to whether it exists. */
async function chooseLinked(fields) {
  byId("collection-namespace").value = fields.get("namespace") ?? "";
  await reload(fields.get("collection"));
  return chosen()?.name === fields.get("collection");
}

/** Loads the list, and chooses `name`, or what was chosen. */
async function reload(name = byId("collection").value) {
  say(byId("upload-problem"), "");
  try {
    known = (await getJson(`v1/rag/collections?${new URLSearchParams(scope())}`)).data;
  } catch (error) {
    isLoaded = ![0, 401].includes(error.status); // asked again then
    known = [];
    say(byId("upload-problem"), error.message);
  }
  const options = known.map((each) => el("option", { value: each.name }, each.name));
  byId("collection").replaceChildren(...options, el("option", { value: "" }, "New collection…"));
  byId("collection").value = known.some((each) => each.name === name) ? name : known[0]?.name ?? "";
  await showChosen();
}

async function showChosen() {
  const about = chosen();
  byId("collection-new").hidden = about !== undefined;
  byId("collection-delete").hidden = about === undefined;
  if (about === undefined) {
    say(byId("collection-about"), "");
    showFiles([]);
    if (!byId("collection-system").value) byId("collection-system").value = (await loadExample()).system;
    return;
  }
  say(byId("collection-about"), `${several(about.files, "file")}, ${several(about.passages, "passage")} of at most `
    + `${tokens(about.max_tokens)}, ${tokens(about.tokens)} in all. `
    + (about.system ? `System prompt: ${about.system}` : "No system prompt."));
  try {
    const { data } = await getJson(path(about.name));
    if (chosen() === about) showFiles(data);
  } catch (error) {
    say(byId("upload-problem"), error.message);
  }
}

function showFiles(files) {
  say(byId("kept-count"), count(files.length));
  const button = ({ file }) => el("button", {
    type: "button", className: "small", "aria-label": `Remove ${file}`, onclick: () => remove(file) }, "Remove");
  const rows = files.map((each) => [
    each.file, number(count(each.passages)), el("td", { className: "buttons" }, button(each))]);
  byId("kept").replaceChildren(files.length
    ? table("Files of the collection", ["File", "#Passages", el("th", { scope: "col" }, "Actions")], rows)
    : el("p", { className: "empty" }, "No files yet."));
}

/** Sends files to the chosen collection, or to a new one. */
function add(files) {
  if (!files.length) return say(byId("upload-problem"), "None of these files is of a type that can be read.");
  const isNew = chosen() === undefined;
  if (isNew && !byId("collection-name").reportValidity()) return;
  const name = isNew ? byId("collection-name").value : chosen().name;
  const fields = isNew
    ? { system: byId("collection-system").value, max_tokens: byId("collection-tokens").value || 256 } : {};
  uploading.run(async (signal) => {
    try {
      const counts = await upload(files, { path: path(name), fields }, showProgress, signal);
      await reload(name);
      showCounts(counts);
    } catch (error) {
      await reload(name); // files before the error are stored
      throw error;
    }
  });
}

function showProgress({ file, number, total, passage, passages }) {
  byId("upload-progress").value = (number - 1 + passage / passages) / total;
  say(byId("upload-status"), `${file} (${number} of ${several(total, "file")}): ${passage} of ${several(passages, "passage")}`);
}

function showCounts({ added, changed, unchanged, failed, computed, kept, displaced, errors }) {
  const files = Object.entries({ added, changed, unchanged, failed }).filter(([, number]) => number);
  const words = files.map(([status, number]) => `${count(number)} ${status}`).join(", ");
  const passages = `Passages: ${count(computed)} computed, ${count(kept)} already there.`;
  const pool = displaced ? ` The pool was too small: ${several(displaced, "chunk")} left it (--chunk-cache-memory).` : "";
  say(byId("upload-status"), `Files: ${words}. ${passages}${pool}`);
  const more = errors.length > MOST_ERRORS ? `; and ${errors.length - MOST_ERRORS} more` : "";
  say(byId("upload-problem"), `${errors.slice(0, MOST_ERRORS).join("; ")}${more}`);
}

function showUploading(isUploading) {
  for (const id of ["upload-files-button", "upload-folder-button", "collection", "collection-delete"]) byId(id).disabled = isUploading;
  byId("upload-stop").hidden = byId("upload-progress").hidden = !isUploading;
  byId("upload-progress").value = 0;
  if (isUploading) say(byId("upload-problem"), "");
}

async function remove(file) {
  const { name } = chosen();
  await change(path(name, { file }), `Removed: ${file}.`);
}

function askToDelete() {
  const { name, files } = chosen();
  say(byId("delete-text"), `“${name}” with ${several(files, "file")}: texts, and the KV of their passages.`);
  byId("delete-dialog").returnValue = "";
  byId("delete-dialog").showModal();
}

async function removeAll() {
  const { name } = chosen();
  conversation.clear();
  await change(path(name), `Deleted: ${name}.`);
}

async function change(path, words) {
  try {
    await send("DELETE", path);
  } catch (error) {
    return say(byId("upload-problem"), error.message);
  }
  await reload();
  say(byId("upload-status"), words);
}
