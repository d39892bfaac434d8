"""Fields of a line of the access log. msgspec writes the structure in C, so this module is not among the compiled ones.

docs/reference/log-fields.md is made from the strings below the fields.
"""

from __future__ import annotations

import msgspec


class LogLine(msgspec.Struct):
    """A line of the access log. A field with a default may be absent from the log of another version."""

    ts: float
    """End of the request, in seconds since 1970."""
    request_id: str
    """The gateway's name for the request, as in the answer's `x-request-id`."""
    tenant: str
    """The tenant; empty if the key was not known."""
    app: str = ""
    """The app."""
    user: str = ""
    """Hash of the tenant's end user; empty if none was named."""
    weight: float = 0.0
    """Weight of the tenant when the request came; groups and floors change it with who is present."""
    interaction: str = ""
    """Hash that all calls of an interaction have; empty outside interactions."""
    stage: int = 0
    """Place of the call in its interaction, from 1."""
    model: str = ""
    """Model that the client named."""
    policy: str = ""
    """The pool's policy."""
    path: str = ""
    """Path of the request, without its query."""
    stream: bool = False
    """Whether the client asked for a stream."""
    outcome: str = ""
    """completed, abandoned, failed or refused."""
    reason: str = ""
    """Why the request did not complete; empty if it did."""
    queue_ms: float = 0.0
    """Time from arrival to dispatch, or to the end."""
    waited_ms: dict[str, float] = {}
    """Milliseconds of the wait by obstacle."""
    ttft_ms: float | None = None
    """Time from arrival to the first token; null without one."""
    total_ms: float = 0.0
    """Time from arrival to the end."""
    tokens_in: int = 0
    """Prompt tokens that were charged."""
    tokens_out: int = 0
    """Tokens of the answer that were charged."""
    tokens_cached: int = 0
    """Prompt tokens in the engine's prefix cache, as the engine reports."""
    tokens_cached_expected: int = 0
    """Cached prompt tokens expected when the engine was chosen."""
    tokens_wasted: int = 0
    """Tokens that the interaction spent in vain, because this call was refused."""
    tokens_in_estimated: int = 0
    """Prompt tokens estimated before the engine reported them."""
    tokens_out_max: int = 0
    """Longest answer that the request allowed."""
    backend: str = ""
    """Engine that answered; empty if none did."""
    placed: str = ""
    """Why the request went to that engine."""
    tries: int = 0
    """Number of engines to which the request was sent."""
    client: str = ""
    """The client's address."""
    client_request_id: str = ""
    """The client's name for the request (`x-request-id`)."""
    group: str = ""
    """Group of the tenant."""
    key: str = ""
    """Label of the key."""


encode_line = msgspec.json.Encoder().encode
decode_line = msgspec.json.Decoder(LogLine).decode
