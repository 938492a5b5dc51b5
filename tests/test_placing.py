"""Which requests get slots where episodes have more contexts than there are."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from engine_tools import load, start

from agentscope_tuner.engine.placing import FEW, Episodes
from agentscope_tuner.engine.sampler import Sampler
from agentscope_tuner.engine.slots import Slot
from agentscope_tuner.policy import SamplingParams


def text(n: int, source: random.Random) -> list[int]:
    return [source.randrange(5, 260) for _ in range(n)]


async def talk(sampler: Sampler, number: int, agents: int, turns: int) -> list[list[int]]:
    """An episode of agents who speak in turn, each with a context of its own."""
    own, name = random.Random(number), f"{number}"
    contexts = [text(40, own) for _ in range(agents)]
    sampler.open_episode(name)
    for turn in range(turns):
        for agent, context in enumerate(contexts):
            params = SamplingParams(max_tokens=6, seed=100 * number + 10 * turn + agent)
            context += (await sampler.sample([*context], params, episode_id=name)).token_ids
            context += text(3, own)
    sampler.close_episode(name)
    return contexts


def all_talk(sampler: Sampler, episodes: int, agents: int, turns: int) -> list[list[list[int]]]:
    async def everybody() -> list[list[list[int]]]:
        return await asyncio.gather(*(talk(sampler, number, agents, turns) for number in range(episodes)))

    return asyncio.run(everybody())


@pytest.mark.parametrize("fast", [True, False])
def test_younger_episodes_wait_where_older_ones_need_the_slots(tiny_model_dir: Path, fast: bool) -> None:
    loaded, (episodes, agents, turns) = load(tiny_model_dir), (20, 3, 6)
    sampler = start(loaded, fast_decoder=fast, max_slots=30)
    contexts = all_talk(sampler, episodes, agents, turns)
    # With a slot for each, a prompt is read once, and then what came after the last but one token that is there.
    least = episodes * agents * (40 + (turns - 1) * 4)
    assert sampler.tokens_prefilled < 2 * least, "each call would read its prompt anew, four times as much"
    roomy = start(loaded, fast_decoder=fast, max_slots=episodes * agents)
    assert all_talk(roomy, episodes, agents, turns) == contexts
    assert roomy.tokens_prefilled <= least


def test_contexts_that_nobody_comes_back_to_hold_nobody_up(tiny_model_dir: Path) -> None:
    sampler = start(load(tiny_model_dir), max_slots=2 * FEW)
    at_once: list[int] = []

    async def episode(number: int) -> None:
        own, name = random.Random(number), f"{number}"
        sampler.open_episode(name)
        for _ in range(5):
            params = SamplingParams(max_tokens=4)
            await sampler.sample(
                text(20, own), params, episode_id=name, on_token=lambda _: at_once.append(len(sampler._completions))
            )
        sampler.close_episode(name)

    async def everybody() -> None:
        await asyncio.gather(*map(episode, range(4 * FEW)))

    asyncio.run(everybody())
    assert sum(at_once) / len(at_once) > 1.5 * FEW


def test_agents_whose_prompts_begin_alike_keep_their_own_contexts(tiny_model_dir: Path) -> None:
    sampler = start(load(tiny_model_dir), max_slots=8)
    source = random.Random(0)
    alike = text(20, source)

    async def episode() -> None:
        contexts = [alike + text(60, source) for _ in range(2)]
        sampler.open_episode("both")
        for _ in range(4):
            for context in contexts:
                context += (await sampler.sample([*context], SamplingParams(max_tokens=5), episode_id="both")).token_ids
                context += text(3, source)
        sampler.close_episode("both")

    asyncio.run(episode())
    assert sampler.tokens_prefilled <= 20 + 2 * 60 + 2 * 3 * 4


def test_a_context_is_needed_for_as_long_as_others_were() -> None:
    episodes = Episodes()
    for name in ("first", "second"):
        episodes.open(name)
    contexts = {name: text(40, random.Random(number)) for number, name in enumerate(("plan", "write", "check"))}
    slot = Slot(0, episode_id="second")

    def call(name: str, more: int = 0) -> tuple[int, int]:
        contexts[name] += range(5, 5 + more)
        return episodes.call("first", [*contexts[name]])

    assert [call("plan"), call("write"), call("check")] == [(1, 0), (1, 1), (1, 2)]
    slot.call = episodes.call("second", text(40, random.Random(9)))[1]
    assert episodes.needing(slot) == 0, "nobody has come back to anything"
    assert call("plan", 8) == (1, 3)
    for _ in range(6):
        assert episodes.needing(slot) == 2
        episodes.call("second", text(40, random.Random()))
    assert episodes.needing(slot) == 0, "others came back three calls later"
    episodes.close("second")
    assert episodes.needing(slot) == 0
    assert call("write", 0) == (1, 4)
    assert episodes.call("nobody's", [1, 2])[0] == 0
