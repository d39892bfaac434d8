"""What vLLM loads of fairgate: it says after each step what the engine holds. Needs nothing that vLLM does not have."""
