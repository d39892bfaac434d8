"""What kind of request is it? A table of known paths and methods; all others are refused.

A path is judged as sent and must be written in its one normal form, since an engine may read another spelling (`//`,
`/../`, `%2e`, a slash at the end) as the path of something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from backends.answers.sse import Dialect
from gateway.config.paths import KNOWN_PATHS, MANAGEMENT
from gateway.config.sections.listener import RouteConfig
from gateway.http.errors import ApiError, Reason
from gateway.request.apis import AUDIO, CHAT, COMPLETIONS, MESSAGES, ONE_PASS, OTHER, RESPONSES, TOKENS, Api


class RouteKind(Enum):
    """The way in which the gateway serves a request."""

    ADMIT = auto()
    """Generation or computation at an engine, which needs admission."""
    PASS = auto()
    """Cheap work at an engine, sent straight to a backend, with bounds per tenant."""
    MODELS = auto()
    BATCHES = auto()
    ME = auto()
    """The standing of the caller's tenant, answered by the gateway."""
    FILE = auto()
    """A file of a page, open to anybody."""
    HEALTH = auto()
    """A sign of life, and a hint for clients, answered by the gateway."""
    OPTIONS = auto()


@dataclass(frozen=True, slots=True)
class Route:
    """The way in which the gateway serves one method of one path."""

    kind: RouteKind
    dialect: Dialect = Dialect.OPENAI
    generates: bool = False
    """Whether the engine generates tokens one by one, rather than an answer in one pass."""
    api: Api = OTHER
    takes_body: bool = True
    methods: str = ""
    """Methods of the path, for OPTIONS."""

    @property
    def reports_usage(self) -> bool:
        """Return whether a stream reports usage if `stream_options` asks. Nothing is added to a body of unknown
        format."""
        return self.streams_events and self.dialect is Dialect.OPENAI

    @property
    def streams_events(self) -> bool:
        """Return whether a streamed answer is made of server-sent events. On a path that only the config names it may
        be sound."""
        return self.generates and self.api is not OTHER


Methods = dict[str, Route]

MODELS: Final = "/v1/models"
STORED_RESPONSES: Final = "/v1/responses/"

_ROUTES: Final = {
    "generate": Route(RouteKind.ADMIT, generates=True),
    "chat": Route(RouteKind.ADMIT, generates=True, api=CHAT),
    "completions": Route(RouteKind.ADMIT, generates=True, api=COMPLETIONS),
    "responses": Route(RouteKind.ADMIT, Dialect.RESPONSES, generates=True, api=RESPONSES),
    "messages": Route(RouteKind.ADMIT, Dialect.MESSAGES, generates=True, api=MESSAGES),
    "audio": Route(RouteKind.ADMIT, generates=True, api=AUDIO),
    "compute": Route(RouteKind.ADMIT, api=ONE_PASS),
    "count_tokens": Route(RouteKind.PASS, Dialect.MESSAGES, api=MESSAGES),
    "tokens": Route(RouteKind.PASS, api=TOKENS),
    "pass": Route(RouteKind.PASS),
    "read": Route(RouteKind.PASS, takes_body=False),
    "stored": Route(RouteKind.BATCHES),
    "models": Route(RouteKind.MODELS, takes_body=False),
    "me": Route(RouteKind.ME, takes_body=False),
    "file": Route(RouteKind.FILE, takes_body=False),
    "health": Route(RouteKind.HEALTH, takes_body=False),
}
"""Routes by treatment: those of the known paths, and `generate`, `compute` and `pass` of configured ones."""

_NORMAL: Final = re.compile(r"(/(?!\.\.?(?:/|$))[A-Za-z0-9._~:-]+)+")
_STEP: Final = "[^/]+"
_OLLAMA: Final = {
    "/api/chat": "/chat/completions",
    "/api/generate": "/completions",
    "/api/embed": "/embeddings",
    "/api/tags": "/models",
}
"""Paths of Ollama's own API, and their counterparts behind `/v1`."""


class Routes:
    """The routes of one gateway."""

    def __init__(self, configured: Iterable[RouteConfig] = ()) -> None:
        """Create the known routes and those that the config opens. A star in a path stands for one step."""
        self._plain: dict[str, Methods] = {}
        self._starred: list[tuple[re.Pattern[str], Methods]] = []
        starred: dict[str, Methods] = {}
        known = [(path, one.methods, one.treatment) for path, one in KNOWN_PATHS.items()]
        for path, methods, treatment in [*known, *[(one.path, one.methods, one.treatment) for one in configured]]:
            route = _ROUTES[treatment]
            table = starred if "*" in path else self._plain
            found = table.setdefault(path, {})
            for method in methods:
                found.setdefault(method, route)
                if method == "GET":
                    found.setdefault("HEAD", route)
        for path, found in starred.items():
            self._starred.append((re.compile(_pattern(path)), found))
        for found in (*self._plain.values(), *starred.values()):
            found["OPTIONS"] = Route(RouteKind.OPTIONS, takes_body=False, methods=", ".join([*found, "OPTIONS"]))
        everywhere = Route(RouteKind.OPTIONS, takes_body=False, methods="GET, HEAD, POST, OPTIONS")
        self._plain["*"] = {"OPTIONS": everywhere}

    def response_id(self, path: str) -> str:
        """Return the id of the stored response that a path names. Empty if the path names none, or is itself
        configured."""
        return path.split("/")[3] if path.startswith(STORED_RESPONSES) and path not in self._plain else ""

    def find(self, method: str, path: str) -> Route:
        """Return the route of a request, whose `path` is as sent, without the query. Raise ApiError if there is
        none."""
        methods = self._plain.get(path)
        if methods is None and path.startswith(MODELS + "/") and path != MODELS + "/":
            methods = self._plain[MODELS]  # a model's name may hold anything, and no engine gets the path
        if methods is None:
            methods = self._by_pattern(method, path)
        route = methods.get(method)
        if route is None:
            allowed = methods["OPTIONS"].methods
            message = f"{method} is not offered at {path[:200]}, only {allowed}"
            raise ApiError(Reason.METHOD_NOT_ALLOWED, message, fields=[(b"allow", allowed.encode())])
        return route

    def _by_pattern(self, method: str, path: str) -> Methods:
        if _NORMAL.fullmatch(path) is None and path != "/":
            message = "the path can be read in more than one way; write it without //, /./, /../, %.., a final slash"
            raise ApiError(Reason.INVALID_PATH, message)
        hint = ""
        if MANAGEMENT.isdisjoint(path.lower().split("/")):
            for pattern, methods in self._starred:
                if pattern.fullmatch(path) is not None:
                    return methods
            hint = _meant(method, path) or "; the operator of this gateway can open other paths with `routes:`"
        raise ApiError(Reason.NOT_FOUND, f"there is nothing at {method} {path[:200]}{hint}")


def _pattern(path: str) -> str:
    return re.escape(path).replace(r"\*", _STEP)


_VERSIONED: Final = {path.removeprefix("/v1"): path for path in KNOWN_PATHS if path.startswith("/v1/")}
_MEANT: Final = re.compile(rf"(?:/{_STEP})*?(?:{'|'.join([f'({_pattern(path)})' for path in _VERSIONED])})")


def _meant(method: str, path: str) -> str:
    """Return a hint at the known path that a wrong one ends like: most often `base_url` lacks /v1, or has it twice."""
    found = _MEANT.fullmatch(_OLLAMA.get(path, path))
    if found is None:
        return ""
    known = list(_VERSIONED.values())[(found.lastindex or 1) - 1]
    methods = KNOWN_PATHS[known].methods
    where = "before /v1 for clients of Anthropic's API" if known.startswith("/v1/messages") else "with /v1"
    return f". Did you mean {method if method in methods else methods[0]} {known}? base_url ends {where}."
