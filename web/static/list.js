// SPDX-License-Identifier: Apache-2.0
// The table of cached chunks: searched, sorted and paged in the browser.

import { getJson, send } from "./api.js";
import { byId, el, number, say, table } from "./dom.js";
import { ago, bytes, clock, count, several } from "./format.js";
import { knownText } from "./known.js";

const MOST = 5000;
const PER_REQUEST = 1000;
const PER_PAGE = 50;
const KEY_BEGINNING = 4; // with fewer characters, ids such as d1 would match keys
const REFRESHED_BY_ITSELF = 500;
const COLUMNS = [
  { title: "Chunk", value: (chunk) => name(chunk).toLowerCase() },
  { title: "Namespace", value: (chunk) => chunk.namespace },
  { title: "Tokens", value: (chunk) => chunk.tokens, numeric: true },
  { title: "Size", value: (chunk) => chunk.bytes, numeric: true },
  { title: "Uses", value: (chunk) => chunk.hits, numeric: true },
  { title: "Last use", value: (chunk) => chunk.last_used_at, numeric: true },
  { title: "Kept", value: (chunk) => (chunk.pinned ? 0 : chunk.expires_at ?? Infinity) },
];

export class ChunkList {
  /** `replica()` names the replica whose chunks are shown, behind a router. */
  constructor(replica) {
    this.replica = replica;
    this.chunks = [];
    this.isCut = false;
    this.page = 0;
    this.sorted = { column: 5, down: true };
    this.seen = null;
    this.isLoading = false;
    byId("search").addEventListener("input", () => this.search());
    byId("refresh").addEventListener("click", () => this.load());
    byId("clear").addEventListener("click", () => this.askToClear());
    byId("clear-dialog").addEventListener("close", ({ target }) => target.returnValue === "clear" && this.clear());
  }

  /** Reloads the list if `stats` show a change and the list is short. */
  follow(stats) {
    const { occupancy, counters } = stats;
    if (!occupancy) return;
    const { segments, pages_pinned, registered_ids } = occupancy;
    const { lookups, fills, removals } = counters;
    const state = JSON.stringify([segments, pages_pinned, registered_ids, lookups, fills, removals]);
    if (state === this.seen) return;
    if (this.seen !== null && segments > REFRESHED_BY_ITSELF) {
      say(byId("list-status"), "The cache has changed. Refresh to update the list.");
      return;
    }
    this.load().then(() => (this.seen = state));
  }

  async load() {
    if (this.isLoading) return;
    this.isLoading = true;
    try {
      await this.loadAll();
      say(byId("list-problem"), "");
    } catch (error) {
      say(byId("list-problem"), error.message);
    } finally {
      this.isLoading = false;
    }
    this.show();
  }

  async loadAll() {
    const found = [];
    let cursor = null;
    do {
      const query = new URLSearchParams({ limit: PER_REQUEST, ...(cursor ? { cursor } : {}) });
      const answer = await getJson(`v1/rag/chunks?${query}`, { replica: this.replica() });
      found.push(...answer.data);
      cursor = answer.next_cursor;
    } while (cursor !== null && found.length < MOST);
    this.chunks = found;
    this.isCut = cursor !== null;
    this.loadedAt = Date.now() / 1000;
  }

  /** Shows matching chunks; looks up an id on the server if it is not among the loaded chunks. */
  async search() {
    this.page = 0;
    this.show();
    const id = byId("search").value.trim();
    if (!this.isCut || !id || this.matching().length) return;
    const query = new URLSearchParams({ id });
    const { data } = await getJson(`v1/rag/chunks?${query}`, { replica: this.replica() }).catch(() => ({ data: [] }));
    if (byId("search").value.trim() !== id) return;
    this.chunks.push(...data);
    this.show();
  }

  matching() {
    const wanted = byId("search").value.trim().toLowerCase();
    const texts = (chunk) => [...chunk.ids, chunk.namespace, chunk.kind, knownText(chunk.key)];
    const hasKey = (chunk) => wanted.length >= KEY_BEGINNING && chunk.key.startsWith(wanted);
    return this.chunks.filter((chunk) => hasKey(chunk) || texts(chunk).some((text) => text.toLowerCase().includes(wanted)));
  }

  show() {
    const { column, down } = this.sorted;
    const { value } = COLUMNS[column];
    const order = (a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0);
    const found = this.matching().sort((a, b) => (down ? order(b, a) : order(a, b)));
    this.page = Math.max(0, Math.min(this.page, Math.ceil(found.length / PER_PAGE) - 1));
    const shown = found.slice(this.page * PER_PAGE, (this.page + 1) * PER_PAGE);
    const focused = document.activeElement?.dataset?.focus;
    byId("list").replaceChildren(shown.length ? this.tableOf(shown) : el("p", { className: "empty" }, this.emptyWords()));
    if (focused) byId("list").querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
    this.showCounts(found.length);
  }

  emptyWords() {
    return this.chunks.length ? "Nothing matches the search." : "The cache is empty. Ask a question, or compute documents ahead.";
  }

  showCounts(numFound) {
    say(byId("listed-count"), numFound === this.chunks.length ? count(numFound) : `${count(numFound)} of ${count(this.chunks.length)}`);
    const cut = this.isCut ? `Only the oldest ${count(MOST)} chunks are listed; exact ids are looked up on the server.` : "";
    say(byId("list-status"), cut);
    const pages = Math.ceil(numFound / PER_PAGE);
    byId("pages").hidden = pages < 2;
    byId("pages").replaceChildren(
      this.turn("Previous", -1, this.page === 0), el("span", {}, `Page ${this.page + 1} of ${pages}`),
      this.turn("Next", 1, this.page >= pages - 1));
  }

  turn(text, step, disabled) {
    return el("button", { type: "button", className: "small", disabled, onclick: () => {
      this.page += step;
      this.show();
    } }, text);
  }

  tableOf(chunks) {
    const headers = [...COLUMNS.map((column, i) => this.header(column, i)), el("th", { scope: "col" }, "Actions")];
    return table("Chunks in the cache", headers, chunks.map((chunk) => this.row(chunk)));
  }

  header({ title, numeric }, i) {
    const { column, down } = this.sorted;
    const direction = i !== column ? "none" : down ? "descending" : "ascending";
    const sign = { none: "", ascending: " ▲", descending: " ▼" }[direction];
    const sort = () => {
      this.sorted = { column: i, down: i === column ? !down : Boolean(numeric) };
      this.show();
    };
    const button = el("button", { type: "button", className: "sort", onclick: sort }, title, el("span", { "aria-hidden": "true" }, sign));
    button.dataset.focus = `sort ${i}`;
    return el("th", { scope: "col", className: numeric ? "number" : "", "aria-sort": direction }, button);
  }

  row(chunk) {
    const used = el("td", { className: "number", title: clock(chunk.last_used_at) }, ago(chunk.last_used_at));
    return [
      described(chunk), chunk.namespace, number(count(chunk.tokens)), number(bytes(chunk.bytes)), number(count(chunk.hits)), used,
      kept(chunk),
      el("td", { className: "buttons" },
        this.button(chunk, chunk.pinned ? "Unpin" : "Pin", () => this.pin(chunk)),
        this.button(chunk, "Delete", () => this.remove(chunk))),
    ];
  }

  button(chunk, text, onclick) {
    const made = el("button", { type: "button", className: "small", "aria-label": `${text} ${name(chunk)}`, onclick }, text);
    made.dataset.focus = `${text === "Delete" ? text : "Pin"} ${chunk.key}`;
    return made;
  }

  pin(chunk) {
    const change = { pinned: !chunk.pinned };
    return this.change(chunk, "PATCH", change, () => `${change.pinned ? "Pinned" : "Unpinned"}: ${name(chunk)}.`);
  }

  remove(chunk) {
    return this.change(chunk, "DELETE", undefined, () => `Deleted: ${name(chunk)}.`);
  }

  async change(chunk, method, json, words) {
    say(byId("list-problem"), "");
    let said = "";
    try {
      await send(method, `v1/rag/chunks/${chunk.key}`, { json });
      said = words();
    } catch (error) {
      return say(byId("list-problem"), error.message);
    }
    await this.load();
    say(byId("list-status"), said);
  }

  askToClear() {
    byId("clear-namespace").value = "";
    const where = this.replica() ? " on every replica" : "";
    say(byId("clear-text"), `All chunks${where} are dropped, including pinned chunks, and recomputed on demand. `
      + "Running requests keep their chunks until they end.");
    byId("clear-dialog").returnValue = "";
    byId("clear-dialog").showModal();
  }

  async clear() {
    const namespace = byId("clear-namespace").value.trim();
    try {
      const { cleared } = await (await send("POST", "v1/cache/clear", { json: namespace ? { namespace } : {} })).json();
      await this.load();
      say(byId("list-status"), `Cleared: ${several(cleared, "segment")}.`);
    } catch (error) {
      say(byId("list-problem"), error.message);
    }
  }
}

/** The chunk's id, the beginning of its text if known to this page, or its key. */
function name(chunk) {
  if (chunk.kind === "system") return `system segment ${chunk.key.slice(0, 8)}`;
  return chunk.ids[0] ?? (knownText(chunk.key) || chunk.key.slice(0, 8));
}

function described(chunk) {
  const text = chunk.kind === "system" ? "the opening and system prompt" : knownText(chunk.key);
  const title = chunk.ids.length ? chunk.ids.join(", ") : chunk.kind === "system" ? "system segment" : "";
  return el("td", { className: "name", title: chunk.key },
    title ? el("span", { className: "id" }, title) : null,
    text ? el("span", { className: "text" }, text) : null,
    el("code", {}, `${chunk.key.slice(0, 12)}…`));
}

function kept(chunk) {
  const until = chunk.expires_at === null ? "" : `until ${clock(chunk.expires_at)}`;
  const pinned = el("span", { className: "badge pinned" }, `pinned ${until}`.trim());
  const places = { filling: "being computed", stored: `in ${chunk.tiers.join(", ")}` };
  const words = [places[chunk.state], until].filter(Boolean).join(", ") || "as room allows";
  return el("td", { className: "kept" }, chunk.pinned ? pinned : words);
}
