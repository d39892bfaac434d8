"""What does a request say, and what may be answered to it? The values that every room knows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from policies.interactions import Interaction

__all__ = [
    "CALM",
    "NO_CLAIM",
    "Claim",
    "Flow",
    "Limit",
    "Pressure",
    "Refusal",
    "Refused",
    "Request",
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
