"""A replay's result in two sentences: of two runs, which tenant gains most, and which pays?"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from simulation.replay import OTHERS, ReplayResult, TenantResult

NAME_CHARS_MAX = 32
ALIKE_S = 0.1
ALIKE_PART = 0.1
"""Relative difference below which waits are alike."""
ALIKE_REFUSED = 0.01
REQUESTS_MIN = 20
"""Fewest requests for a p95; with fewer a tenant is judged by its median."""
SHORTEST_S = 0.01
NEVER_S = 1000.0
"""Stands for the wait of a tenant that was never served."""
REFUSED_WEIGHT = 5.0
"""Weight of refusals: refusing all requests counts like a wait that is e^5 times as long."""


def runs_to_compare(results: Sequence[ReplayResult]) -> tuple[ReplayResult, ReplayResult]:
    """Return the first policy and the last one; or the last policy before the first and the last number of engines."""
    last = results[-1]
    of_policy = [each for each in results if each.policy == last.policy]
    return (of_policy[0] if of_policy[0].backends != last.backends else results[0]), last


def named(results: Sequence[ReplayResult]) -> tuple[str, str]:
    """Return who gains and who pays most by the second run, or "" for nobody. Tenants of few requests count."""
    pairs = _pairs(*runs_to_compare(results))
    changes = {before.name: _change(before, after) for before, after in pairs}
    gainer, payer = max(changes, key=changes.__getitem__), min(changes, key=changes.__getitem__)
    return gainer if changes[gainer] > 0 else "", payer if changes[payer] < 0 else ""


def verdict(results: Sequence[ReplayResult]) -> str:
    """Return how long the tenants that gain and pay most waited under both runs."""
    one, other = runs_to_compare(results)
    if one is other:
        return f"Under `{one.policy}`, {_longest(one.tenants)}."
    here, there = _under(one, other)
    pairs = {before.name: (before, after) for before, after in _pairs(one, other)}
    gainer, payer = named(results)
    if not gainer and not payer:
        return f"{here[0].upper()}{here[1:]}, everybody waited about as long as {there}: {_longest(one.tenants)}."
    sentences = []
    for name, verb in ((gainer, "gains"), (payer, "pays")):
        if not name:
            sentences.append(f"Nobody {verb}.")
            continue
        before, after = pairs[name]
        or_longer = " or longer" if before.requests > 1 and before.ttft_s is not None else ""
        waited = f"{_part(before)} waited {_wait(before)}{or_longer} for its first token{_refusals(before)}"
        sentences.append(f"`{short(name)}` {verb} most: {here}, {waited}, {there} {_wait(after)}{_refusals(after)}.")
    return " ".join(sentences)


def _pairs(one: ReplayResult, other: ReplayResult) -> list[tuple[TenantResult, TenantResult]]:
    found = list(zip(one.tenants, other.tenants, strict=True))
    return [pair for pair in found if pair[0].name != OTHERS] or found


def _under(one: ReplayResult, other: ReplayResult) -> tuple[str, str]:
    """Return how to name two runs in a sentence: by policy, or by number of engines."""
    if one.backends == other.backends:
        return f"under `{one.policy}`", f"under `{other.policy}`"
    few, many = (f"{each.backends} engine{'s' if each.backends > 1 else ''}" for each in (one, other))
    return f"with {few} under `{one.policy}`", f"with {many}"


def _longest(tenants: Sequence[TenantResult]) -> str:
    slowest = max(tenants, key=_waited_s)
    return (
        f"`{short(slowest.name)}` waited longest for its first tokens, {_part(slowest)} {_wait(slowest)}"
        f"{_refusals(slowest)} or more"
    )


def _part(tenant: TenantResult) -> str:
    """Return the words for the share of a tenant's requests that waited as long as `_waited_s` says, or longer."""
    if tenant.requests >= REQUESTS_MIN:
        return "one request in twenty"
    return "one request in two" if tenant.requests > 1 else "its one request"


def _waited_s(tenant: TenantResult) -> float:
    if tenant.ttft_s is None:
        return NEVER_S
    return tenant.ttft_s["p95" if tenant.requests >= REQUESTS_MIN else "p50"]


def _change(one: TenantResult, other: TenantResult) -> float:
    """Return how much this tenant gains by the second run; below 0 it pays, at 0 it fares alike."""
    low_s, high_s = sorted((_waited_s(one), _waited_s(other)))
    served = (other.completed - one.completed) / one.requests
    if high_s - low_s <= max(ALIKE_S, ALIKE_PART * high_s) and abs(served) <= ALIKE_REFUSED:
        return 0.0
    return log(max(SHORTEST_S, _waited_s(one)) / max(SHORTEST_S, _waited_s(other))) + REFUSED_WEIGHT * served


def _wait(tenant: TenantResult) -> str:
    return "for ever" if tenant.ttft_s is None else f"{in_seconds(_waited_s(tenant))} s"


def _refusals(tenant: TenantResult) -> str:
    refused = tenant.requests - tenant.completed
    return f" ({refused:,} of {tenant.requests:,} refused)" if refused else ""


def in_seconds(value: float) -> str:
    """Format seconds with significant digits only."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def short(name: str) -> str:
    """Return a name shortened for display."""
    return name if len(name) <= NAME_CHARS_MAX else name[: NAME_CHARS_MAX - 1] + "…"
