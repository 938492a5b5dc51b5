"""When Python looks for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 50_000
"""A few megabytes; hundreds of agents make as many in a second."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Python looks for garbage in cycles after so many new objects, not after 700.

    Nearly nothing is garbage while modules are imported, which takes a sixth longer otherwise, or while agents run; and
    what was looked at takes the place of what is being computed in the processor's caches.
    """
    before = gc.get_threshold()
    if before[0] > 0:  # 0 is how to have none
        gc.set_threshold(max(before[0], _YOUNG_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
