// SPDX-License-Identifier: Apache-2.0
// Questions to a collection and their answers; the address is a link that asks them again.

import { Action } from "./action.js";
import { Answer } from "./answer.js";
import { byId, el, say } from "./dom.js";
import { count, duration } from "./format.js";
import { readLink, writeLink } from "./link.js";
import { openCited, passageList } from "./passages.js";

const VIEW = "collections";

export class Conversation {
  /**
   * `collection()` gives the chosen collection `{name, query}`, or null; `choose(fields)` chooses the collection of a
   * link, and resolves to whether there is one.
   */
  constructor({ collection, choose }) {
    this.collection = collection;
    this.choose = choose;
    this.turns = []; // {question, content}, each answered
    this.opened = null; // the address that was opened last, or that this conversation has
    this.action = new Action({
      show: (isRunning) => this.showRunning(isRunning),
      fail: (error) => (say(byId("turn-problem"), error.message), say(byId("turn-status"), "")),
      stopped: () => say(byId("turn-status"), "Stopped."),
    });
    byId("turn-form").addEventListener("submit", (event) => this.submit(event));
    byId("turn-question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) this.submit(event);
    });
    byId("turn-stop").addEventListener("click", () => this.action.stop());
    byId("turn-new").addEventListener("click", () => (this.clear(), byId("turn-question").focus()));
  }

  submit(event) {
    event.preventDefault();
    this.action.run((signal) => this.ask(byId("turn-question").value, signal));
  }

  /** Forgets all turns. */
  clear() {
    this.forget();
    this.showLink();
  }

  forget() {
    this.action.stop();
    this.turns = [];
    byId("turns").replaceChildren();
    for (const id of ["turn-problem", "turn-status"]) say(byId(id), "");
  }

  /** Chooses the collection of a new address, and asks its questions. */
  async open() {
    if (location.hash === this.opened) return;
    this.opened = location.hash;
    const { fields } = readLink();
    if (!fields.has("collection")) return this.showLink();
    this.forget();
    if (!await this.choose(fields)) return say(byId("turn-problem"), `There is no collection “${fields.get("collection")}” here.`);
    if (fields.has("passages")) byId("turn-passages").value = fields.get("passages");
    await this.action.run(async (signal) => {
      for (const question of fields.getAll("q")) await this.ask(question, signal);
    });
    this.showLink();
  }

  /** Puts the link to this conversation into the address. */
  showLink() {
    const collection = this.collection();
    if (collection === null || readLink().view !== VIEW) return;
    const fields = new URLSearchParams({ collection: collection.name, ...collection.query, passages: byId("turn-passages").value });
    for (const { question } of this.turns) fields.append("q", question);
    byId("turn-link").href = this.opened = writeLink(VIEW, fields);
    byId("turn-link").hidden = byId("turn-new").hidden = this.turns.length === 0;
  }

  async ask(question, signal) {
    const collection = this.collection();
    if (collection === null) throw new Error("Choose a collection first, or make one by dropping files.");
    if (!question.trim()) {
      byId("turn-question").focus();
      throw new Error("Write a question first.");
    }
    const answer = new Answer(question, (chunk) => openCited(chunk, answer.report, collection));
    byId("turns").append(el("li", {}, answer.element));
    answer.element.scrollIntoView({ block: "nearest" });
    say(byId("turn-status"), "Finding passages and answering…");
    await answer.run(this.body(question, collection), signal);
    if (answer.report) answer.text.after(passageList(answer.report, collection));
    this.turns.push({ question, content: answer.content });
    if (byId("turn-question").value === question) byId("turn-question").value = "";
    say(byId("turn-status"), told(answer));
    this.showLink();
  }

  /** The body of POST /v1/rag/chat: a follow-up question comes with the turns before it. */
  body(question, { name, query }) {
    const before = this.turns.flatMap((turn) => [
      { role: "user", content: turn.question }, { role: "assistant", content: turn.content }]);
    return {
      ...(byId("turn-model").value ? { model: byId("turn-model").value } : {}),
      messages: [...before, { role: "user", content: question }],
      retrieve: { collection: name, top_k: byId("turn-passages").valueAsNumber || 8 },
      max_tokens: byId("turn-tokens").valueAsNumber || 256,
      temperature: 0,
      cache: { ...query, cite: true },
    };
  }

  showRunning(isRunning) {
    byId("turn-ask").disabled = isRunning;
    byId("turn-stop").hidden = !isRunning;
    if (isRunning) say(byId("turn-problem"), "");
    else if ([document.body, byId("turn-stop")].includes(document.activeElement)) byId("turn-question").focus();
  }
}

function told({ firstTokenMs, report }) {
  const { reused, prompt } = report?.tokens ?? {};
  return `First token after ${duration(firstTokenMs)}${report ? `, ${count(reused)} of ${count(prompt)} tokens reused` : ""}.`;
}
