// SPDX-License-Identifier: Apache-2.0
// Recent samples of the cache's state, and the values for the plots.

export const MOST_SAMPLES = 600;

/** Samples in order of time; drops the oldest. */
export class History {
  constructor(most = MOST_SAMPLES) {
    this.most = most;
    this.samples = [];
    this.last = null;
  }

  /** Adds the response of GET /v1/cache/stats at the time `at` (milliseconds). */
  add(stats, at) {
    if (!stats.counters) return;
    const totals = totalsOf(stats);
    const isRestart = this.last !== null && Object.keys(totals).some((name) => totals[name] < this.last.totals[name]);
    const before = isRestart ? null : this.last;
    this.samples.push({ at, ...rates(totals, before, at), ...memory(stats), refused: totals.refused });
    if (this.samples.length > this.most) this.samples.shift();
    this.last = { totals, at };
  }

  clear() {
    this.samples = [];
    this.last = null;
  }
}

/** Totals of counters since the server's start. */
export function totalsOf({ counters }) {
  const { lookups, tokens, fills, removals } = counters;
  const of = (counter, ...names) => names.reduce((sum, name) => sum + (counter[name] ?? 0), 0);
  return {
    hits: of(lookups, "hit"),
    lookups: of(lookups, ...Object.keys(lookups)),
    reused: of(tokens, "reused"),
    computed: of(tokens, "computed"),
    filled: of(fills, "succeeded"),
    loaded: of(fills, "loaded"),
    fetched: of(fills, "fetched"),
    failed: of(fills, "failed", "aborted"),
    evicted: of(removals, "evicted"),
    refused: counters.refused_loads,
  };
}

/** Changes since `before`, per second; the hit rate is null without lookups. */
function rates(totals, before, at) {
  const seconds = before === null ? 0 : (at - before.at) / 1000;
  const rate = (name) => (seconds > 0 ? (totals[name] - before.totals[name]) / seconds : null);
  const looked = before === null ? 0 : totals.lookups - before.totals.lookups;
  return {
    hitRate: looked > 0 ? (totals.hits - before.totals.hits) / looked : null,
    reused: rate("reused"),
    computed: rate("computed"),
    filled: rate("filled"),
    loaded: rate("loaded"),
    fetched: rate("fetched"),
    failed: rate("failed"),
    evicted: rate("evicted"),
  };
}

/** Used bytes per tier, as `used:pool`, and pinned bytes in total. */
function memory({ tiers }) {
  const used = Object.entries(tiers).map(([name, tier]) => [`used:${name}`, tier.bytes_used]);
  const pinned = Object.values(tiers).reduce((sum, tier) => sum + (tier.bytes_pinned ?? 0), 0);
  return { ...Object.fromEntries(used), pinned };
}
