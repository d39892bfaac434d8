"""Random events before some engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from policies.admission.decisions import Decision, Dispatch, Failure
from policies.admission.engine import AdmissionEngine
from policies.capacity.gauges import Gauges
from policies.capacity.overload import OverloadSettings
from policies.limits.quotas import Quota, Quotas
from policies.limits.throttle import Ceilings, ThrottleSettings
from policies.queue.bounds import QueueLimits
from policies.request import Claim, ServiceTokens
from tests.policies.making import make_request, policy_with

BACKENDS = ("one", "two", "three")
KV_TOKENS = 2000
LIMITS = QueueLimits(
    queue_requests_max=12, queue_bytes_max=600, queue_wait_s_max=3.0, attempts_max=3, queue_wait_s_max_inside=6.0
)


def engine_of(policy: str, backends: Sequence[str] = BACKENDS) -> AdmissionEngine:
    throttle = ThrottleSettings(user=Ceilings(starts=2), app_user=Ceilings(), app=Ceilings(starts=4))
    engine = AdmissionEngine(
        policy_with(policy, throttle=throttle, requests_per_minute=20),
        limits=LIMITS,
        overload=OverloadSettings(0.6, 0.5, 0.05),
        quotas=Quotas(Quota(concurrent=10)),
    )
    for name in backends:
        engine.add_backend(name, max_num_seqs=3 if name == "one" else None)
    return engine


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "arrives",
                "arrives",
                "arrives",
                "gauges",
                "gauges",
                "streams",
                "finishes",
                "fails",
                "leaves",
                "health",
                "wakes",
            ]
        ),
        st.integers(0, 11),
        st.integers(0, 11),
    ),
    min_size=30,
    max_size=80,
)


@dataclass
class Play:
    """One engine that lives through these steps, with its decisions."""

    engine: AdmissionEngine
    now: float = 0.0
    log: list[Decision] = field(default_factory=list)
    dispatched: dict[str, int] = field(default_factory=dict)
    """With its prompt tokens."""
    queued: dict[str, int] = field(default_factory=dict)
    serial: int = 0

    def step(self, what: str, one: int, other: int) -> None:
        self.now += 0.01 * (1 + other)
        engine, now = self.engine, self.now
        names = sorted(engine.backends)
        running = sorted(self.dispatched)
        chosen = running[one % len(running)] if running else ""
        decisions: Sequence[Decision] = ()
        if what == "arrives":
            decisions = self.arrive(one, other)
        elif what == "gauges":
            kv = (0.1, 0.4, 0.55, 0.62, 0.8, 0.99)[other % 6]
            gauges = Gauges(now, len(running), (0, 0, 0, 4)[one % 4], kv, KV_TOKENS, 16)
            decisions = engine.backend_changed(names[one % len(names)], gauges, now)
        elif what == "health":
            decisions = engine.backend_changed(names[one % len(names)], other % 5 > 0, now)
        elif what == "wakes":
            decisions = engine.woke(now)
        elif what == "leaves" and self.queued and other % 2:
            gone = sorted(self.queued)[one % len(self.queued)]
            del self.queued[gone]
            decisions = engine.cancelled(gone, now)
        elif chosen:
            decisions = self.goes_on(what, chosen, other)
        for decision in decisions:
            prompt = self.queued.pop(decision.id)
            if isinstance(decision, Dispatch):
                self.dispatched[decision.id] = prompt
        self.log += decisions

    def arrive(self, one: int, other: int) -> Sequence[Decision]:
        self.serial += 1
        request = make_request(
            "abc"[one % 3], id=f"r{self.serial:03}", user=str(one % 2), weight=1.0 + one % 2, prompt=20 + 60 * other,
            body_bytes=10 * other, streamed=one % 4 != 0, arrived_s=self.now,
            claim=Claim(f"i{one % 4}", begins=True if other % 3 == 0 else None),
        )  # fmt: skip
        self.queued[request.id] = request.prompt_tokens
        return self.engine.arrived(request, self.now)

    def goes_on(self, what: str, chosen: str, other: int) -> Sequence[Decision]:
        if what == "streams":
            return self.engine.progressed(chosen, other, self.now)
        prompt = self.dispatched.pop(chosen)
        if what == "finishes":
            return self.engine.finished(chosen, ServiceTokens(prompt, 5 * other), self.now, None)
        if what == "leaves":
            return self.engine.cancelled(chosen, self.now)
        failure = (Failure.REFUSED, Failure.UNREACHED, Failure.BROKEN)[other % 3]
        if failure is not Failure.BROKEN:
            self.queued[chosen] = prompt
        return self.engine.failed(chosen, failure, self.now)
