"""What does a context count with in the KV cache, and how much does the cache keep?

A *context* is the prompt and the answer of the last call of one interaction. Its worth is learned from the interactions
of its app that began with a prompt of about the same size (`Kind`), whatever their answers looked like. So a tenant's
questions are told apart from its agents where both have one key and name no app:

    - the beginning that their prompts have in common is in the cache once;
    - contexts grow to their usual prompt, as far as calls return;
    - an idle context is worth the probability that a call of its interaction returns in time. Single questions and raw
      completions teach about 0, agents about 0.9.

What the cache keeps is seen in the calls that return (`KeptShare`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from policies.averages import QUICK, STEADY, Mean
from policies.request import Request

FOUND: Final = 1.0 - QUICK
FOUND_BEYOND: Final = 1.0 - STEADY
"""Part of their contexts that returning calls find where the cache keeps all that counts: up to the engines' own KV
cache, where calls lose some to chance, and beyond it, where only a lower tier keeps anything."""
SHARE_MIN: Final = 0.25
SHARE_MAX: Final = 64.0
"""Of the engines' own KV cache. Lower tiers hold more than it; other users of an engine and apps that rewrite their
prompts leave less."""


class Kind:
    """Interactions of one app that begin with prompts of about the same size: means over their calls."""

    __slots__ = ("held_tokens", "prompt_tokens", "return_rate", "shared_tokens")

    def __init__(self) -> None:
        self.held_tokens = 0
        """What their contexts count with now, together."""
        self.prompt_tokens = Mean()
        self.shared_tokens = Mean()
        """Tokens of a start's prompt that the cache had from other interactions."""
        self.return_rate = Mean()
        """Part of the idle contexts whose next call came in time."""

    def running_tokens(self, prompt_tokens: int) -> int:
        """Return what a call counts with while it runs: its own part of the prompt, and the growth of later calls."""
        growth = self.return_rate.value * max(0.0, self.prompt_tokens.value - prompt_tokens)
        return self.own_tokens(prompt_tokens) + round(growth)

    def idle_tokens(self, context_tokens: int) -> int:
        """Return what a context counts with while no call of it runs: what the next call brings, times its chance."""
        return round(self.return_rate.value * self.own_tokens(max(context_tokens, round(self.prompt_tokens.value))))

    def own_tokens(self, prompt_tokens: int) -> int:
        """Return the part of a prompt that no other interaction has in the cache."""
        return max(0, prompt_tokens - round(self.shared_tokens.value))


class Kinds:
    """The kinds of interactions. Bounded: those that were begun longest ago are forgotten."""

    def __init__(self, kinds_max: int) -> None:
        self._kinds_max: Final = kinds_max
        self._kinds: OrderedDict[tuple[str, str, int], Kind] = OrderedDict()

    def of(self, call: Request) -> Kind:
        """Return the kind of the interaction that this is a call of, which the call is about to change."""
        key = _key(call)
        known = self._kinds.get(key)
        if known is None:
            known = self._kinds[key] = Kind()
            if len(self._kinds) > self._kinds_max:
                self._kinds.popitem(last=False)
        else:
            self._kinds.move_to_end(key)
        return known

    def known(self, call: Request) -> Kind:
        """Return the kind of the interaction that this is a call of, or one without calls."""
        return self._kinds.get(_key(call), NO_CALLS)


def _key(call: Request) -> tuple[str, str, int]:
    """Prompts of starts within a factor of four are alike."""
    flow, interaction = call.flow, call.progress.interaction
    start_tokens = (0 if interaction is None else interaction.start_tokens) or call.prompt_tokens
    return flow.tenant, flow.app, start_tokens.bit_length() // 2


NO_CALLS: Final = Kind()


class KeptShare:
    """Capacity of the prefix cache as returning calls see it, as a multiple of the engines' own KV cache."""

    def __init__(self) -> None:
        self.share = 1.0
        self._is_told = False
        """An engine has reported cached tokens before. Only then does a report of none mean a miss."""

    def returned(self, context_tokens: int, found_tokens: int, *, is_full: bool) -> None:
        """Learn from a call that found this much of a context that counted. `is_full`: the contexts that count fill the
        capacity, so a hit shows that it could be larger.
        """
        self._is_told = self._is_told or found_tokens > 0
        if not self._is_told:
            return
        wanted = FOUND if self.share < 1.0 else FOUND_BEYOND
        surplus = min(1.0, found_tokens / context_tokens) - wanted
        if surplus < 0.0 or is_full:
            self.share = max(SHARE_MIN, min(SHARE_MAX, self.share * (1.0 + STEADY * surplus)))
