"""The learner's forward pass for common families: the model's own linear layers, compiled steps between them.

transformers' modules take a norm, a rotary embedding or an activation for many passes over memory, and as many again
for their gradients: a sixth of the time of a small model's step. It is used only when it agrees with them on a probe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from agentscope_tuner.algorithms.packing import PackedTree, pack
from agentscope_tuner.config import EngineConfig
from agentscope_tuner.engine.attention import CausalLayout, Layout
from agentscope_tuner.engine.decoder import cache_shape, rotary_table, take_rows
from agentscope_tuner.engine.fast_forms import (
    gpu_kernels_for,
    has_fused_form,
    is_small,
    kernels_for,
    tell_of_modules,
)
from agentscope_tuner.engine.flex_layout import FlexLayout, flex_works
from agentscope_tuner.engine.learner_kernels import Heads, LearnerKernels
from agentscope_tuner.engine.models import LoadedModel
from agentscope_tuner.engine.native import NativeKernels, Way
from agentscope_tuner.engine.products import computes_wide, linears, onednn_is_exact
from agentscope_tuner.engine.tree_attention import TreeLayout

if TYPE_CHECKING:
    from agentscope_tuner.engine.gpu_learner_kernels import GpuLearnerKernels

PassKernels: TypeAlias = "LearnerKernels | GpuLearnerKernels"
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
_NEGLIGIBLE = 1e-5
"""What one gradient may differ by, of all of them: where tokens attend to all alike, those of queries and keys are what
rounding leaves of a difference between much larger numbers."""

Forward = Callable[[Tensor, Tensor, Layout, Tensor | None], Tensor]
"""From token ids and absolute positions (1, N) to hidden states (1, N, D), or (1, n, D) of certain places (n,)."""
_HEAD_ELEMENTS, _GPU_HEAD_ELEMENTS = 2**24, 2**28


def head_rows(loaded: LoadedModel) -> int:
    """How many rows of logits are computed at once: the whole matrix of a batch would be larger than all the rest."""
    elements = _HEAD_ELEMENTS if loaded.device.type == "cpu" else _GPU_HEAD_ELEMENTS
    return max(1, elements // loaded.vocabulary)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, kernels: PassKernels) -> Tensor:
        total, y, scale = kernels.rms_norm(x, None, weight, eps, dtype)
        ctx.save_for_backward(total, weight, scale)
        ctx.kernels = kernels
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        return *ctx.kernels.rms_norm_backward(grads[0], None, *ctx.saved_tensors), None, None, None


class _AddNorm(torch.autograd.Function):
    """A sum, which the next one is made of, and its norm: of the model's width, adding takes a pass of its own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, change: Tensor, weight: Tensor, eps: float, kernels: PassKernels
    ) -> tuple[Tensor, Tensor]:
        total, y, scale = kernels.rms_norm(x, change, weight, eps, change.dtype)
        ctx.save_for_backward(total, weight, scale)
        ctx.set_materialize_grads(False)  # nothing is made of the last sum
        ctx.kernels = kernels
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        grad_total, grad = grads
        grad_x, grad_weight = ctx.kernels.rms_norm_backward(grad, grad_total, *ctx.saved_tensors)
        return grad_x, grad_x.to(grad.dtype), grad_weight, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor, positions: Tensor, kernels: PassKernels) -> Tensor:
        ctx.tables = (cosines, sines, positions)
        ctx.kernels = kernels
        rotated: Tensor = kernels.rotate(x, cosines, sines, positions)
        return rotated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.kernels.rotate(grads[0], *ctx.tables, back=True), None, None, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: PassKernels) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        gated: Tensor = kernels.swiglu(gate, up)
        return gated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return *ctx.kernels.swiglu_backward(grads[0], *ctx.saved_tensors), None


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperatures: Tensor, kernels: PassKernels
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, logsums = kernels.choose(logits, tokens, temperatures)
        ctx.save_for_backward(tokens, temperatures, entropies, logsums)
        ctx.logits, ctx.kernels = logits, kernels
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, ctx.logits = ctx.logits, None
        return ctx.kernels.choose_backward(*grads, logits, *ctx.saved_tensors), None, None, None


def choose(logits: Tensor, tokens: Tensor, temperatures: Tensor, kernels: PassKernels) -> tuple[Tensor, Tensor]:
    """Log-probabilities (n,) of tokens (n,), and entropies (n,), by logits (n, V) at temperatures (n,); 0 counts as 1.

    Gradients are written where the logits were, so nothing else may need these.
    """
    found: tuple[Tensor, Tensor] = _Choose.apply(logits.contiguous(), tokens, temperatures, kernels)  # type: ignore[no-untyped-call]
    return found


class TrainableDecoder:
    """A hand-written forward pass with gradients, for the families that the fused decoder knows.

    All between the linear layers is in float32, whatever the weights are; what these read and return is in float32 too
    where they compute in it, and otherwise in the type of the weights. On a GPU so are the weights of norms, and what
    is attended to: its units for products take no float32.
    """

    def __init__(self, loaded: LoadedModel, kernels: PassKernels, *, wide: bool) -> None:
        self._loaded = loaded
        self._kernels = kernels
        self._outer = torch.float32 if wide else loaded.model.dtype
        self._inner = torch.float32 if loaded.device.type == "cpu" else loaded.model.dtype
        self._eps = loaded.model.config.rms_norm_eps
        self._cosines, self._sines = (table.float() for table in rotary_table(loaded))

    def hidden_states(self, ids: Tensor, positions: Tensor, layout: Layout, rows: Tensor | None = None) -> Tensor:
        """(1, N) token ids and absolute positions to (1, N, D), or (1, n, D) of the places in `rows` (n,)."""
        base = self._loaded.model.get_decoder()
        x = base.embed_tokens(ids[0]).float()
        y: Tensor | None = None
        for index, block in enumerate(base.layers):
            attention, mlp = block.self_attn, block.mlp
            x, normed = self._add_norm(x, y, block.input_layernorm)
            q = self._heads(attention.q_proj(normed), attention, "q_norm", positions[0])
            k = self._heads(attention.k_proj(normed), attention, "k_norm", positions[0])
            v = attention.v_proj(normed).to(self._inner).unflatten(-1, (-1, attention.head_dim))
            q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
            attended = layout.attend(index, q, k, v, attention.scaling).flatten(2).squeeze(0)
            if index == len(base.layers) - 1:
                x, attended = take_rows(rows, x, attended)
            y = attention.o_proj(attended.to(self._outer))
            x, normed = self._add_norm(x, y, block.post_attention_layernorm)
            gated: Tensor = _Gate.apply(mlp.gate_proj(normed), mlp.up_proj(normed), self._kernels)  # type: ignore[no-untyped-call]
            y = mlp.down_proj(gated)
        return self._add_norm(x, y, base.norm)[1][None]

    def _add_norm(self, x: Tensor, y: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        if y is None:
            return x, self._norm(x, norm, self._outer)
        weight = norm.weight.to(self._inner)
        both: tuple[Tensor, Tensor] = _AddNorm.apply(x, y, weight, self._eps, self._kernels)  # type: ignore[no-untyped-call]
        return both

    def _norm(self, x: Tensor, norm: Any, dtype: torch.dtype) -> Tensor:
        normed: Tensor = _Norm.apply(x, norm.weight.to(self._inner), self._eps, dtype, self._kernels)  # type: ignore[no-untyped-call]
        return normed

    def _heads(self, x: Tensor, attention: Any, norm: str, positions: Tensor) -> Tensor:
        heads = x.to(self._inner).unflatten(-1, (-1, attention.head_dim))  # (N, H, d)
        if hasattr(attention, norm):
            heads = self._norm(heads, getattr(attention, norm), self._inner)
        rotated: Tensor = _Rotate.apply(heads, self._cosines, self._sines, positions, self._kernels)  # type: ignore[no-untyped-call]
        return rotated


class LayerDecoder(TrainableDecoder):
    """The same for models whose linear layers are plain: two calls a layer, beside attention.

    A thread takes rows from one product to the next while they are in its core's cache, and nothing in between takes a
    pass over memory, or a call, of its own. What is multiplied has the type of the weights.
    """

    @staticmethod
    def suits(loaded: LoadedModel, kernels: NativeKernels, *, wide: bool) -> bool:
        """Whether this is faster, and layers have no adapters, and no biases but those of queries, keys and values."""
        narrow = loaded.model.dtype == torch.bfloat16
        if narrow and (wide or kernels.way is Way.ONE_BY_ONE):
            return False
        if not narrow and not is_small(loaded):  # oneDNN is as fast with many rows
            return False
        for block in loaded.model.get_decoder().layers:
            attention, mlp = block.self_attn, block.mlp
            joined = (attention.q_proj, attention.k_proj, attention.v_proj)
            others = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
            if any(type(layer) is not nn.Linear for layer in (*joined, *others)):
                return False
            if narrow and any(size % 2 for layer in (*joined, *others) for size in layer.weight.shape):
                return False
            if len({layer.bias is None for layer in joined}) > 1 or any(layer.bias is not None for layer in others):
                return False
        return True

    def hidden_states(self, ids: Tensor, positions: Tensor, layout: Layout, rows: Tensor | None = None) -> Tensor:
        """(1, N) token ids and absolute positions to (1, N, D), or (1, n, D) of the places in `rows` (n,)."""
        assert isinstance(layout, TreeLayout)
        base = self._loaded.model.get_decoder()
        x = base.embed_tokens(ids[0]).float()
        for block in base.layers:
            attention, mlp = block.self_attn, block.mlp
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            biases = [projection.bias for projection in projections if projection.bias is not None]
            norms = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
            before, after, *head_norms = (
                norm.weight.float() for norm in (block.input_layernorm, block.post_attention_layernorm, *norms)
            )
            heads = Heads(
                head_norms, self._cosines, self._sines, positions[0],
                len(attention.k_proj.weight) // attention.head_dim, attention.scaling, self._eps,
            )  # fmt: skip
            x, attended = _LayerIn.apply(
                x, before, *(projection.weight for projection in projections), torch.cat(biases) if biases else None,
                heads, layout, self._kernels, *head_norms,
            )  # type: ignore[no-untyped-call]  # fmt: skip
            if block is base.layers[-1]:
                x, attended = take_rows(rows, x, attended)
            x = _LayerOut.apply(
                x, attended.to(self._outer), attention.o_proj.weight, after, mlp.gate_proj.weight,
                mlp.up_proj.weight, mlp.down_proj.weight, self._eps, self._kernels,
            )  # type: ignore[no-untyped-call]  # fmt: skip
        return self._norm(x, base.norm, self._outer)[None]


class _LayerIn(torch.autograd.Function):
    """From the sum x (N, D) to itself, and what is attended to (N, H d)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, to_q: Tensor, to_k: Tensor, to_v: Tensor, bias: Tensor | None, heads: Heads,
        layout: TreeLayout, kernels: LearnerKernels, *head_norms: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, k, v, scales, projected = kernels.layer_in(x, norm, (to_q, to_k, to_v), bias, heads)
        attended, normalizers = kernels.tree_attend(q, k, v, layout.stretches, layout.spans)
        ctx.save_for_backward(x, norm, to_q, to_k, to_v, bias, scales, projected, q, k, v, attended, normalizers)
        ctx.heads, ctx.layout, ctx.kernels = heads, layout, kernels
        return x, attended.flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, to_q, to_k, to_v, bias, scales, projected, q, k, v, attended, normalizers = ctx.saved_tensors
        grad_x, grad = grads
        stretches, spans = ctx.layout.stretches, ctx.layout.spans
        along = ctx.kernels.tree_attend_backward(grad.view_as(q), q, k, v, attended, normalizers, stretches, spans)
        # Of x, its norm, three projections and their biases; and of heads' norms.
        found = ctx.kernels.layer_in_backward(
            *along, grad_x, x, norm, (to_q, to_k, to_v), bias, ctx.heads, scales, projected
        )
        return *found[:6], None, None, None, *found[6:]


class _LayerOut(torch.autograd.Function):
    """From the sum (N, D) and what was attended to (N, H d) to the sum with this layer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attended: Tensor, out: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor,
        eps: float, kernels: LearnerKernels,
    ) -> Tensor:  # fmt: skip
        y, *kept = kernels.layer_out(x, attended, out, norm, gate, up, down, eps)
        ctx.save_for_backward(attended, out, norm, gate, up, down, *kept)
        ctx.kernels = kernels
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.kernels.layer_out_backward(grads[0], *ctx.saved_tensors), None, None


def _gpu_kernels_for(loaded: LoadedModel, engine: EngineConfig) -> GpuLearnerKernels | None:
    """Those for a GPU, where the model is on one and there is Triton."""
    if gpu_kernels_for(loaded, engine) is None:
        return None
    from agentscope_tuner.engine.gpu_learner_kernels import GpuLearnerKernels

    return GpuLearnerKernels()


class TreePass:
    """A model's forward pass over packed trees, gradients included."""

    def __init__(self, loaded: LoadedModel, engine: EngineConfig) -> None:
        self.loaded = loaded
        compiled = kernels_for(loaded, engine)
        self.kernels: PassKernels | None = compiled or _gpu_kernels_for(loaded, engine)
        self._wide = computes_wide(loaded)
        self.forward = choose_forward(loaded, self.kernels, wide=self._wide)
        # Compiled attention with gradients is for float32, which the modules compute in only if their weights are.
        modules = self.forward == loaded.hidden_states
        self._attention = None if modules and loaded.model.dtype != torch.float32 else compiled
        self._flex = False
        if loaded.device.type == "cuda" and engine.fast_decoder:
            heads = loaded.model.config.get_text_config().num_attention_heads
            self._flex = flex_works(heads, *cache_shape(loaded)[1:], loaded.model.dtype, loaded.device)
        onednn_is_exact()

    def hidden(self, tree: PackedTree, rows: Tensor | None = None) -> Tensor:
        """Hidden states (N, D) of a tree's N packed tokens, or (n, D) of some, `rows` (n,), in any order."""
        device = self.loaded.device
        ids, positions = (torch.tensor([values], device=device) for values in (tree.ids, tree.positions))
        layout = FlexLayout(tree, device) if self._flex else TreeLayout(tree, device, self._attention)
        with linears(wide=self._wide):
            return self.forward(ids, positions, layout, rows).squeeze(0)

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, D) to (n, V)."""
        with linears(wide=self._wide):
            logits: Tensor = self.loaded.head(hidden)
        return logits


def choose_forward(loaded: LoadedModel, kernels: PassKernels | None, *, wide: bool = False) -> Forward:
    """The fastest forward pass that computes what the model's modules compute, gradients included.

    Args:
        loaded: the model.
        kernels: compiled ones, where they may be used.
        wide: linear layers may get float32 where their weights are bfloat16, see `WideLinears`.
    """
    if kernels is None or not has_fused_form(loaded):
        return loaded.hidden_states
    length = min(12, loaded.max_model_len)
    # Not from token 0: it often pads, and the norm of its embedding, which is zero then, has no useful gradient.
    tree = pack([(torch.arange(1, length + 1) * 7919 % loaded.vocabulary).tolist()], max_tokens=length)[0]
    probe, positions = (torch.tensor([values], device=loaded.device) for values in (tree.ids, tree.positions))
    learning = [*loaded.trainable_parameters().values()][:13]  # at most the embedding and the first layer

    def outcome(forward: Forward, layout: Layout) -> list[Tensor]:
        with torch.enable_grad():
            hidden = forward(probe, positions, layout, None)
            toward = torch.linspace(-1, 1, hidden.numel(), device=loaded.device).view_as(hidden)
            grads = torch.autograd.grad((hidden * toward).sum(), learning, allow_unused=True)
        return [hidden.detach(), *(hidden.new_zeros(()) if grad is None else grad for grad in grads)]

    expected = outcome(loaded.hidden_states, CausalLayout())
    kinds: list[Callable[..., TrainableDecoder]] = [TrainableDecoder]
    attention = None
    unusable: tuple[type[Exception], ...] = (Exception,)  # Triton cannot compile here, for any reason
    if isinstance(kernels, NativeKernels):
        attention = kernels
        unusable = (AttributeError, RuntimeError)  # a layer is missing or has another form
        if LayerDecoder.suits(loaded, kernels, wide=wide):
            kinds.insert(0, LayerDecoder)
    for kind in kinds:
        try:
            candidate = kind(loaded, kernels, wide=wide)
            with linears(wide=wide):
                found = outcome(candidate.hidden_states, TreeLayout(tree, loaded.device, attention))
        except unusable:
            continue
        if _agree(found, expected, loaded.model.dtype):
            return candidate.hidden_states
    tell_of_modules(loaded, "trained")
    return loaded.hidden_states


def _agree(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> bool:
    if any(a.shape != b.shape for a, b in zip(found, expected, strict=True)):
        return False
    norms = torch.tensor([[float((a - b).norm()), float(b.norm())] for a, b in zip(found, expected, strict=True)])
    gradients = norms[1:].norm(dim=0)
    if dtype == torch.bfloat16:
        # What the modules round away is most of some small gradients, so all gradients count together.
        norms = torch.stack([norms[0], gradients])
    allowed = _TOLERANCES[dtype] * norms[:, 1]
    allowed[1:] += _NEGLIGIBLE * gradients[1]
    return bool(norms.isfinite().all() and (norms[:, 0] <= allowed).all())
