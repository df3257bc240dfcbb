// SPDX-License-Identifier: Apache-2.0
// Beginnings of texts by key, as known to this page: the server's chunk list has keys, not texts.

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
