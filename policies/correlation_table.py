"""Which interactions have a given correlation key?

An interaction has many keys, and several interactions may share a key: equal answers have equal lines of text, and some
models number their tool calls from 1 in each answer. The caller chooses among the interactions that share a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from policies.limits.fullness import given_up
from policies.request import Flow, Interaction

KEYS_MAX: Final = 32
"""Correlation keys of one interaction. The oldest are forgotten."""
HOLDERS_MAX: Final = 16
"""Interactions that share one key. The first that received the key loses it."""

Held = Interaction | list[Interaction]
"""Holders of one key. Nearly every key has one holder, and a list for each would take four times the memory."""


class CorrelationTable:
    """The correlation keys of all interactions. A key is valid within its flow of tenant, app and user.

    Bounded: beyond `keys_max`, the tenant with the most keys loses its oldest ones.
    """

    def __init__(self, keys_max: int = 500_000) -> None:
        self._most = keys_max
        self._count = 0
        self._tenants: dict[str, dict[int, Held]] = {}
        """Holders by tenant, then by the hash of app, user and correlation key."""

    def set(self, keys_max: int) -> None:
        """Replace the bound. Keys beyond a lower bound are forgotten as further keys are added."""
        self._most = keys_max

    def __len__(self) -> int:
        return self._count

    def of(self, tenant: str, app: str, user: str, key: str | int) -> Sequence[Interaction]:
        """Return the interactions with this key, in the order in which they received the key."""
        own = self._tenants.get(tenant)
        held = own.get(hash((app, user, key))) if own is not None else None
        if held is None:
            return ()
        return held if isinstance(held, list) else (held,)

    def has_any(self, flow: Flow, keys: Iterable[str | int]) -> bool:
        """Return whether an interaction of this flow has any of these keys."""
        tenant, app, user = flow
        own = self._tenants.get(tenant)
        if own is not None:
            for key in keys:
                if hash((app, user, key)) in own:
                    return True
        return False

    def add(self, interaction: Interaction, key: str | int, *, alone: bool = False) -> bool:
        """Give the interaction a key, or mark the key as its newest. Return whether the key is new to the interaction.

        `alone`: take a new key from all other interactions.
        """
        own = self._tenants.get(interaction.tenant)
        if own is None:
            own = self._tenants[interaction.tenant] = {}
        app, user, _ = interaction.key
        key_hash = hash((app, user, key))
        hashes = interaction.key_hashes
        if hashes is None:
            hashes = interaction.key_hashes = []
        held = own.get(key_hash)
        if held is None:
            own[key_hash] = interaction
        elif held is interaction or (isinstance(held, list) and any([one is interaction for one in held])):
            hashes.remove(key_hash)
            hashes.append(key_hash)
            return False
        else:
            holders = held if isinstance(held, list) else [held]
            while holders and (alone or len(holders) >= HOLDERS_MAX):
                (holders.pop(0).key_hashes or []).remove(key_hash)
                self._count -= 1
            holders.append(interaction)
            own[key_hash] = holders if len(holders) > 1 else interaction
        self._count += 1
        hashes.append(key_hash)
        if len(hashes) > KEYS_MAX:
            self._take(own, interaction, hashes.pop(0))
        if self._count > self._most:
            self._forget_oldest()
        return True

    def add_all(self, interaction: Interaction, *groups: Iterable[str | int]) -> None:
        """Give the interaction several keys, the oldest first."""
        app, user, _ = interaction.key
        for group in groups:
            for key in group:
                own, hashes = self._tenants.get(interaction.tenant), interaction.key_hashes
                key_hash = hash((app, user, key))
                if own is None or key_hash in own or self._count >= self._most or (hashes and len(hashes) >= KEYS_MAX):
                    self.add(interaction, key)
                    continue
                # the usual case, inlined: the key has no holder, and no bound is reached
                own[key_hash] = interaction
                if hashes is None:
                    interaction.key_hashes = [key_hash]
                else:
                    hashes.append(key_hash)
                self._count += 1

    def forget(self, interaction: Interaction) -> None:
        """Remove all keys of the interaction."""
        hashes = interaction.key_hashes
        if hashes:
            own = self._tenants[interaction.tenant]
            for key_hash in hashes:
                if own[key_hash] is interaction:
                    del own[key_hash]
                    self._count -= 1
                else:
                    self._take(own, interaction, key_hash)
            if not own:
                del self._tenants[interaction.tenant]
        interaction.key_hashes = None

    def _take(self, own: dict[int, Held], interaction: Interaction, key_hash: int) -> None:
        """Remove one key of an interaction."""
        held = own[key_hash]
        self._count -= 1
        if isinstance(held, list):
            held.remove(interaction)
            if len(held) == 1:
                own[key_hash] = held[0]
        else:
            del own[key_hash]

    def _forget_oldest(self) -> None:
        for tenant, key_hash in given_up(self._tenants, self._most):
            own = self._tenants[tenant]
            held = own.pop(key_hash)
            holders = held if isinstance(held, list) else [held]
            for holder in holders:
                (holder.key_hashes or []).remove(key_hash)
            self._count -= len(holders)
            if not own:
                del self._tenants[tenant]
