"""Which version is this, and does it run compiled or as it is written?"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

__all__ = ["BUILD", "__version__"]

__version__ = "0.1.0"

_spec = find_spec("policies.request")
BUILD: Final = "interpreted" if _spec is None or (_spec.origin or "").endswith(".py") else "compiled"
