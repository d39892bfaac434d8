"""The engine's log: who arrived, who was served how many tokens, and how full the engine was."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

MARKER = re.compile(r"\[\[([\w.-]+) ([\w.-]+) (\d+)\]\]")
CHARACTERS_PER_TOKEN = 4


@dataclass(slots=True)
class Event:
    """A line of the engine's log.

    Kinds: `arrive`, `start` (first admission), `preempt`, `stop` (`output`: all tokens made) of a request;
    `serve`: tokens that one step computed for a tenant; `state`: the engine after a step; `refuse`: a bad request.
    """

    kind: str
    t_s: float
    request: str = ""
    tenant: str = ""
    prompt: int = 0
    output: int = 0
    wasted: int = 0
    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0

    def row(self) -> dict[str, Any]:
        """Return the event without its zeros."""
        return {name: value for name, value in asdict(self).items() if value or name == "t_s"}


def read_events(rows: Iterable[dict[str, Any]], origin_s: float = 0.0) -> list[Event]:
    """Return events whose times count from `origin_s`."""
    events = [Event(**row) for row in rows]
    for event in events:
        event.t_s -= origin_s
    return events


def content_of(line: bytes) -> str:
    """Return the text that a line of a stream carries, if any. Raises ValueError for an error within the stream."""
    if not line.startswith(b"data: {"):
        return ""
    part = json.loads(line[6:])
    if "error" in part:
        raise ValueError(part["error"])
    return "".join(choice.get("delta", {}).get("content") or "" for choice in part.get("choices", []))


def marker(tenant: str, session: str, number: int) -> str:
    """Return the text that names a request in its own prompt, where every gateway leaves it."""
    return f"[[{tenant} {session} {number}]]"


def request_of(prompt: str) -> tuple[str, str]:
    """Return the name of a request and its tenant: the last marker of its prompt."""
    found = MARKER.findall(prompt)
    if not found:
        return "unmarked", "unmarked"
    tenant, session, number = found[-1]
    return f"{tenant} {session} {number}", tenant


def tokens_of(text: str) -> int:
    return max(1, len(text) // CHARACTERS_PER_TOKEN)
