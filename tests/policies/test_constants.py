"""Each number that decides, by what follows from it: a test here or beside what it decides fails if it is doubled or
halved."""

from __future__ import annotations

from math import e, inf

import pytest

from policies.capacity.gauges import CapacitySettings, Gauges, Grant
from policies.capacity.kv_cache import KvCache
from policies.capacity.lease import Lease
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Obstacle
from policies.capacity.pace import Pace, UsualLoad
from policies.capacity.slots import Slots
from policies.orders.dlpm import DlpmParams
from policies.orders.profiles import CostProfiles
from policies.orders.vtc import VtcParams
from policies.placements.homes import Homes
from policies.placements.prefix import ByPrefix
from policies.placements.prefix_index import PrefixIndex
from policies.placements.siblings import SamePrefixRequests
from policies.queue.backlog import Backlog
from policies.replicas.grants import GrantedEngines
from tests.policies.making import ledger_of, make_request

PROMPT = tuple(range(1, 101))
TOKENS = 1600


def leased(now: float = 0.0, **request: int) -> Lease:
    return Lease(make_request(**request), "b", now)


# --- averages ---


def test_of_a_quick_average_one_value_is_a_tenth() -> None:
    pace = Pace()
    pace.started(leased(), 1.05)
    assert pace.first_token_s == pytest.approx(0.05 + 0.1 * 1.0)


def test_of_a_usual_average_one_value_is_a_twentieth() -> None:
    backlog = Backlog(flows_max=10)
    request = make_request()
    backlog.push(request)
    backlog.take(request)
    backlog.charge(request, 1000.0)
    backlog.end(request)
    assert backlog.usual == pytest.approx(50.0)


def test_of_a_steady_average_one_value_is_a_fiftieth() -> None:
    profiles = CostProfiles()
    for _ in range(100):
        profiles.learn("t", "app", 1, 1000.0)
    profiles.learn("t", "app", 1, 2000.0)
    assert profiles.norm("t", "app", 1) == pytest.approx(1020.0)


def test_an_average_is_believed_after_twenty_values() -> None:
    pace = Pace()
    for number in range(20):
        assert (pace.known_token_s() is not None) == (number >= 20)
        lease = leased()
        lease.started_s, lease.output_tokens = 0.0, 10
        pace.ended(lease, 1.0)
    assert pace.known_token_s() is not None


def test_the_usual_load_is_of_ten_seconds() -> None:
    usual = UsualLoad()
    usual.ran(8.0, 10.0)
    assert usual.sequences == pytest.approx(8.0 * (1.0 - 1.0 / e))


# --- capacity ---


def test_a_new_engine_is_taken_to_have_four_slots_and_one_request_takes_a_quarter_of_them() -> None:
    assert Slots(None, CapacitySettings()).count == 4
    assert Slots(64, CapacitySettings()).count_for(64) == 16


@pytest.mark.parametrize(("arrived_s", "goes_on"), [(0.24, True), (0.26, False)])
def test_requests_keep_coming_if_one_came_within_a_quarter_of_a_second(arrived_s: float, goes_on: bool) -> None:
    ledger = BackendLedger("b", CapacitySettings(), max_num_seqs=8)
    for tenth in range(40):
        now = tenth / 10
        ledger.held_back(make_request(), Obstacle.SLOTS)
        ledger.slots.was_short = True
        ledger.observe(Gauges(now, running=4, waiting=0), now, arrived_s=now - arrived_s)
    assert (ledger.slots.most() > 8) == goes_on


def test_a_comparison_of_gauge_and_books_counts_by_its_time_and_a_twentieth_at_most() -> None:
    def part(passed_s: float) -> float:
        leases: dict[str, Lease] = {}
        kv = KvCache(CapacitySettings(), leases, Pace())
        lease = leases["x"] = leased(prompt=1000)
        kv.add(lease)
        kv.started(lease, 0.0)
        for taken_s in (10.0, 10.0 + passed_s):
            seen = Gauges(taken_s, kv_usage=0.1, kv_capacity_tokens=10_000 if taken_s == 10.0 else 1000)
            kv.observe(seen, taken_s, starting_tokens=0, elsewhere=None, preempted=False)
        return kv.use(0, 20.0).now / 1000

    assert part(60.0) == pytest.approx(0.955 + 0.01, abs=0.01)
    assert part(0.02) == pytest.approx(0.999, abs=0.0015)


def test_of_a_flood_as_many_start_at_once_as_fill_half_of_what_is_missing() -> None:
    """Each takes 105 tokens on average over 10 steps, so 1,050 token-steps. Of a cache of 10,000 tokens 94 % are to be
    filled, and a tenth of that may stay empty. So n start beside the last one: 1,050 n is at most 9,400 * 10 / 2 times
    what is missing, which is 0.9 - 105 n / 9,400.
    """
    ledger, number = BackendLedger("b", CapacitySettings(), max_num_seqs=256), 0
    ledger.observe(Gauges(0.0, kv_capacity_tokens=10_000, block_size=16), 0.0)
    found = None
    while found is None:
        request = make_request(prompt=92, output_max=10, expected=10.0, reserved=10)  # and half a block
        found = ledger.obstacle(request, 0.0, paced=True)
        if found is None:
            number += 1
            lease = Lease(request, "b", 0.0)
            ledger.add(lease)
            ledger.started(lease, 0.0)
    assert found is Obstacle.SPREAD
    assert number == 28


# --- orders ---


def test_a_window_and_a_turn_are_one_long_document() -> None:
    assert VtcParams().window_tokens == DlpmParams().quantum == 20_000.0


def test_of_what_is_not_known_a_call_is_worth_a_thousand() -> None:
    assert CostProfiles().norm("t", "app", 1) == 1000.0


def test_an_answer_counts_as_at_most_four_usual_ones() -> None:
    profiles = CostProfiles()
    for _ in range(100):
        profiles.learn("t", "app", 1, 1000.0)
    profiles.learn("t", "app", 1, 10.0**9)
    assert profiles.norm("t", "app", 1) == pytest.approx(1000.0 + 0.02 * 3000.0, rel=1e-3)


def test_an_app_weighs_within_sixteen_times_what_is_usual() -> None:
    profiles = CostProfiles()
    for _ in range(2000):
        for _ in range(49):
            profiles.learn("t", "usual", 1, 1000.0)
        profiles.learn("t", "light", 1, 1.0)
        if profiles.norm("t", "light", 1) < 70:
            break
    assert profiles.norm("t", "light", 1) == pytest.approx(1000 / 16, rel=0.05)


def test_an_app_weighs_at_most_sixteen_times_what_is_usual() -> None:
    profiles = CostProfiles()
    for _ in range(100):
        profiles.learn("t", "usual", 1, 1000.0)
    for _ in range(8):
        profiles.learn("t", "heavy", 1, 10.0**9)
    assert profiles.norm("t", "heavy", 1) == pytest.approx(16 * 1000.0 * 1.06**8, rel=0.01), "what is usual has grown"


# --- placements ---


def choose(*engines: BackendLedger, adapter: str = "", **cached: int) -> str:
    prefixes = PrefixIndex()
    for name, blocks in cached.items():
        prefixes.insert(PROMPT[:blocks], name)
    request = make_request(prompt=TOKENS, prefix=PROMPT, adapter=adapter)
    return ByPrefix(prefixes=prefixes).choose(request, engines)[0]


@pytest.mark.parametrize(("running", "chosen"), [(7, "a"), (9, "b")])
def test_a_missing_token_counts_eightfold_and_a_sequence_for_sixteen(running: int, chosen: str) -> None:
    """`a` has a block of 16 tokens more: 128 of its tokens, or eight sequences. It ran as much for long."""
    loads = [ledger_of("a", running + 90), ledger_of("b", 90)]
    assert choose(*loads, a=90, b=89) == chosen


@pytest.mark.parametrize(("missing", "chosen"), [(63, "b"), (65, "a")])
def test_an_adapter_costs_as_much_as_a_thousand_tokens(missing: int, chosen: str) -> None:
    loads = [ledger_of("a"), ledger_of("b", adapters={"lora": 0})]
    assert choose(*loads, adapter="lora", a=90, b=90 - missing) == chosen


@pytest.mark.parametrize(("usual", "running", "chosen"), [(50, 72, "a"), (50, 77, "a"), (50, 78, "b"), (95, 72, "b")])
def test_an_engine_that_runs_much_more_than_the_mean_gets_nothing(usual: float, running: int, chosen: str) -> None:
    """The mean is 50.5: the bound is 1.2 times that and three, 63.6, or two deviations more, 77.8, by chance."""
    loads = [ledger_of("a", running, usual=usual), ledger_of("b", 100 - running, usual=50)]
    assert choose(*loads, a=100) == chosen


@pytest.mark.parametrize(("pace_s", "chosen"), [(0.029, "a"), (0.031, "b")])
def test_paces_within_half_are_equal(pace_s: float, chosen: str) -> None:
    slow, quick = Pace(), Pace()
    for pace, token_s in ((slow, pace_s), (quick, 0.02)):
        for _ in range(400):
            lease = leased(output_max=100)
            lease.started_s, lease.output_tokens = 0.0, 10
            pace.ended(lease, 10 * token_s)
    assert choose(ledger_of("a", pace=slow), ledger_of("b", pace=quick), a=51, b=50) == chosen


def test_each_dispatch_looks_up_two_that_begin_alike_and_eight_are_tried() -> None:
    prefixes = PrefixIndex()
    for number in range(6):
        prefixes.insert(PROMPT[: len(PROMPT) - number], f"e{number}")
    siblings, homes = SamePrefixRequests(), Homes(prefixes)
    for number in range(20):
        request = make_request(f"t{number}", prefix=PROMPT)
        siblings.add(request)
        homes.add(request)
    assert len(list(siblings.nearest(PROMPT))) == 2
    assert [len(list(homes.at(f"e{number}"))) for number in range(6)] == [8, 8, 8, 8, 0, 0], "noted at four engines"


def test_the_longest_common_beginning_is_looked_up_first_and_then_the_oldest() -> None:
    siblings = SamePrefixRequests()
    for id, prefix in (("least", (1, 9)), ("older", (1, 2, 9)), ("newer", (1, 2, 8)), ("most", (1, 2, 3, 4))):
        siblings.add(make_request(id=id, prefix=prefix))
    assert [request.id for request in siblings.nearest((1, 2, 3, 4))] == ["most", "older"]


def test_where_the_next_request_does_not_fit_two_each_of_four_tenants_are_tried() -> None:
    backlog = Backlog(flows_max=100)
    for number in range(30):
        backlog.push(make_request(f"t{number % 6}", user=f"u{number}"))
    head = backlog.head()
    assert len(list(backlog.others(head))) == 7


# --- limits ---


# --- several gateways ---


def test_grants_are_averaged_over_five_seconds_and_trusted_for_two() -> None:
    ledger = BackendLedger("b", CapacitySettings(), max_num_seqs=64)
    grants = GrantedEngines({"b": ledger})
    grants.receive([Grant(40, 1000)], 0.0)
    grants.receive([Grant(20, 1000)], 2.5)
    assert ledger.allowed_until_s == 4.5
    grants.cut_off(2)
    assert ledger.allowed_until_s == inf
    assert ledger.allowance.sequences == 30
