"""Which interactions have a given correlation key?

An interaction has many keys, and several interactions may share a key: equal answers have equal lines of text, and some
models number their tool calls from 1 in each answer. The caller chooses among the interactions that share a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from policies.recent import given_up
from policies.request import Flow, Interaction

KEYS_MAX: Final = 32
"""Correlation keys of one interaction. The oldest are forgotten."""
HOLDERS_MAX: Final = 16
"""Interactions that share one key. The first that received the key loses it."""


class CorrelationTable:
    """The correlation keys of all interactions. A key is valid within its flow of tenant, app and user.

    Bounded: beyond `keys_max`, the tenant with the most keys loses its oldest ones.
    """

    def __init__(self, keys_max: int = 500_000) -> None:
        self.keys_max = keys_max
        self._count = 0
        self._tenants: dict[str, dict[int, tuple[Interaction, ...]]] = {}
        """Holders by tenant, then by the hash of app, user and correlation key."""

    def __len__(self) -> int:
        return self._count

    def find(self, flow: Flow, key: str | int) -> Sequence[Interaction]:
        """Return the interactions with this key, in the order in which they received the key."""
        own = self._tenants.get(flow.tenant)
        return own.get(hash((flow.app, flow.user, key)), ()) if own is not None else ()

    def has_any(self, flow: Flow, keys: Iterable[str | int]) -> bool:
        """Return whether an interaction of this flow has any of these keys."""
        own = self._tenants.get(flow.tenant)
        if own is not None:
            for key in keys:
                if hash((flow.app, flow.user, key)) in own:
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
        if interaction.as_holder is None:
            interaction.as_holder = (interaction,)
        hashes, held = interaction.key_hashes, own.get(key_hash, ())
        if interaction in held:
            hashes.remove(key_hash)
            hashes.append(key_hash)
            return False
        while held and (alone or len(held) >= HOLDERS_MAX):
            held[0].key_hashes.remove(key_hash)
            held = held[1:]
            self._count -= 1
        own[key_hash] = (*held, interaction) if held else interaction.as_holder
        self._count += 1
        hashes.append(key_hash)
        if len(hashes) > KEYS_MAX:
            self._take(own, interaction, hashes.pop(0))
        if self._count > self.keys_max:
            self._forget_oldest()
        return True

    def forget(self, interaction: Interaction) -> None:
        """Remove all keys of the interaction."""
        if interaction.key_hashes:
            own = self._tenants[interaction.tenant]
            for key_hash in interaction.key_hashes:
                if len(own[key_hash]) == 1:  # the usual case, inlined
                    del own[key_hash]
                    self._count -= 1
                else:
                    self._take(own, interaction, key_hash)
            if not own:
                del self._tenants[interaction.tenant]
            interaction.key_hashes.clear()
        interaction.as_holder = None  # breaks a cycle, since full garbage collections are rare

    def _take(self, own: dict[int, tuple[Interaction, ...]], interaction: Interaction, key_hash: int) -> None:
        """Remove one key of an interaction."""
        self._count -= 1
        held = own[key_hash]
        if len(held) > 1:
            own[key_hash] = tuple([one for one in held if one is not interaction])
        else:
            del own[key_hash]

    def _forget_oldest(self) -> None:
        for tenant, key_hash in given_up(self._tenants, self.keys_max):
            own = self._tenants[tenant]
            holders = own.pop(key_hash)
            for holder in holders:
                holder.key_hashes.remove(key_hash)
            self._count -= len(holders)
            if not own:
                del self._tenants[tenant]
