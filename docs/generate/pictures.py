"""Draws what the policies do: `python -m docs.generate.pictures`. The order of the boxes is what the production code
decides on the traffic that is drawn, before one engine that runs one request at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import NamedTuple

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import EngineProfile
from lab.lab_driver import simulate
from policies.admission.decisions import Dispatch
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import CapacitySettings
from policies.request import NO_CLAIM, Claim, Flow
from simulation.run import Arrival, Record

FIGURES = Path(__file__).parents[1] / "figures"
COLORS = {"heavy": "#d9822b", "light": "#2f7fd1", "third": "#3a9d5d"}
BOX, GAP, LEFT = 22, 4, 184
STYLE = (
    "<style>text{font:13px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#57606a}.on{font-size:11px;fill:#fff}"
    ".title{font-weight:600}@media (prefers-color-scheme:dark){text{fill:#adbac7}.on{fill:#fff}}</style>"
)
"""On light and on dark ground: nothing is behind the boxes, and the text follows the scheme."""

ENGINE = EngineProfile(
    name="one-at-a-time", block_size=16, num_gpu_blocks=1025, max_model_len=4096, max_num_seqs=1,
    max_num_batched_tokens=4096, base_s=0.01, per_prefill_token_s=1e-5, per_seq_s=1e-4, per_context_token_s=0.0,
)  # fmt: skip


class Ask(NamedTuple):
    """One request: by whom, how long its answer is, and what is written on its box."""

    tenant: str
    tokens: int = 100
    label: str = ""
    user: str = ""
    weight: float = 1.0
    prompt: int = 100
    prefix: int = 0
    claim: Claim = NO_CLAIM
    at_s: float = 0.0


def served(policy: str, asks: Sequence[Ask], **settings: float) -> list[Ask]:
    """In which order does the gateway send them? One after the other, as long as the engine runs none."""
    engine = AdmissionEngine(named_policy(policy, **settings), capacity=CapacitySettings(waiting_target=0))
    engine.add_backend("engine", max_num_seqs=1)
    arrivals = [
        Arrival(
            str(number), Flow(ask.tenant, "", ask.user), ask.at_s + 0.001 * number, ask.prompt, ask.tokens,
            weight=ask.weight, claim=ask.claim, prefix=_blocks(ask),
        )
        for number, ask in enumerate(asks)
    ]  # fmt: skip
    later = [one for one in arrivals if one.claim.id and one.claim.stage != 1]

    def follows(record: Record, now: float) -> Arrival | None:
        """A call of an agent comes when the one before it has ended."""
        return replace(later.pop(0), arrived_s=now + 0.001) if record.arrival.claim.id and later else None

    first = sorted((one for one in arrivals if one not in later), key=lambda one: one.arrived_s)
    run = simulate(first, engine=engine, backends={"engine": EngineModel(ENGINE)}, next_arrival=follows)
    return [asks[int(one.id)] for _, one in run.decisions if isinstance(one, Dispatch)]


def _blocks(ask: Ask) -> tuple[int, ...]:
    first = 1000 * ask.prefix
    return tuple(range(first, first + ask.prompt // 16)) if ask.prefix else ()


def lane(y: int, title: str, asks: Sequence[Ask], note: str = "") -> str:
    """A row of boxes, as wide as their answers are long."""
    x, parts = LEFT, [f'<text x="0" y="{y + 16}" class="title">{escape(title)}</text>']
    for ask in asks:
        width = BOX * ask.tokens // 100
        parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{BOX}" rx="3" fill="{COLORS[ask.tenant]}"/>')
        if ask.label:
            parts.append(f'<text x="{x + width / 2}" y="{y + 15}" text-anchor="middle" class="on">{ask.label}</text>')
        x += width + GAP
    if note:
        parts.append(f'<text x="{x + 8}" y="{y + 16}">{escape(note)}</text>')
    return "".join(parts)


def picture(
    name: str, described: str, lanes: Sequence[str], legend: Sequence[tuple[str, str]], width: int = 800
) -> None:
    y = 40 * len(lanes) + 8
    parts, x = list(lanes), LEFT
    for tenant, text in legend:
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" fill="{COLORS[tenant]}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 11}">{escape(text)}</text>')
        x += 30 + 7 * len(text)
    parts.append(f'<text x="{width - 4}" y="{y + 11}" text-anchor="end">time →</text>')
    height = y + 20
    (FIGURES / f"{name}.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(described, quote=True)}">{STYLE}{"".join(parts)}</svg>\n',
        encoding="utf-8",
    )


HEAVY_FIRST = [Ask("heavy") for _ in range(14)] + [Ask("light") for _ in range(4)]
BOTH = [("heavy", "a heavy user, who came first"), ("light", "a light user")]


def draw() -> None:
    """All drawings."""
    measured = [("heavy", "a user with 64 streams"), ("light", "a user with a few requests")]
    picture(
        "unfair-and-fair",
        "First come, first served: the light user's requests are last. With fairgate both take turns.",
        [
            lane(0, "First come, first served", served("fcfs", HEAVY_FIRST), "waits 0.9 s"),
            lane(40, "With fairgate", served("fairserve", HEAVY_FIRST), "waits 0.01 s"),
        ],
        measured,
    )
    picture(
        "policy-fcfs",
        "fcfs serves in order of arrival; vtc lets both take turns.",
        [lane(0, "fcfs", served("fcfs", HEAVY_FIRST)), lane(40, "vtc", served("vtc", HEAVY_FIRST))],
        BOTH,
    )
    sizes = [Ask("heavy", 200) for _ in range(6)] + [Ask("light", 50) for _ in range(14)]
    picture(
        "policy-vtc",
        "vtc counts tokens: several short answers go for each long one.",
        [lane(0, "vtc", served("vtc", sizes))],
        [("heavy", "long answers"), ("light", "short answers")],
    )
    weights = [Ask("heavy") for _ in range(9)] + [Ask("light", weight=3.0) for _ in range(12)]
    picture(
        "policy-weights",
        "Three requests of the tenant with weight 3 go for each of the one with weight 1.",
        [lane(0, "vtc", served("vtc", weights))],
        [("heavy", "weight 1"), ("light", "weight 3")],
    )
    even = [Ask("heavy") for _ in range(10)] + [Ask("light") for _ in range(9)]
    picture(
        "policy-rr",
        "vtc changes after each request; rr serves several of one tenant, then several of the other.",
        [lane(0, "vtc", served("vtc", even)), lane(40, "rr", served("rr", even, quantum=900))],
        BOTH,
    )
    documents = [Ask("heavy", label="AB"[n % 2], prefix=1 + n % 2, prompt=3200) for n in range(10)]
    documents += [Ask("light", label="C", prefix=3, prompt=3200) for _ in range(8)]
    picture(
        "policy-dlpm",
        "vtc changes documents with every request; dlpm keeps requests of one document together for a turn.",
        [
            lane(0, "vtc", served("vtc", documents, window_tokens=0)),
            lane(40, "dlpm", served("dlpm", documents, quantum=3800)),
        ],
        [("heavy", "questions about documents A and B"), ("light", "questions about document C")],
    )
    users = [Ask("heavy", label="abcd"[n % 4], user=f"u{n % 4}") for n in range(12)]
    users += [Ask("light", label="x", user="x") for _ in range(8)]
    picture(
        "policy-users",
        "A tenant with four users takes turns with a tenant with one user, and its users take turns among themselves.",
        [lane(0, "wsc", served("wsc", users))],
        [("heavy", "a tenant with users a to d"), ("light", "a tenant with user x")],
    )
    agent = [
        Ask("light", label=str(n + 1), claim=Claim(id="question", explicit=True, stage=n + 1), at_s=1.5)
        for n in range(5)
    ]
    others = [Ask("heavy") for _ in range(8)] + [Ask("third") for _ in range(7)]
    picture(
        "policy-fairserve",
        "wsc lets an agent's calls wait between those of others; fairserve finishes what the agent has begun.",
        [
            lane(0, "wsc", served("wsc", [*others, *agent])),
            lane(40, "fairserve", served("fairserve", [*others, *agent])),
        ],
        [("light", "an agent with five calls"), ("heavy", "a second tenant"), ("third", "a third tenant")],
    )


if __name__ == "__main__":
    draw()
