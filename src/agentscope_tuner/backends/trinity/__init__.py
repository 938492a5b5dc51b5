"""Trinity-RFT as backend: the same workflow, on a Ray cluster.

`run` drives Trinity from this process; `adapter`, `algorithm` and `monitor` are what Trinity's processes import, and
`recording` is what a process of our own writes the run folder with.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

STAND_IN = str(Path(__file__).parent / "stand_in")
"""A folder with a package `vllm` that holds nothing but the names Trinity imports from it."""

_spec = find_spec("vllm")
HAS_VLLM = _spec is not None and not str(_spec.origin).startswith(STAND_IN)
"""Whether vLLM itself is installed."""

if not HAS_VLLM and STAND_IN not in sys.path:
    sys.path.append(STAND_IN)
