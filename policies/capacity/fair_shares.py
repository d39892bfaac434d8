"""Which tenants are active, and which of them hold less than their fair share of what is dispatched?

The headroom of a backend is for those below their share, so that a light tenant's request does not wait for a heavy
one's slot. A tenant stays active for a while after its last request: the next one finds the headroom still there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set

from policies.replicas.messages import Presence
from policies.request import Request

__all__ = ["Shares"]


class _Share:
    __slots__ = ("held_tokens", "queued", "running", "seen_s", "weight")

    def __init__(self) -> None:
        self.weight = 0.0
        self.held_tokens = 0
        self.queued = 0
        self.running = 0
        self.seen_s = 0.0


class Shares:
    """Is this tenant below its fair share? Fair: its weight over the weights of all active tenants."""

    def __init__(self, *, active_s: float = 30.0) -> None:
        self._active_s = active_s
        self._shares: OrderedDict[str, _Share] = OrderedDict()
        self._weights = 0.0
        self._held_tokens = 0
        self._running = 0
        self._present = 0
        """Active tenants with something queued."""
        self._elsewhere = Presence()
        self._present_elsewhere = 0
        """Active tenants with nothing queued here, but at another gateway."""

    def __len__(self) -> int:
        return len(self._shares)

    def seen(self, request: Request, now: float) -> None:
        """A request of this tenant arrived."""
        tenant = request.flow.tenant
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = _Share()
        else:
            self._shares.move_to_end(tenant)
        self._weights += request.weight - share.weight
        share.weight = request.weight
        share.seen_s = now
        share.queued += 1
        self._present += share.queued == 1
        self._drop_inactive(now)

    def dispatched(self, request: Request, held_tokens: int) -> None:
        """A queued request of this tenant was dispatched and holds so much."""
        share = self._shares[request.flow.tenant]
        share.running += 1
        self._running += 1
        share.held_tokens += held_tokens
        self._held_tokens += held_tokens
        self._left_queue(share)

    def grew(self, request: Request, held_tokens: int) -> None:
        """A dispatched request holds so much more."""
        self._shares[request.flow.tenant].held_tokens += held_tokens
        self._held_tokens += held_tokens

    def ended(self, request: Request, held_tokens: int) -> None:
        """A dispatched request is over, and held so much."""
        share = self._shares[request.flow.tenant]
        share.running -= 1
        self._running -= 1
        share.held_tokens -= held_tokens
        self._held_tokens -= held_tokens

    def withdrawn(self, request: Request) -> None:
        """A queued request is gone without service."""
        self._left_queue(self._shares[request.flow.tenant])

    def someone_is_absent(self) -> bool:
        """Is some active tenant without a request in the queue? The next one of it may come at any moment."""
        return self._present + self._present_elsewhere < len(self._shares) or self._elsewhere.absent > 0

    def is_below(self, request: Request) -> bool:
        """Does its tenant hold less of what is dispatched than its weight entitles it to?"""
        share, elsewhere = self._shares[request.flow.tenant], self._elsewhere
        held_tokens = self._held_tokens + elsewhere.held_tokens
        return share.held_tokens * (self._weights + elsewhere.weights) < held_tokens * share.weight or not held_tokens

    def is_flooding(self, request: Request) -> bool:
        """Has its tenant more in the queue than its fair share of the requests that are dispatched?"""
        share, elsewhere = self._shares[request.flow.tenant], self._elsewhere
        return share.queued * (self._weights + elsewhere.weights) > (self._running + elsewhere.running) * share.weight

    def presence(self) -> Presence:
        """Who is active here."""
        absent = max(0, len(self._shares) - self._present - self._present_elsewhere)
        return Presence(self._weights, self._held_tokens, self._running, absent)

    def elsewhere(self, presence: Presence, waiting: Set[str]) -> None:
        """Who is active at other gateways, and which tenants wait there. One that is active at several counts there."""
        self._elsewhere = presence
        shares = [self._shares[tenant] for tenant in waiting if tenant in self._shares]
        self._present_elsewhere = sum([not share.queued for share in shares])

    def _drop_inactive(self, now: float) -> None:
        while self._shares:
            tenant, share = next(iter(self._shares.items()))
            if now - share.seen_s <= self._active_s:
                break
            if share.queued or share.running:
                # Long requests keep their tenant active; it is looked at again when another period has passed.
                share.seen_s = now
                self._shares.move_to_end(tenant)
                continue
            self._weights -= share.weight
            del self._shares[tenant]

    def _left_queue(self, share: _Share) -> None:
        share.queued -= 1
        self._present -= not share.queued
