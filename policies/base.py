"""Who goes next? The policy protocol, its numbered contract, and the values that pass through it.

A policy orders requests; it holds no capacity, time, socket or randomness. The `AdmissionEngine` asks it for the next
request and tells it what each request is known to have cost.

Contract (tests/policies/test_contract.py runs every clause over every registered policy):

P1  Work conserving: if some queued request is eligible and the view places whatever it is offered, `pop` returns one.
    A policy that holds requests for time declares when in `next_eligible`. Otherwise GPUs idle while users wait.
P2  Deterministic: the same calls give the same answers, whatever the hash seed. Otherwise the simulation lies.
P3  Exactly once: every pushed request leaves by `pop` or by `remove`, never by both.
P4  A request removed before dispatch has charged nothing; one that ends after dispatch keeps what was charged.
P5  Idle flows bank no credit: a flow that returns is served as if it had been present, within the bound of the policy.
P6  Estimates are trued up: after the final charge, counters are what an oracle would have charged.
P7  Memory is O(queued + running + `flows_max`): beyond so many, the flows that have been idle longest are forgotten.
P8  `pop` and `push` are O(log flows); `charge` is O(1).
P9  The service bound that the policy's docstring states holds on every trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from policies.backlog import Backlog
    from policies.interactions import Interaction
    from policies.limits import SlidingCounts

__all__ = [
    "CALM",
    "NO_CLAIM",
    "Claim",
    "ClusterView",
    "Flow",
    "Limit",
    "Policy",
    "Pressure",
    "Refusal",
    "Refused",
    "Request",
    "Selection",
    "ServiceTokens",
]


class Flow(NamedTuple):
    """Whose request is it? Fair among tenants by weight, then among the (app, user) flows of one tenant."""

    tenant: str
    app: str = ""
    user: str = ""


class Claim(NamedTuple):
    """What does a request say, or let see, of the interaction it belongs to?"""

    id: str = ""
    """Name of the interaction, given by the client or derived from the question it answers; "" if there is none."""
    stage: int | None = None
    """Its place among the calls of the interaction, from 1; None: not said."""
    begins: bool | None = None
    """True: a new question. False: it goes on with one (a tool's result). None: its content does not tell."""
    ends: bool = False
    """The client says that no call of this interaction follows."""
    extends: tuple[int, ...] = ()
    """Chained hashes of a raw prompt, the whole one last: an earlier prompt of the same flow whose last hash is among
    these is of the same interaction."""
    explicit: bool = False
    """The client named it in so many words: then only `ends` or silence ends it, and what content shows is ignored."""


NO_CLAIM: Final = Claim()
_NEVER: Final = float("inf")


@dataclass(slots=True, eq=False, init=False)
class Request:
    """One request as the engine sees it: who asks, and what it is expected to take.

    Attributes:
        prompt_tokens: as estimated before the answer; the truth comes with the service.
        output_tokens_max: upper limit that the request itself sets, over all of its sequences.
        sequences: parallel sequences (`n`), each of which takes a slot of the engine.
        body_bytes: what it occupies in our memory while it waits.
        streamed: whether progress can be seen before the end.
        deadline_s: when it expires if it is still queued; set by the engine.
        output_tokens_expected: mean output of its like; what a predicting policy charges ahead. Set by the engine.
        output_tokens_reserved: cautious output, a high quantile of its like; what the ledger holds. Set by the engine.
        charged: service charged to its tenant so far, in the policy's own unit; written by the policy only.
        normalised: the same as its flow was charged, in calls that are normal for the app; written by the policy only.
        norm: service of a normal call of its app at its stage; written by the policy only.
        attempts: dispatches that ended in a refusal or a failed connection.
        system_tokens: those of the prompt that are the app's own instructions.
        claim: what it says of its interaction.
        interaction: the open one that it is a call of; None: a call of its own, or a start not admitted yet. Set by the
            engine, as are the next two.
        stage: its place among the calls of its interaction, from 1.
        inside: it goes on with an open interaction that is within its caps: it is stalled, but not refused.
        prefix: chained hashes of the blocks of its prompt, the first one first; empty where nobody asks for them.
    """

    id: str
    flow: Flow
    weight: float
    prompt_tokens: int
    output_tokens_max: int
    arrived_s: float
    sequences: int
    body_bytes: int
    streamed: bool
    deadline_s: float
    output_tokens_expected: float
    output_tokens_reserved: int
    charged: float
    normalised: float
    norm: float
    attempts: int
    system_tokens: int
    claim: Claim
    interaction: Interaction | None
    stage: int
    inside: bool
    prefix: tuple[int, ...]
    blocked_at: int
    """Version of the room at which it was last found not to fit; lets an unchanged answer cost O(1)."""

    def __init__(  # written out, since one that is generated is not compiled
        self,
        id: str,
        flow: Flow,
        weight: float,
        prompt_tokens: int,
        output_tokens_max: int,
        arrived_s: float,
        sequences: int = 1,
        body_bytes: int = 0,
        streamed: bool = True,
        deadline_s: float = _NEVER,
        output_tokens_expected: float = 0.0,
        output_tokens_reserved: int = 0,
        charged: float = 0.0,
        normalised: float = 0.0,
        norm: float = 1.0,
        attempts: int = 0,
        system_tokens: int = 0,
        claim: Claim = NO_CLAIM,
        interaction: Interaction | None = None,
        stage: int = 1,
        inside: bool = False,
        prefix: tuple[int, ...] = (),
        blocked_at: int = -1,
    ) -> None:
        self.id = id
        self.flow = flow
        self.weight = weight
        self.prompt_tokens = prompt_tokens
        self.output_tokens_max = output_tokens_max
        self.arrived_s = arrived_s
        self.sequences = sequences
        self.body_bytes = body_bytes
        self.streamed = streamed
        self.deadline_s = deadline_s
        self.output_tokens_expected = output_tokens_expected
        self.output_tokens_reserved = output_tokens_reserved
        self.charged = charged
        self.normalised = normalised
        self.norm = norm
        self.attempts = attempts
        self.system_tokens = system_tokens
        self.claim = claim
        self.interaction = interaction
        self.stage = stage
        self.inside = inside
        self.prefix = prefix
        self.blocked_at = blocked_at


@dataclass(slots=True, init=False)
class ServiceTokens:
    """What has one request received so far?

    `cached` of the `prompt` tokens were found in the engine's cache; None: the engine has not said.
    """

    prompt: int
    output: int
    cached: int | None

    def __init__(self, prompt: int, output: int, cached: int | None = None) -> None:
        self.prompt = prompt
        self.output = output
        self.cached = cached


class ClusterView(Protocol):
    """Where would this request fit now?"""

    def place(self, request: Request) -> str | None:
        """Name of the backend that can start it now, or None."""

    def fits(self, request: Request, backend: str) -> bool:
        """Can this backend start it now? For a policy that chooses the backend itself."""

    def loads(self) -> dict[str, int]:
        """Requests dispatched to each backend in service, by its name."""


@dataclass(slots=True, init=False)
class Selection:
    """What goes next, and where?"""

    request: Request
    backend: str

    def __init__(self, request: Request, backend: str) -> None:
        self.request = request
        self.backend = backend


class Refusal(StrEnum):
    """Why is a request not served?"""

    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    NO_BACKEND = "no_backend"
    BACKEND_FAILED = "backend_failed"
    RATE_LIMITED = "rate_limited"
    """Beyond a limit of its own that holds at any time."""
    OVER_USER_LIMIT = "over_user_limit"
    """The KV cache is overloaded, and its user has started more than a user's limit."""
    OVER_APP_LIMIT = "over_app_limit"
    """The KV cache is overloaded, and its app has started more than the app's limit."""


class Limit(NamedTuple):
    """A limit that counts over a window, and where its caller stands."""

    name: str
    limit: int
    remaining: int
    reset_s: float
    """Until the window has room again."""


class Refused(NamedTuple):
    """A request that may not wait, and what its caller may do about it."""

    reason: Refusal
    retry_after_s: float
    limit: Limit | None = None


class Pressure(NamedTuple):
    """Is the pool overloaded, measured by its KV caches and never by a request rate?"""

    overloaded: bool
    reason: str
    drain_s: float
    """How long what waits takes at the measured rate of dispatch."""


CALM: Final = Pressure(False, "", 1.0)
"""Nothing waits."""


class Policy(ABC):
    """Which request is served next, and where? A policy that learns what is normal overrides the last three."""

    reads_prefixes: ClassVar[bool] = False
    """Requests are to come with the hashes of their prompt's blocks."""

    @abstractmethod
    def refusal(self, request: Request, now: float, pressure: Pressure) -> Refused | None:
        """May an arriving request not be queued? None: it may. Changes nothing: what is queued is counted by `push`."""

    @abstractmethod
    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        """Queue it; `front` puts a request that a backend refused back at the head of its flow.

        A request that comes back was charged nothing, finally, before it is pushed.
        """

    @abstractmethod
    def pop(self, now: float, view: ClusterView) -> Selection | None:
        """Take out the next request that the view places, or None if the next one in order has no room."""

    @abstractmethod
    def remove(self, request: Request, now: float) -> None:
        """Take out a queued request that was cancelled or has expired."""

    @abstractmethod
    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        """The service that a dispatched request has received is now this much in all (not: more)."""

    @abstractmethod
    def next_eligible(self, now: float) -> float | None:
        """When will time alone make a queued request eligible? None: nothing waits for time."""

    @abstractmethod
    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        """The numbers that decide this flow's place, by name."""

    @abstractmethod
    def __len__(self) -> int:
        """Requests queued."""

    def backlog(self) -> Backlog | None:
        """The counters that gateways share; None: it has none, or some for each backend."""
        return None

    def share_counts(self, epoch_s: float) -> list[SlidingCounts]:
        """From now on there may be other gateways that count the same, by a clock that is so much ahead: what is it?"""
        return []

    def learn(self, request: Request, service: ServiceTokens, now: float) -> None:
        """An answer came whole, and took this much."""
        return

    def snapshot(self) -> dict[str, Any]:
        """What was learned, as plain data that JSON can hold; empty if nothing ever is."""
        return {}

    def restore(self, learned: Any) -> None:
        """Go on from a snapshot. ValueError if it is none; then nothing has changed."""
        return

    def adopt(self, learned: Any) -> None:
        """Take from a snapshot of another gateway what it has seen more of. ValueError if it is none."""
        return
