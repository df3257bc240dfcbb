// SPDX-License-Identifier: Apache-2.0
// A line plot over time. Elements are created once; drawing only changes their attributes.

import { el, say, svg } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 120;
const TOP = 8;
const BOTTOM = 20;
const LEFT = 62;
const RIGHT = 8;
const GAP_MS = 15_000; // a longer gap between samples interrupts the line

/**
 * `lines`: [{name, label}]; `format` formats a value with its unit; the axis ends at `top`, or at a round number of
 * `unit`s above all values and `least`.
 */
export class Plot {
  constructor({ title, lines, format, least, top, unit = 1 }) {
    Object.assign(this, { title, lines, format, least, top, unit });
    this.samples = [];
    this.width = 320;
    this.value = el("span", { className: "plot-value" }, "–");
    this.paths = lines.map((_, i) => svg("path", { class: `line line-${i}` }));
    this.dots = lines.map((_, i) => svg("circle", { class: `dot line-${i}`, r: 2.5 }));
    this.grid = [0, 1, 2].map(() => svg("line", { class: "grid" }));
    this.marks = [0, 1, 2].map(() => svg("text", { class: "mark", "text-anchor": "end" }));
    this.times = ["start", "end"].map((anchor) => svg("text", { class: "mark", "text-anchor": anchor }));
    this.cursor = svg("line", { class: "cursor" });
    this.drawing = svg("svg", { role: "img", height: HEIGHT },
      ...this.grid, ...this.marks, ...this.times, this.cursor, ...this.paths, ...this.dots);
    const head = el("figcaption", {}, el("span", {}, title), this.value);
    this.element = el("figure", { className: "plot" }, head, this.drawing, lines.length > 1 ? legend(lines) : null);
    this.drawing.addEventListener("pointermove", (event) => this.point(event));
    this.drawing.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(([entry]) => this.resize(entry.contentRect.width)).observe(this.element);
  }

  /** Draws samples: [{at, [name]: number or null}]. */
  draw(samples) {
    this.samples = samples;
    const values = this.lines.flatMap(({ name }) => samples.map((sample) => sample[name])).filter(isNumber);
    const end = this.top ?? niceEnd(Math.max(this.least, ...values) / this.unit) * this.unit;
    const [first, last] = [samples[0]?.at ?? 0, samples.at(-1)?.at ?? 1];
    const span = Math.max(last - first, 1);
    this.x = (at) => LEFT + ((at - first) / span) * (this.width - LEFT - RIGHT);
    this.y = (value) => TOP + (1 - value / end) * (HEIGHT - TOP - BOTTOM);
    this.lines.forEach(({ name }, i) => {
      this.paths[i].setAttribute("d", path(samples, name, this.x, this.y));
      place(this.dots[i], samples.findLast((sample) => isNumber(sample[name])), name, this.x, this.y);
    });
    this.axes(end, first, last, samples.length);
    this.tell(samples.at(-1));
    this.drawing.setAttribute("aria-label", `${this.title}: ${this.summary(values)}`);
  }

  axes(end, first, last, numSamples) {
    [0, end / 2, end].forEach((value, i) => {
      const y = this.y(value);
      set(this.grid[i], { x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y });
      set(this.marks[i], { x: LEFT - 6, y: y + 4 });
      this.marks[i].textContent = this.format(value);
    });
    this.times.forEach((time, i) => {
      set(time, { x: i ? this.width - RIGHT : LEFT, y: HEIGHT - 5 });
      const text = numSamples > 1 ? [`${ageOf(last - first)} ago`, "now"][i] : "";
      time.textContent = text;
    });
  }

  summary(values) {
    if (!values.length) return "nothing measured yet";
    const [low, high] = [Math.min(...values), Math.max(...values)].map(this.format);
    return `now ${this.value.textContent}; lowest ${low}, highest ${high}`;
  }

  /** Shows the value at the pointer, or the last value. */
  point(event) {
    if (!this.samples.length) return;
    const at = event && event.clientX - this.drawing.getBoundingClientRect().left;
    const near = event && this.samples.reduce((best, sample) =>
      Math.abs(this.x(sample.at) - at) < Math.abs(this.x(best.at) - at) ? sample : best);
    this.cursor.classList.toggle("shown", Boolean(near));
    if (near) set(this.cursor, { x1: this.x(near.at), x2: this.x(near.at), y1: TOP, y2: HEIGHT - BOTTOM });
    this.tell(near ?? this.samples.at(-1), Boolean(near));
  }

  tell(sample, withTime = false) {
    const parts = this.lines.map(({ name }) => this.format(sample?.[name] ?? null));
    say(this.value, parts.join(" · ") + (withTime ? ` at ${clock(sample.at / 1000)}` : ""));
  }

  resize(width) {
    this.width = Math.max(width, 160);
    this.drawing.setAttribute("width", this.width);
    if (this.samples.length) this.draw(this.samples);
  }
}

function legend(lines) {
  const items = lines.map(({ label }, i) => el("li", { className: `key line-${i}` }, label));
  return el("ul", { className: "legend" }, ...items);
}

function path(samples, name, x, y) {
  let made = "";
  let before = null;
  for (const sample of samples) {
    if (isNumber(sample[name])) {
      const joined = before !== null && sample.at - before < GAP_MS;
      const point = `${x(sample.at).toFixed(1)} ${y(sample[name]).toFixed(1)}`;
      made += joined ? `L${point}` : `M${point}h0`; // its round cap makes a single point visible
      before = sample.at;
    }
  }
  return made;
}

function place(dot, sample, name, x, y) {
  dot.classList.toggle("shown", sample !== undefined);
  if (sample !== undefined) set(dot, { cx: x(sample.at), cy: y(sample[name]) });
}

const isNumber = (value) => typeof value === "number";

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}

/** The next of 1, 2, 5, 10 … at or above `value`, for round axis marks. */
export function niceEnd(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * unit).find((end) => end >= value);
}

function ageOf(ms) {
  return ms < 90_000 ? `${Math.round(ms / 1000)} s` : `${Math.round(ms / 60_000)} min`;
}
