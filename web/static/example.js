// SPDX-License-Identifier: Apache-2.0
// The documents and questions of `tessera demo`.

/** `{system, documents, questions}`; documents and questions are strings. */
export async function loadExample() {
  return (await fetch("web/example.json")).json();
}
