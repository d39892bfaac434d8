"""How does a prompt begin? Hashes of its leading blocks, by which a policy finds the engine that has it in its cache.

Nothing is tokenised: what is hashed is the JSON of the prompt, in the order in which chat templates put it. Equal
beginnings of the text are equal beginnings of the tokens, as long as the client writes its JSON the same way each time.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Final

from xxhash import xxh3_64, xxh3_64_intdigest

BLOCK_BYTES: Final = 512
"""About 128 tokens of English: eight blocks of vLLM."""
BLOCKS_MAX: Final = 64
"""What is cached of a long prompt is known to within a thirty-second of it; nothing decides on less."""
TENANTS_MAX: Final = 1024
"""Of so many the salts are kept, since each request has one."""


def prefix_hashes(prompt: bytes, seed: bytes) -> tuple[int, ...]:
    """Hashes of the prompt's beginnings: of its first block, of everything up to the end of each later block, and of
    all that is given.

    Equal prompts under different seeds (model and cache salt) have nothing in common. Beside the first block there are
    at most `BLOCKS_MAX`: a longer prompt has blocks twice as long, or four times, and so on. A beginning of one length
    has one hash in every prompt, so a conversation that grows goes on matching.
    """
    if not prompt:
        return ()
    size, step = len(prompt), BLOCK_BYTES
    while size > step * BLOCKS_MAX:
        step *= 2
    begun = xxh3_64(prompt[:BLOCK_BYTES], xxh3_64_intdigest(seed))
    hashes, at = [begun.intdigest()], BLOCK_BYTES
    for end in range(max(step, 2 * BLOCK_BYTES), size + step, step):
        begun.update(prompt[at:end])
        hashes.append(begun.intdigest())
        at = end
    return tuple(hashes)


@lru_cache(maxsize=TENANTS_MAX)
def salt_of(tenant: str) -> str:
    """By what an engine tells this tenant's cached blocks from others'; it does not tell its name."""
    return blake2b(tenant.encode(), digest_size=12).hexdigest()
