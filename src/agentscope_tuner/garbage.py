"""When Python looks for garbage, which is whatever refers to itself and is not referred to."""

from __future__ import annotations

import atexit
import gc
import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_YOUNG_OBJECTS = 50_000
"""A few megabytes; hundreds of agents make as many in a second."""
_BUFFERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Python looks for garbage after so many new objects, not after 700.

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


def keep_what_is_loaded() -> None:
    """From now on, nothing that is there already is looked at, nor taken apart when the process ends.

    What is garbage by now, such as what earlier runs left, is not kept.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    atexit.unregister(_before_the_end)
    atexit.register(_before_the_end)


def _before_the_end() -> None:
    gc.unfreeze()
    # What is on its way to a file is lost where the file is taken apart first, or not at all.
    for each in gc.get_objects():
        if issubclass(type(each), _BUFFERS):
            with suppress(Exception):
                each.flush()
    # What is made with nanobind, such as Triton, complains of its types that are left.
    if all(getattr(kind, "__module__", "") != "nanobind" for kind in type.__subclasses__(type)):
        gc.freeze()  # half a million objects, mostly of modules, take more than a second
