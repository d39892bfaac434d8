"""Which starts are refused now? Overload- and interaction-driven throttling (OIT; FairServe, section 4.2).

Requests are refused only while the KV cache is overloaded, only at the start of an interaction, and only beyond a limit
of their user or app. Only admitted requests count, so a client that keeps trying is not locked out by its attempts.

If an app is beyond its limit, only those of its users are refused that have more than an equal part of it. One user
cannot use up what the others may have. Users are what the tenant says they are. A tenant that names a new user for each
request leaves each of them almost no part.

A learned limit is a guess, and a refusal by it must serve somebody. So it refuses nobody whose tenant is alone in the
pool, and nobody whose tenant's waiting requests will be served within `patience_s`, at the rate at which they are
dispatched, or at a rate that is not known: a flood waits behind itself, since the order gives everybody else their fair
share. A client that is refused comes back when the wait has shrunk to `patience_s`, which is before a queue would have
served it, and gets in whatever the wait is by that time. A limit that is configured as a number always applies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final

from policies.limits.ceilings import Auto, Ceiling, Ceilings, Percentile, ThrottleSettings
from policies.limits.sliding_counts import MEASURES, NO_COUNT, Count, SlidingCounts
from policies.plain_data import fields, rows
from policies.request import Flow, Limit, Pressure, Refusal, Refused, Request, ServiceTokens

__all__ = ["Throttle"]

TOKENS: Final = 2
POPULATIONS_MAX: Final = 4096
HEARD_ALL, HEARD_OF = 256, 8
"""The first HEARD_ALL counts of a population are all learned from; after that one in HEARD_OF is enough."""
RETRY_S_MAX: Final = 60.0
NEVER: Final = (float("-inf"), float("-inf"))
EARLY_S: Final = 0.1
LATE_S: Final = 2.0
SPREAD: Final = 0.1
"""A refused client may come back that much too early or too late, and later still by this part of its wait."""

Population = tuple[str, str]


def _everybody(user: tuple[str, str]) -> Population:
    return "", ""


def _users_of_app(flow: Flow) -> Population:
    return "", flow.app


def _itself(app: tuple[str, str]) -> Population:
    return app


class _History:
    """What do the members of one population usually do in a window, per weight, and which limits follow from it?"""

    __slots__ = ("_ceilings", "completed", "limits", "numbers", "usual")

    def __init__(self, ceilings: tuple[Ceiling, ...]) -> None:
        self._ceilings = ceilings
        self.numbers = [float(one) if isinstance(one, int) else float("inf") for one in ceilings]
        """The configured limits; infinite where the limit is learned or absent."""
        self.usual = [Percentile(one.percentile if isinstance(one, Auto) else 0.5) for one in ceilings]
        self.completed = 0
        self.limits = self._learned()
        """Limits of starts, requests and tokens at weight 1; infinite where there is none."""

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
        """For each measure, its percentile and how many values it was learned from."""
        values: list[Any] = []  # mypyc would turn the counts in a list of floats into floats
        for one in self.usual:
            values += [one.value]
            values += [one.seen]
        return values

    def restore(self, values: list[Any]) -> None:
        """For each measure, its percentile and how many values it was learned from, as in a snapshot."""
        for one, value, seen in zip(self.usual, values[::2], values[1::2], strict=True):
            one.value, one.seen = value, seen
        self.limits = self._learned()

    def at_weight(self, weight: float) -> list[float]:
        """The limits of a member of this weight. Learned limits are multiplied by the weight."""
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
    """One of three levels (users, an app's users, apps): the counts of its members, what is usual, and the limits.

    Args:
        population: the population to which a member belongs.
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
        self._populations_max = min(POPULATIONS_MAX, max(1, members_max // 16))

    def history(self, member: Hashable) -> _History:
        """What is usual in its population."""
        population = self._population(member)
        history = self.histories.get(population)
        if history is None:
            history = self.histories[population] = _History(self._ceilings)
            self.forget_beyond()
        return history

    def forget_beyond(self) -> None:
        """Forget the populations that were learned first, beyond the allowed number."""
        while len(self.histories) > self._populations_max:
            self.histories.popitem(last=False)

    def is_learned(self, measure: int) -> bool:
        """Is its limit of this measure learned?"""
        return isinstance(self._ceilings[measure], Auto)

    def limit(self, measure: int, limit: float, member: Hashable, request: Request, now: float) -> Limit:
        """How much of this limit is used by the member whose request is beyond it?"""
        more = request.prompt_tokens if measure == TOKENS else 1
        return self.counts.limit(f"{self.name}_{MEASURES[measure]}", MEASURES[measure], member, more, limit, now)

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
    """What the user, the user in this app, and the app of one flow did, and what is usual for each."""

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
        self._user = _Level("user", settings.user, settings, _everybody, members_max)
        self._app_user = _Level("app_user", settings.app_user, settings, _users_of_app, members_max)
        self._app = _Level("app", settings.app, settings, _itself, members_max)
        self._levels = {"users": self._user, "app_users": self._app_user, "apps": self._app}
        self.counts = {name: level.counts for name, level in self._levels.items()}
        """By level: what each member did within the window."""
        self._window_s = settings.window_s
        self._patience_s = settings.patience_s
        self._members_max = members_max
        self._began_s = self._ends_s = float("-inf")
        self._returns: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By tenant: when its refused clients may return, from and until. The oldest refusal first."""
        self._members: dict[Flow, _Member] = {}
        """By flow, for every flow of this period: a request then needs one look-up instead of six."""

    def __len__(self) -> int:
        """Members in memory."""
        return sum(len(level.counts) for level in self._levels.values())

    def refusal(self, request: Request, now: float, pressure: Pressure) -> Refused | None:
        """Is this request refused? None: it may be queued. Counts nothing."""
        if not pressure.overloaded or request.progress.inside:
            return None
        member = self._member(request, now)
        left, weight, tokens = (self._ends_s - now) / self._window_s, request.weight, request.prompt_tokens
        kept = self._waits(request.flow.tenant, now, pressure)
        limits = member.usual_user.numbers if kept else member.usual_user.at_weight(weight)
        measure = _exceeded(member.user, limits, 1, tokens, left)
        flow = request.flow
        if measure is not None:
            user = flow.tenant, flow.user
            return self._refused(self._user, measure, limits[measure], user, request, now, pressure)
        limits = member.usual_app_user.numbers if kept else member.usual_app_user.at_weight(weight)
        measure = _exceeded(member.app_user, limits, 1, tokens, left)
        if measure is not None:
            return self._refused(self._app_user, measure, limits[measure], flow, request, now, pressure)
        limits = member.usual_app.numbers if kept else member.usual_app.at_weight(weight)
        measure = _exceeded(member.app, limits, 1, tokens, left)
        if measure is None:
            return None
        part = [limit / max(1, self._app.counts.members(flow[:2])) for limit in limits]
        if _exceeded(member.app_user, part, 1, tokens, left) is None:
            return None
        return self._refused(self._app, measure, limits[measure], flow[:2], request, now, pressure)

    def _waits(self, tenant: str, now: float, pressure: Pressure) -> bool:
        """Do its requests wait, whatever the learned limits are?"""
        if pressure.wait_s is None or pressure.wait_s <= self._patience_s or not pressure.under_way:
            return True
        since_s, until_s = self._returns.get(tenant, NEVER)
        return since_s - EARLY_S <= now <= until_s

    def _refused(
        self,
        level: _Level,
        measure: int,
        limit: float,
        member: Hashable,
        request: Request,
        now: float,
        pressure: Pressure,
    ) -> Refused:
        """The refusal of a request beyond this limit, with the time after which it may come back."""
        found = level.limit(measure, limit, member, request, now)
        if level.is_learned(measure) and pressure.wait_s is not None:
            retry_s = self._return_s(request.flow.tenant, now, pressure.wait_s - self._patience_s)
        else:
            retry_s = min(RETRY_S_MAX, max(1.0, pressure.drain_s, found.reset_s))
        reason = Refusal.OVER_APP_LIMIT if level is self._app else Refusal.OVER_USER_LIMIT
        return Refused(reason, retry_s, found)

    def _return_s(self, tenant: str, now: float, wait_s: float) -> float:
        """In how many seconds may this tenant's refused client return? All of them return at about the same time:
        `wait_s` after the first refusal.
        """
        since_s, until_s = self._returns.get(tenant, NEVER)
        if until_s < now:
            wait_s = min(RETRY_S_MAX, max(1.0, wait_s))
            since_s = now + wait_s
            self._returns.pop(tenant, None)
            self._returns[tenant] = since_s, since_s + SPREAD * wait_s + LATE_S
            while next(iter(self._returns.values()))[1] < now:
                self._returns.popitem(last=False)
        return max(1.0, since_s - now)

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
            return self._is_beyond(member, request.weight, now)
        user.starts += 1
        app_user.starts += 1
        app.starts += 1
        return False

    def is_beyond(self, request: Request, now: float) -> bool:
        """Is its user beyond a limit, in total or in this app, whether or not that refuses anything now?"""
        return self._is_beyond(self._member(request, now), request.weight, now)

    def _is_beyond(self, member: _Member, weight: float, now: float) -> bool:
        left = (self._ends_s - now) / self._window_s
        if _exceeded(member.user, member.usual_user.at_weight(weight), 0, 0, left) is not None:
            return True
        return _exceeded(member.app_user, member.usual_app_user.at_weight(weight), 0, 0, left) is not None

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
        """Counts and limits of its user, of its user in this app, and of its app."""
        return {
            **self._user.explain((flow.tenant, flow.user), weight, now),
            **self._app_user.explain(flow, weight, now),
            **self._app.explain(flow[:2], weight, now),
        }

    def resume(self, before: Throttle) -> None:
        """Go on with what another throttle has counted, if that was within the same window."""
        for level, other in zip(self._levels.values(), before._levels.values(), strict=True):
            if other.counts.window_s == level.counts.window_s:
                level.counts = other.counts
        self.counts = {name: level.counts for name, level in self._levels.items()}
        self._returns = before._returns
        self._members.clear()

    def snapshot(self) -> dict[str, object]:
        """What is usual, as plain data: for each population and measure a percentile and how many values it was learned
        from.
        """
        return {name: level.snapshot() for name, level in self._levels.items()}

    def restore(self, learned: object) -> None:
        """Continue from a snapshot. ValueError if it is not valid; then nothing has changed."""
        tables = fields(learned, *self._levels)
        restored = [level.restored(table) for level, table in zip(self._levels.values(), tables, strict=True)]
        for level, histories in zip(self._levels.values(), restored, strict=True):
            level.histories = histories
        self._members.clear()

    def adopt(self, learned: object) -> None:
        """Take over from another gateway's snapshot what it has seen more of. ValueError if it is not valid."""
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
