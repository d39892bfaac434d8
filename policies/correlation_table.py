"""Which interactions are known by this correlation key?

One interaction has many keys, and one key may be that of several: equal answers have equal lines, and some models
number their calls of tools from 1 in each answer. The caller chooses among these interactions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from policies.limits.fullness import given_up
from policies.request import Flow, Interaction

KEYS_MAX: Final = 32
"""Correlation keys of one interaction: those of its last few answers. The oldest are forgotten."""
HOLDERS_MAX: Final = 16
"""Interactions that one key may be of. The one that has it longest is forgotten."""

Held = Interaction | list[Interaction]
"""Nearly every key is of one interaction, and there are millions: a list for each would be four times as dear."""


class CorrelationTable:
    """The keys of every tenant's interactions. A key holds within its flow: the same app and user.

    Bounded: beyond `keys_max`, the tenant that has most of them loses its oldest ones.
    """

    def __init__(self, keys_max: int = 500_000) -> None:
        self._most = keys_max
        self._count = 0
        self._tenants: dict[str, dict[int, Held]] = {}
        """By tenant, then by the hash of app, user and correlation key."""

    def set(self, keys_max: int) -> None:
        """From now on so many are remembered."""
        self._most = keys_max

    def __len__(self) -> int:
        return self._count

    def of(self, tenant: str, app: str, user: str, key: str | int) -> Sequence[Interaction]:
        """The interactions that are known by this key, in the order in which it was added to them."""
        own = self._tenants.get(tenant)
        held = own.get(hash((app, user, key))) if own is not None else None
        if held is None:
            return ()
        return held if isinstance(held, list) else (held,)

    def has_any(self, flow: Flow, keys: Iterable[str | int]) -> bool:
        """Is something of this flow known by one of these?"""
        tenant, app, user = flow
        own = self._tenants.get(tenant)
        if own is not None:
            for key in keys:
                if hash((app, user, key)) in own:
                    return True
        return False

    def add(self, interaction: Interaction, key: str | int, *, alone: bool = False) -> bool:
        """From now on the interaction is known by this key. `alone`: and no other is. False: the key is not new."""
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

    def add_all(self, interaction: Interaction, keys: Iterable[str | int]) -> None:
        """The same of several keys, one after another."""
        app, user, _ = interaction.key
        for key in keys:
            own, hashes = self._tenants.get(interaction.tenant), interaction.key_hashes
            key_hash = hash((app, user, key))
            if own is None or hashes is None or key_hash in own or len(hashes) >= KEYS_MAX or self._count >= self._most:
                self.add(interaction, key)
            else:  # as nearly always: nobody has it yet, and there is room
                own[key_hash] = interaction
                hashes.append(key_hash)
                self._count += 1

    def forget(self, interaction: Interaction) -> None:
        """It is known by nothing any longer."""
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
