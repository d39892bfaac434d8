"""How much of each engine is one gateway's own? What it tells of its engines, and what it makes of a grant.

Each gateway owns a part of every engine until the next exchange, and dispatches within it without asking. What comes
free is used again by whoever freed it, unless one that waits elsewhere has received less: then it is handed back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from policies.capacity.fair_shares import FairShares
from policies.capacity.gauges import Allowance
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Obstacle
from policies.replicas.messages import Grant, Holding
from policies.request import Request

__all__ = ["GrantedEngines"]

TRUST_S: Final = 2.0
"""What was granted so long ago may be somebody else's by now."""
GRANT_MEMORY_S: Final = 5.0
"""Over which the grants of an engine are averaged: what is gone on with when other gateways cannot be heard."""


WANTS_STILL: Final = (None, Obstacle.SLOTS, Obstacle.KV, Obstacle.WAITING)
"""With these a request would start if others left room. A queue inside the engine may be one that another gateway keeps
up: only if that one hears that somebody else is next does the queue drain."""


class _Granted:
    """The grants of one engine so far."""

    def __init__(self) -> None:
        self.usual_sequences = self.usual_tokens = 0.0
        self.left_over = 0.0
        """Part of a sequence that the last allowance did not use."""
        self.granted_s = float("-inf")

    def note(self, grant: Grant, now: float) -> None:
        weight = min(1.0, max(0.0, (now - self.granted_s) / GRANT_MEMORY_S))
        self.usual_sequences += weight * (grant.sequences - self.usual_sequences)
        self.usual_tokens += weight * (grant.kv_tokens - self.usual_tokens)
        self.granted_s = now


class GrantedEngines:
    """The engines of one pool, as far as they are this gateway's."""

    def __init__(self, ledgers: Mapping[str, BackendLedger]) -> None:
        self._ledgers = ledgers
        self._granted = {name: _Granted() for name in ledgers}
        for ledger in ledgers.values():
            ledger.allowance = Allowance(0, 0)  # nothing before the first exchange

    def holdings(self, head: Request | None, waiting: int, tenants: FairShares, now: float) -> list[Holding]:
        """What is held, and what does the next one of those that wait here (`waiting` in all) want of each?"""
        spare, absent = head is not None and tenants.is_below(head), tenants.someone_is_absent()
        return [_holding(one, head, waiting, now, spare=spare, absent=absent) for one in self._ledgers.values()]

    def hear(self, grants: Sequence[Grant], now: float) -> None:
        """This is ours until the next exchange, or until it is too long ago. In the order of the holdings."""
        for ledger, grant in zip(self._ledgers.values(), grants, strict=True):
            ledger.allowance = Allowance(*grant)
            ledger.allowed_until_s = now + TRUST_S
            self._granted[ledger.name].note(grant, now)

    def cut_off(self) -> None:
        """Other gateways cannot be heard: go on with what was ours of late, as they do.

        Where nothing ever was, all of it is, and what others do shows in its gauges only.
        """
        for ledger in self._ledgers.values():
            granted = self._granted[ledger.name]
            ledger.allowed_until_s = float("inf")
            if ledger.allowance is None or granted.granted_s == float("-inf"):
                ledger.allowance = None
                continue
            # Sequences are whole, and a part may be less than one: what is left over counts when it is looked at again.
            granted.left_over += granted.usual_sequences
            whole = int(granted.left_over)
            granted.left_over -= whole
            # Grants were given for whole requests. In a fixed one half a request stays unused: of few it is a larger
            # part.
            half = ledger.kv.held_tokens / ledger.sequences / 2 if ledger.sequences else 0.0
            tokens = round(granted.usual_tokens + half)
            ledger.allowance = Allowance(max(1, whole), tokens, sharers=ledger.allowance.sharers)


def _holding(
    ledger: BackendLedger, head: Request | None, waiting: int, now: float, *, spare: bool, absent: bool
) -> Holding:
    use = ledger.kv.use(ledger.starting_tokens, now)
    most = ledger.slots.most(unkept=True)
    told = Holding(ledger.name, ledger.sequences, use.peak, use.now, most, use.limit)
    if head is None:
        return told
    obstacle = ledger.obstacle(head, spare=spare, absent=absent, now=now)
    if obstacle not in WANTS_STILL:
        return told
    needed = ledger.kv.needed_tokens(head, use, now)
    told = told._replace(waiting=waiting, next_sequences=head.sequences, next_kv_tokens=needed)
    if spare or not absent:
        return told
    return told._replace(left_sequences=most - ledger.slots.most(unkept=False), left_kv_tokens=use.kept)
