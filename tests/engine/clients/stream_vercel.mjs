// SPDX-License-Identifier: Apache-2.0
// Streams by Vercel's AI SDK, by its provider for servers with OpenAI's interface and by the one for OpenAI's own.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";

const [url, model, json] = process.argv.slice(2);
const { messages, documents, options } = JSON.parse(json);
const asked = { messages, temperature: options.temperature, maxOutputTokens: options.max_tokens };
const tessera = createOpenAICompatible({ name: "tessera", baseURL: url, apiKey: "none", includeUsage: true });
const openai = createOpenAI({ baseURL: url, apiKey: "none" });

async function read(model, providerOptions) {
  const stream = streamText({ ...asked, model, providerOptions, onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const part of stream.textStream) text += part;
  return [text, (await stream.usage).cachedInputTokens];
}

const [plain] = await read(openai.chat(model));
const [answer, reused] = await read(tessera(model), { tessera: { documents } });
for (const printed of [plain, answer, reused]) console.log(JSON.stringify(printed));
