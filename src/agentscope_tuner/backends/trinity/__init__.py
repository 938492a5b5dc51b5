"""Trinity-RFT as backend: the same workflow, on a Ray cluster.

`run` drives Trinity from this process; `adapter`, `algorithm` and `recording` are what Trinity's processes import.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

STAND_IN = str(Path(__file__).parent / "stand_in")
"""A folder with a package `vllm` that holds nothing but the names Trinity imports from it."""

# Last on the path: vLLM itself comes first where it is installed.
if find_spec("vllm") is None:
    sys.path.append(STAND_IN)
