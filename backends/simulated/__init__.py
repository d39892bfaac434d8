"""An engine without a GPU: a continuous-batching model on any clock, and a server that makes a vLLM of it."""
