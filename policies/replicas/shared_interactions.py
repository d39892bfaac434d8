"""Open interactions across several gateways: the calls of one interaction may arrive at any of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from policies.app_paces import PACE_S_MAX
from policies.interactions import IDLE_S_AWAITED, Interactions
from policies.replicas.messages import InteractionDelta, InteractionTotals
from policies.request import Claim, Flow, Interaction, Request

ASKED_MAX: Final = 8
"""Correlation keys of one request, or hashes of a raw prompt, that are looked up at other gateways."""


class SharedInteractions:
    """A gateway's side of the sync rounds about open interactions."""

    def __init__(self, interactions: Interactions) -> None:
        interactions.changed = {}
        self.interactions = interactions
        self._reported: list[Interaction | None] = []
        """The interactions of the last report; None for an entry with only a key of an interaction."""

    def is_unknown(self, request: Request) -> bool:
        """Return whether this request may be a call of an interaction that was opened at another gateway."""
        return request.progress.interaction is None and bool(_keys(request.claim))

    def ask(self, request: Request) -> list[InteractionDelta]:
        """Return the questions whether interactions that this request may continue are open elsewhere.

        The strongest key comes first; of a raw prompt, the longest beginning.
        """
        claim, idle_s = request.claim, self.interactions.settings.idle_s
        weak, asked_s = claim.keys.weak, IDLE_S_AWAITED if idle_s is None else idle_s
        return [
            InteractionDelta(_name(request.flow, key), 0, 0, 0.0, PACE_S_MAX if key in weak else asked_s, False)
            for key in _keys(claim)
        ]

    def take_up(self, request: Request, opened: Sequence[InteractionTotals | None], now: float) -> None:
        """Open the request's interaction here if another gateway has it open. If several gateways have, take the
        interaction of the strongest key (the order of `ask`)."""
        flow = request.flow
        for asked, known in zip(_keys(request.claim), opened, strict=False):
            if known is None:
                continue
            key = (flow.app, flow.user, asked)
            if not self.interactions.is_open(flow.tenant, key):
                interaction = self.interactions.open(flow, key, now)
                self.interactions.wait(interaction)
                interaction.calls, interaction.tokens = interaction.reported = (known.calls, known.tokens)
                interaction.began_s = now - known.age_s
            return

    def report(self, most: int, now: float) -> list[InteractionDelta]:
        """Return the calls and tokens since the last sync round, for about `most` interactions and keys."""
        changed = self.interactions.changed or {}
        self._reported = []
        calls: list[InteractionDelta] = []
        for interaction in list(islice(changed, most)):
            if len(calls) >= most:
                break
            del changed[interaction]
            calls_reported, tokens_reported = interaction.reported or (0, 0)
            idle_s, is_over = self.interactions.idle_s(interaction), interaction.over and not interaction.under_way
            new, new_tokens = interaction.calls - calls_reported, interaction.tokens - tokens_reported
            age_s = now - interaction.began_s
            app, user, id_ = interaction.key
            flow = Flow(interaction.tenant, app, user)
            calls.append(InteractionDelta(_name(flow, id_), new, new_tokens, age_s, idle_s, is_over))
            self._reported.append(interaction)
            interaction.reported = interaction.calls, interaction.tokens
            for key, (is_strong, is_new) in (interaction.unreported or {}).items():
                # A new key also reports the calls and tokens that the interaction had before.
                count, tokens = (interaction.calls, interaction.tokens) if is_new else (new, new_tokens)
                kept_s = idle_s if is_strong else PACE_S_MAX
                calls.append(InteractionDelta(_name(flow, key), count, tokens, age_s, kept_s, False))
                self._reported.append(None)
            interaction.unreported = None
        return calls

    def receive(self, opened: Sequence[InteractionTotals | None]) -> None:
        """Take the sums of all gateways for the reported interactions."""
        for interaction, known in zip(self._reported, opened, strict=True):
            if known is not None and interaction is not None:
                calls, tokens = interaction.reported or (0, 0)
                interaction.calls += known.calls - calls
                interaction.tokens += known.tokens - tokens
                interaction.reported = known.calls, known.tokens
        self._reported = []


def _keys(claim: Claim) -> Sequence[str | int]:
    """Return the keys by which other gateways may know the interaction of this claim. Keys of text are not shared."""
    if claim.explicit:
        return (claim.id,)
    if claim.extends and not claim.id:
        return tuple(islice(reversed(claim.extends), ASKED_MAX))
    question = (claim.id,) if claim.id and not claim.begins else ()
    return (*claim.keys.strong, *question, *claim.keys.weak)[:ASKED_MAX]


def _name(flow: Flow, key: str | int) -> str:
    return "\x1f".join((*flow, str(key)))
