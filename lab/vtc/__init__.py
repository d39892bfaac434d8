"""The experiments of VTC, and what a gateway loses against a scheduler inside the engine."""
