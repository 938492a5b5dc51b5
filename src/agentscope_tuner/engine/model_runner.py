"""The model's forward pass over the sampler's slots: which rows are run at once, and how they are laid out.

Whoever schedules (see `sampler`) says which slots need keys and values; they are computed here, a bounded number of
tokens at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from agentscope_tuner.config import EngineConfig
from agentscope_tuner.engine.attention import KVCache, SlotGroup, SlotLayout
from agentscope_tuner.engine.decoder import Decoder, choose_decoder, kernels_for
from agentscope_tuner.engine.models import LoadedModel
from agentscope_tuner.engine.slots import Slot
from agentscope_tuner.errors import ConfigError

_SCORE_ELEMENTS = 2**26
"""Attention scores computed at once during prefill."""


class ModelRunner:
    """Runs a model over spans of slots, and keeps their keys and values."""

    def __init__(self, loaded: LoadedModel, engine: EngineConfig) -> None:
        """Plan the cache.

        Raises:
            ConfigError: not even one sequence of `max_model_len` tokens fits into `engine.kv_cache_gb`.
        """
        self._loaded = loaded
        self._device = loaded.device
        config = loaded.model.config.get_text_config()
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token_bytes = 2 * config.num_hidden_layers * kv_heads * head_dim * loaded.model.dtype.itemsize
        sequence_gb = token_bytes * loaded.max_model_len / 1e9
        slots = min(engine.max_slots, int(engine.kv_cache_gb / sequence_gb))
        if slots < 1:
            raise ConfigError(
                f"`engine.kv_cache_gb` is {engine.kv_cache_gb}, but one sequence of {loaded.max_model_len} tokens "
                f"takes {sequence_gb:.2f} GB; raise it, or lower `model.max_model_len`"
            )
        self.decoder: Decoder = choose_decoder(loaded, slots, fused=engine.fast_decoder)
        like = torch.empty(0, dtype=loaded.model.dtype, device=self._device)
        kernels = kernels_for(loaded, engine)
        self.cache = KVCache(
            config.num_hidden_layers, kv_heads, head_dim, slots, loaded.max_model_len + 1, like, kernels
        )
        self._heads: int = config.num_attention_heads
        self._prefill_tokens = engine.prefill_tokens
        self.flat = kernels is not None
        """Every token is a row of its own, and nothing is padded: compiled attention reads the keys and values of a
        sequence once for all of its rows."""

    def advance(self, slots: Sequence[Slot]) -> dict[Slot, Tensor]:
        """Compute missing tokens of some slots, as many as go at once.

        Returns the hidden state (D,) of the last one that was computed, for each slot that had any.
        """
        tokens = self._next_tokens(slots)
        ordered = sorted(tokens, key=lambda slot: slot.row_order)
        if self.flat:
            rows = [(slot, slot.cached + i, 1) for slot in ordered for i in range(tokens[slot])]
            ends = itertools.accumulate(tokens[slot] for slot in ordered)
            last = self.hidden(rows, 1)[[end - 1 for end in ends], 0]
        else:
            rows = [(slot, slot.cached, tokens[slot]) for slot in ordered]
            hidden = self.hidden(rows, max(tokens.values()))
            last = hidden[range(len(ordered)), [tokens[slot] - 1 for slot in ordered]]
        for slot in ordered:
            slot.cached += tokens[slot]
        return dict(zip(ordered, last, strict=True))

    def _next_tokens(self, slots: Sequence[Slot]) -> dict[Slot, int]:
        """Which slots' missing tokens to compute at once, and how many of each."""
        room = self._prefill_tokens
        rows: dict[Slot, int] = {}
        if self.flat:
            for slot in slots:
                if room > 0:
                    rows[slot] = min(slot.missing, room)
                    room -= rows[slot]
            return rows
        # Rows of similar length go together; long ones are cut.
        ordered = sorted(slots, key=lambda slot: (slot.missing, slot.index))
        for slot in ordered:
            width = min(slot.missing, room)
            keys = slot.cached + width + (len(slot.trunk.ids) if slot.trunk else 0)
            cells = (len(rows) + 1) * width
            if rows and (
                cells > room
                or cells * keys * self._heads > _SCORE_ELEMENTS
                or slot.missing > 2 * ordered[0].missing + 16
            ):
                break
            rows[slot] = width
        if len(rows) == 1:
            keys = ordered[0].cached + (len(ordered[0].trunk.ids) if ordered[0].trunk else 0) + room
            rows[ordered[0]] = min(rows[ordered[0]], max(16, int(_SCORE_ELEMENTS // (self._heads * keys))))
        return rows

    def hidden(self, rows: Sequence[tuple[Slot, int, int]], width: int) -> Tensor:
        """Hidden states (B, width, D) of a span of each row's slot: where it starts, and how many tokens it has.

        Slots that share an adapter, and within it a trunk, must be neighbours. A slot may have several rows: all keys
        and values are written before any are read.
        """
        self.cache.reserve(min(self.cache.limit, max(start for _, start, _ in rows) + width))
        # Padding may not reach beyond the cache; it is masked, so any place inside will do.
        ids = [slot.ids[start : start + n] + [0] * (width - n) for slot, start, n in rows]
        groups: list[SlotGroup] = []
        positions: list[int] = []
        speakers: list[tuple[str, int]] = []
        for _, run in itertools.groupby(rows, key=lambda row: (row[0].adapter, id(row[0].trunk))):
            members = list(run)
            first = members[0][0]
            speakers.append((first.adapter, len(members)))
            slots, starts, counts = ([*column] for column in zip(*members, strict=True))
            indices = [slot.index for slot in slots]
            groups.append(
                SlotGroup(first.trunk.cache if first.trunk else None, indices, starts, counts, width, self.cache)
            )
            offset = len(first.trunk.ids) if first.trunk else 0
            positions.extend(offset + start for start in starts)
        limit = self._loaded.max_model_len - 1
        absolute = torch.tensor(positions, device=self._device)[:, None] + torch.arange(width, device=self._device)
        return self.decoder.hidden(
            torch.tensor(ids, device=self._device),
            absolute.clamp_(max=limit),
            SlotLayout(self.cache, groups),
            speakers,
        )
