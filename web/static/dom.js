// SPDX-License-Identifier: Apache-2.0
// DOM helpers. Texts become text nodes: no document or server text is parsed as HTML.

/** The element with this id in index.html. */
export const byId = (id) => document.getElementById(id);

/**
 * Creates an element. `props` are properties (`className`), `on…` listeners, or, with a dash or "role", attributes.
 * Children are elements or texts; nulls are skipped.
 */
export function el(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

/** Creates an SVG element; all props are attributes. */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function filled(made, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role" || name === "for") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Sets the text of `element` if it differs, so that live regions announce only changes. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A table with a caption for screen readers; `rows` are lists of cells (elements or texts). */
export function table(caption, headers, rows) {
  return el("table", {},
    el("caption", { className: "hidden-visually" }, caption),
    el("thead", {}, el("tr", {}, ...headers.map((header) => header instanceof Element ? header : heading(header)))),
    el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map(cell)))));
}

const isNumeric = (name) => name.startsWith("#");
const heading = (name) => el("th", { scope: "col", className: isNumeric(name) ? "number" : "" }, name.replace("#", ""));
const cell = (content) => content instanceof HTMLTableCellElement ? content : el("td", {}, content);

/** A table cell with a number: right-aligned, digits of equal width. */
export const number = (text) => el("td", { className: "number" }, text);
