// SPDX-License-Identifier: Apache-2.0
// Splits files into chunks on the server, which has the tokenizer.

import { send } from "./api.js";

/** Chunks `{id, title, text, tokens}` of one file. Throws ApiError with the file's name in its message. */
export async function split(file, maxTokens, signal) {
  const query = new URLSearchParams({ filename: file.name, max_tokens: maxTokens });
  try {
    return (await (await send("POST", `v1/rag/split?${query}`, { body: file, signal })).json()).chunks;
  } catch (error) {
    if (error.name !== "AbortError") error.message = `${file.name}: ${error.message}`;
    throw error;
  }
}

/** Makes `element` a drop target for files. */
export function takeDrops(element, onFiles) {
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  element.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    element.classList.add("dropping");
  });
  element.addEventListener("dragleave", () => element.classList.remove("dropping"));
  element.addEventListener("drop", (event) => {
    element.classList.remove("dropping");
    if (!hasFiles(event)) return;
    event.preventDefault();
    onFiles([...event.dataTransfer.files]);
  });
}
