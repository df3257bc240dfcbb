// SPDX-License-Identifier: Apache-2.0
// Client of the public HTTP interface; error messages.

const KEY = "tessera-api-key";

/** A failed request; `status` is 0 if the server is unreachable. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => sessionStorage.setItem(KEY, key),
};

/** Event "unauthorized": the server requires an API key. */
export const events = new EventTarget();

/**
 * Sends a request with a body, `json` or `body`; `replica` names the replica that answers, behind a router.
 * Resolves to a successful response. Throws ApiError, or the AbortError of `signal`.
 */
export async function send(method, path, { json, body, signal, replica } = {}) {
  const headers = {};
  if (json !== undefined) headers["content-type"] = "application/json";
  if (apiKey.get()) headers.authorization = `Bearer ${apiKey.get()}`;
  if (replica) headers["x-tessera-replica"] = replica;
  let response;
  try {
    response = await fetch(path, { method, headers, body: json === undefined ? body : JSON.stringify(json), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server can’t be reached.", 0);
  }
  if (response.ok) return response;
  if (response.status === 401) events.dispatchEvent(new Event("unauthorized"));
  throw new ApiError(await wordsOf(response), response.status);
}

/** A response's JSON. */
export async function getJson(path, options) {
  return (await send("GET", path, options)).json();
}

async function wordsOf(response) {
  const text = await response.text().catch(() => "");
  try {
    const said = JSON.parse(text);
    const message = said.error?.message ?? said.message ?? said.detail ?? said.error;
    if (typeof message === "string") return message;
    if (Array.isArray(message)) return message.map((each) => `${each.loc?.slice(1).join(".")}: ${each.msg}`).join("; ");
  } catch {
    // not JSON, for example a proxy's page
  }
  return `The server answered with status ${response.status} (${response.statusText || "no reason given"}).`;
}

/** Streams a response's lines. Throws ApiError if the connection is lost. */
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      yield* parts;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection was lost before the answer was complete.", 0);
  } finally {
    reader.cancel().catch(() => {});
  }
  if (rest) yield rest;
}

/** Streams the parsed data of server-sent events; ends at [DONE]. Throws ApiError for an error event. */
export async function* serverEvents(response) {
  let isDone = false; // still reads to the end: cancelling a stream looks like a disconnect
  for await (const line of lines(response)) {
    if (!line.startsWith("data: ")) continue;
    const data = line.slice(6);
    if (data === "[DONE]") isDone = true;
    if (isDone) continue;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message ?? String(event.error), event.error.code ?? 500);
    yield event;
  }
  if (!isDone) throw new ApiError("The connection was lost before the answer was complete.", 0);
}
