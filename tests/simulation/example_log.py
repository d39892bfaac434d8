"""Writes docs/examples/access.log.gz: a minute of invented traffic before a simulated engine, first come, first served,
as fairgate logs it. `python -m` writes it anew."""

from __future__ import annotations

import gzip
from pathlib import Path
from random import Random

import msgspec

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import PROFILES, EngineProfile
from lab.lab_driver import simulate
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.request import Flow
from simulation.run import Arrival

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "access.log.gz"
BEGINS_S = 1_790_000_000.0
PROFILE = PROFILES["h100-llama3.1-8b"]


def lines(seed: int = 1, profile: EngineProfile = PROFILE) -> bytes:
    """Three tenants: a batch job in bursts, people who chat, and agents whose calls belong together."""
    random = Random(seed)
    asked: list[dict[str, object]] = []
    arrivals: list[Arrival] = []

    def ask(time_s: float, tenant: str, app: str, user: str, tokens_in: int, tokens_out: int, **more: object) -> None:
        id = f"req_{len(asked):04}"
        arrivals.append(Arrival(id, Flow(tenant, app, user), time_s, tokens_in, tokens_out, 1024))
        asked.append({
            "request_id": id, "tenant": tenant, "app": app, "user": user, "weight": 1.0, "interaction": "", "stage": 1,
            "model": "llama-3.1-8b", "policy": "fcfs", "path": "/v1/chat/completions", "stream": True,
            "outcome": "completed", "reason": "", "tokens_in": tokens_in, "tokens_out": tokens_out, "tokens_cached": 0,
            "tokens_in_estimated": tokens_in, "tokens_out_max": 1024, "backend": "gpu-1", "tries": 1, **more,
        })  # fmt: skip

    for burst in range(3):
        for _ in range(110):
            ask(burst * 20 + random.random(), "batch", "summaries", "", random.randint(3000, 3900),
                random.randint(80, 160))  # fmt: skip
    for number in range(60):
        ask(number + random.random(), "people", "chat", f"user-{number % 9}", random.randint(20, 300),
            random.randint(20, 120))  # fmt: skip
    for run in range(8):
        time_s, tokens_in = 5.0 * run + random.random(), 600
        for stage in range(1, 6):
            ask(time_s, "agents", "coder", f"run-{run}", tokens_in, random.randint(20, 60), interaction=f"task-{run}",
                stage=stage, tokens_cached=0 if stage == 1 and not run else 512)  # fmt: skip
            time_s += random.uniform(1.0, 3.0)
            tokens_in += random.randint(100, 200)
    engine = AdmissionEngine(named_policy("fcfs"))
    engine.add_backend("gpu-1", max_num_seqs=profile.max_num_seqs)
    arrivals.sort(key=lambda arrival: arrival.arrived_s)
    records = simulate(arrivals, engine=engine, backends={"gpu-1": EngineModel(profile)}).records
    served = []
    for line in asked:
        record = records[str(line["request_id"])]
        if record.dispatched_s is None or record.ttft_s is None or record.finished_s is None:
            continue
        began_s = record.arrival.arrived_s
        served.append({
            "ts": round(BEGINS_S + record.finished_s, 3), **line, "ttft_ms": round(record.ttft_s * 1000, 2),
            "queue_ms": round((record.dispatched_s - began_s) * 1000, 2),
            "total_ms": round((record.finished_s - began_s) * 1000, 2),
        })  # fmt: skip
    served.sort(key=lambda line: str(line["ts"]))
    return b"".join(msgspec.json.encode(line) + b"\n" for line in served)


if __name__ == "__main__":
    EXAMPLE.write_bytes(gzip.compress(lines(), mtime=0))
