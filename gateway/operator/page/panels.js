// The panels: each takes what was said last of the chosen pool, and puts it in its place.

import { today, used } from "./usage.js";
import { about, bar, count, element, fill, named, numbers, percent, place, seconds, spaced, sum, table } from "./words.js";

const COLOURS = 7;
const TENANTS_SHOWN = 15;
const SHORT_OF_DUE = 0.8;

const colours = new Map();

// Who has a colour keeps it while the page is open; all others are grey.
function colour(name) {
  if (!colours.has(name) && colours.size < COLOURS && name) colours.set(name, `c${colours.size}`);
  return colours.get(name) ?? "others";
}

export function lanes(pool) {
  const inService = pool.backends.filter((one) => one.in_service);
  place("limit-sentence").textContent = pool.limited_by_is;
  place("limit-sentence").dataset.state = !inService.length ? "down" : pool.limited_by ? "limited" : "open";
  const slots = sum(inService.map((one) => one.slots));
  const taken = sum(inService.map((one) => one.running_sequences));
  const busy = pool.tenants.filter((one) => one.queued_requests || one.running_requests);
  const oldest = Math.max(0, ...busy.map((one) => one.oldest_wait_s));
  const drawn = (field, most) => bar(busy.filter((one) => one[field]).map((one) =>
    [one[field] / Math.max(slots, most, 1), colour(one.tenant), `${one.tenant}: ${one[field]}`]));
  const lane = (name, said, ...more) => element("div", { class: "lane" }, element("b", {}, name), numbers(said), ...more);
  fill(place("lanes-body"),
    lane("Who waits", pool.queued_requests ? `${count(pool.queued_requests, "request")}, the oldest for ${seconds(oldest)}`
      : "nobody: each request starts on arrival", drawn("queued_requests", pool.queued_requests)),
    lane("Behind whom", `${count(pool.dispatched_requests, "request")} at the engines, ${taken} of ${count(slots, "slot")} taken`,
      drawn("running_requests", pool.dispatched_requests)),
    pool.waits_for ? lane("For what", `the next request waits ${pool.waits_for}`) : null,
    element("ul", { class: "key" }, ...busy.slice(0, TENANTS_SHOWN).map((one) => element("li", { class: colour(one.tenant) },
      named("tenant", one.tenant), ` ${one.queued_requests} waiting, ${one.running_requests} running`))),
    ...pool.gateways.map((one) =>
      about(`At ${one.gateway}: ${one.queued_requests} waiting, ${one.dispatched_requests} running.`)));
}

const HEADS = [["tenant"], ["waiting"], ["oldest", "less"], ["waits", "less left"], ["running"], ["received"], ["due"], ["", "wide"],
  ["weight", "less"], ["wait p95", "less"], ["first token p95", "less"], ["refused", "less"], ["used today", "less"]];

// Each tenant once, under its group. hint: what to do where nobody has asked for anything.
export function tenants(pool, { filter, isWhole, countsUsage, hint }) {
  const found = pool.tenants.filter((one) => one.tenant.toLowerCase().includes(filter));
  const shown = isWhole ? found : found.slice(0, TENANTS_SHOWN);
  const parts = [...shown, ...pool.groups].flatMap((one) => [one.share_received, one.share_due]);
  const most = Math.max(0.0001, ...parts);
  const next = pool.requests.find((one) => one.request_id === pool.next_request_id)?.tenant;
  const inside = (group, depth) => [
    ...pool.groups.filter((one) => one.in === group).flatMap((one) => [groupRow(one, depth, most), ...inside(one.group, depth + 1)]),
    ...shown.filter((one) => one.group === group).map((one) =>
      tenantRow(one, depth, most, one.ceiling || (next === one.tenant ? pool.waits_for : "for its turn"))),
  ];
  const rows = inside(null, 0);
  fill(place("tenants-body"),
    pool.tenants.some((one) => one.is_active) ? null : hint(),
    rows.length ? table(HEADS, rows, "Table of tenants") : null,
    found.length > TENANTS_SHOWN ? element("button", { type: "button", id: "tenants-whole" },
      isWhole ? `Only the first ${TENANTS_SHOWN}` : `All ${found.length}`) : null,
    pool.tenants_left_out ? about(`The busiest ${pool.tenants.length} of ${pool.tenants.length + pool.tenants_left_out}.`) : null,
    ...pool.refusals.map((one) => element("p", { class: "refusal" },
      `${count(one.requests, "request")} refused (${spaced(one.reason)}): ${one.reason_is}. Most: `, named("tenant", one.most), ".")),
    today.fault ? about(`Usage cannot be read: ${today.fault}.`) : countsUsage ? null : about(
      "Usage is not counted. Name a file for it in the configuration: ", element("code", {}, "usage: /var/lib/fairgate/usage.db")));
}

function shares(one, most) {
  return [percent(one.share_received), percent(one.share_due), bar([[one.share_received / most, "c0"]], one.share_due / most)];
}

function tenantRow(one, depth, most, waits) {
  const isShort = one.queued_requests && one.share_received < SHORT_OF_DUE * one.share_due;
  const mark = element("i", { class: colours.get(one.tenant) ?? "others" });
  const usedToday = today.of.get(one.tenant);
  return [
    isShort ? "short" : one.is_active ? "" : "idle",
    element("span", { class: `depth${depth}` }, mark, named("tenant", one.tenant)),
    String(one.queued_requests),
    one.queued_requests ? seconds(one.oldest_wait_s) : "",
    one.queued_requests ? waits : "",
    String(one.running_requests),
    ...(one.is_active ? shares(one, most) : ["idle", "", ""]),
    one.weight === null ? "" : String(one.weight),
    seconds(one.wait_p95_s),
    seconds(one.first_token_p95_s),
    String(sum(one.refused_requests)),
    usedToday ? used(usedToday) : "",
  ];
}

function groupRow(one, depth, most) {
  const terms = [["floor", one.guaranteed_share, percent], ["at most", one.max_share, percent],
    ["at most", one.max_running, (count) => `${count} running`], ["lends", one.lending_limit, percent],
    ["borrows", one.borrowing_limit, percent]];
  const set = terms.filter(([, value]) => value !== null).map(([name, value, say]) => `${name} ${say(value)}`);
  const name = element("span", { class: `depth${depth}` }, element("b", {}, one.group), numbers(` ${set.join(", ") || "group"}`));
  return ["group", name, String(one.queued_requests), "", "", String(one.running_requests), ...shares(one, most),
    String(one.weight), "", "", "", ""];
}

export function engines(pool) {
  fill(place("engines-body"), pool.backends.length ? element("ul", { class: "tiles" }, ...pool.backends.map(engine))
    : about("This pool has no engine. Name one under ", element("code", {}, "pools[].backends"), " in the configuration."));
}

function engine(one) {
  const name = element("b", {}, named("engine", one.backend, { title: one.url }));
  if (!one.in_service) return element("li", { class: "down" }, name, element("p", {}, `out of service: ${one.reason}`));
  const running = Object.entries(one.running_by_tenant).map(([tenant, requests]) =>
    [requests / Math.max(1, one.slots), colour(tenant), `${tenant}: ${requests}`]);
  return element("li", { class: one.obstacle ? "limited" : "" }, name,
    numbers(`${one.running_sequences} of ${one.slots} slots, KV ${percent(one.kv_ratio)}`),
    bar(running), bar([[one.kv_ratio, "kv"]], one.kv_expected_ratio),
    element("p", {}, one.obstacle_is || "has room", one.starting_requests ? `; ${one.starting_requests} starting` : ""));
}
