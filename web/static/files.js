// SPDX-License-Identifier: Apache-2.0
// Files and folders that are chosen or dropped, and chunks of files, which the server splits.

import { send } from "./api.js";

/** File types that the server reads. */
export const TYPES = (
  ".txt .text .log .md .markdown .html .htm .xhtml .csv .tsv .pdf .docx .pptx .xlsx .epub .eml .ipynb .rtf .adoc " +
  ".bash .bat .c .cc .cfg .clj .cmake .conf .cpp .cs .css .cxx .dart .diff .erl .ex .exs .f90 .fish .go .gradle " +
  ".groovy .h .hpp .hs .ini .java .jl .js .json .jsonl .jsx .kt .kts .less .lisp .lua .m .mjs .ml .mm .nim .org " +
  ".patch .php .pl .pm .properties .proto .ps1 .py .pyi .r .rb .rs .rst .sass .scala .scss .sh .sql .swift .tex .tf " +
  ".toml .ts .tsx .vb .vue .xml .yaml .yml .zig .zsh"
).split(" ");

const paths = new WeakMap();

/** A file's path in the folder that was chosen or dropped; its name without one. */
export const pathOf = (file) => paths.get(file) ?? (file.webkitRelativePath.split("/").slice(1).join("/") || file.name);

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

/** Files of a folder whose types can be read, without those in hidden folders. */
export function readable(files) {
  const isHidden = (file) => pathOf(file).split("/").some((part) => part.startsWith("."));
  return files.filter((file) => TYPES.some((type) => file.name.toLowerCase().endsWith(type)) && !isHidden(file));
}

/** Makes `element` a drop target for files and folders; `onFiles` gets the files. */
export function takeDrops(element, onFiles) {
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  element.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    element.classList.add("dropping");
  });
  element.addEventListener("dragleave", () => element.classList.remove("dropping"));
  element.addEventListener("drop", async (event) => {
    element.classList.remove("dropping");
    if (!hasFiles(event)) return;
    event.preventDefault();
    onFiles(await droppedFiles(event.dataTransfer.items));
  });
}

/** Reads `items` before the first await: they are empty after the event. */
async function droppedFiles(items) {
  const dropped = [...items].filter((item) => item.kind === "file");
  const found = dropped.map((item) => ({ entry: item.webkitGetAsEntry(), file: item.getAsFile() }));
  const isOneFolder = found.length === 1 && found[0].entry?.isDirectory;
  const files = [];
  for (const { entry, file } of found) {
    if (entry?.isDirectory) files.push(...readable(await filesBelow(entry, isOneFolder ? "" : `${entry.name}/`)));
    else files.push(file);
  }
  return files;
}

/** All files below a folder; their paths begin with `prefix`. */
async function filesBelow(folder, prefix) {
  const reader = folder.createReader();
  const files = [];
  for (;;) {
    const entries = await new Promise((resolve, reject) => reader.readEntries(resolve, reject)); // some at a time
    if (!entries.length) return files;
    for (const entry of entries) {
      if (entry.isDirectory) {
        files.push(...await filesBelow(entry, `${prefix}${entry.name}/`));
        continue;
      }
      const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
      paths.set(file, `${prefix}${entry.name}`);
      files.push(file);
    }
  }
}
