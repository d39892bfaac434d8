"""What in a configuration cannot be true together? Takes raw data, which may be wrong elsewhere, or models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticCustomError

from gateway.config.checks import backend_name, checked_url, split_address
from gateway.config.memory_bounds import MEMORY_MAX_LEAST, bounds_of
from gateway.config.provenance import Loc
from gateway.config.sections.groups import DEPTH_MAX
from policies.orders.policy_entries import POLICIES
from policies.orders.vtc import CounterOrder
from policies.tree.terms import ROOT

LISTEN: Final = "127.0.0.1:8080"
ADMIN: Final = "127.0.0.1:8190"
ROUNDING: Final = 1e-9
_UNIQUE: Final = {
    "routes": "path", "tenants": "name", "groups": "name", "pools": "name", "jwt": "issuer", "apps": "name",
}  # fmt: skip
"""What no two of a section have in common."""


def _get(section: Any, field: str) -> Any:
    """A field of a section that may be raw and may be wrong: None when it is not there."""
    if isinstance(section, Mapping):
        return section.get(field)
    return getattr(section, field, None) if isinstance(section, BaseModel) else None


def _items(section: Any, field: str) -> Iterator[tuple[int, Any]]:
    found = _get(section, field)
    return enumerate(found if isinstance(found, list | tuple) else ())


class _Once:
    """Which names were seen, and where first?"""

    def __init__(self, what: str) -> None:
        self.what = what
        self.first: dict[str, Loc] = {}

    def again(self, name: Any, loc: Loc, advice: str = "") -> Iterator[tuple[Loc, str]]:
        if isinstance(name, str) and name:
            first = self.first.setdefault(name, loc)
            if first != loc:
                yield loc, f"the same {self.what} as {path_of(first)}{advice}"


def path_of(loc: Loc) -> str:
    """How a place in the configuration is written: pools[0].backends[1].url."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def contradictions(config: Any) -> Iterator[tuple[Loc, str]]:
    """Every place with what cannot be true there."""
    for section, field in _UNIQUE.items():
        names = _Once(field)
        for number, one in _items(config, section):
            yield from names.again(_get(one, field), (section, number, field))
    yield from _address_contradictions(config)
    yield from _pool_contradictions(config)
    yield from _name_contradictions(config)
    hashes = _Once("key")
    for t, tenant in _items(config, "tenants"):
        for k, key in _items(tenant, "keys"):
            loc: Loc = ("tenants", t, "keys", k)
            text, loc = (key, loc) if isinstance(key, str) else (_get(key, "hash"), (*loc, "hash"))
            yield from hashes.again(text.lower() if isinstance(text, str) else None, loc)
    nobody = _get(config, "tenants") in (None, (), []) and _get(config, "open_access") is not True
    if nobody and _get(config, "usage") is None and _state_url(config) == "memory":
        yield ("tenants",), "is empty: nobody could call; add a tenant, or set open_access: true"
    yield from _tree_contradictions(config)
    yield from _limit_contradictions(config)


def _limit_contradictions(config: Any) -> Iterator[tuple[Loc, str]]:
    memory_max, pools, workers = _get(config, "memory_max"), _get(config, "pools"), _get(config, "workers")
    if not isinstance(memory_max, int) or memory_max < MEMORY_MAX_LEAST:
        return
    bounds = bounds_of(memory_max, max(1, len(pools) if isinstance(pools, list | tuple) else 1))
    connections = bounds.connections * (workers if isinstance(workers, int) and workers > 0 else 1)
    most_of = {
        "body_bytes_max": bounds.body_bytes_most,
        "json_bytes_max": bounds.json_bytes_most,
        "connections_max": connections,
    }
    for field, most in most_of.items():
        value = _get(_get(config, "limits"), field)
        if isinstance(value, int) and value > most:
            yield ("limits", field), f"is more than memory_max ({memory_max}) has room for: {most}"


def _address_contradictions(config: Any) -> Iterator[tuple[Loc, str]]:
    listen, admin = _get(config, "listen") or LISTEN, _get(config, "admin") or ADMIN
    admin_host, admin_port = _address(admin)
    for text in listen if isinstance(listen, list | tuple) else (listen,):
        host, port = _address(text)
        hosts = {host, admin_host}
        is_same_host = len(hosts) == 1 or bool(hosts & {"0.0.0.0", "::"})
        is_same_host = is_same_host or ("localhost" in hosts and hosts <= {"localhost", "127.0.0.1", "::1"})
        if admin_port > 0 and admin_port == port and is_same_host:
            yield ("admin",), f"takes the port of listen ({text}); give it another one"
    workers = _get(config, "workers")
    workers = workers if isinstance(workers, int) else 1
    backends = [backend for _, pool in _items(config, "pools") for _, backend in _items(pool, "backends")]
    simulated = any(str(_get(backend, "url")).startswith("sim:") for backend in backends)
    field = "workers" if workers > 1 else "state" if _state_url(config) != "memory" else None
    if simulated and field is not None:
        yield (
            (field,),
            "several cannot share an engine inside a process (sim:); run `fairgate sim` and give its url",
        )


def _address(text: Any) -> tuple[str, int]:
    return split_address(text) if isinstance(text, str) else ("", -1)


def _state_url(config: Any) -> Any:
    state = _get(config, "state")
    url = state if isinstance(state, str) else _get(state, "url")
    return url.get_secret_value() if isinstance(url, SecretStr) else url or "memory"


def _pool_contradictions(config: Any) -> Iterator[tuple[Loc, str]]:
    models, urls, names = _Once("model"), _Once("url"), _Once("backend name")
    of_many: set[str] = set()
    for p, pool in _items(config, "pools"):
        for m, model in _items(pool, "models"):
            yield from models.again(model, ("pools", p, "models", m), ": a model belongs to one pool")
        for b, backend in _items(pool, "backends"):
            loc: Loc = ("pools", p, "backends", b)
            try:
                url = checked_url(_get(backend, "url") or "")
            except (PydanticCustomError, TypeError):
                url = ""
            repeated = list(urls.again(url, (*loc, "url")))
            yield from repeated
            name = _get(backend, "name")
            if name or not repeated:
                yield from names.again(
                    name or backend_name(url), (*loc, "name" if name else "url"), ": give one of them another name"
                )
            if _get(backend, "each_address") is True:
                of_many.add(str(name or backend_name(url)))
    for name, loc in names.first.items():
        if (first := name.rpartition("@")[0]) in of_many:
            yield loc, f"is the name of an engine of {first} (each_address); give it another name"


def _name_contradictions(config: Any) -> Iterator[tuple[Loc, str]]:
    """Of names that stand for models of the pools."""
    pools = [
        (p, _get(pool, "fallback"), [model for _, model in _items(pool, "models")])
        for p, pool in _items(config, "pools")
    ]
    served = {model for _, _, models in pools for model in models if isinstance(model, str)}
    are_all_known = all(models for _, _, models in pools)
    found = _get(config, "aliases")
    aliases = found if isinstance(found, Mapping) else {}
    for alias, model in aliases.items():
        loc: Loc = ("aliases", alias)
        if alias in served:
            yield loc, "is the name of a model that a pool serves; leave it out, or give the alias another name"
        if isinstance(model, str) and model in aliases:
            yield loc, "stands for another alias; give the model itself"
        elif isinstance(model, str) and are_all_known and model not in served:
            yield loc, f"stands for a model that no pool serves; these do: {', '.join(sorted(served)[:20])}"
    for p, fallback, models in pools:
        if isinstance(fallback, str) and (fallback in models or (are_all_known and fallback not in served)):
            yield ("pools", p, "fallback"), "should be a model that another pool serves"


def _tree_contradictions(config: Any) -> Iterator[tuple[Loc, str]]:
    """Of groups and the tenants in them."""
    groups = [(("groups", g), group) for g, group in _items(config, "groups")]
    tenants = [(("tenants", t), tenant) for t, tenant in _items(config, "tenants")]
    above = {str(_get(group, "name")): _get(group, "group") for _, group in groups}
    for loc, one in (*groups, *tenants):
        group = _get(one, "group")
        if group is not None and str(group) not in above:
            yield (*loc, "group"), "is no group that `groups` has"
    for i, issuer in _items(config, "jwt"):
        if _get(issuer, "group_claim") is not None and not groups:
            yield ("jwt", i, "group_claim"), "there are no `groups` that a token could name; leave it out, or add them"
    policy = _get(config, "policy")
    policy = policy if isinstance(policy, str) else _get(policy, "name")
    if groups and policy in POLICIES and not issubclass(POLICIES[str(policy)].order, CounterOrder):
        yield ("groups",), f"the policy {policy} does not compare what tenants have received; fairserve does"
    for loc, group in groups:
        depth, name = 1, _get(group, "group")
        while name is not None and depth < DEPTH_MAX:
            depth, name = depth + 1, above.get(str(name))
        if depth == DEPTH_MAX:
            yield (*loc, "group"), f"it is in itself, or in more than {DEPTH_MAX - 2} others"
            return  # the sums below have no end
    guaranteed: dict[str, float] = {"": 0.0}
    # Deepest first: what a group is guaranteed is at least what is guaranteed in it.
    for loc, one in (*tenants, *sorted(groups, key=lambda each: -_depth(_get(each[1], "name"), above))):
        own, name = _get(one, "guaranteed_share"), str(_get(one, "name")) if loc[0] == "groups" else None
        share = own if isinstance(own, int | float) else 0.0
        inside = guaranteed.get(name, 0.0) if name is not None else 0.0
        if share and inside > share + ROUNDING:
            yield (*loc, "guaranteed_share"), f"is less than what is guaranteed in it: {inside:g}"
        where = str(_get(one, "group") or "")
        guaranteed[where] = guaranteed.get(where, 0.0) + max(share, inside)
        if not where and guaranteed[""] > 1.0 + ROUNDING:
            yield (
                (*loc, "guaranteed_share"),
                f"more than all is guaranteed: {guaranteed[ROOT]:g} of each pool with this one",
            )
            return


def _depth(name: Any, above: Mapping[str, Any]) -> int:
    depth = 0
    while name is not None:
        depth, name = depth + 1, above.get(str(name))
    return depth
