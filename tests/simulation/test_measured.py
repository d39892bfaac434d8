"""A replay takes the engine that a log tells of: its speed, its slots, its cache, and how many there were."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from backends.simulated.engine_profiles import PROFILES, EngineProfile
from simulation.measured import EngineEstimate, measured
from simulation.traces.reader import Trace
from tests.kit.access_logs import logged, write
from tests.simulation.example_log import lines


def engine_of(path: Path) -> EngineEstimate | None:
    return measured(Trace(path).entries())


def found(path: Path) -> EngineEstimate:
    engine = engine_of(path)
    assert engine is not None
    return engine


def logged_by(directory: Path, profile: EngineProfile) -> Path:
    path = directory / "access.log"
    path.write_bytes(lines(profile=profile))
    return path


@pytest.mark.parametrize("name", ["demo", "tiny-cpu", "a10g-llama2-7b", "h100-llama3.1-8b"])
def test_an_engine_is_known_by_the_log_of_what_it_served(tmp_path: Path, name: str) -> None:
    engine = found(logged_by(tmp_path, PROFILES[name]))
    assert (engine.profile.name, engine.backends) == (name, 1)
    assert engine.profile.base_s == PROFILES[name].base_s
    took = re.search(rf"took (\S+) times as long as at {name}; at most", engine.why)
    assert took is not None
    assert float(took[1]) == pytest.approx(1, abs=0.08)


def test_an_engine_between_two_that_are_known_is_as_slow_as_it_was(tmp_path: Path) -> None:
    fast = PROFILES["h100-llama3.1-8b"]
    names = ("base_s", "per_prefill_token_s", "per_seq_s", "per_context_token_s")
    slow = replace(fast, name="slow", **{name: 1.6 * getattr(fast, name) for name in names})
    engine = found(logged_by(tmp_path, slow))
    assert engine.profile.base_s == pytest.approx(slow.base_s, rel=0.15)
    assert "of its speed" in engine.profile.name
    assert "so each step does" in engine.why


def at_once(count: int, *, tokens_in: int = 100, **fields: object) -> list[str]:
    """So many answers of 100 tokens beside each other, each a second long."""
    shared = {"tokens_in": tokens_in, "tokens_out": 100, "tokens_cached": 0, "total_ms": 1000.0, "queue_ms": 0.0}
    return [logged(ts=1000 + number / 1000, **shared | fields) for number in range(count)]


def test_slots_and_cache_are_what_requests_waited_for(tmp_path: Path) -> None:
    assert found(write(tmp_path, *at_once(20))).profile.max_num_seqs > 20, "nobody waited for a slot"
    assert found(write(tmp_path, *at_once(20, waited_ms={"slots": 5.0}))).profile.max_num_seqs == 20
    few = found(write(tmp_path, *at_once(20, tokens_in=20_000, total_ms=10_000.0))).profile
    assert few.usable_blocks * few.block_size >= 400_000, "it held them"
    less = found(write(tmp_path, *at_once(20, tokens_in=50, waited_ms={"kv": 5.0}))).profile
    assert less.usable_blocks * less.block_size == pytest.approx(20 * 100, abs=less.block_size)


def test_as_many_engines_as_were_busy_at_once(tmp_path: Path) -> None:
    three = [*at_once(10, backend="a"), *at_once(10, backend="b"), *at_once(10, backend="c")]
    later = [logged(ts=5000 + number, backend="d", total_ms=500.0) for number in range(5)]
    assert found(write(tmp_path, *three, *later)).backends == 3


def test_a_log_that_tells_too_little_chooses_nothing(tmp_path: Path) -> None:
    assert engine_of(write(tmp_path, *at_once(9))) is None
    assert engine_of(write(tmp_path, *at_once(20, backend=""))) is None
    assert engine_of(write(tmp_path, "t_s,input_tokens,output_tokens", *(f"{n},10,20" for n in range(20)))) is None
