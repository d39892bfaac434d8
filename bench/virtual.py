"""What is only told by simulation: clusters and GPUs in virtual time, by the production engine.

    python -m bench.virtual [--rows local,replicas,lengths,working-sets,regimes,waits] [--seeds 42] [--only 70B]
        [--seconds 1200] [--policy fairserve]

    local       throughput of `fairserve` with placement `prefix` over that of `d2lpm`, on the DLPM paper's workloads
    replicas    eight gateways before 32 engines, all of a tenant's traffic at its own half, over one gateway
    lengths     an H100 and the lengths of 27 clients of Chatbot Arena, over sending all of it straight to vLLM
    working-sets    agents whose contexts overfill the KV cache, with starts that wait for the working set and without
    waits       how many waits were as long as was told, and who gets in when `retry-after` says
    regimes     loads that once brought a fault to light, each over `vtc` or over no gateway, and what is required

Nothing is drawn but from fixed seeds, so the numbers are the same every time. `lengths` needs the recorded traces.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import profile
from bench import expected_waits, regimes, report, working_sets
from lab.dlpm.experiments import A10G, A100, LOCAL_QUANTUM, Workload, average
from lab.dlpm.programs import judge, long_context_qa, tree_of_thoughts
from lab.experiment import Inputs, MissingTraceError
from lab.lab_driver import simulate
from lab.simulation_result import SimulationResult
from lab.vtc.runs import arena
from lab.vtc.windows import in_flight, serve_with_rule
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.orders.fcfs import Fcfs
from policies.queue.bounds import QueueLimits
from simulation.run import Arrival
from tests.simulation.replicas import RAMP_S, WEIGHTS, Floods, SimulatedStore, run, service, skewed

GATEWAYS, ENGINES = 8, 32
CLIENTS = 40 * ENGINES
"""Clients of each of two tenants."""
FLOOD_S = 30.0
H100 = replace(profile("h100-llama3-8b"), max_num_seqs=1024)
LOADS = ((60, 8), (120, 8))
"""The trace comes so much faster than recorded, and so many times over: it then overloads an H100."""
TRACES = Path(__file__).parents[2] / "shared" / "traces"
ALL_WAIT = QueueLimits(queue_requests_max=1_000_000, queue_wait_s_max=1e6)


def local_workloads(engines: int) -> dict[str, Workload]:
    """The paper's four; question answering over long documents is run on one engine, as there."""
    if engines == 1:
        qa = partial(long_context_qa, 5, 60, 1.5, documents=8)
        return {
            "documents, S1": lambda seed: qa(misbehaviour="more", seed=seed),
            "documents, S2": lambda seed: qa(misbehaviour="longer", seed=seed),
        }
    return {
        "tree of thoughts, S2": lambda seed: tree_of_thoughts(
            4, 12 * engines, 0.1 * engines, misbehaviour="longer", seed=seed
        ),
        "judge, S1": lambda seed: judge(4, 24 * engines, 0.2 * engines, misbehaviour="more", seed=seed),
    }


def local_rows(seeds: Sequence[int]) -> list[list[str]]:
    rows = []
    for engines in (1, 2, 4, 8):
        for name, workload in local_workloads(engines).items():
            gpu = A100 if engines == 1 else A10G
            ours = average(partial(named_policy, "fairserve", placement="prefix"), workload, gpu, engines, seeds)
            paper = average(partial(named_policy, "d2lpm", quantum=LOCAL_QUANTUM), workload, gpu, engines, seeds)
            rows.append(
                [
                    f"{name}, {engines} engine{'s' * (engines > 1)}",
                    f"{ours.throughput / paper.throughput:.3f}",
                    f"{ours.hits:.2f} / {paper.hits:.2f}",
                    f"{ours.mean_s / paper.mean_s:.2f}",
                    f"{ours.jain_visible - paper.jain_visible:+.2f}",
                ]
            )
            print("  " + ", ".join(rows[-1]), flush=True)
    return rows


def replica_rows() -> list[list[str]]:
    rows, rates = [], []
    for gateways in (1, GATEWAYS):
        floods = Floods(FLOOD_S, skewed(gateways) if gateways > 1 else lambda *_: 0, clients=CLIENTS)
        found, _ = run(
            floods, gateways, SimulatedStore() if gateways > 1 else None, policy="fairserve", engines=ENGINES
        )
        got = service(found, RAMP_S, FLOOD_S)
        rates.append(sum(got.values()))
        due = WEIGHTS["heavy"] / WEIGHTS["light"]
        off = got["heavy"] / got["light"] / due - 1
        rows.append(
            [
                f"{gateways} gateway{'s' * (gateways > 1)}, {ENGINES} engines",
                f"{off:+.1%}",
                f"{rates[-1] / rates[0]:.3f}",
            ]
        )
        print("  " + ", ".join(rows[-1]), flush=True)
    return rows


def told(run: SimulationResult) -> tuple[float, int]:
    """Tokens per second until the last answer's end, and preemptions."""
    records = [record for record in run.records.values() if record.token_s]
    tokens = sum(record.arrival.prompt_tokens + len(record.token_s) for record in records)
    return tokens / max(record.token_s[-1] for record in records), sum(record.preemptions for record in records)


def length_rows(traces: Path) -> list[list[str]]:
    recorded = arena(Inputs(traces))
    rows = []
    for speed, copies in LOADS:
        arrivals = faster(recorded, speed, copies)
        direct, thrown = told(serve_with_rule(arrivals, Fcfs(), H100, in_flight(1_000_000)))
        for route in ("pages", "steps"):
            engine = AdmissionEngine(named_policy("vtc"), limits=ALL_WAIT)
            engine.add_backend("engine", max_num_seqs=H100.max_num_seqs)
            models = {"engine": EngineModel(H100)}
            rate, ours = told(simulate(arrivals, engine=engine, backends=models, steps=route == "steps"))
            name = f"{len(arrivals)} requests, {speed} times as fast, by {route}"
            rows.append([name, f"{rate / direct:.3f}", f"{ours} of {thrown}"])
            print("  " + ", ".join(rows[-1]), flush=True)
    return rows


def faster(recorded: Sequence[Arrival], speed: int, copies: int) -> list[Arrival]:
    copied = [
        replace(one, id=f"{one.id}-{copy}", arrived_s=one.arrived_s / speed)
        for copy in range(copies) for one in recorded
    ]  # fmt: skip
    Random(1).shuffle(copied)
    return sorted(copied, key=lambda one: one.arrived_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="clusters and GPUs in virtual time")
    parser.add_argument("--rows", default="local,replicas,lengths,working-sets,regimes,waits")
    parser.add_argument("--seeds", default="42", help="of all but `replicas` and `lengths`")
    parser.add_argument(
        "--only", default="", help="of `working-sets`, `regimes`, `waits`: rows with this in their name"
    )
    parser.add_argument(
        "--seconds", type=float, default=1200.0, help="of `working-sets` and `waits`: how long each run is"
    )
    parser.add_argument("--policy", default="fairserve", help="of `working-sets`")
    parser.add_argument("--traces", type=Path, default=TRACES)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    for name in options.rows.split(","):
        print(name, flush=True)
        if name == "local":
            heads = ["workload", "throughput", "cached, ours / d2lpm", "latency of those who behave", "Jain"]
            rows = local_rows(seeds)
        elif name == "working-sets":
            heads = working_sets.HEADS
            rows = working_sets.rows(options.only, seeds, options.seconds, options.policy)
        elif name == "regimes":
            heads, rows = regimes.HEADS, regimes.rows(options.only, seeds)
        elif name == "waits":
            heads, rows = expected_waits.HEADS, expected_waits.rows(options.only, seeds, options.seconds)
        elif name == "replicas":
            heads, rows = ["", "4:1, off", "throughput over one gateway"], replica_rows()
        elif name == "lengths":
            try:
                heads, rows = ["", "tokens/s over vLLM alone", "preemptions, of vLLM's"], length_rows(options.traces)
            except MissingTraceError as error:
                print(f"left out: {error}")
                continue
        else:
            parser.error(f"no row is named {name!r}")
        print(f"\n{report.table(heads, rows)}\n", flush=True)


if __name__ == "__main__":
    main()
