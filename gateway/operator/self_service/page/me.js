// The page of one tenant: asks with its key how it stands, and shows that.

import { bar } from "./draw.js";
import { TokenAsked, ask, hasToken, keepToken } from "./stream.js";
import { clock, count, element, fill, percent, seconds, spaced } from "./words.js";

const AGAIN_MS = 5000;
const place = (id) => document.getElementById(id);
const row = (name, numbers, drawn = null) => element("li", {}, element("b", {}, name), element("p", {}, numbers), drawn);
const list = (rows, empty) => (rows.length ? element("ul", { class: "bars" }, ...rows) : element("p", { class: "empty" }, empty));
const short = (number) => number.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });

let timer = 0;

function show(me) {
  const terms = ({ name, ...rest }) => row(name, Object.entries(rest).map(([term, value]) => `${spaced(term)} ${value}`).join(", "));
  fill(place("place-body"), list(me.place.map(terms), ""));
  const limit = (one) => row(spaced(one.name), `${short(one.remaining)} of ${short(one.limit)} left`
    + (one.reset_s ? `, again in ${seconds(one.reset_s)}` : ""), bar(one.remaining / one.limit));
  fill(place("limits-body"), list(me.limits.map(limit), "None is set."));
  const recently = me.pools.map((pool) => received(`${pool.pool}, last ${seconds(me.recently_s)}`, pool.recently));
  const long = Object.entries(me.usage ?? {}).map(([name, used]) => received(`last ${name}`, used, said(used)));
  fill(place("received-body"), list([...recently, ...long], ""));
  fill(place("pools-body"), ...me.pools.flatMap((pool) => [
    element("h3", {}, pool.pool),
    list([stands("interactive", pool.interactive), stands("batch", pool.batch)], ""),
    list(pool.requests.map((one) => row(one.request_id, `${one.app}, ${one.state} for ${seconds(one.age_s)}`)), "No request waits or runs."),
    pool.requests_left_out ? element("p", { class: "more" }, `And ${pool.requests_left_out.toLocaleString("en")} more.`) : null,
  ]));
  place("place-head").textContent = `Place of ${me.tenant}`;
}

function received(name, { service_received: got, service_due: due }, more = "") {
  return row(name, `${short(got)} of ${short(due)}${more}`, bar(due ? got / due : 0));
}

function said(used) {
  const cost = used.cost === undefined || used.cost === null ? "" : `, costs ${used.cost.toFixed(2)}`;
  const unpriced = used.unpriced_tokens ? `, ${short(used.unpriced_tokens)} tokens without a price` : "";
  return `; ${short(used.input_tokens + used.output_tokens)} tokens, ${count(used.requests, "request")}${cost}${unpriced}`;
}

function stands(name, one) {
  const share = one.share === undefined ? "" : `, its part now ${percent(one.share)}`;
  return row(name, `${one.queued_requests} wait, ${one.running_requests} run${share}; one that comes now waits about ${seconds(one.expected_wait_s)}`);
}

function linked(state, text) {
  place("ask-token").hidden = state !== "token";
  place("board").hidden = state === "token";
  place("link").dataset.state = state;
  place("link").textContent = text;
  document.body.classList.toggle("stale", state === "away");
}

async function look() {
  clearTimeout(timer);
  try {
    const answer = await ask("../me");
    if (!answer.ok) throw new Error((await answer.json()).error?.message ?? `status ${answer.status}`);
    show(await answer.json());
    document.body.dataset.shown = "yes";
    linked("live", "live");
  } catch (error) {
    if (error instanceof TokenAsked) {
      place("token-wrong").hidden = !hasToken();
      linked("token", "asks for your key");
      place("token").focus();
      return;
    }
    linked("away", `no answer at ${clock(Date.now() / 1000)} (${error.message}); asking again`);
  }
  timer = setTimeout(look, AGAIN_MS);
}

place("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken(place("token").value);
  place("token").value = "";
  look();
});
if (hasToken()) look();
else {
  linked("token", "asks for your key");
  place("token").focus();
}
