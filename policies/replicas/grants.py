"""How much of each engine may one gateway use? Reports about engines, and the use of grants.

Each gateway owns a part of every engine until the next sync round, and dispatches within that part without asking. The
gateway that freed a slot or KV uses it again, unless a request at another gateway has received less service: then the
gateway hands the slot or KV back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from policies.capacity.gauges import Grant
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Obstacle
from policies.replicas.messages import Holding
from policies.replicas.schedule import ALONE_S
from policies.request import Request

TRUST_S: Final = 2 * ALONE_S
"""Age at which a grant may have been given to another gateway."""
GRANT_MEMORY_S: Final = 5 * ALONE_S
"""Time over which the grants of an engine are averaged, for a gateway that cannot reach the others."""


WANTS_STILL: Final = (None, Obstacle.SLOTS, Obstacle.KV, Obstacle.WAITING)
"""Obstacles that other gateways could remove by leaving room. `WAITING` is one of them, because another gateway may
keep the engine's own queue filled. That queue drains only if that gateway learns that a request here goes first."""


class _GrantAverage:
    """The moving average of the grants of one engine."""

    def __init__(self) -> None:
        self.usual_sequences = self.usual_tokens = 0.0
        self.left_over = 0.0
        """Fraction of a sequence that the last allowance did not use."""
        self.granted_s = float("-inf")

    def learn(self, grant: Grant, now: float) -> None:
        """Add a grant to the average, with more weight the more time has passed since the last grant."""
        weight = min(1.0, max(0.0, (now - self.granted_s) / GRANT_MEMORY_S))
        self.usual_sequences += weight * (grant.sequences - self.usual_sequences)
        self.usual_tokens += weight * (grant.kv_tokens - self.usual_tokens)
        self.granted_s = now


class GrantedEngines:
    """The engines of one pool, and the part of each that this gateway may use."""

    def __init__(self, ledgers: Mapping[str, BackendLedger]) -> None:
        self._ledgers = ledgers
        self._reported = list(ledgers.values())
        """Engines in the last report, in order."""
        for ledger in ledgers.values():
            ledger.allowance = Grant(0, 0)  # no engine may be used before its first sync round

    def holdings(self, head: Request | None, waiting: int, now: float) -> list[Holding]:
        """Return this gateway's use of each engine, and the needs of its next request there.

        `waiting` is the number of requests that wait here.
        """
        self._reported = list(self._ledgers.values())
        return [_holding(one, head, waiting, now) for one in self._reported]

    def receive(self, grants: Sequence[Grant], now: float) -> None:
        """Apply grants, in the order of the last `holdings`, until the next sync round or for `TRUST_S`."""
        for ledger, grant in zip(self._reported, grants, strict=True):
            ledger.allowance = grant
            ledger.allowed_until_s = now + TRUST_S
            ledger.granted = ledger.granted or _GrantAverage()
            ledger.granted.learn(grant, now)

    def cut_off(self, replicas: int) -> None:
        """Go on with the average of the recent grants, as the other gateways do, while no reply comes from the store.

        `replicas`: gateways in front of the engines, this one included.

        Without any earlier grant the whole engine is used, and only gauges show the requests of others. A gateway that
        had nothing to send was granted nothing. Such a gateway goes on with an equal part, or it could never send.
        """
        for ledger in self._ledgers.values():
            granted: _GrantAverage | None = ledger.granted
            ledger.allowed_until_s = float("inf")
            if ledger.allowance is None or granted is None:
                ledger.allowance = None
                continue
            # Sequences are whole numbers. A fraction in the average is carried over to the next time.
            granted.left_over += granted.usual_sequences
            whole = int(granted.left_over)
            granted.left_over -= whole
            # Grants were made for whole requests. Within a fixed limit, half a request stays unused on average, which
            # is a large part if few requests run. So half a request is added.
            half = ledger.kv.held_tokens / ledger.sequences / 2 if ledger.sequences else 0.0
            tokens = round(granted.usual_tokens + half)
            if granted.usual_sequences < 1:
                whole = ledger.slots.count // replicas
                tokens = max(tokens, ledger.kv.limit_tokens() // replicas)
            ledger.allowance = Grant(max(1, whole), tokens, sharers=ledger.allowance.sharers)


def _holding(ledger: BackendLedger, head: Request | None, waiting: int, now: float) -> Holding:
    """Return what the gateway holds at an engine, and what the head needs there if it is short of room."""
    use = ledger.kv.use(ledger.starting_tokens, now)
    holding = Holding(ledger.name, ledger.sequences, use.peak, use.now, ledger.slots.most(), use.limit)
    if head is None or ledger.obstacle(head, now) not in WANTS_STILL:
        return holding
    needed = ledger.kv.needed_tokens(head, use, now)
    return holding._replace(waiting=waiting, next_sequences=head.sequences, next_kv_tokens=needed)
