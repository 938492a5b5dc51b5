"""Decoding on a GPU: steps are recorded once, as CUDA graphs, and several are run without a word from the processor.

Launching the kernels of a step one by one takes longer than running them. What a step reads lies where it was when the
step was recorded: weights, cache, and the rows' state below. Each step leaves the state as the next one needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentscope_tuner.algorithms.distributions import temper, truncate
from agentscope_tuner.engine.attention import GpuRowLayout
from agentscope_tuner.engine.completions import Drawing, Work
from agentscope_tuner.engine.decoder import GpuDecoder
from agentscope_tuner.engine.joined_linear import Voices
from agentscope_tuner.engine.kv_cache import KVCache

_ROUNDED = 64
"""Rows are rounded up to a power of two, from here on to a multiple of this: steps are recorded for few numbers."""


class RecordedSteps:
    """Steps of up to B rows, one token of a sequence each."""

    def __init__(self, decoder: GpuDecoder, cache: KVCache, most_steps: int) -> None:
        """Make room for the state; at most so many steps are run at once.

        Args:
            decoder: runs the model.
            cache: has all of its memory, and keeps it.
            most_steps: that are run at once.
        """
        self._decoder = decoder
        self._cache = cache
        self._device = cache.keys[0].device
        rows = _rounded(cache.slots)

        def state(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        # Of each row: its last token, where that is, who speaks, and how the next ones are drawn.
        self._tokens, self._own, self._slots, self._voice, self._top_k = (state(rows) for _ in range(5))
        self._temperature, self._top_p = (state(rows, dtype=torch.float32) for _ in range(2))
        self._uniforms = state(most_steps, rows, dtype=torch.float64)
        self._step = state(1)
        self._drawn, self._logprobs = state(most_steps, rows), state(most_steps, rows, dtype=torch.float32)
        self._recorded: dict[tuple[int, bool], Callable[[], None]] = {}
        self._pool: Any = None
        self._voices = decoder.voices

    def weights_changed(self) -> None:
        """Where adapters have come or gone, steps are recorded anew."""
        if self._voices != self._decoder.voices:
            self._voices = self._decoder.voices
            self._recorded.clear()
            self._pool = None

    @torch.inference_mode()
    def begin(self, work: Work, drawing: Drawing) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        """Begin with the steps of work, which go on by themselves.

        What is returned waits for them, and gives the tokens (R,) they drew and their log-probabilities (R,): of one
        row after the other.
        """
        count, steps = len(work.ids), work.steps
        rows = _rounded(count)
        # Rows beyond the last one repeat it: they write what it writes.
        each = np.minimum(np.arange(rows), count - 1)
        given = [(self._tokens, work.ids), (self._own, work.first), (self._slots, work.lineup.index)]
        given.append((self._temperature, drawing.temperature[::steps]))
        if len(self._voices) > 1:
            given.append((self._voice, work.lineup.voice))
        if drawing.truncates:
            given += [(self._top_k, drawing.top_k[::steps]), (self._top_p, drawing.top_p[::steps])]
        for state, values in given:
            state[:rows].copy_(torch.from_numpy(values[each]), non_blocking=True)
        uniforms = drawing.uniform.reshape(count, steps).T[:, each]
        self._uniforms[:steps, :rows].copy_(torch.from_numpy(np.ascontiguousarray(uniforms)), non_blocking=True)
        self._step.zero_()
        step = self._recorded.get((rows, drawing.truncates)) or self._record(rows, drawing.truncates)
        for _ in range(steps):
            step()
        drawn, logprobs = self._drawn[:steps, :count].T.flatten(), self._logprobs[:steps, :count].T.flatten()
        return lambda: (drawn.numpy(force=True), logprobs.numpy(force=True))

    def _record(self, rows: int, truncates: bool) -> Callable[[], None]:
        """Record a step of so many rows; its first run is yet to come."""

        def step() -> None:
            self._run(rows, truncates)

        self._recorded[rows, truncates] = step
        # Where tokens are excluded, whole vocabularies are sorted: to launch kernels is the least of it.
        if self._device.type == "cuda" and not truncates:
            kept = [state.clone() for state in (self._tokens, self._own, self._step)]
            step()  # kernels are compiled, and libraries prepared, while nothing is recorded
            for state, before in zip((self._tokens, self._own, self._step), kept, strict=True):
                state.copy_(before)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step()
            self._pool = graph.pool()
            self._recorded[rows, truncates] = graph.replay
        return self._recorded[rows, truncates]

    @torch.inference_mode()
    def _run(self, rows: int, truncates: bool) -> None:
        decoder = self._decoder
        tokens, own, slots, temperature = (
            state[:rows] for state in (self._tokens, self._own, self._slots, self._temperature)
        )
        layout = GpuRowLayout(self._cache, decoder.kernels, own, slots)
        speakers = Voices(self._voice[:rows]) if len(self._voices) > 1 else ()
        logits = decoder.logits(decoder.hidden(tokens[:, None], own[:, None], layout, speakers)[:, 0])
        if truncates:
            logits = truncate(temper(logits.float(), temperature), self._top_k[:rows], self._top_p[:rows])
            temperature = (temperature > 0).float()
        uniforms = self._uniforms[:, :rows].index_select(0, self._step)[0]
        drawn, logprobs = decoder.kernels.draw(logits, temperature, uniforms)
        self._drawn[:, :rows].index_copy_(0, self._step, drawn[None])
        self._logprobs[:, :rows].index_copy_(0, self._step, logprobs[None])
        tokens.copy_(drawn)
        # Rows that are over go on until the last step, but not beyond the context: its last place is never read.
        own.add_(1).clamp_(max=self._cache.limit - 2)
        self._step.add_(1)


def _rounded(rows: int) -> int:
    return -(-rows // _ROUNDED) * _ROUNDED if rows > _ROUNDED else 1 << (rows - 1).bit_length()
