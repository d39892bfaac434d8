"""Which of the running requests end next? Of few requests each is looked at; of many it is a matter of averages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from policies.capacity.lease import Lease
from policies.capacity.pace import Pace

__all__ = ["ending", "next_end_s"]

FEW: Final = 64


def ending(leases: Mapping[str, Lease], pace: Pace) -> int:
    """How many sequences are at their longest, and end before a request dispatched now could start?

    Of many slots those few that are empty until the next request has come are no loss, and not counted.
    """
    if len(leases) > FEW:
        return 0
    steps, sequences = pace.first_token_s / pace.token_s, 0
    for lease in leases.values():
        request = lease.request
        if lease.started_s is not None and request.output_tokens_max - lease.output_tokens <= steps * request.sequences:
            sequences += request.sequences
    return sequences


def next_end_s(leases: Mapping[str, Lease], pace: Pace) -> float:
    """How long does it take until one of them ends, after those that are about to?"""
    if not leases or len(leases) > FEW:
        return pace.lifetime_s / max(1, len(leases))
    left = sorted([lease.expected_left() for lease in leases.values()])
    return left[min(ending(leases, pace), len(left) - 1)] * pace.token_s
