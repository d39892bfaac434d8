"""Sessions of real clients, as they are and varied: each is one interaction, and no two of them are the same one.

`recorded_sessions.jsonl` has two sessions of each client with unlike questions, as they were sent to a scripted engine:
the OpenAI Agents SDK (chat, Responses, and an agent that calls another one as a tool), LangGraph, smolagents (tools and
code), mini-SWE-agent and Magentic-One. Long texts are cut in the middle, long sessions after a dozen calls, and fields
that nobody reads are left out.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.gateway.capture import DONE, Peer, Seen, Upstream, answer, streamed
from tests.gateway.live import MODEL, Live, Starter

# --- the sessions ---


class Call(NamedTuple):
    path: str
    body: Any
    answer: Any


Vary = Callable[[list[Any], int, int], list[Any]]
"""Another form of a conversation, for the call of this number of so many."""


def _read() -> dict[str, dict[str, list[Call]]]:
    found: dict[str, dict[str, list[Call]]] = {}
    for line in (Path(__file__).parent / "recorded_sessions.jsonl").read_text().splitlines():
        row = json.loads(line)
        sessions = found.setdefault(row["client"], {})
        sessions.setdefault(row["session"], []).append(Call(row["path"], row["body"], row["answer"]))
    return found


_RECORDED = _read()
CLIENTS = sorted(_RECORDED)
_OF_ITS_OWN = {"chatcmpl-tool-": "chatcmpl-tool-f", "call_": "call_f", "resp_": "resp_f", "needs.": "asks"}
_serial = count()


def recorded(client: str, vary: Vary) -> list[list[Call]]:
    """The sessions of this client, varied."""
    sessions = [[Call(*call) for call in calls] for calls in json.loads(json.dumps([*_RECORDED[client].values()]))]
    for calls in sessions:
        for number, call in enumerate(calls):
            name = "messages" if "messages" in call.body else "input"
            call.body[name] = vary(call.body[name], number, len(calls))
    return sessions


def twin(calls: list[Call]) -> list[Call]:
    """The same session once more: the same question, with ids and words of its own in the answers."""
    text = json.dumps(calls)
    for old, new in _OF_ITS_OWN.items():
        text = text.replace(old, new)
    return [Call(*call) for call in json.loads(text)]


def _is_result(turn: Any) -> bool:
    return turn.get("role") == "tool" or turn.get("type") == "function_call_output"


def _as_it_is(turns: list[Any], number: int, calls: int) -> list[Any]:
    return turns


def _reminded(turns: list[Any], number: int, calls: int) -> list[Any]:
    """A turn of the user behind each second result."""
    varied: list[Any] = []
    for turn in turns:
        varied.append(turn)
        if _is_result(turn) and len(varied) % 2:
            varied.append({"role": "user", "content": "<reminder>Keep to the plan.</reminder>"})
    return varied


def _clocked(turns: list[Any], number: int, calls: int) -> list[Any]:
    """The first question carries a line that is another in each call."""
    for turn in turns:
        if turn.get("role") == "user":
            line = f"Time: {next(_serial)}\n"
            if isinstance(turn["content"], str):
                turn["content"] = line + turn["content"]
            else:
                turn["content"][0]["text"] = line + turn["content"][0]["text"]
            break
    return turns


def _pruned(turns: list[Any], number: int, calls: int) -> list[Any]:
    """What tools said earlier is left out, and what users said at length is shortened."""
    for turn in turns[1:-3]:
        if _is_result(turn):
            turn["output" if "output" in turn else "content"] = f"[pruned in call {number}]"
        elif turn.get("role") == "user" and isinstance(turn["content"], str) and len(turn["content"]) > 200:
            turn["content"] = turn["content"][:200] + f"[pruned in call {number}]"
    return turns


def _window(length: int) -> Vary:
    """Only the system turn and the last few are sent."""

    def vary(turns: list[Any], number: int, calls: int) -> list[Any]:
        kept = [turn for turn in turns[:1] if turn.get("role") == "system"]
        return kept + turns[len(kept) :][-length:]

    return vary


VARIATIONS: dict[str, Vary] = {
    "as it is": _as_it_is,
    "a reminder behind results": _reminded,
    "the time in the question": _clocked,
    "earlier turns pruned": _pruned,
    "the last 4 turns": _window(4),
    "the last 8 turns": _window(8),
}


# --- through a gateway ---


def as_stream(whole: Any) -> bytes:
    """The same answer as a stream."""
    choice = whole["choices"][0]
    message = choice["message"]
    calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls") or [])]
    deltas: list[Any] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word + " "} for word in (message.get("content") or "").split(" ") if word]
    deltas += [{"tool_calls": [call]} for call in calls]
    events = b"".join(_event(whole, delta, None) for delta in deltas) + _event(whole, {}, choice["finish_reason"])
    return streamed(events + DONE)


def _event(whole: Any, delta: Any, finish: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    value = {"id": whole["id"], "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class Sessions:
    """Sends sessions through one gateway to an engine that answers as was recorded."""

    def __init__(self, live: Live, answers: dict[str, Call]) -> None:
        self._live = live
        self._answers = answers

    async def names(self, sessions: list[list[Call]], **headers: str) -> list[list[str]]:
        """What the access log calls the interactions of these sessions, whose calls are sent by turns, by one user."""
        key, found = f"user-{len(self._answers)}", [list[str]() for _ in sessions]
        for number in range(max(map(len, sessions))):
            for at, calls in enumerate(sessions):
                if number < len(calls):
                    own = {header: value.format(at) for header, value in headers.items()}
                    found[at].append(await self._sent(calls[number], key, **own))
        logged = {line["request_id"]: line["interaction"] for line in await self._live.lines(len(self._answers))}
        return [[logged[id_] for id_ in ids] for ids in found]

    async def _sent(self, call: Call, key: str, **headers: str) -> str:
        """The id of the request."""
        name = str(len(self._answers))
        self._answers[name] = call
        got = await self._live.ask(call.path, {**call.body, "model": MODEL}, key=key, x_call=name, **headers)
        assert got.status == 200, got.body
        return got.headers["x-request-id"]


@pytest.fixture
async def sent(start: Starter) -> AsyncIterator[Sessions]:
    answers: dict[str, Call] = {}

    async def script(seen: Seen, peer: Peer) -> None:
        call = answers[seen.headers["x-call"]]
        await peer.send(as_stream(call.answer) if call.body.get("stream") else answer(json.dumps(call.answer).encode()))

    async with Upstream(script) as upstream, start(upstream.url) as live:
        yield Sessions(live, answers)


def is_told_apart(found: list[list[str]]) -> bool:
    return all(len(set(own)) == 1 for own in found) and len({own[0] for own in found}) == len(found)


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_session_is_one_interaction_without_a_header(sent: Sessions, client: str) -> None:
    for name, vary in VARIATIONS.items():
        if (client, name) == ("magentic-one", "earlier turns pruned"):
            continue  # its agents have no turns in common but the long ones, whose texts are pruned
        found = await sent.names(recorded(client, vary))
        assert is_told_apart(found), "\n".join(map(str, (name, *found)))


@pytest.mark.parametrize("client", CLIENTS)
async def test_the_same_question_side_by_side_is_two(sent: Sessions, client: str) -> None:
    first, _ = recorded(client, VARIATIONS["as it is"])
    found = await sent.names([first, twin(first)])
    assert is_told_apart(found), "\n".join(map(str, found))


@pytest.mark.parametrize("client", CLIENTS)
async def test_with_a_session_header_even_a_lost_history_cuts_nothing(sent: Sessions, client: str) -> None:
    found = await sent.names(recorded(client, compacted), x_session_id="session-{}")
    assert is_told_apart(found), "\n".join(map(str, found))


def compacted(turns: list[Any], number: int, calls: int) -> list[Any]:
    """From the middle on there is a summary in the place of all that was said before."""
    return turns if number < calls // 2 else [{"role": "user", "content": f"Summary of {number} calls."}]
