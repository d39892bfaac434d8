"""Which share of what was received is each tenant due, by its weight?"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["due"]


def due(received: Mapping[str, tuple[float, float, bool]]) -> dict[str, float]:
    """By tenant, from what it received, its weight, and whether it wants more.

    Whoever wants no more is due what it received, up to its part by weight. What that leaves is for the others, by
    weight. The shares add up to 1; all are 0 as long as nobody has received anything.
    """
    total = sum(service for service, _, _ in received.values())
    shares = dict.fromkeys(received, 0.0)
    if not total:
        return shares
    left, open_ = total, dict(received)
    while open_:
        weights = sum(weight for _, weight, _ in open_.values())
        content = {
            name: service
            for name, (service, weight, wants_more) in open_.items()
            if not wants_more and service * weights < left * weight
        }
        if not content or len(content) == len(open_):
            for name, (_, weight, _) in open_.items():
                shares[name] = left * weight / weights / total
            break
        for name, service in content.items():
            shares[name] = service / total
            left -= service
            del open_[name]
    return shares
