"""A tenant whose answers run, beside tenants that flood the engines with long prompts, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import EngineProfile, profile
from bench.regimes import MEDIUM
from lab.several_gateways import simulate_together
from lab.simulation_result import SimulationResult
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.queue.bounds import QueueLimits
from policies.request import Flow, of_batch
from policies.tree.terms import Tree
from simulation.run import Arrival, Record
from tests.simulation.replicas import SimulatedStore

HONEST = "honest"
FLOOD_S, WARM_S, UNTIL_S = 3.0, 10.0, 26.0
"""When floods begin, and what is counted: the rate of the prefill has been learned by then."""
H100 = replace(profile("h100-llama3-8b"), max_num_seqs=64)


@dataclass(frozen=True)
class Clients:
    """Clients of one tenant in closed loops."""

    tenant: str
    clients: int
    prompt: int = 2_100
    output: int = 1
    begin_s: float = FLOOD_S
    batch: bool = False


STREAMS = Clients(HONEST, 12, 100, 400, 0.0)


@dataclass(frozen=True)
class Found:
    """Tokens a second that each tenant received."""

    output: Mapping[str, float]
    prompt: Mapping[str, float]
    run: SimulationResult

    @property
    def tokens_per_s(self) -> float:
        return sum(self.output.values()) + sum(self.prompt.values())


def serve(
    *clients: Clients,
    engine: EngineProfile = MEDIUM,
    engines: int = 1,
    steps: bool = True,
    is_held: bool = True,
    policy: str = "fairserve",
    tree: Tree | None = None,
    weights: Mapping[str, float] | None = None,
    gateways: int = 1,
    at: Callable[[str], int] = lambda tenant: 0,
    scrape: Callable[..., Any] | None = None,
    until_s: float = UNTIL_S,
) -> Found:
    """Serve these clients. `is_held`: prefill beyond a tenant's part waits; `at`: the gateway of a tenant's client."""
    deciding = [_engine(engine, engines, policy, tree, is_held=is_held) for _ in range(gateways)]
    serial = count()

    def ask(client: int, now: float) -> Arrival:
        of = owners[client]
        leaf = of_batch(of.tenant) if of.batch else of.tenant
        return Arrival(
            f"{client}/{next(serial)}", Flow(leaf, "app"), now, of.prompt, of.output,
            weight=(weights or {}).get(of.tenant, 1.0),
        )  # fmt: skip

    def again(record: Record, now: float) -> Arrival | None:
        return ask(int(record.arrival.id.split("/")[0]), now + 1e-3) if now < until_s else None

    owners = [each for each in clients for _ in range(each.clients)]
    first = sorted(
        [ask(client, each.begin_s + 0.01 * client) for client, each in enumerate(owners)],
        key=lambda arrival: arrival.arrived_s,
    )
    run = simulate_together(
        first,
        engines=deciding,
        backends={f"e{number}": EngineModel(engine) for number in range(engines)},
        arrives_at=lambda arrival, now: at(arrival.id),
        store=SimulatedStore() if gateways > 1 else None,
        next_arrival=again,
        steps=steps,
        scrape=scrape,
        until_s=until_s,
    )
    return _found(run, until_s)


def _engine(profile: EngineProfile, engines: int, policy: str, tree: Tree | None, *, is_held: bool) -> AdmissionEngine:
    settings = {"prefill_parts": True} if is_held else {}
    engine = AdmissionEngine(named_policy(policy, **settings), limits=QueueLimits(queue_wait_s_max=1e5), tree=tree)
    for number in range(engines):
        engine.add_backend(f"e{number}", max_num_seqs=profile.max_num_seqs)
    return engine


def _found(run: SimulationResult, until_s: float) -> Found:
    output: dict[str, float] = {}
    prompt: dict[str, float] = {}
    for record in run.records.values():
        leaf, counted_s = record.arrival.flow.tenant, until_s - WARM_S
        made = sum(WARM_S <= at_s < until_s for at_s in record.token_s)
        output[leaf] = output.get(leaf, 0.0) + made / counted_s
        if record.token_s and WARM_S <= record.token_s[0] < until_s:
            prompt[leaf] = prompt.get(leaf, 0.0) + record.arrival.prompt_tokens / counted_s
    return Found(output, prompt, run)


def of_alone(
    clients: Sequence[Clients], *, gateways: int = 1, at: Callable[[str], int] = lambda id: 0, **how: Any
) -> float:
    """Return the part of its output alone that the honest tenant has beside these clients."""
    of_engine = {name: value for name, value in how.items() if name in ("engine", "engines", "steps", "policy")}
    return serve(STREAMS, *clients, gateways=gateways, at=at, **how).output[HONEST] / _alone(**of_engine)


@cache
def _alone(**how: Any) -> float:
    return serve(STREAMS, **how).output[HONEST]
