"""What did each tenant receive, and how fast? Numbers from the records of a run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable

from policies.orders.cost import Cost, LinearCost
from policies.request import ServiceTokens
from simulation.run import Record
from simulation.statistics import percentile


def service(records: Iterable[Record], start_s: float, end_s: float, *, cost: Cost | None = None) -> dict[str, float]:
    """Return each tenant's service in [start, end). Prompts count at dispatch, output as it passed the gateway."""
    price = cost if cost is not None else LinearCost()
    received: dict[str, float] = {}
    for record in records:
        tenant = record.arrival.flow.tenant
        received.setdefault(tenant, 0.0)
        if record.dispatched_s is None:
            continue
        received[tenant] += price(_received(record, end_s)) - price(_received(record, start_s))
    return received


def _received(record: Record, now: float) -> ServiceTokens:
    output_tokens = bisect_left(record.token_s, now)
    if record.dispatched_s is None or record.dispatched_s >= now:
        return ServiceTokens(0, output_tokens)
    return ServiceTokens(record.arrival.prompt_tokens, output_tokens, record.cached_tokens)


def service_per_weight(records: Collection[Record], start_s: float, end_s: float) -> dict[str, float]:
    """Service of each tenant over its weight: equal numbers are fair shares."""
    weights = {record.arrival.flow.tenant: record.arrival.weight for record in records}
    return {tenant: amount / weights[tenant] for tenant, amount in service(records, start_s, end_s).items()}


def ttft_s(records: Iterable[Record], tenant: str, share: float = 0.5) -> float:
    """Seconds to the first token of a tenant's requests, at this percentile (0 to 1). ValueError if none started."""
    times = [record.ttft_s for record in records if record.arrival.flow.tenant == tenant]
    return percentile([time for time in times if time is not None], share)


def throughput(records: Iterable[Record]) -> float:
    """Output tokens per second from the first arrival to the last token."""
    all_records = list(records)
    tokens = [time for record in all_records for time in record.token_s]
    start_s = min(record.arrival.arrived_s for record in all_records)
    return len(tokens) / (max(tokens) - start_s) if tokens else 0.0
