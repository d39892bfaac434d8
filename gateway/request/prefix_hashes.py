"""Hashes of a prompt's leading blocks, by which a policy finds the engine that has the prompt in its cache.

Nothing is tokenized: the hashes are of the prompt's JSON, in the order of chat templates. Equal beginnings of the text
are equal beginnings of the tokens, as long as the client writes its JSON the same way each time.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Final

from xxhash import xxh3_64, xxh3_64_intdigest

BLOCK_BYTES: Final = 512
"""About 128 tokens of English: eight blocks of vLLM."""
BLOCKS_MAX: Final = 64
"""Most blocks after the first one. So many blocks tell the cached part of a long prompt to within a thirty-second of
the prompt."""
TENANTS_MAX: Final = 1024
"""Tenants whose salts are cached: each request needs one."""


def prefix_hashes(prompt: bytes, seed: bytes) -> tuple[int, ...]:
    """Return hashes of the prompt's beginnings: of its first block, of all up to the end of each later block, and of
    all.

    Prompts under different seeds (model and cache salt) share no hash. A prompt too long for `BLOCKS_MAX` has blocks of
    twice the length, or four times, and so on. All prompts hash a beginning of one length alike, so a growing
    conversation keeps matching.
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
    """Return the salt by which engines separate a tenant's cached blocks. The salt hides the tenant's name."""
    return blake2b(tenant.encode(), digest_size=12).hexdigest()
