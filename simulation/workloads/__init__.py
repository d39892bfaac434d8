"""Who asks when, and for how much? Generators of arrivals, each deterministic for its seed."""
