"""Which interactions are open, and how many tokens were spent on interactions that lost a call?

An interaction is the calls behind one answer (FairServe, section 2). A call is matched to its interaction by a claimed
id, by a raw prompt that extends an earlier one, or by a correlation key of an earlier answer. The strongest evidence
decides:

    a name         the client named the interaction: no other evidence is read
    a strong key   the call brings back an id that an answer issued, so it is inside, whatever its content has become
    the question   a tool's result continues the answer to its question
    a weak key     a known session, or a known turn of the model: the call continues it if it follows at an agent's pace

Matching stays within one flow: a client of another flow that claims an id names its own interaction. An interaction
opens when its first call is admitted, not when a request claims it. A new question opens a new interaction, even if an
equal question is open, unless a weak key continues one.

An interaction ends when its client says so, after a final answer unless the client named it, or after a silence, which
may be longer if its last answer asked for more. For a moment after a final answer it rests: an agent that calls its
tools in its text follows up at once.
An interaction beyond its caps continues, but its calls no longer count as inside.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from policies.app_paces import PACE_S_MAX, AppPaces
from policies.capacity.output_lengths import APPS_MAX
from policies.correlation_table import KEYS_MAX, CorrelationTable
from policies.recent import given_up
from policies.request import NO_CLAIM, NO_KEYS, Flow, Interaction, Key, Request, ServiceTokens
from policies.settings import COUNT_MAX, check_bounds, setting

EXTENDED_MAX: Final = 256
"""Hashes of a raw prompt that are looked up, the longest prefix first."""
LOOKED_AT: Final = 8
"""Interactions of each kind checked for idleness whenever one opens, so that checks outpace openings."""
KEYS_EACH: Final = 2
"""Correlation keys remembered per interaction of `open_max`."""
IDLE_S: Final = 300.0
IDLE_S_AWAITED: Final = 12 * IDLE_S
"""Longest silence of an interaction, and of one whose last answer asked for more, where `idle_s` is auto."""


@dataclass(frozen=True, slots=True)
class InteractionSettings:
    """Settings for the end of an interaction, and for the caps of its immunity from throttling."""

    idle_s: float | None = setting(
        None,
        "An interaction that was silent for this long is over. auto: 5 minutes, and an hour after an answer that asks "
        "for a tool.",
        kind=float,
        above=0,
        most=86_400,
        auto="longer after an answer that asks for a tool",
    )
    calls_max: int = setting(200, "Calls of one interaction.", least=1, most=COUNT_MAX)
    tokens_max: int = setting(20_000_000, "Tokens of one interaction, prompts and outputs.", least=1, most=COUNT_MAX)
    lifetime_s_max: float = setting(86_400, "Time from its first call.", least=1, most=COUNT_MAX)
    open_max: int = 250_000
    apps_max: int = APPS_MAX
    """Apps whose paces are remembered (`app_paces`)."""

    def __post_init__(self) -> None:
        check_bounds(self)


class Interactions:
    """The open interactions of every flow. Several pools may share a table.

    Bounded: at most `open_max` interactions are open or rest. Beyond that, the tenant with the most loses its oldest.
    """

    def __init__(self, settings: InteractionSettings | None = None) -> None:
        self.wasted_tokens = 0
        """Tokens spent on interactions until they lost a call to a rejection."""
        settings = settings or InteractionSettings()
        self.paces = AppPaces(settings.apps_max)
        self._by_key = CorrelationTable()
        self.set(settings)
        self._open: dict[str, dict[Key, Interaction]] = {}
        self._count = 0
        self._resting: OrderedDict[Interaction, None] = OrderedDict()
        """Interactions without a call under way that rest after a final answer, the longest rest first."""
        self._awaited: OrderedDict[Interaction, None] = OrderedDict()
        """Interactions without a call under way whose last answer asked for more, the longest silence first."""
        self._idle: OrderedDict[Interaction, None] = OrderedDict()
        """All other interactions without a call under way, the longest silence first."""
        self.changed: dict[Interaction, None] | None = None
        """Interactions to report to other gateways, the oldest change first. Bounded: the oldest changes are dropped.
        None if nothing is reported."""

    def __len__(self) -> int:
        return self._count - len(self._resting)

    def __repr__(self) -> str:
        return f"<Interactions: {len(self)} open, of {len(self._open)} tenants>"

    def set(self, settings: InteractionSettings) -> None:
        """Replace the settings, also for open interactions."""
        self.settings = settings
        self._by_key.keys_max = KEYS_EACH * settings.open_max
        self.paces.apps_max = settings.apps_max

    # --- events ---

    def arrived(self, request: Request, now: float) -> None:
        """Match the request to its open interaction. Sets `interaction`, `stage` and `inside`; admits nothing."""
        claim = request.claim
        if claim is NO_CLAIM:
            return
        interaction = self._find(request, now)
        if interaction is None:
            return
        request.progress.interaction = interaction
        request.progress.stage = interaction.calls + 1
        if claim.stage is not None and 1 <= claim.stage < request.progress.stage and interaction.key[2] == claim.id:
            # Parallel calls share a stage. A client may claim an earlier stage, but none beyond the calls so far.
            request.progress.stage = claim.stage
        settings = self.settings
        is_small = interaction.calls < settings.calls_max and interaction.tokens < settings.tokens_max
        request.progress.inside = is_small and now - interaction.began_s < settings.lifetime_s_max

    def admitted(self, request: Request, now: float) -> None:
        """Count a queued request as a call under way. Open its interaction if the request begins one."""
        claim, interaction = request.claim, request.progress.interaction
        if interaction is None:
            if not claim.id and not claim.extends:
                return
            interaction = request.progress.interaction = self._begin(request, now)
        else:
            if not interaction.under_way:
                self._silent(interaction).pop(interaction, None)
                interaction.over = False
            if claim.extends and not claim.id:
                self._rename(interaction, claim.extends[-1])
        if claim.session:
            self._add_key(interaction, claim.session, is_strong=False, alone=True)
        if claim.id and interaction.key[2] != claim.id:
            self._add_key(interaction, claim.id, is_strong=claim.begins is not True)
        interaction.start_tokens = interaction.start_tokens or request.prompt_tokens
        interaction.calls += 1
        interaction.under_way += 1
        interaction.seen_s = now
        if self.changed is not None:
            self._note_change(interaction)

    def served(self, request: Request, service: ServiceTokens, now: float, awaits_more: bool | None) -> None:
        """Record the complete answer of a call.

        `awaits_more`: whether the answer asks for a tool; None if that is unknown.
        """
        interaction = request.progress.interaction
        if interaction is None:
            return
        claim, answer_keys = request.claim, request.progress.answer_keys
        if claim.ends or (awaits_more is False and not claim.explicit):
            interaction.over = True
        elif awaits_more:
            interaction.over = False
        interaction.awaited = awaits_more is True
        if claim.ends:
            self._by_key.forget(interaction)
        elif answer_keys is not NO_KEYS and not claim.explicit:
            for key in answer_keys.strong:
                self._add_key(interaction, key, is_strong=True)
            for key in answer_keys.weak:
                self._add_key(interaction, key, is_strong=False)
            for text in answer_keys.text:
                self._by_key.add(interaction, text)
        self._end_call(interaction, service, now)

    def broke_off(self, request: Request, service: ServiceTokens, now: float) -> None:
        """Record a call that ended while it waited or before its answer was complete."""
        if request.progress.interaction is not None:
            self._end_call(request.progress.interaction, service, now)

    def cut(self, request: Request) -> None:
        """Count the tokens of a rejected call's interaction as wasted. Tokens are counted once."""
        interaction = request.progress.interaction
        if interaction is not None and interaction.uncut_tokens:
            request.progress.wasted_tokens, interaction.uncut_tokens = interaction.uncut_tokens, 0
            self.wasted_tokens += request.progress.wasted_tokens

    def idle_s(self, interaction: Interaction) -> float:
        """Return the longest silence of an interaction in seconds."""
        return self.settings.idle_s or (IDLE_S_AWAITED if interaction.awaited else IDLE_S)

    # --- which interaction is it? ---

    def _find(self, request: Request, now: float) -> Interaction | None:
        """Return the open interaction that a request belongs to, by the evidence in its claim; None for a new one."""
        flow, claim = request.flow, request.claim
        if claim.explicit:
            found = self._named(flow, claim.id)
            return found if found is not None and self._is_there(found, now) else None
        if claim.extends and not claim.id:
            for extended in islice(reversed(claim.extends), EXTENDED_MAX):
                found = self._named(flow, extended)
                if found is not None and not _rests(found):
                    return found if self._is_there(found, now) else None
            return None
        for key in claim.keys.strong:
            known = self._known_by(flow, key)
            if len(known) > 1 and claim.id:  # some models number their calls of tools anew in each answer
                asked = self._known_by(flow, claim.id)
                known = [one for one in known if one in asked] or known
            if (found := self._of_several(known, now)) is not None:
                return found
        if claim.id and not claim.begins:
            found = self._of_several(self._known_by(flow, claim.id), now)
            if found is not None:
                return found
        keys = claim.keys
        if keys.weak or (keys.text and self._by_key.has_any(flow, keys.text)):
            return self._by_weak_keys(request, now)
        return None

    def _named(self, flow: Flow, name: str | int) -> Interaction | None:
        """Return the open interaction of this flow with this name, or None."""
        own = self._open.get(flow.tenant)
        return own.get((flow.app, flow.user, name)) if own is not None else None

    def _known_by(self, flow: Flow, key: str | int) -> Sequence[Interaction]:
        """Return the interactions of this flow with this name or key."""
        named, holders = self._named(flow, key), self._by_key.find(flow, key)
        return holders if named is None else (named, *holders)

    def _of_several(self, known: Sequence[Interaction], now: float) -> Interaction | None:
        """Return the live interaction that has been silent longest, if possible one without a call under way."""
        if len(known) < 2:
            return known[0] if known and self._is_there(known[0], now) else None
        there = [one for one in known if self._is_there(one, now)]
        return min(there, key=lambda one: (one.under_way > 0, one.seen_s)) if there else None

    def _by_weak_keys(self, request: Request, now: float) -> Interaction | None:
        """Return the interaction that matches the weak keys, if the call follows at an agent's pace.

        Where several interactions share a key, the next keys choose among them. Learns the app's pace.
        """
        flow = request.flow
        pace_s = self.paces.pace_s(flow.tenant, flow.app)
        found: list[Interaction] = []
        for key in request.claim.keys.weak:
            known = [one for one in self._known_by(flow, key) if self._is_there(one, now)]
            in_time = [one for one in known if _is_in_time(one, now, pace_s)]
            if known and not found:
                last = max(known, key=lambda one: one.seen_s)
                if not last.under_way:
                    self.paces.replied(flow.tenant, flow.app, now - last.seen_s)
                if not in_time:
                    return None
            found = [one for one in in_time if one in found] or found or in_time
            if len(found) == 1:
                return found[0]
        return self._of_several(self._by_text(request, found, now, pace_s) or found, now)

    def _by_text(self, request: Request, among: list[Interaction], now: float, pace_s: float) -> list[Interaction]:
        """Return the interactions that share most keys of text with the request, out of `among` unless it is empty."""
        counts: dict[Interaction, int] = {}
        for key in request.claim.keys.text:
            for one in self._by_key.find(request.flow, key):
                if _is_in_time(one, now, pace_s) and (not among or one in among):
                    counts[one] = counts.get(one, 0) + 1
        most = max(counts.values(), default=0)
        if not among and most < request.claim.keys.text_min:
            return []
        return [one for one, count in counts.items() if count == most]

    def _is_there(self, interaction: Interaction, now: float) -> bool:
        """Return whether an interaction is live. Close it if it has been silent for too long."""
        if interaction.under_way or now - interaction.seen_s <= self.idle_s(interaction):
            return True
        self._close(interaction)
        return False

    # --- the table ---

    def _begin(self, request: Request, now: float) -> Interaction:
        flow, claim = request.flow, request.claim
        key = (flow.app, flow.user, claim.id or claim.extends[-1])
        own = self._open.get(flow.tenant)
        is_question = claim.begins and claim.id and not claim.explicit
        if is_question and ((own is not None and key in own) or self._by_key.find(flow, claim.id)):
            key = (flow.app, flow.user, claim.id[:8] + request.id[-8:])  # its id is taken by an equal question
        return self.open(flow, key, now)

    def open(self, flow: Flow, key: Key, now: float) -> Interaction:
        """Open a new interaction. Close an open interaction with this key."""
        self._collect(now)
        if self._count >= self.settings.open_max:
            for tenant, key in given_up(self._open, self.settings.open_max):
                self._close(self._open[tenant][key])
        own = self._open.get(flow.tenant)
        if own is not None and key in own:
            self._close(own[key])
        interaction = self._open.setdefault(flow.tenant, {})[key] = Interaction(flow.tenant, key, now)
        self._count += 1
        return interaction

    def wait(self, interaction: Interaction) -> None:
        """Let an interaction without a call under way wait for its next call. The interaction is closed once idle."""
        self._silent(interaction)[interaction] = None

    def _silent(self, interaction: Interaction) -> OrderedDict[Interaction, None]:
        """Return the table for an interaction without a call under way."""
        return self._resting if interaction.over else self._awaited if interaction.awaited else self._idle

    def _add_key(self, interaction: Interaction, key: str, *, is_strong: bool, alone: bool = False) -> None:
        """Add a key of an answer, and note that other gateways are to know the key."""
        is_new = self._by_key.add(interaction, key, alone=alone)
        if self.changed is not None:
            unreported = interaction.unreported
            if unreported is None:
                unreported = interaction.unreported = {}
            unreported[key] = (is_strong, is_new or unreported.pop(key, (False, False))[1])
            if len(unreported) > KEYS_MAX:
                del unreported[next(iter(unreported))]

    def _rename(self, interaction: Interaction, last: int) -> None:
        """Rename a raw prompt's interaction to the hash of its longer prompt, which the next call extends."""
        own, key = self._open.get(interaction.tenant, {}), (*interaction.key[:2], last)
        if own.get(interaction.key) is interaction and key not in own:
            del own[interaction.key]
            interaction.key = key
            own[key] = interaction
            interaction.reported = None  # other gateways do not know the new name

    def _end_call(self, interaction: Interaction, service: ServiceTokens, now: float) -> None:
        """Count the end of a call. Without another call under way, let the interaction wait for its next call, or close
        an interaction without tokens, or a finished one without keys."""
        tokens = service.prompt + service.output
        interaction.tokens += tokens
        interaction.uncut_tokens += tokens
        interaction.under_way -= 1
        interaction.seen_s = now
        if self.changed is not None:
            self._note_change(interaction)
        if interaction.under_way or self._open.get(interaction.tenant, {}).get(interaction.key) is not interaction:
            return
        if interaction.key_hashes if interaction.over else interaction.tokens:
            self._silent(interaction)[interaction] = None
        else:
            self._close(interaction)

    def _close(self, interaction: Interaction) -> None:
        own = self._open[interaction.tenant]
        self._silent(interaction).pop(interaction, None)
        del own[interaction.key]
        self._count -= 1
        if not own:
            del self._open[interaction.tenant]
        self._by_key.forget(interaction)

    def _collect(self, now: float) -> None:
        """Check the next few interactions: close the idle ones, and those that have rested for `PACE_S_MAX`."""
        idle_s = self.settings.idle_s
        awaited, idle = (self._awaited, idle_s or IDLE_S_AWAITED), (self._idle, idle_s or IDLE_S)
        for silent, silent_s_max in ((self._resting, PACE_S_MAX), awaited, idle):
            for interaction in [*islice(silent, LOOKED_AT)]:
                interaction.seen_s = min(interaction.seen_s, now)  # the clock may have been set back
                if now - interaction.seen_s <= silent_s_max:
                    break
                self._close(interaction)

    def is_open(self, tenant: str, key: Key) -> bool:
        """Return whether the interaction is open, and not lingering after a final answer."""
        found = self._open.get(tenant, {}).get(key)
        return found is not None and not _rests(found)

    def _note_change(self, interaction: Interaction) -> None:
        """Note that an interaction is to be reported to other gateways. The oldest notes are dropped."""
        assert self.changed is not None
        self.changed[interaction] = None
        if len(self.changed) > self.settings.open_max:
            del self.changed[next(iter(self.changed))]


def _rests(interaction: Interaction) -> bool:
    """Return whether an open interaction rests after a final answer."""
    return interaction.over and not interaction.under_way


def _is_in_time(interaction: Interaction, now: float, pace_s: float) -> bool:
    """Return whether a call that arrives now follows the last answer within `pace_s`, or runs beside another call."""
    return interaction.under_way > 0 or now - interaction.seen_s <= pace_s
