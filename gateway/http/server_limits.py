"""Bounds of the memory that clients may take, and of the time for which they may keep the server waiting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class ServerLimits:
    """The limits of one server. Limits per client hold for each tenant and for each address."""

    header_bytes_max: int = 65536
    """The head of one request; also all unfinished heads from one address on connections without a key, together."""
    headers_count_max: int = 200
    target_bytes_max: int = 16384
    body_bytes_max: int = 33554432
    bodies_bytes_max: int = 1 << 30
    """All bodies that are being received, over all clients."""
    answers_bytes_max: int = 1 << 28
    """Unsent answers of all clients that read too slowly, together."""
    client_bodies_bytes_max: int = 1 << 28
    """Bodies of one tenant, and bodies from one address."""
    connections_max: int = 20000
    client_connections_max: int = 10000
    """Connections of one tenant, and connections from one address."""
    client_head_s: float = 10.0
    """Time from a request's first byte, or from the connection's start, to the end of the head."""
    client_body_s: float = 300.0
    """Time from the end of the head to the end of the body."""
    body_grace_s: float = 20.0
    """Time that any body may take; each received byte adds time at `client_body_bytes_per_s`."""
    client_body_bytes_per_s: float = 1000.0
    client_idle_s: float = 75.0
    client_stall_s: float = 60.0
    """Time for which a client may take none of its unsent data."""
    linger_s: float = 5.0
    """Time after a last answer for which further bytes of the client are read and dropped, so that it sees the
    answer."""
    write_buffer_bytes: int = 65536
    pipelined_bytes_max: int = 65536
