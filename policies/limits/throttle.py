"""Which starts are refused now? Overload- and interaction-driven throttling (OIT; FairServe, section 4.2).

Requests are refused only while the KV cache is overloaded, only at the start of an interaction, and only beyond a
configured limit of their user or app. Only admitted requests count, so a client that keeps trying is not locked out by
its attempts.

If an app is beyond its limit, only those of its users are refused that have more than an equal part of it. One user
cannot use up what the others may have. Users are what the tenant says they are. A tenant that names a new user for each
request leaves each of them almost no part.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from policies.limits.sliding_counts import MEASURES, NO_COUNT, Count, SlidingCounts
from policies.request import RETRY_S_MAX, Flow, Limit, Pressure, Refusal, Refused, Request, ServiceTokens
from policies.settings import COUNT_MAX, Contradiction, check_bounds, setting

__all__ = ["Ceilings", "Throttle", "ThrottleSettings"]

TOKENS: Final = 2


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

    def __init__(self, name: str, ceilings: Ceilings, window_s: float, members_max: int) -> None:
        self.name = name
        self.counts = SlidingCounts(window_s, members_max=members_max)
        numbers = (ceilings.starts, ceilings.requests, ceilings.tokens)
        self.limits = [float("inf") if number is None else float(number) for number in numbers]
        """Of starts, requests and tokens; infinite where there is none."""

    def limit(self, measure: int, member: Hashable, request: Request, now: float) -> Limit:
        """How much of this limit is used by the member whose request is beyond it?"""
        more = request.prompt_tokens if measure == TOKENS else 1
        name = MEASURES[measure]
        return self.counts.limit(f"{self.name}_{name}", name, member, more, self.limits[measure], now)

    def explain(self, member: Hashable, now: float) -> dict[str, float]:
        """Counts and limits by name. Changes nothing."""
        numbers = {}
        for measure, done, limit in zip(MEASURES, self.counts.sliding(member, now), self.limits, strict=True):
            if limit != float("inf"):
                numbers[f"{self.name}_{measure}"] = done
                numbers[f"{self.name}_{measure}_limit"] = limit
        return numbers


class _Member:
    """What did the user, the user in this app, and the app of one flow do in this period?"""

    __slots__ = ("app", "app_user", "user")

    def __init__(self, user: Count, app_user: Count, app: Count) -> None:
        self.user = user
        self.app_user = app_user
        self.app = app


def _exceeded(count: Count, limits: list[float], starts: int, tokens: int, left: float) -> int | None:
    """Which measure would be beyond its limit with this many more starts and tokens?

    `left` is the fraction of the previous period that still counts. None: no measure.
    """
    before = count.before or NO_COUNT
    if count.starts + left * before.starts + starts > limits[0]:
        return 0
    if count.requests + left * before.requests + starts > limits[1]:
        return 1
    return TOKENS if count.tokens + left * before.tokens + tokens > limits[2] else None


class Throttle:
    """Is this start refused, and for how long?"""

    def __init__(self, settings: ThrottleSettings | None = None, *, members_max: int = 200_000) -> None:
        settings = settings or ThrottleSettings()
        self._user = _Level("user", settings.user, settings.window_s, members_max)
        self._app_user = _Level("app_user", settings.app_user, settings.window_s, members_max)
        self._app = _Level("app", settings.app, settings.window_s, members_max)
        self._levels = {"users": self._user, "app_users": self._app_user, "apps": self._app}
        self.counts = {name: level.counts for name, level in self._levels.items()}
        """By level: what each member did within the window."""
        self._window_s = settings.window_s
        self._members_max = members_max
        self._began_s = self._ends_s = float("-inf")
        self._members: dict[Flow, _Member] = {}
        """By flow, for every flow of this period: a request then needs one look-up instead of three."""

    def __len__(self) -> int:
        """Members in memory."""
        return sum(len(level.counts) for level in self._levels.values())

    def refusal(self, request: Request, now: float, pressure: Pressure) -> Refused | None:
        """Is this request refused? None: it may be queued. Counts nothing."""
        if not pressure.overloaded or request.progress.inside:
            return None
        member = self._member(request, now)
        left, tokens = (self._ends_s - now) / self._window_s, request.prompt_tokens
        measure = _exceeded(member.user, self._user.limits, 1, tokens, left)
        flow = request.flow
        if measure is not None:
            return self._refused(self._user, measure, (flow.tenant, flow.user), request, now, pressure)
        measure = _exceeded(member.app_user, self._app_user.limits, 1, tokens, left)
        if measure is not None:
            return self._refused(self._app_user, measure, flow, request, now, pressure)
        measure = _exceeded(member.app, self._app.limits, 1, tokens, left)
        if measure is None:
            return None
        part = [limit / max(1, self._app.counts.members(flow[:2])) for limit in self._app.limits]
        if _exceeded(member.app_user, part, 1, tokens, left) is None:
            return None
        return self._refused(self._app, measure, flow[:2], request, now, pressure)

    def _refused(
        self, level: _Level, measure: int, member: Hashable, request: Request, now: float, pressure: Pressure
    ) -> Refused:
        """The refusal of a request beyond this limit, with the time after which it may come back."""
        found = level.limit(measure, member, request, now)
        reason = Refusal.OVER_APP_LIMIT if level is self._app else Refusal.OVER_USER_LIMIT
        return Refused(reason, min(RETRY_S_MAX, max(1.0, pressure.drain_s, found.reset_s)), found)

    def count(self, request: Request, now: float) -> bool:
        """The request is queued: count it. Is its user now beyond a limit (`is_beyond`)? Checked only inside an
        interaction.
        """
        member = self._member(request, now)
        user, app_user, app = member.user, member.app_user, member.app
        tokens = request.prompt_tokens
        if not app_user.requests:
            app.members += 1
        user.requests += 1
        app_user.requests += 1
        app.requests += 1
        user.tokens += tokens
        app_user.tokens += tokens
        app.tokens += tokens
        self._note_change(member, request.flow)
        if request.progress.inside:
            return self._is_beyond(member, now)
        user.starts += 1
        app_user.starts += 1
        app.starts += 1
        return False

    def is_beyond(self, request: Request, now: float) -> bool:
        """Is its user beyond a limit, in total or in this app, whether or not that refuses anything now?"""
        return self._is_beyond(self._member(request, now), now)

    def _is_beyond(self, member: _Member, now: float) -> bool:
        left = (self._ends_s - now) / self._window_s
        if _exceeded(member.user, self._user.limits, 0, 0, left) is not None:
            return True
        return _exceeded(member.app_user, self._app_user.limits, 0, 0, left) is not None

    def settle(self, request: Request, service: ServiceTokens, now: float) -> None:
        """The request ended, and took this much in all. At least its estimated prompt stays counted."""
        tokens = service.prompt + service.output - request.prompt_tokens
        if tokens > 0:
            member = self._member(request, now)
            member.user.tokens += tokens
            member.app_user.tokens += tokens
            member.app.tokens += tokens
            self._note_change(member, request.flow)

    def _note_change(self, member: _Member, flow: Flow) -> None:
        if self._user.counts.changed is not None:
            self._user.counts.note_change((flow.tenant, flow.user), member.user)
            self._app_user.counts.note_change(flow, member.app_user)
            self._app.counts.note_change(flow[:2], member.app)

    def _member(self, request: Request, now: float) -> _Member:
        if not self._began_s <= now < self._ends_s or self._ends_s != self._user.counts.ends_s:
            self._at(now)
        flow = request.flow
        member = self._members.get(flow)
        if member is None:
            if len(self._members) >= self._members_max:
                self._members.clear()
            member = self._members[flow] = _Member(
                self._user.counts.of((flow.tenant, flow.user)),
                self._app_user.counts.of(flow),
                self._app.counts.of(flow[:2]),
            )
        return member

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        """Counts and limits of its user, of its user in this app, and of its app."""
        return {
            **self._user.explain((flow.tenant, flow.user), now),
            **self._app_user.explain(flow, now),
            **self._app.explain(flow[:2], now),
        }

    def resume(self, before: Throttle) -> None:
        """Go on with what another throttle has counted, if that was within the same window."""
        for level, other in zip(self._levels.values(), before._levels.values(), strict=True):
            if other.counts.window_s == level.counts.window_s:
                level.counts = other.counts
        self.counts = {name: level.counts for name, level in self._levels.items()}
        self._members.clear()

    def _at(self, now: float) -> None:
        for level in self._levels.values():
            level.counts.at(now)
        if not self._began_s <= now < self._ends_s or self._ends_s != self._user.counts.ends_s:
            self._members.clear()
            self._ends_s = self._user.counts.ends_s
            self._began_s = self._ends_s - self._window_s
