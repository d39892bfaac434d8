"""Are waits as long as expected? Rows of `python -m bench.virtual`, by kind of traffic, each from several seeds.

    many      100 tenants of one to eight clients that ask again when they are answered, more than an engine can serve
    bursts    20 tenants that ask now and then, and every minute 100 to 400 requests of one of five others at once
    agents    those of `bench.working_sets` whose contexts are twice the KV cache, beside chat and a flood
    full      as `many`, and the queue holds half of those who would wait: others come back when `retry-after` says
    ceiling   as `many`, and every second tenant is in a group that may run a quarter of the slots

A wait of over a second counts if it ended at an engine. What is expected while nothing is known yet counts too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import EngineProfile
from bench.regimes import MEDIUM, Clients
from bench.working_sets import CHAT, FLOOD, SMALL, Row, engine_profile
from lab.agents import Crowd
from lab.lab_driver import simulate
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.queue.bounds import QueueLimits
from policies.request import Flow
from policies.tree.terms import ROOT, GroupSettings, Tree, TreePlace
from simulation.run import Arrival, Record

LARGE = replace(MEDIUM, name="64 slots", num_gpu_blocks=12_001, max_num_seqs=64, per_seq_s=5e-5)
THINK_S, AGAIN_S, JITTER = 3.0, 1.0, 0.1
AT_ITS_CEILING = Tree(
    {"group": TreePlace(ROOT, GroupSettings(weight=50.0, max_running=16))},
    {f"t{number}": TreePlace("group", GroupSettings()) for number in range(0, 100, 2)},
)
HEADS = ["", "as long as expected", "longer", "shorter", "in at first return"]


@dataclass
class Found:
    """The results of a run."""

    right: int
    longer: int
    shorter: int
    returns: int = 0
    """Requests that came back after their `retry-after`."""
    let_in: int = 0
    """Requests that came back and were not refused again."""

    @property
    def part_right(self) -> float:
        return self.right / max(1, self.right + self.longer + self.shorter)

    @property
    def part_let_in(self) -> float:
        return self.let_in / max(1, self.returns)


class Tenants:
    """100 tenants in closed loops, who obey `retry-after`."""

    def __init__(self, seed: int, until_s: float) -> None:
        self.random = Random(seed)
        self.until_s = until_s
        self.returns = self.let_in = 0
        self._back: set[str] = set()
        random = self.random
        self._clients = {
            f"t{number}": Clients(
                f"t{number}", clients=random.choice((1, 1, 2, 4, 8)), prompt=random.randint(100, 2000),
                output=random.randint(50, 300), vary=0.5,
            )
            for number in range(100)
        }  # fmt: skip

    def arrivals(self) -> list[Arrival]:
        found = [one for clients in self._clients.values() for one in clients.first(self.until_s, self.random)]
        return sorted(found, key=lambda one: one.arrived_s)

    def next_arrival(self, record: Record, now: float) -> Arrival | None:
        arrival = record.arrival
        is_refused = record.outcome != "completed"
        if arrival.id in self._back:
            self._back.discard(arrival.id)
            self.returns += 1
            self.let_in += not is_refused
        if now > self.until_s:
            return None
        if is_refused:
            again_s = now + record.retry_after_s * (1.0 + JITTER * self.random.random())
            again = replace(arrival, id=f"{arrival.id}+", arrived_s=again_s)
            if not arrival.id.endswith("+"):
                self._back.add(again.id)
            return again
        tenant, client, _ = arrival.id.split("/")
        return self._clients[tenant].ask(int(client), now + self.random.expovariate(1 / THINK_S), self.random)


def bursts(seed: int, until_s: float) -> list[Arrival]:
    """Bursts of some kinds of work, and others who ask now and then."""
    random, found = Random(seed), list[Arrival]()

    def ask(tenant: str, at_s: float, prompt: float, output: float) -> None:
        sizes = [max(1, int(size * random.uniform(0.5, 1.5))) for size in (prompt, output)]
        found.append(Arrival(f"{tenant}-{len(found)}", Flow(tenant), at_s, *sizes))

    for number in range(20):
        at_s = 0.0
        while (at_s := at_s + random.expovariate(0.25)) < until_s:
            ask(f"now-and-then-{number}", at_s, 800, 150)
    kinds = [(random.uniform(100, 1500), random.uniform(50, 300)) for _ in range(5)]
    at_s = 20.0
    while at_s < until_s:
        kind = random.randrange(5)
        for _ in range(random.randint(100, 400)):
            ask(f"burst-{kind}", at_s + random.uniform(0, 2), *kinds[kind])
        at_s += random.uniform(40, 70)
    return sorted(found, key=lambda one: one.arrived_s)


def run(kind: str, seed: int, until_s: float) -> Found:
    """Run one kind of traffic before one engine."""
    limits = QueueLimits(queue_wait_s_max=1e5, queue_wait_s_max_inside=1e6)
    arrivals: Iterable[Arrival]
    model: EngineProfile = LARGE
    following = None
    tenants = Tenants(seed, until_s)
    if kind == "bursts":
        arrivals = bursts(seed, until_s)
    elif kind == "agents":
        model = engine_profile(SMALL, 120_000)
        crowd = Crowd(Row("", SMALL, 120_000, 2, beside=(CHAT, FLOOD)).groups(), seed=seed, until_s=until_s)
        arrivals, following = crowd.arrivals(), crowd.next_arrival
    else:
        arrivals, following = tenants.arrivals(), tenants.next_arrival
        if kind == "full":
            limits = replace(limits, queue_requests_max=150)
    tree = AT_ITS_CEILING if kind == "ceiling" else None
    engine = AdmissionEngine(named_policy("fairserve"), limits=limits, tree=tree)
    engine.add_backend("engine", max_num_seqs=model.max_num_seqs)
    simulate(
        arrivals, engine=engine, backends={"engine": EngineModel(model)}, next_arrival=following,
        ended=lambda record: None, until_s=until_s,
    )  # fmt: skip
    counts = engine.requests.expected_waits.counts()
    return Found(counts["right"], counts["longer"], counts["shorter"], tenants.returns, tenants.let_in)


def rows(names: str, seeds: Sequence[int], until_s: float) -> list[list[str]]:
    """The kinds whose name has this in it."""
    found = []
    for kind in ("many", "bursts", "agents", "full", "ceiling"):
        for seed in seeds if names in kind else ():
            one = run(kind, seed, until_s)
            let_in = f"{one.part_let_in:.2f} of {one.returns}" if one.returns else ""
            found.append([f"{kind}, seed {seed}", f"{one.part_right:.2f}", str(one.longer), str(one.shorter), let_in])
            print("  " + ", ".join(found[-1]), flush=True)
    return found
