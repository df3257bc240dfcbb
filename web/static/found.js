// SPDX-License-Identifier: Apache-2.0
// The documents that the server would find in a pasted prompt.

import { send } from "./api.js";
import { byId, el, say } from "./dom.js";
import { several } from "./format.js";

export function startFound() {
  byId("prompt-find").addEventListener("click", () => find(byId("prompt").value));
}

async function find(prompt) {
  say(byId("prompt-status"), "");
  byId("prompt-found").replaceChildren();
  if (!prompt.trim()) {
    byId("prompt").focus();
    return say(byId("prompt-status"), "Paste a prompt first.");
  }
  try {
    show(prompt, await (await send("POST", "v1/rag/plan", { json: { ...asked(), question: prompt } })).json());
  } catch (error) {
    say(byId("prompt-status"), error.message);
  }
}

function asked() {
  const namespace = byId("namespace").value;
  return namespace ? { cache: { namespace } } : {};
}

function show(prompt, { found, chunks }) {
  const characters = [...prompt]; // the server counts characters, not UTF-16 units
  const rows = found.map(({ by, start, end }, index) => {
    const status = chunks?.find((chunk) => chunk.index === index)?.status ?? "missing";
    return el("li", {}, el("span", { className: `badge ${status}` }, status), ` ${by}: `, shortened(characters.slice(start, end).join("")));
  });
  byId("prompt-found").replaceChildren(...rows);
  say(byId("prompt-status"), found.length ? `${several(found.length, "document")} found.` : "No document found.");
}

function shortened(text) {
  return text.length > 100 ? `${text.slice(0, 99)}…` : text;
}
