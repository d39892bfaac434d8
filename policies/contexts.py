"""What does a context count with in the KV cache, and how much does the cache keep?

A *context* is the prompt and the answer of the last call of one interaction. Its worth is learned from the calls of its
app (`AppCalls`), whatever their answers looked like:

    - the beginning that prompts of the app have in common is in the cache once;
    - contexts grow to the usual prompt of the app, as far as calls return;
    - an idle context is worth the probability that a call of its interaction returns in time. Single questions and raw
      completions teach about 0, agents about 0.9.

What the cache keeps is seen in the calls that return (`KeptShare`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from policies.averages import QUICK, STEADY, Mean

FOUND: Final = 1.0 - QUICK
FOUND_BEYOND: Final = 1.0 - STEADY
"""Part of their contexts that returning calls find where the cache keeps all that counts: up to the engines' own KV
cache, where calls lose some to chance, and beyond it, where only a lower tier keeps anything."""
SHARE_MIN: Final = 0.25
SHARE_MAX: Final = 64.0
"""Of the engines' own KV cache. Lower tiers hold more than it; other users of an engine and apps that rewrite their
prompts leave less."""


class AppCalls:
    """Means over the calls of one app."""

    __slots__ = ("prompt_tokens", "return_rate", "shared_tokens")

    def __init__(self) -> None:
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


class Apps:
    """`AppCalls` by tenant and app. Bounded: the apps that were called longest ago are forgotten."""

    def __init__(self, apps_max: int) -> None:
        self._apps_max: Final = apps_max
        self._apps: OrderedDict[tuple[str, str], AppCalls] = OrderedDict()

    def of(self, app: tuple[str, str]) -> AppCalls:
        """Return the averages of this app, which a call of it is about to change."""
        known = self._apps.get(app)
        if known is None:
            known = self._apps[app] = AppCalls()
            if len(self._apps) > self._apps_max:
                self._apps.popitem(last=False)
        else:
            self._apps.move_to_end(app)
        return known

    def known(self, app: tuple[str, str]) -> AppCalls:
        """Return the averages of this app, or those of an app without calls."""
        return self._apps.get(app, NO_CALLS)


NO_CALLS: Final = AppCalls()


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
