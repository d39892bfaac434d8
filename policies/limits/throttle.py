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
from typing import Any, Final

from policies.limits.ceilings import Auto, Ceiling, Ceilings, Percentile, ThrottleSettings
from policies.limits.sliding_counts import MEASURES, NO_COUNT, Count, SlidingCounts
from policies.plain_data import fields, rows
from policies.request import Flow, Pressure, Refusal, Refused, Request, ServiceTokens

__all__ = ["KEPT", "Throttle"]

TOKENS: Final = 2
POPULATIONS_MAX: Final = 4096
HEARD_ALL, HEARD_OF = 256, 8
"""Members whose past is heard one by one; after so many of a population one in so many is enough."""
RETRY_S_MAX: Final = 60.0
KEPT: Final = 4
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

    __slots__ = ("_ceilings", "completed", "limits", "numbers", "usual")

    def __init__(self, ceilings: tuple[Ceiling, ...]) -> None:
        self._ceilings = ceilings
        self.numbers = [float(one) if isinstance(one, int) else float("inf") for one in ceilings]
        """The limits that are not learned."""
        self.usual = [Percentile(one.percentile if isinstance(one, Auto) else 0.5) for one in ceilings]
        self.completed = 0
        self.limits = self._learned()
        """Of starts, requests and tokens, at weight 1; infinite where there is none."""

    def learn(self, count: Count) -> None:
        self.completed += 1
        if self.completed > HEARD_ALL and self.completed % HEARD_OF:
            return
        starts, requests, tokens = self.usual
        starts.learn(count.starts / count.weight)
        requests.learn(count.requests / count.weight)
        tokens.learn(count.tokens / count.weight)
        self.limits = self._learned()

    def learned(self) -> list[Any]:
        """Of each measure its percentile and how many were seen."""
        values: list[Any] = []  # a list of floats, compiled, would make floats of the counts
        for one in self.usual:
            values += [one.value]
            values += [one.seen]
        return values

    def restore(self, values: list[Any]) -> None:
        """Of each measure its percentile and how many were seen, as in a snapshot."""
        for one, value, seen in zip(self.usual, values[::2], values[1::2], strict=True):
            one.value, one.seen = value, seen
        self.limits = self._learned()

    def at_weight(self, weight: float) -> list[float]:
        """The limits of one of this weight: what is learned counts per weight."""
        if weight == 1.0:
            return self.limits
        pairs = zip(self.limits, self._ceilings, strict=True)
        return [limit * weight if isinstance(ceiling, Auto) else limit for limit, ceiling in pairs]

    def _learned(self) -> list[float]:
        return [
            one.of(learned) if isinstance(one, Auto) else number
            for one, learned, number in zip(self._ceilings, self.usual, self.numbers, strict=True)
        ]


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
            self.forget_beyond()
        return history

    def forget_beyond(self) -> None:
        """Forget the populations that were learned first, beyond so many."""
        while len(self.histories) > self._populations_max:
            self.histories.popitem(last=False)

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
        more = request.prompt_tokens if measure == TOKENS else 1
        found = self.counts.limit(f"{self.name}_{MEASURES[measure]}", MEASURES[measure], member, more, limit, now)
        return Refused(reason, min(RETRY_S_MAX, max(1.0, pressure.drain_s, found.reset_s)), found)

    def explain(self, member: Hashable, weight: float, now: float) -> dict[str, float]:
        """Counts and limits by name. Changes nothing, not even what is remembered."""
        numbers = {}
        known = self.histories.get(self._population(member)) or _History(self._ceilings)
        counts, limits = self.counts.sliding(member, now), known.at_weight(weight)
        for measure, done, limit in zip(MEASURES, counts, limits, strict=True):
            if limit != float("inf"):
                numbers[f"{self.name}_{measure}"] = done
                numbers[f"{self.name}_{measure}_limit"] = limit
        return numbers

    def snapshot(self) -> list[list[object]]:
        return [[*population, *history.learned()] for population, history in self.histories.items()]

    def restored(self, learned: object) -> OrderedDict[Population, _History]:
        histories: OrderedDict[Population, _History] = OrderedDict()
        for first, second, *values in rows(learned, (str, str, float, int, float, int, float, int)):
            history = histories[(first, second)] = _History(self._ceilings)
            history.restore(values)
        return histories


class _Member:
    """Where one flow stands: what its user, its user in this app, and its app did, and what is usual for such."""

    __slots__ = ("app", "app_user", "user", "usual_app", "usual_app_user", "usual_user")

    def __init__(
        self,
        user: Count,
        app_user: Count,
        app: Count,
        usual_user: _History,
        usual_app_user: _History,
        usual_app: _History,
    ) -> None:
        self.user = user
        self.app_user = app_user
        self.app = app
        self.usual_user = usual_user
        self.usual_app_user = usual_app_user
        self.usual_app = usual_app


def _exceeded(count: Count, limits: list[float], starts: int, tokens: int, left: float) -> int | None:
    """Which measure would be beyond its limit with so many more starts and tokens? Of the past, `left` counts."""
    before = count.before or NO_COUNT
    if count.starts + left * before.starts + starts > limits[0]:
        return 0
    if count.requests + left * before.requests + starts > limits[1]:
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
        self.counts = {name: level.counts for name, level in self._levels.items()}
        """By level: what each member did within the window."""
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
        if not pressure.overloaded or request.progress.inside:
            return None
        member = self._member(request, now)
        left, weight, tokens = (self._ends_s - now) / self._window_s, request.weight, request.prompt_tokens
        kept = waiting < KEPT
        limits = member.usual_user.numbers if kept else member.usual_user.at_weight(weight)
        measure = _exceeded(member.user, limits, 1, tokens, left)
        flow = request.flow
        if measure is not None:
            user = flow.tenant, flow.user
            return self._user.refused(Refusal.OVER_USER_LIMIT, measure, limits[measure], user, request, now, pressure)
        limits = member.usual_app_user.numbers if kept else member.usual_app_user.at_weight(weight)
        measure = _exceeded(member.app_user, limits, 1, tokens, left)
        if measure is not None:
            return self._app_user.refused(
                Refusal.OVER_USER_LIMIT, measure, limits[measure], flow, request, now, pressure
            )
        limits = member.usual_app.numbers if kept else member.usual_app.at_weight(weight)
        measure = _exceeded(member.app, limits, 1, tokens, left)
        if measure is None:
            return None
        part = [limit / max(1, self._app.counts.members(flow[:2])) for limit in limits]
        if _exceeded(member.app_user, part, 1, tokens, left) is None:
            return None
        return self._app.refused(Refusal.OVER_APP_LIMIT, measure, limits[measure], flow[:2], request, now, pressure)

    def count(self, request: Request, now: float) -> bool:
        """It is queued. Is its user now beyond a limit (`is_beyond`)? Looked at inside an interaction only."""
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
            return self._is_beyond(member, request.weight, now)
        user.starts += 1
        app_user.starts += 1
        app.starts += 1
        return False

    def is_beyond(self, request: Request, now: float) -> bool:
        """Is its user beyond a limit, all in all or in this app, whether or not that refuses anything now?"""
        return self._is_beyond(self._member(request, now), request.weight, now)

    def _is_beyond(self, member: _Member, weight: float, now: float) -> bool:
        left = (self._ends_s - now) / self._window_s
        if _exceeded(member.user, member.usual_user.at_weight(weight), 0, 0, left) is not None:
            return True
        return _exceeded(member.app_user, member.usual_app_user.at_weight(weight), 0, 0, left) is not None

    def settle(self, request: Request, service: ServiceTokens, now: float) -> None:
        """It is over, and took this much in all; at least what was expected of its prompt stays counted."""
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
        return {
            **self._user.explain((flow.tenant, flow.user), weight, now),
            **self._app_user.explain(flow, weight, now),
            **self._app.explain(flow[:2], weight, now),
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

    def adopt(self, learned: object) -> None:
        """Take from a snapshot of another gateway what it has seen more of. ValueError if it is none."""
        tables = fields(learned, *self._levels)
        for level, table in zip(self._levels.values(), tables, strict=True):
            for population, theirs in level.restored(table).items():
                own = level.histories.get(population)
                if own is None or own.usual[0].seen < theirs.usual[0].seen:
                    level.histories[population] = theirs
            level.forget_beyond()
        self._members.clear()

    def _at(self, now: float) -> None:
        for level in self._levels.values():
            level.counts.at(now)
        if not self._began_s <= now < self._ends_s or self._ends_s != self._user.counts.ends_s:
            self._members.clear()
            self._ends_s = self._user.counts.ends_s
            self._began_s = self._ends_s - self._window_s
