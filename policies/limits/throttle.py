"""Which starts are rejected now? Overload- and interaction-driven throttling (OIT; FairServe, section 4.2).

The throttle rejects requests only while the KV cache is overloaded, only at the start of an interaction, and only
beyond a configured limit of their user or app. Only admitted requests count, so a client that keeps trying is not
locked out by its attempts.

If an app is beyond its limit, only users with more than an equal part of it are rejected. So one user cannot use up the
parts of the others. The tenant names its users. A tenant that names a new user for each request leaves each of them
almost no part.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from policies.limits.sliding_counts import SlidingCounts, rolling
from policies.request import Flow, Limit, Pressure, Rejection, RejectReason, Request, ServiceTokens
from policies.settings import COUNT_MAX, SettingError, check_bounds, setting

MEASURES: Final = ("starts", "requests", "tokens")
"""Measures of `Ceilings`, in the order of the counts."""
PARTS: Final = 12
"""Buckets in a window: few, because each user is counted at three levels."""


def _ceiling(doc: str) -> Any:
    """Return a setting for a limit; without a number, starts wait for the working set."""
    auto = "no number: starts wait for the working set"
    return setting(None, doc, kind=int, least=1, most=COUNT_MAX, auto=auto)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Limits of one user or app within a window: interactions started, requests, and tokens. None if unlimited."""

    starts: int | None = _ceiling(
        "Interactions started. auto, here and below: no limit; starts wait for the working set instead "
        "(docs/working-sets.md)."
    )
    requests: int | None = _ceiling("Calls, also inside interactions. At least `starts`.")
    tokens: int | None = _ceiling("Prompt and output tokens.")

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.starts is not None and self.requests is not None and self.starts > self.requests:
            message = f"{self.requests} is less than starts ({self.starts}), each of which is a request"
            raise SettingError("requests", message)

    def above(self, other: Ceilings) -> Iterator[tuple[str, int, int]]:
        """Yield the measures for which this limit is above the other, with both numbers."""
        for name in MEASURES:
            own, its = getattr(self, name), getattr(other, name)
            if own is not None and its is not None and own > its:
                yield name, own, its


UNLIMITED: Final = Ceilings()


@dataclass(frozen=True, slots=True)
class ThrottleSettings:
    """The limits that apply while the KV cache is overloaded, and only at the start of an interaction."""

    window_s: float = setting(60.0, "Time over which starts, requests and tokens are counted.", least=1, most=86_400)
    user: Ceilings = UNLIMITED
    app_user: Ceilings = UNLIMITED
    app: Ceilings = UNLIMITED

    def __post_init__(self) -> None:
        check_bounds(self)
        for name, part, whole in self.app_user.above(self.user):
            message = f"{part} {name} are more than the {whole} that a user may have over all apps (user.{name})"
            raise SettingError("app_user", message)
        for name, part, whole in self.app_user.above(self.app):
            message = f"{whole} {name} are fewer than the {part} that one user may have in it (app_user.{name})"
            raise SettingError("app", message)

    @property
    def is_off(self) -> bool:
        """Return whether there is no limit."""
        return self.user == self.app_user == self.app == UNLIMITED


class _ThrottleScope:
    """A throttling scope (user, user within an app, or app), with its counts and limits."""

    def __init__(
        self, name: str, member: Callable[[Flow], Hashable], ceilings: Ceilings, window_s: float, members_max: int
    ) -> None:
        """Create an empty level. `member`: function from a flow to its member of this level."""
        self.name = name
        self.member = member
        self.counts = SlidingCounts(rolling(window_s, PARTS), members_max=members_max)
        numbers = {measure: getattr(ceilings, measure) for measure in MEASURES}
        self.limits: dict[str, float] = {measure: float(most) for measure, most in numbers.items() if most is not None}

    def exceeded(
        self, flow: Flow, requests: int, tokens: int, now: float, limits: Mapping[str, float] | None = None
    ) -> Limit | None:
        """Return a limit that the flow's member would exceed with further requests and tokens; None if there is none.

        `requests` counts as starts too. `limits`: by measure; the level's own if None.
        """
        for measure, most in (self.limits if limits is None else limits).items():
            more = tokens if measure == "tokens" else requests
            place = MEASURES.index(measure)
            found = self.counts.limit(f"{self.name}_{measure}", place, self.member(flow), more, most, now)
            if found.reset_s:
                return found
        return None

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        """Return counts and limits by name. Changes nothing."""
        numbers: dict[str, float] = {}
        for measure, done in zip(MEASURES, self.counts.sums(self.member(flow), now), strict=False):
            if measure in self.limits:
                numbers[f"{self.name}_{measure}"] = done
                numbers[f"{self.name}_{measure}_limit"] = self.limits[measure]
        return numbers


class Throttle:
    """Limits of users and apps at the start of interactions, and the counts against them."""

    def __init__(self, settings: ThrottleSettings, *, members_max: int = 200_000) -> None:
        window_s = settings.window_s
        self._user = _ThrottleScope("user", lambda flow: (flow.tenant, flow.user), settings.user, window_s, members_max)
        self._app_user = _ThrottleScope("app_user", lambda flow: flow, settings.app_user, window_s, members_max)
        self._app = _ThrottleScope("app", lambda flow: flow[:2], settings.app, window_s, members_max)
        self._levels = self._user, self._app_user, self._app

    @property
    def counts(self) -> dict[str, SlidingCounts]:
        """Counts by the name of their level in the plural."""
        return {f"{level.name}s": level.counts for level in self._levels}

    def find_rejection(self, request: Request, now: float, pressure: Pressure) -> Rejection | None:
        """Return why this request is rejected, and when it may come back; None if it may be queued. Counts nothing."""
        if not pressure.overloaded or request.progress.inside:
            return None
        flow, tokens = request.flow, request.prompt_tokens
        for level in self._levels:
            found = level.exceeded(flow, 1, tokens, now)
            if found is None or (level is self._app and self._has_part_left(flow, tokens, now)):
                continue
            reason = RejectReason.OVER_APP_LIMIT if level is self._app else RejectReason.OVER_USER_LIMIT
            return Rejection(reason, max(1.0, found.reset_s), found)
        return None

    def _has_part_left(self, flow: Flow, tokens: int, now: float) -> bool:
        """Return whether the user stays within an equal part of its app's limits."""
        users = max(1, self._users(flow))
        part = {measure: most / users for measure, most in self._app.limits.items()}
        return self._app_user.exceeded(flow, 1, tokens, now, part) is None

    def count(self, request: Request, now: float) -> bool:
        """Count a queued request. Return whether it is inside an interaction and its user is beyond a limit."""
        flow, is_inside = request.flow, request.progress.inside
        for level in self._levels:
            level.counts.at(now)
        last = self._app_user.counts.last(flow)
        is_new = last is None or last // PARTS != self._app_user.counts.bucket // PARTS
        for level in self._levels:
            amounts = (int(not is_inside), 1, request.prompt_tokens, int(level is self._app and is_new))
            level.counts.add(level.member(flow), amounts)
        return is_inside and self.is_beyond(request, now)

    def _users(self, flow: Flow) -> int:
        """Return how many users the app has had in the present stretch of `PARTS` buckets or the one before it.

        The larger number of the two.
        """
        counts = self._app.counts
        begin = counts.bucket // PARTS * PARTS
        stretches = range(counts.oldest, begin), range(begin, counts.bucket + 1)
        return max([sum([counts.measures(flow[:2], bucket)[3] for bucket in stretch]) for stretch in stretches])

    def is_beyond(self, request: Request, now: float) -> bool:
        """Return whether the user is beyond a limit, in total or in this app, whatever the pressure."""
        return any([level.exceeded(request.flow, 0, 0, now) for level in (self._user, self._app_user)])

    def settle(self, request: Request, service: ServiceTokens, now: float) -> None:
        """Count the tokens of an ended request beyond its estimated prompt, which stays counted in any case."""
        tokens = service.prompt + service.output - request.prompt_tokens
        if tokens > 0:
            for level in self._levels:
                level.counts.at(now)
                level.counts.add(level.member(request.flow), (0, 0, tokens, 0))

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        """Return counts and limits of the flow's user, of the user in this app, and of the app."""
        return {name: number for one in self._levels for name, number in one.explain(flow, now).items()}

    def take_over(self, before: Throttle) -> None:
        """Take over the counts of another throttle whose window is equally long."""
        for level, other in zip(self._levels, before._levels, strict=True):
            if other.counts.window.longest_s == level.counts.window.longest_s:
                level.counts = other.counts
