// SPDX-License-Identifier: Apache-2.0
// The passages of an answer, and the dialog that opens a file at one of them.

import { getJson } from "./api.js";
import { byId, el, say } from "./dom.js";
import { several, tokens } from "./format.js";
import { badge, statusByDocument } from "./status.js";

const score = new Intl.NumberFormat("en", { maximumFractionDigits: 2, minimumFractionDigits: 2 });

/** The list of an answer's passages, the best first; each opens its file. `collection` is `{name, query}`. */
export function passageList(report, collection) {
  const retrieved = report.retrieved ?? [];
  const statuses = statusByDocument(report);
  const used = new Set(retrieved.map((each) => each.id));
  const item = (each, index) => {
    const status = statuses.get(index);
    return el("li", {},
      el("button", { type: "button", className: "passage", onclick: () => openPassage(each, used, collection) }, nameOf(each)),
      status ? badge(status.status, status.origin) : null,
      el("span", { className: "hint", title: "score of the retriever" }, score.format(each.score)));
  };
  return el("details", { open: true },
    el("summary", {}, retrieved.length ? `Answered from ${several(retrieved.length, "passage")}` : "No passage fits the question"),
    el("ol", { className: "passages" }, ...retrieved.map(item)));
}

/** Opens the file of a chunk that an answer cites, at its passage. */
export function openCited(chunk, report, collection) {
  const retrieved = report.retrieved ?? [];
  const passage = retrieved.find((each) => each.id === chunk.id);
  if (passage) openPassage(passage, new Set(retrieved.map((each) => each.id)), collection);
}

/** "manual.pdf · page 3 · Setup"; the passage's number if it has neither page nor title. */
function nameOf({ file, number, page, title }) {
  const places = [page === null ? null : `page ${page}`, title].filter(Boolean);
  return [file, ...(places.length ? places : [`passage ${number}`])].join(" · ");
}

/** Shows the passages of a file, those in `used` marked, and scrolls to the passage `wanted`. */
async function openPassage(wanted, used, { name, query }) {
  const dialog = byId("passage-dialog");
  say(byId("passage-title"), wanted.file);
  say(byId("passage-problem"), "");
  byId("passage-list").replaceChildren();
  dialog.showModal();
  try {
    const asked = new URLSearchParams({ ...query, file: wanted.file });
    const { data } = await getJson(`v1/rag/collections/${encodeURIComponent(name)}/passages?${asked}`);
    byId("passage-list").replaceChildren(...data.map((each) => described(each, used)));
    const place = data.findIndex((each) => each.id === wanted.id);
    if (place < 0) return say(byId("passage-problem"), "The file has changed since this answer; the passage is gone.");
    const found = byId("passage-list").children[place];
    found.classList.add("wanted");
    found.scrollIntoView({ block: "center" });
    found.focus({ preventScroll: true });
  } catch (error) {
    say(byId("passage-problem"), error.message);
  }
}

function described(each, used) {
  const words = [each.title, each.page === null ? null : `page ${each.page}`, tokens(each.tokens), used.has(each.id) ? "used" : null];
  return el("li", { className: used.has(each.id) ? "used" : "", tabIndex: -1 },
    el("p", { className: "hint" }, words.filter(Boolean).join(" · ")), el("p", { className: "passage-text" }, each.text));
}
