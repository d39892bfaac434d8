// What does the gateway say? Its events, over a connection that is made anew whenever it breaks.
//
// EventSource cannot send the token, so the stream is read with fetch; the token is kept for this tab alone.

const TOKEN = document.documentElement.dataset.token;
const SILENCE_MS = 15000;
const AGAIN_MS = [500, 1000, 2000, 5000];

export class TokenAsked extends Error {}

export function keepToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

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

// Calls heard(document) for each event, and state(name, why) when the connection changes. Ends only when the token is
// asked for.
export async function follow(heard, state) {
  let failures = 0;
  for (;;) {
    let why = "the connection ended";
    try {
      await read((document) => {
        failures = 0;
        heard(document);
      }, () => state("live"));
    } catch (error) {
      if (error instanceof TokenAsked) return state("token");
      why = error.name === "AbortError" ? "it was silent" : error.message;
    }
    const pause = AGAIN_MS[Math.min(failures, AGAIN_MS.length - 1)];
    failures += 1;
    state("away", why);
    await new Promise((done) => setTimeout(done, pause));
  }
}

async function read(heard, opened) {
  const stop = new AbortController();
  let timer = setTimeout(() => stop.abort(), SILENCE_MS);
  try {
    const answer = await ask("/events", stop.signal);
    if (!answer.ok) throw new Error((await answer.json()).error ?? `status ${answer.status}`);
    opened();
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => stop.abort(), SILENCE_MS);
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      if (events.length) heard(JSON.parse(events.at(-1).split("\ndata: ")[1]));
    }
  } finally {
    clearTimeout(timer);
  }
}
