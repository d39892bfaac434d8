// The page: hears the gateway, and shows who waits at the chosen pool, behind whom, and for what.

import { details } from "./details.js";
import { bar, stack } from "./draw.js";
import { list, story } from "./requests.js";
import { follow, hasToken, keepToken } from "./stream.js";
import { readToday, today, used } from "./usage.js";
import { clock, count, element, fill, named, percent, place, seconds, short, spaced, sum, table } from "./words.js";

const STEPS_MAX = 120;
const COLOURS = 7;
const TENANTS_SHOWN = 15;
const REQUESTS_SHOWN = 10;
const SHORT_OF_DUE = 0.8;

const colours = new Map();
const history = new Map();
let said = null;
let chosen = null;
let restartedS = 0;
let isPlanned = false;
let isWhole = false;
let paused = null;
let awaySince = null;
const own = () => said?.pools.find((pool) => pool.pool === chosen);
const showDetails = details(() => ({ pool: own(), ended: ended(said), countsUsage: said?.counts_usage }));

function heard(content) {
  if (said && said.id !== content.id) {
    history.clear();
    restartedS = content.at_s;
  }
  said = content;
  plan();
}

function plan() {
  if (isPlanned || document.hidden || !said) return;
  isPlanned = true;
  requestAnimationFrame(() => {
    isPlanned = false;
    show();
  });
}

function show() {
  choosePools(said.pools.map((pool) => pool.pool));
  const pool = own();
  if (!pool) return;
  showLink();
  const inService = pool.backends.filter((one) => one.in_service);
  place("limit-sentence").textContent = pool.limited_by_is;
  place("limit-sentence").dataset.state = !inService.length ? "down" : pool.limited_by ? "limited" : "open";
  lanes(pool, inService);
  overTime(pool);
  tenants(pool);
  engines(pool);
  requests();
  const queued = sum(said.pools.map((one) => one.queued_requests));
  document.title = queued ? `${queued} waiting, fairgate` : "fairgate";
  place("cost").textContent = `Received, due, waits and refusals are of the last ${seconds(said.window_s)}. What this page shows costs the gateway ${percent(said.cost_cores)} of a core.`;
  document.body.dataset.shown = "yes";
  showDetails();
  if (said.counts_usage) readToday().then(() => tenants(own()));
}

// Who has a colour keeps it while the page is open; all others are grey.
function colour(name) {
  if (!colours.has(name) && colours.size < COLOURS && name) colours.set(name, `c${colours.size}`);
  return colours.get(name) ?? "others";
}

function lanes(pool, inService) {
  const slots = sum(inService.map((one) => one.slots));
  const busy = pool.tenants.filter((one) => one.queued_requests || one.running_requests);
  const parts = (field, most) => busy.filter((one) => one[field]).map((one) =>
    [one[field] / most, colour(one.tenant), `${one.tenant}: ${one[field]}`]);
  const oldest = Math.max(0, ...busy.map((one) => one.oldest_wait_s));
  const lane = (name, numbers, drawn) => element("div", { class: "lane" }, element("b", {}, name), element("span", { class: "numbers" }, numbers), drawn);
  fill(place("lanes-body"),
    lane("Who waits", pool.queued_requests ? `${count(pool.queued_requests, "request")}, the oldest for ${seconds(oldest)}` : "nobody: each request starts as it comes",
      bar(parts("queued_requests", Math.max(slots, pool.queued_requests)))),
    lane("Behind whom", `${count(pool.dispatched_requests, "request")} at the engines, ${sum(inService.map((one) => one.running_sequences))} of ${count(slots, "slot")} taken`,
      bar(parts("running_requests", Math.max(slots, pool.dispatched_requests, 1)))),
    pool.waits_for ? lane("For what", `the next one waits ${pool.waits_for}`) : null,
    element("ul", { class: "key" }, ...busy.slice(0, TENANTS_SHOWN).map((one) => element("li", { class: colour(one.tenant) },
      named("tenant", one.tenant), ` ${one.queued_requests} waiting, ${one.running_requests} running`))),
    ...pool.gateways.map((one) => element("p", { class: "about" }, `At ${one.gateway}: ${one.queued_requests} waiting, ${one.dispatched_requests} running.`)));
}

// The gateway remembers as many requests as it does; the page keeps what it has heard.
function overTime(pool) {
  const { first_step: first, step_s: stepS, begins_at_s: beginsS, waiting } = pool.history;
  if (!history.has(chosen)) history.set(chosen, new Map());
  const steps = history.get(chosen);
  const length = Math.max(1, ...Object.values(waiting).map((found) => found.length));
  for (let i = 0; i < length; i += 1) {
    const found = Object.fromEntries(Object.entries(waiting).map(([name, numbers]) => [name, numbers[i]]));
    if (i || !steps.has(first)) steps.set(first + i, found);
  }
  const numbers = [...steps.keys()].sort((a, b) => a - b);
  for (const number of numbers.splice(0, numbers.length - STEPS_MAX)) steps.delete(number);
  const names = [...new Set(numbers.flatMap((number) => Object.keys(steps.get(number))))];
  const series = names.map((name) => [colour(name), name || "all others", numbers.map((number) => steps.get(number)[name] ?? 0)])
    .filter(([, , found]) => found.some(Boolean));
  if (!series.length) return fill(place("history-body"));
  const fromS = beginsS + (numbers[0] - first) * stepS;
  const spanS = (numbers.at(-1) - numbers[0]) * stepS || 1;
  const marks = said.marks.filter((mark) => mark.at_s >= fromS && (!mark.pool || mark.pool === chosen));
  fill(place("history-body"),
    stack(series, marks.map((mark) => [(mark.at_s - fromS) / spanS, mark.text]), `Requests that waited, last ${seconds(spanS)}`, (most) => `${most} waiting`),
    element("p", { class: "axis" }, element("span", {}, `${seconds(spanS)} ago`), element("span", {}, "now")),
    marks.length ? element("p", { class: "about" }, `Changed: ${marks.map((mark) => `${clock(mark.at_s)} ${mark.text}`).join("; ")}`) : null);
}

function tenants(pool) {
  const filter = place("tenant-filter").value.trim().toLowerCase();
  const found = pool.tenants.filter((one) => one.tenant.toLowerCase().includes(filter));
  const shown = isWhole ? found : found.slice(0, TENANTS_SHOWN);
  const most = Math.max(0.0001, ...[...shown, ...pool.groups].flatMap((one) => [one.share_received, one.share_due]));
  const next = pool.requests.find((one) => one.request_id === pool.next_request_id)?.tenant;
  const rows = [];
  const inside = (group, depth) => {
    for (const one of pool.groups.filter((each) => each.in === group)) {
      rows.push(groupRow(one, depth, most));
      inside(one.group, depth + 1);
    }
    for (const one of shown.filter((each) => (each.group ?? null) === group)) rows.push(tenantRow(one, depth, most, next === one.tenant ? pool.waits_for : "for its turn"));
  };
  inside(null, 0);
  const heads = [["tenant"], ["waiting"], ["oldest"], ["waits", "less left"], ["running"], ["received"], ["due"], ["", "wide"], ["weight", "less"],
    ["wait p95", "less"], ["first token p95", "less"], ["refused", "less"], ["used today", "less"]];
  const left = found.length - shown.length;
  fill(place("tenants-body"),
    pool.tenants.some((one) => one.is_active) ? null : firstRequest(pool),
    rows.length ? table(heads, rows, "Table of tenants") : null,
    left || isWhole && found.length > TENANTS_SHOWN ? element("button", { type: "button", id: "tenants-whole" }, isWhole ? `Only the first ${TENANTS_SHOWN}` : `All ${found.length}`) : null,
    pool.tenants_left_out ? element("p", { class: "about" }, `The busiest ${pool.tenants.length} of ${pool.tenants.length + pool.tenants_left_out}.`) : null,
    element("p", { class: "about" }, "Bar: the part of the pool's service that was received; mark: the part that was due, by weight, by groups and by what others leave."),
    ...pool.refusals.map((one) => element("p", { class: "refusal" }, `${count(one.requests, "request")} refused (${spaced(one.reason)}): ${one.reason_is}. Most: `, named("tenant", one.most), ".")),
    said.counts_usage && !today.fault ? null : element("p", { class: "about" }, today.fault ? `Usage cannot be read: ${today.fault}.` :
      "Usage is not counted. Name a file for it in the configuration: ", today.fault ? null : element("code", {}, "usage: /var/lib/fairgate/usage.db")));
}

function parts(one, most) {
  return [percent(one.share_received), percent(one.share_due), bar([[one.share_received / most, "c0"]], one.share_due / most)];
}

function tenantRow(one, depth, most, waits) {
  const isShort = one.queued_requests && one.share_received < SHORT_OF_DUE * one.share_due;
  const name = element("span", { class: `depth${depth}` }, element("i", { class: colours.get(one.tenant) ?? "others" }), named("tenant", one.tenant));
  return [isShort ? "short" : one.is_active ? "" : "idle", name, String(one.queued_requests), one.queued_requests ? seconds(one.oldest_wait_s) : "",
    one.queued_requests ? waits : "", String(one.running_requests), ...(one.is_active ? parts(one, most) : ["idle", "", ""]), one.weight === null ? "" : String(one.weight),
    seconds(one.wait_p95_s), seconds(one.first_token_p95_s), String(sum(one.refused_requests)), today.of.has(one.tenant) ? used(today.of.get(one.tenant)) : ""];
}

function groupRow(one, depth, most) {
  const terms = [["floor", one.guaranteed_share, percent], ["at most", one.max_share, percent], ["at most", one.max_running, (n) => `${n} running`],
    ["lends", one.lending_limit, percent], ["borrows", one.borrowing_limit, percent]].filter(([, value]) => value !== null).map(([name, value, say]) => `${name} ${say(value)}`);
  const name = element("span", { class: `depth${depth}` }, element("b", {}, one.group), element("span", { class: "numbers" }, ` ${terms.join(", ") || "group"}`));
  return ["group", name, String(one.queued_requests), "", "", String(one.running_requests), ...parts(one, most), String(one.weight), "", "", "", ""];
}

// What to do where nothing is to be seen yet.
function firstRequest(pool) {
  const url = `${said.tls ? "https" : "http"}://${location.hostname}:${said.port}/v1/chat/completions`;
  const body = JSON.stringify({ model: pool.models[0] || "MODEL", messages: [{ role: "user", content: "Hello" }] });
  const line = `curl ${url} -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" -d '${body.replaceAll("'", "'\\''")}'`;
  return element("div", { class: "about" }, element("p", {}, "Nobody has asked for anything in the last 60 s. Send a request, with the key of a tenant:"),
    element("pre", { tabindex: "0" }, line));
}

function engines(pool) {
  fill(place("engines-body"), pool.backends.length ? element("ul", { class: "tiles" }, ...pool.backends.map(engine)) :
    element("p", { class: "about" }, "This pool has no engine. Name one under ", element("code", {}, "pools[].backends"), " in the configuration."),
  element("p", { class: "about" }, "Upper bar: slots, by tenant. Lower bar: the KV cache, with a mark where it is expected to end at most."));
}

function engine(one) {
  const name = element("b", {}, named("engine", one.backend, { title: one.url }));
  if (!one.in_service) return element("li", { class: "down" }, name, element("p", {}, `out of service: ${one.reason}`));
  const running = Object.entries(one.running_by_tenant).map(([tenant, requests]) => [requests / Math.max(1, one.slots), colour(tenant), `${tenant}: ${requests}`]);
  return element("li", { class: one.obstacle ? "limited" : "" }, name,
    element("span", { class: "numbers" }, `${one.running_sequences} of ${one.slots} slots, KV ${percent(one.kv_ratio)}`),
    bar(running), bar([[one.kv_ratio, "kv"]], one.kv_expected_ratio),
    element("p", {}, one.obstacle_is || "has room", one.starting_requests ? `; ${one.starting_requests} starting` : ""));
}

function ended(content) {
  return (content?.ended ?? []).filter((one) => one.pool === chosen);
}

function requests() {
  const filter = place("request-filter").value.trim().toLowerCase();
  const text = (one) => [one.tenant, one.app, one.model, one.state, one.request_id, story(one)].join(" ").toLowerCase();
  const all = ended(paused ?? said);
  const found = all.filter((one) => text(one).includes(filter)).slice(0, REQUESTS_SHOWN);
  const of = (one) => [named("tenant", one.tenant), " ", named("explain", one.request_id, { class: "id" })];
  fill(place("requests-body"), ...(found.length ? list(found, of) :
    [element("p", { class: "about" }, all.length ? "None of the last requests has this." : "No request has ended since the gateway began.")]));
}

function choosePools(names) {
  const choice = place("pool");
  fill(choice, ...names.map((name) => element("option", { value: name }, name)));
  if (!names.includes(chosen)) chosen = names[0];
  choice.value = chosen;
  place("pool-choice").hidden = names.length < 2;
}

function showLink(state = "live", text = null) {
  const link = place("link");
  if (state === "live" && said) {
    text = said.not_ready.includes("shutting down") ? "shutting down" : said.at_s - restartedS < 60 ? `restarted, seen again at ${clock(restartedS)}` : "live";
    if (said.state?.startsWith("not shared")) text += `; state ${said.state}`;
    if (said.workers > 1) text += `, ${said.workers} workers together`;
  }
  if (text !== null && link.textContent !== text) link.textContent = text;
  link.dataset.state = state;
  document.body.classList.toggle("stale", state === "away");
}

function linked(state, why) {
  place("ask-token").hidden = state !== "token";
  place("board").hidden = state === "token";
  awaySince = state === "away" ? awaySince ?? Date.now() / 1000 : null;
  if (state === "token") {
    place("token-wrong").hidden = !hasToken();
    place("token").focus();
  }
  showLink(state, { token: "asks for its token", live: "live", away: `the gateway has not answered since ${clock(awaySince)} (${why}); asking again` }[state]);
}

place("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken(place("token").value);
  place("token").value = "";
  follow(heard, linked);
});
place("pool").addEventListener("change", (event) => {
  chosen = event.target.value;
  plan();
});
place("pause").addEventListener("click", (event) => {
  paused = paused ? null : said;
  event.target.textContent = paused ? "Go on" : "Pause";
  event.target.setAttribute("aria-pressed", String(Boolean(paused)));
  plan();
});
place("tenants-body").addEventListener("click", (event) => {
  if (event.target.id !== "tenants-whole") return;
  isWhole = !isWhole;
  plan();
});
for (const id of ["tenant-filter", "request-filter"]) place(id).addEventListener("input", plan);
document.addEventListener("visibilitychange", plan);
showDetails();
follow(heard, linked);
