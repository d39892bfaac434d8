"""Who may not start anything now? Overload- and interaction-driven throttling (FairServe, section 4.2; OIT).

Only while the KV cache is overloaded, only at the start of an interaction, and only those beyond a limit of their user
or app are refused. What is counted are admitted requests: a client that keeps trying is not kept out by its attempts.

Of an app beyond its limit, only those users are refused that have more than their equal part of it: one of them cannot
use up what the others may have. Users are what the tenant says they are; a tenant that names a new one for each request
leaves each of them no part at all.

A learned limit is a guess, and keeps the queue short; it is not to cost anyone the share that the order gives them, or
whoever evades it would have what those lose who do not. So it refuses nobody whose tenant has less than `KEPT` waiting.
A limit that is a number holds in any case.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from policies.base import Flow, Pressure, Refusal, Refused, Request, ServiceTokens
from policies.learned import fields, rows
from policies.limits import NO_COUNT, Auto, Ceiling, Ceilings, Count, Percentile, SlidingCounts, ThrottleSettings

__all__ = ["KEPT", "Throttle"]

MEASURES = ("starts", "requests", "tokens")
TOKENS = 2
POPULATIONS_MAX = 4096
HEARD_ALL, HEARD_OF = 256, 8
"""Members whose past is heard one by one; after so many of a population one in so many is enough."""
RETRY_S_MAX = 60.0
KEPT = 4
"""Requests of a tenant that may wait whatever limits were learned: enough that it is there when it is next."""

Population = tuple[str, str]


def _everybody(user: tuple[str, str]) -> Population:
    return "", ""


def _users_of_app(flow: Flow) -> Population:
    return "", flow.app


def _itself(app: tuple[str, str]) -> Population:
    return app


class _History:
    """What do the members of one population usually do in a window, per weight, and what are their limits by that?"""

    __slots__ = ("_ceilings", "_limits", "completed", "numbers", "usual")

    def __init__(self, ceilings: tuple[Ceiling, ...]) -> None:
        self._ceilings = ceilings
        self.numbers = [float(one) if isinstance(one, int) else float("inf") for one in ceilings]
        """The limits that are not learned."""
        self.usual = [Percentile(one.percentile if isinstance(one, Auto) else 0.5) for one in ceilings]
        self.completed = 0
        self._limits: list[float] | None = None

    def learn(self, count: Count) -> None:
        self.completed += 1
        if self.completed > HEARD_ALL and self.completed % HEARD_OF:
            return
        starts, requests, tokens = self.usual
        starts.learn(count.starts / count.weight)
        requests.learn(count.requests / count.weight)
        tokens.learn(count.tokens / count.weight)
        self._limits = None

    def limits(self, weight: float) -> list[float]:
        """Of starts, requests and tokens; infinite where there is none. What is learned counts per weight."""
        if self._limits is None:
            self._limits = [
                one.of(learned) if isinstance(one, Auto) else number
                for one, learned, number in zip(self._ceilings, self.usual, self.numbers, strict=True)
            ]
        if weight == 1.0:
            return self._limits
        pairs = zip(self._limits, self._ceilings, strict=True)
        return [limit * weight if isinstance(ceiling, Auto) else limit for limit, ceiling in pairs]


class _Level:
    """Users, an app's users, or apps: what each did, what is usual, what is the limit.

    Args:
        population: of which population is this member?
    """

    def __init__(
        self,
        name: str,
        ceilings: Ceilings,
        settings: ThrottleSettings,
        population: Callable[[Any], Population],
        members_max: int,
    ) -> None:
        self.name = name
        self.counts = SlidingCounts(settings.window_s, members_max=members_max)
        self.histories: OrderedDict[Population, _History] = OrderedDict()
        self._ceilings = (ceilings.starts, ceilings.requests, ceilings.tokens)
        self._population = population
        self._populations_max = min(POPULATIONS_MAX, members_max)

    def history(self, member: Hashable) -> _History:
        """What is usual in its population."""
        population = self._population(member)
        history = self.histories.get(population)
        if history is None:
            history = self.histories[population] = _History(self._ceilings)
            if len(self.histories) > self._populations_max:
                self.histories.popitem(last=False)
        return history

    def refused(
        self,
        reason: Refusal,
        measure: int,
        limit: float,
        member: Hashable,
        request: Request,
        now: float,
        pressure: Pressure,
    ) -> Refused:
        """The refusal of one that is beyond this limit, and when it may come back."""
        self.counts.at(now)
        more = request.prompt_tokens if measure == TOKENS else 1
        found = self.counts.limit(f"{self.name}_{MEASURES[measure]}", MEASURES[measure], member, more, limit)
        return Refused(reason, min(RETRY_S_MAX, max(1.0, pressure.drain_s, found.reset_s)), found)

    def explain(self, member: Hashable, weight: float) -> dict[str, float]:
        """Counts and limits by name."""
        numbers = {}
        counts, limits = self.counts.sliding(member), self.history(member).limits(weight)
        for measure, done, limit in zip(MEASURES, counts, limits, strict=True):
            if limit != float("inf"):
                numbers[f"{self.name}_{measure}"] = done
                numbers[f"{self.name}_{measure}_limit"] = limit
        return numbers

    def snapshot(self) -> list[list[object]]:
        return [
            [*population, *(value for one in history.usual for value in (one.value, one.seen))]
            for population, history in self.histories.items()
        ]

    def restored(self, learned: object) -> OrderedDict[Population, _History]:
        histories: OrderedDict[Population, _History] = OrderedDict()
        for first, second, *values in rows(learned, (str, str, float, int, float, int, float, int)):
            history = histories[(first, second)] = _History(self._ceilings)
            for one, value, seen in zip(history.usual, values[::2], values[1::2], strict=True):
                one.value, one.seen = value, seen
        return histories


class _Member(NamedTuple):
    """Where one flow stands: what its user, its user in this app, and its app did, and what is usual for such."""

    user: Count
    app_user: Count
    app: Count
    usual_user: _History
    usual_app_user: _History
    usual_app: _History


def _exceeded(count: Count, limits: list[float], tokens: int, left: float) -> int | None:
    """Which measure would be beyond its limit with one more start of so many tokens? Of the past, `left` counts."""
    before = count.before or NO_COUNT
    if count.starts + left * before.starts + 1 > limits[0]:
        return 0
    if count.requests + left * before.requests + 1 > limits[1]:
        return 1
    return TOKENS if count.tokens + left * before.tokens + tokens > limits[2] else None


class Throttle:
    """Is this start refused, and until when?"""

    def __init__(self, settings: ThrottleSettings | None = None, *, members_max: int = 200_000) -> None:
        settings = settings or ThrottleSettings()
        self._user = _Level("user", settings.user, settings, _everybody, members_max)
        self._app_user = _Level("app_user", settings.app_user, settings, _users_of_app, members_max)
        self._app = _Level("app", settings.app, settings, _itself, members_max)
        self._levels = {"users": self._user, "app_users": self._app_user, "apps": self._app}
        self._window_s = settings.window_s
        self._members_max = members_max
        self._began_s = self._ends_s = float("-inf")
        self._members: dict[Flow, _Member] = {}
        """Of every flow that was seen in this period, so that a request looks up one thing and not six."""

    def __len__(self) -> int:
        """Members in memory."""
        return sum(len(level.counts) for level in self._levels.values())

    def refusal(self, request: Request, now: float, pressure: Pressure, waiting: int) -> Refused | None:
        """May it not be queued, of whose tenant so many requests wait? None: it may. Counts nothing."""
        if not pressure.overloaded or request.inside:
            return None
        member = self._member(request, now)
        left, weight, tokens = (self._ends_s - now) / self._window_s, request.weight, request.prompt_tokens
        kept = waiting < KEPT
        limits = member.usual_user.numbers if kept else member.usual_user.limits(weight)
        measure = _exceeded(member.user, limits, tokens, left)
        flow = request.flow
        if measure is not None:
            user = flow.tenant, flow.user
            return self._user.refused(Refusal.OVER_USER_LIMIT, measure, limits[measure], user, request, now, pressure)
        limits = member.usual_app_user.numbers if kept else member.usual_app_user.limits(weight)
        measure = _exceeded(member.app_user, limits, tokens, left)
        if measure is not None:
            return self._app_user.refused(
                Refusal.OVER_USER_LIMIT, measure, limits[measure], flow, request, now, pressure
            )
        limits = member.usual_app.numbers if kept else member.usual_app.limits(weight)
        measure = _exceeded(member.app, limits, tokens, left)
        if measure is None:
            return None
        part = [limit / max(1, self._app.counts.members(flow[:2])) for limit in limits]
        if _exceeded(member.app_user, part, tokens, left) is None:
            return None
        return self._app.refused(Refusal.OVER_APP_LIMIT, measure, limits[measure], flow[:2], request, now, pressure)

    def is_beyond(self, request: Request, now: float) -> bool:
        """Is its user beyond a limit, all in all or in this app, whether or not that refuses anything now?"""
        member = self._member(request, now)
        left, weight = (self._ends_s - now) / self._window_s, request.weight
        over_all = _exceeded(member.user, member.usual_user.limits(weight), 0, left)
        return (
            over_all is not None
            or _exceeded(member.app_user, member.usual_app_user.limits(weight), 0, left) is not None
        )

    def count(self, request: Request, now: float) -> None:
        """It is queued."""
        user, app_user, app, *_ = self._member(request, now)
        starts, tokens = not request.inside, request.prompt_tokens
        app.members += not app_user.requests
        for count in (user, app_user, app):
            count.starts += starts
            count.requests += 1
            count.tokens += tokens

    def settle(self, request: Request, service: ServiceTokens, now: float) -> None:
        """It is over, and took this much in all; at least what was expected of its prompt stays counted."""
        tokens = service.prompt + service.output - request.prompt_tokens
        if tokens > 0:
            user, app_user, app, *_ = self._member(request, now)
            user.tokens += tokens
            app_user.tokens += tokens
            app.tokens += tokens

    def _member(self, request: Request, now: float) -> _Member:
        if not self._began_s <= now < self._ends_s:
            self._at(now)
        flow = request.flow
        member = self._members.get(flow)
        if member is None:
            if len(self._members) >= self._members_max:
                self._members.clear()
            user, app, weight = (flow.tenant, flow.user), flow[:2], request.weight
            of_user, of_app_user, of_app = (
                self._user.history(user),
                self._app_user.history(flow),
                self._app.history(app),
            )
            member = self._members[flow] = _Member(
                self._user.counts.of(user, weight, of_user.learn),
                self._app_user.counts.of(flow, weight, of_app_user.learn),
                self._app.counts.of(app, weight, of_app.learn),
                of_user,
                of_app_user,
                of_app,
            )
        return member

    def explain(self, flow: Flow, weight: float, now: float) -> dict[str, float]:
        """Counts and limits of its user, its user in this app, and its app."""
        self._at(now)
        return {
            **self._user.explain((flow.tenant, flow.user), weight),
            **self._app_user.explain(flow, weight),
            **self._app.explain(flow[:2], weight),
        }

    def snapshot(self) -> dict[str, object]:
        """What is usual, as plain data: per population and measure a percentile and how many were seen."""
        return {name: level.snapshot() for name, level in self._levels.items()}

    def restore(self, learned: object) -> None:
        """Go on from a snapshot. ValueError if it is none; then nothing has changed."""
        tables = fields(learned, *self._levels)
        restored = [level.restored(table) for level, table in zip(self._levels.values(), tables, strict=True)]
        for level, histories in zip(self._levels.values(), restored, strict=True):
            level.histories = histories
        self._members.clear()

    def _at(self, now: float) -> None:
        for level in self._levels.values():
            level.counts.at(now)
        if not self._began_s <= now < self._ends_s:
            self._members.clear()
            self._ends_s = self._user.counts.ends_s
            self._began_s = self._ends_s - self._window_s
