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


def draw_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    All but the logits may be on the CPU, so that nobody waits for a device to know what is asked.

    Args:
        logits: (B, V) float32.
        temperature: (B,) of each row; 0 takes the likeliest token.
        top_k: (B,) see `truncate`.
        top_p: (B,) see `truncate`.
        uniform: (B,) float64 in [0, 1).

    Returns:
        Tokens (B,) and their log-probabilities (B,) under the distribution they were drawn from; for greedy rows, under
        the untempered one.
    """
    device = logits.device
    truncated = bool(top_k.any() or (top_p < 1).any())
    coldest, hottest = (bound.item() for bound in temperature.aminmax())
    temperature, top_k, top_p, uniform = (given.to(device) for given in (temperature, top_k, top_p, uniform))
    if not coldest == hottest == 1:  # by default they are, which saves a pass over the logits
        logits = temper(logits, temperature)
    if truncated:
        drawn = temperature > 0
        logits = truncate(logits, torch.where(drawn, top_k, 0), torch.where(drawn, top_p, 1.0))
    weights = torch.softmax(logits, -1)
    # Two levels keep the sums short: first which block of the vocabulary, then which token of it.
    rows, vocabulary = weights.shape
    block = 256
    padding = -vocabulary % block
    padded = (torch.nn.functional.pad(weights, (0, padding)) if padding else weights).view(rows, -1, block)
    block_sums = padded.sum(-1).double()
    ends = block_sums.cumsum(-1)
    total = ends[:, -1:]
    target = uniform[:, None] * total
    chosen = torch.searchsorted(ends, target, right=True).clamp_(max=padded.shape[1] - 1)
    rest = target - ends.gather(1, chosen) + block_sums.gather(1, chosen)
    first = torch.arange(0, rows * padded.shape[1], padded.shape[1], device=device)
    inside = padded.flatten(0, 1)[first + chosen[:, 0]].cumsum(-1, dtype=torch.float64)
    # Rounding may point one past the last token that has any weight: the sum grows no more from that on.
    most = torch.nextafter(inside[:, -1:], inside.new_zeros(()))
    token = chosen * block + torch.searchsorted(inside, torch.minimum(rest, most), right=True)
    token.clamp_(max=vocabulary - 1)  # what is not a number is beyond them all
    if coldest == 0:
        token = torch.where((temperature > 0)[:, None], token, logits.argmax(-1, keepdim=True))
    logprobs = (weights.gather(1, token) / total).log().to(logits.dtype)
    return token[:, 0], logprobs[:, 0]
