"""The learner: one optimizer step from packed calls, exact to what one-call-per-sample training would do.

Calls are packed into prefix trees, so every shared token is run once. The output head is applied in chunks and only
where tokens were sampled; each chunk's gradient is taken at once, so the (tokens, vocabulary) matrix never exists.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from agentscope_tuner.algorithms.advantages import Datum, weigh
from agentscope_tuner.algorithms.distributions import temper, truncate
from agentscope_tuner.algorithms.losses import entropy, k3_divergence, policy_loss
from agentscope_tuner.algorithms.packing import PackedTree, pack
from agentscope_tuner.config import AlgorithmConfig, EngineConfig
from agentscope_tuner.engine.memory import PassTokens, pass_tokens
from agentscope_tuner.engine.models import LoadedModel
from agentscope_tuner.engine.optimizer import Optimizer
from agentscope_tuner.engine.products import onednn_products
from agentscope_tuner.engine.trainable import PassKernels, TreePass, choose, head_rows
from agentscope_tuner.errors import ParityError
from agentscope_tuner.types import ModelCall

_FEW = 8
"""Tokens over which the differences of a shorter call are averaged all the same."""


@dataclass(slots=True)
class UpdateMetrics:
    """What one pass over a batch did; means are over trained tokens."""

    loss: float = 0.0
    grad_norm: float = 0.0
    kl_to_sampler: float = 0.0
    clip_fraction: float = 0.0
    entropy: float = 0.0
    learning_rate: float = 0.0
    tokens_trained: int = 0
    tokens_packed: int = 0
    logprob_gap: float = 0.0
    """Largest difference between recorded log-probabilities and the learner's, measured by what a call allows: of a
    token, or of a call on average (see `Learner._parity`) ..."""
    gap_datum: int = 0
    """... and the datum it was found in."""


@dataclass(slots=True)
class Entries:
    """The sampled tokens of a packed tree, one entry per call and token: n in all."""

    hidden: Tensor
    """(n,) packed index whose hidden state predicts the token."""
    tokens: Tensor
    """(n,)"""
    call: Tensor
    """(n,) which of the input calls the token belongs to."""
    offset: Tensor
    """(n,) place within its completion."""
    adapter: str
    """Which all of the tree's calls were sampled with."""


def pack_calls(calls: Sequence[ModelCall], tokens: PassTokens) -> Iterator[tuple[PackedTree, Entries]]:
    """Pack calls into trees, with the entries where their losses land."""
    by_adapter: dict[str, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        by_adapter[call.adapter].append(index)
    for adapter, indices in by_adapter.items():
        yield from _pack_calls(calls, indices, adapter, tokens)


def _pack_calls(
    calls: Sequence[ModelCall], indices: list[int], adapter: str, pass_tokens: PassTokens
) -> Iterator[tuple[PackedTree, Entries]]:
    # Nothing follows a call's last token, so it need not be run.
    sequences = [(calls[i].prompt_ids + calls[i].completion_ids)[:-1] for i in indices]
    for tree in pack(sequences, max_tokens=pass_tokens.usual, most_tokens=pass_tokens.most):
        tree.members = [indices[member] for member in tree.members]
        hidden: list[int] = []
        tokens: list[int] = []
        of: list[int] = []
        offset: list[int] = []
        for member, where in zip(tree.members, tree.where, strict=True):
            call = calls[member]
            hidden += where[len(call.prompt_ids) - 1 :]
            tokens += call.completion_ids
            of += [member] * len(call.completion_ids)
            offset += range(len(call.completion_ids))
        columns = [torch.tensor(column) for column in (hidden, tokens, of, offset)]
        yield tree, Entries(columns[0], columns[1], columns[2], columns[3], adapter)


class Learner:
    """Updates a loaded model's trainable parameters."""

    def __init__(
        self,
        loaded: LoadedModel,
        algorithm: AlgorithmConfig,
        engine: EngineConfig,
        max_tokens: int,
        total_updates: int = 1,
    ) -> None:
        """Prepare the optimizer.

        Args:
            loaded: the model.
            algorithm: how it learns.
            engine: how it computes.
            max_tokens: the longest completion, the constant of `loss_weighting: constant`.
            total_updates: optimizer steps of the whole run, over which the learning rate falls.
        """
        self._total_updates = total_updates
        self._loaded = loaded
        self._algorithm = algorithm
        self._pass = TreePass(loaded, engine)
        self._pass_tokens = pass_tokens(self._pass, engine)
        self._max_tokens = max_tokens
        self.optimizer = Optimizer(
            loaded,
            betas=algorithm.adam_betas,
            weight_decay=algorithm.weight_decay,
            keep_memory=engine.step_memory_gb is None,
        )
        self._reference = None
        if algorithm.kl_coef > 0 and (loaded.lora is None or loaded.was_adapted):
            self._reference = TreePass(copy.deepcopy(loaded), engine)

    # ---------------------------------------------------------------------------------------------- updates

    def train(
        self,
        updates: Sequence[list[Datum]],
        on_tree: Callable[[int], None] | None = None,
        *,
        on_policy: bool = True,
        before_update: Callable[[], object] | None = None,
    ) -> UpdateMetrics:
        """All passes over one batch; returns metrics averaged over them.

        Args:
            updates: the datums of each optimizer step of a pass.
            on_tree: called with the number of tokens after each packed tree.
            on_policy: the batch was sampled with the weights as they are.
            before_update: called before each optimizer step; until it returns, the weights stay as they are.

        Raises:
            ParityError: before the first update, a recorded log-probability is not the learner's.
        """
        for datums in updates:
            weigh(datums, self._algorithm.loss_weighting, self._max_tokens)
        references = [self._reference_logprobs(datums) for datums in updates]
        passes: list[UpdateMetrics] = []
        for epoch in range(self._algorithm.epochs_per_batch):
            for index, (datums, reference) in enumerate(zip(updates, references, strict=True)):
                metrics = self._gradient(datums, reference, on_policy and epoch == index == 0, on_tree)
                if before_update is not None:
                    before_update()
                metrics.learning_rate = self.learning_rate
                metrics.grad_norm = self.optimizer.step(metrics.learning_rate, self._algorithm.max_grad_norm)
                passes.append(metrics)
        total = UpdateMetrics(learning_rate=passes[-1].learning_rate)
        for one in passes:
            for name in ("loss", "grad_norm", "kl_to_sampler", "clip_fraction", "entropy"):
                setattr(total, name, getattr(total, name) + getattr(one, name) / len(passes))
            total.tokens_trained += one.tokens_trained
            total.tokens_packed += one.tokens_packed
        return total

    def _gradient(
        self,
        datums: list[Datum],
        reference: list[Tensor] | None,
        on_policy: bool,
        on_tree: Callable[[int], None] | None,
    ) -> UpdateMetrics:
        self.optimizer.zero_grad()
        metrics = self.accumulate(datums, reference, on_tree)
        worst = datums[metrics.gap_datum].call
        if on_policy and not metrics.logprob_gap <= self._parity(worst)[1]:
            raise self._parity_error(worst, metrics.logprob_gap)
        return metrics

    @onednn_products()
    def accumulate(
        self,
        datums: list[Datum],
        reference: list[Tensor] | None = None,
        on_tree: Callable[[int], None] | None = None,
    ) -> UpdateMetrics:
        """Add the gradient of the datums' loss to the parameters' `grad`.

        Args:
            datums: weighed (see `weigh`).
            reference: the reference policy's log-probabilities (T,) of each datum's call, for the KL term.
            on_tree: called with the number of tokens after each packed tree.
        """
        device = self._loaded.device
        algorithm = self._algorithm
        metrics = UpdateMetrics()
        columns = _Columns(datums, device)
        gaps = torch.zeros(len(datums), device=device)
        lengths = torch.tensor([max(len(datum.call.completion_ids), _FEW) for datum in datums], device=device)
        parity = [self._parity(datum.call) for datum in datums]
        every_token = torch.tensor([strict for strict, _ in parity], device=device)
        # They stay on the device until all is computed: to read one is to wait for it.
        sums = torch.zeros(4, dtype=torch.float64, device=device)
        trained = Counter[str]()
        for datum in datums:
            trained[datum.call.adapter] += len(datum.call.completion_ids)
        for tree, entries in pack_calls([datum.call for datum in datums], self._pass_tokens):
            column = columns.of(entries)
            reference_logprobs = None
            if reference is not None:
                reference_logprobs = torch.cat([reference[member] for member in tree.members]).to(device)
            with self._loaded.speaking_as(entries.adapter):
                hidden = self._hidden(self._pass, tree, entries)
            leaf = hidden.detach().requires_grad_()
            for rows in _chunks(len(entries.tokens), self._loaded):
                logprobs, entropies = token_logprobs(
                    self._pass.logits(leaf[rows]), entries.tokens[rows].to(device), column, rows, self._pass.kernels,
                    entropy_gradient=algorithm.entropy_coef != 0,
                )  # fmt: skip
                old = column.logprobs[rows]
                per_token, clipped = policy_loss(
                    logprobs, old, column.advantages[rows], algorithm.clip_low, algorithm.clip_high
                )
                if reference_logprobs is not None:
                    # Weighted by the ratio, so that its gradient is that of the divergence, without bias.
                    ratio = torch.exp(logprobs - old)
                    per_token = per_token + algorithm.kl_coef * ratio * k3_divergence(
                        logprobs, reference_logprobs[rows]
                    )
                spread = entropies.sum()
                # Adapters are policies of their own, each with its own mean; so are the weights.
                bonus = algorithm.entropy_coef / trained[entries.adapter] * spread
                loss = (per_token * column.weights[rows]).sum() - bonus
                loss.backward()
                with torch.no_grad():
                    differences, calls = (logprobs - old).abs(), entries.call[rows].to(device)
                    strict = every_token[calls]
                    gaps.scatter_reduce_(0, calls, differences * strict, "amax")
                    gaps.index_add_(0, calls, differences / lengths[calls] * ~strict)
                    sums += torch.stack([loss, k3_divergence(old, logprobs).sum(), clipped.sum(), spread])
            hidden.backward(leaf.grad)
            metrics.tokens_trained += len(entries.tokens)
            metrics.tokens_packed += len(tree.ids)
            if on_tree is not None:
                on_tree(len(tree.ids))
        worst = int((gaps / torch.tensor([tolerance for _, tolerance in parity], device=device)).argmax())
        metrics.logprob_gap, metrics.gap_datum = gaps[worst].item(), worst
        metrics.loss, *others = sums.tolist()
        metrics.kl_to_sampler, metrics.clip_fraction, metrics.entropy = (
            other / metrics.tokens_trained for other in others
        )
        return metrics

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        algorithm, updates = self._algorithm, self.optimizer.updates
        rise = min(1.0, (updates + 1) / algorithm.warmup_steps) if algorithm.warmup_steps else 1.0
        progress = min(1.0, updates / self._total_updates)
        fall = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
        return algorithm.learning_rate * rise * fall[algorithm.lr_scheduler_type]

    # ------------------------------------------------------------------------------------------ log-probabilities

    @torch.no_grad()
    def logprobs(self, calls: Sequence[ModelCall]) -> list[Tensor]:
        """Log-probabilities (T,) of each call's tokens under the current weights."""
        return self._logprobs(self._pass, [Datum(call, 0.0, 0.0, 0) for call in calls])

    @onednn_products()
    def _logprobs(self, tree_pass: TreePass, datums: list[Datum], *, bare: bool = False) -> list[Tensor]:
        """With `bare`, without the calls' adapters."""
        loaded = tree_pass.loaded
        device = loaded.device
        columns = _Columns(datums, device)
        result = [torch.empty(len(datum.call.completion_ids)) for datum in datums]
        for tree, entries in pack_calls([datum.call for datum in datums], self._pass_tokens):
            column = columns.of(entries)
            with nullcontext() if bare else loaded.speaking_as(entries.adapter):
                hidden = self._hidden(tree_pass, tree, entries)
            tokens = entries.tokens.to(device)
            found = [
                token_logprobs(tree_pass.logits(hidden[rows]), tokens[rows], column, rows, tree_pass.kernels)[0].cpu()
                for rows in _chunks(len(tokens), loaded)
            ]
            start = 0
            values = torch.cat(found)
            for member in tree.members:  # entries are in the members' order
                n = len(result[member])
                result[member] = values[start : start + n]
                start += n
        return result

    @torch.no_grad()
    def _reference_logprobs(self, datums: list[Datum]) -> list[Tensor] | None:
        if self._algorithm.kl_coef == 0:
            return None
        if self._reference is not None:
            return self._logprobs(self._reference, datums)
        with self._loaded.without_adapters():
            return self._logprobs(self._pass, datums, bare=True)

    def _hidden(self, tree_pass: TreePass, tree: PackedTree, entries: Entries) -> Tensor:
        """Hidden states (n, D) that predict the entries' tokens."""
        rows, places = entries.hidden.to(tree_pass.loaded.device).unique(return_inverse=True)
        return tree_pass.hidden(tree, rows).index_select(0, places)

    def _parity(self, call: ModelCall) -> tuple[bool, float]:
        """Whether every token of a call has to have its recorded log-probability, or all on average; within what."""
        # bfloat16 rounds a logit of 16 by up to 1/16; and at the edge of a truncated distribution rounding decides
        # whether a token belongs to it, which changes the others' probabilities by its own.
        if self._loaded.model.dtype != torch.float32 or call.top_k > 0 or call.top_p < 1:
            return False, 0.1
        return True, 1e-4 / min(1.0, call.temperature or 1.0)

    def _parity_error(self, call: ModelCall, gap: float) -> ParityError:
        return ParityError(
            f"before any update the learner's log-probabilities must equal the sampler's within "
            f"{self._parity(call)[1]:g}, but differ by {gap:.3g}; first differing call: role `{call.role}`, "
            f"{len(call.prompt_ids)} prompt tokens, text {call.text[:80]!r}. What would be trained is not what was "
            "sampled: look for code that changes recorded calls, or set `engine.fast_decoder=false` and report it"
        )


class _Columns:
    """Per-call values, looked up per entry."""

    def __init__(self, datums: Sequence[Datum], device: torch.device) -> None:
        calls = [datum.call for datum in datums]
        lengths = [len(call.completion_ids) for call in calls]
        starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        self._starts = starts
        self._logprobs = torch.tensor([value for call in calls for value in call.logprobs])
        self._advantages = torch.tensor([datum.advantage for datum in datums])
        self._weights = torch.tensor([datum.weight for datum in datums])
        self._temperature = torch.tensor([call.temperature for call in calls])
        self._top_k = torch.tensor([call.top_k for call in calls])
        self._top_p = torch.tensor([call.top_p for call in calls])
        self._device = device

    def of(self, entries: Entries) -> _EntryColumns:
        call, device = entries.call, self._device
        return _EntryColumns(
            logprobs=self._logprobs[self._starts[call] + entries.offset].to(device),
            advantages=self._advantages[call].to(device),
            weights=self._weights[call].to(device),
            temperature=self._temperature[call].to(device),
            top_k=self._top_k[call].to(device),
            top_p=self._top_p[call].to(device),
            truncated=(self._top_k[call] > 0) | (self._top_p[call] < 1),
        )


@dataclass(slots=True)
class _EntryColumns:
    """All (n,)."""

    logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    truncated: Tensor
    """Whether some tokens were excluded; on the CPU."""


def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    column: _EntryColumns,
    rows: slice,
    kernels: PassKernels | None,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (n,) of tokens under the distribution they were drawn from, and its entropies (n,).

    Args:
        logits: (n, V), which nothing else may need: gradients may be written in their place.
        tokens: (n,)
        column: how they were drawn, of all entries,
        rows: and which of the entries these are.
        kernels: compiled ones, where they may be used.
        entropy_gradient: whether entropies are differentiable in any case.
    """
    temperature, top_k, top_p = column.temperature[rows], column.top_k[rows], column.top_p[rows]
    truncated = bool(column.truncated[rows].any())
    if kernels is not None and not truncated:
        return choose(logits, tokens, temperature, kernels)
    logits = temper(logits.float(), temperature)
    if truncated:
        logits = truncate(logits, top_k, top_p, keep=tokens)
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        entropies = entropy(logits)
    return chosen - torch.logsumexp(logits, -1), entropies


def _chunks(n: int, loaded: LoadedModel) -> Iterator[slice]:
    size = head_rows(loaded)
    for start in range(0, n, size):
        yield slice(start, min(n, start + size))
