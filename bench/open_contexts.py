"""What an arrival and an end cost while many interactions are open, each with a context that the working set counts.

    python -m bench.open_contexts [--open 0,1000,100000] [--calls 5000]

CPU time of this process for arrival and end together, of a call inside an open interaction and of a single question,
in microseconds: medians over groups of 50. One engine with room for all; no network; time is virtual.
"""

import argparse

from bench import report
from bench.scheduler import Stopwatch
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import Gauges
from policies.interactions import Interactions, InteractionSettings
from policies.queue.bounds import QueueLimits
from policies.request import Claim, Flow, Request, ServiceTokens

TENANTS = 100
PROMPT_TOKENS, OUTPUT_TOKENS = 1000, 10
KV_TOKENS = 10**9
PREFILL_TOKENS_PER_S = 10_000.0
"""So K/R is a day: no context ceases to count while this runs."""
GROUP = 50


class Pool:
    """An engine that starts whatever comes."""

    def __init__(self, most: int) -> None:
        table = Interactions(InteractionSettings(open_max=2 * most + 10_000))
        limits = QueueLimits(queue_requests_max=10_000, queue_wait_s_max=1e6)
        self.engine = AdmissionEngine(named_policy("fairserve"), limits=limits, interactions=table)
        self.engine.add_backend("engine", max_num_seqs=1024)
        for number in range(40):
            tokens = 100 + 50 * (number % 5)
            self.engine.backends["engine"].prefill_rate.observed(tokens, 0.0, 0.01 + tokens / PREFILL_TOKENS_PER_S)
        gauges = Gauges(0.0, running=0, waiting=0, kv_capacity_tokens=KV_TOKENS, kv_usage=0.1)
        self.engine.backend_changed("engine", gauges, 0.0)
        self.now, self.made = 0.0, 0

    def request(self, interaction: str = "") -> Request:
        self.made += 1
        tenant = f"tenant-{hash(interaction or self.made) % TENANTS}"
        claim = Claim(interaction, explicit=True) if interaction else Claim()
        return Request(
            f"req_{self.made}", Flow(tenant, "app"), 1.0, PROMPT_TOKENS, OUTPUT_TOKENS, self.now, claim=claim
        )

    def answer(self, request: Request) -> None:
        self.now += 1e-5
        self.engine.arrived(request, self.now)
        self.engine.finished(request.id, ServiceTokens(PROMPT_TOKENS, OUTPUT_TOKENS), self.now)


def measured(opened: int, calls: int) -> dict[str, float]:
    pool, watch = Pool(opened), Stopwatch()
    for number in range(opened):
        pool.answer(pool.request(f"interaction-{number}"))
    for first in range(0, calls, GROUP):
        for kind in ("call inside", "question"):
            names = [f"interaction-{number % max(1, opened)}" for number in range(first, first + GROUP)]
            requests = [pool.request(name if kind == "call inside" else "") for name in names]
            watch.time(f"{kind}, us", pool.answer, requests)
    return {"contexts counted": float(len(pool.engine.working_set))} | watch.medians_us()


def main() -> None:
    parser = argparse.ArgumentParser(description="arrival and end with many open interactions")
    parser.add_argument("--open", type=lambda text: [int(one) for one in text.split(",")], default=[0, 1000, 100_000])
    parser.add_argument("--calls", type=int, default=5000)
    options = parser.parse_args()
    rows = {opened: measured(opened, options.calls) for opened in options.open}
    heads = ["open interactions", *next(iter(rows.values()))]
    print(report.table(heads, [[f"{n:,}", *[f"{value:,.1f}" for value in row.values()]] for n, row in rows.items()]))


if __name__ == "__main__":
    main()
