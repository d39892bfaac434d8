"""The part of fairgate that vLLM loads: a report of the engine's state after each step. It depends on vLLM alone."""
