"""Guesses of what comes next, which the model then verifies many at a time.

Much of what an agent says is form: tags, the names of tools and of their arguments. A table of what followed the last
few tokens before guesses most of it. Guesses are only ever checked against tokens drawn in the usual way, so they
change how many steps a completion takes and nothing else (speculative decoding, arXiv:2211.17192, with the drafts of
prompt lookup).
"""

from __future__ import annotations

import numpy as np
import torch

from agentscope_tuner.engine.native import NativeKernels

CONTEXT = 3
"""Tokens that a guess looks back on."""
_TABLE_BITS = 17


class Drafts:
    """What followed each few tokens, as a branch predictor's table of saturating counters.

    A guess that fails costs a row of work, one that holds saves a step; it has to hold four times out of five. Of
    contexts that share a place in the table, the one keeps it that comes up more often.
    """

    def __init__(self, kernels: NativeKernels) -> None:
        """Begin with an empty table."""
        self._kernels = kernels
        self._table = torch.zeros(2**_TABLE_BITS, 2, dtype=torch.int64)

    @property
    def place(self) -> tuple[int, int]:
        """The address of the table, and the bits of a place in it."""
        return self._table.data_ptr(), _TABLE_BITS

    def forget(self) -> None:
        """Begin anew."""
        self._table.zero_()

    def learn(self, tokens: np.ndarray) -> None:
        """Remember a completion and the `CONTEXT` tokens before it."""
        self._kernels.learn(self._table, torch.from_numpy(tokens))

    def guess(self, tokens: np.ndarray, starts: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Write behind the last tokens of n sequences what probably follows, and return how many each is given (n,).

        Args:
            tokens: of all sequences.
            starts: (n,) where in `tokens`, as a flat array, the last `CONTEXT` tokens of each begin.
            most: (n,) how many tokens there may be.
        """
        counts = np.empty_like(most)
        given = (torch.from_numpy(array) for array in (tokens, starts, most, counts))
        self._kernels.guess(self._table, *given)
        return counts
