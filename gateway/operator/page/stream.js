// What does the gateway say? Its document, asked for again and again; what the page says of the connection.
//
// The token is kept for this tab alone.

import { place } from "./words.js";

const TOKEN = document.documentElement.dataset.token;
const SILENCE_MS = 15000;

export class TokenAsked extends Error {}

export function hasToken() {
  return sessionStorage.getItem(TOKEN) !== null;
}

export async function ask(path, signal) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token === null ? {} : { authorization: `Bearer ${token}` };
  const answer = await fetch(path, { headers, signal, cache: "no-store" });
  if (answer.status === 401) throw new TokenAsked();
  return answer;
}

// Calls heard(document) for each answer, and state(name, why) after it. Ends only when the token is asked for.
export async function follow(path, everyMs, heard, state) {
  for (;;) {
    try {
      const answer = await ask(path, AbortSignal.timeout(SILENCE_MS));
      const content = await answer.json();
      if (!answer.ok) throw new Error(content.error?.message ?? content.error ?? `status ${answer.status}`);
      heard(content);
      state("live");
    } catch (error) {
      if (error instanceof TokenAsked) return state("token");
      state("away", error.message);
    }
    await new Promise((done) => setTimeout(done, everyMs));
  }
}

// Shows the board, or the question for the token, and says how the connection is.
export function showLink(state, text) {
  place("ask-token").hidden = state !== "token";
  place("board").hidden = state === "token";
  const link = place("link");
  if (link.textContent !== text) link.textContent = text;
  if (state === "token" && link.dataset.state !== "token") place("token").focus();
  if (state === "token") place("token-wrong").hidden = !hasToken();
  link.dataset.state = state;
  document.body.classList.toggle("stale", state === "away");
}

// Keeps the token that is given, and goes on.
export function onToken(goOn) {
  place("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(TOKEN, place("token").value);
    place("token").value = "";
    goOn();
  });
}
