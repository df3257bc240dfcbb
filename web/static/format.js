// SPDX-License-Identifier: Apache-2.0
// Formats numbers with units, for tables.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const NONE = "–";

export const count = (value) => (value === null || value === undefined ? NONE : whole.format(value));

export const tokens = (value) => `${count(value)} ${value === 1 ? "token" : "tokens"}`;

/** A number and `name` in singular or plural: "1 chunk", "3 chunks". */
export const several = (value, name) => `${count(value)} ${name}${value === 1 ? "" : "s"}`;

/** Milliseconds, from ten seconds on seconds. */
export function duration(ms) {
  if (ms === null || ms === undefined) return NONE;
  if (ms >= 10_000) return `${(ms / 1000).toFixed(1)} s`;
  return `${ms < 10 ? ms.toFixed(1) : whole.format(ms)} ms`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const [amount, unit] = value >= 2 ** 30 ? [value / 2 ** 30, "GiB"] : [value / 2 ** 20, "MiB"];
  const digits = amount === 0 || amount >= 100 ? 0 : amount >= 10 ? 1 : 2;
  return `${amount.toFixed(digits)} ${unit}`;
}

export const percent = (share) => (share === null || share === undefined ? NONE : `${whole.format(100 * share)} %`);

export const perSecond = (value) => (value === null ? NONE : `${short.format(value)}/s`);

/** Age of a time given in seconds since the epoch. */
export function ago(seconds, now = Date.now() / 1000) {
  const age = Math.max(0, now - seconds);
  if (age < 1) return "now";
  if (age < 90) return `${Math.round(age)} s ago`;
  if (age < 5400) return `${Math.round(age / 60)} min ago`;
  if (age < 172_800) return `${Math.round(age / 3600)} h ago`;
  return `${Math.round(age / 86_400)} days ago`;
}

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
