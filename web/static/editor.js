// SPDX-License-Identifier: Apache-2.0
// The chunk editor: text, order, switches, and each chunk's status in the last answer.

import { byId, el, say } from "./dom.js";
import { count, tokens } from "./format.js";
import { badge } from "./status.js";

let nextNumber = 1;

/** One chunk's row. `id` is dropped when the text changes. */
class Row {
  constructor(editor, { text, title = null, id = null }) {
    this.editor = editor;
    this.id = id;
    this.title = title;
    this.number = nextNumber++;
    this.enabled = el("input", { type: "checkbox", checked: true, title: "Use this chunk", onchange: () => this.toggle() });
    this.position = el("span", { className: "position" });
    this.text = el("textarea", { rows: 1, value: text, oninput: () => this.edited() });
    this.note = el("p", { className: "note" });
    this.up = this.button("↑", () => this.editor.move(this, -1));
    this.down = this.button("↓", () => this.editor.move(this, 1));
    this.remove = this.button("✕", () => this.editor.remove(this));
    const handle = el("span", { className: "handle", title: "Drag to reorder", draggable: true, "aria-hidden": "true",
      ondragstart: (event) => this.editor.drag(event, this), ondragend: () => this.editor.drop() }, "⠿");
    this.element = el("li", { className: "chunk", ondragover: (event) => this.editor.dragOver(event, this) },
      el("div", { className: "side" }, handle, this.enabled, this.position),
      el("div", { className: "body" }, title ? el("p", { className: "title" }, title) : null, this.text),
      this.note,
      el("div", { className: "moves" }, this.up, this.down, this.remove));
    this.element.addEventListener("keydown", (event) => this.key(event));
  }

  button(sign, onclick) {
    return el("button", { type: "button", className: "icon", onclick }, sign);
  }

  key(event) {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!event.altKey || step === undefined) return;
    event.preventDefault();
    const focused = document.activeElement;
    this.editor.move(this, step);
    focused.focus();
  }

  toggle() {
    this.element.classList.toggle("off", !this.enabled.checked);
    this.show(null);
    this.editor.changed();
  }

  edited() {
    this.id = null;
    this.show(null);
    this.editor.changed();
  }

  /** Shows the chunk's status in the last answer, or null. */
  show(outcome) {
    this.element.dataset.status = outcome?.status ?? "";
    this.note.replaceChildren(...(outcome ? [badge(outcome.status, outcome.origin), el("span", {}, tokens(outcome.tokens))] : []));
  }

  /** Sets the row's position: names for screen readers, and the enabled directions. */
  place(index, total) {
    const name = `chunk ${index + 1} of ${total}`;
    say(this.position, String(index + 1));
    this.text.setAttribute("aria-label", `Text of ${name}`);
    this.enabled.setAttribute("aria-label", `Use ${name}`);
    this.up.setAttribute("aria-label", `Move ${name} up`);
    this.down.setAttribute("aria-label", `Move ${name} down`);
    this.remove.setAttribute("aria-label", `Remove ${name}`);
    this.up.disabled = index === 0;
    this.down.disabled = index === total - 1;
  }

  get content() {
    const extra = { ...(this.title ? { title: this.title } : {}), ...(this.id ? { id: this.id } : {}) };
    return { text: this.text.value, ...extra };
  }
}

export class Editor {
  constructor() {
    this.rows = [];
    this.list = byId("chunks");
    this.dragged = null;
    this.announced = byId("ask-status");
    this.arrange();
  }

  /** Appends chunks `{text, title?, id?}`; returns their rows. */
  add(chunks) {
    const rows = chunks.map((chunk) => new Row(this, chunk));
    this.rows.push(...rows);
    this.list.append(...rows.map((row) => row.element));
    this.arrange();
    return rows;
  }

  clear() {
    this.rows = [];
    this.list.replaceChildren();
    this.arrange();
  }

  /** Rows to send with a question: enabled and not blank. */
  get used() {
    return this.rows.filter((row) => row.enabled.checked && row.text.value.trim());
  }

  move(row, step) {
    const from = this.rows.indexOf(row);
    const to = from + step;
    if (to < 0 || to >= this.rows.length) return;
    const active = document.activeElement;
    this.put(row, to);
    if (row.element.contains(active)) (active.disabled ? (step < 0 ? row.down : row.up) : active).focus();
    say(this.announced, `Chunk moved to position ${to + 1} of ${this.rows.length}.`);
  }

  put(row, to) {
    this.rows.splice(this.rows.indexOf(row), 1);
    this.rows.splice(to, 0, row);
    this.list.insertBefore(row.element, this.rows[to + 1]?.element ?? null);
    this.arrange();
  }

  remove(row) {
    const index = this.rows.indexOf(row);
    this.rows.splice(index, 1);
    row.element.remove();
    this.arrange();
    (this.rows[Math.min(index, this.rows.length - 1)]?.remove ?? byId("chunk-add")).focus();
  }

  shuffle() {
    for (let i = this.rows.length - 1; i > 0; i--) {
      const j = Math.floor(Math.random() * (i + 1));
      [this.rows[i], this.rows[j]] = [this.rows[j], this.rows[i]];
    }
    this.list.append(...this.rows.map((row) => row.element));
    this.arrange();
    say(this.announced, "Chunks shuffled.");
  }

  drag(event, row) {
    this.dragged = row;
    event.dataTransfer.effectAllowed = "move";
    event.dataTransfer.setData("application/x-tessera-chunk", String(row.number));
    event.dataTransfer.setDragImage(row.element, 10, 10);
    row.element.classList.add("dragged");
  }

  dragOver(event, row) {
    if (this.dragged === null) return;
    event.preventDefault();
    if (row === this.dragged) return;
    const { top, height } = row.element.getBoundingClientRect();
    const [from, over] = [this.rows.indexOf(this.dragged), this.rows.indexOf(row)];
    const isPast = event.clientY > top + height / 2;
    const to = over + (isPast ? 1 : 0) - (from < over ? 1 : 0);
    if (to !== from) this.put(this.dragged, to);
  }

  drop() {
    this.dragged?.element.classList.remove("dragged");
    this.dragged = null;
  }

  /** Shows the report's status of each of `rows`, the rows of the request. */
  show(rows, statuses) {
    for (const row of this.rows) row.show(null);
    rows.forEach((row, index) => row.show(statuses.get(index) ?? null));
  }

  arrange() {
    this.rows.forEach((row, index) => row.place(index, this.rows.length));
    byId("chunks-empty").hidden = this.rows.length > 0;
    for (const id of ["chunks-shuffle", "chunks-clear"]) byId(id).hidden = this.rows.length === 0;
    this.changed();
  }

  changed() {
    const [used, all] = [this.used.length, this.rows.length];
    say(byId("chunk-count"), used === all ? count(all) : `${count(used)} of ${count(all)}`);
  }
}
