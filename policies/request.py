"""What does a request say, and what may be answered to it? The values that all of policies knows.

A `Request` is what the client said, and never changes. What the gateway notes of it on its way is its `Progress`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any, Final, NamedTuple

BATCH: Final = " (batch)"
"""Ends the name of a tenant's leaf for its work that can wait. Names of tenants have no space."""


def is_batch(leaf: str) -> bool:
    """Is this the leaf of a tenant's work that can wait (class batch)?"""
    return leaf.endswith(BATCH)


def of_batch(tenant: str) -> str:
    """The leaf of this tenant's work that can wait."""
    return tenant + BATCH


def payer(leaf: str) -> str:
    """The tenant that pays for what this leaf receives."""
    return leaf.removesuffix(BATCH)


class Flow(NamedTuple):
    """Whose request is it? Fair among tenants by weight, then among the (app, user) flows of one tenant."""

    tenant: str
    """The leaf of the tree (`tree.pool_tree`): a tenant, or a tenant's work that can wait."""
    app: str = ""
    user: str = ""


@dataclass(slots=True, init=False, unsafe_hash=True)  # never changed
class CorrelationKeys:
    """By what is a call matched to its interaction? Requests carry keys, and answers give keys out.

    Strong and weak keys are the same at every gateway. Keys of text are known only where the answer passed.
    """

    strong: tuple[str, ...]
    """Ids that one answer gave out to be brought back: they prove that the call is inside."""
    weak: tuple[str, ...]
    """They hold only for a call that follows at an agent's pace: a session, a turn of the model."""
    text: tuple[int, ...]
    """Hashes of lines of text, which hold as weak keys do, where these do not decide."""
    text_min: int
    """So many of a request's keys of text must be of one interaction."""

    def __init__(
        self, strong: tuple[str, ...] = (), weak: tuple[str, ...] = (), text: tuple[int, ...] = (), text_min: int = 1
    ) -> None:
        self.strong = strong
        self.weak = weak
        self.text = text
        self.text_min = text_min


NO_KEYS: Final = CorrelationKeys()


@dataclass(slots=True, init=False, unsafe_hash=True)  # never changed
class Claim:
    """What does a request say of the interaction it belongs to, or carry from an earlier answer of it?"""

    id: str
    """Name of the interaction, given by the client or derived from the question it answers; "" if there is none."""
    stage: int | None
    """Its place among the calls of the interaction, from 1; None: not given."""
    begins: bool | None
    """True: a new question. False: it continues an earlier one (a tool's result). None: its content does not show
    which."""
    ends: bool
    """The client says that no call of this interaction follows."""
    extends: tuple[int, ...]
    """Chained hashes of a raw prompt, the whole prompt last. An earlier prompt of the same flow belongs to the same
    interaction if its last hash is among these."""
    explicit: bool
    """The client named the interaction explicitly. Then only `ends` or silence ends it, and its correlation keys
    are ignored."""
    keys: CorrelationKeys
    """By which an interaction of the same flow is known again."""
    session: str
    """Name of the session that it is part of; "" if there is none. A session is no interaction, but an interaction is
    of one session."""
    last_turn: bytes
    """Name of the last turn that it sends; b"" if that is none of the user's."""

    def __init__(
        self,
        id: str = "",
        stage: int | None = None,
        begins: bool | None = None,
        *,
        ends: bool = False,
        extends: tuple[int, ...] = (),
        explicit: bool = False,
        keys: CorrelationKeys = NO_KEYS,
        session: str = "",
        last_turn: bytes = b"",
    ) -> None:
        self.id = id
        self.stage = stage
        self.begins = begins
        self.ends = ends
        self.extends = extends
        self.explicit = explicit
        self.keys = keys
        self.session = session
        self.last_turn = last_turn


NO_CLAIM: Final = Claim()
_NEVER: Final = float("inf")


Key = tuple[str, str, str | int]
"""App, user, and the claimed id or the last hash of the prompt."""


class Interaction:
    """One open interaction: its calls so far, those under way, and the tokens it took."""

    __slots__ = (
        "awaited", "began_s", "calls", "key", "key_hashes", "look_s", "over", "reported", "seen_s", "start_tokens",
        "tenant", "tokens", "uncut_tokens", "under_way", "unreported",
    )  # fmt: skip

    def __init__(self, tenant: str, key: Key, now: float) -> None:
        self.tenant = tenant
        self.key = key
        self.calls = 0
        self.start_tokens = 0
        """Prompt of its first call at this gateway; 0: none has been admitted."""
        self.under_way = 0
        self.tokens = 0
        self.uncut_tokens = 0
        """Tokens spent since it was last cut, if it ever was."""
        self.over = False
        """Its end was seen. It closes when none of its calls is under way."""
        self.began_s = self.seen_s = now
        self.look_s = 0.0
        """When it is looked at for idleness; 0.0: not yet."""
        self.awaited = False
        """Its last answer asked for more, such as a tool's result: it may stay silent for longer."""
        self.key_hashes: list[int] | None = None
        """Of its correlation keys in `policies.correlation_table`, the oldest first; None: it has none."""
        self.reported: Any = None
        """What other gateways know of it. Written by the code that reports to them."""
        self.unreported: dict[str, tuple[bool, bool]] | None = None
        """Correlation keys that are still to be reported to other gateways: is each strong, and is it new? Bounded as
        `key_hashes` is. None: no key is to be reported."""


class State(StrEnum):
    """Where is a request between its arrival and its end? `admission.lifecycle` says what may happen in each state."""

    NEW = "new"
    """It has arrived, and is not in the request ledger."""
    UNDECIDED = "undecided"
    """It waits until other gateways are asked whether a limit that all of them count has room for it."""
    ASKED = "asked"
    """It waits for their answer, and is counted."""
    QUEUED = "queued"
    """It waits for its turn."""
    MOVED = "moved"
    """It has left the queue of a pool without an engine, for the queue of the pool that stands in."""
    DISPATCHED = "dispatched"
    """An engine has it."""
    ENDED = "ended"


class Placed(StrEnum):
    """Why did a request go to its engine?"""

    ONLY = "only"
    """No other engine had room for it."""
    CACHED = "cached"
    """No engine has more of its prompt, and it is done soonest there."""
    SPREAD = "spread"
    """Another engine has more of its prompt, but is full or busy: it is done sooner there."""
    RENDEZVOUS = "rendezvous"
    """No engine has any of its prompt: prompts that begin alike meet there."""
    LEAST_LOADED = "least_loaded"
    """That engine ran least for its size."""
    PASSED = "passed"
    """The engine was free for the next in order. This one went instead, because of what engines have cached."""
    ASSIGNED = "assigned"
    """It was assigned when it came, and waited in the queue of that engine."""
    TAKEN = "taken"
    """It was assigned elsewhere, and an engine that ran nothing took it."""


class Wait:
    """What has a request that could not start at once waited for? `admission.waits` writes it.

    Attributes:
        since_s: when it began to wait.
        by: seconds by obstacle (`capacity.obstacle.Obstacle`).
        closed_s: the pool's own clock of `Obstacle.CLOSED` as it was when the request was queued.
        rest: the obstacle for which all other time counts.
        ended_s: when the wait ended; less than 0: it has not.
        expected: how long it was expected to be when it began (`queue.expected_wait`); None: it began in another pool.
    """

    __slots__ = ("by", "closed_s", "ended_s", "expected", "rest", "since_s")

    def __init__(self, since_s: float, rest: str, closed_s: float) -> None:
        self.since_s = since_s
        self.by: dict[str, float] = {}
        self.closed_s = closed_s
        self.rest = rest
        self.ended_s = -1.0
        self.expected: Any = None


class Progress:
    """What the gateway notes of one request on its way. The admission engine writes it; an order writes its charges.

    Attributes:
        state: where it is on its way (`admission.lifecycle`).
        deadline_s: when the request expires if it still waits.
        answer_keys: keys that its answer gives out to later calls of its interaction. The gateway reads them from the
            answer.
        attempts: dispatches that ended in a failed connection.
        refusals: dispatches that an engine refused, though it took a request that it was sent later.
        closed: by engine, until when this request does not go there; None: it may go everywhere.
        rests: it waits outside the order, since each engine in service is closed to it.
        output_tokens_expected: mean output of similar requests; what a predicting policy charges ahead. 0: too few
            were seen, so nothing is charged ahead, and forecasts take the reserve.
        output_tokens_reserved: cautious output, a high quantile of similar requests; what the ledger reserves.
        charged: service charged to its tenant so far, in the policy's own unit.
        normalised: the same as its flow was charged, in calls that are normal for the app.
        norm: service of a normal call of its app at its stage; 0: no order has asked yet.
        cached_tokens: tokens of its prompt that its engine was expected to have cached at dispatch.
        cached_blocks: leading blocks of its prompt that its engine was expected to hold at dispatch.
        placed: why it went to its engine; says nothing as long as it waits.
        engine, order: its engine since it was dispatched or assigned there, and the order that let it go there.
            `admission.policy` writes both.
        interaction: its open interaction; None: it belongs to none, or is a start that is not admitted yet.
        stage: its place among the calls of its interaction, from 1.
        inside: it continues an open interaction that is within its caps. It may have to wait, but is not throttled.
        came_back: why it was refused before it came back when it might (`queue.places`); None: it was not.
        wasted_tokens: what its interaction had taken for nothing, since this call of it was rejected.
        wait: what held it back; None: nothing did.
        context: what it counts as in the working set of its pool; None: it does not count yet. `admission.working_set`
            writes it.
        parked: it goes on with an interaction that counts no more, and so waits like a start.
        counted: the counts of its tenant's quota that it was added to; None: it is in none. `limits.quotas` writes it.
    """

    __slots__ = (
        "answer_keys", "attempts", "cached_blocks", "cached_tokens", "came_back", "charged", "closed", "context",
        "counted", "deadline_s", "engine", "inside", "interaction", "norm", "normalised", "order",
        "output_tokens_expected", "output_tokens_reserved", "parked", "placed", "refusals", "rests", "stage", "state",
        "wait", "wasted_tokens",
    )  # fmt: skip

    def __init__(self, output_tokens_expected: float = 0.0, output_tokens_reserved: int = 0) -> None:
        self.state = State.NEW
        self.deadline_s = _NEVER
        self.attempts = 0
        self.refusals = 0
        self.closed: dict[str, float] | None = None
        self.rests = False
        self.came_back: Refusal | None = None
        self.output_tokens_expected = output_tokens_expected
        self.output_tokens_reserved = output_tokens_reserved
        self.charged = 0.0
        self.normalised = 0.0
        self.norm = 0.0
        self.cached_blocks = 0
        self.cached_tokens = 0
        self.placed: Placed | None = None
        self.engine = ""
        self.order: Any = None
        self.interaction: Interaction | None = None
        self.stage = 1
        self.inside = False
        self.answer_keys = NO_KEYS
        self.wasted_tokens = 0
        self.wait: Wait | None = None
        self.context: Any = None
        self.parked = False
        self.counted: Any = None


class Price(NamedTuple):
    """What a million tokens of a model cost: so many millionths each."""

    input: float
    cached: float
    output: float

    def of(self, service: ServiceTokens) -> int:
        """Return the cost of what was received, in millionths of the currency."""
        cached = service.cached or 0
        return int((service.prompt - cached) * self.input + cached * self.cached + service.output * self.output)


FREE: Final = Price(0.0, 0.0, 0.0)


class Request:
    """What a client said: who asks, and what the answer is expected to take. Never changed, but for the weight.

    Attributes:
        weight: of its tenant. It may be changed while the request waits. What runs is charged by the weight that it was
            dispatched with.
        prompt_tokens: an estimate before the answer; the true number comes with the service. output_tokens_max: upper
        limit that the request itself sets, over all of its sequences. sequences: parallel sequences (`n`); each takes a
        slot of the engine. body_bytes: memory of the gateway that it takes while it waits. streamed: whether progress
        can be seen before the end. system_tokens: prompt tokens that are the app's own instructions. claim: what it
        says of its interaction. can_wait: it is of class batch. prefix: chained hashes of the blocks of its prompt, the
        first one first; empty where nothing reads them. adapter: name of the adapter (LoRA) that it asks for; "" if it
        asks for a model itself. client_id: what its client calls it; "" if it does not. Not unique. wait_s_max: how
        long its client is willing to wait. quota_names: what it counts as beside its tenant (`Quotas.names`). price:
        of its model. engine: the only one that can serve it; "": any. progress: what the gateway notes of it.
    """

    __slots__ = (
        "adapter", "arrived_s", "body_bytes", "can_wait", "claim", "client_id", "engine", "flow", "id",
        "output_tokens_max", "prefix", "price", "progress", "prompt_tokens", "quota_names", "sequences", "streamed",
        "system_tokens", "wait_s_max", "weight",
    )  # fmt: skip

    def __init__(
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
        system_tokens: int = 0,
        claim: Claim = NO_CLAIM,
        prefix: tuple[int, ...] = (),
        adapter: str = "",
        client_id: str = "",
        wait_s_max: float = inf,
        progress: Progress | None = None,
        quota_names: tuple[str, ...] = (),
        price: Price = FREE,
        engine: str = "",
    ) -> None:
        self.id: Final = id
        self.flow: Final = flow
        self.can_wait: Final = is_batch(flow.tenant)
        self.weight = weight
        self.prompt_tokens: Final = prompt_tokens
        self.output_tokens_max: Final = output_tokens_max
        self.arrived_s: Final = arrived_s
        self.sequences: Final = sequences
        self.body_bytes: Final = body_bytes
        self.streamed: Final = streamed
        self.system_tokens: Final = system_tokens
        self.claim: Final = claim
        self.prefix: Final = prefix
        self.adapter: Final = adapter
        self.client_id: Final = client_id
        self.engine: Final = engine
        self.wait_s_max: Final = wait_s_max
        self.quota_names: Final = quota_names
        self.price: Final = price
        self.progress: Final = progress if progress is not None else Progress()

    def __repr__(self) -> str:
        return f"<Request {self.id} of {'/'.join(self.flow)}: {self.prompt_tokens} prompt tokens>"


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
    """No engine is in service, or none could be reached."""
    BACKEND_FAILED = "backend_failed"
    """An engine had it and went away, and no other engine can take it."""
    SERVER_BUSY = "server_busy"
    """Each engine refuses it, and says for how long, or goes on to refuse it while it takes others."""
    RATE_LIMITED = "rate_limited"
    """Its tenant is beyond a limit that holds at any time."""
    OVER_USER_LIMIT = "over_user_limit"
    """The KV cache is overloaded, and its user is beyond a user's limit."""
    WORKING_SET = "working_set"
    """It would begin an interaction, those under way fill the KV cache, and there would be no room in time."""
    OVER_APP_LIMIT = "over_app_limit"
    """The KV cache is overloaded, and its app is beyond the app's limit."""
    WAIT_TOO_LONG = "wait_too_long"
    """It would wait for longer than its client is willing to."""
    INTERNAL_ERROR = "internal_error"
    """An event of it failed, through a fault of this program."""


class Limit(NamedTuple):
    """A limit, and how much of it is left for its caller."""

    name: str
    limit: int
    remaining: int
    reset_s: float
    """Seconds until there is room again."""
    window_s: float = inf
    """Over how long the limit counts. No Retry-After is longer: within a window, some of the limit is free again."""


class Refused(NamedTuple):
    """A request that may not wait, with the reason, and when its client may try again."""

    reason: Refusal
    retry_after_s: float
    limit: Limit | None = None


class Pressure(NamedTuple):
    """Is the pool overloaded? Measured by its KV caches, never by a request rate."""

    overloaded: bool
    reason: str


RETRY_S_MAX: Final = 60.0
"""A limit that holds under overload only is asked about again after a minute: the overload may be over."""
WAIT_S_MAX: Final = 3600.0
"""No wait is expected to be longer."""
CALM: Final = Pressure(False, "")
"""Nothing waits."""
