"""Random trees of groups, and the part of each node by definition."""

from __future__ import annotations

from itertools import count
from random import Random

from policies.tree.terms import ROOT, GroupSettings, Tree, TreePlace


def random_tree(rng: Random, *, depth: int = 4, floors: bool = True) -> Tree:
    groups: dict[str, TreePlace] = {}
    tenants: dict[str, TreePlace] = {}
    numbers = count()

    def grow(where: str, level: int, free: float) -> None:
        """`free`: what may be guaranteed in it."""
        children = rng.randint(2, 3)
        for _ in range(children):
            share = None
            if floors and free and rng.random() < 0.4:
                share = free * rng.uniform(0.2, 0.9) / children
            settings = GroupSettings(weight=rng.choice([0.5, 1.0, 2.0, 4.0]), guaranteed_share=share)
            name = f"n{next(numbers)}"
            if level < depth and rng.random() < 0.6:
                groups[name] = TreePlace(where, settings)
                grow(name, level + 1, share if share is not None else 0.0)
            else:
                tenants[name] = TreePlace(where, settings)

    grow(ROOT, 1, 0.9)
    return Tree(groups, tenants)


def parts(tree: Tree, present: set[str]) -> dict[str, float]:
    """The part of each present tenant, and of the groups that have one: by definition, and slowly."""
    floors = tree.floors()
    places = {**tree.groups, **tree.tenants}
    floors |= {name: place.settings.guaranteed_share or 0.0 for name, place in tree.tenants.items()}
    there = set(present)
    for name in reversed([*tree.groups]):
        if any(place.group == name and child in there for child, place in places.items()):
            there.add(name)
    found = {ROOT: 1.0}
    for name in [ROOT, *tree.groups]:
        children = [child for child, place in places.items() if place.group == name and child in there]
        weight = {child: places[child].settings.weight for child in children}
        fixed: dict[str, float] = {}
        while True:  # a floor that the part by weight does not reach decides
            rest = [child for child in children if child not in fixed]
            free = found.get(name, 0.0) - sum(fixed.values())
            part = {child: free * weight[child] / sum(weight[each] for each in rest) for child in rest}
            short = [child for child in rest if part[child] < floors[child] - 1e-12]
            if not short:
                break
            fixed[max(short, key=lambda child: floors[child] / weight[child])] = 0.0
            fixed |= {child: floors[child] for child in fixed}
        found |= part | fixed
    return found
