// SPDX-License-Identifier: Apache-2.0
// One streamed answer with its report.

import { send, serverEvents } from "./api.js";
import { el, number, say, table } from "./dom.js";
import { count, duration, percent, tokens } from "./format.js";
import { badge } from "./status.js";

const STEPS = {
  plan: "Finding the chunks",
  fill: "Waiting for missing chunks",
  queue: "Waiting for the engine",
  first_token: "First token",
  cite: "Finding what it rests on",
  total: "Whole answer",
};

/** A card for one answer; `run` fills it. */
export class Answer {
  /** `open(chunk)` shows a chunk of the report that the answer cites. */
  constructor(title, open) {
    this.title = title;
    this.open = open;
    this.content = "";
    this.firstTokenMs = null;
    this.report = null;
    this.replica = null;
    this.text = el("p", { className: "answer-text" });
    this.details = el("div", { className: "report" });
    this.element = el("article", { className: "card answer", "aria-label": `Answer, ${title}` },
      el("h2", {}, title), this.text, this.details);
  }

  /** Sends the request and shows the answer as it streams. Throws ApiError or AbortError; partial text stays. */
  async run(body, signal) {
    const started = performance.now();
    this.element.classList.add("running");
    try {
      const response = await send("POST", "v1/rag/chat", { json: { ...body, stream: true }, signal });
      this.replica = response.headers.get("x-tessera-replica");
      for await (const event of serverEvents(response)) this.take(event, started);
      this.totalMs = performance.now() - started;
      if (this.isCited) this.text.replaceChildren(...this.cited());
      this.details.replaceChildren(...this.described());
    } finally {
      this.element.classList.remove("running");
    }
  }

  take(event, started) {
    const piece = event.choices?.[0]?.delta?.content;
    if (piece) {
      this.firstTokenMs ??= performance.now() - started;
      this.content += piece;
      this.text.append(piece);
    }
    if (event.cache) this.report = event.cache;
    // Not there if the text that was cited had parts that a parser took out.
    if (event.choices?.[0]?.delta?.annotations) this.isCited = true;
  }

  /** The answer, with the numbers of the chunks that each sentence rests on behind it; they lead to the chunks. */
  cited() {
    const characters = Array.from(this.content); // the server counts code points
    const parts = [];
    let end = 0;
    for (const citation of this.report.citations) {
      parts.push(characters.slice(end, citation.end).join(""));
      end = citation.end;
      parts.push(el("sup", {}, ...citation.chunks.filter((each) => !each.is_weak).map(({ chunk, share, lift }) =>
        el("button", {
          type: "button", className: "cite", title: `${percent(share)} of this sentence’s attention to the chunks, ${lift.toFixed(1)} times the usual`,
          "aria-label": `Show chunk ${chunk + 1}`, onclick: () => this.open(this.report.chunks[chunk]),
          "data-chunk": chunk + 1,
        }))));
    }
    return [...parts, characters.slice(end).join("")];
  }

  described() {
    if (this.content === "") say(this.text, "(an empty answer)");
    const facts = [
      ["First token", duration(this.firstTokenMs)],
      ["Whole answer", duration(this.totalMs)],
      ...(this.replica ? [["Replica", this.replica]] : []),
    ];
    const { report } = this;
    return report === null ? [factList(facts)] : [
      factList(facts), tokenBar(report.tokens), this.timings(), chunkTable(report, this.title),
      ...remarks(report).map((words) => el("p", { className: "reason" }, words)),
    ];
  }

  /** Times measured in the browser, and on the server since it received the prompt. */
  timings() {
    const here = { first_token: this.firstTokenMs, total: this.totalMs };
    const there = this.report.timings_ms;
    const shown = Object.entries(STEPS).filter(([name]) => name in there);
    return table("Times, measured in this browser and on the server", ["Time", "#Browser", "#Server"],
      shown.map(([name, label]) =>
        [el("th", { scope: "row" }, label), number(name in here ? duration(here[name]) : ""), number(duration(there[name]))]));
  }
}

function factList(facts) {
  return el("dl", { className: "facts" },
    ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

/** Sentences about what decided, and about chunks that were read again or left out. */
function remarks({ mode, reason, decision, chunks, tokens: { reread, left_out: leftOut } }) {
  const again = chunks.filter((chunk) => chunk.reread).length;
  const kept = chunks.filter((chunk) => chunk.kept !== false).length;
  return [
    ...(reason ? [`Full attention: ${reason}.`] : []),
    ...(decision && mode === "chunked" ? [`Decided by the server: ${decision.why}.`] : []),
    ...(reread ? [`The question attends to ${again} of ${chunks.length} chunks most: the model reads ${tokens(reread)} again.`] : []),
    ...(leftOut ? [`The question attends to ${kept} of ${chunks.length} chunks most: ${tokens(leftOut)} are left out.`] : []),
  ];
}

/** Reused and computed tokens as a bar, repeated in words below. */
function tokenBar({ prompt, reused, computed }) {
  const bar = el("div", { className: "bar", "aria-hidden": "true" },
    el("span", { className: "reused" }), el("span", { className: "computed" }));
  bar.children[0].style.flexGrow = reused;
  bar.children[1].style.flexGrow = computed;
  const words = el("p", { className: "bar-words" },
    el("span", { className: "key reused" }, `${count(reused)} reused (${percent(prompt ? reused / prompt : 0)})`),
    el("span", { className: "key computed" }, `${count(computed)} computed`),
    el("span", {}, `of ${tokens(prompt)}`));
  return el("div", {}, bar, words);
}

function chunkTable(report, title) {
  const isMeasured = report.chunks.some((chunk) => chunk.share !== undefined);
  const rows = report.chunks.map((chunk) => [
    number(String(chunk.index + 1) + (chunk.part ? `, part ${chunk.part.join("/")}` : "")),
    el("span", {}, badge(chunk.status ?? "full", chunk.origin), chunk.reread ? " and read again" : ""),
    number(count(chunk.tokens)),
    ...(isMeasured ? [number(percent(chunk.share))] : []),
    el("code", {}, chunk.key ? `${chunk.key.slice(0, 8)}…` : "–"),
  ]);
  return el("details", {},
    el("summary", {}, chunkSummary(report)),
    el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": `Chunks, ${title}` },
      table("Chunks of this answer", ["#Chunk", "Status", "#Tokens", ...(isMeasured ? ["#Question’s attention"] : []), "Key"], rows)));
}

/** "12 chunks: 11 hit, 1 filled" */
export function chunkSummary({ chunks }) {
  const statuses = new Map();
  for (const { status } of chunks) statuses.set(status ?? "full", (statuses.get(status ?? "full") ?? 0) + 1);
  const parts = [...statuses].map(([status, number]) => `${number} ${status}`).join(", ");
  return `${count(chunks.length)} ${chunks.length === 1 ? "chunk" : "chunks"}${parts ? `: ${parts}` : ""}`;
}
