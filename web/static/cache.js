// SPDX-License-Identifier: Apache-2.0
// The view "Cache": tiles and plots of the cache's state, and computing documents ahead.

import { Action } from "./action.js";
import { byId, el, say } from "./dom.js";
import { split, takeDrops } from "./files.js";
import { bytes, count, percent, perSecond, several, tokens } from "./format.js";
import { computeAhead, withoutTokens } from "./ingest.js";
import { Plot } from "./plot.js";
import { History, totalsOf } from "./series.js";

const history = new History();
const tiles = new Map();
let plots = null;
const computing = new Action({
  show: setRunning,
  fail: (error) => (say(byId("ingest-problem"), error.message), say(byId("ingest-status"), "")),
  stopped: () => say(byId("ingest-status"), "Stopped. Computed chunks are kept."),
});
let dropped = [];

export function startCache() {
  byId("ingest").addEventListener("submit", ingest);
  byId("ingest-stop").addEventListener("click", () => computing.stop());
  byId("ingest-files").addEventListener("change", () => choose([]));
  takeDrops(byId("ingest"), choose);
}

/** Files dropped on the form, instead of files chosen in it. */
function choose(files) {
  dropped = files;
  say(byId("ingest-status"), files.length ? `${files.map((file) => file.name).join(", ")} dropped here.` : "");
}

/** Shows the response of GET /v1/cache/stats at the time `at` (milliseconds). */
export function showStats(stats, at) {
  byId("cache-off").hidden = stats.enabled;
  if (!stats.enabled) say(byId("cache-off"), `The chunk cache is off: ${stats.reason}`);
  if (!stats.counters) return;
  history.add(stats, at);
  showTiles(stats);
  plots ??= madePlots(Object.keys(stats.tiers));
  if (!byId("view-cache").hidden) drawPlots();
}

export function drawPlots() {
  plots?.forEach((plot) => plot.draw(history.samples));
}

/** Clears the plots before samples of another replica. */
export function forgetHistory() {
  history.clear();
}

function showTiles(stats) {
  const totals = totalsOf(stats);
  const { occupancy, tiers } = stats;
  const prompt = totals.reused + totals.computed;
  tile("Hit rate", totals.lookups ? percent(totals.hits / totals.lookups) : "–", `of ${several(totals.lookups, "chunk")}`);
  tile("Tokens reused", prompt ? percent(totals.reused / prompt) : "–", `${count(totals.reused)} of ${tokens(prompt)}`);
  for (const [name, tier] of Object.entries(tiers)) {
    tile(`Memory, ${name}`, bytes(tier.bytes_used), `of ${bytes(tier.bytes_total)}${tier.bytes_pinned === undefined ? "" : `; ${bytes(tier.bytes_pinned)} pinned`}`);
  }
  tile("Segments", count(occupancy.segments), `${count(occupancy.segments_filling)} being computed`);
  tile("Fills", count(totals.filled), `${count(totals.loaded)} loaded, ${count(totals.fetched)} fetched, ${count(totals.failed)} failed`);
  tile("Evictions", count(totals.evicted), "since the start");
  tile("Refused loads", count(totals.refused), totals.refused ? "please report this" : "none, as expected");
}

function tile(name, value, detail) {
  if (!tiles.has(name)) {
    const parts = [el("dd", { className: "big" }), el("dd", { className: "detail" })];
    byId("tiles").append(el("div", { className: "tile" }, el("dt", {}, name), ...parts));
    tiles.set(name, parts);
  }
  const [big, small] = tiles.get(name);
  say(big, value);
  say(small, detail);
}

function madePlots(tiers) {
  const memory = tiers.map((name) => ({ name: `used:${name}`, label: `used, ${name}` }));
  const made = [
    new Plot({ title: "Hit rate", lines: [{ name: "hitRate" }], format: percent, top: 1 }),
    new Plot({
      title: "Prompt tokens", format: perSecond, least: 10,
      lines: [{ name: "reused", label: "reused" }, { name: "computed", label: "computed" }],
    }),
    new Plot({ title: "Memory", lines: [...memory, { name: "pinned", label: "pinned" }], format: bytes, least: 2 ** 20, unit: 2 ** 20 }),
    new Plot({
      title: "Fills", format: perSecond, least: 1,
      lines: [{ name: "filled", label: "computed" }, { name: "loaded", label: "loaded" }, { name: "fetched", label: "fetched" }, { name: "failed", label: "failed" }],
    }),
    new Plot({ title: "Evictions", lines: [{ name: "evicted" }], format: perSecond, least: 1 }),
    new Plot({ title: "Refused loads, since the start", lines: [{ name: "refused" }], format: count, least: 2 }),
  ];
  byId("plots").replaceChildren(...made.map((plot) => plot.element));
  return made;
}

function ingest(event) {
  event.preventDefault();
  if (computing.isRunning) return;
  say(byId("ingest-problem"), "");
  const files = dropped.length ? dropped : [...byId("ingest-files").files];
  if (!files.length) return say(byId("ingest-problem"), "Choose files first.");
  computing.run(async (signal) => say(byId("ingest-status"), await computeFiles(files, signal)));
}

function setRunning(isRunning) {
  byId("ingest-start").disabled = isRunning;
  byId("ingest-stop").hidden = byId("ingest-progress").hidden = !isRunning;
  byId("ingest-progress").value = 0;
}

async function computeFiles(files, signal) {
  const chunks = [];
  for (const file of files) {
    say(byId("ingest-status"), `Splitting ${file.name}…`);
    chunks.push(...await split(file, byId("ingest-tokens").value || 512, signal));
  }
  const done = await computeAhead(chunks.map(withoutTokens), fields(), (progress) => {
    byId("ingest-progress").value = progress.done / progress.total;
    say(byId("ingest-status"), `${count(progress.done)} of ${several(progress.total, "chunk")}, ${tokens(progress.tokens)}`);
  }, signal);
  if (done.errors.length) say(byId("ingest-problem"), `${several(done.failed, "chunk")} failed: ${done.errors.join("; ")}`);
  return `Done: ${count(done.filled)} computed, ${count(done.hit + done.loaded + done.waited)} already cached, ${count(done.failed)} failed; `
    + `${tokens(done.tokens)} in ${done.seconds.toFixed(1)} s.`;
}

function fields() {
  const hours = byId("ingest-ttl").valueAsNumber;
  const namespace = byId("ingest-namespace").value;
  return {
    system: byId("ingest-system").value,
    pin: byId("ingest-pin").checked,
    ...(hours > 0 ? { ttl_s: hours * 3600 } : {}),
    ...(byId("model").value ? { model: byId("model").value } : {}),
    ...(namespace ? { cache: { namespace } } : {}),
  };
}
