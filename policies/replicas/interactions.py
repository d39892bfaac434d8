"""Open interactions across several gateways: the calls of one interaction may arrive at any of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from policies.interactions import Interactions
from policies.replicas.messages import Call, Opened
from policies.request import Flow, Interaction, Request

__all__ = ["SharedInteractions"]

ASKED_MAX: Final = 8
"""Number of hashes of a raw prompt that are looked up at other gateways."""


class SharedInteractions:
    """One gateway's side of the exchange about its open interactions."""

    def __init__(self, interactions: Interactions) -> None:
        interactions.changed = {}
        self.interactions = interactions
        self._told: list[Interaction] = []

    def is_unknown(self, request: Request) -> bool:
        """May this request be a call of an interaction that was opened at another gateway?"""
        claim = request.claim
        if request.progress.interaction is not None or not (claim.id or claim.extends):
            return False
        return claim.explicit or not claim.begins

    def ask(self, request: Request) -> list[Call]:
        """Ask whether an interaction that this request may continue is open elsewhere.

        For a raw prompt, the longest known beginning is asked first.
        """
        claim = request.claim
        keys: Iterable[str | int] = (claim.id,) if claim.id else islice(reversed(claim.extends), ASKED_MAX)
        idle_s = self.interactions.settings.idle_s
        return [Call(_name(request.flow, key), 0, 0, 0.0, idle_s, False) for key in keys]

    def take_up(self, request: Request, opened: Sequence[Opened | None], now: float) -> None:
        """Open here the first interaction that is open elsewhere, in the order in which they were asked."""
        claim, flow = request.claim, request.flow
        for place, known in enumerate(opened):
            if known is None:
                continue
            key = (flow.app, flow.user, claim.id or claim.extends[-1 - place])
            if not self.interactions.is_open(flow.tenant, key):
                interaction = self.interactions.open(flow, key, now)
                interaction.calls, interaction.tokens = interaction.told = (known.calls, known.tokens)
                interaction.began_s = now - known.age_s
            return

    def tell(self, most: int, now: float) -> list[Call]:
        """What was added since the last exchange, for at most `most` interactions."""
        changed = self.interactions.changed or {}
        self._told = list(islice(changed, most))
        calls = []
        for interaction in self._told:
            del changed[interaction]
            app, user, key = interaction.key
            calls_told, tokens_told = interaction.told or (0, 0)
            calls.append(
                Call(
                    _name(Flow(interaction.tenant, app, user), key),
                    interaction.calls - calls_told,
                    interaction.tokens - tokens_told,
                    now - interaction.began_s,
                    self.interactions.settings.idle_s,
                    interaction.over and not interaction.under_way,
                )
            )
            interaction.told = interaction.calls, interaction.tokens
        return calls

    def hear(self, opened: Sequence[Opened | None]) -> None:
        """Take the sums of all gateways for the interactions that were told."""
        for interaction, known in zip(self._told, opened, strict=True):
            if known is not None:
                calls, tokens = interaction.told or (0, 0)
                interaction.calls += known.calls - calls
                interaction.tokens += known.tokens - tokens
                interaction.told = known.calls, known.tokens
        self._told = []


def _name(flow: Flow, key: str | int) -> str:
    return "\x1f".join((*flow, str(key)))
