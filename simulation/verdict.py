"""What came of a replay, in one sentence? Two of its runs are compared: who waited how long under each?"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from simulation.replay import OTHERS, ReplayResult, TenantResult

NAME_CHARS_MAX = 32
ALIKE_S = 0.1
ALIKE_PART = 0.1
"""Waits that differ by no more than one of these are alike."""
ALIKE_REFUSED = 0.01
REQUESTS_MIN = 20
"""A percentile of fewer requests is chance: such a tenant is named only if it makes no difference to a larger one."""
SHORTEST_S = 0.01
NEVER_S = 1000.0
"""Stands for the wait of a tenant that was never served."""
REFUSED_WEIGHT = 5.0
"""A tenant whose requests are all refused is hit as hard as one that waits e^5 times as long."""


def compared(results: Sequence[ReplayResult]) -> tuple[ReplayResult, ReplayResult]:
    """The first policy and the last one; or the last one before the first and the last number of engines."""
    last = results[-1]
    of_policy = [each for each in results if each.policy == last.policy]
    return (of_policy[0] if of_policy[0].backends != last.backends else results[0]), last


def verdict(results: Sequence[ReplayResult]) -> str:
    """How long did those wait whom the choice concerns most, and those who asked for most?"""
    one, other = compared(results)
    if one is other:
        return f"Under `{one.policy}`, {_longest(one.tenants)}."
    here, there = _under(one, other)
    pairs = [pair for pair in zip(one.tenants, other.tenants, strict=True) if pair[0].name != OTHERS]
    if all(_is_alike(*pair) for pair in pairs):
        return f"{here}, everybody waited about as long as {there}: {_longest(one.tenants)}."
    named = [pair for pair in pairs if pair[0].requests >= REQUESTS_MIN and not _is_alike(*pair)] or pairs
    before, after = max(named, key=lambda pair: _change(*pair))
    is_part = before.requests >= REQUESTS_MIN
    who = "one request in twenty" if is_part else "the slowest request"
    least_s = f"{_p95(before)} or longer" if is_part and before.ttft_s is not None else _p95(before)
    sentence = f"{here}, {who} of `{short(before.name)}` waited {least_s} for its first token"
    sentence += f"{_refusals(before)}, {there} {_wait(after)}"
    most, most_after = pairs[0]
    if most.name != before.name:
        sentence += f"; of `{short(most.name)}`, who asked for most, {_wait(most)} and {_wait(most_after)}"
    return sentence + "."


def _under(one: ReplayResult, other: ReplayResult) -> tuple[str, str]:
    if one.backends == other.backends:
        return f"Under `{one.policy}`", f"under `{other.policy}`"
    few, many = (f"{each.backends} engine{'s' if each.backends > 1 else ''}" for each in (one, other))
    return f"With {few} under `{one.policy}`", f"with {many}"


def _longest(tenants: Sequence[TenantResult]) -> str:
    slowest = max(tenants, key=_p95_s)
    return (
        f"`{short(slowest.name)}` waited longest for its first tokens, one request in twenty {_wait(slowest)} or more"
    )


def _p95_s(tenant: TenantResult) -> float:
    return tenant.ttft_s.p95 if tenant.ttft_s is not None else NEVER_S


def _refused(one: TenantResult, other: TenantResult) -> float:
    """By how much do the parts of their requests differ that were refused?"""
    return abs(one.completed / one.requests - other.completed / other.requests)


def _is_alike(one: TenantResult, other: TenantResult) -> bool:
    low, high = sorted((_p95_s(one), _p95_s(other)))
    return high - low <= max(ALIKE_S, ALIKE_PART * high) and _refused(one, other) <= ALIKE_REFUSED


def _change(one: TenantResult, other: TenantResult) -> float:
    """How much did the choice concern this tenant?"""
    if _is_alike(one, other):
        return 0.0
    ratio = max(SHORTEST_S, _p95_s(one)) / max(SHORTEST_S, _p95_s(other))
    return abs(log(ratio)) + REFUSED_WEIGHT * _refused(one, other)


def _wait(tenant: TenantResult) -> str:
    return _p95(tenant) + _refusals(tenant)


def _p95(tenant: TenantResult) -> str:
    return "for ever" if tenant.ttft_s is None else f"{in_seconds(tenant.ttft_s.p95)} s"


def _refusals(tenant: TenantResult) -> str:
    refused = tenant.requests - tenant.completed
    return f" ({refused:,} of {tenant.requests:,} refused)" if refused else ""


def in_seconds(value: float) -> str:
    """With as many digits as one reads."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def short(name: str) -> str:
    """A name as one reads it."""
    return name if len(name) <= NAME_CHARS_MAX else name[: NAME_CHARS_MAX - 1] + "…"
