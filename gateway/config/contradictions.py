"""Contradictions between settings that are valid each by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gateway.config.checks import split_address
from gateway.config.model import Config
from gateway.config.paths import KNOWN_PATHS
from gateway.config.sections.groups import DEPTH_MAX, TreeNodeConfig
from policies.orders.policy_entries import POLICIES
from policies.orders.vtc import CounterOrder
from policies.tree.terms import ROOT

Loc = tuple[int | str, ...]
"""A place in the configuration: names of fields and numbers of items."""
Contradictions = Iterator[tuple[Loc, str]]
ROUNDING: Final = 1e-9
_UNIQUE: Final = {
    "routes": "path", "tenants": "name", "groups": "name", "pools": "name", "jwt": "issuer", "apps": "name",
}  # fmt: skip
"""Lists of sections, and the field that is unique in each."""


def _repeated(first: dict[str, Loc], name: str, loc: Loc, kind: str, advice: str = "") -> Contradictions:
    """Note the place of a name; a name that has a place already is a contradiction."""
    if first.setdefault(name, loc) != loc:
        yield loc, f"the same {kind} as {path_of(first[name])}{advice}"


def path_of(loc: Loc) -> str:
    """Return a place as text: pools[0].backends[1].url."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def contradictions(config: Config) -> Contradictions:
    """Yield the place and the reason of every contradiction."""
    for section, field in _UNIQUE.items():
        names: dict[str, Loc] = {}
        for number, one in enumerate(getattr(config, section)):
            yield from _repeated(names, getattr(one, field), (section, number, field), field)
    hashes: dict[str, Loc] = {}
    for t, tenant in enumerate(config.tenants):
        for k, key in enumerate(tenant.keys):
            yield from _repeated(hashes, key.hash, ("tenants", t, "keys", k, "hash"), "key")
    if not config.tenants and not config.open_access and not config.issues_keys:
        yield ("tenants",), "is empty: nobody could call; add a tenant, or set open_access: true"
    for r, route in enumerate(config.routes):
        known = KNOWN_PATHS.get(route.path)
        if both := [method for method in route.methods if known and method in known.methods]:
            why = f"is for {' and '.join(both)} {route.path}, which is known, and has its treatment; leave it out"
            yield ("routes", r, "treatment"), why
    yield from _address_contradictions(config)
    yield from _pool_contradictions(config)
    yield from _name_contradictions(config)
    yield from _tree_contradictions(config)
    yield from _guarantee_contradictions(config)
    bounds, limits = config.bounds, config.limits
    for name, value, most in (
        ("body_bytes_max", limits.body_bytes_max, bounds.body_bytes_most),
        ("json_bytes_max", limits.json_bytes_max, bounds.json_bytes_most),
        ("connections_max", limits.connections_max, bounds.connections * config.workers),
    ):
        if value is not None and value > most:
            yield ("limits", name), f"is more than memory_max ({config.memory_max}) has room for: {most}"


def _address_contradictions(config: Config) -> Contradictions:
    admin_host, admin_port = config.admin_address
    for text in (config.listen,) if isinstance(config.listen, str) else config.listen:
        host, port = split_address(text)
        hosts = {host, admin_host}
        is_same_host = len(hosts) == 1 or bool(hosts & {"0.0.0.0", "::"})
        is_same_host = is_same_host or ("localhost" in hosts and hosts <= {"localhost", "127.0.0.1", "::1"})
        if admin_port == port > 0 and is_same_host:
            yield ("admin",), f"takes the port of listen ({text}); give it another one"
    if config.has_replicas and any(backend.simulated for pool in config.pools for backend in pool.backends):
        field = "workers" if config.workers > 1 else "state"
        yield (field,), "several cannot share an engine inside a process (sim:); run `fairgate sim` and give its url"


def _pool_contradictions(config: Config) -> Contradictions:
    models, urls, names = dict[str, Loc](), dict[str, Loc](), dict[str, Loc]()
    each_address: set[str] = set()
    for p, pool in enumerate(config.pools):
        if pool.start_s_max and not pool.models:
            why = "needs `models`: while no engine runs, nothing else says what is served"
            yield ("pools", p, "start_s_max"), why
        for m, model in enumerate(pool.models):
            yield from _repeated(models, model, ("pools", p, "models", m), "model", ": a model belongs to one pool")
        for b, backend in enumerate(pool.backends):
            loc: Loc = ("pools", p, "backends", b)
            repeated = list(_repeated(urls, backend.url, (*loc, "url"), "url"))
            yield from repeated
            is_named = "name" in backend.model_fields_set
            if is_named or not repeated:
                place = (*loc, "name" if is_named else "url")
                yield from _repeated(names, backend.name, place, "backend name", ": give one of them another name")
            if backend.each_address:
                each_address.add(backend.name)
                if not backend.host:
                    why = "is for a url with a name, which may have several addresses; this one has none"
                    yield (*loc, "each_address"), why
            if backend.tls is not None and not backend.url.startswith("https:"):
                why = "is for an https url, and this one is another: without TLS nothing here would hold"
                yield (*loc, "tls"), why
    for name, loc in names.items():
        if (first := name.rpartition("@")[0]) in each_address:
            yield loc, f"is the name of an engine of {first} (each_address); give it another name"


def _name_contradictions(config: Config) -> Contradictions:
    served = {model for pool in config.pools for model in pool.models}
    are_all_known = all(pool.models for pool in config.pools)
    for alias, model in config.aliases.items():
        loc: Loc = ("aliases", alias)
        if alias in served:
            yield loc, "is the name of a model that a pool serves; leave it out, or give the alias another name"
        if model in config.aliases:
            yield loc, "stands for another alias; give the model itself"
        elif are_all_known and model not in served:
            yield loc, f"stands for a model that no pool serves; these do: {', '.join(sorted(served)[:20])}"
    for p, pool in enumerate(config.pools):
        other = pool.fallback
        if other is not None and (other in pool.models or (are_all_known and other not in served)):
            yield ("pools", p, "fallback"), "should be a model that another pool serves"


def _tree_contradictions(config: Config) -> Contradictions:
    above = {group.name: group.group for group in config.groups}
    for section in ("groups", "tenants"):
        for number, one in enumerate(getattr(config, section)):
            if one.group is not None and one.group not in above:
                yield (section, number, "group"), "is no group that `groups` has"
    for i, issuer in enumerate(config.jwt):
        if issuer.group_claim is not None and not config.groups:
            yield ("jwt", i, "group_claim"), "there are no `groups` that a token could name; leave it out, or add them"
    policy = config.policy.name
    if config.groups and not issubclass(POLICIES[policy].order, CounterOrder):
        yield ("groups",), f"the policy {policy} does not compare what tenants have received; fairserve does"


def _guarantee_contradictions(config: Config) -> Contradictions:
    above = {group.name: group.group for group in config.groups}
    depths = [_depth(group.name, above) for group in config.groups]
    for g, depth in enumerate(depths):
        if depth >= DEPTH_MAX:
            yield ("groups", g, "group"), f"it is in itself, or in more than {DEPTH_MAX - 2} others"
            return
    guaranteed: dict[str, float] = {ROOT: 0.0}
    # Deepest first: a group's guarantee covers the guarantees inside the group.
    order = sorted(range(len(depths)), key=lambda g: -depths[g])
    members: list[tuple[Loc, TreeNodeConfig]] = [(("tenants", t), tenant) for t, tenant in enumerate(config.tenants)]
    members += [(("groups", g), config.groups[g]) for g in order]
    for place, one in members:
        loc = (*place, "guaranteed_share")
        share = one.guaranteed_share or 0.0
        inside = guaranteed.get(one.name, 0.0) if place[0] == "groups" else 0.0
        if share and inside > share + ROUNDING:
            yield loc, f"is less than what is guaranteed in it: {inside:g}"
        where = one.group or ROOT
        guaranteed[where] = guaranteed.get(where, 0.0) + max(share, inside)
        if where == ROOT and guaranteed[ROOT] > 1.0 + ROUNDING:
            yield loc, f"more than all is guaranteed: {guaranteed[ROOT]:g} of each pool with this one"
            return


def _depth(name: str | None, above: dict[str, str | None]) -> int:
    depth = 0
    while name is not None and depth < DEPTH_MAX:
        depth, name = depth + 1, above.get(name)
    return depth
