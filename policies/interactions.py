"""Which interactions are open, how far has each come, and how many tokens were spent in those that were cut?

An interaction is the calls behind one answer (FairServe, section 2). It is found by the id that its calls claim, or by
a raw prompt that extends an earlier one. It is looked for within one flow only: a client that claims the id of another
client names an interaction of its own. It opens when its first call is admitted, not when a request claims it.

It ends when its client says so, after a final answer unless the client named it, or after `idle_s` without a call.
Beyond its caps it continues, but its calls no longer count as inside it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from policies.limits.ceilings import Auto, Percentile
from policies.plain_data import rows
from policies.request import Caps, Flow, Interaction, Key, Request, ServiceTokens

__all__ = ["InteractionSettings", "Interactions", "Waste"]

CALLS = Auto(floor=30, percentile=0.95, factor=4)
TOKENS = Auto(floor=2_000_000, percentile=0.95, factor=4)
LIFETIME_S = Auto(floor=3600, percentile=0.95, factor=4)
LEARNED_MAX = 10.0
"""A learned cap is at most this many times its floor, whatever its app seems to need."""
EXTENDED_MAX = 256
"""Number of hashes of a raw prompt that are looked up, the longest beginning first."""
LOOKED_AT = 8
"""Interactions checked for idleness at each admission: several times as many as an admission can open."""
TENANTS_MAX = 10_000
APPS_MAX = 4096


@dataclass(frozen=True, slots=True)
class InteractionSettings:
    """When is an interaction over, and how far does its immunity go? "auto": four times what its app usually needs."""

    idle_s: float = 300.0
    calls_max: int | Literal["auto"] = "auto"
    tokens_max: int | Literal["auto"] = "auto"
    lifetime_s_max: float | Literal["auto"] = "auto"
    open_max: int = 1_000_000

    def __post_init__(self) -> None:
        for name in ("idle_s", "calls_max", "tokens_max", "lifetime_s_max", "open_max"):
            value = getattr(self, name)
            if value != "auto" and not value > 0:
                raise ValueError(f"interactions: {name} is {value}; it must be greater than 0")


@dataclass(slots=True)
class Waste:
    """How many interactions were cut, and how many tokens had been spent in them?"""

    interactions: int = 0
    tokens: int = 0


class _Needs:
    """What the interactions of one app take: calls, tokens and time."""

    __slots__ = ("calls", "caps", "lifetime_s", "tokens")

    def __init__(self) -> None:
        self.calls = Percentile(CALLS.percentile)
        self.tokens = Percentile(TOKENS.percentile)
        self.lifetime_s = Percentile(LIFETIME_S.percentile)
        self.caps: Caps | None = None
        """Computed from these; None: to be computed when they are next needed."""


class Interactions:
    """The open interactions of every flow. One table may serve several pools.

    Bounded: at most `open_max`. Beyond that, the tenant with most interactions loses its oldest ones.
    """

    def __init__(self, settings: InteractionSettings | None = None) -> None:
        self.settings = settings or InteractionSettings()
        self.wasted: dict[str, Waste] = {}
        """By tenant. Empty as long as no interaction was cut."""
        self._open: dict[str, dict[Key, Interaction]] = {}
        self._count = 0
        self._to_look_at: deque[Interaction] = deque()
        self._needs: OrderedDict[tuple[str, str], _Needs] = OrderedDict()
        self._unknown = _Needs()
        self.changed: dict[Interaction, None] | None = None
        """Interactions that changed, the oldest change first. The code that tells other gateways takes them out.
        Bounded: the oldest changes are dropped. None: no one takes them."""

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<Interactions: {self._count} open, of {len(self._open)} tenants>"

    # --- events ---

    def arrived(self, request: Request, now: float) -> None:
        """Find the open interaction that this request is a call of. Sets `interaction`, `stage` and `inside`; admits
        nothing.
        """
        claim = request.claim
        if not claim.id and not claim.extends:
            return
        interaction = self._find(request, now)
        if interaction is None:
            return
        request.progress.interaction = interaction
        request.progress.stage = interaction.calls + 1
        if claim.stage is not None and 1 <= claim.stage < request.progress.stage:
            # Parallel calls have the same stage. A client may claim an earlier stage, but none beyond the calls so far.
            request.progress.stage = claim.stage
        calls_max, tokens_max, lifetime_s_max = interaction.caps
        request.progress.inside = (
            interaction.calls < calls_max
            and interaction.tokens < tokens_max
            and now - interaction.began_s < lifetime_s_max
        )

    def admitted(self, request: Request, now: float) -> None:
        """The request is queued: its interaction is open, and busy with it."""
        claim, interaction = request.claim, request.progress.interaction
        if interaction is None:
            if not claim.id and not claim.extends:
                return
            interaction = request.progress.interaction = self._begin(request, now)
        elif not claim.id:
            self._rename(interaction, claim.extends[-1])
        interaction.calls += 1
        interaction.under_way += 1
        interaction.seen_s = now
        self._note_change(interaction)

    def served(self, request: Request, service: ServiceTokens, now: float, awaits_more: bool | None) -> None:
        """A call got its whole answer. `awaits_more`: the answer asks for a tool; None: that is not known."""
        interaction = request.progress.interaction
        if interaction is None:
            return
        claim = request.claim
        if claim.ends or (awaits_more is False and not claim.explicit):
            interaction.over = True
        elif awaits_more:
            interaction.over = False
        self._left(interaction, service, now)

    def broke_off(self, request: Request, service: ServiceTokens, now: float) -> None:
        """A call ended before its answer was complete, or while it waited. It had received this much."""
        if request.progress.interaction is not None:
            self._left(request.progress.interaction, service, now)

    def cut(self, request: Request) -> None:
        """A call was rejected, so what its interaction has taken was spent for nothing."""
        interaction = request.progress.interaction
        if interaction is None or not interaction.uncut_tokens:
            return
        tenant = interaction.tenant
        waste = self.wasted.get(tenant)
        if waste is None:
            waste = self.wasted.setdefault(tenant if len(self.wasted) < TENANTS_MAX else "", Waste())
        waste.interactions += 1
        waste.tokens += interaction.uncut_tokens
        interaction.uncut_tokens = 0

    # --- caps ---

    def caps(self, tenant: str, app: str) -> Caps:
        """Calls, tokens and seconds up to which an interaction of this app has its immunity."""
        settings, needs = self.settings, self._needs.get((tenant, app), self._unknown)
        if needs.caps is None:
            needs.caps = (
                _cap(settings.calls_max, CALLS, needs.calls),
                _cap(settings.tokens_max, TOKENS, needs.tokens),
                _cap(settings.lifetime_s_max, LIFETIME_S, needs.lifetime_s),
            )
        return needs.caps

    # --- the table ---

    def _find(self, request: Request, now: float) -> Interaction | None:
        flow, claim = request.flow, request.claim
        own = self._open.get(flow.tenant)
        if own is None:
            return None
        interaction: Interaction | None = None
        if claim.id:
            if claim.begins and not claim.explicit:
                return None
            interaction = own.get((flow.app, flow.user, claim.id))
        else:
            for extended in islice(reversed(claim.extends), EXTENDED_MAX):
                interaction = own.get((flow.app, flow.user, extended))
                if interaction is not None:
                    break
        if interaction is not None and not interaction.under_way and now - interaction.seen_s > self.settings.idle_s:
            self._close(interaction)
            return None
        return interaction

    def _begin(self, request: Request, now: float) -> Interaction:
        flow, claim = request.flow, request.claim
        key = (flow.app, flow.user, claim.id or claim.extends[-1])
        replaced = self._open.get(flow.tenant, {}).get(key)
        if replaced is not None:
            self._close(replaced)
        return self.open(flow, key, now)

    def open(self, flow: Flow, key: Key, now: float) -> Interaction:
        """Open a new interaction."""
        self._collect(now)
        if self._count >= self.settings.open_max:
            self._give_up_oldest()
        interaction = Interaction(flow.tenant, key, self.caps(flow.tenant, flow.app), now)
        interaction.look_s = now + self.settings.idle_s
        self._open.setdefault(flow.tenant, {})[key] = interaction
        self._count += 1
        self._to_look_at.append(interaction)
        return interaction

    def _rename(self, interaction: Interaction, last: int) -> None:
        """The prompt has grown, and the next prompt will extend this one."""
        own = self._open.get(interaction.tenant)
        if own is None or own.get(interaction.key) is not interaction:
            return
        key = (*interaction.key[:2], last)
        if key not in own:
            del own[interaction.key]
            interaction.key = key
            own[key] = interaction
            interaction.told = None  # other gateways know nothing under the new name

    def _left(self, interaction: Interaction, service: ServiceTokens, now: float) -> None:
        tokens = service.prompt + service.output
        interaction.tokens += tokens
        interaction.uncut_tokens += tokens
        interaction.under_way -= 1
        interaction.seen_s = now
        self._note_change(interaction)
        if not interaction.under_way and (interaction.over or not interaction.tokens):
            self._close(interaction)

    def _is_idle(self, interaction: Interaction, now: float) -> bool:
        return not interaction.under_way and now - interaction.seen_s > self.settings.idle_s

    def _close(self, interaction: Interaction) -> None:
        own = self._open.get(interaction.tenant)
        if own is None or own.get(interaction.key) is not interaction:
            return
        del own[interaction.key]
        self._count -= 1
        if not own:
            del self._open[interaction.tenant]
        if interaction.tokens:
            self._learn(interaction)

    def _learn(self, interaction: Interaction) -> None:
        app = (interaction.tenant, interaction.key[0])
        needs = self._needs.get(app)
        if needs is None:
            needs = self._needs[app] = _Needs()
            if len(self._needs) > APPS_MAX:
                self._needs.popitem(last=False)
        else:
            self._needs.move_to_end(app)
        needs.calls.learn(interaction.calls)
        needs.tokens.learn(interaction.tokens)
        needs.lifetime_s.learn(interaction.seen_s - interaction.began_s)
        needs.caps = None

    def _collect(self, now: float) -> None:
        """Close the idle interactions at the head of the list, and drop those that are closed."""
        looked, idle_s = self._to_look_at, self.settings.idle_s
        for _ in range(min(LOOKED_AT, len(looked))):
            interaction = looked[0]
            own = self._open.get(interaction.tenant)
            if own is None or own.get(interaction.key) is not interaction:
                looked.popleft()
                continue
            if now < interaction.look_s <= now + idle_s and len(looked) < 2 * self.settings.open_max:
                return
            looked.popleft()
            if interaction.seen_s > now:
                interaction.seen_s = now  # the clock was set back
            if self._is_idle(interaction, now):
                self._close(interaction)
            else:
                interaction.look_s = now + idle_s
                looked.append(interaction)

    def _give_up_oldest(self) -> None:
        """Too many are open: the tenant with most loses a hundredth of the bound, so that this is rare."""
        tenant = max(self._open, key=lambda name: (len(self._open[name]), name))
        own = self._open[tenant]
        for interaction in list(islice(own.values(), max(1, min(len(own), self.settings.open_max // 100)))):
            self._close(interaction)

    def is_open(self, tenant: str, key: Key) -> bool:
        """Is an interaction with this key open?"""
        return key in self._open.get(tenant, {})

    def _note_change(self, interaction: Interaction) -> None:
        if self.changed is not None:
            self.changed[interaction] = None
            if len(self.changed) > self.settings.open_max:
                del self.changed[next(iter(self.changed))]

    # --- what was learned ---

    def snapshot(self) -> list[list[object]]:
        """What the apps need, as plain data: [tenant, app, calls, tokens, seconds, interactions seen]."""
        return [
            [*app, needs.calls.value, needs.tokens.value, needs.lifetime_s.value, needs.calls.seen]
            for app, needs in self._needs.items()
        ]

    def restore(self, learned: object) -> None:
        """Continue from a snapshot. ValueError if it is not valid; then nothing has changed."""
        self._needs = _needs(learned)

    def adopt(self, learned: object) -> None:
        """Take over from another gateway's snapshot what it has seen more of. ValueError if it is not valid."""
        for app, theirs in _needs(learned).items():
            own = self._needs.get(app)
            if own is None or own.calls.seen < theirs.calls.seen:
                self._needs[app] = theirs
        while len(self._needs) > APPS_MAX:
            self._needs.popitem(last=False)


def _needs(learned: object) -> OrderedDict[tuple[str, str], _Needs]:
    needs: OrderedDict[tuple[str, str], _Needs] = OrderedDict()
    for tenant, app, calls, tokens, lifetime_s, seen in rows(learned, (str, str, float, float, float, int)):
        own = needs[(tenant, app)] = _Needs()
        own.calls = Percentile(CALLS.percentile, calls, seen)
        own.tokens = Percentile(TOKENS.percentile, tokens, seen)
        own.lifetime_s = Percentile(LIFETIME_S.percentile, lifetime_s, seen)
    return needs


def _cap(setting: float | Literal["auto"], auto: Auto, learned: Percentile) -> float:
    if setting != "auto":
        return setting
    return min(auto.of(learned), LEARNED_MAX * auto.floor)
