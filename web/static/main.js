// SPDX-License-Identifier: Apache-2.0
// Starts the page: views, theme and polling of the server.

import { apiKey, events, getJson } from "./api.js";
import { startAsk } from "./ask.js";
import { drawPlots, forgetHistory, showStats, startCache } from "./cache.js";
import { showCluster } from "./cluster.js";
import { forgetCollections, loadCollections, startCollections } from "./collections.js";
import { byId, el, say } from "./dom.js";
import { TYPES } from "./files.js";
import { startFound } from "./found.js";
import { readLink } from "./link.js";
import { ChunkList } from "./list.js";
import { Poller } from "./poller.js";
import { startTheme } from "./theme.js";

const VIEWS = ["ask", "collections", "cache", "cluster"];
const EVERY_MS = 2000;
const LONGEST_MS = 15_000;

const list = new ChunkList(() => replica);
let replica = null; // the replica whose cache is shown, behind a router
let hasModels = false;
let hasCluster = null; // null: not known yet

const poller = new Poller(ask, { everyMs: EVERY_MS, longestMs: LONGEST_MS, onFailure: showFailure });

async function ask() {
  if (!hasModels) {
    const { data } = await getJson("v1/models");
    setModels(data.map((model) => model.id));
    hasModels = true;
  }
  if (hasCluster === null || (hasCluster && (replica !== null || isShown("cluster")))) await askCluster();
  const asked = replica;
  const stats = await getJson("v1/cache/stats?check=false", { replica: asked });
  if (asked !== replica) return;
  showStats(stats, Date.now());
  if (isShown("cache")) list.follow(stats);
  if (isShown("collections")) await loadCollections();
  showState("up", stats.enabled ? "Connected" : "Connected, chunk cache off");
  byId("trouble").hidden = true;
}

/** Offers the server's models wherever one can be chosen. */
function setModels(names) {
  for (const field of document.querySelectorAll("select.models")) {
    if ([...field.options].map((option) => option.value).join("\n") === names.join("\n")) continue;
    const chosen = field.value;
    field.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    if (names.includes(chosen)) field.value = chosen;
  }
}

async function askCluster() {
  try {
    const cluster = await getJson("v1/cluster");
    hasCluster = true;
    byId("trouble").hidden = true;
    showCluster(cluster);
    if (cluster.decisions !== undefined) setReplicas(cluster.replicas.map((each) => each.name));
  } catch (error) {
    if (error.status !== 404) throw error;
    hasCluster = false;
  }
  document.querySelector('[data-view="cluster"]').hidden = !hasCluster;
  showView();
}

/** Behind a router, offers the replicas whose cache and list can be shown. */
function setReplicas(names) {
  const field = byId("replica");
  byId("replica-field").hidden = false;
  if ([...field.options].map((option) => option.value).join("\n") !== names.join("\n")) {
    field.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  }
  if (names.includes(replica)) field.value = replica;
  else chooseReplica(field.value || null);
}

function chooseReplica(name) {
  replica = name;
  forgetHistory();
  list.seen = null;
}

function showFailure(error, retryMs) {
  forgetCollections();
  if (error.status === 401) return showState("away", "API key needed");
  hasModels = hasModels && error.status !== 0; // the server may return with another model
  const words = error.status === 0 ? "Server not reachable" : `Server error: ${error.message}`;
  showState("away", error.status === 0 ? words : "Server error");
  byId("trouble").hidden = false;
  say(byId("trouble"), `${words}. Retrying every ${Math.round(retryMs / 1000)} s; your input is kept.`);
}

function showState(state, words) {
  byId("connection").dataset.state = state;
  say(byId("connection"), words);
}

const isShown = (view) => !byId(`view-${view}`).hidden;

function showView() {
  const wanted = readLink().view;
  const view = VIEWS.includes(wanted) && (wanted !== "cluster" || hasCluster) ? wanted : "ask";
  for (const name of VIEWS) byId(`view-${name}`).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view[0].toUpperCase()}${view.slice(1)} · Tessera`;
  if (view === "cache") drawPlots();
}

function askForKey() {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  say(byId("key-problem"), apiKey.get() ? "The server rejected the API key." : "");
  byId("key").value = "";
  dialog.showModal();
}

byId("key-dialog").addEventListener("close", () => {
  if (!byId("key").value) return;
  apiKey.set(byId("key").value);
  poller.now();
});
byId("replica").addEventListener("change", ({ target }) => {
  chooseReplica(target.value);
  poller.now();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the URL's fragment names the view
  byId("main").focus();
});
events.addEventListener("unauthorized", askForKey);
window.addEventListener("hashchange", () => {
  showView();
  if (isShown("cache") && !byId("ingest-system").value) byId("ingest-system").value = byId("system").value;
  poller.now();
});
for (const input of document.querySelectorAll('input[type="file"]:not([webkitdirectory])')) input.accept = TYPES.join(",");
startTheme();
startAsk();
startFound();
startCollections();
startCache();
showView();
poller.now();
