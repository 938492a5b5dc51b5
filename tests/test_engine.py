"""The embedded engine computes what the model computes: sampling, log-probabilities, gradients."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from engine_tools import gradients, greedy, load, plain_logprobs, play, relative_difference, start
from scipy.stats import chisquare
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agentscope_tuner.algorithms import Datum, weigh
from agentscope_tuner.algorithms.distributions import draw_tokens
from agentscope_tuner.algorithms.losses import policy_loss
from agentscope_tuner.algorithms.packing import pack
from agentscope_tuner.config import AlgorithmConfig, EngineConfig, LoraConfig, TunerModelConfig
from agentscope_tuner.engine import attention, completions, fast_forms, model_runner, products
from agentscope_tuner.engine.attention import SlotGroup, SlotLayout, SlotRows
from agentscope_tuner.engine.completions import _Streams
from agentscope_tuner.engine.decoder import (
    FusedDecoder,
    ModuleDecoder,
    NativeDecoder,
    WholeDecoder,
    cache_shape,
    rms_norm,
)
from agentscope_tuner.engine.kv_cache import KVCache, PrefixStack
from agentscope_tuner.engine.learner import Learner
from agentscope_tuner.engine.models import layer_weight, load_model
from agentscope_tuner.engine.native import NativeKernels, Way
from agentscope_tuner.engine.optimizer import Optimizer
from agentscope_tuner.engine.products import WidenedProducts, WideProducts
from agentscope_tuner.engine.sampler import Sampler
from agentscope_tuner.engine.trainable import LayerDecoder, TrainableDecoder, choose_forward
from agentscope_tuner.engine.trial import native_kernels
from agentscope_tuner.errors import ConfigError, ModelError, ParityError, PromptTooLongError, TrainingStoppedError
from agentscope_tuner.policy import Sample, SamplingParams
from agentscope_tuner.types import ModelCall


def learner_of(loaded, *, total_updates: int = 1, **algorithm) -> Learner:
    engine = EngineConfig(device="cpu", micro_batch_tokens=1500)
    return Learner(loaded, AlgorithmConfig(**algorithm), engine, 12, total_updates)


# ------------------------------------------------------------------------------------------------------ sampling


@pytest.mark.parametrize("fast", [True, False])
def test_log_probabilities_of_sampler_learner_and_transformers_agree(tiny_model_dir: Path, fast: bool) -> None:
    loaded = load(tiny_model_dir)
    sampler = start(loaded, fast_decoder=fast, max_slots=16)
    assert isinstance(sampler._runner.decoder, FusedDecoder if fast else ModuleDecoder)
    calls = play(loaded, sampler)
    learned = learner_of(loaded).logprobs(calls)
    for call, ours in zip(calls, learned, strict=True):
        recorded = torch.tensor(call.logprobs)
        assert (recorded - ours).abs().max() < 1e-4
        assert (recorded - plain_logprobs(loaded, call).detach()).abs().max() < 1e-4


@pytest.mark.parametrize("trunks", [True, False])
def test_rows_without_kernels_see_their_prefix_in_place_or_as_a_copy(
    trunks: bool, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = KVCache.take
    monkeypatch.setattr(KVCache, "take", lambda *args: taken.append(1) or take(*args))
    monkeypatch.setattr(model_runner, "_TRUNK_NUMBERS", 0 if trunks else 2**62)
    loaded = load(tiny_model_dir)
    sampler = start(loaded, fast_decoder=False)
    calls = play(loaded, sampler, shared=150)
    assert bool(taken) == trunks
    assert sampler.tokens_prefilled < sum(len(call.prompt_ids) for call in calls) / 4
    for call in calls:
        gap = (torch.tensor(call.logprobs) - plain_logprobs(loaded, call).detach()).abs().max()
        assert gap < 1e-4


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_norm_of_the_fused_loop_is_pytorch_s(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    x, weight = (3 * torch.randn(5, 7, 192)).to(dtype), torch.randn(192).to(dtype)
    x[0, 0] = 0
    normed = rms_norm(x, weight, 1e-6)
    assert normed.dtype == dtype
    expected = torch.nn.functional.rms_norm(x.double(), (192,), weight.double(), 1e-6)
    assert torch.allclose(normed.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize(
    ("slots", "prefixes"),
    [
        pytest.param([2, 3, 4, 5], [0, 0, 1, 1], id="neighbours, as many for each prefix"),
        pytest.param([2, 3, 4, 5], [2, 0, 2, 1], id="neighbours, of one prefix and another"),
        pytest.param([1, 3, 4, 6], [1, 0, 1, 2], id="between others"),
        pytest.param([0, 5, 9, 11], [1, 2, 1, 1], id="far apart"),
        pytest.param([4], [2], id="alone"),
        pytest.param([1, 3, 4, 6], None, id="without prefixes"),
    ],
)
def test_rows_attended_together_see_what_each_sees_alone(
    slots: list[int], prefixes: list[int] | None, new: int, by_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_row:
        monkeypatch.setattr(attention, "_BY_ROW", 0)
        monkeypatch.setattr(attention, "CHUNK", 2)
    torch.manual_seed(0)
    heads, kv_heads, head_dim = 6, 2, 8
    cache = KVCache((1, kv_heads, head_dim), 12, 100, torch.empty(0))
    for tensor in (cache.keys[0], cache.values[0]):
        tensor.normal_()
    stack = PrefixStack([cache.take(slot, tokens) for slot, tokens in ((7, 4), (8, 9), (10, 6))])
    starts = [5 + 3 * row for row in range(len(slots))]
    counts = [new - row % 2 if new > 1 else 1 for row in range(len(slots))]
    q = torch.randn(sum(counts), heads, 1, head_dim)
    k, v = torch.randn(2, sum(counts), kv_heads, 1, head_dim)
    rows = SlotRows(slots, cache, stack if prefixes else None, prefixes or [])
    group = SlotGroup(rows, np.array(starts), np.array(counts), heads, cache)
    assert group.by_row == (by_row and (new > 1 or not rows.is_view))
    out = SlotLayout(cache, [group]).attend(0, q, k, v, 0.5)
    tokens = [x[:, :, 0].split(counts) for x in (q, k, out.transpose(1, 2))]
    for row, (slot, first, count) in enumerate(zip(slots, starts, counts, strict=True)):
        queries, new_keys, found = (parts[row].transpose(0, 1) for parts in tokens)
        keys, values = cache.keys[0][slot, :, : first + count], cache.values[0][slot, :, : first + count]
        assert torch.equal(keys[:, first:], new_keys)
        before = 0
        if prefixes:
            prefix_keys, prefix_values = stack.prefixes[prefixes[row]].layers[0]
            before = prefix_keys.shape[1]
            keys, values = torch.cat([prefix_keys, keys], 1), torch.cat([prefix_values, values], 1)
        visible = torch.ones(count, before + first + count, dtype=torch.bool).tril(before + first)
        alone = torch.nn.functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], visible, scale=0.5, enable_gqa=True
        )
        torch.testing.assert_close(found, alone[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_room_in_the_cache_takes_memory_once_it_is_used(dtype: torch.dtype) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = KVCache((2, 2, 32), 64, 8192, torch.empty(0, dtype=dtype))
    tensors = [*cache.keys, *cache.values]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors), "vectors do not lie across cache lines"
    for tensor in tensors:
        tensor[:, :, :8] = 1
    assert process.memory_info().rss - before < sum(tensor.nbytes for tensor in tensors) / 8
    assert all(tensor.sum() == 64 * 2 * 8 * 32 for tensor in (*cache.keys, *cache.values))


def test_an_altered_token_is_noticed_before_any_update(tiny_model_dir: Path) -> None:
    loaded = load(tiny_model_dir)
    calls = play(loaded, start(loaded), episodes=4, mixed_params=False)
    before = {name: p.detach().clone() for name, p in loaded.trainable_parameters().items()}
    datums = [Datum(call, 1.0, 0.0, 0) for call in calls]
    calls[5].completion_ids[3] = (calls[5].completion_ids[3] + 1) % 100
    with pytest.raises(ParityError, match="first differing call: role `solver`"):
        learner_of(loaded).train([datums])
    assert all(torch.equal(before[name], p) for name, p in loaded.trainable_parameters().items())


def test_what_rounding_decides_does_not_stop_a_run(tiny_model_dir: Path) -> None:
    """Whether a token at the edge of a truncated distribution belongs to it, or differences over a low temperature."""
    loaded = load(tiny_model_dir)
    calls = play(loaded, start(loaded), episodes=12)
    learner = learner_of(loaded, learning_rate=1e-9)

    def train(call: ModelCall, offset: float) -> None:
        call.logprobs[0] += offset
        learner.train([[Datum(call, 1.0, 0.0, 0)]])

    truncated = [call for call in calls if call.top_p < 1 or call.top_k]
    plain = [call for call in calls if call.top_p == 1 and not call.top_k]
    train(truncated[0], 0.05)
    with pytest.raises(ParityError, match=r"within 0\.1"):
        train(truncated[1], 5.0)
    cold = next(call for call in plain if call.temperature == 0.7)
    train(cold, 1.2e-4)
    with pytest.raises(ParityError, match=r"within 0\.000142857"):
        train(cold, 1e-4)
    with pytest.raises(ParityError, match=r"within 0\.0001,"):
        train(next(call for call in plain if call.temperature == 1.0), 2e-4)


def test_a_gradient_that_is_not_finite_changes_nothing(tiny_model_dir: Path) -> None:
    loaded = load(tiny_model_dir)
    learner = learner_of(loaded)
    call = play(loaded, start(loaded), episodes=1, turns=1, mixed_params=False)[0]
    before = {name: p.detach().clone() for name, p in loaded.trainable_parameters().items()}
    with pytest.raises(TrainingStoppedError, match="the gradient of update 1 has the norm"):
        learner.train([[Datum(call, math.inf, 0.0, 0)]])
    assert all(torch.equal(before[name], p) for name, p in loaded.trainable_parameters().items())
    learner.train([[Datum(call, 1.0, 0.0, 0)]])


def test_a_second_turn_goes_on_from_the_first(tiny_model_dir: Path) -> None:
    """Also where a group's prompts are one trunk, so that a slot holds a single token of them."""
    loaded = load(tiny_model_dir)
    sampler = start(loaded)
    prompt = [5 + i * 37 % 90 for i in range(100)]

    async def episode(name: int) -> None:
        sampler.open_episode(f"{name}")
        ids = prompt
        for turn in range(3):
            sample = await sampler.sample(
                ids, SamplingParams(max_tokens=30, seed=10 * name + turn), episode_id=f"{name}"
            )
            ids = [*ids, *sample.token_ids, 7, 8, 9]
        sampler.close_episode(f"{name}")

    async def everybody() -> None:
        await asyncio.gather(*map(episode, range(8)))

    asyncio.run(everybody())
    # The trunk, the prompt's last token for each, and in every later turn what is new: the last token and three more.
    assert sampler.tokens_prefilled <= 99 + 8 + 2 * 8 * 4


def test_an_episode_that_goes_on_from_another_one_s_slot_keeps_to_its_own(tiny_model_dir: Path) -> None:
    loaded = load(tiny_model_dir)
    prompt, other = ([5 + i * step % 90 for i in range(40)] for step in (37, 41))

    async def go_on(sampler: Sampler, name: str, ids: list[int]) -> list[int]:
        sample = await sampler.sample(ids, SamplingParams(temperature=0.0, max_tokens=5), episode_id=name)
        return [*ids, *sample.token_ids, 7, 8, 9]

    async def turns(sampler: Sampler) -> tuple[list[int], int]:
        third = await go_on(sampler, "third", other)
        first = await go_on(sampler, "first", await go_on(sampler, "first", prompt))
        second = await go_on(sampler, "second", await go_on(sampler, "second", prompt))
        assert first == second
        before = sampler.tokens_prefilled
        second = await go_on(sampler, "second", second)
        await go_on(sampler, "third", third)
        return second, sampler.tokens_prefilled - before

    found, prefilled = asyncio.run(turns(start(loaded, max_slots=3)))
    assert prefilled == 2 * 4, "of both, the last token and three more"
    alone = start(loaded)
    wanted = prompt
    for turn in range(3):
        wanted = asyncio.run(go_on(alone, f"{turn}", wanted))
    assert found == wanted


def test_what_sequences_share_has_its_place_in_the_budget(tiny_model_dir: Path) -> None:
    loaded = load(tiny_model_dir)
    expected = start(loaded, max_slots=4)
    sequence_gb = 2 * math.prod(cache_shape(loaded)) * 4 * loaded.max_model_len / 1e9
    tight = start(loaded, max_slots=4, kv_cache_gb=4.7 * sequence_gb)
    assert 0 < tight._runner.trunk_tokens < 400

    async def groups(sampler: Sampler) -> list[Sample]:
        found = []
        for group in range(8):
            prompt = [5 + (i + group) * 37 % 90 for i in range(200)]
            found += await asyncio.gather(
                *(
                    sampler.sample(prompt, SamplingParams(max_tokens=5, seed=i), episode_id=f"{group}-{i}")
                    for i in range(4)
                )
            )
            assert sum(len(trunk.ids) for trunk in sampler._slots._trunks) <= sampler._runner.trunk_tokens
        return found

    found, wanted = asyncio.run(groups(tight)), asyncio.run(groups(expected))
    assert [sample.token_ids for sample in found] == [sample.token_ids for sample in wanted]


def test_greedy_decoding_equals_generate_on_100_prompts(tiny_agent_dir: Path) -> None:
    loaded = load(tiny_agent_dir)
    rng = random.Random(0)
    words = "Ava has 12 apples . Ben gives more books than How many pens are there in total ? Player3 votes".split()
    prompts = [
        loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": " ".join(rng.choices(words, k=rng.randrange(2, 30)))}],
            add_generation_prompt=True,
        )["input_ids"]
        for _ in range(100)
    ]
    ours = greedy(start(loaded), prompts)
    loaded.model.set_attn_implementation("sdpa")
    for prompt, sample in zip(prompts, ours, strict=True):
        theirs = loaded.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=16, eos_token_id=sorted(loaded.end_of_turn_ids),
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert sample.token_ids == theirs


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.7, 0), (1.0, 1.0, 5), (1.4, 0.8, 20)]
)
def test_drawn_tokens_follow_transformers_processors(temperature: float, top_p: float, top_k: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(1, 700, generator=generator)
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    expected = torch.softmax(processors(None, logits), -1)[0].double()
    n = 20_000
    how = (torch.full((n,), value) for value in (temperature, top_k, top_p))
    tokens, logprobs = draw_tokens(logits.expand(n, -1), *how, torch.rand(n, generator=generator).double())
    assert torch.allclose(logprobs.double(), expected[tokens].log(), atol=1e-5)
    counts = torch.bincount(tokens, minlength=700).double()
    assert counts[expected == 0].sum() == 0
    common = expected * n >= 5
    observed, wanted = counts[common].tolist(), (expected[common] * n).tolist()
    if n - sum(wanted) > 5:  # the rare ones together
        observed.append(n - sum(observed))
        wanted.append(n - sum(wanted))
    scale = sum(observed) / sum(wanted)
    assert chisquare(observed, [w * scale for w in wanted]).pvalue > 1e-3


def test_extreme_draws_stay_inside_the_vocabulary() -> None:
    logits = torch.full((3, 300), -torch.inf)
    logits[:, 257] = 0.0
    how = torch.ones(3), torch.zeros(3, dtype=torch.int64), torch.ones(3)
    tokens, logprobs = draw_tokens(logits, *how, torch.tensor([0.0, 0.5, 1 - 2**-53]).double())
    assert tokens.tolist() == [257] * 3
    assert logprobs.tolist() == [0.0] * 3


def test_completions_depend_on_their_seed_and_not_on_their_neighbours(tiny_model_dir: Path) -> None:
    loaded = load(tiny_model_dir)
    prompt = list(range(5, 45))

    async def run(neighbours: int) -> list[int]:
        sampler = start(loaded)
        others = [
            sampler.sample([*prompt[:-i], i], SamplingParams(max_tokens=9, seed=i), episode_id=f"n{i}")
            for i in range(1, neighbours + 1)
        ]
        one = sampler.sample(prompt, SamplingParams(max_tokens=20, seed=77), episode_id="one")
        return (await asyncio.gather(one, *others))[0].token_ids

    alone = asyncio.run(run(0))
    assert asyncio.run(run(7)) == alone


@pytest.mark.parametrize("seed", [0, 5, 2**64 - 1, 2**100 + 7])
def test_the_random_numbers_of_a_seed_are_those_of_its_own_generator(seed: int) -> None:
    streams = _Streams()
    streams.of(seed + 1, 0, 32)
    pieces = [streams.of(seed, first, count) for first, count in ((64, 32), (0, 24), (24, 40))]
    expected = np.random.Generator(np.random.Philox(key=seed)).random(96)
    assert np.array_equal(np.concatenate([*pieces[1:], pieces[0]]), expected)


def test_equal_runs_are_equal_bit_for_bit(tiny_model_dir: Path) -> None:
    loaded = load(tiny_model_dir)
    first, second = (play(loaded, start(loaded, max_slots=8)) for _ in range(2))
    assert [call.completion_ids for call in first] == [call.completion_ids for call in second]
    assert [call.logprobs for call in first] == [call.logprobs for call in second]


def test_more_episodes_than_slots_all_finish_and_stay_exact(tiny_model_dir: Path) -> None:
    loaded = load(tiny_model_dir)
    calls = play(loaded, start(loaded, max_slots=3), episodes=16)
    assert len(calls) == 64
    for call in calls[::5]:
        gap = (torch.tensor(call.logprobs) - plain_logprobs(loaded, call).detach()).abs().max()
        assert gap < 1e-4


def test_prefixes_are_computed_once(tiny_model_dir: Path) -> None:
    loaded = load(tiny_model_dir)
    sampler = start(loaded)
    calls = play(loaded, sampler, episodes=32, shared=150)
    assert sampler.tokens_prefilled < sum(len(call.prompt_ids) for call in calls) / 6


def test_stop_strings_end_a_completion_and_are_recorded(tiny_agent_dir: Path) -> None:
    loaded = load(tiny_agent_dir)
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello, I am Ava."}], add_generation_prompt=True
    )["input_ids"]
    (whole,) = greedy(start(loaded), [prompt])
    text = loaded.tokenizer.decode(whole.token_ids)
    stop = text[3:6]
    params = SamplingParams(temperature=0.0, max_tokens=16, stop=(stop,))
    cut = asyncio.run(start(loaded).sample(prompt, params, episode_id="e"))
    assert cut.finish_reason == "stop"
    assert stop in loaded.tokenizer.decode(cut.token_ids)
    assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids
    assert stop not in loaded.tokenizer.decode(cut.token_ids[:-1])


def test_limits_of_length(tiny_model_dir: Path) -> None:
    loaded = load(tiny_model_dir, max_model_len=40)
    sampler = start(loaded)
    with pytest.raises(PromptTooLongError, match=r"40 tokens, and `model.max_model_len` is 40"):
        asyncio.run(sampler.sample([5] * 40, SamplingParams(), episode_id="e"))
    with pytest.raises(ValueError, match="at least one token, got none"):
        asyncio.run(sampler.sample([], SamplingParams(), episode_id="e"))
    sample = asyncio.run(sampler.sample([5] * 30, SamplingParams(temperature=0.0, max_tokens=99), episode_id="e"))
    assert len(sample.token_ids) <= 10


@pytest.mark.parametrize("fast", [True, False])
def test_long_prompts_are_computed_in_pieces(tiny_model_dir: Path, fast: bool) -> None:
    loaded = load(tiny_model_dir)
    prompts = [[7 + i % 50 for i in range(n)] for n in (300, 260, 17)]
    whole = greedy(start(loaded), prompts)
    pieces = greedy(start(loaded, prefill_tokens=16, fast_decoder=fast), prompts)
    assert [sample.token_ids for sample in pieces] == [sample.token_ids for sample in whole]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_long_prompt_is_computed_beside_the_tokens_of_others(
    tiny_model_dir: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("agentscope_tuner.engine.fast_forms.native_kernels", lambda: None)
    loaded = load(tiny_model_dir, max_model_len=2500)
    sampler = start(loaded, draft_tokens=0, max_slots=3)
    short, long = [5] * 20, [7 + i % 50 for i in range(2000)]
    heard: list[str] = []

    def one(sampler: Sampler, name: str, prompt: list[int], tokens: int) -> Awaitable[Sample]:
        params = SamplingParams(max_tokens=tokens, seed=3)
        return sampler.sample(prompt, params, episode_id=name, on_token=lambda _: heard.append(name))

    async def both() -> list[Sample]:
        first = asyncio.ensure_future(one(sampler, "first", short, 30))
        while not heard:
            await asyncio.sleep(0)
        return await asyncio.gather(first, one(sampler, "late", long, 10))

    async def alone(*given: Any) -> Sample:
        return await one(start(loaded), *given)

    together = asyncio.run(both())
    # Four steps for the long prompt.
    assert heard.index("late") >= 5
    for sample, given in zip(together, [("first", short, 30), ("late", long, 10)], strict=True):
        expected = asyncio.run(alone(*given))
        assert sample.token_ids == expected.token_ids
        assert sample.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("cancelled", [True, False])
def test_a_common_beginning_is_computed_beside_the_tokens_of_others(
    tiny_model_dir: Path, compiled: bool, cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("agentscope_tuner.engine.fast_forms.native_kernels", lambda: None)
    loaded = load(tiny_model_dir, max_model_len=2500)
    sampler = start(loaded, draft_tokens=0, max_slots=6)
    beginning = [7 + i % 50 for i in range(2000)]
    heard: list[str] = []

    def one(sampler: Sampler, name: str, prompt: list[int], tokens: int) -> Awaitable[Sample]:
        params = SamplingParams(max_tokens=tokens, seed=3)
        return sampler.sample(prompt, params, episode_id=name, on_token=lambda _: heard.append(name))

    def group(name: str) -> list[asyncio.Future[Sample]]:
        return [asyncio.ensure_future(one(sampler, name, [*beginning, 5, n], 4)) for n in range(4)]

    async def everybody() -> list[Sample]:
        first = asyncio.ensure_future(one(sampler, "first", [5] * 20, 30))
        while not heard:
            await asyncio.sleep(0)
        if cancelled:  # nobody needs what is being computed; others come for it later
            hopeless = group("hopeless")
            while not (sampler._placing.trunk_slots or sampler._slots.trunks):
                await asyncio.sleep(0)
            for task in hopeless:
                task.cancel()
            await first
            heard.clear()
        return await asyncio.gather(*group("late"))

    async def alone(prompt: list[int]) -> Sample:
        return await one(start(loaded), "alone", prompt, 4)

    samples = asyncio.run(everybody())
    assert [trunk.ids for trunk in sampler._slots.trunks] == [[*beginning, 5]]
    assert sampler.tokens_prefilled == 20 + 2001
    if not cancelled:  # in four steps, in which the first one draws too
        assert heard.index("late") >= 5
    for number, sample in enumerate(samples):
        expected = asyncio.run(alone([*beginning, 5, number]))
        assert sample.token_ids == expected.token_ids
        assert sample.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_a_cancelled_episode_leaves_no_trace(tiny_model_dir: Path) -> None:
    loaded = load(tiny_model_dir)
    plain = SamplingParams(max_tokens=20, seed=5)
    expected = asyncio.run(start(loaded).sample([9] * 20, plain, episode_id="c"))
    sampler = start(loaded, max_slots=2)

    async def run() -> Sample:
        for name in ("a", "b", "c"):
            sampler.open_episode(name)
        heard: list[int] = []
        params = SamplingParams(max_tokens=400, temperature=0.3, top_k=3, stop=("never said",))
        hopeless = [
            asyncio.create_task(sampler.sample([9] * 20, params, episode_id=name, on_token=heard.append))
            for name in "ab"
        ]
        while len(heard) < 50 and not any(task.done() for task in hopeless):
            await asyncio.sleep(0.001)
        assert len(heard) >= 50
        for task in hopeless:
            task.cancel()
        await asyncio.gather(*hopeless, return_exceptions=True)
        sampler.close_episode("a")
        sampler.close_episode("b")
        return await sampler.sample([9] * 20, plain, episode_id="c")

    found = asyncio.run(run())
    assert found.token_ids == expected.token_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    sampler.weights_changed(1)  # raises if anything were still under way


@pytest.mark.parametrize("waits", [True, False])
def test_an_agent_that_is_ended_for_good_leaves_no_trace(waits: bool, tiny_model_dir: Path) -> None:
    sampler = start(load(tiny_model_dir), max_slots=1 if waits else 2)

    async def run() -> None:
        heard: list[int] = []
        params = SamplingParams(max_tokens=400, temperature=0.3, top_k=3)
        other = asyncio.ensure_future(sampler.sample([9] * 20, params, episode_id="a", on_token=heard.append))
        await asyncio.sleep(0)
        stubborn = sampler.sample([9] * 20, params, episode_id="b")
        stubborn.send(None)
        while len(heard) < 5 and not other.done():
            await asyncio.sleep(0)
        assert len(heard) >= 5
        stubborn.close()
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        drawn = sampler.rows_decoded
        await sampler.sample([7] * 20, SamplingParams(max_tokens=5), episode_id="c")
        assert sampler.rows_decoded - drawn < 20

    asyncio.run(run())
    assert not sampler._waiting
    assert not sampler._begun


@pytest.mark.parametrize("own", [True, False])
def test_who_hears_a_token_may_end_an_episode(own: bool, tiny_model_dir: Path) -> None:
    loaded = load(tiny_model_dir)
    sampler = start(loaded)
    others = [SamplingParams(max_tokens=8, seed=seed) for seed in range(3)]

    async def run(listen: bool) -> list[object]:
        heard: list[int] = []

        def hear(token: int) -> None:
            heard.append(token)
            if listen and len(heard) == 8:
                sampler.close_episode("e1" if own else "e2")

        for params in others:
            sampler.open_episode(f"e{params.seed}")
        found = await asyncio.gather(
            *(
                sampler.sample(
                    [5, 6, 7, params.seed + 8],
                    params,
                    episode_id=f"e{params.seed}",
                    on_token=hear if params.seed == 1 else [].append,
                )
                for params in others
            ),
            return_exceptions=True,
        )
        for params in others:
            sampler.close_episode(f"e{params.seed}")
        return found

    expected = asyncio.run(run(listen=False))
    assert all(isinstance(sample, Sample) for sample in expected)
    sampler.weights_changed(1)
    found = asyncio.run(run(listen=True))
    gone = 1 if own else 2
    assert isinstance(found[gone], asyncio.CancelledError)
    kept = [number for number in range(3) if number != gone]
    assert [found[i].token_ids for i in kept] == [expected[i].token_ids for i in kept]


def test_room_for_long_completions_is_made_on_the_way(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(tiny_model_dir)
    expected = play(loaded, start(loaded, max_slots=8))
    monkeypatch.setattr(completions, "_COLUMNS", 1)
    found = play(loaded, start(loaded, max_slots=8))
    assert [call.completion_ids for call in found] == [call.completion_ids for call in expected]
    assert [call.logprobs for call in found] == [call.logprobs for call in expected]


@pytest.mark.parametrize("fast", [True, False])
def test_an_error_while_computing_reaches_everybody_who_waits(tiny_model_dir: Path, fast: bool) -> None:
    sampler = start(load(tiny_model_dir), fast_decoder=fast)

    async def run() -> list[object]:
        bad = sampler.sample([10**6] * 5, SamplingParams(), episode_id="a")
        good = sampler.sample([5] * 5, SamplingParams(), episode_id="b")
        return await asyncio.wait_for(asyncio.gather(bad, good, return_exceptions=True), 10)

    assert all(isinstance(outcome, IndexError) for outcome in asyncio.run(run()))
    sample = asyncio.run(sampler.sample([5] * 5, SamplingParams(max_tokens=3), episode_id="c"))
    assert len(sample.token_ids) == 3


def save_family(family: str, tiny_model_dir: Path, folder: Path) -> Path:
    """A model of another family, with one key-value head."""
    shape = dict(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=512, eos_token_id=1, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**shape)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**shape, sliding_window=None)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**shape)),
    }[family]()
    model.save_pretrained(folder)
    for file in tiny_model_dir.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [FusedDecoder, NativeDecoder, WholeDecoder])
@pytest.mark.parametrize(
    ("dtype", "slow", "tolerance"), [("float32", False, 1e-5), ("bfloat16", False, 4e-2), ("bfloat16", True, 4e-2)]
)
def test_fused_families_and_grouped_heads(
    family: str, kind: type, dtype: str, slow: bool, tolerance: float, tiny_model_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(products, "bfloat16_is_slow", lambda: slow)
    monkeypatch.setattr(products, "_MANY", 4)
    if kind is FusedDecoder:
        monkeypatch.setattr(fast_forms, "native_kernels", lambda: None)
    if kind is NativeDecoder:
        monkeypatch.setattr(fast_forms, "_SMALL_LAYER", 0)
    directory = tiny_model_dir if family == "qwen3" else save_family(family, tiny_model_dir, tmp_path)
    engine = EngineConfig(device="cpu", dtype=dtype)
    loaded = load_model(TunerModelConfig(model_path=str(directory), max_model_len=512), engine)
    sampler = Sampler(loaded, engine)
    assert type(sampler._runner.decoder) is kind
    wide = WidenedProducts if kind is FusedDecoder else WideProducts
    assert isinstance(sampler._runner.decoder._products, wide) == slow
    # Where precision is low, truncation may keep a token that it should not.
    for call in play(loaded, sampler, episodes=8, mixed_params=dtype == "float32"):
        gap = (torch.tensor(call.logprobs) - plain_logprobs(loaded, call).detach()).abs().max()
        assert gap < tolerance


def test_a_model_unlike_its_family_is_run_by_its_own_modules(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_family("qwen2", tiny_model_dir, tmp_path)
    settings = json.loads((directory / "config.json").read_text())
    loaded = load(directory)
    start(loaded)
    learner_of(loaded)
    assert not caplog.records
    (directory / "config.json").write_text(json.dumps({**settings, "hidden_act": "gelu"}))
    loaded = load(directory)
    sampler, learner = start(loaded), learner_of(loaded)
    assert isinstance(sampler._runner.decoder, ModuleDecoder)
    assert [record.getMessage() for record in caplog.records] == [
        f"`{directory}` is {done} by its own modules, which takes longer: what is fast for its family, `qwen2`, "
        "does not compute the same here"
        for done in ("sampled", "trained")
    ]
    calls = play(loaded, sampler, episodes=4)
    for call, logprobs in zip(calls, learner.logprobs(calls), strict=True):
        plain = plain_logprobs(loaded, call).detach()
        assert (torch.tensor(call.logprobs) - plain).abs().max() < 1e-4
        assert (logprobs - plain).abs().max() < 1e-4


def test_attention_that_the_engine_lacks_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    shape = dict(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=512, eos_token_id=1, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    MistralForCausalLM(MistralConfig(**shape, sliding_window=8)).save_pretrained(tmp_path)
    for file in tiny_model_dir.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match=r"architecture `mistral` .* `sliding_window`"):
        load(tmp_path)


def test_models_that_cannot_be_loaded(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="model path `/no/such/model` does not exist"):
        load("/no/such/model")
    with pytest.raises(ModelError, match=r"has no config.json"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"`model.max_model_len` is 99999, but"):
        load(tiny_model_dir, max_model_len=99999)
    with pytest.raises(ConfigError, match=r"`engine.kv_cache_gb` is"):
        start(load(tiny_model_dir), kv_cache_gb=1e-6)
    with pytest.raises(ConfigError, match="PyTorch sees no GPU"):
        load_model(TunerModelConfig(model_path=str(tiny_model_dir)), EngineConfig(device="cuda"))


# ------------------------------------------------------------------------------------------------------ learning


def plain_gradients(loaded, datums: list[Datum], algorithm: AlgorithmConfig) -> dict[str, torch.Tensor]:
    """One call per sample, each through transformers' own forward pass."""
    for datum in datums:
        logprobs = plain_logprobs(loaded, datum.call)
        old = torch.tensor(datum.call.logprobs)
        advantages = torch.full_like(old, datum.advantage)
        loss, _ = policy_loss(logprobs, old, advantages, algorithm.clip_low, algorithm.clip_high)
        (loss.sum() * datum.weight).backward()
    return gradients(loaded)


@pytest.mark.parametrize("weighting", ["token", "episode", "constant"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_packed_gradients_equal_plain_ones(tiny_model_dir: Path, weighting: str, lora: LoraConfig | None) -> None:
    loaded = load(tiny_model_dir, lora=lora)
    if lora is not None:  # B starts at zero, which would hide errors of A
        with torch.no_grad():
            for name, parameter in loaded.trainable_parameters().items():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
    sampler = start(loaded)
    calls = play(loaded, sampler)
    rng = random.Random(1)
    for call in calls:  # as after an update, so that ratios differ from one and some are clipped
        call.logprobs = [value + rng.gauss(0, 0.2) for value in call.logprobs]
    datums = [Datum(call, rng.gauss(0, 1), 0.0, i // 4) for i, call in enumerate(calls)]
    weigh(datums, weighting, 12)
    learner = learner_of(loaded, epochs_per_batch=2)
    metrics = learner.accumulate(datums)
    packed = gradients(loaded)
    plain = plain_gradients(loaded, datums, AlgorithmConfig())
    assert metrics.clip_fraction > 0.01
    assert metrics.tokens_packed < sum(len(call.prompt_ids) for call in calls) / 3
    assert relative_difference(packed, plain) < 1e-5


def test_lora_sampling_sees_the_update(tiny_model_dir: Path) -> None:
    loaded = load(tiny_model_dir, lora=LoraConfig(rank=4))
    assert all("lora_" in name for name in loaded.trainable_parameters())
    sampler = start(loaded)
    calls = play(loaded, sampler, episodes=8, mixed_params=False)
    learner = learner_of(loaded, learning_rate=0.05)
    rng = random.Random(0)
    learner.train([[Datum(call, rng.gauss(0, 1), 0.0, i) for i, call in enumerate(calls)]])
    sampler.weights_changed(1)
    again = play(loaded, sampler, episodes=8, mixed_params=False)
    assert any(abs(a.logprobs[0] - b.logprobs[0]) > 1e-3 for a, b in zip(calls, again, strict=True))
    for call, ours in zip(again, learner.logprobs(again), strict=True):
        assert (torch.tensor(call.logprobs) - ours).abs().max() < 1e-4
    layer = loaded.model.get_decoder().layers[0].self_attn.q_proj
    x = torch.randn(3, 32)
    assert torch.allclose(layer(x), x @ layer_weight(layer, merged=True).T, atol=1e-5)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_small_update_in_bfloat16_is_sampled(
    compiled: bool, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged into weights of 8 bits, most of it would be rounded away."""
    monkeypatch.setattr(fast_forms, "_SMALL_LAYER", 0)
    if not compiled:
        monkeypatch.setattr(fast_forms, "native_kernels", lambda: None)
    engine = EngineConfig(device="cpu", dtype="bfloat16")
    lora = LoraConfig(rank=4, target_modules=["q_proj"])
    loaded = load_model(TunerModelConfig(model_path=str(tiny_model_dir), max_model_len=256, lora=lora), engine)
    sampler = Sampler(loaded, engine)
    assert type(sampler._runner.decoder) is (NativeDecoder if compiled else FusedDecoder)
    layer = loaded.model.get_decoder().layers[0].self_attn.q_proj
    x = torch.linspace(0.5, 1.5, 200)[:, None].expand(200, 32).bfloat16()
    outputs = layer.weight.shape[0]

    def drawn_from() -> torch.Tensor:
        return sampler._runner.decoder._layers[0].qkv(x)[..., :outputs].float()

    before = drawn_from()
    with torch.no_grad():
        layer.lora_A["default"].weight.fill_(1.0)
        layer.lora_B["default"].weight.fill_(3e-5 / (4 * layer.scaling["default"]))
    sampler.weights_changed(1)
    update = (x.float() @ torch.full((32, outputs), 3e-5)).flatten()

    def share(shift: torch.Tensor) -> float:
        return float(shift.flatten() @ update / (update @ update))

    with torch.inference_mode():
        learned_with = share(layer(x).float() - before)
        assert share(drawn_from() - before) == pytest.approx(learned_with, abs=0.05)
        merged = layer_weight(layer, merged=True).float() - layer_weight(layer, merged=False).float()
        assert share(x.float() @ merged.T) < learned_with / 3


def test_layers_that_adapters_cannot_have_are_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="names an embedding"):
        load(tiny_model_dir, lora=LoraConfig(target_modules=["embed_tokens", "q_proj"]))
    with pytest.raises(ConfigError, match="names the head"):
        load(tiny_model_dir, lora=LoraConfig(target_modules=["lm_head", "q_proj"]), adapters=("a", "b"))


def test_divergence_from_the_reference_grows_from_zero_and_holds_back(tiny_model_dir: Path) -> None:
    def drift(kl_coef: float) -> float:
        loaded = load(tiny_model_dir)
        calls = play(loaded, start(loaded), episodes=8, mixed_params=False)
        rng = random.Random(0)
        datums = [Datum(call, rng.gauss(0, 1), 0.0, i) for i, call in enumerate(calls)]
        learner = learner_of(loaded, learning_rate=3e-3, kl_coef=kl_coef, epochs_per_batch=8, clip_high=5.0)
        start_weights = learner.logprobs(calls)
        learner.train([datums])
        return sum((a - b).square().sum().item() for a, b in zip(learner.logprobs(calls), start_weights, strict=True))

    assert drift(5.0) < drift(0.0) / 2


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 0.8536, 0.5, 0.1464, 0.0]),
    ],
)
def test_the_learning_rate_rises_and_falls(tiny_model_dir: Path, kind: str, expected: list[float]) -> None:
    loaded = load(tiny_model_dir)
    calls = play(loaded, start(loaded), episodes=2, mixed_params=False)[:2]
    learner = learner_of(loaded, total_updates=4, learning_rate=1e-4, warmup_steps=2, lr_scheduler_type=kind)
    datums = [Datum(calls[0], 1.0, 0.0, 0), Datum(calls[1], -1.0, 0.0, 1)]
    learner.train([datums])
    rates = [learner.optimizer.adamw.param_groups[0]["lr"]]
    for _ in expected[1:]:
        learner.optimizer.step(learner.learning_rate, 1.0)  # without gradients it only moves on
        rates.append(learner.optimizer.adamw.param_groups[0]["lr"])
    assert rates == pytest.approx([1e-4 * factor for factor in expected], rel=1e-3)


def test_a_positive_advantage_makes_a_call_likelier(tiny_model_dir: Path) -> None:
    loaded = load(tiny_model_dir)
    calls = play(loaded, start(loaded), episodes=4, mixed_params=False)[:4]
    learner = learner_of(loaded, learning_rate=1e-3, warmup_steps=2)
    before = sum(learner.logprobs(calls[:1])[0])
    metrics = learner.train([[Datum(calls[0], 1.0, 0.0, 0), Datum(calls[1], -1.0, 0.0, 1)]])
    assert metrics.learning_rate == pytest.approx(5e-4)
    assert metrics.tokens_trained == len(calls[0].completion_ids) + len(calls[1].completion_ids)
    assert sum(learner.logprobs(calls[:1])[0]) > before


def test_greedy_calls_teach_nothing(tiny_model_dir: Path) -> None:
    call = ModelCall("r", [], None, [5, 6], [7], [-1.0], 0.0, 1.0, 0, "stop", "", 0)
    assert not call.trainable


def test_bfloat16_keeps_small_updates_in_master_weights(tiny_model_dir: Path) -> None:
    config = TunerModelConfig(model_path=str(tiny_model_dir), max_model_len=256)
    engine = EngineConfig(device="cpu", dtype="bfloat16")
    loaded = load_model(config, engine)
    sampler = start(loaded)
    calls = play(loaded, sampler, episodes=8, mixed_params=False)
    learner = Learner(loaded, AlgorithmConfig(learning_rate=1e-7), engine, 12)
    gap = max(
        (torch.tensor(call.logprobs) - ours).abs().max()
        for call, ours in zip(calls, learner.logprobs(calls), strict=True)
    )
    assert gap < 2e-2
    before = {name: master.detach().clone() for name, master in learner.optimizer.masters.items()}
    learner.train([[Datum(call, 1.0 - 2 * (i % 2), 0.0, i) for i, call in enumerate(calls)]])
    assert any(not torch.equal(before[name], master) for name, master in learner.optimizer.masters.items())


def test_gradients_in_bfloat16_are_summed_in_float32(tiny_model_dir: Path) -> None:
    engine = EngineConfig(device="cpu", dtype="bfloat16")
    loaded = load_model(TunerModelConfig(model_path=str(tiny_model_dir), max_model_len=64), engine)
    optimizer = Learner(loaded, AlgorithmConfig(), engine, 12).optimizer
    name, parameter = next(iter(loaded.trainable_parameters().items()))
    generator = torch.Generator().manual_seed(0)
    expected = torch.zeros(parameter.shape)
    for _ in range(600):
        part = (1 + torch.randn(parameter.shape, generator=generator)).bfloat16()
        (parameter * part).sum().backward()
        expected += part
    assert parameter.grad is None
    assert relative_difference({name: optimizer.masters[name].grad}, {name: expected}) < 1e-4


def test_a_gradient_that_was_there_before_the_optimizer_counts(tiny_model_dir: Path) -> None:
    engine = EngineConfig(device="cpu", dtype="bfloat16")
    loaded = load_model(TunerModelConfig(model_path=str(tiny_model_dir), max_model_len=64), engine)
    name, parameter = next(iter(loaded.trainable_parameters().items()))
    parameter.float().sum().backward()
    optimizer = Optimizer(loaded, betas=(0.9, 0.999), weight_decay=0.0)
    parameter.float().sum().backward()
    assert torch.equal(optimizer.masters[name].grad, torch.full(parameter.shape, 2.0))
    assert optimizer.step(1e-3, 1.0) == pytest.approx(2 * parameter.numel() ** 0.5, rel=1e-5)
    optimizer.forget()
    assert optimizer.updates == 0
    before = optimizer.masters[name].detach().clone()
    parameter.float().sum().backward()
    optimizer.step(1e-3, torch.inf)
    # A first step of AdamW is as long as the learning rate.
    assert torch.allclose(before - optimizer.masters[name], torch.full(parameter.shape, 1e-3), rtol=1e-2)


def test_bfloat16_is_checked_call_by_call() -> None:
    engine = EngineConfig(device="cpu", dtype="bfloat16")
    loaded = load_model(TunerModelConfig(model_path="tiny-agent", max_model_len=256), engine)
    calls = play(loaded, start(loaded, dtype="bfloat16"), episodes=8, mixed_params=False)
    learner = Learner(loaded, AlgorithmConfig(learning_rate=1e-7), engine, 12)
    datums = [Datum(call, 1.0 - 2 * (i % 2), 0.0, i) for i, call in enumerate(calls)]
    learner.train([datums])
    calls[5].logprobs[:] = [logprob - 0.2 for logprob in calls[5].logprobs]
    with pytest.raises(ParityError, match=r"within 0\.1"):
        learner.train([datums])


def test_branches_of_every_length_are_exact(tiny_model_dir: Path) -> None:
    """Single nodes, single tokens and padded siblings each take another way through memory."""
    loaded = load(tiny_model_dir)
    learner = learner_of(loaded)
    stem = list(range(5, 45))
    for endings in (
        [[7]],
        [[7], [8]],
        [[7], [8, 9, 10]],
        [[7] * 30, [8]],
        [[7, 8], [9] * 5, [10] * 40],
        [[7] * 40, [7] * 40 + [9]],
    ):
        calls = [
            ModelCall("r", [], None, stem, [*ending, 12], [0.0] * (len(ending) + 1), 1.0, 1.0, 0, "stop", "", 0)
            for ending in endings
        ]
        for call, ours in zip(calls, learner.logprobs(calls), strict=True):
            assert (ours - plain_logprobs(loaded, call).detach()).abs().max() < 1e-4


# ----------------------------------------------------------------------------------------- the learner's forward pass


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_compiled_steps_have_the_gradients_of_modules(family: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    loaded = load(tiny_model_dir if family == "qwen3" else save_family(family, tiny_model_dir, tmp_path))
    calls = play(loaded, start(loaded), episodes=8)
    datums = [Datum(call, (-1.0) ** i, 0.0, i) for i, call in enumerate(calls)]
    weigh(datums, "token", 12)
    learner = learner_of(loaded)
    small = learner._pass.forward.__self__
    assert type(small) is LayerDecoder
    large = TrainableDecoder(loaded, learner._pass.kernels, wide=False)
    learner.accumulate(datums)
    compiled = gradients(loaded)
    learner._pass.forward = large.hidden_states
    learner.accumulate(datums)
    assert relative_difference(gradients(loaded), compiled) < 1e-5
    learner._pass.forward = loaded.hidden_states
    learner.accumulate(datums)
    assert relative_difference(compiled, gradients(loaded)) < 1e-5


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_layers_in_bfloat16_have_the_gradients_of_those_in_float32(
    family: str, kernels_each_way: NativeKernels, tiny_model_dir: Path, tmp_path: Path
) -> None:
    directory = tiny_model_dir if family == "qwen3" else save_family(family, tiny_model_dir, tmp_path)
    engine = EngineConfig(device="cpu", dtype="bfloat16")
    narrow, wide = (load_model(TunerModelConfig(model_path=str(directory), max_model_len=256), engine) for _ in "ab")
    wide.model.float()
    calls = play(wide, start(wide), episodes=8, mixed_params=False)
    datums = [Datum(call, (-1.0) ** i, 0.0, i) for i, call in enumerate(calls)]
    weigh(datums, "token", 12)
    learners = [Learner(loaded, AlgorithmConfig(), engine, 12) for loaded in (narrow, wide)]
    ours, theirs = LayerDecoder(narrow, kernels_each_way, wide=False), learners[1]._pass.forward.__self__
    theirs._cosines, theirs._sines = ours._cosines, ours._sines  # the model's own are rounded with its weights
    learners[0]._pass.forward = ours.hidden_states
    for learner in learners:
        learner.accumulate(datums)
    found, expected = (
        {name: master.grad for name, master in learner.optimizer.masters.items()} for learner in learners
    )
    assert relative_difference(found, expected) < 1e-2


@pytest.mark.parametrize("way", [Way.ONE_BY_ONE, Way.IN_PAIRS])
@pytest.mark.parametrize("slow", [True, False])
def test_layers_in_bfloat16_are_run_whole_where_pairs_are_multiplied(
    slow: bool, way: Way, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = native_kernels()
    assert kernels is not None
    monkeypatch.setattr(kernels, "_way", way)
    engine = EngineConfig(device="cpu", dtype="bfloat16")
    loaded = load_model(TunerModelConfig(model_path=str(tiny_model_dir), max_model_len=256), engine)
    assert LayerDecoder.suits(loaded, kernels, wide=slow) == (way is Way.IN_PAIRS and not slow)
    monkeypatch.setattr(fast_forms, "_SMALL_LAYER", 0)
    assert LayerDecoder.suits(loaded, kernels, wide=False) == (way is Way.IN_PAIRS)
    projection = loaded.model.get_decoder().layers[0].mlp.down_proj
    projection.weight = torch.nn.Parameter(projection.weight[:, 1:].contiguous())
    assert not LayerDecoder.suits(loaded, kernels, wide=False)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("slow", [True, False])
def test_bfloat16_is_trained_in_float32_where_that_is_faster(
    slow: bool, fast: bool, lora: LoraConfig | None, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "bfloat16_is_slow", lambda: slow)
    engine = EngineConfig(device="cpu", dtype="bfloat16", fast_decoder=fast)
    narrow, wide = (
        load_model(TunerModelConfig(model_path=str(tiny_model_dir), max_model_len=256, lora=lora), engine) for _ in "ab"
    )
    if lora is not None:
        for parameter in narrow.trainable_parameters().values():
            torch.nn.init.normal_(parameter, std=0.05)
    wide.model.load_state_dict(narrow.model.state_dict())
    wide.model.float()
    calls = play(wide, start(wide), episodes=8)
    datums = [Datum(call, (-1.0) ** i, 0.0, i) for i, call in enumerate(calls)]
    weigh(datums, "token", 12)
    learners = [Learner(loaded, AlgorithmConfig(), engine, 12) for loaded in (narrow, wide)]
    assert (learners[0]._pass.forward != narrow.hidden_states) == fast
    if fast:  # the model's own rotary embedding is rounded with its weights
        ours, theirs = (learner._pass.forward.__self__ for learner in learners)
        theirs._cosines, theirs._sines = ours._cosines, ours._sines
    # peft rounds what goes into an adapter, and the modules whatever goes through them.
    exact = slow and fast and lora is None
    for ours, theirs in zip(*(learner.logprobs(calls) for learner in learners), strict=True):
        differences = (ours - theirs).abs()
        assert (differences.max() < 1e-5) if exact else (differences.mean() < 4e-2)
    for learner in learners:
        learner.accumulate(datums)
    found, expected = (
        {name: master.grad for name, master in learner.optimizer.masters.items()} for learner in learners
    )
    # Gradients are handed over in bfloat16.
    assert relative_difference(found, expected) < (4e-3 if exact else 4e-2)


def test_compiled_steps_are_used_for_deep_models_and_padding_without_an_embedding(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    shape = dict(
        vocab_size=300, hidden_size=64, intermediate_size=192, num_hidden_layers=24, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=1, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    assert not model.model.embed_tokens.weight[0].any()
    model.save_pretrained(tmp_path)
    for file in tiny_model_dir.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for dtype in ("float32", "bfloat16"):
        engine = EngineConfig(device="cpu", dtype=dtype)
        loaded = load_model(TunerModelConfig(model_path=str(tmp_path), max_model_len=256), engine)
        for wide in (True, False):
            assert choose_forward(loaded, native_kernels(), wide=wide and dtype == "bfloat16") != loaded.hidden_states


def test_hidden_states_of_some_places_only(tiny_model_dir: Path) -> None:
    loaded = load(tiny_model_dir)
    tree = pack([[5, 6, 7] * 40, [5, 6, 7] * 30 + [9, 8] * 25], max_tokens=512)[0]
    rows = torch.tensor([140, 3, 119, 90, 91])
    ways = [learner_of(loaded)._pass for _ in range(3)]
    ways[1].forward = TrainableDecoder(loaded, ways[1].kernels, wide=False).hidden_states
    ways[2].forward = loaded.hidden_states
    for way in ways:
        found = []
        for hidden in (way.hidden(tree, rows), way.hidden(tree)[rows]):
            loaded.model.zero_grad()
            weights = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
            (hidden * weights).sum().backward()
            found.append((hidden.detach(), gradients(loaded)))
        assert (found[0][0] - found[1][0]).abs().max() < 1e-6
        assert relative_difference(found[0][1], found[1][1]) < 1e-6


@pytest.mark.parametrize("other", ["adapter", "bias", "large"])
def test_layers_of_another_kind_are_run_step_by_step(
    other: str, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(tiny_model_dir, lora=LoraConfig(rank=4) if other == "adapter" else None)
    if other == "bias":
        loaded.model.get_decoder().layers[-1].mlp.up_proj.bias = torch.nn.Parameter(torch.ones(48))
    if other == "large":
        monkeypatch.setattr(fast_forms, "_SMALL_LAYER", 0)
    assert type(choose_forward(loaded, native_kernels()).__self__) is TrainableDecoder


def test_gradients_that_are_rounding_errors_tell_nothing_of_a_forward_pass(tiny_model_dir: Path) -> None:
    loaded = load(tiny_model_dir)
    embedding = loaded.model.get_input_embeddings().weight
    with torch.no_grad():  # tokens nearly alike: queries and keys hardly matter
        embedding.copy_(torch.linspace(-1, 1, 32) + 1e-3 * torch.randn_like(embedding))
    assert isinstance(choose_forward(loaded, native_kernels()).__self__, TrainableDecoder)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1.001), ("bfloat16", 1.5)])
def test_a_forward_pass_with_other_gradients_is_not_used(
    wide: bool, dtype: str, factor: float, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineConfig(device="cpu", dtype=dtype)
    loaded = load_model(TunerModelConfig(model_path=str(tiny_model_dir), max_model_len=256), engine)
    kernels = native_kernels()
    assert isinstance(choose_forward(loaded, kernels, wide=wide and dtype == "bfloat16").__self__, TrainableDecoder)
    for name in ("swiglu_backward", "layer_out_backward"):
        wrong = getattr(NativeKernels, name)
        monkeypatch.setattr(
            NativeKernels, name, lambda *args, wrong=wrong: tuple(factor * grad for grad in wrong(*args))
        )
    assert choose_forward(loaded, native_kernels(), wide=wide and dtype == "bfloat16") == loaded.hidden_states
