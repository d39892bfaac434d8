"""Requests to what is deployed, and whether they were answered whole."""

from __future__ import annotations

import json
from typing import Any

MODEL = "simulated"


def body(tokens: int, *, stream: bool) -> dict[str, Any]:
    """Return a chat request for this many tokens."""
    asked = [{"role": "user", "content": "Tell me of the sea."}]
    return {"model": MODEL, "messages": asked, "max_tokens": tokens, "ignore_eos": True, "stream": stream}


def by_curl(key: str, tokens: int, *, stream: bool) -> list[str]:
    """Return the command that asks for it."""
    ask = ["curl", "-sN", "http://127.0.0.1:8080/v1/chat/completions", "-H", f"Authorization: Bearer {key}"]
    return [*ask, "-H", "Content-Type: application/json", "-d", json.dumps(body(tokens, stream=stream))]


def said_whole(answer: bytes, *, stream: bool) -> bool:
    """Was it answered to its end?"""
    return answer.rstrip().endswith(b"data: [DONE]") if stream else b'"usage"' in answer
