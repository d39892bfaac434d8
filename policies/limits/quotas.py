"""Is a tenant, a group around it, or a key beyond a limit that holds at any time? These are the classic rate limits.

They are off by default, and hold under every policy. A request counts for its tenant, for its key and each group around
the tenant that has a limit, and for its model with each of them that limits the model. Work that can wait counts for
the tenant that pays. Interactions are not looked at: a request beyond a limit is refused in the middle of one too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any, Final, NamedTuple

from policies.limits.sliding_counts import Count, SlidingCounts
from policies.request import Limit, Refusal, Refused, Request, payer
from policies.settings import COUNT_MAX, Contradiction, check_bounds, setting

MINUTE_S = 60.0
DAY_S = 86_400.0
MONTH_S = 30 * DAY_S
WINDOWS: Final = {"minute": MINUTE_S, "day": DAY_S, "month": MONTH_S}
GROUP: Final = " "
"""Begins the name under which a group is counted. Names of tenants have no space."""
KEY: Final = "  "
"""The same of a key, before its hash. What each of them may have of one model is counted under both names, with a space
between."""
ENGINE: Final = "engine_ms"
"""The measure of engine-seconds."""


def _limit(doc: str) -> Any:
    return setting(None, doc, kind=int, least=1, most=COUNT_MAX)


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant, or one group, may have. None: no limit."""

    requests_per_minute: int | None = _limit("Requests in any 60 seconds.")
    tokens_per_minute: int | None = _limit("Tokens in any 60 seconds, prompt and output.")
    concurrent: int | None = _limit("Requests queued or running at once.")
    tokens_per_day: int | None = _limit("Tokens in any 24 hours, prompt and output. At least tokens_per_minute.")
    requests_per_day: int | None = _limit("Requests in any 24 hours. At least requests_per_minute.")
    tokens_per_month: int | None = _limit("Tokens in any 30 days, prompt and output. At least tokens_per_day.")
    requests_per_month: int | None = _limit("Requests in any 30 days. At least requests_per_day.")
    engine_seconds_per_minute: int | None = _limit(
        "Seconds that requests ran at engines, in any 60 seconds. A request with n answers counts n times."
    )
    engine_seconds_per_day: int | None = _limit("The same in any 24 hours. At least engine_seconds_per_minute.")
    engine_seconds_per_month: int | None = _limit("The same in any 30 days. At least engine_seconds_per_day.")

    def __post_init__(self) -> None:
        check_bounds(self)
        for measure in ("requests", "tokens", "engine_seconds"):
            for shorter, longer in combinations([f"{measure}_per_{window}" for window in WINDOWS], 2):
                most, least = getattr(self, longer), getattr(self, shorter) or 0
                if most is not None and most < least:
                    raise Contradiction(longer, f"{most} is less than {shorter} ({least}): never reached")


UNLIMITED = Quota()


class Rule(NamedTuple):
    """One limit of a tenant or a group."""

    name: str
    """As its `Limit` is called."""
    measure: str
    """"requests", "tokens", `ENGINE` or "concurrent"."""
    window: int
    """Its place in `WINDOWS`; -1: it holds at once."""
    most: int
    """Of `ENGINE` in milliseconds."""


Counted = list[tuple[str, tuple[Count, Count, Count]]]
"""The tenant and the groups for which a request counts, each with its counts by `WINDOWS`."""


def _rules(quota: Quota, member: str = "") -> tuple[Rule, ...]:
    windows, found = [*WINDOWS], []
    whose = _whose(member)
    for field in fields(quota):
        most = getattr(quota, field.name)
        if most is not None:
            measure, _, window = field.name.partition("_per_")
            name = measure if window == "minute" else field.name
            if measure == "engine_seconds":
                measure, most = ENGINE, most * 1000
            found.append(Rule(name + whose, measure, windows.index(window) if window else -1, most))
    return tuple(found)


def _whose(member: str) -> str:
    """How people tell its limits from those of the tenant."""
    name, _, model = member.lstrip().partition(" ")
    parts = ["key"] if member.startswith(KEY) else [f"group {name}"] if member.startswith(GROUP) else []
    parts += [f"model {model}"] if model else []
    return f" ({', '.join(parts)})" if parts else ""


class Quotas:
    """The limits of every tenant, and how much each has used. One object may serve several pools."""

    def __init__(
        self,
        default: Quota = UNLIMITED,
        tenants: Mapping[str, Quota] | None = None,
        around: Mapping[str, Sequence[str]] | None = None,
        of_models: Mapping[str, Quota] | None = None,
        *,
        tenants_max: int = 100_000,
    ) -> None:
        """
        Attributes:
            tenants: limits of tenants that do not have the default, of groups and keys, whose names begin with `GROUP`
                and `KEY`, and of models with any of them.
            around: of a tenant the groups around it that have a quota, by these names.
            of_models: limits of each model for tenants that have the default.
            tenants_max: tenants and groups that are counted in a window.
        """
        self._default = _rules(default)
        self._of_models = {model: _rules(quota, f"_ {model}") for model, quota in (of_models or {}).items()}
        self._rules = {name: _rules(quota, name) for name, quota in (tenants or {}).items()}
        self._issued: Mapping[str, tuple[Rule, ...]] = {}
        self._members = {tenant: (tenant, *groups) for tenant, groups in (around or {}).items()}
        self._has_names = bool(of_models) or any([" " in name.removeprefix(GROUP) for name in self._rules])
        self.minute = SlidingCounts(MINUTE_S, members_max=tenants_max)
        self.day = SlidingCounts(DAY_S, members_max=tenants_max)
        self.month = SlidingCounts(MONTH_S, members_max=tenants_max)
        self.windows = (self.minute, self.day, self.month)
        self._now = float("-inf")
        self.under_way: dict[str, int] = {}
        """By tenant or group: requests queued and dispatched."""
        self.under_way_elsewhere: Mapping[str, int] = {}
        """The same at other gateways."""
        self.may_have: Callable[[str, int, int], bool] | None = None
        """May this tenant or group have this many more requests and tokens? Set while other gateways count the same
        limits but cannot be asked. None: there are none, or they can be asked."""

    @property
    def is_off(self) -> bool:
        """Has nobody a limit?"""
        return not (self._default or any([any(each.values()) for each in (self._of_models, self._rules, self._issued)]))

    @property
    def longest_s(self) -> float:
        """The longest window in which anybody has a limit."""
        sets = (self._default, *self._of_models.values(), *self._rules.values(), *self._issued.values())
        last = max([rule.window for rules in sets for rule in rules], default=-1)
        return self.windows[last].window_s if last >= 0 else 0.0

    def set(self, other: Quotas) -> None:
        """From now on the limits are the other's, beside what is issued. What was counted counts on."""
        self._default, self._rules, self._members = other._default, other._rules, other._members
        self._of_models, self._has_names = other._of_models, other._has_names

    def issue(self, quotas: Mapping[str, Quota]) -> None:
        """From now on these limits of keys hold beside what is configured, by names as `tenants` has them."""
        self._issued = {name: _rules(quota, name) for name, quota in quotas.items()}

    def members(self, leaf: str, names: tuple[str, ...] = ()) -> tuple[str, ...]:
        """For whom does a request of this leaf count? The tenant that pays comes first, then the groups around it, then
        its further `names`."""
        tenant = payer(leaf)
        own = self._members.get(tenant) or (tenant,)
        return own + names if names else own

    def names(self, tenant: str, key: str, model: str) -> tuple[str, ...]:
        """Under which further names does a request count, with a key that counts as this one, for this model?"""
        if not self._has_names and not self._issued:
            return ()
        nodes = (KEY + key, *self.members(tenant))
        return tuple([name for name in (nodes[0], *[f"{node} {model}" for node in nodes]) if self.rules(name)])

    def rules(self, member: str) -> tuple[Rule, ...]:
        """The limits of a tenant, a group or a key, or of a model with one of them."""
        found = self._issued.get(member) or self._rules.get(member)
        if found is not None:
            return found
        tenant, _, model = member.partition(" ")
        if not tenant or tenant in self._rules:
            return ()
        return self._of_models.get(model, ()) if model else self._default

    def refusal(self, request: Request, now: float) -> Refused | None:
        """Is its tenant, or a group around it, beyond a limit? None: they are not."""
        return self._refusal(request, request.prompt_tokens, 1, now)

    def _refusal(self, request: Request, tokens: int, requests: int, now: float) -> Refused | None:
        """Would one of them be beyond a limit with this many more tokens and requests? None: none would."""
        self._move(now)
        members = self.members(request.flow.tenant, request.quota_names)
        limits = self._standing(members, tokens, now, requests)
        for limit in limits:
            if limit.reset_s:
                return Refused(Refusal.RATE_LIMITED, max(1.0, limit.reset_s), limit)
        if limits and self.may_have is not None:
            for member in members:
                if not self.may_have(member, requests, tokens):
                    return Refused(Refusal.RATE_LIMITED, 1.0, min(limits, key=lambda limit: limit.remaining))
        return None

    def admitted(self, request: Request, now: float) -> None:
        """The request was queued."""
        self._move(now)
        counted: Counted = []
        for member in self.members(request.flow.tenant, request.quota_names):
            self.under_way[member] = self.under_way.get(member, 0) + 1
            counted.append((member, self._counts(member)))
        request.progress.counted = counted
        self._add(counted, 1, request.prompt_tokens)

    def ended(self, request: Request, tokens: int, now: float, ran_s: float = 0.0) -> None:
        """The request ended, in whatever way, took this many tokens, and ran for so long at its engine.

        Tokens beyond the estimate count now. What was counted and not taken is taken back from the periods in which it
        was counted: else the limits of a later period would let through as much more.
        """
        counted = self._left(request, now)
        more = tokens - request.prompt_tokens
        if more < 0:
            self._add(counted, 0, more)
        counted = [(member, self._counts(member)) for member, _ in counted]
        self._add(counted, 0, max(more, 0), int(ran_s * request.sequences * 1000))

    def withdrawn(self, request: Request, now: float) -> None:
        """The request was counted, but is not served: undo the count."""
        self._add(self._left(request, now), -1, -request.prompt_tokens)

    def _left(self, request: Request, now: float) -> Counted:
        """The request is under way no longer. Returns what it was added to, also where its tenant has moved since."""
        self._move(now)
        counted: Counted = request.progress.counted
        request.progress.counted = None
        for member, _ in counted:
            under_way = self.under_way[member] - 1
            if under_way:
                self.under_way[member] = under_way
            else:
                del self.under_way[member]
        return counted

    def standing(self, leaf: str, now: float, names: tuple[str, ...] = ()) -> list[Limit]:
        """Every limit of this leaf's tenant, of the groups around it and under these `names`, and how much is used."""
        return self._standing(self.members(leaf, names), 1, now)

    def overrun(self, request: Request, now: float) -> Refused | None:
        """Is its tenant, or a group around it, beyond a limit, now that this request has been counted?"""
        return self._refusal(request, 0, 0, now)

    def go_on(
        self, since_s: float, tenant: str, model: str, requests: int, tokens: int, engine_ms: int, now: float
    ) -> None:
        """What a tenant used of a model in the hour or the day since then, as a gateway wrote it that has ended."""
        for counts in (self.day, self.month):
            counts.at(now)
            ago = counts.period - int(since_s // counts.window_s)
            if ago not in (0, 1):
                continue
            for member in self.members(tenant, self.names(tenant, "", model)):
                count = counts.of(member)
                if ago:
                    if count.before is None:
                        count.before = Count(None, count.period - 1)
                    count = count.before
                count.requests += requests
                count.tokens += tokens
                count.engine_ms += engine_ms

    def _move(self, now: float) -> None:
        if now != self._now:
            self._now = now
            self.minute.at(now)
            self.day.at(now)
            self.month.at(now)

    def _counts(self, member: str) -> tuple[Count, Count, Count]:
        return self.minute.of(member), self.day.of(member), self.month.of(member)

    def _add(self, counted: Counted, requests: int, tokens: int, engine_ms: int = 0) -> None:
        for member, by_window in counted:
            for count in by_window:
                count.requests += requests
                count.tokens += tokens
                count.engine_ms += engine_ms
            if self.minute.changed is not None:
                for window in {rule.window for rule in self.rules(member) if rule.window >= 0}:
                    self.windows[window].note_change(member, by_window[window])

    def _standing(self, members: Sequence[str], tokens: int, now: float, requests: int = 1) -> list[Limit]:
        limits = []
        for member in members:
            for name, measure, window, most in self.rules(member):
                if window >= 0:
                    more = tokens if measure == "tokens" else requests
                    limit = self.windows[window].limit(name, measure, member, more, most, now)
                    if measure == ENGINE:
                        limit = limit._replace(limit=most // 1000, remaining=limit.remaining // 1000)
                    limits.append(limit)
                else:
                    left = most - self.under_way.get(member, 0) - self.under_way_elsewhere.get(member, 0)
                    limits.append(Limit(name, most, max(0, left), 0.0 if left >= requests else 1.0))
        return limits
