"""What do the pools of one gateway, and all gateways, count together? Limits that hold at any time, and interactions.

Most requests are decided at once, by what the last exchange said: as long as a tenant is far from its limits, what all
gateways admit until the next exchange cannot reach them. Near a limit a request is held until an exchange has counted
it, so that no limit is exceeded by the number of gateways. One that may go on with an interaction of another gateway is
held as well, but only while it would matter: while something waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.admission.decisions import Decision
from policies.interactions import Interaction, Interactions
from policies.limits.quotas import Quotas
from policies.limits.sliding_counts import Count, hear
from policies.replicas.messages import Call, Heard, Presence, Tally, Told
from policies.request import Refused, Request

__all__ = ["Tables"]

TOLD_MAX = 256
"""Members of each table that others hear of at a time."""
ASKED_MAX = 256
"""Held requests that are asked for at a time."""


class Tables:
    """One gateway's side of the exchange about what its pools have in common."""

    def __init__(
        self, quotas: Quotas | None, interactions: Interactions | None, *, refuses_alone: bool = False
    ) -> None:
        """`refuses_alone`: while others cannot be heard, nobody who has a limit is served."""
        self.quotas = quotas
        self.interactions = interactions
        self._refuses_alone = refuses_alone
        self._is_alone = False
        self._held: dict[str, Request] = {}
        """Not asked for yet."""
        self._asked: dict[str, tuple[Request, int, int]] = {}
        """Asked for and counted, with the place of the keys that its interaction may have."""
        self._decided: dict[str, Refused | None] = {}
        self._counts: list[Count] = []
        self._told: list[Interaction] = []
        self._keys_asked = 0

    # --- for the engines ---

    def must_ask(self, request: Request, now: float, *, is_calm: bool) -> bool:
        """Is it to be held until the others have answered?"""
        if self._is_alone:
            return False
        if self.quotas is not None and not self.quotas.is_sure(request, now):
            return True
        return not is_calm and self.interactions is not None and self.interactions.is_unknown(request)

    def hold(self, request: Request) -> None:
        """Ask for it with the next exchange."""
        self._held[request.id] = request

    def is_decided(self, request: Request) -> bool:
        return request.id in self._decided

    def decision(self, request: Request) -> Refused | None:
        """Is it beyond a limit? If it is not, it has been counted. Only once."""
        return self._decided.pop(request.id)

    def let_go(self, request: Request, now: float) -> None:
        """Nobody wants it any more."""
        if self._held.pop(request.id, None) is not None:
            return
        is_counted = self._asked.pop(request.id, None) is not None or (
            request.id in self._decided and self._decided.pop(request.id) is None
        )
        if is_counted and self.quotas is not None:
            self.quotas.withdrawn(request, now)

    # --- with other gateways ---

    def share(self, epoch_s: float) -> None:
        """From now on there may be others, with a clock that is so much ahead."""
        if self.quotas is not None:
            self.quotas.share(epoch_s)
        if self.interactions is not None:
            self.interactions.share()

    def is_urgent(self) -> bool:
        return bool(self._held)

    def is_busy(self) -> bool:
        """What was counted can wait: what others may do meanwhile is reserved, and a call takes longer."""
        return False

    def tell(self, now: float) -> Told:
        """What was counted, and what is asked."""
        tallies: list[Tally] = []
        calls: list[Call] = []
        under_way: list[tuple[str, int]] = []
        for request in list(self._held.values())[:ASKED_MAX]:
            del self._held[request.id]
            if self.quotas is not None:
                self.quotas.admitted(request, now)
            asked = self.interactions.ask(request) if self.interactions is not None else []
            calls += asked
            self._asked[request.id] = request, len(calls) - len(asked), len(calls)
        self._keys_asked = len(calls)
        self._counts = []
        if self.quotas is not None:
            self._counts, tallies = self.quotas.tell(TOLD_MAX)
            under_way = self.quotas.under_way()
        self._told = []
        if self.interactions is not None:
            self._told, told = self.interactions.tell(TOLD_MAX, now)
            calls += told
        return Told([], Presence(), [], [], tallies, calls, under_way)

    def hear(self, heard: Heard, asked_s: float, now: float) -> Sequence[Decision]:
        """What came of it. The engines then ask what was decided of what they hold."""
        self._is_alone = False
        hear(self._counts, heard.counted)
        if self.interactions is not None:
            for request, begin, end in self._asked.values():
                known = [(n, one) for n, one in enumerate(heard.opened[begin:end]) if one is not None]
                if known:
                    self.interactions.take_up(request, *known[0], now)
            self.interactions.hear(self._told, heard.opened[self._keys_asked :])
        if self.quotas is not None:
            self.quotas.heard(heard.replicas, heard.under_way)
        self._decide(now)
        return ()

    def cut_off(self, now: float) -> Sequence[Decision]:
        """The others cannot be heard: each keeps to its part of every limit."""
        self._is_alone = True
        if self.quotas is not None:
            self.quotas.cut_off(refuses=self._refuses_alone)
        for request in self._held.values():
            if self.quotas is not None:
                self.quotas.admitted(request, now)
            self._asked[request.id] = request, 0, 0
        self._held.clear()
        self._decide(now)
        return ()

    def _decide(self, now: float) -> None:
        """Who was counted last is refused first where that was too much, and is not counted any more."""
        for request, _, _ in reversed(list(self._asked.values())):
            refused = self.quotas.overrun(request, now) if self.quotas is not None else None
            if refused is not None and self.quotas is not None:
                self.quotas.withdrawn(request, now)
            self._decided[request.id] = refused
        self._asked.clear()
