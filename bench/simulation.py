"""How fast does the simulation run? The production engine and a policy in virtual time, with no record kept.

    python -m bench.simulation [--requests 1000000] [--policy vtc] [--backends 4] [--profile NAME]

Prints CPU time in all, for each request and for each output token, and the most memory that was used. Traffic: Poisson,
32 tenants with shares from 1 to 32, prompts of 200 and answers of `--output` tokens in the mean, at 95 % of what the
backends can do, so that a queue comes and goes.
"""

import argparse
import resource
import time
from collections import Counter
from collections.abc import Iterator
from random import Random

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import EngineProfile, profile
from bench import report
from lab.lab_driver import simulate
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.orders.policy_entries import POLICIES
from policies.queue.bounds import QueueLimits
from policies.request import Flow
from simulation.run import Arrival, Record

TENANTS = 32
PROMPT_TOKENS = 200


def requests_per_s(engine: EngineProfile, output_tokens: int) -> float:
    """What one engine can do when all its slots, or all its KV, are in use."""
    context = PROMPT_TOKENS + output_tokens / 2
    running = min(engine.max_num_seqs, engine.usable_blocks * engine.block_size / (PROMPT_TOKENS + output_tokens))
    prefill = running / output_tokens * PROMPT_TOKENS
    return running / output_tokens / engine.step_s(int(prefill), int(running), int(running * context))


def traffic(requests: int, rate: float, output_tokens: int) -> Iterator[Arrival]:
    random, now = Random(42), 0.0
    tenants = [Flow(f"tenant-{number}") for number in range(1, TENANTS + 1)]
    shares = list(range(1, TENANTS + 1))
    for number in range(requests):
        now += random.expovariate(rate)
        [flow] = random.choices(tenants, shares)
        prompt = 1 + int(random.expovariate(1 / PROMPT_TOKENS))
        output = 1 + int(random.expovariate(1 / output_tokens))
        yield Arrival(f"r{number}", flow, now, min(prompt, 2000), min(output, 2000))


def run(options: argparse.Namespace) -> dict[str, object]:
    engine_profile = profile(options.profile)
    limits = QueueLimits(queue_requests_max=100_000, queue_wait_s_max=3600.0)
    engine = AdmissionEngine(named_policy(options.policy), limits=limits)
    backends = {f"engine-{number}": EngineModel(engine_profile) for number in range(options.backends)}
    for name in backends:
        engine.add_backend(name, max_num_seqs=engine_profile.max_num_seqs)
    rate = 0.95 * options.backends * requests_per_s(engine_profile, options.output)
    outcomes: Counter[str] = Counter()
    tokens = 0

    def ended(record: Record) -> None:
        nonlocal tokens
        outcomes[record.outcome] += 1
        tokens += len(record.token_s)

    begin_s, cpu_s = time.perf_counter(), time.process_time()
    result = simulate(traffic(options.requests, rate, options.output), engine=engine, backends=backends, ended=ended)
    cpu_s = time.process_time() - cpu_s
    return {
        "requests": options.requests,
        "policy": options.policy,
        "backends": options.backends,
        "output_tokens": tokens,
        "outcomes": dict(outcomes),
        "simulated_s": result.ended_s,
        "cpu_s": cpu_s,
        "wall_s": time.perf_counter() - begin_s,
        "us_per_request": cpu_s / options.requests * 1e6,
        "us_per_token": cpu_s / max(tokens, 1) * 1e6,
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="speed of the simulation")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="vtc")
    parser.add_argument("--backends", type=int, default=4)
    parser.add_argument("--profile", default="h100-llama3.1-8b")
    parser.add_argument("--output", type=int, default=50, help="mean output tokens")
    result = run(parser.parse_args())
    heads = [
        "requests",
        "policy",
        "backends",
        "output tokens",
        "simulated",
        "CPU",
        "CPU per request",
        "per token",
        "memory",
    ]
    row = [
        f"{result['requests']:,}", str(result["policy"]), str(result["backends"]), f"{result['output_tokens']:,}",
        f"{result['simulated_s']:,.0f} s", f"{result['cpu_s']:,.0f} s", f"{result['us_per_request']:.0f} us",
        f"{result['us_per_token']:.1f} us", f"{result['memory_mib']:.0f} MiB",
    ]  # fmt: skip
    print(report.table(heads, [row]))
    report.save("simulation", result)


if __name__ == "__main__":
    main()
