"""Recorded sessions of agents: calls of so many tokens each, said with words that the tiny model knows."""

import gzip
import json
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.load import MODEL, VOCABULARY
from bench.stack import Route

TRACE = "lmcache_agent_sessions.jsonl.gz"
PROMPT_SCALE, OUTPUT_SCALE = 10, 4
PROMPT_WORDS_MIN, PROMPT_WORDS_MAX = 12, 3600


@dataclass(frozen=True, slots=True)
class Session:
    """A recorded session: for each call, words of its prompt and tokens of its answer."""

    name: str
    calls: tuple[tuple[int, int], ...]


def read_sessions(path: Path) -> list[Session]:
    """Every session of the trace, scaled, in its order. Raises OSError."""
    calls: dict[str, list[tuple[int, int]]] = defaultdict(list)
    with gzip.open(path, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            words = min(max(row["est_input_tokens"] // PROMPT_SCALE, PROMPT_WORDS_MIN), PROMPT_WORDS_MAX)
            calls[f"{row['app']}/{row['session']}"].append((words, max(1, row["est_output_tokens"] // OUTPUT_SCALE)))
    return [Session(name, tuple(rows)) for name, rows in calls.items()]


class Conversation:
    """The messages of one session so far. Prompts grow as recorded and never shrink."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)
        self._messages: list[dict[str, Any]] = []
        self._words = 0

    def ask(self, words: int, answer_tokens: int) -> list[dict[str, Any]]:
        """The messages of the next call: a question, or what a tool returned for the answer before."""
        if not self._messages:
            instructions = words // 2
            self._add({"role": "system"}, instructions)
            self._add({"role": "user"}, words - instructions)
        else:
            self._add({"role": "tool", "tool_call_id": "call"}, max(1, words - self._words))
        messages = list(self._messages)
        call = {"id": "call", "type": "function", "function": {"name": "run", "arguments": "{}"}}
        self._add({"role": "assistant", "tool_calls": [call]}, answer_tokens)
        return messages

    def _add(self, message: dict[str, Any], words: int) -> None:
        self._messages.append({**message, "content": " ".join(self._rng.choices(VOCABULARY, k=words))})
        self._words += words


def chat(
    route: Route, tenant: str, messages: list[dict[str, Any]], tokens: int, headers: str = "", usage: bool = False
) -> bytes:
    """The whole HTTP request."""
    fields = {"model": MODEL, "messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    if usage:
        fields["stream_options"] = {"include_usage": True}
    body = json.dumps(fields).encode()
    key = route.key(tenant)
    auth = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\n{auth}{headers}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
