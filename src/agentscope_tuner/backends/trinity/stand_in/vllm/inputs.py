"""Names that Trinity imports."""

from typing import Any

MultiModalDataDict = Any
