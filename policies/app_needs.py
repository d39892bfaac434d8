"""What do the interactions of an app usually take? Calls, tokens and time, and how long it is silent between two calls.

From this follow the caps of an interaction, how long one may be silent before it is over, and how soon a call must
follow an answer to go on with it where nothing proves that it does.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Literal

from policies.plain_data import rows
from policies.request import Caps, Interaction

__all__ = ["APPS_MAX", "CALLS_MIN", "IDLE_S_MAX", "IDLE_S_MIN", "PACE_S_MAX", "AppNeeds", "Cap", "Percentile"]

Cap = float | Literal["auto"]

USUAL: Final = 0.95
CAP_FACTOR: Final = 4.0
"""A learned cap is so many times what this part of an app's interactions needs at the most."""
CALLS_MIN: Final = 100.0
TOKENS_MIN: Final = 5_000_000.0
LIFETIME_S_MIN: Final = 21_600.0
"""A learned cap is at least that."""
LEARNED_MAX: Final = 4.0
"""A learned cap is at most this many times its least, whatever its app seems to need."""
IDLE_S_MIN: Final = 300.0
IDLE_S_MAX: Final = 3600.0
IDLE_FACTOR: Final = 2.0
"""A learned idle time is so many times the longest pause of late."""
FADING: Final = 0.999
"""How much of the longest pause is left after each pause that is shorter."""
PAUSES_MIN: Final = 32
"""Before so many pauses were seen, an interaction that awaits a tool's result may be silent for `IDLE_S_MAX`."""
REPLIES_MIN: Final = 8
PACE_S_PEOPLE: Final = 10.0
PACE_S_UNKNOWN: Final = 20.0
PACE_S_MAX: Final = 60.0
PACE_S_AGENTS_MEDIAN: Final = 5.0
"""An app whose next call usually follows within this time is an agent: people do not read so fast."""
APPS_MAX: Final = 4096


class Percentile:
    """A running estimate of one percentile: the value below which a fraction `part` of all values lies. O(1), no
    memory.

    Each value moves the estimate by a small part of itself: up by p or down by 1 - p (stochastic approximation). The
    first values move it by more. No single value can move it far, however large it is.
    """

    __slots__ = ("part", "seen", "value")

    RATE = 0.05

    def __init__(self, part: float, value: float = 0.0, seen: int = 0) -> None:
        self.part = part
        self.value = value
        self.seen = seen

    def learn(self, value: float) -> None:
        self.seen += 1
        if self.seen == 1:
            self.value = value
            return
        step = max(self.RATE, 1.0 / self.seen) * max(self.value, 1.0)
        self.value = max(0.0, self.value + step * (self.part if value > self.value else self.part - 1.0))


class _Needs:
    """What was seen of one app."""

    __slots__ = ("calls", "caps", "lifetime_s", "longest_s", "pauses", "reply_s", "tokens")

    def __init__(self) -> None:
        self.calls = Percentile(USUAL)
        self.tokens = Percentile(USUAL)
        self.lifetime_s = Percentile(USUAL)
        self.pauses = 0
        """Pauses that a proof ended."""
        self.longest_s = 0.0
        """The longest of them, of late."""
        self.reply_s = Percentile(0.5)
        """Between an answer that seemed final and what was said to it."""
        self.caps: Caps | None = None
        """Computed from these; None: to be computed when they are next needed."""


class AppNeeds:
    """The needs of every app of every tenant. Bounded: the apps whose interactions ended longest ago are forgotten."""

    def __init__(
        self, calls_max: Cap = "auto", tokens_max: Cap = "auto", lifetime_s_max: Cap = "auto", idle_s: Cap = "auto"
    ) -> None:
        """A number holds for all apps; "auto" is learned."""
        self._apps: OrderedDict[tuple[str, str], _Needs] = OrderedDict()
        self._unknown = _Needs()
        self.apps_max = APPS_MAX
        self.set(calls_max, tokens_max, lifetime_s_max, idle_s)

    def set(self, calls_max: Cap, tokens_max: Cap, lifetime_s_max: Cap, idle_s: Cap) -> None:
        """From now on this is configured. What was learned stays."""
        self._calls_max = calls_max
        self._tokens_max = tokens_max
        self._lifetime_s_max = lifetime_s_max
        self._idle_s = idle_s
        for needs in (self._unknown, *self._apps.values()):
            needs.caps = None

    def caps(self, tenant: str, app: str) -> Caps:
        """Calls, tokens and seconds up to which an interaction of this app has its immunity."""
        needs = self._apps.get((tenant, app), self._unknown)
        if needs.caps is None:
            needs.caps = (
                _cap(self._calls_max, CALLS_MIN, needs.calls),
                _cap(self._tokens_max, TOKENS_MIN, needs.tokens),
                _cap(self._lifetime_s_max, LIFETIME_S_MIN, needs.lifetime_s),
            )
        return needs.caps

    def idle_s(self, interaction: Interaction) -> float:
        """How long may it be silent before it is over? Longer if its last answer asked for something."""
        if self._idle_s != "auto":
            return self._idle_s
        if not interaction.awaited:
            return IDLE_S_MIN
        needs = self._apps.get((interaction.tenant, interaction.key[0]))
        if needs is None or needs.pauses < PAUSES_MIN:
            return IDLE_S_MAX
        return min(IDLE_S_MAX, max(IDLE_S_MIN, IDLE_FACTOR * needs.longest_s))

    @property
    def asked_s(self) -> float:
        """How long is an interaction of another gateway kept in mind that is asked for?"""
        return IDLE_S_MAX if self._idle_s == "auto" else self._idle_s

    def pace_s(self, tenant: str, app: str) -> float:
        """Within which time must a call follow an answer to be no new question of a person?"""
        needs = self._apps.get((tenant, app))
        if needs is None or needs.reply_s.seen < REPLIES_MIN:
            return PACE_S_UNKNOWN
        return PACE_S_MAX if needs.reply_s.value <= PACE_S_AGENTS_MEDIAN else PACE_S_PEOPLE

    # --- events ---

    def paused(self, tenant: str, app: str, pause_s: float) -> None:
        """An interaction was silent for so long before what it awaited came."""
        needs = self._of(tenant, app)
        needs.pauses += 1
        needs.longest_s = max(pause_s, needs.longest_s * FADING)

    def replied(self, tenant: str, app: str, pause_s: float) -> None:
        """So long after an answer something was said to it, be it by a person or an agent."""
        self._of(tenant, app).reply_s.learn(pause_s)

    def ended(self, interaction: Interaction) -> None:
        """An interaction is over: learn what it took."""
        needs = self._of(interaction.tenant, interaction.key[0])
        needs.calls.learn(interaction.calls)
        needs.tokens.learn(interaction.tokens)
        needs.lifetime_s.learn(interaction.seen_s - interaction.began_s)
        needs.caps = None

    def _of(self, tenant: str, app: str) -> _Needs:
        needs = self._apps.get((tenant, app))
        if needs is None:
            needs = self._apps[(tenant, app)] = _Needs()
            if len(self._apps) > self.apps_max:
                self._apps.popitem(last=False)
        else:
            self._apps.move_to_end((tenant, app))
        return needs

    # --- what was learned ---

    def snapshot(self) -> list[list[object]]:
        """As plain data: [tenant, app, calls, tokens, seconds, interactions, pauses, longest, reply, replies]."""
        return [
            [
                *app, needs.calls.value, needs.tokens.value, needs.lifetime_s.value, needs.calls.seen, needs.pauses,
                needs.longest_s, needs.reply_s.value, needs.reply_s.seen,
            ]
            for app, needs in self._apps.items()
        ]  # fmt: skip

    def restore(self, learned: object) -> None:
        """Continue from a snapshot. ValueError if it is not valid; then nothing has changed."""
        self._apps = _read(learned)

    def adopt(self, learned: object) -> None:
        """Take over from another gateway's snapshot what it has seen more of. ValueError if it is not valid."""
        for app, theirs in _read(learned).items():
            own = self._apps.get(app)
            if own is None or own.calls.seen < theirs.calls.seen:
                self._apps[app] = theirs
        while len(self._apps) > self.apps_max:
            self._apps.popitem(last=False)


def _read(learned: object) -> OrderedDict[tuple[str, str], _Needs]:
    apps: OrderedDict[tuple[str, str], _Needs] = OrderedDict()
    kinds = (str, str, float, float, float, int, int, float, float, int)
    for tenant, app, calls, tokens, lifetime_s, seen, pauses, longest_s, reply_s, replies in rows(learned, kinds):
        own = apps[(tenant, app)] = _Needs()
        own.calls = Percentile(USUAL, calls, seen)
        own.tokens = Percentile(USUAL, tokens, seen)
        own.lifetime_s = Percentile(USUAL, lifetime_s, seen)
        own.pauses, own.longest_s = pauses, longest_s
        own.reply_s = Percentile(0.5, reply_s, replies)
    return apps


def _cap(setting: Cap, least: float, learned: Percentile) -> float:
    if setting != "auto":
        return setting
    return min(max(least, CAP_FACTOR * learned.value), LEARNED_MAX * least)
