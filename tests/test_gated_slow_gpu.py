"""The gated ops on a GPU: repeats and sizes that take their time."""

from __future__ import annotations

import pytest
import torch

from ikbo.testing import assert_matches_definition

from .test_concat_linear_gpu import record
from .test_gated_gpu import (
    call,
    every_op,
    inputs,
    run,
)


@pytest.mark.gpu_slow
@every_op
@pytest.mark.parametrize("M", [1, 40, 700])
def test_ten_thousand_repeats(op: str, M: int) -> None:
    args = inputs(op, torch.bfloat16, M, 2056, 1030, 520)
    want = run(op, args)
    for _ in range(100):
        outs = [call(op, args) for _ in range(100)]
        assert all(torch.equal(out, want) for out in outs)


@pytest.mark.gpu_slow
@every_op
def test_more_than_2_31_elements(op: str) -> None:
    """Rows at both ends of x, gate, up and the result beyond 2^31 elements each."""
    M, N, K = 2_200_000, 1024, 1000
    args = inputs(op, torch.bfloat16, 8, N, K, 1024)
    x = torch.zeros(M, K, dtype=torch.bfloat16, device="cuda")
    rows = torch.tensor([0, 1, 1_048_576, 2_147_484, M - 2, M - 1], device="cuda")
    x[rows] = torch.randn(len(rows), K, device="cuda").bfloat16()
    out, *saved = getattr(torch.ops.ikbo, f"{op}_fwd")(x, *args[1:])
    assert record(f"{op}_fwd")["path"] == "sm90"
    few = [x[rows].repeat(1000, 1), *args[1:]]  # too many to be streamed: the same kernel
    want, *want_saved = getattr(torch.ops.ikbo, f"{op}_fwd")(*few)
    for got, expected in zip([out, *saved], [want, *want_saved], strict=True):
        assert torch.equal(got[rows], expected[: len(rows)])
    if op != "linear_act":
        del out
        grad = torch.zeros(M, 1024 if op == "gated_mlp" else N, dtype=torch.bfloat16, device="cuda")
        grad[rows] = 1
        weights = [args[i] for i in ((1, 2, 5) if op == "gated_mlp" else (1, 2))]
        backward = getattr(torch.ops.ikbo, f"{op}_bwd")
        got = backward(grad, x, *weights, *saved, "silu", 1)[0]
        few_saved = [s[: len(rows)].contiguous() for s in want_saved]
        ones = torch.ones_like(grad[: len(rows)])
        expected = backward(ones, x[rows], *weights, *few_saved, "silu", 1)[0]
        assert_matches_definition(got[rows], expected.double(), expected)
