// SPDX-License-Identifier: Apache-2.0
// A chunk's status: a colour, always with a sign and a word.

import { el } from "./dom.js";

const KINDS = {
  hit: { sign: "✓", meaning: "found in the cache" },
  filled: { sign: "+", meaning: "computed for this request" },
  waited: { sign: "…", meaning: "another request was computing it" },
  loaded: { sign: "↑", meaning: "loaded from a tier" },
  fetched: { sign: "⇄", meaning: "fetched from another replica" },
  full: { sign: "○", meaning: "computed in full attention, not cached" },
  failed: { sign: "!", meaning: "could not be computed" },
};
const WORST_FIRST = ["filled", "waited", "fetched", "loaded", "hit"];

/** The badge of a chunk's status; `origin` is the replica it was fetched from. */
export function badge(status, origin) {
  const { sign, meaning } = KINDS[status] ?? { sign: "?", meaning: "" };
  const from = origin ? ` from ${origin}` : "";
  return el("span", { className: `badge ${status}`, title: meaning },
    el("span", { "aria-hidden": "true" }, `${sign} `), `${status}${from}`);
}

/** One status per document of a request, by index: the slowest status among its parts. */
export function statusByDocument(report) {
  const found = new Map();
  for (const chunk of report.chunks) {
    const parts = found.get(chunk.index) ?? [];
    found.set(chunk.index, [...parts, chunk]);
  }
  return new Map([...found].map(([index, parts]) => [index, combined(parts)]));
}

function combined(parts) {
  const status = WORST_FIRST.find((name) => parts.some((part) => part.status === name)) ?? "full";
  const tokens = parts.reduce((sum, part) => sum + part.tokens, 0);
  return { status, tokens, origin: parts.find((part) => part.origin)?.origin };
}
