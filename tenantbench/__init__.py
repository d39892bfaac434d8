"""A benchmark of fairness between tenants that runs against any OpenAI-compatible gateway."""

__version__ = "0.1.0"
