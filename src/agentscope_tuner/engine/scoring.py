"""Log-probabilities of given tokens at every place of given sequences, and the gradient of any loss over them.

As in the learner, sequences are packed into prefix trees, and the output head is applied in chunks whose gradients are
taken at once. What several sequences have in common is computed once, in the head as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentscope_tuner.algorithms.packing import PackedTree, pack
from agentscope_tuner.config import EngineConfig
from agentscope_tuner.engine.memory import pass_tokens
from agentscope_tuner.engine.models import LoadedModel
from agentscope_tuner.engine.products import onednn_products
from agentscope_tuner.engine.trainable import TreePass, head_rows

EntryLoss = Callable[[Tensor, Tensor], Tensor]
"""From log-probabilities (n,) and the entries (n,) they belong to, to a scalar."""


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence, and at each of its places the token whose log-probability is asked for."""

    ids: list[int]
    """(N,)"""
    targets: list[int]
    """(N,) usually the next token."""


class Scorer:
    """Runs sequences through a loaded model.

    The places of all rows, one row after the other, are called entries.
    """

    def __init__(self, loaded: LoadedModel, engine: EngineConfig) -> None:
        self._loaded = loaded
        self._pass = TreePass(loaded, engine)
        self._pass_tokens = pass_tokens(self._pass, engine)

    @onednn_products()
    @torch.no_grad()
    def logprobs(self, rows: Sequence[Row]) -> Tensor:
        """The log-probability of every entry, on the CPU."""
        found = torch.empty(sum(len(row.ids) for row in rows))
        for tree in self._pack(rows):
            hidden = self._pass.hidden(tree)
            for chunk in self._chunks(tree, rows):
                found[chunk.entries] = chunk.logprobs(self._pass.logits(hidden[chunk.nodes])).cpu()
        return found

    @onednn_products()
    def backward(self, rows: Sequence[Row], loss: EntryLoss) -> tuple[Tensor, float, int]:
        """Add the gradient of a loss to the parameters' `grad`.

        Args:
            rows: the sequences.
            loss: of some entries, given as log-probabilities and entry numbers on the model's device; summed over all.

        Returns:
            The log-probability of every entry, on the CPU; the loss; and how many tokens were run for them.
        """
        found = torch.empty(sum(len(row.ids) for row in rows))
        total, packed = 0.0, 0
        for tree in self._pack(rows):
            packed += len(tree.ids)
            hidden = self._pass.hidden(tree)
            leaf = hidden.detach().requires_grad_()
            for chunk in self._chunks(tree, rows):
                logprobs = chunk.logprobs(self._pass.logits(leaf[chunk.nodes]))
                part = loss(logprobs, chunk.entries.to(logprobs.device))
                part.backward()
                total += part.item()
                found[chunk.entries] = logprobs.detach().cpu()
            hidden.backward(leaf.grad)
        return found, total, packed

    @torch.no_grad()
    def next_token_logprobs(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """The distribution after each place of one sequence, as blocks (n, V) of log-probabilities."""
        tree = pack([list(ids)], max_tokens=len(ids))[0]
        hidden = self._pass.hidden(tree)
        for nodes in hidden.split(head_rows(self._loaded)):
            yield torch.log_softmax(self._pass.logits(nodes).float(), -1)

    def _pack(self, rows: Sequence[Row]) -> list[PackedTree]:
        usual, most = self._pass_tokens
        return pack([row.ids for row in rows], max_tokens=usual, most_tokens=most)

    def _chunks(self, tree: PackedTree, rows: Sequence[Row]) -> Iterator[_Chunk]:
        """The tree's entries, by the packed token they follow."""
        starts = torch.tensor([0, *(len(row.ids) for row in rows)]).cumsum(0).tolist()
        entries = torch.cat([torch.arange(starts[member], starts[member + 1]) for member in tree.members])
        nodes = torch.cat([torch.tensor(where) for where in tree.where])
        targets = torch.cat([torch.tensor(rows[member].targets) for member in tree.members])
        order = nodes.argsort()
        entries, nodes, targets = entries[order], nodes[order], targets[order]
        size = head_rows(self._loaded)
        for start in range(0, len(tree.ids), size):
            low, high = torch.searchsorted(nodes, torch.tensor([start, start + size])).tolist()
            if low < high:
                yield _Chunk(slice(start, start + size), entries[low:high], nodes[low:high] - start, targets[low:high])


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Entries that follow a range of packed tokens."""

    nodes: slice
    entries: Tensor
    """(n,)"""
    rows: Tensor
    """(n,) which of the chunk's packed tokens each follows."""
    targets: Tensor
    """(n,)"""

    def logprobs(self, logits: Tensor) -> Tensor:
        """(n,) from the logits (m, V) of the range."""
        rows, targets = self.rows.to(logits.device), self.targets.to(logits.device)
        logits = logits.float()
        return logits[rows, targets] - torch.logsumexp(logits, -1)[rows]
