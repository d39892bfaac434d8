"""What may a client make the server hold, and for how long may it keep it waiting?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class ServerLimits:
    """Of one server. What is counted for one account is counted for one address, too."""

    header_bytes_max: int = 65536
    """Of one request; and of all unfinished heads that come from one address and from nobody who is known."""
    headers_count_max: int = 200
    target_bytes_max: int = 16384
    body_bytes_max: int = 33554432
    bodies_bytes_max: int = 1 << 30
    """All bodies that are being received, together."""
    answers_bytes_max: int = 1 << 28
    """What clients that read too slowly have not taken of their answers, together."""
    client_bodies_bytes_max: int = 1 << 28
    """Those of one account, and those from one address."""
    connections_max: int = 20000
    client_connections_max: int = 10000
    """Those of one account, and those from one address."""
    client_head_s: float = 10.0
    """From a request's first byte (or the connection's start) to the end of its head."""
    client_body_s: float = 300.0
    """From the end of the head to the end of the body."""
    body_grace_s: float = 20.0
    """The body may take this long, and longer at `client_body_bytes_per_s`."""
    client_body_bytes_per_s: float = 1000.0
    client_idle_s: float = 75.0
    client_stall_s: float = 60.0
    """The client takes nothing of what waits for it."""
    linger_s: float = 5.0
    """After a last answer: how long what the client still sends is read and dropped, so that it sees the answer."""
    write_buffer_bytes: int = 65536
    pipelined_bytes_max: int = 65536
