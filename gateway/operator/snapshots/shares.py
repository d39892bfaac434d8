"""Which share of what was received is each tenant due, by its weight?"""

from __future__ import annotations

from collections.abc import Mapping


def due(asked: Mapping[str, tuple[float, float, float]]) -> dict[str, float]:
    """By tenant, from what it received, its weight, and how much more of the same it asked for and waits for.

    A tenant that asked for less than its part by weight is due what it asked for. The rest of that part goes to the
    other tenants, by weight. The shares add up to 1; all are 0 as long as nobody has received anything.
    """
    total = sum(service for service, _, _ in asked.values())
    shares = dict.fromkeys(asked, 0.0)
    if not total:
        return shares
    left, open_ = total, dict(asked)
    while open_:
        weights = sum(weight for _, weight, _ in open_.values())
        content = {
            name: service + waiting
            for name, (service, weight, waiting) in open_.items()
            if (service + waiting) * weights < left * weight
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
