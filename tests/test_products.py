"""Float32 products by oneDNN: only where they are float32 products."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from agentscope_tuner.engine import products
from agentscope_tuner.engine.products import onednn_products


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
