"""Sessions of real clients, as they were sent to a scripted engine, and the ways in which such sessions vary.

Two sessions of each client with unlike questions: the OpenAI Agents SDK (chat, Responses, and an agent that calls
another one as a tool), LangGraph, smolagents (tools, and code), mini-SWE-agent and Magentic-One. Long texts are cut in
the middle, long sessions after a dozen calls, and fields that nobody reads are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple


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
_OF_ITS_OWN = {
    "chatcmpl-tool-": "chatcmpl-tool-f",
    "call_": "call_f",
    "resp_": "resp_f",
    "needs.": "asks.",
    "what changed": "what has changed",
}
_serial = count()


def recorded(client: str, vary: Vary) -> list[list[Call]]:
    """The sessions of this client, varied."""
    return [_varied(calls, vary) for calls in _RECORDED[client].values()]


def _varied(calls: list[Call], vary: Vary) -> list[Call]:
    varied = []
    for number, call in enumerate(json.loads(json.dumps(calls))):
        path, body, answer = call
        name = "messages" if "messages" in body else "input"
        body[name] = vary(body[name], number, len(calls))
        varied.append(Call(path, body, answer))
    return varied


def twin(calls: list[Call]) -> list[Call]:
    """The same session once more: the same question, with ids and words of its own in the answers."""
    text = json.dumps(calls)
    for old, new in (
        ("chatcmpl-tool-", "chatcmpl-tool-f"),
        ("call_", "call_f"),
        ("resp_", "resp_f"),
        ("needs.", "asks"),
    ):
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
