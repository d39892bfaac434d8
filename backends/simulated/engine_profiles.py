"""Profiles of engines: step times and sizes.

A step costs `base_s + per_prefill_token_s * prefill_tokens + per_seq_s * decoding_seqs + per_context_token_s *
context_tokens_of_the_decoding`, all in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


class UnknownProfileError(ValueError):
    """An unknown name of an engine profile. The message lists the names that exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """Limits of one engine, named as vLLM's settings, and the costs of its steps in seconds.

    A block of `num_gpu_blocks` is never used (vLLM's null block). The other blocks must fit a request of
    `max_model_len`, and a step must hold a token of each sequence, or the engine could stall for ever.
    """

    name: str
    block_size: int
    num_gpu_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    base_s: float
    per_prefill_token_s: float
    per_seq_s: float
    per_context_token_s: float

    @property
    def usable_blocks(self) -> int:
        """Return the number of KV blocks that can hold tokens."""
        return self.num_gpu_blocks - 1

    def step_s(self, prefill_tokens: int, decoding_seqs: int, context_tokens: int) -> float:
        """Return the seconds that a step with this batch takes."""
        return (
            self.base_s
            + self.per_prefill_token_s * prefill_tokens
            + self.per_seq_s * decoding_seqs
            + self.per_context_token_s * context_tokens
        )


_H100_LLAMA3_8B = EngineProfile(
    # An assumption, not a measurement. H100 80 GB, Llama-3-8B in bf16: 16 GB of weights per step at about 2.7 TB/s,
    # 16 GFLOP per prefill token at about half of peak, 128 KiB of KV read per context token, 52 GB left for KV.
    name="h100-llama3-8b",
    block_size=16, num_gpu_blocks=25_001, max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=8192,
    base_s=6.0e-3, per_prefill_token_s=3.2e-5, per_seq_s=2.0e-5, per_context_token_s=4.9e-8,
)  # fmt: skip

_ALL = (
    # Made to be watched: small enough that a few clients bring KV pressure, slow enough to follow by eye.
    EngineProfile(
        name="demo",
        block_size=16, num_gpu_blocks=513, max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=2048,
        base_s=8e-3, per_prefill_token_s=2e-5, per_seq_s=1.5e-4, per_context_token_s=2e-7,
    ),
    # Fitted to a two-layer model on vLLM 0.32 (CPU build, two shared cores): docs/simulated-engine.md.
    EngineProfile(
        name="tiny-cpu",
        block_size=32, num_gpu_blocks=256, max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=2048,
        base_s=1.3e-3, per_prefill_token_s=6.0e-6, per_seq_s=6.0e-5, per_context_token_s=5.0e-8,
    ),
    # A10G 24 GB, Llama-2-7b, 10,000 tokens of KV: a least-squares fit of the profile published with VTC. There, decode
    # steps cost 16.3 ms + the terms below; 19.2 ms includes the server's overhead and meets the measured throughput.
    # Prefill runs alone there and has a constant of its own, 35.8 ms; this model batches it with decode as vLLM does.
    EngineProfile(
        name="a10g-llama2-7b",
        block_size=16, num_gpu_blocks=626, max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=2048,
        base_s=1.92e-2, per_prefill_token_s=2.13e-4, per_seq_s=2.45e-4, per_context_token_s=2.02e-6,
    ),
    _H100_LLAMA3_8B,
    # As above with the longer context of Llama-3.1.
    replace(_H100_LLAMA3_8B, name="h100-llama3.1-8b", max_model_len=131_072),
)  # fmt: skip

PROFILES: dict[str, EngineProfile] = {one.name: one for one in _ALL}


def profile(name: str) -> EngineProfile:
    """Return the profile of this name. Raise UnknownProfileError."""
    if name not in PROFILES:
        raise UnknownProfileError(f"no engine profile is named {name!r}; there are: {', '.join(PROFILES)}")
    return PROFILES[name]
