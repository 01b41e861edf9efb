"""The linear compression kernels on a GPU: the sizes where they break, strides, guards, streams."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import ikbo
from ikbo.testing import assert_matches_definition, definitions

from .memory import peak_bytes
from .test_device import Call, call  # noqa: F401  (the fixture)

NAN = float("nan")
DTYPES = [torch.bfloat16, torch.float16]
GUARD = 64  # elements of NaN before and after


def randn(*sizes: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*sizes, device="cuda") * scale).to(dtype)


def guarded(tensor: Tensor) -> Tensor:
    """The same values, contiguous, with NaN before and after them in memory."""
    flat = torch.full((tensor.numel() + 2 * GUARD,), NAN, dtype=tensor.dtype, device="cuda")
    inner = flat[GUARD : GUARD + tensor.numel()].view(tensor.shape)
    return inner.copy_(tensor)


def rows_apart(weight: Tensor, multiple: int = 64) -> Tensor:
    """The same values with rows at multiples of `multiple` elements and NaN between them."""
    M, K = weight.shape
    buffer = torch.full((M, -(-K // multiple) * multiple), NAN, dtype=weight.dtype, device="cuda")
    buffer[:, :K] = weight
    return buffer[:, :K]


def problem(
    B: int, U: int, M: int, N: int, Ku: int, Kc: int, dtype: torch.dtype = torch.bfloat16
) -> list[Any]:
    scale = (Ku + Kc) ** -0.5
    users = torch.randint(U, (B,), device="cuda", dtype=torch.int32)
    return [
        randn(B, Kc, N, dtype=dtype), randn(U, Ku, N, dtype=dtype),
        randn(M, Kc, dtype=dtype, scale=scale), randn(M, Ku, dtype=dtype, scale=scale),
        randn(M, dtype=dtype), users,
    ]  # fmt: skip


def op(args: list[Any], activation: str = "none", name: str = "linear_compression") -> Any:
    return getattr(torch.ops.ikbo, name)(*args, None, None, activation)


def check(out: Tensor, args: list[Any], activation: str = "none") -> None:
    """On all rows, or where that is a lot on the first, the last and some between."""
    rows = torch.arange(len(args[0]), device="cuda")
    if out.numel() > 2**26:
        rows = torch.cat([rows[:8], rows[len(rows) // 2 :][:8], rows[-8:]])
    some = [args[0][rows], *args[1:5], args[5][rows]]
    wide = [a.double() if a is not None and a.is_floating_point() else a for a in some]
    exact = definitions.linear_compression(*wide, activation)
    plain = definitions.linear_compression(*some, activation)
    assert_matches_definition(out[rows], exact, plain)


SIZES = [
    # B, U, M, N, Ku, Kc
    *itertools.product([1, 7], [1, 7], [1, 65, 433], [8, 64], [7], [8]),
    *((B, U, 433, 256, 1178, 866) for B in (1, 2, 131, 133) for U in (1, B)),
    *((131, 3, M, N, 64, 65) for M in (1, 63, 64, 65, 127, 128, 129, 224, 225, 433, 700)
      for N in (8, 72, 256)),
    *((133, 133, 65, N, Ku, Kc) for N in (8, 64, 192) for Ku, Kc in ((1, 1), (7, 8), (866, 1))),
    (2, 1, 1, 8, 1, 1), (9700, 2, 65, 64, 8, 7), (9700, 9700, 63, 8, 7, 866),
    (1500, 4, 128, 64, 512, 512), (3, 2, 5000, 64, 96, 40),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes: tuple[int, ...]) -> None:
    dtype = DTYPES[sum(sizes) % 2]
    args = problem(*sizes, dtype=dtype)
    with ikbo.strict():
        check(op(args), args)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(
    ("B", "ratio"),
    [(512, 70), (1024, 70), (2048, 70), (3072, 70), (1024, 2), (1024, 10), (1024, 1000), (64, 8),
     (8, 8), (1, 1)],
)  # fmt: skip
def test_benchmark_cases(B: int, ratio: int, shuffled: bool, dtype: torch.dtype) -> None:
    args = problem(B, -(-B // ratio), 433, 256, 1178, 866, dtype=dtype)
    if not shuffled:
        args[5] = (torch.arange(B, device="cuda") // ratio).int()
    args[2:4] = map(rows_apart, args[2:4])
    with ikbo.strict():
        out = op(args)
        check(out, args)
        for _ in range(3):
            assert torch.equal(op(args), out)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", range(3))  # kLinearCompressionKernels
@pytest.mark.parametrize("sms", [1, 7, 132])
@pytest.mark.parametrize(
    ("B", "U", "M", "N", "K"), [(61, 5, 433, 256, 866), (200, 1, 65, 64, 64), (9, 9, 230, 200, 130)]
)
def test_every_kernel_with_any_number_of_ctas(
    call: Call, B: int, U: int, M: int, N: int, K: int, sms: int, kernel: int,  # noqa: F811
) -> None:  # fmt: skip
    """Long and short rounds, starts apart or together, leftover units."""
    e_cand, e_user, w_cand, w_user, _, users = problem(B, U, M, N, K, K)
    w_cand, w_user = rows_apart(w_cand), rows_apart(w_user)
    part = guarded(torch.full((U, M, N), NAN, dtype=e_cand.dtype, device="cuda"))
    out = guarded(torch.full((B, M, N), NAN, dtype=e_cand.dtype, device="cuda"))
    stride = w_cand.stride(0)
    call("linear_compression", w_user, stride, e_user, part, None, None, 0, False, U, M, N, K,
         kernel, sms, None)  # fmt: skip
    call("linear_compression", w_cand, stride, e_cand, out, part, users, U, False, B, M, N, K,
         kernel, sms, None)  # fmt: skip
    check(out, [e_cand, e_user, w_cand, w_user, None, users])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", definitions.ACTIVATIONS)
@pytest.mark.parametrize("rows", [5, 400])
def test_activations_and_preactivation(rows: int, activation: str, dtype: torch.dtype) -> None:
    args = problem(rows, 3, 433, 128, 100, 60, dtype=dtype)
    with ikbo.strict():
        out, preact = op(args, activation, "linear_compression_fwd")
        assert torch.equal(op(args, activation), out)
    check(out, args, activation)
    if preact.numel():
        check(preact, args)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_rows_without_a_user(activation: str) -> None:
    args = problem(300, 3, 433, 64, 70, 70)
    users = args[5].clone()
    users[5::7], users[6::11], users[3::50] = -1, 3, -(2**31)
    args[0][users != args[5]] = NAN
    args[5] = users
    with ikbo.strict():
        out, preact = op(args, activation, "linear_compression_fwd")
    valid = (users >= 0) & (users < 3)
    assert bool((out[users == -1] == 0).all())
    assert bool(out[(users != -1) & ~valid].isnan().all())
    check(out[valid], [args[0][valid], *args[1:5], users[valid]], activation)
    if preact.numel():
        assert bool((preact[~valid] == 0).all()) and bool(preact[valid].isfinite().all())


@pytest.mark.gpu
def test_without_users() -> None:
    args = problem(5, 1, 64, 64, 8, 8)
    args[1], args[5] = args[1][:0], torch.full_like(args[5], -1)
    with ikbo.strict():
        assert bool((op(args) == 0).all())


@pytest.mark.gpu
def test_nan_and_inf_stay_where_they_came_from() -> None:
    args = problem(140, 7, 433, 256, 130, 130)
    clean = op(args)
    args[0][13], args[0][77, 5, 9] = NAN, float("inf")
    args[1][4] = NAN
    dirty = op(args)
    touched = args[5] == 4
    touched[[13, 77]] = True
    assert torch.equal(dirty[~touched], clean[~touched])
    assert not bool(dirty[touched & (torch.arange(140, device="cuda") != 77)].isfinite().any())
    other_columns = [n for n in range(256) if n != 9]
    if args[5][77] != 4:
        assert torch.equal(dirty[77][:, other_columns], clean[77][:, other_columns])


@pytest.mark.gpu
@pytest.mark.parametrize("Kc", [866, 64, 7])
def test_nothing_beyond_the_operands_is_read_or_written(Kc: int) -> None:
    args = problem(70, 3, 433, 72, 90, Kc)
    args = [guarded(a) if a.is_floating_point() else a for a in args]
    out = guarded(torch.zeros(70, 433, 72, dtype=torch.bfloat16, device="cuda"))
    with ikbo.strict():
        torch.ops.ikbo.linear_compression.out(*args, None, None, "none", out=out)
    check(out, args)
    flat = out._base
    assert flat is not None
    assert bool(flat[:GUARD].isnan().all()) and bool(flat[-GUARD:].isnan().all())


@pytest.mark.gpu
def test_weights_in_any_layout() -> None:
    args = problem(50, 3, 433, 64, 90, 866)
    with ikbo.strict():
        want = op(args)
        for change in (
            rows_apart,
            lambda w: rows_apart(w, 8),
            lambda w: w.T.contiguous().T,
            lambda w: torch.stack([w, w + 1], dim=-1)[..., 0],
            lambda w: torch.cat([w[:, :3], w], dim=1)[:, 3:],
        ):
            assert torch.equal(op([*args[:2], change(args[2]), change(args[3]), *args[4:]]), want)


@pytest.mark.gpu
def test_embeddings_with_strides() -> None:
    args = problem(50, 6, 65, 64, 24, 40)
    want = op(args)
    wide = [torch.full((n, K + 2, 80), NAN, dtype=torch.bfloat16, device="cuda")
            for n, K in ((50, 40), (6, 24))]  # fmt: skip
    strided = [w[:, 1 : K + 1, 8:72] for w, K in zip(wide, (40, 24), strict=True)]
    for s, a in zip(strided, args, strict=False):
        s.copy_(a)
    with ikbo.strict():
        assert torch.equal(op([*strided, *args[2:]]), want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"N": 250}, "multiple of 8"),
        ({"transposed": True}, "side by side"),
        ({"expanded": True}, "side by side"),
    ],
)
def test_what_the_kernels_decline_is_still_right(change: dict[str, Any], reason: str) -> None:
    args = problem(20, 3, 65, change.get("N", 64), 24, 40)
    if "transposed" in change:
        args[0] = args[0].transpose(1, 2).contiguous().transpose(1, 2)
    if "expanded" in change:
        args[0] = args[0][:1].expand(20, -1, -1)
    record = ikbo.explain("linear_compression", *args)
    assert record["path"] == "reference" and reason in record["reason"]
    check(op(args), args)


@pytest.mark.gpu
def test_explain_says_what_is_launched() -> None:
    args = problem(1024, 15, 433, 256, 1178, 866)
    record = ikbo.explain("linear_compression", *args)
    assert record["path"] == "sm90" and record["config"]["packed_weights"] == 2
    assert record["config"]["candidates"]["kernel"] == "linear_compression_sm90_224x128x64"
    args[2:4] = map(rows_apart, args[2:4])
    assert ikbo.explain("linear_compression", *args)["config"]["packed_weights"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part_dtype", [None, torch.float32])
def test_given_part(dtype: torch.dtype, part_dtype: torch.dtype | None) -> None:
    args = problem(70, 3, 433, 64, 90, 80, dtype=dtype)
    part = (args[3].double() @ args[1].double()).to(part_dtype or dtype)
    with ikbo.strict():
        out = torch.ops.ikbo.linear_compression_add(
            args[0], args[2], part, args[4], args[5], None, None, "none"
        )
    check(out, args)


@pytest.mark.gpu
def test_gradients_take_no_slow_path() -> None:
    args = problem(70, 3, 65, 64, 90, 80)
    inputs = [a.requires_grad_() for a in args[:5]]
    with ikbo.strict():
        op([*inputs, args[5]], "gelu").float().square().sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in inputs)


@pytest.mark.gpu
def test_two_streams_at_once() -> None:
    """Enough CTAs in each to fill the GPU."""
    cases = [problem(600, 4, 433, 256, 200, 300) for _ in "ab"]
    want = [op(args) for args in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        got = []
        for stream, args in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                got.append(op(args))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("B", [8, 700])
def test_graph_replay_with_changed_inputs(B: int) -> None:
    args = problem(B, 3, 433, 256, 200, 300)
    op(args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(args)
    for _ in range(3):
        for old, new in zip(args, problem(B, 3, 433, 256, 200, 300), strict=True):
            old.copy_(new)
        graph.replay()
        assert torch.equal(out, op(args))


@pytest.mark.gpu
def test_allocates_nothing_but_output_part_and_packed_weights() -> None:
    args = problem(512, 4, 433, 256, 1178, 866)
    out = op(args)
    small = 4 * 433 * 256 * 2 + 433 * (896 + 1216) * 2 + 2**16
    assert out.nbytes <= peak_bytes(lambda: op(args)) <= out.nbytes + small


@pytest.mark.gpu_slow
def test_ten_thousand_repeats() -> None:
    for sizes in ((8, 1, 433, 256, 1178, 866), (300, 5, 433, 256, 130, 130)):
        args = problem(*sizes)
        want = op(args)
        for _ in range(50):
            outs = [op(args) for _ in range(100)]
            assert all(torch.equal(out, want) for out in outs)
