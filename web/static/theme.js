// SPDX-License-Identifier: Apache-2.0
// Light theme, dark theme, or the system's setting.

import { byId } from "./dom.js";

const KEY = "tessera-theme";
const THEMES = { system: "◐ System", light: "☀ Light", dark: "☾ Dark" };

export function startTheme() {
  const button = byId("theme");
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    apply(names[(names.indexOf(current()) + 1) % names.length]);
  });
  apply(current());
}

const current = () => (localStorage.getItem(KEY) in THEMES ? localStorage.getItem(KEY) : "system");

function apply(theme) {
  localStorage.setItem(KEY, theme);
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = THEMES[theme];
  byId("theme").setAttribute("aria-label", `Theme: ${theme}. Change it`);
}
