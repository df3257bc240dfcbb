// SPDX-License-Identifier: Apache-2.0
// Computes chunks ahead of time, with progress.

import { ApiError, lines, send } from "./api.js";
import { remember } from "./known.js";

const MOST_PER_CALL = 500;

/**
 * Sends `chunks` to POST /v1/rag/chunks; calls `onProgress({done, total, tokens})` after each chunk. Resolves to the
 * counts of all calls and `errors`, the distinct reasons of failures. Throws ApiError or AbortError.
 */
export async function computeAhead(chunks, fields, onProgress, signal) {
  const total = { hit: 0, loaded: 0, filled: 0, waited: 0, failed: 0, tokens: 0, seconds: 0, evicted: 0 };
  const errors = new Set();
  for (let start = 0; start < chunks.length; start += MOST_PER_CALL) {
    const part = chunks.slice(start, start + MOST_PER_CALL);
    const response = await send("POST", "v1/rag/chunks", { json: { ...fields, chunks: part }, signal });
    let tokens = 0;
    let isComplete = false;
    for await (const text of lines(response)) {
      const line = JSON.parse(text);
      if (line.error) errors.add(line.error.message ?? line.error);
      if (line.summary) {
        isComplete = true;
        for (const name of Object.keys(total)) total[name] += line.summary[name] ?? 0;
      }
      if (line.progress) {
        remember(line.key, part[line.index].text);
        tokens += line.tokens;
        onProgress({ done: start + line.progress.done, total: chunks.length, tokens: total.tokens + tokens });
      }
    }
    if (!isComplete) throw new ApiError("The connection was lost. Computed chunks are kept.", 0);
  }
  return { ...total, errors: [...errors] };
}

/** A chunk in the API's form. */
export const withoutTokens = ({ tokens: _, ...chunk }) => chunk;
