"""A server of the OpenAI API of which nothing else is known."""

from __future__ import annotations

from backends.engines.adapter import Adapter


class OpenAiAdapter(Adapter):
    """The adapter for an unknown server. Its capacity is learned from its answers."""

    name = "openai"
    title = "a server of the OpenAI API"
    gaps = ("tells nothing of its load, so its slots are learned by trial unless max_num_seqs says them",)
