"""Ceilings of a tree and several gateways: what each reports, and what it keeps to while the others are not heard."""

from __future__ import annotations

import pytest

from policies.replicas.messages import REPORTED_MAX
from policies.tree.pool_tree import PoolTree
from policies.tree.terms import ROOT, GroupSettings, Tree, TreePlace
from tests.policies.making import make_request


def four(tenants: int, **terms: float) -> Tree:
    settings = GroupSettings(max_running=4, **terms)
    return Tree({"g": TreePlace(ROOT, settings)}, {f"t{i}": TreePlace("g", GroupSettings()) for i in range(tenants)})


def runs(tree: PoolTree, tenant: str, requests: int = 1) -> None:
    for _ in range(requests):
        request = make_request(tenant)
        tree.arrived(request, 1.0)
        tree.run(request, 1, 100)


@pytest.mark.parametrize("tenants", [10, REPORTED_MAX, 2 * REPORTED_MAX])
def test_what_runs_is_reported_however_many_tenants_are_present(tenants: int) -> None:
    terms = four(tenants)
    one, two = PoolTree(terms), PoolTree(terms)
    for number in range(tenants):
        one.arrived(make_request(f"t{number}"), 1.0)
    runs(one, "t0", 4)
    two.set_elsewhere(one.report(REPORTED_MAX))
    assert two.full_node_for(make_request("t1")) is not None
    assert len(one.report(REPORTED_MAX)) <= 2 * REPORTED_MAX
    two.set_elsewhere(())
    assert two.full_node_for(make_request("t1")) is None


def test_while_the_others_are_not_heard_each_keeps_to_its_part() -> None:
    gateways = [PoolTree(four(4)) for _ in range(4)]
    for gateway in gateways:
        gateway.set_elsewhere((), 4)
        for number in range(20):
            if gateway.full_node_for(make_request(f"t{number % 4}")) is None:
                runs(gateway, f"t{number % 4}")
    assert [gateway.running(" g") for gateway in gateways] == [1, 1, 1, 1]
    gateways[0].set_elsewhere(())
    assert gateways[0].full_node_for(make_request("t0")) is None
