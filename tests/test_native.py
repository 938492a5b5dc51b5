"""Compiled kernels: what they compute, how they are built, and that nothing needs them."""

from __future__ import annotations

import asyncio
import platform
import random
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engine_tools import load, start
from torch import Tensor

from agentscope_tuner.algorithms.distributions import draw_tokens
from agentscope_tuner.engine import attention, compiling, fast_forms, native
from agentscope_tuner.engine.learner import _EntryColumns, token_logprobs
from agentscope_tuner.engine.trial import native_kernels, shortest_times
from agentscope_tuner.policy import Sample, SamplingParams


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """From the call on, kernels are built in an empty folder; what other tests built stays as it is."""

    def empty() -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        native_kernels.cache_clear()
        return tmp_path / "agentscope-tuner"

    yield empty
    native_kernels.cache_clear()


def compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def sampled(tiny_model_dir: Path, prompts: list[list[int]], **engine: object) -> list[Sample]:
    sampler = start(load(tiny_model_dir), **engine)

    async def everything() -> list[Sample]:
        params = [SamplingParams(max_tokens=24, seed=i) for i in range(len(prompts))]
        return await asyncio.gather(
            *(sampler.sample(prompt, p, episode_id=f"e{p.seed}") for prompt, p in zip(prompts, params, strict=True))
        )

    return asyncio.run(everything())


def difference(ours: list[Sample], others: list[Sample]) -> float:
    """Largest difference of log-probabilities, if the tokens are the same."""
    assert [sample.token_ids for sample in ours] == [sample.token_ids for sample in others]
    return max(
        (torch.tensor(a.logprobs) - torch.tensor(b.logprobs)).abs().max().item()
        for a, b in zip(ours, others, strict=True)
    )


@pytest.fixture
def prompts() -> list[list[int]]:
    """Some with a common beginning, some without; of very different lengths."""
    rng = random.Random(0)
    shared = [rng.randrange(5, 100) for _ in range(90)]
    tails = [[rng.randrange(5, 100) for _ in range(n)] for n in (3, 40, 150, 7, 260, 33)]
    return [shared + tail for tail in tails] + [tail[::-1] for tail in tails]


@pytest.mark.parametrize("how", ["begin_decoding", "attend", "row by row"])
def test_every_way_of_attention_samples_the_same(
    how: str, tiny_model_dir: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = sampled(tiny_model_dir, prompts, fast_decoder=False)
    if how != "row by row":
        assert native_kernels() is not None
        calls: list[int] = []
        compiled = getattr(native.NativeKernels, how)
        monkeypatch.setattr(native.NativeKernels, how, lambda *args, **k: calls.append(1) or compiled(*args, **k))
        if how == "attend":  # layer by layer, as for models that are not small
            monkeypatch.setattr(fast_forms, "_SMALL_LAYER", 0)
        assert difference(sampled(tiny_model_dir, prompts), plain) < 1e-5
        assert calls
    else:
        monkeypatch.setattr(attention, "_BY_ROW", 0)
        monkeypatch.setattr(attention, "CHUNK", 50)
        assert difference(sampled(tiny_model_dir, prompts, fast_decoder=False), plain) < 1e-5


def test_kernels_are_built_once(empty_cache: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = empty_cache()
    runs = []
    monkeypatch.setattr(compiling, "_run", lambda command, **k: runs.append(command) or _run(command, **k))
    sources = len([*compiling.KERNELS.glob("*.cpp")])
    assert native_kernels() is not None
    assert sum("-c" in command for command in runs) == sources
    assert [path.suffix for path in folder.iterdir()] == [".so"]
    native_kernels.cache_clear()
    assert native_kernels() is not None
    assert sum("-c" in command for command in runs) == sources


_run = compiling._run


@pytest.mark.parametrize("broken", ["absent", "refuses", "hangs"])
def test_without_a_compiler_everything_works(
    broken: str,
    empty_cache: Callable[[], Path],
    tiny_model_dir: Path,
    prompts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    expected = sampled(tiny_model_dir, prompts[:4])
    empty_cache()
    if broken == "absent":
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
    elif broken == "refuses":
        monkeypatch.setenv("CXX", compiler(tmp_path / "cxx", "echo 'error: no' >&2; exit 1"))
    else:
        monkeypatch.setenv("CXX", compiler(tmp_path / "cxx", "exec sleep 60"))
        run = subprocess.run
        monkeypatch.setattr(compiling.subprocess, "run", lambda *a, **k: run(*a, **{**k, "timeout": 0.2}))
    assert native_kernels() is None
    assert difference(sampled(tiny_model_dir, prompts[:4]), expected) < 1e-5
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 has these to be left out")
@pytest.mark.parametrize("missing", ["avx512f", "avx"])
def test_processors_with_smaller_registers(
    missing: str,
    empty_cache: Callable[[], Path],
    tiny_model_dir: Path,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = sampled(tiny_model_dir, prompts[:6])
    folder = empty_cache()
    monkeypatch.setenv("CXX", f"g++ -mno-{missing}")
    assert native_kernels() is not None, "right, and not far slower than PyTorch"
    assert len([*folder.iterdir()]) == 1
    assert difference(sampled(tiny_model_dir, prompts[:6]), expected) < 1e-5


def test_gates_of_any_size() -> None:
    kernels = native_kernels()
    assert kernels is not None
    gate = torch.tensor([-1e4, -200.0, -89.0, -88.0, -1.0, 0.0, 1.0, 89.0, 1e4]).repeat(8).requires_grad_()
    up = torch.linspace(-1, 1, len(gate)).requires_grad_()
    expected = torch.nn.functional.silu(gate) * up
    wanted = torch.autograd.grad(expected.sum(), (gate, up))
    gate, up = gate.detach(), up.detach()
    torch.testing.assert_close(kernels.swiglu(gate, up), expected.detach())
    for dtype in (torch.float32, torch.bfloat16):
        joined = torch.cat([gate, up])[None].to(dtype)
        half = torch.nn.functional.silu(joined[:, : len(gate)].float()) * joined[:, len(gate) :].float()
        torch.testing.assert_close(kernels.gate_joined(joined), half.to(dtype))
        rounded = [tensor.to(dtype) for tensor in (torch.ones_like(gate), gate, up)]
        torch.testing.assert_close(kernels.swiglu(*rounded[1:]), half[0].to(dtype))
        for ours, theirs in zip(kernels.swiglu_backward(*rounded), wanted, strict=True):
            torch.testing.assert_close(ours, theirs.to(dtype), rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-4)
    found = kernels.swiglu_backward(torch.ones_like(gate), gate, up)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("tokens", "width", "inner"), [(1, 64, 96), (45, 96, 40), (77, 40, 64), (301, 64, 544)])
def test_rounded_layers_of_any_size(
    tokens: int, width: int, inner: int, kernels_each_way: native.NativeKernels
) -> None:
    """Pieces that are whole or not, as registers for matrices need them, against the same in float32."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).bfloat16()

    x, grad, norm = draw(tokens, width).float(), draw(tokens, width).float(), 1 + draw(width).float()
    attended = draw(tokens, 2 * width)
    weights = [draw(width, 2 * width), *(draw(inner, width) for _ in "gu"), draw(width, inner)]
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        seen, out, gate, up, down = (tensor.to(dtype) for tensor in (attended, *weights))
        given = (out, norm, gate, up, down)
        y, *kept = kernels_each_way.layer_out(x, seen, *given, 1e-6)
        found.append([y, *kernels_each_way.layer_out_backward(grad, seen, *given, *kept)])
    for rounded, exact in zip(*found, strict=True):
        assert rounded.shape == exact.shape
        assert (rounded.float() - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("kernel", ["attention", "its gradient", "gates", "their gradients", "drawing", "losses"])
def test_numbers_that_lie_far_apart_take_no_longer(kernel: str) -> None:
    kernels = native_kernels()
    assert kernels is not None
    torch.manual_seed(0)
    stretches, spans = torch.tensor([[0, 256, 0, 0]]), torch.zeros(0, 2, dtype=torch.int64)
    k, v = torch.randn(2, 256, 2, 32)
    tokens, temperatures = torch.zeros(64, dtype=torch.int64), torch.ones(64)

    def compute(scale: float) -> Callable[[], object]:
        q, gate, logits = (scale * torch.randn(shape) for shape in ((256, 4, 32), (64, 2048), (64, 2048)))
        out, normalizers = kernels.tree_attend(q, k, v, stretches, spans)
        ways: dict[str, Callable[[], object]] = {
            "attention": lambda: kernels.tree_attend(q, k, v, stretches, spans),
            "its gradient": lambda: kernels.tree_attend_backward(q, q, k, v, out, normalizers, stretches, spans),
            "gates": lambda: kernels.swiglu(gate, gate),
            "their gradients": lambda: kernels.swiglu_backward(gate, gate, gate),
            "drawing": lambda: kernels.draw(logits, temperatures, temperatures.double() / 2),
            "losses": lambda: kernels.choose(logits, tokens, temperatures),
        }
        return ways[kernel]

    near, far = shortest_times(compute(0.1), compute(100.0))
    assert far < 2 * near


def test_losses_of_rounded_logits() -> None:
    kernels = native_kernels()
    assert kernels is not None
    torch.manual_seed(0)
    narrow = (4 * torch.randn(9, 300)).bfloat16()
    tokens, temperatures = torch.arange(9), torch.linspace(0, 2, 9)
    grads, outcomes = torch.randn(2, 9), []
    for logits in (narrow, narrow.float()):
        logprobs, entropies, logsums = kernels.choose(logits, tokens, temperatures)
        kernels.choose_backward(*grads, logits, tokens, temperatures, entropies, logsums)
        outcomes.append((logprobs, entropies, logits))
    (logprobs, entropies, gradient), (*expected, expected_gradient) = outcomes
    assert torch.allclose(torch.stack([logprobs, entropies]), torch.stack(expected), atol=1e-6)
    assert (gradient.float() - expected_gradient).norm() < 2**-8 * expected_gradient.norm()


def test_what_is_no_number_stays_so() -> None:
    kernels = native_kernels()
    assert kernels is not None
    torch.manual_seed(0)
    logits, ones = torch.randn(8, 512), torch.ones(8)
    logits[:, 100] = torch.nan
    assert kernels.draw(logits, ones, ones.double() / 2)[1].isnan().all()
    assert torch.stack(kernels.choose(logits, torch.zeros(8, dtype=torch.int64), ones)).isnan().all()
    q, k, v = torch.randn(64, 4, 32), *torch.randn(2, 64, 2, 32)
    k[10] = torch.nan
    out, _ = kernels.tree_attend(q, k, v, torch.tensor([[0, 64, 0, 0]]), torch.zeros(0, 2, dtype=torch.int64))
    assert out[10:].isnan().all()
    assert not out[:10].isnan().any()


def test_a_library_that_computes_something_else_is_not_used(
    empty_cache: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = shutil.copytree(compiling.KERNELS, empty_cache().parent / "kernels")
    source = wrong / "common.h"
    right = source.read_text()
    source.write_text(right.replace("const float scale = 1 / sum;", "const float scale = 2 / sum;"))
    assert source.read_text() != right
    monkeypatch.setattr(compiling, "KERNELS", wrong)
    assert native_kernels() is None


def test_denormal_numbers_survive(empty_cache: Callable[[], Path]) -> None:
    built, folder = compiling.compile_kernels(), empty_cache()
    folder.mkdir()
    shutil.copy(built, folder)  # what another thread may have loaded is loaded again by this one
    assert native_kernels() is not None
    assert torch.tensor(1e-40).mul(1.0).item() != 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [7, 256, 1034])
def test_compiled_drawing_is_drawing(dtype: torch.dtype, vocabulary: int) -> None:
    kernels = native_kernels()
    assert kernels is not None
    torch.manual_seed(0)
    logits = (torch.randn(512, vocabulary) * 4).to(dtype)
    logits[:, 3] = -torch.inf
    uniforms = torch.rand(512, dtype=torch.float64)
    uniforms[:4] = torch.tensor([0.0, 1 - 2**-53, 0.0, 1 - 2**-53])
    temperatures = [(0.0, 0.3, 1.0, 1.7)[row % 4] for row in range(512)]
    whole = torch.zeros(512, dtype=torch.int64), torch.ones(512)
    expected, their_logprobs = draw_tokens(logits.float(), torch.tensor(temperatures), *whole, uniforms)
    tokens, logprobs = kernels.draw(logits, torch.tensor(temperatures), uniforms)
    same = tokens == expected
    assert same.float().mean() > 0.995, "but for numbers that fall between two tokens"
    assert (logprobs - their_logprobs)[same].abs().max() < 1e-5
    assert not (tokens == 3).any()


def test_losses_and_their_gradients() -> None:
    torch.manual_seed(0)
    n, vocabulary = 40, 5000
    logits, tokens = 2 * torch.randn(n, vocabulary), torch.randint(vocabulary, (n,))
    logits[:, 3], tokens[tokens == 3] = -torch.inf, 4
    temperature = torch.rand(n) + 0.3
    temperature[::7] = 0.0
    zeros, ones = torch.zeros(n), torch.ones(n)
    column = _EntryColumns(
        zeros, zeros, ones, temperature, top_k=torch.zeros(n, dtype=torch.int64), top_p=ones, truncated=zeros.bool()
    )
    kernels = native_kernels()
    assert kernels is not None
    weights = torch.randn(2, n)
    outcomes = []
    for used in (kernels, None):
        given = logits.clone().requires_grad_()
        found = token_logprobs(given + 0.0, tokens, column, slice(0, n), used, entropy_gradient=True)
        (gradient,) = torch.autograd.grad(found, given, list(weights))
        outcomes.append((*(values.detach() for values in found), gradient))
    for compiled, plain in zip(*outcomes, strict=True):
        assert (compiled - plain).norm() <= 1e-5 * plain.norm()
    assert (outcomes[0][0] - outcomes[1][0]).abs().max() < 1e-5
