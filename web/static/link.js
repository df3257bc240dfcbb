// SPDX-License-Identifier: Apache-2.0
// The page's address: "#view", or "#view?name=value&…" for a link to what a view shows.

/** The view that the address names, and its fields as URLSearchParams. */
export function readLink() {
  const [view, fields = ""] = location.hash.slice(1).split(/\?(.*)/s);
  return { view, fields: new URLSearchParams(fields) };
}

/** Changes the address, without a step in the browser's history. */
export function writeLink(view, fields) {
  const link = `#${view}?${fields}`;
  history.replaceState(null, "", link);
  return link;
}
