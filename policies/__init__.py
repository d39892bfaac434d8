"""WHO goes next, and WHERE. Pure decisions: no I/O, no clock, no asyncio, no logging, no randomness of their own."""
