"""The distribution a token is drawn from: tempered, truncated, renormalised. Sampler and learner share it."""

from __future__ import annotations

import torch
from torch import Tensor


def temper(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide logits (n, V) by temperatures (n,); greedy rows (0) are left as they are."""
    return logits / torch.where(temperature > 0, temperature, 1.0)[:, None]


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, keep: Tensor | None = None) -> Tensor:
    """Set the logits of tokens outside top-k and top-p to minus infinity.

    Top-k first, then top-p on what it leaves, as transformers' logits processors do.

    Args:
        logits: (n, V), tempered.
        top_k: (n,) number of tokens to keep; 0 keeps all. Ties with the last one are kept.
        top_p: (n,) keep the smallest set whose probability reaches this.
        keep: (n,) tokens that stay in any case: the learner's weights may have moved since these were drawn.
    """
    ordered, index = logits.sort(-1, descending=True)
    vocabulary = logits.shape[-1]
    k = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    dropped = ordered < ordered.gather(1, k[:, None] - 1)
    probability = torch.softmax(ordered.masked_fill(dropped, -torch.inf), -1)
    before = probability.cumsum(-1) - probability
    dropped |= before >= top_p[:, None]
    dropped[:, 0] = False
    removed = torch.zeros_like(dropped).scatter(1, index, dropped)
    if keep is not None:
        removed.scatter_(1, keep[:, None], False)
    return logits.masked_fill(removed, -torch.inf)
