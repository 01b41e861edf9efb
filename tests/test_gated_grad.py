"""The backward kernels of the gated ops on every tile. Kernels in tests/device/gated_grad.cu."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ikbo.testing import assert_matches_definition, definitions

from .test_device import Call, call  # noqa: F401  (the fixture)
from .test_gated_gpu import draw
from .test_gated_tiles import amid_nan, copies_amid_nan

pytestmark = pytest.mark.gpu

GRAD_KERNELS = range(1)  # kGatedGradKernels in csrc/config/gated.h
INPUT_KERNELS = range(4)  # kInputGradKernels
SHAPES = [
    (1, 8, 8), (63, 64, 64), (65, 72, 136), (128, 256, 72), (257, 136, 1024), (433, 1032, 200),
    (1000, 1000, 1000), (2049, 264, 520), (4100, 1160, 128),
]  # fmt: skip
ACTIVATIONS = list(definitions.ACTIVATIONS)


def device_limits() -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(0)
    return properties.multi_processor_count, properties.L2_cache_size


def gated_grad(
    call: Call,  # noqa: F811
    inputs: list[Tensor],
    activation: str,
    kernel: int,
    *,
    has_hidden: bool = True,
) -> list[Tensor]:
    """grad_gate, grad_up, hidden; checks that nothing outside them was written."""
    grad_out, gate = inputs[0], inputs[2]
    M, N = gate.shape
    results = [amid_nan(M, N) for _ in range(3 if has_hidden else 2)]
    pointers = [inside for _, inside in results] + ([] if has_hidden else [None])
    call(
        "gated_grad", *inputs, *pointers, M, N, grad_out.shape[1], ACTIVATIONS.index(activation),
        kernel, *device_limits(),
    )  # fmt: skip
    return copies_amid_nan(results)


def gated_grad_inputs(M: int, N: int, K: int) -> list[Tensor]:
    t = draw(torch.bfloat16, seed=0)
    return [t(M, K), t(K, N, scale=K**-0.5), t(M, N), t(M, N)]


def gated_grad_definition(inputs: list[Tensor], activation: str) -> list[Tensor]:
    grad_out, w_down, gate, up = inputs
    leaves = [t.detach().requires_grad_() for t in (gate, up)]
    hidden = definitions.ACTIVATIONS[activation](leaves[0]) * leaves[1]
    return [*torch.autograd.grad(hidden, leaves, grad_out @ w_down), hidden.detach()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", GRAD_KERNELS)
def test_gradients_at_the_preactivations(
    call: Call,  # noqa: F811
    kernel: int,
    shape: tuple[int, int, int],
) -> None:
    inputs = gated_grad_inputs(*shape)
    for activation in ("gelu_tanh", "silu"):
        results = gated_grad(call, inputs, activation, kernel)
        exact = gated_grad_definition([t.double() for t in inputs], activation)
        for got, want, plain in zip(
            results, exact, gated_grad_definition(inputs, activation), strict=True
        ):
            assert_matches_definition(got, want, plain)
        fewer = gated_grad(call, inputs, activation, kernel, has_hidden=False)
        assert all(torch.equal(a, b) for a, b in zip(fewer, results, strict=False))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(call: Call, activation: str) -> None:  # noqa: F811
    inputs = gated_grad_inputs(300, 200, 72)
    inputs[2] = inputs[2] * 3
    exact = gated_grad_definition([t.double() for t in inputs], activation)
    plain = gated_grad_definition(inputs, activation)
    for got, want, like in zip(gated_grad(call, inputs, activation, 0), exact, plain, strict=True):
        assert_matches_definition(got, want, like)


@pytest.mark.parametrize("kernel", GRAD_KERNELS)
def test_repeats_give_the_same_bits(call: Call, kernel: int) -> None:  # noqa: F811
    inputs = gated_grad_inputs(3000, 1032, 200)
    first = gated_grad(call, inputs, "gelu", kernel)
    for _ in range(20):
        again = gated_grad(call, inputs, "gelu", kernel)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def input_grad(call: Call, terms: list[Tensor], kernel: int) -> Tensor:  # noqa: F811
    M, K = terms[0].shape
    N = terms[1].shape[1]
    buffer, inside = amid_nan(M, N)
    call("input_grad", *terms, inside, M, N, K, kernel, *device_limits())
    result = inside.clone()
    inside.fill_(float("nan"))
    assert bool(buffer.isnan().all())
    return result


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", INPUT_KERNELS)
def test_gradient_of_the_input(
    call: Call,  # noqa: F811
    kernel: int,
    shape: tuple[int, int, int],
) -> None:
    M, N, K = shape
    t = draw(torch.bfloat16, seed=0)
    terms = [t(M, K), t(K, N, scale=K**-0.5), t(M, K), t(K, N, scale=K**-0.5)]
    a, b, a_more, b_more = terms
    got = input_grad(call, terms, kernel)
    exact = a.double() @ b.double() + a_more.double() @ b_more.double()
    assert_matches_definition(got, exact, a @ b + a_more @ b_more)
    for _ in range(20):
        assert torch.equal(input_grad(call, terms, kernel), got)
