"""Products are computed as fast as the machine can, and no less exactly than was asked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentscope_tuner.config import EngineConfig, TunerModelConfig
from agentscope_tuner.engine import products, trial
from agentscope_tuner.engine.attention import CausalLayout, RowLayout
from agentscope_tuner.engine.decoder_choice import choose_decoder
from agentscope_tuner.engine.kv_cache import KVCache, PrefixStack
from agentscope_tuner.engine.models import agree, load_model
from agentscope_tuner.engine.native import NativeKernels, Way, to_pairs, to_tiles, weight_tiles
from agentscope_tuner.engine.products import WideLinears, WideProducts, onednn_products
from agentscope_tuner.engine.reading import model_directory
from agentscope_tuner.engine.trial import native_kernels


@pytest.fixture(autouse=True)
def unknown() -> Iterator[None]:
    products.onednn_is_exact.cache_clear()
    yield
    products.onednn_is_exact.cache_clear()


def setting() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision


def test_the_setting_holds_inside_only() -> None:
    before = setting()
    with onednn_products():
        assert setting() == ("bf16" if products.onednn_is_exact() else before)
    assert setting() == before
    with pytest.raises(ValueError, match="anything"), onednn_products():
        raise ValueError("anything")
    assert setting() == before


def test_a_processor_that_rounds_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda a, b: linear(a.bfloat16(), b.bfloat16()).float())
    before = setting()
    with onednn_products():
        assert setting() == before
    assert not products.onednn_is_exact()


def test_products_inside_are_float32() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(257, 300, requires_grad=True), torch.randn(129, 300)
    with onednn_products():
        product = torch.nn.functional.linear(a, b)
        (grad,) = torch.autograd.grad(product.sum(), [a])
    exact = a.double() @ b.double().T
    assert (product - exact).abs().max() < 3e-6 * exact.abs().max()
    assert torch.allclose(grad, b.sum(0).expand_as(a), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 8, 9, 129, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (20, 33), (300, 7), (33, 64)])
def test_products_of_bfloat16_are_rounded_once(
    kernels_each_way: NativeKernels, rows: int, inputs: int, outputs: int
) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    x, weight, bias = (tensor.bfloat16() for tensor in (x, weight, bias))
    ways = WideProducts(kernels_each_way)
    for given in (bias, None):
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if given is None else given.double())
        found = ways.linear(x, ways.pack(weight), given, outputs)
        assert found.dtype == torch.bfloat16
        assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all(), "rounded once"
    assert weight_tiles(weight).dtype == torch.bfloat16


@pytest.mark.parametrize("d", [20, 32, 64, 80])
def test_attention_in_bfloat16(kernels_each_way: NativeKernels, d: int) -> None:
    torch.manual_seed(0)
    tokens, kv_heads, group = 600, 2, 3
    q = (torch.randn(4, kv_heads * group, d) * d**-0.5).bfloat16().float()
    keys, values = torch.randn(2, 1, kv_heads, 608, d).bfloat16()
    lengths = torch.tensor([1, 31, 64, tokens])
    found = kernels_each_way.attend(
        q, to_tiles(keys), to_pairs(values), torch.zeros(4, dtype=torch.int64), lengths,
        torch.empty(0, 3, dtype=torch.int64), torch.full((4,), -1),
    )  # fmt: skip
    for row, n in enumerate(lengths.tolist()):
        k, v = (tensor[0, :, :n].double() for tensor in (keys, values))
        weights = torch.softmax(q[row].double().view(kv_heads, group, d) @ k.transpose(1, 2), -1)
        # Weights may be rounded, and so is the result.
        error = 2**-8 * (weights @ v.abs() + (weights @ v).abs())
        assert ((found[row].double().view(kv_heads, group, d) - weights @ v).abs() <= error).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_modules_write_is_shared_copied_and_read_by_kernels(
    kernels_each_way: NativeKernels, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    kv_heads, group, d, shared, tokens = 2, 3, 20, 7, 33
    cache = KVCache((2, kv_heads, d), 3, 200, torch.empty(0, dtype=dtype), kernels_each_way)
    q = torch.randn(1, kv_heads * group, tokens, d).to(dtype)
    k, v = torch.randn(2, 1, kv_heads, tokens, d).to(dtype)
    expected = CausalLayout().attend(0, q.double(), k.double(), v.double(), d**-0.5)[0]

    def attended(slot: int, first: int, own: int, stack: PrefixStack | None = None) -> torch.Tensor:
        """Tokens from `first` on, of which the first lies at `own` in the slot; the slot goes on from the stack."""
        rows = tokens - first
        trunk_of = torch.full((rows,), -1 if stack is None else 1)
        layout = RowLayout(cache, own + torch.arange(rows), torch.full((rows,), slot), trunk_of, stack)
        given = (x[0, :, first:].transpose(0, 1)[:, :, None].contiguous() for x in (q, k, v))
        return layout.attend(1, *given, d**-0.5)[:, 0].double()

    whole = attended(1, 0, 0)
    stack = PrefixStack([cache.take(1, 3), cache.take(1, shared)])
    after_trunk = attended(0, shared, 0, stack)
    cache.copy([(1, 2, shared)])
    after_copy = attended(2, shared, shared)
    error = 2**-7 if dtype == torch.bfloat16 else 1e-6
    for found, first in ((whole, 0), (after_trunk, shared), (after_copy, shared)):
        torch.testing.assert_close(found, expected[first:], rtol=error, atol=error)


@pytest.mark.parametrize("fastest", [*Way])
def test_of_right_ways_the_fastest_is_used(fastest: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = native_kernels()
    assert compiled is not None
    monkeypatch.setattr(compiled, "way", compiled.way)  # and as it was again, in the end
    linear = NativeKernels.linear

    class Processor(NativeKernels):
        can = right = frozenset(Way)
        asked = Way.ONE_BY_ONE

        @property
        def way(self) -> Way:
            return self.asked

        @way.setter
        def way(self, wanted: Way) -> None:
            self.asked = wanted if wanted in self.can else self.asked

        def linear(self, x: torch.Tensor, *args: object) -> torch.Tensor:
            time.sleep(0.02 * (self.way is not fastest))
            return linear(self, x if self.way in self.right else 2 * x, *args)

    processor = object.__new__(Processor)
    processor.__dict__.update(compiled.__dict__)
    assert trial._fastest_way(processor) is fastest
    if fastest is not Way.ONE_BY_ONE:
        others = frozenset(Way) - {fastest}
        processor.right = others
        assert trial._fastest_way(processor) is not fastest
        processor.right, processor.can = frozenset(Way), others
        assert trial._fastest_way(processor) is not fastest


def test_kernels_that_are_far_too_slow_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, attend = native_kernels(), NativeKernels.attend
    assert compiled is not None

    def slowly(*args: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return attend(*args)

    monkeypatch.setattr(NativeKernels, "attend", slowly)
    native_kernels.cache_clear()
    try:
        assert native_kernels() is None
    finally:
        native_kernels.cache_clear()


@pytest.mark.parametrize("at_once", [2**22, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_in_bfloat16_that_compute_in_float32(
    at_once: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_WIDENED", at_once)
    torch.manual_seed(0)
    narrow = torch.nn.Linear(40, 23).bfloat16()
    wide = torch.nn.Linear(40, 23)
    wide.load_state_dict(narrow.state_dict())
    x = torch.randn(3, 5, 40).to(dtype).requires_grad_()
    with WideLinears():
        found = narrow(x)
        by_name = torch.nn.functional.linear(input=x, weight=narrow.weight, bias=narrow.bias)
        assert torch.equal(by_name, found)
        assert torch.equal(torch.nn.functional.linear(x.float(), wide.weight, wide.bias), wide(x.float()))
    expected = wide(x.float())
    assert found.dtype == dtype
    toward = torch.randn(3, 5, 23)
    ours = torch.autograd.grad((found.float() * toward).sum(), [x, *narrow.parameters()])
    theirs = torch.autograd.grad((expected * toward).sum(), [x, *wide.parameters()])
    assert torch.allclose(found.float(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    for got, wanted in zip(ours, theirs, strict=True):
        rounding = 1e-6 if got.dtype == torch.float32 else 2**-8
        assert (got - wanted).norm() <= rounding * wanted.norm()


@pytest.mark.parametrize("slow", [True, False])
def test_modules_widen_weights_for_many_rows(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "bfloat16_is_slow", lambda: slow)
    engine = EngineConfig(device="cpu", dtype="bfloat16", fast_decoder=False)
    loaded = load_model(TunerModelConfig(model_path="tiny-agent", max_model_len=256), engine)
    wide = AutoModelForCausalLM.from_pretrained(model_directory("tiny-agent"), dtype=torch.float32)
    widened: list[torch.Size] = []
    parts = products._parts
    monkeypatch.setattr(products, "_parts", lambda weight: widened.append(weight.shape) or parts(weight))
    chosen = choose_decoder(loaded, 128, engine)
    ids = torch.arange(1, 81).view(2, 40)
    positions = torch.arange(40).expand(2, 40)
    with torch.inference_mode():
        few = chosen.logits(chosen.hidden(ids[:1, :20], positions[:1, :20], CausalLayout())[0])
        assert not widened
        many = chosen.logits(chosen.hidden(ids, positions, CausalLayout()).flatten(0, 1))
        assert (loaded.head.weight.shape in widened) == slow
        expected = wide(ids).logits.flatten(0, 1)
    assert agree(few, expected[:20], torch.bfloat16)
    assert agree(many, expected, torch.bfloat16)


def test_the_slower_precision_is_found_by_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    for slow in (torch.bfloat16, torch.float32):

        def linear(a: torch.Tensor, b: torch.Tensor, slow: torch.dtype = slow) -> torch.Tensor:
            time.sleep(0.02 * (a.dtype == slow))
            return torch.zeros(len(a), len(b))

        monkeypatch.setattr(torch.nn.functional, "linear", linear)
        products.bfloat16_is_slow.cache_clear()
        assert products.bfloat16_is_slow() == (slow == torch.bfloat16)
    products.bfloat16_is_slow.cache_clear()


def test_others_that_compute_do_not_change_what_is_found() -> None:
    def find() -> bool:
        products.bfloat16_is_slow.cache_clear()
        return products.bfloat16_is_slow()

    alone = find()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        assert [find() for _ in range(24)] == [alone] * 24
        assert torch.get_num_threads() == 2
    finally:
        for other in others:
            other.kill()
            other.wait()
        torch.set_num_threads(threads)
