// SPDX-License-Identifier: Apache-2.0
// The view "Ask": the request, its answer, and the answer in full attention for comparison.

import { Action } from "./action.js";
import { Answer, chunkSummary } from "./answer.js";
import { byId, el, say } from "./dom.js";
import { Editor } from "./editor.js";
import { loadExample } from "./example.js";
import { split, takeDrops } from "./files.js";
import { count, duration, several, tokens } from "./format.js";
import { computeAhead } from "./ingest.js";
import { remember } from "./known.js";
import { statusByDocument } from "./status.js";

const editor = new Editor();
const action = new Action({ show: setRunning, fail: showProblem, stopped: () => say(byId("ask-status"), "Stopped.") });

export function startAsk() {
  byId("ask-form").addEventListener("submit", (event) => act(event, (signal) => ask(false, signal)));
  byId("compare").addEventListener("click", (event) => act(event, (signal) => ask(true, signal)));
  byId("stop").addEventListener("click", () => action.stop());
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) act(event, (signal) => ask(false, signal));
  });
  byId("chunk-add").addEventListener("click", () => editor.add([{ text: "" }])[0].text.focus());
  byId("paste-add").addEventListener("click", addPasted);
  byId("chunks-clear").addEventListener("click", () => (editor.clear(), byId("chunk-add").focus()));
  byId("chunks-shuffle").addEventListener("click", () => editor.shuffle());
  byId("chunk-files-button").addEventListener("click", () => byId("chunk-files").click());
  byId("chunk-files").addEventListener("change", ({ target }) => {
    addFiles([...target.files]);
    target.value = "";
  });
  takeDrops(byId("chunks-card"), addFiles);
  byId("example-load").addEventListener("click", () => fillExample().then(() => byId("question").focus(), showProblem));
  byId("example-ask").addEventListener("click", (event) => act(event, askExample));
}

function act(event, asked) {
  event.preventDefault();
  return action.run(asked);
}

function setRunning(isRunning) {
  const hadFocus = document.activeElement;
  for (const id of ["ask", "compare", "example-ask", "example-load"]) byId(id).disabled = isRunning;
  byId("stop").hidden = !isRunning;
  if (isRunning) {
    say(byId("ask-problem"), "");
    if (hadFocus?.disabled) byId("stop").focus();
  } else {
    byId("ask-progress").hidden = true;
    if (document.activeElement === document.body) byId("ask").focus();
  }
}

function showProblem(error) {
  say(byId("ask-problem"), error.message);
  say(byId("ask-status"), "");
}

async function ask(isCompared, signal) {
  const rows = editor.used;
  const body = requestBody(rows);
  const titles = isCompared ? ["Chunks reused", "Full attention"] : [titleOf(body)];
  const answers = titles.map((title) => new Answer(title, ({ index }) => rows[index].text.focus()));
  byId("comparison").hidden = true;
  byId("answers").replaceChildren(...answers.map((answer) => answer.element));
  say(byId("ask-status"), isCompared ? "Answering, with chunks reused first…" : "Answering…");
  await answers[0].run(body, signal);
  note(answers[0], rows);
  if (isCompared) {
    say(byId("ask-status"), "Answering in full attention…");
    await answers[1].run({ ...body, cache: { ...body.cache, mode: "full" } }, signal);
    compare(...answers);
  }
  say(byId("ask-status"), answers.map((answer) => told(answer, isCompared)).join(" "));
}

function titleOf(body) {
  return body.cache.mode === "full" ? "Full attention" : "Answer";
}

function told({ title, firstTokenMs, report }, isCompared) {
  const what = report === null ? "" : `, ${count(report.tokens.reused)} of ${count(report.tokens.prompt)} tokens reused`;
  return `${isCompared ? `${title}: first` : "First"} token after ${duration(firstTokenMs)}${what}.`;
}

/** The body of POST /v1/rag/chat. Throws an Error for the user if a field is missing. */
function requestBody(rows) {
  const question = byId("question").value;
  if (!question.trim()) {
    byId("question").focus();
    throw new Error("Write a question first.");
  }
  const set = (name, value) => (value === "" ? {} : { [name]: value });
  const numeric = (name, id) => (byId(id).value === "" ? {} : { [name]: byId(id).valueAsNumber });
  return {
    ...set("model", byId("model").value),
    system: byId("system").value,
    chunks: rows.map((row) => row.content),
    question,
    ...numeric("max_tokens", "max-tokens"),
    ...numeric("temperature", "temperature"),
    ...numeric("top_p", "top-p"),
    ...numeric("seed", "seed"),
    cache: {
      cite: true,
      mode: byId("mode").value,
      scope: byId("scope").value,
      ...set("position_strategy", byId("strategy").value),
      ...set("namespace", byId("namespace").value),
    },
  };
}

/** Shows the report's chunk statuses beside the texts. */
function note({ report }, rows) {
  if (report === null) return;
  editor.show(rows, statusByDocument(report));
  for (const chunk of report.chunks) remember(chunk.key, rows[chunk.index]?.text.value ?? "");
}

function compare(reused, full) {
  const isEqual = reused.content === full.content;
  const card = byId("comparison");
  const times = reused.firstTokenMs && full.firstTokenMs ? full.firstTokenMs / reused.firstTokenMs : null;
  const speed = times === null ? "" : `${ratioWords(times)} to the first token with chunks reused`;
  const found = reused.report === null ? "" : ` (${chunkSummary(reused.report)})`;
  const repeated = full.report?.tokens.reused ?? 0;
  card.replaceChildren(
    el("h2", {}, "Compared"),
    el("p", { className: "speed" }, speed),
    el("p", {}, `${duration(reused.firstTokenMs)} with chunks reused${found}, ${duration(full.firstTokenMs)} in full attention.`),
    el("p", { className: isEqual ? "equal" : "different" },
      isEqual ? "✓ The answers are equal." : "≠ The answers differ."),
    repeated ? el("p", { className: "different" }, `Full attention found ${tokens(repeated)} of the same prompt in vLLM’s own `
      + "prefix cache, from an earlier run in this order. Shuffle the chunks for a fair comparison.") : "",
    el("p", { className: "hint" }, "Run one after the other. A single round is not a measurement; use tessera bench for one."),
  );
  card.hidden = false;
}

function ratioWords(times) {
  if (times > 0.95 && times < 1.05) return "As fast";
  return times > 1 ? `${times.toFixed(1)} × faster` : `${(1 / times).toFixed(1)} × slower`;
}

/** Adds the files' chunks; resolves to whether all files were split. */
async function addFiles(files) {
  say(byId("chunks-problem"), "");
  let isAdded = true;
  for (const file of files) {
    say(byId("ask-status"), `Splitting ${file.name}…`);
    try {
      const chunks = await split(file, byId("chunk-tokens").value || 512);
      editor.add(chunks);
      say(byId("ask-status"), `${file.name}: ${several(chunks.length, "chunk")} added.`);
    } catch (error) {
      say(byId("ask-status"), "");
      say(byId("chunks-problem"), error.message);
      isAdded = false;
    }
  }
  return isAdded;
}

/** Splits the pasted text like a file, and clears the field. */
async function addPasted() {
  const field = byId("paste");
  if (!field.value.trim()) {
    field.focus();
    return say(byId("chunks-problem"), "Paste some text first.");
  }
  if (await addFiles([new File([field.value], "pasted.txt")])) field.value = "";
}

/** Fills all fields with the example; resolves to it. */
async function fillExample() {
  const example = await loadExample();
  editor.clear();
  editor.add(example.documents.map((text) => ({ text })));
  byId("system").value = example.system;
  byId("question").value = example.questions[0];
  const choose = (text) => (byId("question").value = text, byId("question").focus());
  byId("suggestions").replaceChildren(...example.questions.map((text) =>
    el("button", { type: "button", className: "small", onclick: () => choose(text) }, text)));
  byId("suggestions").hidden = false;
  return example;
}

/** Demonstrates a hit: computes the example's chunks ahead, reorders them, and asks. */
async function askExample(signal) {
  const example = await fillExample();
  const progress = byId("ask-progress");
  progress.hidden = false;
  progress.value = 0;
  const { model, system, cache } = requestBody([]);
  const fields = { model, system, cache: { ...cache, mode: "auto" } };
  await computeAhead(example.documents.map((text) => ({ text })), fields, ({ done, total }) => {
    progress.value = done / total;
    say(byId("ask-status"), `Computing chunks ahead: ${done} of ${total}.`);
  }, signal);
  editor.shuffle();
  await ask(false, signal);
}
