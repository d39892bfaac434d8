"""How many tokens does a context count in the KV cache, and how much does the cache keep?

A *context* is the prompt and the answer of the last call of one interaction. Its tokens are estimated from the earlier
interactions of its app that began with a prompt of about equal size (`InteractionKind`). Sizes also distinguish a
tenant's questions from its agents where both share an API key and name no app:

    - the prefix that the prompts of a kind share is in the cache once;
    - a context grows to the usual prompt of its kind, times the probability that a call returns;
    - an idle context counts by the probability that a call of its interaction returns in time. The probability is
      about 0 for single questions and raw completions, and about 0.9 for agents.

`KeptShare` learns the capacity of the cache from the calls that return.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from policies.averages import QUICK, STEADY, MovingAverage
from policies.recent import used
from policies.request import Request

FOUND: Final = 1.0 - QUICK
FOUND_BEYOND: Final = 1.0 - STEADY
"""Hit rates of returning calls while every context that counts is still cached. `FOUND` holds up to the size of the
engines' own KV cache, where some hits are lost to chance; `FOUND_BEYOND` holds beyond it, in a lower tier."""
SHARE_MIN: Final = 0.25
SHARE_MAX: Final = 64.0
"""Bounds of `KeptShare.share`. Lower tiers raise the share. Other users of an engine, and apps that rewrite their
prompts, reduce it."""


class InteractionKind:
    """The interactions of one app that begin with prompts of about equal size, as means over their calls."""

    __slots__ = ("held_tokens", "prompt_tokens", "return_rate", "shared_tokens")

    def __init__(self) -> None:
        self.held_tokens = 0
        """Sum of the tokens that the contexts of this kind count now."""
        self.prompt_tokens = MovingAverage()
        self.shared_tokens = MovingAverage()
        """Prompt tokens of a start that the cache had from other interactions."""
        self.return_rate = MovingAverage()
        """Fraction of the idle contexts whose next call came in time."""

    def running_tokens(self, prompt_tokens: int) -> int:
        """Return the tokens that a running call counts: its own part of the prompt, and the growth by later calls."""
        growth = self.return_rate.value * max(0.0, self.prompt_tokens.value - prompt_tokens)
        return self.own_tokens(prompt_tokens) + round(growth)

    def idle_tokens(self, context_tokens: int) -> int:
        """Return the tokens charged for an idle context: its expected unshared prompt times the return probability."""
        return round(self.return_rate.value * self.own_tokens(max(context_tokens, round(self.prompt_tokens.value))))

    def own_tokens(self, prompt_tokens: int) -> int:
        """Return the tokens of a prompt that it shares with no other interaction."""
        return max(0, prompt_tokens - round(self.shared_tokens.value))


class InteractionKinds:
    """The kinds of interactions. Bounded by `kinds_max`: the kinds that were used least recently are forgotten."""

    def __init__(self, kinds_max: int) -> None:
        self._kinds_max: Final = kinds_max
        self._kinds: OrderedDict[tuple[str, str, int], InteractionKind] = OrderedDict()

    def get_or_create(self, call: Request) -> InteractionKind:
        """Return the kind of the call's interaction, to update it. Create the kind if it is unknown."""
        return used(self._kinds, _key(call), InteractionKind, self._kinds_max)

    def get(self, call: Request) -> InteractionKind:
        """Return the kind of the call's interaction, or `NO_CALLS` if it is unknown. Changes nothing."""
        return self._kinds.get(_key(call), NO_CALLS)


def _key(call: Request) -> tuple[str, str, int]:
    """Return tenant, app and the size class of the start's prompt. A size class spans a factor of four."""
    flow, interaction = call.flow, call.progress.interaction
    start_tokens = (0 if interaction is None else interaction.start_tokens) or call.prompt_tokens
    return flow.tenant, flow.app, start_tokens.bit_length() // 2


NO_CALLS: Final = InteractionKind()


class KeptShare:
    """The capacity of the prefix cache as seen by returning calls, as a multiple of the engines' own KV cache."""

    def __init__(self) -> None:
        self.share = 1.0
        self._is_told = False
        """True once an engine has reported cached tokens. A report of 0 means a miss only after that."""

    def returned(self, context_tokens: int, found_tokens: int, *, binds: bool) -> None:
        """Learn from a returning call: `found_tokens` of its `context_tokens` were cached.

        `binds`: a start waits for the capacity. Only then a hit raises the capacity: it may be too small.
        """
        self._is_told = self._is_told or found_tokens > 0
        if not self._is_told:
            return
        wanted = FOUND if self.share < 1.0 else FOUND_BEYOND
        surplus = min(1.0, found_tokens / context_tokens) - wanted
        if surplus < 0.0 or binds:
            self.share = max(SHARE_MIN, min(SHARE_MAX, self.share * (1.0 + STEADY * surplus)))
