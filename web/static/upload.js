// SPDX-License-Identifier: Apache-2.0
// Sends files to a collection, one at a time, with progress.

import { ApiError, lines, send } from "./api.js";
import { pathOf } from "./files.js";
import { remember } from "./known.js";

const ABOUT_ONE_FILE = [400, 413]; // other errors concern all files

/**
 * Sends `files` to POST /v1/rag/collections/{name}; calls `onProgress({file, number, total, passage, passages})`.
 * Resolves to counts of files, passages and evicted chunks, and `errors` of files. Throws ApiError or AbortError;
 * stored files stay.
 */
export async function upload(files, { path, fields }, onProgress, signal) {
  const counts = { added: 0, changed: 0, unchanged: 0, failed: 0, computed: 0, kept: 0, displaced: 0, errors: [] };
  for (const [index, file] of files.entries()) {
    const at = { file: pathOf(file), number: index + 1, total: files.length };
    onProgress({ ...at, passage: 0, passages: 1 });
    try {
      for await (const line of sent(file, path, fields, signal)) {
        take(line, counts);
        if (line.progress) onProgress({ ...at, passage: line.progress.done, passages: line.progress.total });
      }
    } catch (error) {
      if (!ABOUT_ONE_FILE.includes(error.status)) throw error;
      counts.failed += 1;
      counts.errors.push(error.message.startsWith(at.file) ? error.message : `${at.file}: ${error.message}`);
    }
  }
  return counts;
}

async function* sent(file, path, fields, signal) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  form.append("files", file, pathOf(file));
  let isComplete = false;
  for await (const text of lines(await send("POST", path, { body: form, signal }))) {
    const line = JSON.parse(text);
    isComplete ||= line.summary !== undefined;
    yield line;
  }
  if (!isComplete) throw new ApiError("The connection was lost. Stored files are kept.", 0);
}

function take({ summary, status, key, error, progress, file }, counts) {
  if (summary) {
    counts.computed += summary.filled;
    counts.kept += summary.hit + summary.loaded + summary.waited;
    counts.displaced += summary.displaced;
  } else if (progress) {
    remember(key, file);
    if (error) counts.errors.push(`${file}: ${error.message ?? error}`);
  } else {
    counts[status] += 1;
    if (error) counts.errors.push(`${file}: ${error}`);
  }
}
