"""What one arrival costs the throttle and the service counter, with a million interactions on the books.

    python -m bench.arrival [--users 100000] [--interactions 1000000] [--arrivals 100000]

Each in CPU time of one core: what interactions, throttle and weighted counter add to an arrival (not
overloaded; overloaded and inside an interaction; overloaded and at a start); what a whole request costs the admission
engine, from arrival to settlement; and how much memory the books take.
"""

import argparse
import resource
import time
from collections.abc import Callable
from itertools import count
from random import Random

from bench import report
from bench.scheduler import Anywhere
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import CapacitySettings
from policies.interactions import Interactions, InteractionSettings
from policies.limits.throttle import Ceilings, ThrottleSettings
from policies.orders.order import Selection
from policies.request import CALM, Claim, Flow, Pressure, Request, ServiceTokens

ROUNDS = 5
BATCH = 100
LIMIT_US = 15.0
OVERLOADED = Pressure(True, "benchmark")
LIMITED = Ceilings(starts=20, requests=600, tokens=4_000_000)
TENANTS = 100
APPS = ("chat", "agent", "search", "code")
ANSWER = ServiceTokens(800, 150)


class Books:
    """Interactions and policy as the engine uses them on an arrival, filled to the size asked for."""

    def __init__(self, users: int, interactions: int) -> None:
        self.rng = Random(1)
        self.users = users
        self.open = interactions
        self.serial = count()
        self.now = 1000.0
        self.policy = named_policy(
            "fairserve", flows_max=2 * users, throttle=ThrottleSettings(user=LIMITED, app_user=LIMITED)
        )
        # Silence does not end them here: the books stay as full as they are.
        self.table = Interactions(InteractionSettings(idle_s=1e6, open_max=2 * interactions))
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(interactions):
            self.arrive(self.request(number), CALM)
            self.leave()
        self.mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024

    def request(self, interaction: int) -> Request:
        """A call of this interaction (a new one if there is none of this number), as the gateway makes it."""
        user = interaction % self.users
        flow = Flow(f"tenant-{user % TENANTS}", APPS[user % len(APPS)], f"user-{user}")
        claim = Claim(f"interaction-{interaction:016x}")
        return Request(f"{next(self.serial):032x}", flow, 1.0, 800, 500, self.now, system_tokens=200, claim=claim)

    def arrive(self, request: Request, pressure: Pressure) -> None:
        self.table.arrived(request, self.now)
        if self.policy.order.refusal(request, self.now, pressure) is None:
            self.table.admitted(request, self.now)
            self.policy.push(request, self.now)

    def leave(self) -> None:
        """Serve the next one in order."""
        selection = self.policy.pop(self.now, Anywhere())
        assert isinstance(selection, Selection)
        request = selection.request
        self.policy.charge(request, ServiceTokens(800, 0), self.now, final=False)
        self.policy.charge(request, ANSWER, self.now, final=True)
        self.policy.order.learn(request, ANSWER, self.now)
        self.table.served(request, ANSWER, self.now, None)

    def measure(self, arrivals: int, pressure: Pressure, *, inside: bool) -> float:
        """CPU microseconds of one arrival, at 1,000 arrivals a second; a hundred wait at most."""
        spent_ns = 0
        for _ in range(arrivals // BATCH):
            made = [self.rng.randrange(self.open) if inside else self.open + next(self.serial) for _ in range(BATCH)]
            requests = [self.request(number) for number in made]
            begin_ns = time.process_time_ns()
            for request in requests:
                self.now += 0.001
                self.arrive(request, pressure)
            spent_ns += time.process_time_ns() - begin_ns
            while len(self.policy):
                self.leave()
        return spent_ns / (arrivals // BATCH * BATCH) / 1000


def whole_request(users: int, requests: int) -> float:
    """CPU microseconds of a request in the admission engine: arrived, first token, finished; nothing waits."""
    engine = AdmissionEngine(named_policy("fairserve", flows_max=2 * users), capacity=CapacitySettings())
    engine.add_backend("b", max_num_seqs=256)
    rng, now = Random(2), 1000.0
    made = []
    for number in range(requests):
        user = rng.randrange(users)
        flow = Flow(f"tenant-{user % TENANTS}", APPS[user % len(APPS)], f"user-{user}")
        claim = Claim(f"interaction-{number // 4:016x}")
        made.append(Request(f"{number:032x}", flow, 1.0, 800, 500, 0.0, claim=claim))
    begin_s = time.process_time()
    for request in made:
        now += 0.001
        engine.arrived(request, now)
        engine.progressed(request.id, 1, now)
        engine.finished(request.id, ANSWER, now, awaits_more=None)
    return (time.process_time() - begin_s) / requests * 1e6


def lookup_ns() -> float:
    """CPU nanoseconds of one turn of a loop that looks something up: how fast this machine is just now (quiet: 35)."""
    books, turns = {number: number for number in range(1000)}, range(300_000)
    begin_ns = time.process_time_ns()
    for _ in turns:
        books.get(5)
    return (time.process_time_ns() - begin_ns) / len(turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--interactions", type=int, default=1_000_000)
    parser.add_argument("--arrivals", type=int, default=100_000)
    options = parser.parse_args()
    if min(options.users, options.interactions) < 1 or options.arrivals < ROUNDS * BATCH:
        parser.error(f"--users and --interactions must be at least 1, --arrivals at least {ROUNDS * BATCH}")
    books = Books(options.users, options.interactions)
    share = options.arrivals // ROUNDS
    cases: dict[str, Callable[[], float]] = {
        "arrival, not overloaded": lambda: books.measure(share, CALM, inside=True),
        "arrival, overloaded, inside an interaction": lambda: books.measure(share, OVERLOADED, inside=True),
        "arrival, overloaded, at a start": lambda: books.measure(share, OVERLOADED, inside=False),
        "whole request in the engine, nothing waits": lambda: whole_request(options.users, share),
    }
    rounds: dict[str, list[float]] = {name: [] for name in cases}
    lookups_ns = []
    for _ in range(ROUNDS):
        lookups_ns.append(lookup_ns())
        for name, measure in cases.items():
            rounds[name].append(measure())
    rows = [[name, f"{report.median(values):.1f}", f"{max(values):.1f}"] for name, values in rounds.items()]
    print(report.table(["CPU us", "median", "worst round"], rows))
    print(
        f"\n{options.users} users, {len(books.table)} open interactions: {books.mb:.0f} MB. "
        f"Required of an arrival: at most {LIMIT_US:.0f} us.\n"
        f"One turn of a loop that looks something up takes {report.median(lookups_ns):.0f} ns."
    )
    report.save(
        "arrival",
        {
            "us": rounds,
            "lookup_ns": lookups_ns,
            "mb": books.mb,
            "users": options.users,
            "interactions": len(books.table),
        },
    )


if __name__ == "__main__":
    main()
