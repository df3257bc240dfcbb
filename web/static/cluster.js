// SPDX-License-Identifier: Apache-2.0
// The view "Cluster": replicas and, behind a router, routing decisions with their reasons.

import { byId, el, number, say, table } from "./dom.js";
import { clock, count, duration, percent, several, tokens } from "./format.js";

const MOST_DECISIONS = 50;

/** Shows the response of GET /v1/cluster. */
export function showCluster({ registry, replicas, decisions }) {
  say(byId("cluster-status"), registryWords(registry, decisions !== undefined));
  say(byId("replica-count"), count(replicas.length));
  byId("replicas").replaceChildren(replicas.length ? replicaTable(replicas) : el("p", { className: "empty" }, "No replica is known."));
  byId("decisions-card").hidden = decisions === undefined;
  if (decisions !== undefined) {
    const last = decisions.slice(-MOST_DECISIONS).reverse();
    byId("decisions").replaceChildren(
      last.length ? decisionTable(last) : el("p", { className: "empty" }, "No request over documents has come yet."));
  }
}

function registryWords({ up, invalid_entries: invalid }, isRouter) {
  const here = isRouter ? "" : " This is one replica; routing decisions are on the router’s page.";
  const wrong = invalid ? ` ${several(invalid, "entry").replace("entrys", "entries")} in it could not be read.` : "";
  return `${up ? "The registry answers." : "The registry does not answer; requests go by hash and load."}${wrong}${here}`;
}

function replicaTable(replicas) {
  const isRouter = replicas.some((replica) => "requests_here" in replica);
  const headers = ["Replica", "Models", "#Requests now", ...(isRouter ? ["#Of this router"] : []), "Held", "URL"];
  return table("Replicas", headers, replicas.map((replica) => [
    el("th", { scope: "row" }, replica.name),
    replica.models.join(", "),
    number(count(replica.load)),
    ...(isRouter ? [number(count(replica.requests_here))] : []),
    held(replica),
    el("code", {}, replica.url),
  ]));
}

function held({ name, held_tokens: value, capacity_tokens: max }) {
  if (!max) return "no chunk cache";
  return el("span", { className: "held" },
    el("meter", { min: 0, max, value, "aria-label": `Chunk cache of ${name}` }),
    ` ${tokens(value)} of ${count(max)} (${percent(value / max)})`);
}

function decisionTable(decisions) {
  return table("Routing decisions", ["Time", "Replica", "Request", "#Documents", "#Their tokens", "#Held there", "#Decided in"],
    decisions.map((each) => [
      clock(each.at), each.replica, el("code", {}, each.path), number(count(each.documents)), number(count(each.wanted_tokens)),
      number(`${count(each.held_tokens)} (${percent(each.wanted_tokens ? each.held_tokens / each.wanted_tokens : 0)})`),
      number(duration(each.milliseconds)),
    ]));
}
