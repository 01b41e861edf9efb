"""concat_linear's Hopper kernels: the definition, shapes, strides, guards, streams, graphs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import ikbo
from ikbo._library import library
from ikbo.testing import assert_matches_definition, definitions

from .cases import Maker

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16]
NAN = float("nan")
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def record(op: str = "concat_linear") -> dict[str, Any]:
    """What the last call of the op was."""
    result: dict[str, Any] = json.loads(library().ikbo_explain(op.encode()))
    return result


def concat_linear(*args: Any) -> Tensor:
    out: Tensor = torch.ops.ikbo.concat_linear(*args)
    return out


def guarded(values: Tensor, extra: int = 0) -> Tensor:
    """The values amid NaN: rows at multiples of 16 bytes, or `extra` elements further apart."""
    if values.dim() == 1:
        buffer = values.new_full((values.shape[0] + 16,), NAN)
        inside = buffer[8 : 8 + values.shape[0]]
    else:
        rows, columns = values.shape
        buffer = values.new_full((rows + 2, (columns + 7) // 8 * 8 + 16 + extra), NAN)
        inside = buffer[1 : 1 + rows, 8 : 8 + columns]
    inside.copy_(values)
    return inside


def guarded_map(users: Tensor) -> Tensor:
    """A map amid values that no tensor has a row for."""
    buffer = users.new_full((users.shape[0] + 16,), 2**30)
    buffer[8:-8] = users
    return buffer[8:-8]


def inputs(
    dtype: torch.dtype, B: int, U: int, N: int, Kc: int, Ku: int, *, bias: bool = True,
    stray_rows: bool = True, seed: int = 0,
) -> list[Any]:  # fmt: skip
    """x_cand, x_user, w_cand, w_user, bias, cand_to_user; with padding and out-of-range rows."""
    t = Maker(DEVICE, dtype, seed)
    scale = 1 / max(1, Kc + Ku) ** 0.5
    users = t.map(B, U, rows_without_user=False)
    if stray_rows and B > 4:
        users[B // 2 :: 13], users[1::17] = -1, U + 5
        users[3] = -(2**31)
    return [
        guarded(t(B, Kc)), guarded(t(U, Ku)), guarded(t(N, Kc, scale=scale)),
        guarded(t(N, Ku, scale=scale)), guarded(t(N)) if bias else None, guarded_map(users),
    ]  # fmt: skip


def wide(args: list[Any]) -> list[Any]:
    return [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


def check(out: Tensor, args: list[Any], activation: str = "none") -> None:
    exact = definitions.concat_linear(*wide(args), activation)
    assert_matches_definition(out, exact, definitions.concat_linear(*args, activation))


# ---- values ------------------------------------------------------------------------------------
@every_dtype
@pytest.mark.parametrize("N", [8, 64, 256, 512])
@pytest.mark.parametrize("K", [1, 7, 8, 866])
def test_shapes(dtype: torch.dtype, K: int, N: int) -> None:
    for B in (1, 2, 7, 131, 133, 2000):
        for U in {1, B}:
            args = inputs(dtype, B, U, N, K, K + 3)
            check(concat_linear(*args, None, None, "none"), args)
            assert record()["path"] == "sm90"
            assert record()["config"]["launches"] == 2


@every_dtype
@pytest.mark.parametrize(
    ("problem", "kernel"),
    [
        # B, U, N, Kc, Ku: two and more tiles a CTA.
        ((12773, 5, 408, 1096, 165), "128x256x64_cooperative_cluster1"),
        ((13301, 1, 392, 1125, 58), "128x256x64_cooperative_cluster1"),
        ((13567, 5, 136, 3, 40), "128x128x64_ping_pong_cluster1"),
        ((11289, 11289, 296, 8, 136), "128x128x64_ping_pong_cluster1"),
        ((2354, 5, 800, 56, 40), "64x128x64_ping_pong_cluster1"),
        ((9782, 5, 144, 2, 40), "64x128x64_ping_pong_cluster1"),
    ],
    ids=str,
)
def test_several_tiles_a_cta(dtype: torch.dtype, problem: tuple[int, ...], kernel: str) -> None:
    args = inputs(dtype, *problem)
    out = concat_linear(*args, None, None, "silu")
    candidates = record()["config"]["candidates"]
    assert candidates["kernel"] == f"gemm_sm90_{kernel}" and candidates["waves"] > 1
    check(out, args, "silu")
    for _ in range(20):
        assert torch.equal(
            out.nan_to_num(7), concat_linear(*args, None, None, "silu").nan_to_num(7)
        )


@every_dtype
@pytest.mark.parametrize("activation", definitions.ACTIVATIONS)
@pytest.mark.parametrize("problem", [(133, 5, 256, 72, 40), (3000, 40, 520, 130, 66)], ids=str)
def test_activations_and_the_preactivation(
    dtype: torch.dtype, activation: str, problem: tuple[int, ...]
) -> None:
    args = inputs(dtype, *problem)
    out, preact = torch.ops.ikbo.concat_linear_fwd(*args, None, None, activation)
    assert record("concat_linear_fwd")["path"] == "sm90"
    check(out, args, activation)
    alone = concat_linear(*args, None, None, activation)
    assert torch.equal(out.nan_to_num(7), alone.nan_to_num(7))
    if activation in ("relu2", "silu", "gelu", "gelu_tanh"):
        users = args[5]
        has_user = ((users >= 0) & (users < problem[1]))[:, None]
        exact, plain = (
            torch.where(has_user, definitions.concat_linear(*a), 0.0) for a in (wide(args), args)
        )
        assert_matches_definition(preact, exact, plain.to(dtype))
    else:
        assert preact.numel() == 0


@every_dtype
def test_without_bias(dtype: torch.dtype) -> None:
    args = inputs(dtype, 200, 3, 64, 40, 24, bias=False)
    check(concat_linear(*args, None, None, "relu"), args, "relu")


@every_dtype
@pytest.mark.parametrize("shift", [1, 2, 4])
def test_bias_at_any_address(dtype: torch.dtype, shift: int) -> None:
    args = inputs(dtype, 33, 3, 64, 40, 24)
    for bias in (
        torch.cat([args[4].new_full((shift,), NAN), args[4]])[shift:],
        torch.stack([args[4], args[4] + NAN], dim=1)[:, 0],
    ):
        moved = [*args[:4], bias, args[5]]
        assert torch.equal(
            concat_linear(*moved, None, None, "none").nan_to_num(7),
            concat_linear(*args, None, None, "none").nan_to_num(7),
        )


# ---- rows --------------------------------------------------------------------------------------
@every_dtype
def test_what_rows_without_a_user_hold_does_not_matter(dtype: torch.dtype) -> None:
    args = inputs(dtype, 700, 9, 264, 100, 60)
    users = args[5]
    clean = concat_linear(*args, None, None, "sigmoid")
    has_user = (users >= 0) & (users < 9)
    args[0][~has_user] = NAN
    dirty = concat_linear(*args, None, None, "sigmoid")
    assert torch.equal(dirty[has_user], clean[has_user])
    assert bool((dirty[users == -1] == 0).all())
    assert bool(dirty[~has_user & (users != -1)].isnan().all())


@every_dtype
@pytest.mark.parametrize("U", [0, 3])
@pytest.mark.parametrize("user", [-1, 3, -2])
def test_no_row_has_a_user(dtype: torch.dtype, U: int, user: int) -> None:
    args = inputs(dtype, 300, U, 64, 40, 24, stray_rows=False)
    args[5].fill_(user)
    out = concat_linear(*args, None, None, "none")
    assert record()["path"] == "sm90"
    assert bool((out == 0).all() if user == -1 else out.isnan().all())


@every_dtype
def test_users_without_features(dtype: torch.dtype) -> None:
    args = inputs(dtype, 140, 3, 64, 40, 0)
    check(concat_linear(*args, None, None, "none"), args)
    assert record()["config"]["launches"] == 1


@every_dtype
def test_nan_and_inf_stay_where_they_came_from(dtype: torch.dtype) -> None:
    args = inputs(dtype, 600, 20, 128, 100, 60, stray_rows=False)
    users = args[5]
    users.copy_(torch.arange(600) % 20)
    clean = concat_linear(*args, None, None, "none")
    args[0][77, 5], args[0][78, 99] = NAN, float("inf")
    args[1][4, 59], args[1][19, 0] = NAN, -float("inf")
    dirty = concat_linear(*args, None, None, "none")
    touched = (users == 4) | (users == 19)
    touched[77:79] = True
    assert torch.equal(dirty[~touched], clean[~touched])
    assert not bool(dirty[touched].isfinite().any())


# ---- strides -----------------------------------------------------------------------------------
@every_dtype
@pytest.mark.parametrize("Kc", [7, 40, 866])
def test_weights_of_any_strides(dtype: torch.dtype, Kc: int) -> None:
    args = inputs(dtype, 300, 4, 264, Kc, 57)
    want = concat_linear(*args, None, None, "none").nan_to_num(7)
    assert record()["config"]["packed_weights"] == 0
    x_cand, x_user, w_cand, w_user, *rest = args
    joined = guarded(torch.cat([w_user, w_cand], dim=1), extra=1)
    transposed = guarded(w_cand.T.contiguous()).T
    for weights, packed in (
        ((guarded(w_cand, extra=3), w_user), 1),
        ((w_cand, guarded(w_user, extra=5)), 1),
        ((joined[:, 57:], joined[:, :57]), 2),
        ((transposed, w_user), 1),
    ):
        out = concat_linear(x_cand, x_user, *weights, *rest, None, None, "none")
        config = record()["config"]
        assert (config["packed_weights"], config["launches"]) == (packed, 3)
        assert torch.equal(out.nan_to_num(7), want)


@every_dtype
def test_one_weight_row_for_all_outputs(dtype: torch.dtype) -> None:
    args = inputs(dtype, 50, 2, 64, 24, 16)
    args[2] = args[2][:1].expand(64, 24)
    check(concat_linear(*args, None, None, "none"), args)


@every_dtype
def test_what_the_kernels_decline(dtype: torch.dtype) -> None:
    x_cand, x_user, w_cand, w_user, bias, users = inputs(dtype, 50, 3, 64, 40, 24)
    odd = guarded(x_cand, extra=1)
    for args, word in (
        ([x_cand, x_user, w_cand[:50], w_user[:50], bias[:50], users], "multiple of 8"),
        ([odd, x_user, w_cand, w_user, bias, users], "features"),
        ([x_cand[:, 1:], x_user, w_cand[:, 1:], w_user, bias, users], "features"),
        ([x_cand, guarded(x_user.T.contiguous()).T, w_cand, w_user, bias, users], "features"),
        ([x_cand[:1].expand(50, 40), x_user, w_cand, w_user, bias, users], "features"),
        ([x_cand[:, :0], x_user, w_cand[:, :0], w_user, bias, users], "without features"),
    ):
        check(concat_linear(*args, None, None, "none"), args)
        assert record()["path"] == "reference" and word in record()["reason"]


@every_dtype
def test_one_row_has_no_stride(dtype: torch.dtype) -> None:
    x_cand, x_user, *rest = inputs(dtype, 1, 1, 64, 40, 24)
    want = concat_linear(x_cand, x_user, *rest, None, None, "none")
    odd = (x_cand.as_strided((1, 40), (3, 1)), x_user.as_strided((1, 24), (5, 1)))
    assert torch.equal(concat_linear(*odd, *rest, None, None, "none"), want)
    assert record()["path"] == "sm90"


@every_dtype
@pytest.mark.parametrize(("extra", "path"), [(0, "sm90"), (1, "reference")])
def test_out(dtype: torch.dtype, extra: int, path: str) -> None:
    args = inputs(dtype, 331, 3, 264, 40, 24)
    want = concat_linear(*args, None, None, "none")
    out = guarded(torch.zeros_like(want), extra)
    buffer = out._base
    assert buffer is not None
    torch.ops.ikbo.concat_linear.out(*args, None, None, "none", out=out)
    assert record()["path"] == path
    if path == "sm90":
        assert torch.equal(out.nan_to_num(7), want.nan_to_num(7))
    else:
        check(out, args)
    out.fill_(NAN)
    assert bool(buffer.isnan().all())  # nothing else was written


def test_empty_batches() -> None:
    args = inputs(torch.bfloat16, 0, 3, 64, 40, 24)
    assert concat_linear(*args, None, None, "none").shape == (0, 64)
    out, preact = torch.ops.ikbo.concat_linear_fwd(*args, None, None, "silu")
    assert out.shape == preact.shape == (0, 64)


# ---- the part at hand --------------------------------------------------------------------------
@every_dtype
@pytest.mark.parametrize("part_dtype", ["same", "float32"])
@pytest.mark.parametrize("problem", [(133, 5, 256, 72), (3000, 40, 520, 130)], ids=str)
def test_add(dtype: torch.dtype, part_dtype: str, problem: tuple[int, ...]) -> None:
    B, U, N, Kc = problem
    x_cand, _, w_cand, _, bias, users = inputs(dtype, B, U, N, Kc, 0)
    t = Maker(DEVICE, torch.float32 if part_dtype == "float32" else dtype, seed=1)
    part = guarded(t(U, N))
    # As a product with one-hot users, the definition has a part.
    one_hot = torch.eye(U, device=DEVICE, dtype=torch.float64)
    exact = definitions.concat_linear(
        x_cand.double(), one_hot, w_cand.double(), part.double().T, bias.double(), users, "gelu"
    )
    plain = definitions.concat_linear(
        x_cand, one_hot.to(dtype), w_cand, part.to(dtype).T, bias, users, "gelu"
    )
    want, preact = torch.ops.ikbo.concat_linear_add_fwd(
        x_cand, w_cand, part, bias, users, None, None, "gelu"
    )
    assert record("concat_linear_add_fwd")["path"] == "sm90"
    assert_matches_definition(want, exact, plain)
    assert preact.shape == want.shape
    for other in (
        part.contiguous(),
        guarded(part, extra=1),
        guarded(part.T.contiguous()).T,
        torch.cat([part.flatten()[:1], part.flatten()])[1:].view(U, N),
    ):
        out = torch.ops.ikbo.concat_linear_add(
            x_cand, w_cand, other, bias, users, None, None, "gelu"
        )
        assert torch.equal(out.nan_to_num(7), want.nan_to_num(7))
    assert record("concat_linear_add")["config"]["launches"] == 1


# ---- order on the stream -----------------------------------------------------------------------
def chain(layers: list[list[Any]], x: Tensor, *, wait: bool) -> Tensor:
    """Each layer's result is the next one's input; memory is used again as soon as it may be."""
    for x_user, w_cand, w_user, bias, users in layers:
        x = concat_linear(x, x_user, w_cand, w_user, bias, users, None, None, "relu")
        if wait:
            torch.cuda.synchronize()
    return x


@every_dtype
@pytest.mark.parametrize(("B", "U"), [(200, 1), (2000, 30), (2000, 900)])
def test_calls_one_after_another(dtype: torch.dtype, B: int, U: int) -> None:
    """The candidates' kernel starts before its predecessor has ended: it may neither read what is
    not there yet nor overwrite what is still read."""
    layers = []
    for seed in range(8):
        x, *rest = inputs(dtype, B, U, 256, 256, 264, stray_rows=False, seed=seed)
        layers.append(rest)
    want = chain(layers, x, wait=True)
    for _ in range(100):
        assert torch.equal(chain(layers, x, wait=False), want)


def test_two_streams_at_once() -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    args = [inputs(torch.bfloat16, 1500, 11, 512, 300, 520, seed=seed) for seed in range(2)]
    want = [concat_linear(*a, None, None, "gelu").nan_to_num(7) for a in args]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(concat_linear(*args[i], None, None, "gelu").nan_to_num(7))
    torch.cuda.synchronize()
    for i in range(2):
        assert all(torch.equal(out, want[i]) for out in results[i])


@every_dtype
def test_graph_replay_with_other_inputs(dtype: torch.dtype) -> None:
    first, second = (inputs(dtype, 500, 7, 264, 130, 1030, seed=seed) for seed in range(2))
    static = [a.clone() if a is first[5] else guarded(a) for a in first]
    static[2] = guarded(first[2], extra=1)  # packed in the graph
    ikbo.warmup()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out, preact = torch.ops.ikbo.concat_linear_fwd(*static, None, None, "silu")
        again = concat_linear(*static, None, None, "silu")
    for args in (first, second, first):
        for to, value in zip(static, args, strict=True):
            to.copy_(value)
        graph.replay()
        want, want_preact = torch.ops.ikbo.concat_linear_fwd(*args, None, None, "silu")
        assert torch.equal(out.nan_to_num(7), want.nan_to_num(7))
        assert torch.equal(again.nan_to_num(7), want.nan_to_num(7))
        assert torch.equal(preact, want_preact)


def test_fewer_sms_give_the_same_bits() -> None:
    args = inputs(torch.bfloat16, 3000, 5, 520, 136, 72)
    want = concat_linear(*args, None, None, "none").nan_to_num(7)
    for sms in (1, 7, 100):
        with ikbo.sm_limit(sms):
            out = concat_linear(*args, None, None, "none").nan_to_num(7)
        assert record()["config"]["candidates"]["grid"] <= sms
        assert torch.equal(out, want)


# ---- what is said of it ------------------------------------------------------------------------
def test_explain_shows_what_the_config_says() -> None:
    _host = pytest.importorskip("ikbo._host")
    args = inputs(torch.bfloat16, 2000, 1, 512, 512, 1024)
    shown = ikbo.explain("concat_linear", *args)
    properties = torch.cuda.get_device_properties(0)
    device = _host.DeviceLimits(
        properties.multi_processor_count, properties.L2_cache_size, 227 * 1024
    )
    config = json.loads(repr(_host.concat_linear_config(2000, 1, 512, 512, 1024, device)))
    assert shown == {"op": "concat_linear", "path": "sm90", "reason": "", "config": config}


@every_dtype
def test_backward_is_no_slow_path(dtype: torch.dtype) -> None:
    args = inputs(dtype, 60, 3, 64, 40, 24)
    leaves = [a.detach().clone().requires_grad_() for a in args[:5]]
    with ikbo.strict():
        concat_linear(*leaves, args[5], None, None, "silu").nan_to_num().sum().backward()
    assert all(leaf.grad is not None and bool(leaf.grad.isfinite().all()) for leaf in leaves)
    assert ikbo.counters()[("concat_linear_bwd", "library")] >= 1
