// The page: hears the gateway, and shows who waits at the chosen pool, behind whom, and for what.

import { details } from "./details.js";
import { engines, lanes, tenants } from "./panels.js";
import { list, story } from "./requests.js";
import { follow, onToken, showLink } from "./stream.js";
import { readToday } from "./usage.js";
import { about, clock, element, fill, named, place, seconds, sum } from "./words.js";

const REQUESTS_SHOWN = 10;
const EVERY_MS = 1000;

let said = null;
let chosen = null;
let restartedS = 0;
let isWhole = false;
let paused = null;
let awaySince = null;
const own = () => said?.pools.find((pool) => pool.pool === chosen);
const showDetails = details(() => ({ pool: own(), ended: ended(said) }));

function heard(content) {
  if (said && said.id !== content.id) restartedS = content.at_s;
  said = content;
  show();
}

function show() {
  if (document.hidden || !said) return;
  choosePools(said.pools.map((pool) => pool.pool));
  const pool = own();
  if (!pool) return;
  lanes(pool);
  showTenants();
  engines(pool);
  requests();
  const queued = sum(said.pools.map((one) => one.queued_requests));
  document.title = queued ? `${queued} waiting, fairgate` : "fairgate";
  place("window").textContent = `Received, due, waits and refusals are of the last ${seconds(said.window_s)}.`;
  document.body.dataset.shown = "yes";
  showDetails();
  if (said.counts_usage) readToday().then(showTenants);
}

function showTenants() {
  const filter = place("tenant-filter").value.trim().toLowerCase();
  tenants(own(), { filter, isWhole, countsUsage: said.counts_usage, hint: firstRequest });
}

// What to do where nothing is to be seen yet.
function firstRequest() {
  const url = `${said.tls ? "https" : "http"}://${location.hostname}:${said.port}/v1/chat/completions`;
  const body = JSON.stringify({ model: own().models[0] || "MODEL", messages: [{ role: "user", content: "Hello" }] });
  const quoted = body.replaceAll("'", "'\\''");
  const line = `curl ${url} -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" -d '${quoted}'`;
  return element("div", { class: "about" },
    element("p", {}, "No request came in the last 60 s. Send one with the key of a tenant:"),
    element("pre", { tabindex: "0" }, line));
}

function ended(content) {
  return (content?.ended ?? []).filter((one) => one.pool === chosen);
}

function requests() {
  const filter = place("request-filter").value.trim().toLowerCase();
  const text = (one) => [one.tenant, one.app, one.model, one.state, one.request_id, story(one)].join(" ").toLowerCase();
  const all = ended(paused ?? said);
  const found = all.filter((one) => text(one).includes(filter)).slice(0, REQUESTS_SHOWN)
    .sort((a, b) => b.arrived_at_s - a.arrived_at_s);
  const of = (one) => [named("tenant", one.tenant), " ", named("explain", one.request_id, { class: "id" })];
  fill(place("requests-body"), ...(found.length ? list(found, of) :
    [about(all.length ? "No match among the last requests." : "No request has ended since the gateway started.")]));
}

function choosePools(names) {
  const choice = place("pool");
  fill(choice, ...names.map((name) => element("option", { value: name }, name)));
  if (!names.includes(chosen)) chosen = names[0];
  choice.value = chosen;
  place("pool-choice").hidden = names.length < 2;
}

function linked(state, why) {
  awaySince = state === "away" ? awaySince ?? Date.now() / 1000 : null;
  const away = `the gateway has not answered since ${clock(awaySince)} (${why}); asking again`;
  showLink(state, { token: "needs its token", live: state === "live" ? live() : "", away }[state]);
}

function live() {
  const isRecent = said.at_s - restartedS < 60;
  let text = said.not_ready.includes("shutting down") ? "shutting down" : isRecent ? `restarted, seen again at ${clock(restartedS)}` : "live";
  if (said.state?.startsWith("not shared")) text += `; state ${said.state}`;
  if (said.workers > 1) text += `, ${said.workers} workers together`;
  return text;
}

const go = () => follow("/state?shared", EVERY_MS, heard, linked);
onToken(go);
place("pool").addEventListener("change", (event) => {
  chosen = event.target.value;
  show();
});
place("pause").addEventListener("click", (event) => {
  paused = paused ? null : said;
  event.target.textContent = paused ? "Resume" : "Pause";
  event.target.setAttribute("aria-pressed", String(Boolean(paused)));
  show();
});
place("tenants-body").addEventListener("click", (event) => {
  if (event.target.id !== "tenants-whole") return;
  isWhole = !isWhole;
  show();
});
for (const id of ["tenant-filter", "request-filter"]) place(id).addEventListener("input", show);
document.addEventListener("visibilitychange", show);
showDetails();
go();
