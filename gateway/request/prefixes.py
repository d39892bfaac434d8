"""How does a prompt begin? Hashes of its leading blocks, by which a policy finds the engine that has it in its cache.

Nothing is tokenised: what is hashed is the JSON of the prompt, in the order in which chat templates put it. Equal
beginnings of the text are equal beginnings of the tokens, as long as the client writes its JSON the same way each time.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from struct import unpack
from typing import Final

__all__ = ["BLOCKS_MAX", "BLOCK_BYTES", "prefix_hashes", "salt_of"]

BLOCK_BYTES: Final = 512
"""About 128 tokens of English: eight blocks of vLLM."""
BLOCKS_MAX: Final = 256
TENANTS_MAX: Final = 1024
"""Of so many the salts are kept, since each request has one."""


def prefix_hashes(prompt: bytes, seed: bytes) -> tuple[int, ...]:
    """Chained hashes, each of everything up to the end of its block; the last one is of all that is given.

    Equal prompts under different seeds (model and cache salt) have nothing in common. At most `BLOCKS_MAX`: of a longer
    prompt every second hash is kept, or every fourth, and so on, so that a conversation that grows goes on matching.
    """
    step = BLOCK_BYTES
    while len(prompt) > step * BLOCKS_MAX:
        step *= 2
    chain, digests, view = blake2b(seed, digest_size=8), [], memoryview(prompt)
    for start in range(0, len(prompt), step):
        chain.update(view[start : start + step])
        digests.append(chain.copy().digest())
    return unpack(f">{len(digests)}Q", b"".join(digests))


@lru_cache(maxsize=TENANTS_MAX)
def salt_of(tenant: str) -> str:
    """By what an engine tells this tenant's cached blocks from others'; it does not tell its name."""
    return blake2b(tenant.encode(), digest_size=12).hexdigest()
