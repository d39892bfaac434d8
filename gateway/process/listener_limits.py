"""Limits of the client listener, derived from the config and the limits of the process."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

from gateway.config.model import Config
from gateway.http.accounts import ServerLimits
from gateway.http.sockets import connections_allowed

logger = logging.getLogger("fairgate")


def server_limits(config: Config) -> ServerLimits:
    """Return the config's limits, with the connections bounded by the files that the process may open."""
    limits, bounds = config.limits, config.bounds
    connections, of_client = limits.connections_max or bounds.connections, limits.client_connections_max
    if connections > (most := connections_allowed()):
        logger.warning(
            "limits.connections_max is %d, and the limit of open files (ulimit -n) allows %d: no more are accepted",
            connections,
            most,
        )
        connections, of_client = most, None if of_client is None else min(of_client, most // 2)
    found: dict[str, Any] = {one.name: getattr(limits, one.name, one.default) for one in fields(ServerLimits)}
    found |= {
        "body_bytes_max": limits.body_bytes_max or bounds.body_bytes,
        "bodies_bytes_max": bounds.bodies_bytes,
        "answers_bytes_max": bounds.answers_bytes,
        "client_bodies_bytes_max": bounds.client_bodies_bytes,
        "connections_max": connections,
        "client_connections_max": of_client or max(1, connections // 2),
    }
    return ServerLimits(**found)
