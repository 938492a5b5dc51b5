"""What a GPU computes, here by Triton's interpreter: the kernels, and a sampler and a learner that use them.

That CUDA graphs and compiled attention say the same is found out on a GPU, whenever a model is loaded there.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_tools import gradients, greedy, load, plain_logprobs, play, relative_difference, start
from torch import Tensor
from torch.nn import functional as F

from agentscope_tuner.algorithms import Datum
from agentscope_tuner.algorithms.distributions import draw_tokens
from agentscope_tuner.algorithms.packing import pack
from agentscope_tuner.config import AlgorithmConfig, EngineConfig, LoraConfig
from agentscope_tuner.engine import (
    decoder_choice,
    fast_forms,
    flex_layout,
    gpu_kernels,
    gpu_learner_kernels,
    trainable,
)
from agentscope_tuner.engine.completions import Drawing, Work
from agentscope_tuner.engine.decoder import GpuDecoder
from agentscope_tuner.engine.flex_layout import FlexLayout, visits
from agentscope_tuner.engine.gpu_kernels import GpuKernels
from agentscope_tuner.engine.gpu_learner_kernels import GpuLearnerKernels
from agentscope_tuner.engine.kv_cache import KVCache
from agentscope_tuner.engine.learner import Learner
from agentscope_tuner.engine.model_runner import _tiles
from agentscope_tuner.engine.models import SHARED_ADAPTER, LoadedModel, keep_version
from agentscope_tuner.engine.products import PlainProducts
from agentscope_tuner.engine.tree_attention import TreeLayout
from agentscope_tuner.engine.trial import native_kernels
from agentscope_tuner.policy import SamplingParams
from agentscope_tuner.types import ModelCall


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Without compiled kernels, the processor is taken for a GPU, or not."""

    def take(there: bool) -> None:
        kernels = (lambda *_: GpuKernels()) if there else (lambda *_: None)
        for module in (decoder_choice, trainable):
            monkeypatch.setattr(module, "gpu_kernels_for", kernels)

    monkeypatch.setattr(fast_forms, "native_kernels", lambda: None)
    monkeypatch.setattr(decoder_choice, "products_for", lambda *_: [PlainProducts()])
    take(True)
    return take


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cosines[:, None] + torch.cat([-x[..., half:], x[..., :half]], -1) * sines[:, None]


def table(length: int, size: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(length, size // 2).repeat(1, 2)
    return angles.cos().contiguous(), angles.sin().contiguous()


# ------------------------------------------------------------------------------------------------ the sampler's kernels


@pytest.mark.parametrize("width", [40, 96])
def test_sum_and_norm(width: int) -> None:
    x, y, weight = torch.randn(5, width), torch.randn(5, width), torch.rand(width)
    total = x + y
    assert_same([GpuKernels().add_norm(x, y, weight, 1e-6), x], [F.rms_norm(total, (width,), weight, 1e-6), total])
    assert_same([GpuKernels().add_norm(x, None, weight, 1e-6)], [F.rms_norm(total, (width,), weight, 1e-6)])


def test_gate() -> None:
    gate, up = torch.randn(2, 3, 1500)
    assert_same([GpuKernels().gate_joined(torch.cat([gate, up], 1))], [F.silu(gate) * up])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv", "size"), [(6, 2, 24), (3, 3, 16)])
def test_heads_are_rotated_and_cached(heads: int, kv: int, size: int, normed: bool) -> None:
    joined, (cosines, sines) = torch.randn(5, (heads + 2 * kv) * size), table(20, size)
    positions, slots, own = (torch.tensor(x) for x in ([3, 19, 0, 7, 2], [0, 3, 3, 1, 2], [2, 8, 0, 5, 1]))
    norms = (torch.rand(size), torch.rand(size)) if normed else None
    keys, values = torch.zeros(2, 4, kv, 9, size)
    queries = GpuKernels().split_heads(joined, norms, (cosines, sines), positions, slots, own, keys, values, 0.3, 1e-6)
    q, k, v = joined.view(5, -1, size).split([heads, kv, kv], 1)
    if norms is not None:
        q, k = (F.rms_norm(x, (size,), norm, 1e-6) for x, norm in zip((q, k), norms, strict=True))
    q, k = (rotated(x, cosines[positions], sines[positions]) for x in (q, k))
    assert_same([queries, keys[slots, :, own], values[slots, :, own]], [q * 0.3, k, v])
    assert keys.count_nonzero() == k.numel() and values.count_nonzero() == v.numel()


@pytest.mark.parametrize(("heads", "kv", "size", "span"), [(6, 2, 24, 512), (4, 4, 32, 32)])
def test_rows_attend_to_their_slots(heads: int, kv: int, size: int, span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row, with the keys shared out where they are many; and several rows of a slot together."""
    monkeypatch.setattr(gpu_kernels, "_SPAN", span)
    keys, values = torch.randn(2, 4, kv, 140, size)
    slots, own = torch.tensor([2, 2, 2, 0, 3, 3]), torch.tensor([4, 5, 6, 139, 10, 11])
    q = torch.randn(6, heads, size)
    expected = []
    for query, slot, last in zip(q, slots, own, strict=True):
        k, v = (x[slot, :, : last + 1].repeat_interleave(heads // kv, 0) for x in (keys, values))
        expected.append((torch.softmax(query[:, None] @ k.transpose(1, 2), -1) @ v)[:, 0])
    together = torch.from_numpy(_tiles(np.array([3, 1, 2]), 2))
    assert together.tolist() == [[0, 2], [2, 1], [3, 1], [4, 2]]
    for tiles in (None, together):
        assert_same([GpuKernels().attend(q, keys, values, slots, own, tiles)], [torch.stack(expected)])


@pytest.mark.parametrize("vocabulary", [50, 9000])
def test_tokens_are_drawn_as_elsewhere(vocabulary: int) -> None:
    logits, uniforms = 3 * torch.randn(8, vocabulary), torch.rand(8, dtype=torch.float64)
    temperatures = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 1.0, 0.0, 1.0])
    uniforms[7] = 1 - 2**-53
    logits[4, 10:], logits[5, :20] = -torch.inf, -torch.inf
    logits[7, 30:] = -torch.inf  # also the last token that can be drawn is not the last one there is
    tokens, logprobs = GpuKernels().draw(logits, temperatures, uniforms)
    every = torch.zeros(8, dtype=torch.int64), torch.ones(8)
    expected, theirs = draw_tokens(logits, temperatures, *every, uniforms)
    assert tokens.tolist() == expected.tolist()
    assert_same([logprobs], [theirs])


def test_all_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """The interpreter allows more than the compiler does."""
    anew = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compiled_for_gpus.py")
    done = subprocess.run([sys.executable, script], env=anew, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    modules = [vars(module) for module in (gpu_kernels, gpu_learner_kernels)]
    kernels = {name for module in modules for name, value in module.items() if hasattr(value, "arg_names")}
    assert {path.stem for path in tmp_path.rglob("*.cubin")} == kernels


# ------------------------------------------------------------------------------------------------ the learner's kernels


@pytest.mark.usefixtures("kernels")
def test_the_learners_kernels_are_those_of_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_learner_kernels, "_PROGRAMS", 8)
    ours, theirs = GpuLearnerKernels(), native_kernels()
    x, change, weight, grad = torch.randn(20, 48), torch.randn(20, 48), torch.rand(48), torch.randn(20, 48)
    for given in (None, change):
        total, y, scale = ours.rms_norm(x, given, weight, 1e-6, torch.float32)
        assert_same([total, y, scale], theirs.rms_norm(x, given, weight, 1e-6, torch.float32))
        for rest in (None, change):
            found = ours.rms_norm_backward(grad, rest, total, weight, scale)
            assert_same(found, theirs.rms_norm_backward(grad, rest, total, weight, scale))
    heads, positions = torch.randn(9, 3, 24), torch.randint(20, (9,))
    for back in (False, True):
        given = heads, *table(20, 24), positions
        assert_same([ours.rotate(*given, back=back)], [theirs.rotate(*given, back=back)])
    gate, up, grad = torch.randn(3, 50, 60)
    assert_same([ours.swiglu(gate, up)], [theirs.swiglu(gate, up)])
    assert_same(ours.swiglu_backward(grad, gate, up), theirs.swiglu_backward(grad, gate, up))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("vocabulary", [100, 9000])
def test_log_probabilities_and_their_gradients_are_those_of_processors(vocabulary: int) -> None:
    ours, theirs = GpuLearnerKernels(), native_kernels()
    logits, tokens = 3 * torch.randn(6, vocabulary), torch.randint(8, vocabulary, (6,))
    logits[0, 7] = -torch.inf
    temperatures = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 0.3])
    found = ours.choose(logits, tokens, temperatures)
    assert_same(found, theirs.choose(logits, tokens, temperatures))
    given = *torch.randn(2, 6), logits, tokens, temperatures, *found[1:]
    apart = [x.clone() for x in given]
    assert_same([ours.choose_backward(*given)], [theirs.choose_backward(*apart)])


# ------------------------------------------------------------------------------------------------------ trees of tokens


def forest(seed: int = 0) -> list[list[int]]:
    """Sequences that share beginnings of many lengths, some of which begin others."""
    rng = random.Random(seed)
    base = [rng.randrange(50) for _ in range(200)]
    found = [
        base[: rng.randrange(30, 200)] + [rng.randrange(50) for _ in range(rng.randrange(20, 150))] for _ in range(9)
    ]
    return [*found, *(ids[:-10] + [1] * 40 for ids in found[:3]), found[0][:120]]


def test_tokens_see_their_ancestors(monkeypatch: pytest.MonkeyPatch) -> None:
    (tree,) = pack(forest(), max_tokens=3000)
    count = len(tree.ids)
    entered, left = visits(tree)
    sees = (entered <= entered[:, None]) & (entered[:, None] < left)
    expected = np.zeros((count, count), bool)
    for where in tree.where:
        for depth, token in enumerate(where):
            expected[token, where[: depth + 1]] = True
    assert (sees == expected).all()
    blocks = -(-count // 128)
    padded = np.zeros((blocks * 128, blocks * 128), bool)
    padded[:count, :count] = expected
    assert (flex_layout._blocks_seen(tree) == padded.reshape(blocks, 128, blocks, 128).any((1, 3))).all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_compiled_attention_is_that_of_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(flex_layout, "_flex_attention", lambda: flex_attention)
    (tree,) = pack(forest(), max_tokens=3000)
    q, (k, v) = torch.randn(1, 4, len(tree.ids), 16), torch.randn(2, 1, 2, len(tree.ids), 16)
    cpu = torch.device("cpu")
    assert_same([FlexLayout(tree, cpu).attend(0, q, k, v, 0.25)], [TreeLayout(tree, cpu).attend(0, q, k, v, 0.25)])


# ------------------------------------------------------------------------------------------------- sampler and learner


def largest_gap(loaded: LoadedModel, calls: Sequence[ModelCall]) -> float:
    return max(
        float((torch.tensor(call.logprobs) - plain_logprobs(loaded, call).detach()).abs().max()) for call in calls
    )


def test_episodes_are_exact(tiny_model_dir: Path, gpu: Callable[[bool], None]) -> None:
    """Prompts that share beginnings, turns that go on from one another, tokens that are excluded."""
    loaded = load(tiny_model_dir, max_model_len=128)
    sampler = start(loaded, max_slots=4)
    assert isinstance(sampler._runner.decoder, GpuDecoder)
    calls = play(loaded, sampler, episodes=4, turns=2, tokens=4, shared=20)
    assert len(calls) == 8
    assert largest_gap(loaded, calls) < 1e-4


def test_several_steps_at_once_change_no_token(
    tiny_model_dir: Path, gpu: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completions of different lengths: some are over before the last step, by their budget or by a token."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 200) for _ in range(5 + i)] for i in range(5)]
    outcomes: list[list[Any]] = []
    for there in (False, True):
        gpu(there)
        loaded = load(tiny_model_dir, max_model_len=64)
        loaded.end_of_turn_ids = frozenset(range(3, 20))
        sampler = start(loaded, max_slots=8)
        steps: list[int] = []
        if there:
            begin = sampler._runner.begin

            def noting(work: Work, drawing: Drawing, begin: Any = begin, steps: list[int] = steps) -> Any:
                steps.append(work.steps)
                return begin(work, drawing)

            monkeypatch.setattr(sampler._runner, "begin", noting)

        async def complete(sampler: Any = sampler) -> list[Any]:
            params = [SamplingParams(max_tokens=3 + 4 * i, seed=i) for i in range(len(prompts))]
            return await asyncio.gather(
                *(sampler.sample(ids, params[i], episode_id=f"{i}") for i, ids in enumerate(prompts))
            )

        outcomes.append([(sample.token_ids, sample.finish_reason) for sample in asyncio.run(complete())])
        if there:
            assert max(steps) > 1
    assert outcomes[0] == outcomes[1]
    assert {reason for _, reason in outcomes[0]} == {"stop", "length"}


def test_whoever_listens_hears_every_token(tiny_model_dir: Path, gpu: Callable[[bool], None]) -> None:
    sampler, heard = start(load(tiny_model_dir, max_model_len=64), max_slots=2), list[int]()
    params = SamplingParams(max_tokens=6)
    sample = asyncio.run(sampler.sample([5, 6, 7], params, episode_id="one", on_token=heard.append))
    assert heard == sample.token_ids


def test_new_weights_are_read_where_the_old_ones_were(tiny_model_dir: Path, gpu: Callable[[bool], None]) -> None:
    loaded = load(tiny_model_dir, max_model_len=64)
    sampler = start(loaded, max_slots=2)
    layer = sampler._runner.decoder._layers[0]
    before = [x.weight.data_ptr() for x in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    greedy(sampler, [[5, 6, 7]], tokens=2)
    with torch.no_grad():
        for parameter in loaded.trainable_parameters().values():
            parameter.add_(0.3 * torch.randn_like(parameter))
    sampler.weights_changed(1)
    assert before == [x.weight.data_ptr() for x in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    calls = play(loaded, sampler, episodes=1, turns=1, tokens=4, shared=5)
    assert largest_gap(loaded, calls) < 1e-4


def test_a_shared_adapter_is_read_where_it_was(
    tiny_model_dir: Path, gpu: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in bfloat16, its update is not merged into the weights."""
    monkeypatch.setattr(LoadedModel, "unmerged", property(lambda self: (SHARED_ADAPTER,)))
    loaded = load(tiny_model_dir, max_model_len=64, lora=LoraConfig(rank=4))
    sampler = start(loaded, max_slots=2)
    updates = sampler._runner.decoder._layers[0].qkv.joined
    before = [x.data_ptr() for x in updates]
    assert before and sampler._runner.most_steps > 1
    greedy(sampler, [[5, 6, 7]], tokens=2)
    with torch.no_grad():
        for parameter in loaded.trainable_parameters().values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    sampler.weights_changed(1)
    assert before == [x.data_ptr() for x in sampler._runner.decoder._layers[0].qkv.joined]
    calls = play(loaded, sampler, episodes=1, turns=1, tokens=4, shared=5)
    assert largest_gap(loaded, calls) < 1e-4


def test_roles_with_adapters_take_the_same_steps(tiny_model_dir: Path, gpu: Callable[[bool], None]) -> None:
    """Beside one another, with and without an adapter, after every change; recorded anew only where versions came."""
    loaded = load(tiny_model_dir, max_model_len=128, lora=LoraConfig(rank=4), adapters=("solver", "critic"))
    sampler = start(loaded, max_slots=4)
    runner = sampler._runner
    assert isinstance(runner.decoder, GpuDecoder) and runner.most_steps > 1
    for critic in ("critic", "", "critic@2"):
        with torch.no_grad():
            for parameter in loaded.trainable_parameters().values():
                parameter.normal_(0, 0.3)
        if came := "@" in critic:
            keep_version(loaded, "critic", critic)
        recorded = [*runner._steps._recorded]
        sampler.weights_changed(1)
        assert [*runner._steps._recorded] == ([] if came else recorded)
        by_role = {"solver": "solver", "critic": critic}
        calls = play(loaded, sampler, episodes=4, turns=3, tokens=4, shared=20, mixed_params=False, adapters=by_role)
        assert {call.adapter for call in calls} == {"solver", critic}
        assert runner._steps._recorded
        for call in calls:
            with loaded.speaking_as(call.adapter):
                assert largest_gap(loaded, [call]) < 1e-4


def test_gradients_are_exact(tiny_model_dir: Path, gpu: Callable[[bool], None]) -> None:
    rng = random.Random(0)
    base = [rng.randrange(3, 200) for _ in range(28)]
    data = []
    for i in range(3):
        ids, completion = base[: 26 + i], [rng.randrange(3, 200) for _ in range(4)]
        call = ModelCall("solver", [], None, ids, completion, [-3.0] * 4, 0.7, 1.0, 0, "length", "", 0)
        data.append(Datum(call, (-1.0) ** i, 1 / 12, i))
    outcomes = []
    for there in (False, True):
        gpu(there)
        loaded = load(tiny_model_dir)
        learner = Learner(loaded, AlgorithmConfig(entropy_coef=0.01), EngineConfig(device="cpu"), 4)
        assert isinstance(learner._pass.kernels, GpuLearnerKernels) == there
        metrics = learner.accumulate(data)
        outcomes.append((metrics.loss, metrics.entropy, gradients(loaded)))
    (loss, entropy, expected), (ours, spread, found) = outcomes
    assert (ours, spread) == pytest.approx((loss, entropy), rel=1e-5)
    assert relative_difference(found, expected) < 1e-5


def test_copies_follow_one_another() -> None:
    """A slot may be copied to one that is copied in turn, or be overwritten after it was copied."""
    cache = KVCache((2, 1, 4), 4, 8, torch.empty(0))
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn_like(tensor))
    expected = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    copies = [(0, 1, 3), (0, 2, 5), (1, 3, 2), (2, 0, 5), (3, 0, 1)]
    for source, target, tokens in copies:
        for tensor in expected:
            tensor[target, :, :tokens] = tensor[source, :, :tokens].clone()
    cache.copy(copies)
    # More than was asked for may be copied: nobody reads what follows.
    known = {0: 5, 1: 3, 2: 5, 3: 2}
    for tensor, other in zip((*cache.keys, *cache.values), expected, strict=True):
        for slot, tokens in known.items():
            assert tensor[slot, :, :tokens].equal(other[slot, :, :tokens])
