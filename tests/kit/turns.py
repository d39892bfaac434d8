"""Prompts that come by turns, and where they are found cached."""

from __future__ import annotations

from policies.placements.prefix_index import PrefixIndex
from tests.gateway.live import Live, chat, until


def index_of(live: Live) -> PrefixIndex:
    assert live.engine.policy.prefixes is not None
    return live.engine.policy.prefixes


async def ask(live: Live, content: str) -> int:
    """Of this prompt's tokens, how many had the engine cached?"""
    got = await live.ask("/v1/chat/completions", chat(content, max_tokens=4, ignore_eos=True))
    assert got.status == 200
    return int(got.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def text(name: int, words: int) -> str:
    return " ".join(f"{name}-{word}" for word in range(words))


async def cached_in_turns(*lives: Live) -> int:
    """Tokens that engines had cached, of conversations whose turns come to one gateway after the other."""
    found = 0
    for number in range(6):
        conversation = text(number, 800)
        for turn in range(4):
            found += await ask(lives[(number + turn) % len(lives)], conversation)
            await until(lambda: len({len(index_of(live)) for live in lives}) == 1)  # all have heard of it
            conversation += text(100 * number + turn, 200)
    return found
