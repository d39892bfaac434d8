"""Requests, and the values that describe their answers: the types that every room of `policies` shares.

A `Request` holds what the client sent; only its weights change. Its `Progress` holds what the gateway decides and sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any, Final, NamedTuple

BATCH: Final = " (batch)"
"""Suffix of the tenant node for a tenant's batch work. Names of tenants contain no space."""


def is_batch(leaf: str) -> bool:
    """Return whether this tenant node is for batch work."""
    return leaf.endswith(BATCH)


def of_batch(tenant: str) -> str:
    """Return the tenant node for this tenant's batch work."""
    return tenant + BATCH


def payer(leaf: str) -> str:
    """Return the tenant that owns this tenant node."""
    return leaf.removesuffix(BATCH)


class Flow(NamedTuple):
    """The origin of a request. Service is fair among tenants by weight, then among the flows of one tenant."""

    tenant: str
    """Name of the tenant node (`tree.pool_tree`): of a tenant, or of a tenant's batch work."""
    app: str = ""
    user: str = ""


@dataclass(slots=True, init=False, unsafe_hash=True)  # never changed
class CorrelationKeys:
    """The keys that match a call to its interaction. Answers issue keys, and later requests carry them.

    Every gateway derives equal strong and weak keys. Only the gateway that passed the answer on knows its keys of text.
    """

    strong: tuple[str, ...]
    """Ids that an answer issued to be sent back, as proof that the call is inside the interaction."""
    weak: tuple[str, ...]
    """Names of a session or of a turn of the model, valid only for a call at an agent's pace."""
    text: tuple[int, ...]
    """Hashes of lines of text, valid as weak keys are. Keys of text decide where weak keys do not."""
    text_min: int
    """Least number of a request's keys of text that one interaction must have to match without a weak key."""

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
    """The evidence that a request carries of its interaction."""

    id: str
    """Name of the interaction, given by the client or derived from the question it answers; "" if there is none."""
    stage: int | None
    """Place among the calls of the interaction, from 1; None if the client gives none."""
    begins: bool | None
    """True for a new question, False for a continuation (a tool's result), None if the content does not show it."""
    ends: bool
    """The client announces that no further call of this interaction follows."""
    extends: tuple[int, ...]
    """Chained hashes of a raw prompt, the whole prompt last. An earlier prompt of the flow belongs to the interaction
    of this one if its last hash is among these."""
    explicit: bool
    """The client named the interaction. Then only `ends` or silence ends it, and its correlation keys are ignored."""
    keys: CorrelationKeys
    """Correlation keys that the request carries."""
    session: str
    """Name of the session; "" if there is none. A session may contain several interactions."""
    last_turn: bytes
    """Name of the user's last turn; b"" if the last turn is not the user's."""

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


Key = tuple[str, str, str | int]
"""App, user, and the claimed id or the last hash of the raw prompt."""


class Interaction:
    """An open interaction: its calls so far, its calls under way, and its tokens."""

    __slots__ = (
        "as_holder", "awaited", "began_s", "calls", "contexts", "key", "key_hashes", "over", "reported", "seen_s",
        "start_tokens", "tenant", "tokens", "uncut_tokens", "under_way", "unreported",
    )  # fmt: skip

    def __init__(self, tenant: str, key: Key, now: float) -> None:
        self.tenant = tenant
        self.key = key
        self.calls = 0
        self.start_tokens = 0
        """Prompt tokens of its first call at this gateway; 0 until a call is admitted."""
        self.under_way = 0
        self.tokens = 0
        self.uncut_tokens = 0
        """Tokens spent since a call was last rejected, or since the start if none was."""
        self.over = False
        """The end was seen. The interaction closes or rests when none of its calls is under way."""
        self.began_s = self.seen_s = now
        self.awaited = False
        """The last answer asked for more, such as a tool's result, so a longer silence is allowed."""
        self.key_hashes: list[int] = []
        """Hashes of its keys in `policies.correlation_table`, the oldest first."""
        self.as_holder: tuple[Interaction, ...] | None = None
        """Only holder of a key there: one shared object, since most keys have one holder; None without keys."""
        self.contexts: tuple[Any, ...] = ()
        """Contexts of the interaction in the working sets of pools (`capacity.working_set`). A working set may have
        forgotten a context."""
        self.reported: Any = None
        """State that other gateways know. Written by the code that reports to them."""
        self.unreported: dict[str, tuple[bool, bool]] | None = None
        """Keys not yet reported to other gateways, each with (is strong, is new). Bounded by `KEYS_MAX`."""


class State(StrEnum):
    """The state of a request. `admission.lifecycle` lists the events that are possible in each state."""

    NEW = "new"
    """The request has arrived, and is not in the request ledger."""
    UNDECIDED = "undecided"
    """Other gateways are still to be asked about a limit that all of them count, or about the request's interaction."""
    ASKED = "asked"
    """Other gateways are asked. The request already counts towards its limits."""
    QUEUED = "queued"
    """The request waits for its turn."""
    MOVED = "moved"
    """The request fails over: it has left the queue of a pool without an engine for the queue of the fallback pool."""
    DISPATCHED = "dispatched"
    """An engine has the request."""
    ENDED = "ended"


class PlacementReason(StrEnum):
    """The reason for the choice of a request's engine."""

    ONLY = "only"
    """No other engine had room."""
    CACHED = "cached"
    """No engine has more of the prompt cached, and the answer is done soonest there."""
    SPREAD = "spread"
    """Another engine has more of the prompt cached, but is full or busy, so the answer is done sooner here."""
    RENDEZVOUS = "rendezvous"
    """No engine has any of the prompt cached, and prompts with equal beginnings go to one engine."""
    LEAST_LOADED = "least_loaded"
    """The engine ran least for its size."""
    PASSED = "passed"
    """The request passed the queue head, because the free engine has more of the request's prompt cached than of the
    head's."""
    ASSIGNED = "assigned"
    """The request was assigned at arrival, and waited in the queue of its engine."""
    TAKEN = "taken"
    """The request was assigned to another engine, and an idle engine took it."""


class Wait:
    """The wait of a request that could not start at once. `admission.waits` writes it.

    Attributes:
        by: seconds by obstacle (`capacity.obstacle.Obstacle`).
        closed_s: reading of the pool's clock of `Obstacle.CLOSED` when the request was queued.
        rest: the obstacle to which all other time is attributed.
        ended_s: time at which the wait ended; negative while it lasts.
        expected: the expected wait at its beginning (`queue.expected_wait`); None if an engine's return began the wait.
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
    """The gateway's state of one request. The admission engine writes it; an order writes the charges.

    Attributes:
        deadline_s: time at which the request expires if it still waits.
        answer_keys: keys that the answer issues for later calls of the interaction. The gateway reads them from it.
        unreached: dispatches that ended in a failed connection (`Failure.UNREACHED`).
        proven_refusals: dispatches that an engine refused although it took a request that was sent later.
        closed: by engine, the time until which the request may not go there; None if it may go everywhere.
        rests: whether the request waits outside the order, because each engine in service is closed to it.
        output_tokens_expected: mean output of similar requests, which a predicting policy charges ahead. 0 if too few
            were seen: nothing is charged ahead, and forecasts use the reserve.
        output_tokens_reserved: high quantile of the output of similar requests, which the ledger reserves.
        charged: service charged to the tenant so far, in the policy's own unit.
        normalised: service charged to the flow so far, where the policy compares flows in calls of normal cost.
        norm: service of a normal call of the app at this stage; 0 until an order has looked it up.
        cached_tokens, cached_blocks: beginning of the prompt that the engine was expected to have cached at dispatch.
        engine, order: the engine to which the request is dispatched or assigned, and the order that dispatched it.
            `admission.policy` writes both.
        interaction: the open interaction; None for a request without one, and for a start until it is admitted.
        stage: place among the calls of the interaction, from 1.
        inside: whether the request continues an open interaction that is within its caps. Such a call is not throttled.
        came_back: reason of an earlier refusal, if the client retried while its place was kept (`queue.places`).
        wasted_tokens: tokens spent on the interaction in vain, because this call was rejected.
        context: the context in the working set of the pool (`capacity.working_set`); None until the request counts.
        parked: whether the interaction no longer counts in the working set, so that this call waits like a start.
        is_followed: whether more calls are likely to follow this start, as the working set knew when it was queued.
        node: the node of the request's tenant in the tree of the pool, while the request is present there.
        counted: the counts of the quota that include this request; None if none do. `limits.quotas` writes it.
    """

    state: State = State.NEW
    deadline_s: float = inf
    unreached: int = 0
    proven_refusals: int = 0
    closed: dict[str, float] | None = None
    rests: bool = False
    came_back: RejectReason | None = None
    output_tokens_expected: float = 0.0
    output_tokens_reserved: int = 0
    charged: float = 0.0
    normalised: float = 0.0
    norm: float = 0.0
    cached_blocks: int = 0
    cached_tokens: int = 0
    placed: PlacementReason | None = None
    engine: str = ""
    order: Any = None
    interaction: Interaction | None = None
    stage: int = 1
    inside: bool = False
    answer_keys: CorrelationKeys = NO_KEYS
    wasted_tokens: int = 0
    wait: Wait | None = None
    context: Any = None
    parked: bool = False
    is_followed: bool = True
    counted: Any = None
    node: Any = None


class Price(NamedTuple):
    """The price of a model, in units of the currency per million tokens."""

    input: float
    cached: float
    output: float

    def cost(self, service: ServiceTokens) -> int:
        """Return the cost of received service, in millionths of the currency."""
        cached = service.cached or 0
        return int((service.prompt - cached) * self.input + cached * self.cached + service.output * self.output)


FREE: Final = Price(0.0, 0.0, 0.0)


class Request:
    """A request as the client sent it, with its estimated size. Only the weights change.

    Attributes:
        weight: part of the tenant as a weight (`tree.pool_tree`); a running request keeps the one at dispatch.
        configured_weight: weight of the request's key or, if that has none, of its tenant.
        prompt_tokens: estimate; the true number comes with the service.
        output_tokens_max: limit that the request itself sets, over all of its sequences.
        sequences: parallel sequences (`n`); `Slots.count_for` says how many slots they take.
        body_bytes: memory that the request takes in the gateway while it waits.
        streamed: whether progress is visible before the end.
        system_tokens: prompt tokens of the app's own instructions.
        prefix: chained hashes of the blocks of the prompt, the first block first; empty where nothing reads them.
        adapter: name of the requested adapter (LoRA); "" for the model itself.
        client_id: the client's own name of the request; "" if it has none. Not unique.
        wait_s_max: longest wait that the client accepts, in seconds.
        quota_names: names under which the request counts beside its tenant (`Quotas.names`).
        engine: the only engine that can serve the request; "" if any can.
    """

    __slots__ = (
        "adapter", "arrived_s", "body_bytes", "claim", "client_id", "configured_weight", "engine", "flow", "id",
        "is_batch", "output_tokens_max", "prefix", "price", "progress", "prompt_tokens", "quota_names", "sequences",
        "streamed", "system_tokens", "wait_s_max", "weight",
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
        self.is_batch: Final = is_batch(flow.tenant)
        self.weight = self.configured_weight = weight
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
    """The tokens that one request has received.

    `cached` of the `prompt` tokens were found in the engine's cache; None if the engine has reported no usage.
    """

    prompt: int
    output: int
    cached: int | None

    def __init__(self, prompt: int, output: int, cached: int | None = None) -> None:
        self.prompt = prompt
        self.output = output
        self.cached = cached


class RejectReason(StrEnum):
    """The reason why a request is refused."""

    QUEUE_FULL = "queue_full"
    """The queue is full, and the tenant has at least its fair share of it."""
    QUEUE_TIMEOUT = "queue_timeout"
    """The request waited until its deadline."""
    NO_BACKEND = "no_backend"
    """No engine is in service, or none could be reached."""
    BACKEND_FAILED = "backend_failed"
    """An engine failed after it had received the request, and no other engine can take the request."""
    SERVER_BUSY = "server_busy"
    """Every engine refuses this request: with a Retry-After, or repeatedly while it accepts other requests."""
    RATE_LIMITED = "rate_limited"
    """The tenant is beyond a limit that always holds."""
    OVER_USER_LIMIT = "over_user_limit"
    """The KV cache is overloaded, and the user is beyond a user's limit."""
    WORKING_SET = "working_set"
    """The request would begin an interaction, and the interactions under way leave no room in the KV cache in time."""
    OVER_APP_LIMIT = "over_app_limit"
    """The KV cache is overloaded, and the app is beyond its limit."""
    WAIT_TOO_LONG = "wait_too_long"
    """The expected wait is longer than the client accepts."""
    INTERNAL_ERROR = "internal_error"
    """An event of the request failed because of a fault in this program."""


class Limit(NamedTuple):
    """A limit, and the rest of it that its caller may use."""

    name: str
    limit: int
    remaining: int
    reset_s: float
    """Seconds until the limit has room again."""
    window_s: float = inf
    """Length of the counted time window. No Retry-After is longer, because some of the limit is free after a window."""


class Rejection(NamedTuple):
    """A refusal: its reason, and the seconds after which the client may try again."""

    reason: RejectReason
    retry_after_s: float
    limit: Limit | None = None


class Pressure(NamedTuple):
    """The overload of a pool, measured by its KV caches and never by a request rate."""

    overloaded: bool
    reason: str


WAIT_S_MAX: Final = 3600.0
"""Upper bound of expected waits, and of a pool's Retry-After before `gateway.proxy.refusals` adds up to a tenth."""
CALM: Final = Pressure(False, "")
"""No overload. Also recorded with decisions that do not depend on overload."""
