"""An engine that needs no GPU: a continuous-batching model on any clock, and a server that makes a vLLM of it."""
