"""What must a gateway say of itself, so that it can be seen?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gateway.config.model import Config
    from gateway.pool.pool import Pool
    from gateway.telemetry.recent_requests import RecentRequests

__all__ = ["Visible"]


class Visible(Protocol):
    """One process."""

    @property
    def config(self) -> Config: ...

    @property
    def pools(self) -> Sequence[Pool]: ...

    @property
    def recent(self) -> RecentRequests: ...

    @property
    def port(self) -> int:
        """Of the listener for clients."""

    def not_ready(self) -> list[str]:
        """Why should no traffic come here? Empty: it should."""

    def state(self) -> str | None:
        """Is state shared with other replicas? None: the config does not ask for it."""
