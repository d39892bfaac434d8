"""Is a tenant, a group around it, a key or a user beyond a limit that holds at any time? The classic rate limits.

These limits are off by default, and hold under every policy. A *member* is anything that has limits. A request counts
for its tenant and each group around it, for its key and its user, and for its model with each of them, as far as these
have limits. Batch counts for the tenant that pays. Interactions make no difference: a request beyond a limit is
rejected in the middle of one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any, Final, NamedTuple

from policies.limits.sliding_counts import NOTHING, Measures, SlidingCounts, Window, rolling
from policies.request import FREE, Limit, Price, Rejection, RejectReason, Request, ServiceTokens, payer
from policies.settings import COUNT_MAX, SettingError, check_bounds, setting

MINUTE_S = 60.0
DAY_S = 86_400.0
MONTH_S = 30 * DAY_S
WINDOWS: Final = {"minute": MINUTE_S, "day": DAY_S, "month": MONTH_S}
GROUP: Final = " "
"""Prefix of the names of groups as members. Names of tenants have no space."""
KEY: Final = "  "
"""Prefix of the hash of a key as a member. A member's use of one model is counted under both names, with a space
between."""
USER: Final = "   "
"""Prefix of users as members (`user_member`)."""
ANYONE: Final = "*"
"""Name for each user of a tenant without limits of its own."""
ENGINE: Final = "engine_ms"
"""Measure of engine-seconds."""
MEASURES: Final = (ENGINE, "requests", "tokens", "cost")
"""Measures counted in each window, in this order."""
_UNITS: Final = {ENGINE: 1000, "cost": 1_000_000}
"""Counts per unit of a limit: milliseconds per second, and millionths of the currency."""


def _limit(doc: str) -> Any:
    return setting(None, doc, kind=int, least=1, most=COUNT_MAX)


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of one tenant, group, key or user. None if unlimited."""

    requests_per_minute: int | None = _limit("Requests in any 60 seconds.")
    tokens_per_minute: int | None = _limit("Prompt and output tokens in any 60 seconds.")
    concurrent: int | None = _limit("Requests queued or running at once.")
    tokens_per_day: int | None = _limit("Tokens in any 24 hours.")
    requests_per_day: int | None = _limit("Requests in any 24 hours.")
    tokens_per_month: int | None = _limit("Tokens in any 30 days.")
    requests_per_month: int | None = _limit("Requests in any 30 days.")
    engine_seconds_per_minute: int | None = _limit(
        "Seconds of requests at engines in any 60 seconds. A request with n answers counts n times."
    )
    engine_seconds_per_day: int | None = _limit("Engine seconds in any 24 hours.")
    engine_seconds_per_month: int | None = _limit("Engine seconds in any 30 days.")
    cost_per_month: int | None = _limit("Money in any 30 days, by usage.prices. A model without a price costs nothing.")

    def __post_init__(self) -> None:
        check_bounds(self)
        for measure in ("requests", "tokens", "engine_seconds"):
            for shorter, longer in combinations([f"{measure}_per_{window}" for window in WINDOWS], 2):
                most, least = getattr(self, longer), getattr(self, shorter) or 0
                if most is not None and most < least:
                    raise SettingError(longer, f"{most} is less than {shorter} ({least}): never reached")


UNLIMITED = Quota()


class Rule(NamedTuple):
    """A limit of a member."""

    name: str
    """Name of the `Limit` that clients see."""
    place: int
    """Index of the measure in `MEASURES`; -1 for concurrent requests."""
    window: int
    """Index of the window in `WINDOWS`; -1 for concurrent requests."""
    most: int
    """Largest count."""
    unit: int
    """Counts per unit of the limit."""


Counted = tuple[tuple[str, ...], tuple[int, int, int]]
"""The members for which a request counts, and its bucket in each of `WINDOWS`."""


class UsageBucket(NamedTuple):
    """A tenant's recorded use of a model in an hour or a day."""

    until_s: float
    """End of the hour or day, by the clock that cuts time into buckets."""
    tenant: str
    model: str
    requests: int
    service: ServiceTokens
    engine_ms: int


def _rules(quota: Quota, member: str = "") -> tuple[Rule, ...]:
    """Return the rules of a quota, one for each configured limit."""
    windows, found = [*WINDOWS], []
    whose = _whose(member)
    for field in fields(quota):
        most = getattr(quota, field.name)
        if most is not None:
            measure, _, window = field.name.partition("_per_")
            name = measure if window == "minute" else field.name
            measure = ENGINE if measure == "engine_seconds" else measure
            place, unit = MEASURES.index(measure) if window else -1, _UNITS.get(measure, 1)
            found.append(Rule(name + whose, place, windows.index(window) if window else -1, most * unit, unit))
    return tuple(found)


def _whose(member: str) -> str:
    """Return the suffix that tells the limits of this member from those of the tenant."""
    name, _, model = member.lstrip().partition(" ")
    if member.startswith(USER):
        return " (user)"
    parts = ["key"] if member.startswith(KEY) else [f"group {name}"] if member.startswith(GROUP) else []
    parts += [f"model {model}"] if model else []
    return f" ({', '.join(parts)})" if parts else ""


def user_member(tenant: str, user: str) -> str:
    """Return the name of a user of a tenant as a member."""
    return f"{USER}{tenant}\0{user}"


class Quotas:
    """The limits of every member, and how much each has used. Several pools may share the object."""

    def __init__(
        self,
        default: Quota = UNLIMITED,
        tenants: Mapping[str, Quota] | None = None,
        around: Mapping[str, Sequence[str]] | None = None,
        of_models: Mapping[str, Quota] | None = None,
        *,
        prices: Mapping[str, Price] | None = None,
        calendar: tuple[Window, Window] | None = None,
        tenants_max: int = 100_000,
    ) -> None:
        """Create counts for these limits.

        Args:
            default: limits of a tenant without limits of its own.
            tenants: limits of other members by name: tenants, groups, keys and users, and models with any of them.
            around: names of the groups around a tenant that have a quota.
            of_models: limits of each model for tenants that have the default.
            prices: prices of models, for limits on cost.
            calendar: days and months; None for any 24 hours and any 30 days.
            tenants_max: members that are counted in a window.
        """
        self._default = _rules(default)
        self._of_models = {model: _rules(quota, f"_ {model}") for model, quota in (of_models or {}).items()}
        self._rules = {name: _rules(quota, name) for name, quota in (tenants or {}).items()}
        self._issued: Mapping[str, tuple[Rule, ...]] = {}
        self._members = {tenant: (tenant, *groups) for tenant, groups in (around or {}).items()}
        self._has_names = bool(of_models) or any([" " in name.removeprefix(GROUP) for name in self._rules])
        self.prices = prices or {}
        windows = rolling(MINUTE_S), *(calendar or (rolling(DAY_S), rolling(MONTH_S)))
        self.windows = tuple([SlidingCounts(each, members_max=tenants_max) for each in windows])
        self.minute, self.day, self.month = self.windows
        self._now = float("-inf")
        self.under_way: dict[str, int] = {}
        """Requests queued and dispatched, by member."""
        self.under_way_elsewhere: Mapping[str, int] = {}
        """Requests queued and dispatched at other gateways, by member."""
        self.may_have: Callable[[str, Measures], bool] | None = None
        """Function that tells whether a member may have further amounts, while other gateways count these limits but
        cannot be reached; None otherwise."""

    @property
    def is_off(self) -> bool:
        """Return whether no member has a limit."""
        return not (self._default or any([any(each.values()) for each in (self._of_models, self._rules, self._issued)]))

    def counted(self, tenants: Iterable[str]) -> int:
        """Return how many members are counted if all of these tenants ask for all models that are limited."""
        names = {*tenants}
        return 0 if self.is_off else len(names | self._rules.keys()) + len(self._of_models) * len(names)

    @property
    def longest(self) -> SlidingCounts:
        """Counts of the longest window in which any member has a limit: a day at least."""
        sets = (self._default, *self._of_models.values(), *self._rules.values(), *self._issued.values())
        return self.windows[max([rule.window for rules in sets for rule in rules] + [1])]

    def set(self, other: Quotas) -> None:
        """Replace the configured limits by the other's. Limits of issued keys and all counts stay."""
        self._default, self._rules, self._members = other._default, other._rules, other._members
        self._of_models, self._has_names = other._of_models, other._has_names

    def set_issued(self, quotas: Mapping[str, Quota]) -> None:
        """Replace the quotas of issued keys, by member name. Quotas of keys override configured quotas."""
        self._issued = {name: _rules(quota, name) for name, quota in quotas.items()}

    def members(self, leaf: str, names: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the members for which a request counts: the tenant that pays, the groups around it, then `names`."""
        tenant = payer(leaf)
        own = self._members.get(tenant) or (tenant,)
        return own + names if names else own

    def names(self, tenant: str, key: str, model: str, user: str = "") -> tuple[str, ...]:
        """Return the further members with limits for which a request counts: its key, its user, its model with each.

        `key`: hash under which the key counts. `user`: "" if not known.
        """
        if not self._has_names and not self._issued:
            return ()
        nodes = (KEY + key, *self.members(tenant))
        own = (nodes[0], user_member(tenant, user)) if user else nodes[:1]
        return tuple([name for name in (*own, *[f"{node} {model}" for node in nodes]) if self.rules(name)])

    def rules(self, member: str) -> tuple[Rule, ...]:
        """Return the limits of a member."""
        found = self._issued.get(member) or self._rules.get(member)
        if found is not None:
            return found
        if member.startswith(USER):
            return self._rules.get(user_member(member.removeprefix(USER).partition("\0")[0], ANYONE), ())
        tenant, _, model = member.partition(" ")
        if not tenant or tenant in self._rules:
            return ()
        return self._of_models.get(model, ()) if model else self._default

    def find_rejection(self, request: Request, now: float, *, is_counted: bool = False) -> Rejection | None:
        """Return why this request is rejected; None if no member for which it counts is beyond a limit with it.

        `is_counted`: the counts include the request already.
        """
        more = NOTHING if is_counted else wanted(request)
        self.at(now)
        members = self.members(request.flow.tenant, request.quota_names)
        limits = self._standing(members, more, now)
        for limit in limits:
            if limit.reset_s:
                return Rejection(RejectReason.RATE_LIMITED, max(1.0, limit.reset_s), limit)
        if limits and self.may_have is not None:
            for member in members:
                if not self.may_have(member, more):
                    return Rejection(RejectReason.RATE_LIMITED, 1.0, min(limits, key=lambda limit: limit.remaining))
        return None

    def admitted(self, request: Request, now: float) -> None:
        """Count a queued request."""
        self.at(now)
        members = self.members(request.flow.tenant, request.quota_names)
        for member in members:
            self.under_way[member] = self.under_way.get(member, 0) + 1
        request.progress.counted = counted = members, self._buckets()
        self._add(counted, amounts(request))

    def ended(self, request: Request, service: ServiceTokens, now: float, ran_s: float = 0.0) -> None:
        """Correct the counts of a request that ended, in whatever way, after `ran_s` at its engine.

        Use beyond the estimate counts now. Unused amounts are taken back from the buckets in which they were counted:
        otherwise the limits of a later bucket would admit as much more.
        """
        members, buckets = self._left(request, now)
        _, _, tokens, cost = amounts(request)
        tokens, cost = service.prompt + service.output - tokens, request.price.cost(service) - cost
        if tokens < 0 or cost < 0:
            self._add((members, buckets), (0, 0, min(tokens, 0), min(cost, 0)))
        engine_ms = int(ran_s * request.sequences * 1000)
        self._add((members, self._buckets()), (engine_ms, 0, max(tokens, 0), max(cost, 0)))

    def withdrawn(self, request: Request, now: float) -> None:
        """Undo the count of a request that is not served."""
        _, requests, tokens, cost = amounts(request)
        self._add(self._left(request, now), (0, -requests, -tokens, -cost))

    def _left(self, request: Request, now: float) -> Counted:
        """End a request's time under way. Return where it was counted, even if its tenant has changed groups since."""
        self.at(now)
        counted: Counted = request.progress.counted
        request.progress.counted = None
        for member in counted[0]:
            under_way = self.under_way[member] - 1
            if under_way:
                self.under_way[member] = under_way
            else:
                del self.under_way[member]
        return counted

    def standing(self, leaf: str, now: float, names: tuple[str, ...] = ()) -> list[Limit]:
        """Return every limit of a tenant node's tenant, of the groups around it and of `names`, with what is left."""
        return self._standing(self.members(leaf, names), (1, 1, 1, 1), now)

    def used(self, leaf: str, now: float) -> dict[str, float]:
        """Return the used fraction of each limit of a tenant node's tenant and of the groups around it, by name."""
        used: dict[str, float] = {}
        for member in self.members(leaf):
            for name, place, window, most, _ in self.rules(member):
                counted = self.windows[window].sums(member, now)[place] if window >= 0 else self._at_once(member)
                used[name] = counted / most
        return used

    def of_past(self, used: Iterable[UsageBucket]) -> Iterator[tuple[int, str, int, Measures]]:
        """Yield window, member, bucket and amounts of earlier use, as if all was used at the end of its hour or day."""
        for until_s, tenant, model, requests, service, engine_ms in used:
            amounts = engine_ms, requests, service.prompt + service.output, self.price(model).cost(service)
            for window, counts in enumerate(self.windows[1:], 1):
                bucket = min(counts.bucket, counts.window.bucket(until_s - 1.0))
                if bucket >= counts.oldest:
                    for member in self.members(tenant, self.names(tenant, "", model)):
                        yield window, member, bucket, amounts

    def go_on(self, used: Iterable[UsageBucket], now: float) -> None:
        """Continue the counts of a day and a month from the recorded use of gateways that have ended."""
        self.at(now)
        for window, member, bucket, amounts in self.of_past(used):
            self.windows[window].add(member, amounts, bucket, reports=False)

    def price(self, model: str) -> Price:
        """Return the price of a model; `FREE` if it has none."""
        return self.prices.get(model, FREE)

    def at(self, now: float) -> None:
        """Move to this time."""
        if now != self._now:
            self._now = now
            for counts in self.windows:
                counts.at(now)

    def _buckets(self) -> tuple[int, int, int]:
        return self.minute.bucket, self.day.bucket, self.month.bucket

    def _add(self, counted: Counted, more: Measures) -> None:
        """Add measures to the counts of these members, in all windows."""
        members, buckets = counted
        for member in members:
            limited = {rule.window for rule in self.rules(member)} if self.minute.pending is not None else ()
            for window, bucket in enumerate(buckets):
                self.windows[window].add(member, more, bucket, reports=window in limited)

    def _at_once(self, member: str) -> int:
        """Return the requests queued or dispatched, here and at other gateways."""
        return self.under_way.get(member, 0) + self.under_way_elsewhere.get(member, 0)

    def _standing(self, members: Sequence[str], more: Measures, now: float) -> list[Limit]:
        limits = []
        for member in members:
            for name, place, window, most, unit in self.rules(member):
                if window >= 0:
                    limit = self.windows[window].limit(name, place, member, more[place], most, now)
                    limits.append(limit._replace(limit=most // unit, remaining=limit.remaining // unit))
                else:
                    left = most - self._at_once(member)
                    limits.append(Limit(name, most, max(0, left), 0.0 if left >= more[1] else 1.0))
        return limits


def wanted(request: Request) -> Measures:
    """Return the amounts that must be left of each limit when a request comes."""
    _, requests, tokens, cost = amounts(request)
    return 1, requests, max(1, tokens), max(1, cost)


def amounts(request: Request) -> Measures:
    """Return the amounts that a request counts when it comes: 1 request, its prompt tokens, and their cost."""
    prompt = ServiceTokens(request.prompt_tokens, 0)
    return 0, 1, request.prompt_tokens, request.price.cost(prompt)
