"""What does the admission engine ask the gateways that share its engines, limits and interactions?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from policies.admission.decisions import Decision
from policies.request import Refused, Request


class Rivals(Protocol):
    """Requests that wait at other gateways for the engines of this pool."""

    def has_turn(self, request: Request, now: float) -> bool:
        """Return whether one of them goes before this request."""


class Asker(Protocol):
    """An admission engine that asks other gateways about a request."""

    def peers_asked(self, request_id: str, now: float) -> None:
        """Count the request, because the other gateways are asked about it now."""

    def decided(self, request_id: str, refused: Refused | None, now: float) -> Sequence[Decision]:
        """Queue the request after their answer, or reject it if it is beyond a limit (`refused`)."""


class Elsewhere(Protocol):
    """The other gateways with which limits and interactions are shared."""

    def must_ask(self, request: Request, now: float, *, is_calm: bool) -> bool:
        """Return whether the others must be asked first: about a shared limit, or about the request's interaction."""

    def ask(self, engine: Asker, request: Request) -> None:
        """Ask the others about a request of `engine`. Call its `peers_asked`, then `decided` with the answer."""

    def let_go(self, request: Request) -> None:
        """Forget a request that no longer needs an answer."""
