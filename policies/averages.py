"""How much does one value count in a moving average?"""

from __future__ import annotations

from typing import Final

QUICK: Final = 0.1
"""About the last ten count."""
USUAL: Final = 0.05
"""About the last twenty count."""
STEADY: Final = 0.02
"""About the last fifty count."""
