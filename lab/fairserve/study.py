"""What became of one workload of whole interactions under one policy? What FairServe's experiments read."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import EngineProfile, profile
from lab.fairserve.interaction_clients import Course, InteractionClients, PlannedInteraction
from lab.fairserve.population import is_abuser
from lab.lab_driver import simulate
from lab.simulation_result import SimulationResult
from lab.vtc.unfair_orders import Rpm
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.capacity.overload import OverloadSettings
from policies.queue.bounds import QueueLimits
from policies.request import RejectReason
from simulation.run import Arrival, Record

ENGINE = replace(profile("h100-llama3-8b"), max_model_len=32_768)
"""The longest prompts of the paper are longer than the model's own 8,192 tokens; nothing else changes."""
WAIT_S_MAX = 120.0
DELAYED_S = 1.0
"""A user is delayed when one of its calls waited longer than this before its dispatch; the figure has all others."""

_THROTTLED = frozenset({RejectReason.OVER_USER_LIMIT, RejectReason.OVER_APP_LIMIT, RejectReason.RATE_LIMITED})


class Provided(NamedTuple):
    """Service as the paper's table 3 counts it, as shares of 1: single requests, and interactions of several calls."""

    requests: float
    interactions: float
    users_of_requests: float
    users_of_interactions: float


@dataclass(slots=True, eq=False)
class Study:
    """The results of one workload under one policy."""

    name: str
    run: SimulationResult
    courses: list[Course]
    start_s: float
    end_s: float
    kv_at_refusal: list[float]
    """Share of the KV cache that requests held, at each throttled request."""
    calm_refusals: int
    """Requests throttled while the pool was not overloaded."""

    def benign(self) -> list[Course]:
        return [course for course in self.courses if not is_abuser(course.interaction.flow)]

    def cut(self) -> int:
        """Interactions refused in the middle."""
        return sum(course.cut for course in self.courses)

    def wasted_tokens(self) -> int:
        return sum(course.wasted_tokens for course in self.courses)

    def served(self) -> float:
        """Share of the interactions that were begun, and came to their end."""
        begun = [course for course in self.courses if not course.refused]
        return sum(course.completed for course in begun) / len(begun)

    def provided(self) -> Provided:
        """Table 3: of what was asked for, how much came to its end? And how many of the users got any answer?

        Only interactions that began count: a refused start is the refusal of a request.
        """
        requests = [course for course in self.courses if len(course.interaction.calls) == 1 or course.refused]
        several = [course for course in self.courses if len(course.interaction.calls) > 1 and not course.refused]
        return Provided(
            _completed(requests), _completed(several), _users_answered(requests), _users_answered(several)
        )  # fmt: skip

    def benign_users_refused(self) -> int:
        """Benign users of whom any call was refused, for whatever reason."""
        return len({course.interaction.flow.tenant for course in self.benign() if course.cut or course.refused})

    def refusals(self) -> tuple[int, int]:
        """Calls refused of abusers, and of all."""
        refused = [course for course in self.courses if course.cut or course.refused]
        return sum(is_abuser(course.interaction.flow) for course in refused), len(refused)

    def waits_s(self, *, inside: bool = False) -> dict[str, float]:
        """The longest wait of each user's calls, in seconds; a call that is refused has waited until then.

        `inside`: of users with interactions of several calls, and of calls behind the first only.
        """
        waits: dict[str, float] = defaultdict(float)
        for course in self.courses:
            if inside and len(course.interaction.calls) == 1:
                continue
            user = course.interaction.flow.tenant
            waits[user] = max([waits[user], *map(_wait_s, course.records[inside:])])
        return waits

    def delayed(self, more_than_s: float = DELAYED_S, *, inside: bool = False) -> float:
        """Share of users one of whose calls waited longer than this: of all, or as `waits_s` has it of those inside."""
        waits_s = self.waits_s(inside=inside).values()
        return sum(wait_s > more_than_s for wait_s in waits_s) / len(waits_s)

    def mean_wait_s(self, *, inside: bool) -> float:
        """Mean wait of benign users' calls, in seconds: of calls inside an interaction, or of calls that begin one."""
        waits_s = [
            _wait_s(record) for course in self.benign() for record in course.records[inside : None if inside else 1]
        ]
        return sum(waits_s) / len(waits_s)

    def overtaken(self) -> float:
        """How many requests of abusers were dispatched, in the mean, while a benign call waited longer than DELAYED_S?

        With 0 it waited for room in the engine, and not for them.
        """
        records = [record for record in self.run.records.values() if record.dispatched_s is not None]
        abusive = sorted(record.dispatched_s or 0.0 for record in records if is_abuser(record.arrival.flow))
        delayed = [r for r in records if not is_abuser(r.arrival.flow) and _wait_s(r) > DELAYED_S]
        passed = [
            bisect_left(abusive, record.dispatched_s or 0.0) - bisect_left(abusive, record.arrival.arrived_s)
            for record in delayed
        ]
        return sum(passed) / len(passed) if passed else 0.0

    def mean_ttft_s(self, *, benign: bool) -> float:
        """Mean time to the first token, in seconds, of the calls that were answered: of benign users, or of all."""
        courses = self.benign() if benign else self.courses
        times = [record.ttft_s for course in courses for record in course.records if record.ttft_s is not None]
        return sum(times) / len(times)

    def throughput(self) -> tuple[float, float]:
        """Prompt and output tokens per second while there is load: prompts count at their first token."""
        prompt = output = 0
        for record in self.run.records.values():
            if record.token_s and self.start_s <= record.token_s[0] < self.end_s:
                prompt += record.arrival.prompt_tokens
            output += sum(self.start_s <= at < self.end_s for at in record.token_s)
        seconds = self.end_s - self.start_s
        return prompt / seconds, output / seconds

    def app(self, number: int) -> tuple[int, float]:
        """Interactions of this application that came to their end, and its prompt tokens per second."""
        name = f"app{number}"
        served = sum(course.completed for course in self.courses if course.interaction.flow.app == name)
        prompt = sum(
            record.arrival.prompt_tokens
            for record in self.run.records.values()
            if record.arrival.flow.app == name and record.token_s and self.start_s <= record.token_s[0] < self.end_s
        )
        return served, prompt / (self.end_s - self.start_s)


def _completed(courses: Sequence[Course]) -> float:
    return sum(course.completed for course in courses) / len(courses) if courses else 1.0


def _users_answered(courses: Iterable[Course]) -> float:
    """Return the share of users with a final response among the users who got any answer."""
    users: dict[str, bool] = defaultdict(bool)
    for course in courses:
        users[course.interaction.flow.tenant] |= course.completed
    return sum(users.values()) / len(users) if users else 1.0


def _wait_s(record: Record) -> float:
    until_s = record.dispatched_s if record.dispatched_s is not None else record.finished_s
    return (until_s or 0.0) - record.arrival.arrived_s


def ends_calls(policy: str, *, wait_s_max: float = WAIT_S_MAX, **settings: Any) -> AdmissionEngine:
    """A policy that knows nothing of interactions: a call inside one waits no longer than any other."""
    return AdmissionEngine(named_policy(policy, **settings), limits=_waits(wait_s_max))


def flat_limit(requests_per_minute: int, *, wait_s_max: float = WAIT_S_MAX) -> AdmissionEngine:
    """A flat limit of requests, then first come, first served."""
    return AdmissionEngine(Policy(Rpm(requests_per_minute)), limits=_waits(wait_s_max))


def _waits(wait_s_max: float) -> QueueLimits:
    return QueueLimits(queue_wait_s_max=wait_s_max, queue_wait_s_max_inside=wait_s_max)


def protects_interactions(*, overload: OverloadSettings | None = None, **settings: Any) -> AdmissionEngine:
    """FairServe as the gateway has it: a call inside an interaction waits longer before it is given up.

    No start waits for the working set: the paper's engine caches no prefix, so to hold contexts cannot pay.
    """
    limits = QueueLimits(queue_wait_s_max=WAIT_S_MAX)
    return AdmissionEngine(named_policy("fairserve", working_set=False, **settings), limits=limits, overload=overload)


def study(
    name: str,
    engine: AdmissionEngine,
    planned: Sequence[PlannedInteraction],
    start_s: float,
    end_s: float,
    like: EngineProfile = ENGINE,
) -> Study:
    """Run one workload through this engine, which has seen no event and has no backend yet.

    Throughput is that between these times; everything else is over the whole run. One backend, `like` this profile.
    """
    engine.add_backend("one", max_num_seqs=like.max_num_seqs)
    model = EngineModel(like)
    interactions = InteractionClients(planned)
    kv_at_refusal: list[float] = []
    calm_refusals = 0

    def next_arrival(record: Record, now: float) -> Arrival | None:
        nonlocal calm_refusals
        if record.outcome in _THROTTLED:
            kv_at_refusal.append(model.gauges(now).kv_usage)
            calm_refusals += not engine.pressure(now).overloaded
        return interactions.next_arrival(record, now)

    run = simulate(
        interactions.arrivals(),
        engine=engine,
        backends={"one": model},
        next_arrival=next_arrival,
        scrape_interval_s=0.5,
    )
    return Study(name, run, list(interactions.courses.values()), start_s, end_s, kv_at_refusal, calm_refusals)


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"
