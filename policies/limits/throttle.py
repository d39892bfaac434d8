"""Which starts are refused now? Overload- and interaction-driven throttling (OIT; FairServe, section 4.2).

Requests are refused only while the KV cache is overloaded, only at the start of an interaction, and only beyond a
configured limit of their user or app. Only admitted requests count, so a client that keeps trying is not locked out by
its attempts.

If an app is beyond its limit, only those of its users are refused that have more than an equal part of it. One user
cannot use up what the others may have. Users are what the tenant says they are. A tenant that names a new user for each
request leaves each of them almost no part.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from policies.limits.sliding_counts import SlidingCounts, rolling
from policies.request import RETRY_S_MAX, Flow, Limit, Pressure, Refusal, Refused, Request, ServiceTokens
from policies.settings import COUNT_MAX, Contradiction, check_bounds, setting

MEASURES: Final = ("starts", "requests", "tokens")
"""What `Ceilings` limit, in the order in which it is counted."""
PARTS: Final = 12
"""A user is counted at three levels: so few buckets that all of them are small."""


def _ceiling(doc: str) -> Any:
    auto = "no number: starts wait for the working set"
    return setting(None, doc, kind=int, least=1, most=COUNT_MAX, auto=auto)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """How much may one user or app start, request and take (in tokens) within a window? None: no limit."""

    starts: int | None = _ceiling(
        "Interactions begun. auto, here and below, sets no number: starts wait for the working set instead of being "
        "refused (docs/working-sets.md)."
    )
    requests: int | None = _ceiling("Calls, those inside interactions included. At least `starts`.")
    tokens: int | None = _ceiling("Tokens received, prompt and output.")

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.starts is not None and self.requests is not None and self.starts > self.requests:
            message = f"{self.requests} is less than starts ({self.starts}), each of which is a request"
            raise Contradiction("requests", message)

    def above(self, other: Ceilings) -> Iterator[tuple[str, int, int]]:
        """Measures for which this limit is the larger one, with both numbers."""
        for name in MEASURES:
            own, its = getattr(self, name), getattr(other, name)
            if own is not None and its is not None and own > its:
                yield name, own, its


UNLIMITED: Final = Ceilings()


@dataclass(frozen=True, slots=True)
class ThrottleSettings:
    """The limits that apply while the KV cache is overloaded, and only at the start of an interaction."""

    window_s: float = setting(60.0, "The time over which is counted.", least=1, most=86_400)
    user: Ceilings = UNLIMITED
    app_user: Ceilings = UNLIMITED
    app: Ceilings = UNLIMITED

    def __post_init__(self) -> None:
        check_bounds(self)
        for name, part, whole in self.app_user.above(self.user):
            message = f"{part} {name} are more than the {whole} that a user may have over all apps (user.{name})"
            raise Contradiction("app_user", message)
        for name, part, whole in self.app_user.above(self.app):
            message = f"{whole} {name} are fewer than the {part} that one user may have in it (app_user.{name})"
            raise Contradiction("app", message)

    @property
    def is_off(self) -> bool:
        """Is there no limit?"""
        return self.user == self.app_user == self.app == UNLIMITED


class _Level:
    """One of three levels (users, an app's users, apps): the counts of its members, and their limits."""

    def __init__(
        self, name: str, member: Callable[[Flow], Hashable], ceilings: Ceilings, window_s: float, members_max: int
    ) -> None:
        """`member`: to whom of this level does a flow belong?"""
        self.name = name
        self.member = member
        self.counts = SlidingCounts(rolling(window_s, PARTS), members_max=members_max)
        numbers = {measure: getattr(ceilings, measure) for measure in MEASURES}
        self.limits: dict[str, float] = {measure: float(most) for measure, most in numbers.items() if most is not None}

    def exceeded(
        self, flow: Flow, requests: int, tokens: int, now: float, limits: Mapping[str, float] | None = None
    ) -> Limit | None:
        """Which of these limits would the member be beyond with this many more starts, requests and tokens? None: none.

        `limits`: by measure; None: its own.
        """
        for measure, most in (self.limits if limits is None else limits).items():
            more = tokens if measure == "tokens" else requests
            place = MEASURES.index(measure)
            found = self.counts.limit(f"{self.name}_{measure}", place, self.member(flow), more, most, now)
            if found.reset_s:
                return found
        return None

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        """Counts and limits by name. Changes nothing."""
        numbers: dict[str, float] = {}
        for measure, done in zip(MEASURES, self.counts.sums(self.member(flow), now), strict=False):
            if measure in self.limits:
                numbers[f"{self.name}_{measure}"] = done
                numbers[f"{self.name}_{measure}_limit"] = self.limits[measure]
        return numbers


class Throttle:
    """Is this start refused, and for how long?"""

    def __init__(self, settings: ThrottleSettings | None = None, *, members_max: int = 200_000) -> None:
        settings = settings or ThrottleSettings()
        window_s = settings.window_s
        self._user = _Level("user", lambda flow: (flow.tenant, flow.user), settings.user, window_s, members_max)
        self._app_user = _Level("app_user", lambda flow: flow, settings.app_user, window_s, members_max)
        self._app = _Level("app", lambda flow: flow[:2], settings.app, window_s, members_max)
        self._levels = {"users": self._user, "app_users": self._app_user, "apps": self._app}
        self.counts = {name: level.counts for name, level in self._levels.items()}
        """By level: what each member did within the window."""

    def __len__(self) -> int:
        """Members in memory."""
        return sum(len(level.counts) for level in self._levels.values())

    def refusal(self, request: Request, now: float, pressure: Pressure) -> Refused | None:
        """Is this request refused, and after which time may it come back? None: it may be queued. Counts nothing."""
        if not pressure.overloaded or request.progress.inside:
            return None
        flow, tokens = request.flow, request.prompt_tokens
        for level in self._levels.values():
            found = level.exceeded(flow, 1, tokens, now)
            if found is None or (level is self._app and self._has_part_left(flow, tokens, now)):
                continue
            reason = Refusal.OVER_APP_LIMIT if level is self._app else Refusal.OVER_USER_LIMIT
            return Refused(reason, min(RETRY_S_MAX, max(1.0, found.reset_s)), found)
        return None

    def _has_part_left(self, flow: Flow, tokens: int, now: float) -> bool:
        """Does the user stay within an equal part of what its app may have?"""
        users = max(1, self._users(flow))
        part = {measure: most / users for measure, most in self._app.limits.items()}
        return self._app_user.exceeded(flow, 1, tokens, now, part) is None

    def count(self, request: Request, now: float) -> bool:
        """The request is queued: count it. Is its user now beyond a limit (`is_beyond`)? Checked only inside an
        interaction.
        """
        flow, is_inside = request.flow, request.progress.inside
        for level in self._levels.values():
            level.counts.at(now)
        last = self._app_user.counts.last(flow)
        is_new = last is None or last // PARTS != self._app_user.counts.bucket // PARTS
        for level in self._levels.values():
            amounts = (int(not is_inside), 1, request.prompt_tokens, int(level is self._app and is_new))
            level.counts.add(level.member(flow), amounts)
        return is_inside and self.is_beyond(request, now)

    def _users(self, flow: Flow) -> int:
        """How many users has its app had, in this stretch of a window's length or the one before?"""
        counts = self._app.counts
        begin = counts.bucket // PARTS * PARTS
        stretches = range(counts.oldest, begin), range(begin, counts.bucket + 1)
        return max([sum([counts.of(flow[:2], bucket)[3] for bucket in stretch]) for stretch in stretches])

    def is_beyond(self, request: Request, now: float) -> bool:
        """Is its user beyond a limit, in total or in this app, whether or not that refuses anything now?"""
        return any([level.exceeded(request.flow, 0, 0, now) for level in (self._user, self._app_user)])

    def settle(self, request: Request, service: ServiceTokens, now: float) -> None:
        """The request ended, and took this much in all. At least its estimated prompt stays counted."""
        tokens = service.prompt + service.output - request.prompt_tokens
        if tokens > 0:
            for level in self._levels.values():
                level.counts.at(now)
                level.counts.add(level.member(request.flow), (0, 0, tokens, 0))

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        """Counts and limits of its user, of its user in this app, and of its app."""
        return {name: number for one in self._levels.values() for name, number in one.explain(flow, now).items()}

    def resume(self, before: Throttle) -> None:
        """Go on with what another throttle has counted, if that was within the same window."""
        for level, other in zip(self._levels.values(), before._levels.values(), strict=True):
            if other.counts.window.longest_s == level.counts.window.longest_s:
                level.counts = other.counts
        self.counts = {name: level.counts for name, level in self._levels.items()}
