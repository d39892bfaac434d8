"""Which interactions are known by this witness? A witness is what a call shows, or what an answer gave out.

One interaction has many witnesses, and one witness may be that of several: equal answers have equal lines, and some
models number their calls of tools from 1 in each answer. Whoever asks chooses among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from policies.request import Interaction, Key

__all__ = ["WitnessTable"]

GIVEN_MAX: Final = 32
"""Witnesses of one interaction: those of its last few answers. The oldest are forgotten."""
HOLDERS_MAX: Final = 16
"""Interactions that one witness may be of. The one that has it longest is forgotten."""
NOBODY: Final[Sequence[Interaction]] = ()


class WitnessTable:
    """The witnesses of every tenant's interactions.

    Bounded: beyond `witnesses_max`, the tenant that has most of them loses its oldest ones.
    """

    def __init__(self, witnesses_max: int = 500_000) -> None:
        self._most = witnesses_max
        self._count = 0
        self._tenants: dict[str, dict[Key, list[Interaction]]] = {}

    def __len__(self) -> int:
        return self._count

    def of(self, tenant: str, key: Key) -> Sequence[Interaction]:
        """The interactions that are known by it, in the order in which they were given it."""
        own = self._tenants.get(tenant)
        return own.get(key, NOBODY) if own is not None else NOBODY

    def give(self, interaction: Interaction, key: Key, *, alone: bool = False) -> bool:
        """From now on the interaction is known by this witness. `alone`: and no other one is. False: it was already."""
        own = self._tenants.get(interaction.tenant)
        if own is None:
            own = self._tenants[interaction.tenant] = {}
        holders = own.get(key)
        if holders is None:
            holders = own[key] = []
        for holder in holders:
            if holder is interaction:
                given = _given(interaction)
                given.remove(key)
                given.append(key)
                return False
        while holders and (alone or len(holders) >= HOLDERS_MAX):
            _given(holders.pop(0)).remove(key)
            self._count -= 1
        holders.append(interaction)
        self._count += 1
        given = _given(interaction)
        given.append(key)
        if len(given) > GIVEN_MAX:
            self._take(interaction, given.pop(0))
        if self._count > self._most:
            self._forget_oldest()
        return True

    def forget(self, interaction: Interaction) -> None:
        """It is known by nothing any longer."""
        for key in interaction.given or ():
            self._take(interaction, key)
        interaction.given = None

    def _take(self, interaction: Interaction, key: Key) -> None:
        own = self._tenants[interaction.tenant]
        holders = own[key]
        holders.remove(interaction)
        self._count -= 1
        if not holders:
            del own[key]
            if not own:
                del self._tenants[interaction.tenant]

    def _forget_oldest(self) -> None:
        """The tenant with most witnesses loses a hundredth of the bound, so that this is rare."""
        tenant = max(self._tenants, key=lambda name: (len(self._tenants[name]), name))
        own = self._tenants[tenant]
        for key, holders in list(islice(own.items(), max(1, min(len(own), self._most // 100)))):
            for holder in holders:
                _given(holder).remove(key)
            self._count -= len(holders)
            del own[key]
        if not own:
            del self._tenants[tenant]


def _given(interaction: Interaction) -> list[Key]:
    if interaction.given is None:
        interaction.given = []
    return interaction.given
