"""Fields of a line of the access log. msgspec writes the structure in C, so this module is not among the compiled ones.

docs/reference/log-fields.md is made from the strings below the fields.
"""

from __future__ import annotations

import msgspec


class Line(msgspec.Struct):
    """A line of the access log. A field with a default may be absent from the log of another version."""

    ts: float
    """When it ended, in seconds since 1970."""
    request_id: str
    """The gateway's name for it, as in the answer's `x-request-id`."""
    tenant: str
    """Who pays. Empty: the key was not known."""
    app: str = ""
    """The kind of use, as the key allows it."""
    user: str = ""
    """A hash of the tenant's end user. Empty: none was named."""
    weight: float = 0.0
    """The weight that the tenant had when the request came; groups and floors change it with who is present."""
    interaction: str = ""
    """A hash that the calls behind one answer have in common. Empty: it belongs to none."""
    stage: int = 0
    """Its place among these calls, from 1."""
    model: str = ""
    """Model that the client named."""
    policy: str = ""
    """The pool's policy."""
    path: str = ""
    """Path of the request, without its query."""
    stream: bool = False
    """Was the answer asked for token by token?"""
    outcome: str = ""
    """How it ended: completed, abandoned, failed or refused."""
    reason: str = ""
    """Why it did not complete; empty if it did. See the page of reasons."""
    queue_ms: float = 0.0
    """Time from arrival to the dispatch to an engine, or to the end."""
    waited_ms: dict[str, float] = {}
    """Milliseconds of its wait by obstacle."""
    ttft_ms: float | None = None
    """Time from arrival to the first token; null if no token was seen."""
    total_ms: float = 0.0
    """Time from arrival to the end."""
    tokens_in: int = 0
    """Prompt tokens that were charged."""
    tokens_out: int = 0
    """Tokens of the answer that were charged."""
    tokens_cached: int = 0
    """Prompt tokens that the engine had in its prefix cache, as it says."""
    tokens_cached_expected: int = 0
    """The same as it was expected when the engine was chosen."""
    tokens_wasted: int = 0
    """Tokens that its interaction had taken in vain, because this call was refused."""
    tokens_in_estimated: int = 0
    """Prompt tokens as they were estimated before the engine said how many."""
    tokens_out_max: int = 0
    """The longest answer that it could have had."""
    backend: str = ""
    """Which engine answered. Empty: none did."""
    placed: str = ""
    """Why it went to that engine."""
    tries: int = 0
    """How many engines it was sent to."""
    client: str = ""
    """The client's address."""
    client_request_id: str = ""
    """The client's own name for it (`x-request-id`), if it sent one."""
    group: str = ""
    """The group that the tenant is in. Empty: none."""
    key: str = ""
    """The label of the key that it came with. Empty: the key has none."""


encode_line = msgspec.json.Encoder().encode
decode_line = msgspec.json.Decoder(Line).decode
