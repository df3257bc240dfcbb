// SPDX-License-Identifier: Apache-2.0
// Beginnings of texts whose keys this page has seen: the server's list of chunks has keys, not texts.

const MOST = 5000;
const LENGTH = 120;
const texts = new Map();

export function remember(key, text) {
  if (!key) return;
  texts.delete(key);
  texts.set(key, text.slice(0, LENGTH));
  if (texts.size > MOST) texts.delete(texts.keys().next().value);
}

export const knownText = (key) => texts.get(key) ?? "";
