"""What kind of request is it? By method and path: which need admission, which pass, which are answered here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from backends.sse import Dialect
from gateway.request.apis import AUDIO, CHAT, COMPLETIONS, MESSAGES, ONE_PASS, OTHER, RESPONSES, TOKENS, Api

__all__ = ["Route", "Treatment", "route"]


class Treatment(Enum):
    ADMIT = auto()
    """Takes the engine's time: goes through admission."""
    PASS = auto()
    """Reads or manages: goes straight to a backend."""
    MODELS = auto()
    """The list of models, answered here."""
    HEALTH = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Route:
    treatment: Treatment
    dialect: Dialect = Dialect.OPENAI
    generates: bool = False
    """Produces tokens one by one (so that output is expected), rather than an answer in one pass."""
    api: Api = OTHER
    """Which fields are read."""


_UNKNOWN: Final = Route(Treatment.UNKNOWN)
_PASS: Final = Route(Treatment.PASS)
_ONE_PASS: Final = Route(Treatment.ADMIT, api=ONE_PASS)
_GENERATE: Final = Route(Treatment.ADMIT, generates=True)

_POST: Final = {
    "/v1/chat/completions": Route(Treatment.ADMIT, generates=True, api=CHAT),
    "/v1/completions": Route(Treatment.ADMIT, generates=True, api=COMPLETIONS),
    "/v1/responses": Route(Treatment.ADMIT, Dialect.RESPONSES, generates=True, api=RESPONSES),
    "/v1/messages": Route(Treatment.ADMIT, Dialect.MESSAGES, generates=True, api=MESSAGES),
    "/v1/messages/count_tokens": Route(Treatment.PASS, Dialect.MESSAGES, api=MESSAGES),
    "/v1/audio/transcriptions": Route(Treatment.ADMIT, generates=True, api=AUDIO),
    "/v1/audio/translations": Route(Treatment.ADMIT, generates=True, api=AUDIO),
    "/v1/embeddings": _ONE_PASS,
    "/v1/rerank": _ONE_PASS,
    "/v2/rerank": _ONE_PASS,
    "/rerank": _ONE_PASS,
    "/v1/score": _ONE_PASS,
    "/score": _ONE_PASS,
    "/pooling": _ONE_PASS,
    "/classify": _ONE_PASS,
    "/tokenize": Route(Treatment.PASS, api=TOKENS),
    "/detokenize": Route(Treatment.PASS, api=TOKENS),
}
_GET: Final = {
    "/v1/models": Route(Treatment.MODELS),
    "/health": Route(Treatment.HEALTH),
    "/ping": Route(Treatment.HEALTH),
    "/version": _PASS,
}


def route(method: str, path: str, *, has_body: bool = True) -> Route:
    """The route of a request.

    What fairgate has not heard of but lies under /v1 passes through. A POST with a body there may be work for the
    engine, so it is admitted: an unknown path is no way around the queue.
    """
    if method == "POST":
        known = _POST.get(path)
        if known is not None:
            return known
        if path.startswith("/v1/"):
            return _GENERATE if has_body and not path.startswith("/v1/responses/") else _PASS
        return _UNKNOWN
    known = _GET.get(path) if method in ("GET", "HEAD") else None
    if known is not None:
        return known
    return _PASS if path.startswith("/v1/") else _UNKNOWN
