"""An unrecognised server of the OpenAI API."""

from __future__ import annotations

from backends.engines.adapter import Adapter


class OpenAiAdapter(Adapter):
    """The adapter for an unrecognised server, whose capacity is learned from its answers."""

    name = "openai"
    title = "a server of the OpenAI API"
    gaps = ("tells nothing of its load, so its slots are learned by trial unless max_num_seqs says them",)
