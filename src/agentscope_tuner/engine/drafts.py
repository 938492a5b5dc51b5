"""Guesses of what comes next, which the model then verifies many at a time.

Much of what an agent says is form: tags, the names of tools and of their arguments. A table of what followed the last
few tokens before guesses most of it. Guesses are only ever checked against tokens drawn in the usual way, so they
change how many steps a completion takes and nothing else (speculative decoding, arXiv:2211.17192, with the drafts of
prompt lookup).
"""

from __future__ import annotations

from collections.abc import Sequence

_CONTEXT = 3
"""Tokens that a guess looks back on."""
_SURE = 2
_STRONGEST = 8
_DISAGREEMENT = 4
"""A guess that fails costs a row of work, one that holds saves a step; it has to hold four times out of five."""
_MOST_CONTEXTS = 2**18


class Drafts:
    """What followed each few tokens, as a branch predictor's table of saturating counters."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], tuple[int, int]] = {}
        """Context to its most frequent successor, and how sure that is."""

    def learn(self, context: Sequence[int], completion: Sequence[int]) -> None:
        """Remember a completion and the tokens before it."""
        if len(self._next) > _MOST_CONTEXTS:  # what is said often is soon learned again
            self._next.clear()
        ids = (*context[-_CONTEXT:], *completion)
        for at in range(_CONTEXT, len(ids)):
            key = ids[at - _CONTEXT : at]
            token, strength = self._next.get(key, (ids[at], 0))
            if token == ids[at]:
                self._next[key] = (token, min(strength + 1, _STRONGEST))
            elif strength > _DISAGREEMENT:
                self._next[key] = (token, strength - _DISAGREEMENT)
            else:
                self._next[key] = (ids[at], 1)

    def guess(self, ids: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that probably follow; none where nothing is sure."""
        key = tuple(ids[-_CONTEXT:])
        guessed: list[int] = []
        while len(guessed) < most and (found := self._next.get(key)) is not None and found[1] >= _SURE:
            guessed.append(found[0])
            key = (*key[1:], found[0])
        return guessed
