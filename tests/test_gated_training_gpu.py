"""The backward of the gated ops on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ikbo
from ikbo.testing import assert_matches_definition, definitions

from .test_concat_linear_gpu import guarded, record
from .test_gated_gpu import (
    call,
    check_gradients,
    every_dtype,
    every_gated_op,
    every_op,
    inputs,
    leaves_of,
    one_dtype,
    run,
    tensors_of,
    wide,
)

pytestmark = pytest.mark.gpu


def path_of_backward(op: str) -> tuple[str, str]:
    return f"{op}_bwd", "library" if op == "linear_act" else "sm90"


@every_op
@every_dtype
@pytest.mark.parametrize("activation", definitions.ACTIVATIONS)
def test_gradients(op: str, dtype: torch.dtype, activation: str) -> None:
    ikbo.reset_counters()
    with ikbo.strict():
        for M in (1, 50, 200):
            check_gradients(op, inputs(op, dtype, M, 136, 72, 64, activation=activation))
    counters = ikbo.counters()
    assert counters[(f"{op}_fwd", "sm90")] == 3 and counters[path_of_backward(op)] == 3


@every_op
@every_dtype
@pytest.mark.parametrize(
    "problem", [(3, 8, 8, 8), (1000, 520, 264, 136), (4100, 1544, 200, 1032)], ids=str
)
def test_gradients_over_shapes(
    op: str, dtype: torch.dtype, problem: tuple[int, int, int, int]
) -> None:
    with ikbo.strict():
        check_gradients(op, inputs(op, dtype, *problem, activation="gelu_tanh"))


@every_gated_op
@every_dtype
def test_gradients_of_misaligned_weights(op: str, dtype: torch.dtype) -> None:
    args = inputs(op, dtype, 200, 136, 72, 64, activation="gelu")
    leaves = leaves_of(args)
    want = torch.autograd.grad(call(op, leaves).sum(), tensors_of(leaves))  # an expanded gradient
    places = (1, 2, 5) if op == "gated_mlp" else (1, 2)
    for i in places:
        leaves[i] = guarded(leaves[i].detach(), extra=3).requires_grad_()
    with torch.autograd.set_multithreading_enabled(False):  # records are the thread's own
        got = torch.autograd.grad(call(op, leaves).sum(), tensors_of(leaves))
    assert record(f"{op}_bwd")["config"]["packed_weights"] == len(places)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@every_gated_op
@every_dtype
def test_odd_input_features_leave_their_gradient_to_the_library(
    op: str, dtype: torch.dtype
) -> None:
    args = inputs(op, dtype, 200, 136, 72, 64)
    narrow = [a[:, :65] if i < 3 else a for i, a in enumerate(args)]
    out, *saved = getattr(torch.ops.ikbo, f"{op}_fwd")(*narrow)
    weights = [narrow[i] for i in ((1, 2, 5) if op == "gated_mlp" else (1, 2))]
    grads = getattr(torch.ops.ikbo, f"{op}_bwd")(
        torch.ones_like(out), narrow[0], *weights, *saved, "silu", 1
    )
    assert record(f"{op}_bwd")["config"]["input"] is None
    leaves = [a.detach().double().requires_grad_() if isinstance(a, Tensor) else a for a in narrow]
    exact = torch.autograd.grad(getattr(definitions, op)(*leaves).sum(), leaves[0])[0]
    leaves = [a.detach().requires_grad_() if isinstance(a, Tensor) else a for a in narrow]
    plain = torch.autograd.grad(getattr(definitions, op)(*leaves).sum(), leaves[0])[0]
    assert_matches_definition(grads[0], exact, plain)


@every_op
@one_dtype
def test_backward_twice(op: str, dtype: torch.dtype) -> None:
    leaves = leaves_of(inputs(op, dtype, 300, 264, 72, 136, activation="silu"))
    out = call(op, leaves)
    grad = torch.randn_like(out)
    first, second = (
        torch.autograd.grad(out, tensors_of(leaves), grad, retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_op
def test_backward_of_no_rows(op: str) -> None:
    x, *rest = inputs(op, torch.bfloat16, 5, 64, 40, 64)
    leaves = leaves_of([x[:0], *rest])
    with ikbo.strict():
        grads = torch.autograd.grad(call(op, leaves).sum(), tensors_of(leaves))
    assert all(not g.any() for g in grads)


@every_op
def test_decode_shapes(op: str) -> None:
    """Weights that don't fit L2, and what of DeepGEMM's #84 and its kind fails at few rows."""
    x, *rest = inputs(op, torch.bfloat16, 64, 11008, 4096, 4096, activation="gelu_tanh")
    exact = getattr(definitions, op)(*wide([x, *rest]))
    for M in (1, 2, 8, 16, 32, 33, 64):
        args = [x[:M], *rest]
        out = run(op, args)
        assert_matches_definition(out, exact[:M], getattr(definitions, op)(*args))
        for _ in range(3):
            assert torch.equal(out, call(op, args))
