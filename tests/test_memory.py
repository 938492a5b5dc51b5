"""What a training step takes is known before it, and kept under a budget."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from engine_tools import load

from agentscope_tuner.config import AlgorithmConfig, EngineConfig, LoraConfig, TunerModelConfig
from agentscope_tuner.engine import memory, products
from agentscope_tuner.engine.learner import Learner
from agentscope_tuner.engine.memory import FreedMemory, StepMemory, estimate, pass_tokens
from agentscope_tuner.engine.models import load_model
from agentscope_tuner.engine.trainable import TreePass
from agentscope_tuner.errors import ConfigError

# A process of its own, so that its memory is that of these steps.
LEARNER = """
import json, random, re, resource, sys
from engine_tools import load
from agentscope_tuner.algorithms import Datum
from agentscope_tuner.config import AlgorithmConfig, EngineConfig
from agentscope_tuner.engine.learner import Learner
from agentscope_tuner.engine.memory import give_back
from agentscope_tuner.types import ModelCall

budget, fast = json.loads(sys.argv[1]), sys.argv[2] == "fast"
loaded = load("tiny-agent", max_model_len=1024)
engine = EngineConfig(device="cpu", step_memory_gb=budget, micro_batch_tokens=10**6, fast_decoder=fast)
learner = Learner(loaded, AlgorithmConfig(), engine, 12)
draw = random.Random(0).choices
tokens = range(loaded.vocabulary)
calls = [ModelCall("a", [], None, draw(tokens, k=100), draw(tokens, k=300), [0.0] * 300, 1.0, 1.0, 0, "length", "", 0)
         for _ in range(40)]
datums = [Datum(call, (-1.0) ** i, 1 / 12_000, i) for i, call in enumerate(calls)]
learner.accumulate(datums[:1])
learner.optimizer.zero_grad()
"""

STEPS = """
def gb(what):  # `getrusage` would begin with what the parent process holds
    return int(re.search(what + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024 / 1e9
give_back()  # else the steps would take what importing and loading left
before = gb("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
for _ in range(2):
    learner.train([datums], on_policy=False)
print(gb("VmHWM") - before, gb("VmRSS") - before)
"""


PAGES = """
import ctypes
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: large pages, of which one is made for 512 others
for _ in range(12):  # the library takes some steps to find room for all that is kept
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    learner.train([datums[:10]], on_policy=False)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())
"""


def numbers(script: str, *arguments: str) -> list[float]:
    """What a script writes."""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    return [*map(float, done.stdout.split())]


@pytest.mark.parametrize("path", ["fast", "general"])
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process as Linux tells it")
def test_steps_use_their_budget_stay_within_it_and_give_it_back(path: str) -> None:
    most, left = numbers(LEARNER + STEPS, "0.4", path)
    assert 0.15 <= most <= 0.4
    assert left <= 0.1


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are not told what to keep")
def test_pages_are_made_once_where_nobody_set_a_bound(kept: bool) -> None:
    made = numbers(LEARNER + PAGES, "null" if kept else "100", "fast")
    assert median(made) < 4e6 if kept else min(made) > 4.1e7


def test_memory_is_given_back_when_the_process_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([100, 120, 126, 80, 99, 101])
    given: list[int] = []
    monkeypatch.setattr(memory, "_keep_pages", lambda: True)
    monkeypatch.setattr(memory, "_resident", lambda: next(sizes))
    monkeypatch.setattr(memory, "give_back", lambda: given.append(step))
    freed = FreedMemory(keep=True)
    for step in range(6):  # noqa: B007
        freed.after_step()
    assert given == [2, 5]
    FreedMemory(keep=False).after_step()
    assert given == [2, 5, 5]


def test_a_budget_in_tokens_and_back() -> None:
    known = StepMemory(fixed=1e8, per_token=1e5, per_row=2e4, block=1000)
    for tokens in (1, 999, 1000, 1001, 50_000):
        assert known.tokens_within(known.gb(tokens) * (1 + 1e-9)) == tokens
    assert known.tokens_within(0.05) < 0


@pytest.mark.parametrize("lora", [None, LoraConfig()])
def test_a_budget_lowers_the_tokens_of_a_pass(lora: LoraConfig | None) -> None:
    loaded = load("tiny-agent", lora=lora, max_model_len=256)

    def tokens(asked: int | None = 6144, **engine) -> int:
        config = EngineConfig(device="cpu", micro_batch_tokens=asked, **engine)
        return pass_tokens(TreePass(loaded, config), config).usual

    assert tokens(None) == tokens(None, step_memory_gb=100) == 8192
    assert tokens() == tokens(step_memory_gb=100) == 6144
    assert 256 <= tokens(step_memory_gb=0.1) < tokens(step_memory_gb=0.2) < 6144
    with pytest.raises(ConfigError, match=r"to train on one sequence of 256 tokens takes 0\.\d\d GB"):
        tokens(step_memory_gb=0.01)
    assert all(parameter.grad is None for parameter in loaded.model.parameters())


@pytest.mark.parametrize("what", ["is_small", "has_fused_form"])
def test_passes_are_longer_for_small_models_of_a_known_family_alone(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineConfig(device="cpu")
    tree_pass = TreePass(load("tiny-agent", max_model_len=256), engine)
    assert pass_tokens(tree_pass, engine).usual == 8192
    monkeypatch.setattr(memory, what, lambda loaded: False)
    assert pass_tokens(tree_pass, engine).usual == 1536


@pytest.mark.parametrize(("wide", "tokens"), [(False, 3072), (True, 1536)])
def test_passes_are_longer_where_activations_are_rounded(
    wide: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "is_small", lambda loaded: False)
    monkeypatch.setattr(products, "bfloat16_is_slow", lambda: wide)
    engine = EngineConfig(device="cpu", dtype="bfloat16")
    loaded = load_model(TunerModelConfig(model_path="tiny-agent", max_model_len=256), engine)
    assert pass_tokens(TreePass(loaded, engine), engine).usual == tokens


def test_frozen_weights_in_bfloat16_keep_no_more_than_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "bfloat16_is_slow", lambda: True)

    def kept(dtype: str) -> float:
        engine = EngineConfig(device="cpu", dtype=dtype)
        config = TunerModelConfig(model_path="tiny-agent", max_model_len=256, lora=LoraConfig())
        return estimate(TreePass(load_model(config, engine), engine)).per_token

    assert kept("bfloat16") <= kept("float32")


def test_the_learner_keeps_to_it() -> None:
    loaded = load("tiny-agent", max_model_len=256)
    engine = EngineConfig(device="cpu", step_memory_gb=0.1, micro_batch_tokens=6144)
    learner = Learner(loaded, AlgorithmConfig(), engine, 12)
    bound = pass_tokens(TreePass(loaded, engine), engine)
    assert bound.usual == bound.most < 6144
    assert learner._pass_tokens == bound
