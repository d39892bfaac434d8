"""The sentence on top says what the numbers say, and of those whom it concerns."""

from __future__ import annotations

from simulation.replay import OTHERS, Percentiles, ReplayResult, TenantResult
from simulation.verdict import compared, named, verdict


def tenant(name: str, p95_s: float | None, *, requests: int = 100, completed: int | None = None) -> TenantResult:
    ttft_s = None if p95_s is None else Percentiles(p95_s / 2, p95_s, p95_s)
    return TenantResult(name, 1.0, requests, requests if completed is None else completed, 1.0, ttft_s)


def run(policy: str, *tenants: TenantResult, backends: int = 1) -> ReplayResult:
    return ReplayResult(policy, backends, 1, 1, {}, None, 1.0, 1.0, None, 0.0, 0, 0, 1.0, tenants, {}, [])


def test_it_names_who_gains_most_and_who_asked_for_most() -> None:
    unfair = run("fcfs", tenant("heavy", 14.0), tenant("light", 12.0), tenant("lighter", 11.0))
    fair = run("fairserve", tenant("heavy", 14.5), tenant("light", 0.3), tenant("lighter", 3.0))
    assert verdict([unfair, run("vtc"), fair]) == (
        "`light` gains most: under `fcfs`, one request in twenty waited 12.0 s or longer for its first token, under "
        "`fairserve` 0.300 s. Nobody pays: of `heavy`, who asked for most, one request in twenty 14.0 s and 14.5 s."
    )
    assert named([unfair, fair]) == ("light", "")


def test_it_names_who_pays() -> None:
    unfair = run("fcfs", tenant("heavy", 14.0), tenant("light", 12.0), tenant("flood", 2.0))
    fair = run("vtc", tenant("heavy", 15.0), tenant("light", 0.3), tenant("flood", 9.0))
    assert verdict([unfair, fair]).endswith("`flood` pays most: one request in twenty 2.00 s and 9.00 s.")
    assert (named([unfair, fair]), named([fair, unfair])) == (("light", "flood"), ("flood", "light"))
    worse = run("vtc", tenant("heavy", 14.0), tenant("light", 12.0), tenant("flood", 3.0))
    assert verdict([unfair, worse]) == (
        "`flood` pays most: under `fcfs`, one request in twenty waited 2.00 s or longer for its first token, under "
        "`vtc` 3.00 s. Nobody gains: of `heavy`, who asked for most, one request in twenty 14.0 s and 14.0 s."
    )


def test_refusals_are_no_short_waits() -> None:
    one = run("fcfs", tenant("heavy", 9.0), tenant("light", 5.0))
    other = run("vtc", tenant("heavy", 0.5, completed=10), tenant("light", 2.0))
    assert "`heavy` pays most: one request in twenty 9.00 s and 0.500 s (90 of 100 refused)." in verdict([one, other])
    never = run("vtc", tenant("heavy", None, completed=0), tenant("light", 5.0))
    assert "under `vtc` for ever (100 of 100 refused)" in verdict([one, never])
    assert "waited for ever for its first token (100 of 100 refused), under `fcfs` 9.00 s." in verdict([never, one])
    same = run("vtc", tenant("heavy", 9.0, completed=90), tenant("light", 5.0))
    assert "9.00 s (10 of 100 refused)" in verdict([one, same])


def test_waits_that_are_alike_are_said_to_be() -> None:
    one, other = (
        run(policy, tenant("a", 0.05), tenant("b", wait_s)) for policy, wait_s in (("fcfs", 0.14), ("vtc", 0.1))
    )
    assert verdict([one, other]) == (
        "Under `fcfs`, everybody waited about as long as under `vtc`: `b` waited longest for its first tokens, one "
        "request in twenty 0.140 s or more."
    )
    assert verdict([one]) == (
        "Under `fcfs`, `b` waited longest for its first tokens, one request in twenty 0.140 s or more."
    )


def test_tenants_of_few_requests_are_named_by_their_median_and_sums_of_many_are_not() -> None:
    heavy, others = tenant("heavy", 9.0), tenant(OTHERS, 99.0)
    for name, requests, shown, waited in (
        ("rare", 3, "rare", "one request in two waited 4.50 s or longer for its first token, under `vtc` 0.100 s."),
        ("rare", 1, "rare", "its one request waited 4.50 s for its first token, under `vtc` 0.100 s."),
        ("n" * 900, 3, "n" * 31 + "…", "one request in two waited 4.50 s or longer"),
    ):
        before = run("fcfs", heavy, tenant(name, 9.0, requests=requests), tenant("light", 2.0), others)
        after = run("vtc", heavy, tenant(name, 0.2, requests=requests), tenant("light", 1.0), tenant(OTHERS, 1.0))
        assert verdict([before, after]).startswith(f"`{shown}` gains most: under `fcfs`, {waited}")


def test_engines_are_compared_under_the_last_policy() -> None:
    runs = [run(policy, tenant("a", 8.0 / engines / (1 + (policy == "vtc"))), backends=engines)
            for engines in (2, 3, 4) for policy in ("fcfs", "vtc")]  # fmt: skip
    one, other = compared(runs)
    assert (one.policy, one.backends, other.policy, other.backends) == ("vtc", 2, "vtc", 4)
    assert verdict(runs) == (
        "`a` gains most: with 2 engines under `vtc`, one request in twenty waited 2.00 s or longer for its first "
        "token, with 4 engines 1.00 s. Nobody pays."
    )
