"""Small models in one compiled pass: in pieces, on helping threads, while agents act."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import greedy, load, plain_logprobs, play, start
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from agentscope_tuner.config import EngineConfig, TunerModelConfig
from agentscope_tuner.engine import decoder, fast_forms, native, products
from agentscope_tuner.engine import sampler as sampling
from agentscope_tuner.engine.attention import RowLayout
from agentscope_tuner.engine.completions import Lines, Request
from agentscope_tuner.engine.decoder import FusedDecoder, ModuleDecoder, NativeDecoder, WholeDecoder
from agentscope_tuner.engine.kv_cache import KVCache
from agentscope_tuner.engine.models import load_model
from agentscope_tuner.engine.native import Job, NativeKernels, Outcome, Way
from agentscope_tuner.engine.placing import NO_SLOT
from agentscope_tuner.engine.products import PlainProducts
from agentscope_tuner.engine.sampler import Sampler
from agentscope_tuner.engine.slots import Trunk
from agentscope_tuner.engine.trial import native_kernels
from agentscope_tuner.policy import Sample, SamplingParams
from agentscope_tuner.types import ModelCall

pytestmark = pytest.mark.usefixtures("kernels")

NARROW = EngineConfig(device="cpu", dtype="bfloat16", max_slots=8)


@pytest.fixture
def threads() -> Iterator[None]:
    """Whatever number of threads a test sets is forgotten."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def sampler(tiny_model_dir: Path) -> Sampler:
    sampler = start(load(tiny_model_dir), max_slots=8)
    assert isinstance(sampler._runner.decoder, WholeDecoder)
    return sampler


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """When passes begin and are finished."""
    notes: list[str] = []
    for name in ("begin_pass", "begin_decoding"):
        begin = getattr(NativeKernels, name)
        note = lambda *args, begin=begin, **k: notes.append("begin") or begin(*args, **k)  # noqa: E731
        monkeypatch.setattr(NativeKernels, name, note)
    finish = Job.finish

    def noting(job: Job[object]) -> object:
        if job._address is not None:
            notes.append("finish")
        return finish(job)

    monkeypatch.setattr(Job, "finish", noting)
    return notes


def steps_taken(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each call computed. No crowd interrupts those who act."""
    monkeypatch.setattr(sampling, "_CROWD", 1000)
    taken: list[int] = []
    decode = sampler._runner.decode

    def noting(lines: Lines, *rest: Any) -> Job[Outcome]:
        job = decode(lines, *rest)
        taken.append(job.finish().steps)
        return job

    monkeypatch.setattr(sampler._runner, "decode", noting)
    return taken


@pytest.mark.parametrize("helpers", [0, 3])
@pytest.mark.parametrize("piece", [1, 5, 64])
def test_pieces_of_any_size_are_exact(
    piece: int, helpers: int, tiny_model_dir: Path, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts are cut, too: their later pieces wait for what earlier ones write."""
    monkeypatch.setattr(native, "_PIECE", piece)
    torch.set_num_threads(1 + helpers)
    loaded = load(tiny_model_dir)
    sampler = start(loaded, prefill_tokens=300)
    calls = play(loaded, sampler, episodes=12, shared=120)
    rng = random.Random(0)
    prompt = [rng.randrange(3, 100) for _ in range(400)]

    async def alone() -> ModelCall:
        sample = await sampler.sample(prompt, SamplingParams(max_tokens=8), episode_id="alone")
        return replace(calls[0], prompt_ids=prompt, completion_ids=sample.token_ids, logprobs=sample.logprobs)

    for call in [asyncio.run(alone()), *calls]:
        gap = (torch.tensor(call.logprobs) - plain_logprobs(loaded, call).detach()).abs().max()
        assert gap < 1e-4


def test_equal_bits_whatever_the_pieces(tiny_model_dir: Path, threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for piece, number in ((64, 1), (3, 4)):
        monkeypatch.setattr(native, "_PIECE", piece)
        torch.set_num_threads(number)
        loaded = load(tiny_model_dir)
        found.append([(call.completion_ids, call.logprobs) for call in play(loaded, start(loaded), mixed_params=False)])
    assert found[0] == found[1]


@pytest.fixture(params=[*Way])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How products of bfloat16 are computed, as far as the processor can do it."""
    compiled = native_kernels()
    assert compiled is not None
    monkeypatch.setattr(compiled, "way", request.param)


@pytest.fixture(scope="module", params=["some", "all", "strips"])
def odd_model_dir(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Its products end in the middle of registers, and some of them or all have biases; or they may lie in strips."""
    directory = tmp_path_factory.mktemp("odd-model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=len(tokenizer), hidden_size=96 if request.param == "strips" else 84, intermediate_size=160,
        num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(**sizes))
    if request.param == "all":
        model = LlamaForCausalLM(LlamaConfig(**sizes, attention_bias=True, mlp_bias=True))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(directory)
    return directory


@pytest.mark.usefixtures("way", "threads")
@pytest.mark.parametrize("helpers", [0, 2])
def test_threads_that_share_weights_compute_the_same(
    helpers: int, odd_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens drawn by the head or from hidden states; what the model computes, but for rounding."""
    kernels = native_kernels()
    assert kernels is not None
    torch.set_num_threads(1 + helpers)
    loaded = load_model(TunerModelConfig(model_path=str(odd_model_dir), max_model_len=512), NARROW)
    found = []
    for shared, head in ((False, 2**24), (True, 2**24), (True, 0)):
        monkeypatch.setattr(decoder, "is_small", lambda _, shared=shared: not shared)
        monkeypatch.setattr(decoder, "_SMALL_HEAD", head)
        sampler = Sampler(loaded, NARROW)
        whole = sampler._runner.decoder
        assert isinstance(whole, WholeDecoder)
        assert whole._model.places[-2] == shared
        found.append(play(loaded, sampler, episodes=12, mixed_params=False))
    outcomes = [[(call.completion_ids, call.logprobs) for call in calls] for calls in found]
    if kernels.way is not Way.ONE_BY_ONE:  # by which rows of one thread are not rounded
        assert outcomes[0] == outcomes[1], "to the last bit"
    reference = load(odd_model_dir)
    for call in itertools.chain(*found[1:]):
        gap = (torch.tensor(call.logprobs) - plain_logprobs(reference, call).detach()).abs().max()
        assert gap < 0.05


@pytest.mark.usefixtures("way")
def test_threads_share_weights_of_many_rows(odd_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that they are taken through a product in parts."""
    kernels = native_kernels()
    assert kernels is not None
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 100) for _ in range(400)] for _ in range(3)]
    rows: list[int] = []
    begin = NativeKernels.begin_decoding

    def noting(self: NativeKernels, model: Any, sheet: Any, beside: Any, ids: Any, *args: Any, **k: Any) -> Any:
        rows.append(len(ids))
        return begin(self, model, sheet, beside, ids, *args, **k)

    monkeypatch.setattr(NativeKernels, "begin_decoding", noting)
    loaded = load_model(TunerModelConfig(model_path=str(odd_model_dir), max_model_len=512), NARROW)
    found = []
    for shared in (False, True):
        monkeypatch.setattr(decoder, "is_small", lambda _, shared=shared: not shared)
        found.append(greedy(Sampler(loaded, NARROW), prompts, tokens=4))
        assert max(rows) == sum(map(len, prompts))
        rows.clear()
    if kernels.way is not Way.ONE_BY_ONE:  # see above
        assert found[0] == found[1], "to the last bit"
    reference = load(odd_model_dir)
    for prompt, sample in zip(prompts, found[1], strict=True):
        call = ModelCall(
            "", [], None, prompt, sample.token_ids, sample.logprobs, temperature=0, top_p=1, top_k=0,
            finish_reason="", text="", policy_version=0,
        )  # fmt: skip
        assert (torch.tensor(sample.logprobs) - plain_logprobs(reference, call)).abs().max() < 0.05


@pytest.mark.usefixtures("way", "threads")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", [ModuleDecoder, FusedDecoder, NativeDecoder, WholeDecoder])
def test_rows_that_are_not_wanted_end_with_their_keys(
    kind: Any, layers: int, shared: bool, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whatever comes after them is the same."""
    monkeypatch.setattr(decoder, "is_small", lambda _: not shared)
    monkeypatch.setattr(native, "_PIECE", 5)
    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=160, num_hidden_layers=layers,
        num_attention_heads=6, num_key_value_heads=2,
    )).save_pretrained(tmp_path)  # fmt: skip
    loaded = load_model(TunerModelConfig(model_path=str(tmp_path), max_model_len=64), NARROW)
    chosen = kind(loaded) if kind is ModuleDecoder else kind(loaded, PlainProducts())
    length, width = 12, 96
    ids, positions = torch.arange(3, 3 + 2 * length)[:, None], torch.arange(length).repeat(2)[:, None]
    slots = torch.arange(2).repeat_interleave(length)

    def hidden(rows: torch.Tensor | None) -> tuple[torch.Tensor, KVCache]:
        cache = KVCache(decoder.cache_shape(loaded), 2, length, torch.empty(0, dtype=torch.bfloat16), native_kernels())
        layout = RowLayout(cache, positions[:, 0].contiguous(), slots, torch.full_like(slots, -1))
        return chosen.hidden(ids, positions, layout, (), rows), cache

    with torch.inference_mode():
        every, expected = hidden(None)
        for rows in ([3, 11, 12, 23], [7], [], [*range(2 * length)]):
            found, cache = hidden(torch.tensor(rows, dtype=torch.int64))
            assert found.shape == (len(rows), 1, width)
            for ours, theirs in zip([*cache.keys, *cache.values], [*expected.keys, *expected.values], strict=True):
                assert torch.equal(ours, theirs)
            if kind is WholeDecoder:
                assert torch.equal(found, every[rows]), "to the last bit"
            assert (found.float() - every[rows].float()).norm() <= 0.01 * every[rows].float().norm()


@pytest.mark.parametrize("way", [*Way])
@pytest.mark.parametrize(("times", "faster"), [((1.0, 1.0), True), ((2.0, 1.0), False)])
def test_large_models_are_run_whole_where_pairs_keep_up_with_onednn(
    way: Way, times: tuple[float, float], faster: bool, odd_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = native_kernels()
    assert kernels is not None
    monkeypatch.setattr(kernels, "_way", way)
    monkeypatch.setattr(products, "shortest_times", lambda *ways: [*times])
    monkeypatch.setattr(products, "_keeps_up_with_onednn", products._keeps_up_with_onednn.__wrapped__)
    loaded = load_model(TunerModelConfig(model_path=str(odd_model_dir), max_model_len=256), NARROW)
    assert fast_forms.has_whole_form(loaded, NARROW)
    monkeypatch.setattr(fast_forms, "_SMALL_LAYER", 0)
    whole = (way is Way.IN_PAIRS and faster) or way is Way.IN_MATRICES
    assert fast_forms.has_whole_form(loaded, NARROW) == whole


@pytest.mark.parametrize("seed", [0, 2**63 + 1, 2**70 + 3])
def test_random_numbers_are_the_same_with_and_without_kernels(
    seed: int, sampler: Sampler, tiny_model_dir: Path
) -> None:
    params = SamplingParams(max_tokens=70, seed=seed, temperature=2.0)
    plain = start(load(tiny_model_dir), fast_decoder=False)
    ours, others = (asyncio.run(one.sample([5] * 9, params, episode_id="one")) for one in (sampler, plain))
    assert len(ours.token_ids) > 10
    assert ours.token_ids == others.token_ids


def test_agents_act_while_others_are_computed(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = noted(monkeypatch)

    async def agent(name: str, turns: int, tokens: int) -> None:
        sampler.open_episode(name)
        for turn in range(turns):
            await sampler.sample([5] * 9, SamplingParams(max_tokens=tokens, seed=turn), episode_id=name)
            notes.append("act")
        sampler.close_episode(name)

    async def everybody() -> None:
        await asyncio.gather(agent("brief", 3, 2), agent("long", 1, 40))

    asyncio.run(everybody())
    during = [before == "begin" for before, note in itertools.pairwise(notes) if note == "act"]
    assert during[:3] == [True] * 3


@pytest.mark.parametrize(("acting", "steps"), [(3, 1), (24, 4), (80, 8)])
def test_the_more_agents_act_the_more_is_computed_meanwhile(
    acting: int, steps: int, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = start(load(tiny_model_dir), max_slots=acting + 1)
    taken = steps_taken(sampler, monkeypatch)

    async def everybody() -> None:
        brief = (sampler.sample([9 + n, 5], SamplingParams(max_tokens=1), episode_id=f"{n}") for n in range(acting))
        await asyncio.gather(_complete(sampler, "goes on", 30), *brief)

    asyncio.run(everybody())
    assert taken[1:3] == [steps, 8]  # in the first one, all took part


@pytest.mark.parametrize(("acting", "steps"), [(16, 1), (24, 4), (32, 5)])
def test_while_many_agents_act_others_go_on_though_completions_are_over(
    acting: int, steps: int, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(tiny_model_dir)
    sampler = start(loaded, max_slots=acting + 3)
    taken = steps_taken(sampler, monkeypatch)
    lengths = [2, 4, 30] + [1] * acting

    together = asyncio.run(_of_lengths(sampler, lengths))
    assert taken[1] == steps  # the first of them is one by which a completion is over
    other = start(loaded)
    assert together == [asyncio.run(_of_length(other, n, length)) for n, length in enumerate(lengths)]


@pytest.mark.parametrize(("rows", "steps"), [(63, 1), (64, 2), (96, 3), (300, 8)])
def test_of_many_completions_some_are_over_before_all_hear_of_it(
    rows: int, steps: int, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is over by each step."""
    loaded = load(tiny_model_dir)
    sampler = start(loaded, max_slots=rows)
    taken = steps_taken(sampler, monkeypatch)

    together = asyncio.run(_of_lengths(sampler, range(1, rows + 1)))
    assert taken[0] == steps
    other = start(loaded)
    assert together[:40] == [asyncio.run(_of_length(other, n, n + 1)) for n in range(40)]


@pytest.mark.parametrize(("known", "expected"), [(True, [4, 3, 4, 3]), (False, [7, 4, 3])])
def test_with_a_crowd_the_model_goes_on_while_others_act(
    known: bool, expected: list[int], sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a crowd will do where others are known to act."""
    monkeypatch.setattr(sampling, "_CROWD", 8)
    notes = noted(monkeypatch)

    async def agent(n: int) -> None:
        sampler.open_episode(f"{n}")
        for seed in range(2):
            notes.append("act")
            await sampler.sample([5 + n] * 9, SamplingParams(max_tokens=1, seed=seed), episode_id=f"{n}")
        sampler.close_episode(f"{n}")

    async def everybody() -> None:
        for n in range(7 if known else 0):
            sampler.open_episode(f"{n}")
        await asyncio.gather(*(agent(n) for n in range(7)))

    asyncio.run(everybody())
    acts = [len(list(run)) for what, run in itertools.groupby(notes, lambda note: note == "act") if what]
    assert acts == expected


def test_a_large_head_is_multiplied_once_for_all(
    sampler: Sampler, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "_SMALL_HEAD", 0)
    loaded = load(tiny_model_dir)
    other = start(loaded, max_slots=8)
    assert not other._runner.decoder.draws
    calls, expected = play(loaded, other), play(loaded, sampler)
    assert [call.completion_ids for call in calls] == [call.completion_ids for call in expected]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("piece", [1, 5, 32])
def test_who_is_asked_the_same_shares_the_last_token(
    dtype: str, piece: int, odd_model_dir: Path, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is run once for all; by rows of each thread in float32, by shared weights in bfloat16."""
    monkeypatch.setattr(native, "_PIECE", piece)
    monkeypatch.setattr(decoder, "is_small", lambda _: dtype == "float32")
    torch.set_num_threads(2)
    engine = EngineConfig(device="cpu", dtype=dtype, draft_tokens=0)
    loaded = load_model(TunerModelConfig(model_path=str(odd_model_dir), max_model_len=512), engine)
    loaded.end_of_turn_ids = frozenset()
    sampler = Sampler(loaded, engine)
    assert isinstance(sampler._runner.decoder, WholeDecoder)
    rng = random.Random(0)
    shared = [rng.randrange(3, 100) for _ in range(90)]
    prompts = [[*shared, last] for last in (5, 6, 7) for _ in range(6)]

    async def everything() -> list[ModelCall]:
        params = [SamplingParams(max_tokens=5, seed=seed) for seed in range(len(prompts))]
        samples = await asyncio.gather(
            *(sampler.sample(ids, one, episode_id=f"{one.seed}") for ids, one in zip(prompts, params, strict=True))
        )
        return [
            ModelCall("", [], None, ids, one.token_ids, one.logprobs, 1.0, 1.0, 0, one.finish_reason, "", 0)
            for ids, one in zip(prompts, samples, strict=True)
        ]

    calls = asyncio.run(everything())
    assert sampler.rows_decoded == len(prompts) * 5 - (len(prompts) - 3)
    assert len({tuple(call.completion_ids) for call in calls}) > len(prompts) // 2, "each draws for itself"
    reference = load(odd_model_dir)
    for call in calls:
        gap = (torch.tensor(call.logprobs) - plain_logprobs(reference, call).detach()).abs().max()
        assert gap < (1e-4 if dtype == "float32" else 0.1)


def test_a_pass_is_computed_once(sampler: Sampler, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as in one call with the drawing of tokens, not twice as long."""
    taken: dict[str, float] = {}

    def timed(name: str) -> None:
        begin = getattr(NativeKernels, name)

        def at_once(*args: object, **options: object) -> Job[object]:
            begun = time.perf_counter()
            job = begin(*args, **options)
            job.finish()
            taken[name] = max(taken.get(name, 0.0), time.perf_counter() - begun)
            return job

        monkeypatch.setattr(NativeKernels, name, at_once)

    timed("begin_pass")
    timed("begin_decoding")
    monkeypatch.setattr(decoder, "_SMALL_HEAD", 0)
    other = start(load(tiny_model_dir), max_slots=8)
    shortest = {"begin_pass": math.inf, "begin_decoding": math.inf}
    for number in range(12):
        for one in (sampler, other):
            # The longest call is that in which all prompts are computed.
            greedy(one, [[3 + n, *range(5 + number, 95 + number)] * 4 for n in range(8)], tokens=2)
        shortest = {name: min(seconds, taken.pop(name)) for name, seconds in shortest.items()}
    assert shortest["begin_pass"] < 1.5 * shortest["begin_decoding"]


@pytest.mark.parametrize("small_head", [True, False])
def test_many_who_wait_for_a_slot_may_begin_with_none(
    small_head: bool, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "_SMALL_HEAD", 2**24 if small_head else 0)
    sampler = start(load(tiny_model_dir), max_slots=1, patience_ms=200)
    acts = asyncio.Event()

    async def agent(number: int) -> int:
        if number == 19:  # who has the only slot acts
            await acts.wait()
        sample = await sampler.sample([5, number], SamplingParams(max_tokens=2), episode_id=f"{number}")
        acts.set()
        await asyncio.sleep(0.01)
        sampler.close_episode(f"{number}")
        return len(sample.token_ids)

    async def everybody() -> list[int]:
        for number in range(20):
            sampler.open_episode(f"{number}")
        return await asyncio.gather(*(agent(number) for number in range(20)))

    assert all(count > 0 for count in asyncio.run(everybody()))


async def _of_length(sampler: Sampler, n: int, tokens: int) -> list[int]:
    """The completion of a prompt that is unlike those of other numbers."""
    params = SamplingParams(max_tokens=tokens, seed=n)
    prompt = [5] * (n // 50) + [9 + n % 50, 5]
    return (await sampler.sample(prompt, params, episode_id=f"{n}")).token_ids


async def _of_lengths(sampler: Sampler, lengths: Sequence[int]) -> list[list[int]]:
    return await asyncio.gather(*(_of_length(sampler, n, length) for n, length in enumerate(lengths)))


async def _complete(sampler: Sampler, name: str, tokens: int) -> Sample:
    return await sampler.sample([7, 8, 9, len(name)], SamplingParams(max_tokens=tokens, seed=3), episode_id=name)


async def _while_others_are_computed(sampler: Sampler, notes: list[str]) -> None:
    """Return while a pass for others is being computed: an agent acts then, and is waited for."""
    sampler.open_episode("brief")
    await _complete(sampler, "brief", 2)
    assert notes.count("begin") == notes.count("finish") + 1


def test_who_waits_gets_the_slot_of_the_last_step(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = noted(monkeypatch)

    async def all_of_them() -> None:
        # One takes three steps, and in each of them seven others end.
        brief = (sampler.sample([9 + n, 5], SamplingParams(max_tokens=1), episode_id=f"{n}") for n in range(3 * 7))
        long, *_ = await asyncio.gather(_complete(sampler, "stays", 3), *brief)
        assert len(long.token_ids) == 3

    asyncio.run(all_of_them())
    assert notes.count("begin") == 3


def test_episodes_come_back_to_their_slots_however_many_wait(sampler: Sampler) -> None:
    async def agent(name: str, number: int) -> int:
        sampler.open_episode(name)
        ids = [3 + number] * 20
        for turn in range(3):
            sample = await sampler.sample(ids, SamplingParams(max_tokens=4, seed=turn), episode_id=name)
            ids = [*ids, *sample.token_ids, 5, 6]
        sampler.close_episode(name)
        return len(ids)

    async def everybody() -> None:
        await asyncio.gather(*(agent(f"{n}", n) for n in range(3 * 8)))

    asyncio.run(everybody())
    # A first prompt, then what came after the last but one token that is there: it, and two more.
    assert sampler.tokens_prefilled <= 3 * 8 * (20 + 2 * 3)


def test_slots_are_found_meanwhile(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    notes, nearest = noted(monkeypatch), sampler._slots.nearest
    meanwhile: list[bool] = []

    def noting(adapter: str, trunk: Trunk | None, own: list[int], episode_id: str) -> object:
        meanwhile.append(sampler._step is not None)
        return nearest(adapter, trunk, own, episode_id)

    monkeypatch.setattr(sampler._slots, "nearest", noting)

    async def group() -> list[Sample]:
        goes_on = asyncio.ensure_future(_complete(sampler, "goes on", 30))
        await _while_others_are_computed(sampler, notes)
        meanwhile.clear()
        prompt = [5, 6, 7] * 10
        members = (sampler.sample(prompt, SamplingParams(max_tokens=5, seed=7), episode_id=f"{n}") for n in range(3))
        samples = await asyncio.gather(*members)
        sampler.close_episode("brief")
        await goes_on
        return samples

    samples = asyncio.run(group())
    # Each asks when it comes; two are told to wait for the first one's prompt, and ask once more.
    assert meanwhile == [True] * (3 + 2)
    assert sampler.tokens_prefilled <= 30 + 2 * 4 + 2  # the prompt once, its last token for each, and two short ones
    for sample in samples:
        assert sample.token_ids == samples[0].token_ids
        assert sample.logprobs == pytest.approx(samples[0].logprobs, abs=1e-5)


def test_what_is_shared_is_copied_before_its_place_is_taken(sampler: Sampler) -> None:
    """A trunk is computed in the slot that is missed least: others may be about to copy from there."""

    async def first() -> None:
        await sampler.sample([5] * 20, SamplingParams(max_tokens=1), episode_id="first")

    asyncio.run(first())
    source = next(slot for slot in sampler._slots if slot.ids)
    kept = sampler._runner.cache.take(source.index, 20)
    target = next(slot for slot in sampler._slots if not slot.ids)
    for slot in sampler._slots:  # the source is the only one that can be taken
        slot.busy = slot is not source
    sampler._placing.copies.append((source.index, target.index, 20))
    loop = asyncio.new_event_loop()
    sampler._placing.place(
        [
            Request((n, 0), f"{n}", "", [7] * 80 + [n], SamplingParams(), loop.create_future(), None, 1, NO_SLOT)
            for n in range(4)
        ],
        sampler._slots.free(sampler._episodes.needing),
        {},
        active=0,
    )
    loop.close()
    assert len(sampler._placing.trunk_slots) == 1
    sampler._begin()
    sampler._complete()
    assert len(sampler._slots.trunks) == 1
    for (keys, values), (kept_keys, kept_values) in zip(
        sampler._runner.cache.take(target.index, 20).layers, kept.layers, strict=True
    ):
        assert torch.equal(keys[..., :20], kept_keys[..., :20])
        assert torch.equal(values, kept_values)


def test_what_is_complete_is_not_lost_with_a_step_that_fails(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, begun = NativeKernels.begin_decoding, itertools.count(1)

    def fail(*args: object, **options: object) -> object:
        if next(begun) == 2:
            raise MemoryError("no room")
        return begin(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeKernels, "begin_decoding", fail)

    async def both() -> list[Sample | BaseException]:
        ended = _complete(sampler, "ended", 1), _complete(sampler, "going on", 9)
        return await asyncio.gather(*ended, return_exceptions=True)

    ended, going_on = asyncio.run(both())
    assert isinstance(ended, Sample)
    assert isinstance(going_on, MemoryError)


def test_who_is_cancelled_while_computed_leaves_no_trace(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = asyncio.run(_complete(sampler, "stays", 30))
    sampler.weights_changed(1)
    notes = noted(monkeypatch)

    async def run() -> list[Sample]:
        stays, goes = (asyncio.ensure_future(_complete(sampler, name, 30)) for name in ("stays", "goes"))
        await _while_others_are_computed(sampler, notes)
        goes.cancel()
        await asyncio.wait([goes])
        assert goes.cancelled() and notes.count("begin") == notes.count("finish") + 1
        sampler.close_episode("brief")
        # All slots are needed, that of the cancelled one as well, though not while it is written to.
        again = [_complete(sampler, "stays", 30), *(_complete(sampler, f"other{i}", 5) for i in range(8))]
        return [await stays, (await asyncio.gather(*again))[0]]

    for sample in asyncio.run(run()):
        assert (sample.token_ids, sample.logprobs) == (expected.token_ids, expected.logprobs)
    assert not any(slot.busy for slot in sampler._slots)


def test_weights_may_change_while_nobody_waits_for_what_is_computed(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = asyncio.run(_complete(sampler, "again", 12))
    sampler.weights_changed(1)
    notes = noted(monkeypatch)

    async def run() -> Sample:
        goes = asyncio.ensure_future(_complete(sampler, "goes", 30))
        await _while_others_are_computed(sampler, notes)
        goes.cancel()
        await asyncio.wait([goes])
        sampler.weights_changed(2)
        assert notes.count("begin") == notes.count("finish")
        sampler.close_episode("brief")
        return await _complete(sampler, "again", 12)

    sample = asyncio.run(run())
    assert sample.policy_version == 2
    assert (sample.token_ids, sample.logprobs) == (expected.token_ids, expected.logprobs)


def test_an_event_loop_may_end_while_a_pass_is_computed(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = asyncio.run(_complete(sampler, "again", 12))
    notes = noted(monkeypatch)

    async def run() -> None:
        going = [asyncio.ensure_future(_complete(sampler, "goes", 30)) for _ in range(7)]
        await _while_others_are_computed(sampler, notes)
        assert not any(one.done() for one in going)

    for version in (1, 2):
        asyncio.run(run())
        assert notes.count("begin") == notes.count("finish")
        sampler.close_episode("brief")
        if version == 2:
            sampler.weights_changed(version)
        sample = asyncio.run(_complete(sampler, "again", 12))
        assert sample.token_ids == expected.token_ids
    assert sample.logprobs == expected.logprobs


def test_two_samplers_compute_at_once(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (start(load(tiny_model_dir), max_slots=8) for _ in range(2))
    expected = play(one._loaded, one), play(other._loaded, other, seed=1)
    one.weights_changed(1)
    notes = noted(monkeypatch)

    async def agent(sampler: Sampler, name: str) -> list[Sample]:
        sampler.open_episode(name)
        samples = [await _complete(sampler, name, 3 + turn) for turn in range(6)]
        sampler.close_episode(name)
        return samples

    async def both() -> None:
        await asyncio.gather(*[agent(sampler, f"{i}") for sampler in (one, other) for i in range(6)])

    asyncio.run(both())
    begun = [notes[:i].count("begin") - notes[:i].count("finish") for i in range(len(notes))]
    assert max(begun) == 2
    one.weights_changed(2)
    other.weights_changed(1)
    again = play(one._loaded, one), play(other._loaded, other, seed=1)
    for before, after in zip(expected, again, strict=True):
        assert [call.completion_ids for call in before] == [call.completion_ids for call in after]
