// The page: hears the gateway, and shows the chosen pool.

import { details } from "./details.js";
import { Shares, Tenants, Times, engines, limit, refusals, waiting } from "./panels.js";
import { requests } from "./requests.js";
import { follow, hasToken, keepToken } from "./stream.js";
import { Usage } from "./usage.js";
import { clock, element, percent } from "./words.js";

const POINTS_MAX = 120;
const place = (id) => document.getElementById(id);

const shares = new Shares();
const times = new Times();
const tenants = new Tenants();
const usage = new Usage();
const showDetails = details(() => ({
  ended: (said.ended ?? []).filter((one) => one.pool === chosen), words: said.words ?? { waits: {}, refusals: {}, obstacles: {} },
  minute: of(said.tenants), queue: of(said.queue), backends: of(said.backends), points: own(), marks: marks(),
  countsUsage: said.gateway?.counts_usage,
}));
let said = {};
let points = [];
let chosen = null;
let restartedS = 0;
let isPlanned = false;

function heard(name, content) {
  if (name === "points") {
    // Who connects again is told again what it has.
    const last = points.at(-1)?.at_s ?? 0;
    points = [...points, ...content.filter((point) => point.at_s > last)].slice(-POINTS_MAX);
    return;
  }
  if (name === "gateway" && said.gateway && said.gateway.id !== content.id) {
    said = {};
    points = [];
    restartedS = content.at_s;
    shares.clear();
  }
  said[name] = content;
}

function plan() {
  if (isPlanned || document.hidden) return;
  isPlanned = true;
  requestAnimationFrame(() => {
    isPlanned = false;
    show();
  });
}

function show() {
  if (!said.gateway || !said.queue || !said.backends || !said.tenants || !said.words) return;
  showLink();
  choosePools(said.queue.pools.map((pool) => pool.pool));
  const pool = { queue: of(said.queue), backends: of(said.backends) };
  const minute = of(said.tenants) ?? { tenants: [], tenants_left_out: 0, running_by_backend: {} };
  if (!pool.queue || !pool.backends) return;
  const seen = own();
  limit(pool, minute, seen.at(-1));
  shares.show(seen, minute, marks(), firstRequest);
  waiting(pool.queue);
  engines(pool.backends, said.words);
  times.show(seen, marks());
  refusals(minute, said.words);
  tenants.show(minute, firstRequest);
  usage.show(said.gateway.counts_usage);
  requests((said.ended ?? []).filter((one) => one.pool === chosen), said.words);
  const queued = said.queue.pools.reduce((total, one) => total + one.queued_requests, 0);
  document.title = queued ? `${queued} waiting, fairgate` : "fairgate";
  place("cost").textContent = `What this page shows costs the gateway ${percent(said.gateway.cost_cores)} of a core.`;
  document.body.dataset.shown = "yes";
  showDetails();
}

// What concerns the chosen pool: its part of an answer, its points in time, and what was changed.
function of(found) {
  return found?.pools.find((pool) => pool.pool === chosen);
}

function own() {
  return points.map((point) => ({ at_s: point.at_s, ...of(point) })).filter((point) => point.tenants);
}

function marks() {
  return (said.marks ?? []).filter((mark) => !mark.pool || mark.pool === chosen);
}

function choosePools(names) {
  const choice = place("pool");
  if (choice.options.length !== names.length || names.some((name, i) => choice.options[i].value !== name)) {
    choice.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    if (!names.includes(chosen)) chosen = names[0];
    choice.value = chosen;
    place("pool-choice").hidden = names.length < 2;
  }
}

// What to do where nothing is to be seen yet.
function firstRequest() {
  const { tls, port, models } = said.gateway;
  const url = `${tls ? "https" : "http"}://${location.hostname}:${port}/v1/chat/completions`;
  const body = JSON.stringify({ model: models[chosen] || "MODEL", messages: [{ role: "user", content: "Hello" }] });
  const quoted = body.replaceAll("'", "'\\''");
  const line = `curl ${url} -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" -d '${quoted}'`;
  return element("div", { class: "empty" },
    element("p", {}, "Nobody has asked for anything in the last 60 s. Send a request, with the key of a tenant:"),
    element("pre", { tabindex: "0" }, line));
}

function showLink(state = place("link").dataset.state, text = null) {
  const link = place("link");
  if (state === "live" && said.gateway) {
    const isStopping = said.gateway.not_ready.some((fault) => fault === "shutting down");
    const isRecent = said.gateway.at_s - restartedS < 60;
    text = isStopping ? "shutting down" : isRecent ? `restarted, seen again at ${clock(restartedS)}` : "live";
    const shared = said.gateway.state;
    if (shared?.startsWith("not shared")) text += `; state ${shared}`;
  }
  if (text !== null && link.textContent !== text) link.textContent = text;
  link.dataset.state = state;
  document.body.classList.toggle("stale", state === "away");
  const note = place("worker-note");
  note.hidden = !(said.gateway?.workers > 1);
  note.textContent = note.hidden ? "" : `${said.gateway.workers} workers, together.`;
}

let awaySince = null;

function linked(state, why) {
  place("ask-token").hidden = state !== "token";
  place("board").hidden = state === "token";
  if (state === "token") {
    place("token-wrong").hidden = !hasToken();
    showLink("token", "asks for its token");
    place("token").focus();
  } else if (state === "away") {
    awaySince ??= Date.now() / 1000;
    showLink("away", `the gateway has not answered since ${clock(awaySince)} (${why}); asking again`);
  } else {
    awaySince = null;
    showLink("live", "live");
  }
}

function begin() {
  follow({ heard, told: plan, state: linked });
}

place("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken(place("token").value);
  place("token").value = "";
  begin();
});
place("pool").addEventListener("change", (event) => {
  chosen = event.target.value;
  shares.clear();
  plan();
});
place("tenant-filter").addEventListener("input", (event) => {
  tenants.filter = event.target.value.trim().toLowerCase();
  plan();
});
place("tenants-body").addEventListener("click", (event) => {
  if (event.target.id !== "tenants-whole") return;
  tenants.isWhole = !tenants.isWhole;
  plan();
});
document.addEventListener("visibilitychange", plan);
showDetails();
begin();
