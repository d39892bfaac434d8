"""Which interactions are known by this witness? A witness is what a call shows, or what an answer gave out.

One interaction has many witnesses, and one witness may be that of several: equal answers have equal lines, and some
models number their calls of tools from 1 in each answer. The caller chooses among these interactions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from policies.limits.fullness import given_up
from policies.request import Flow, Interaction

GIVEN_MAX: Final = 32
"""Witnesses of one interaction: those of its last few answers. The oldest are forgotten."""
HOLDERS_MAX: Final = 16
"""Interactions that one witness may be of. The one that has it longest is forgotten."""
NOBODY: Final[Sequence[Interaction]] = ()

Held = Interaction | list[Interaction]
"""Nearly every witness is of one interaction, and millions are given: a list of its own would be four times as dear."""


class WitnessTable:
    """The witnesses of every tenant's interactions. A witness holds within its flow: the same app and user.

    Bounded: beyond `witnesses_max`, the tenant that has most of them loses its oldest ones.
    """

    def __init__(self, witnesses_max: int = 500_000) -> None:
        self._most = witnesses_max
        self._count = 0
        self._tenants: dict[str, dict[int, Held]] = {}
        """By tenant, then by the hash of app, user and witness."""

    def set(self, witnesses_max: int) -> None:
        """From now on so many are remembered."""
        self._most = witnesses_max

    def __len__(self) -> int:
        return self._count

    def of(self, tenant: str, app: str, user: str, witness: str | int) -> Sequence[Interaction]:
        """The interactions that are known by it, in the order in which they were given it."""
        own = self._tenants.get(tenant)
        held = own.get(hash((app, user, witness))) if own is not None else None
        if held is None:
            return NOBODY
        return held if isinstance(held, list) else (held,)

    def has_any(self, flow: Flow, witnesses: Iterable[str | int]) -> bool:
        """Is something of this flow known by one of these?"""
        own = self._tenants.get(flow.tenant)
        if own is not None:
            _, app, user = flow
            for witness in witnesses:
                if hash((app, user, witness)) in own:
                    return True
        return False

    def give(self, interaction: Interaction, witness: str | int, *, alone: bool = False) -> bool:
        """From now on the interaction is known by this witness. `alone`: and no other one is. False: it was already."""
        own = self._tenants.get(interaction.tenant)
        if own is None:
            own = self._tenants[interaction.tenant] = {}
        app, user, _ = interaction.key
        place = hash((app, user, witness))
        given = interaction.given
        if given is None:
            given = interaction.given = []
        held = own.get(place)
        if held is None:
            own[place] = interaction
        elif held is interaction or (isinstance(held, list) and any([one is interaction for one in held])):
            given.remove(place)
            given.append(place)
            return False
        else:
            holders = held if isinstance(held, list) else [held]
            while holders and (alone or len(holders) >= HOLDERS_MAX):
                _given(holders.pop(0)).remove(place)
                self._count -= 1
            holders.append(interaction)
            own[place] = holders if len(holders) > 1 else interaction
        self._count += 1
        given.append(place)
        if len(given) > GIVEN_MAX:
            self._take(own, interaction, given.pop(0))
        if self._count > self._most:
            self._forget_oldest()
        return True

    def give_all(self, interaction: Interaction, witnesses: Iterable[str | int]) -> None:
        """The same of several witnesses, one after another."""
        app, user, _ = interaction.key
        for witness in witnesses:
            own, given = self._tenants.get(interaction.tenant), interaction.given
            place = hash((app, user, witness))
            if own is None or given is None or place in own or len(given) >= GIVEN_MAX or self._count >= self._most:
                self.give(interaction, witness)
            else:  # as nearly always: nobody has it yet, and there is room
                own[place] = interaction
                given.append(place)
                self._count += 1

    def forget(self, interaction: Interaction) -> None:
        """It is known by nothing any longer."""
        given = interaction.given
        if given:
            own = self._tenants[interaction.tenant]
            for place in given:
                if own[place] is interaction:
                    del own[place]
                    self._count -= 1
                else:
                    self._take(own, interaction, place)
            if not own:
                del self._tenants[interaction.tenant]
        interaction.given = None

    def _take(self, own: dict[int, Held], interaction: Interaction, place: int) -> None:
        held = own[place]
        self._count -= 1
        if isinstance(held, list):
            held.remove(interaction)
            if len(held) == 1:
                own[place] = held[0]
        else:
            del own[place]

    def _forget_oldest(self) -> None:
        for tenant, place in given_up(self._tenants, self._most):
            own = self._tenants[tenant]
            held = own.pop(place)
            holders = held if isinstance(held, list) else [held]
            for holder in holders:
                _given(holder).remove(place)
            self._count -= len(holders)
            if not own:
                del self._tenants[tenant]


def _given(interaction: Interaction) -> list[int]:
    given = interaction.given
    assert given is not None
    return given
