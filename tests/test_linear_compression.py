"""linear_compression and concat_linear: the definition, gradients, rows without a user, memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ikbo
from ikbo.testing import assert_matches_definition, definitions

from .cases import Maker
from .cases.linear import concat_linear_args, linear_compression_args

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FAMILIES = {
    "linear_compression": (linear_compression_args, definitions.linear_compression),
    "concat_linear": (concat_linear_args, definitions.concat_linear),
}
every_family = pytest.mark.parametrize("name", FAMILIES)
every_device = pytest.mark.parametrize("device", DEVICES)


def _call(name: str, args: tuple[Any, ...]) -> Tensor:
    return getattr(torch.ops.ikbo, name)(*args)


def _definition_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """(x_cand, ..., map, None, None, activation) without the grouping."""
    return (*args[:6], args[8])


def _wide(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def _check(name: str, args: tuple[Any, ...]) -> None:
    definition = FAMILIES[name][1]
    plain = definition(*_definition_args(args))
    exact = definition(*_definition_args(_wide(args)))
    if args[0].dtype == torch.float64:
        torch.testing.assert_close(_call(name, args), exact, rtol=0, atol=1e-13, equal_nan=True)
    else:
        assert_matches_definition(_call(name, args), exact, plain)


@every_device
@every_family
@pytest.mark.parametrize("activation", definitions.ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_matches_definition(name: str, dtype: torch.dtype, activation: str, device: str) -> None:
    make = FAMILIES[name][0]
    _check(name, make(device, dtype, B=37, U=5, M=33, N=24, Ku=40, Kc=24, activation=activation))


@every_family
@settings(max_examples=60, deadline=None)
@given(
    B=st.sampled_from([0, 1, 2, 7, 64]), U=st.sampled_from([0, 1, 3, 64]),
    M=st.sampled_from([0, 1, 8, 17]), N=st.sampled_from([0, 1, 8, 13]),
    Ku=st.sampled_from([0, 1, 9]), Kc=st.sampled_from([0, 1, 8]), bias=st.booleans(),
)  # fmt: skip
def test_any_sizes(name: str, **sizes: Any) -> None:
    args = FAMILIES[name][0]("cpu", torch.float32, **sizes)
    _check(name, args)
    args = tuple(a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a
                 for a in args)  # fmt: skip
    _call(name, args).sum().backward()
    for a in args:
        if isinstance(a, Tensor) and a.requires_grad and a.grad is not None:
            assert a.grad.shape == a.shape and bool(torch.isfinite(a.grad).all())


@every_device
@every_family
@pytest.mark.parametrize("activation", definitions.ACTIVATIONS)
def test_gradcheck(name: str, activation: str, device: str) -> None:
    args = FAMILIES[name][0](device, torch.float64, B=5, U=3, M=3, N=2, Ku=3, Kc=2,
                             activation=activation)  # fmt: skip
    inputs = [a.requires_grad_() for a in args[:5]]
    assert torch.autograd.gradcheck(lambda *x: _call(name, (*x, *args[5:])), inputs)
    x_cand, x_user, w_cand, w_user, bias = inputs
    part = (w_user @ x_user if x_user.dim() == 3 else x_user @ w_user.T).detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *x: _call(f"{name}_add", (*x, *args[5:])), (x_cand, w_cand, part, bias)
    )


@every_device
@every_family
def test_gradients_match_the_definition(name: str, device: str) -> None:
    make, definition = FAMILIES[name]
    grads: dict[str, list[Tensor]] = {}
    for kind, dtype in (("ours", torch.bfloat16), ("plain", torch.bfloat16), ("exact", None)):
        args = make(device, torch.bfloat16, B=40, U=4, M=16, N=8, Ku=24, Kc=16, activation="gelu")
        args = args if dtype else _wide(args)
        inputs = [a.detach().requires_grad_() for a in args[:5]]
        call = (*inputs, *args[5:])
        out = _call(name, call) if kind == "ours" else definition(*_definition_args(call))
        weight = Maker(device, torch.float64, seed=1)(*out.shape).to(out.dtype)
        (out * weight).sum().backward()
        grads[kind] = [x.grad for x in inputs if x.grad is not None]
    for ours, exact, plain in zip(grads["ours"], grads["exact"], grads["plain"], strict=True):
        assert_matches_definition(ours, exact, plain)


@every_device
@every_family
def test_rows_without_a_user(name: str, device: str) -> None:
    """-1 is zero and any other stray value NaN; what those rows hold reaches nobody's gradient."""
    args = list(FAMILIES[name][0](device, torch.float32, B=6, U=2, rows_without_user=False))
    users = torch.tensor([0, -1, 1, 2, -7, 2**31 - 1], dtype=torch.int32, device=device)
    args[0][[1, 3, 4, 5]] = float("nan")
    args[5] = users
    inputs = [a.requires_grad_() for a in args[:5]]
    out = _call(name, tuple(args))
    assert bool((out[1] == 0).all()) and bool(out[3:].isnan().all())
    assert bool(out[[0, 2]].isfinite().all())
    out[[0, 2]].sum().backward()
    for x in inputs:
        assert bool(x.grad.isfinite().all())
    assert bool((inputs[0].grad[[1, 3, 4, 5]] == 0).all())


@every_device
@every_family
def test_wide_indices_are_not_wrapped_into_range(name: str, device: str) -> None:
    args = list(FAMILIES[name][0](device, torch.float32, B=3, U=2, rows_without_user=False))
    args[5] = torch.tensor([2**32, 1, -1], dtype=torch.int64, device=device)
    out = _call(name, tuple(args))
    assert bool(out[0].isnan().all()) and bool(out[1].isfinite().all())
    assert bool((out[2] == 0).all())


@every_device
@every_family
def test_nan_and_inf_stay_where_they_came_from(name: str, device: str) -> None:
    args = FAMILIES[name][0](device, torch.float32, B=6, U=3, rows_without_user=False)
    args[5].copy_(torch.tensor([0, 1, 2, 0, 1, 2]))
    clean = _call(name, args)
    args[0][3] = float("nan")
    args[1][1] = float("inf")
    dirty = _call(name, args)
    same = [0, 2, 5]
    assert torch.equal(dirty[same], clean[same])
    assert not bool(dirty[3].isfinite().any()) and not bool(dirty[[1, 4]].isfinite().any())


@every_device
@every_family
def test_grouping_arguments_change_nothing(name: str, device: str) -> None:
    for users in ([0, 0, 1, 2, 2, -1, -1], [2, -1, 0, 2, 1, 0, -1]):
        grads = []
        m = ikbo.candidate_map(users, n_users=3, device=device)
        grouped = users == sorted(users, key=lambda u: u % 4)
        groupings = [(None, None), (m.user_offsets, m.order)]
        for offsets, order in groupings + ([(m.user_offsets, None)] if grouped else []):
            args = list(FAMILIES[name][0](device, torch.float32, B=7, U=3, activation="silu"))
            args[5:8] = [m.cand_to_user, offsets, order]
            inputs = [a.requires_grad_() for a in args[:5]]
            _call(name, tuple(args)).square().sum().backward()
            grads.append([x.grad for x in inputs])
        for other in grads[1:]:
            assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


@every_family
def test_strided_and_expanded_operands(name: str) -> None:
    args = FAMILIES[name][0]("cpu", torch.float32, B=8, U=3, M=6, N=5, Ku=7, Kc=9)
    want = _call(name, args)
    strided = tuple(
        torch.stack([a, a + 1], dim=-1)[..., 0] if isinstance(a, Tensor) else a for a in args
    )
    torch.testing.assert_close(_call(name, strided), want)
    inputs = [a.detach().requires_grad_() for a in args[:5]]
    _call(name, (*inputs, *args[5:])).sum().backward()  # an expanded gradient
    dense = [a.detach().clone().requires_grad_() for a in args[:5]]
    out = _call(name, (*dense, *args[5:]))
    out.backward(torch.ones_like(out))
    for a, b in zip(inputs, dense, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@every_family
def test_no_copy_of_the_users_per_candidate(name: str) -> None:
    """Peak memory stays far below one broadcast of the user side."""
    sizes = {"B": 2048, "U": 4, "M": 4, "Ku": 2048, "Kc": 8, "N": 4}
    if name == "concat_linear":
        sizes["N"] = 1
    args = FAMILIES[name][0]("cpu", torch.float32, **sizes, rows_without_user=False)
    out_bytes = _call(name, args).numel() * 4
    broadcast = args[1][0].numel() * sizes["B"] * 4
    with torch.profiler.profile(profile_memory=True) as profile:
        _call(name, args)
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert 0 < peak <= 4 * out_bytes + 2**20 < broadcast / 8


@every_family
def test_training_steps_leave_no_memory_behind(name: str) -> None:
    args = FAMILIES[name][0]("cpu", torch.float32, B=512, U=3)
    inputs = [a.requires_grad_() for a in args[:5]]

    def step() -> None:
        torch.autograd.grad(_call(name, (*inputs, *args[5:])).sum(), inputs)

    step()
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    assert sum(event.nbytes() for event in events if event.name() == "[memory]") == 0


@every_family
def test_messages_say_what_was_expected(name: str) -> None:
    args = list(FAMILIES[name][0]("cpu", torch.float32))
    for i, wrong, message in (
        (0, args[0][..., None], "expected x_cand of shape|expected e_cand of shape"),
        (2, args[2].T.contiguous(), r"expected w_cand.size\(1\)"),
        (3, args[3].double(), "expected w_user in the dtype of"),
        (4, args[4][:1], r"expected bias.size\(0\)"),
        (5, args[5].float(), "expected cand_to_user in int32 or int64, got float32"),
        (5, args[5][:2], r"expected cand_to_user of shape \[B\]"),
        (7, args[5], "expected user_offsets beside order"),
        (8, "tanh", "expected activation to be none, relu"),
    ):
        changed = [*args[:i], wrong, *args[i + 1 :]]
        with pytest.raises(RuntimeError, match=f"ikbo.{name}: ({message})"):
            _call(name, tuple(changed))


@every_family
def test_second_derivatives_are_refused(name: str) -> None:
    args = FAMILIES[name][0]("cpu", torch.float32)
    x = args[0].requires_grad_()
    (grad,) = torch.autograd.grad(_call(name, args).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="only first derivatives exist"):
        grad.sum().backward()


@every_family
@pytest.mark.parametrize("region", [torch.bfloat16, torch.float16])
def test_autocast(name: str, region: torch.dtype) -> None:
    args = FAMILIES[name][0]("cpu", torch.float32)
    with torch.autocast("cpu", region):
        assert _call(name, args).dtype == region
        weight = args[2].requires_grad_()
        _call(name, args).float().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_python_functions_take_maps_and_out() -> None:
    for name, size in itertools.product(FAMILIES, [5]):
        args = FAMILIES[name][0]("cpu", torch.float32, B=size, rows_without_user=False)
        m = ikbo.candidate_map(args[5], n_users=3)
        want = _call(name, args)
        function = getattr(ikbo, name)
        assert torch.equal(function(*args[:5], m), want)
        out = torch.empty_like(want)
        assert function(*args[:5], m, out=out) is out and torch.equal(out, want)


def _train(
    name: str, args: tuple[Any, ...], recompute: bool, *, compile: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """The result and the gradients; and of what the forward kept, all in the result's shape."""
    function = getattr(ikbo, name)
    *floating, users = _join_inputs(name, args)

    def forward(*floating: Tensor) -> Tensor:
        return function(*floating, users, args[8], recompute=recompute)

    if compile:
        torch._dynamo.reset()
        forward = torch.compile(forward, fullgraph=True, backend="aot_eager")
    inputs = [x.detach().requires_grad_() for x in floating]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = forward(*inputs)
    grads = torch.autograd.grad(out.float().square().sum(), inputs)
    return [out.detach(), *grads], [t for t in kept if t.shape == out.shape]


def _join_inputs(name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The tensors among NAME's arguments; of NAME_add, made from those of NAME."""
    if not name.endswith("_add"):
        return args[:6]
    x_cand, x_user, w_cand, w_user, bias, users = args[:6]
    part = w_user @ x_user if x_user.dim() == 3 else x_user @ w_user.T
    return x_cand, w_cand, part, bias, users


def _check_recompute(name: str, activation: str, device: str, *, compile: bool = False) -> None:
    make = FAMILIES[name.removesuffix("_add")][0]
    args = make(device, torch.bfloat16, activation=activation)
    fwd = getattr(torch.ops.ikbo, f"{name}_fwd")
    out, preact = fwd(*_join_inputs(name, args), None, None, activation)
    keeps_out = activation in ("relu", "sigmoid")
    needed = [out] if keeps_out else [preact] if activation != "none" else []
    plain, kept = _train(name, args, False, compile=compile)
    assert _equal(kept, needed)
    ours, kept = _train(name, args, True, compile=compile)
    assert _equal(kept, needed if keeps_out else [])
    assert _equal(ours, plain)


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


every_join = pytest.mark.parametrize("name", [f + end for f in FAMILIES for end in ("", "_add")])


@every_device
@every_join
@pytest.mark.parametrize("activation", definitions.ACTIVATIONS)
def test_recompute_keeps_no_preactivation(name: str, activation: str, device: str) -> None:
    _check_recompute(name, activation, device)


@every_join
@pytest.mark.parametrize("activation", definitions.ACTIVATIONS)
def test_recompute_keeps_no_preactivation_when_compiled(name: str, activation: str) -> None:
    _check_recompute(name, activation, "cpu", compile=True)


@pytest.mark.gpu
def test_recompute_keeps_no_preactivation_when_compiled_for_a_gpu() -> None:
    _check_recompute("linear_compression", "silu", "cuda", compile=True)


@every_family
def test_recompute_under_autocast_and_in_inference(name: str) -> None:
    args = FAMILIES[name][0]("cpu", torch.float32, activation="silu")
    with torch.autocast("cpu", torch.bfloat16):
        plain, ours = (_train(name, args, recompute)[0] for recompute in (False, True))
    assert _equal(ours, plain)
    function, want = getattr(ikbo, name), _call(name, args)
    assert torch.equal(function(*args[:6], "silu", recompute=True), want)
    out = torch.empty_like(want)
    assert torch.equal(function(*args[:6], "silu", out=out, recompute=True), want)


@pytest.mark.gpu_slow
def test_more_than_2_to_the_31_elements() -> None:
    B, Kc, N, M = 9700, 866, 256, 3
    e_cand = torch.empty(B, Kc, N, dtype=torch.bfloat16, device="cuda").normal_()
    assert e_cand.numel() > 2**31
    t = Maker("cuda", torch.bfloat16)
    e_user, w_cand, w_user = t(2, 8, N), t(M, Kc, scale=0.03), t(M, 8, scale=0.03)
    users = t.map(B, 2, rows_without_user=False)
    out = torch.ops.ikbo.linear_compression(e_cand, e_user, w_cand, w_user, None, users)
    for rows in (slice(0, 3), slice(B - 3, B)):
        args = (e_cand[rows], e_user, w_cand, w_user, None, users[rows])
        exact = definitions.linear_compression(*_wide(args))
        assert_matches_definition(out[rows], exact, definitions.linear_compression(*args))
