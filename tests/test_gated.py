"""gated_linear, gated_mlp, linear_act: definition, gradients, weights in any strides, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ikbo
from ikbo.testing import assert_matches_definition, definitions

from .cases import Maker
from .cases.gated import gated_linear_args, gated_mlp_args, linear_act_args

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ARGUMENTS = {
    "gated_linear": gated_linear_args,
    "gated_mlp": gated_mlp_args,
    "linear_act": linear_act_args,
}
every_op = pytest.mark.parametrize("name", ARGUMENTS)
every_gated_op = pytest.mark.parametrize("name", ["gated_linear", "gated_mlp"])
every_device = pytest.mark.parametrize("device", DEVICES)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def _call(name: str, args: tuple[Any, ...]) -> Tensor:
    return getattr(torch.ops.ikbo, name)(*args)


def _wide(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.double() if isinstance(a, Tensor) else a for a in args)


def _leaves(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.detach().requires_grad_() if isinstance(a, Tensor) else a for a in args)


def _gradients(out: Tensor, inputs: tuple[Any, ...], grad: Tensor, **kwargs: Any) -> list[Tensor]:
    wanted = [a for a in inputs if isinstance(a, Tensor)]
    return list(torch.autograd.grad(out, wanted, grad, **kwargs))


def _assert_close(got: Tensor, exact: Tensor, plain: Tensor) -> None:
    if got.dtype == torch.float64:
        torch.testing.assert_close(got, exact)
    else:
        # fp32 plain is at times right to the last bit by luck; a few ulps are no defect.
        multiple = 4.0 if got.dtype == torch.float32 else 2.0
        assert_matches_definition(got, exact, plain, multiple=multiple)


def _check(name: str, args: tuple[Any, ...]) -> None:
    """The result and every gradient against the definition in float64."""
    definition = getattr(definitions, name)
    ours, plain, exact = _leaves(args), _leaves(args), _leaves(_wide(args))
    out, out_plain, out_exact = _call(name, ours), definition(*plain), definition(*exact)
    _assert_close(out, out_exact, out_plain)
    grad = Maker(out.device.type, torch.float64, seed=1)(*out.shape).to(out.dtype)
    grads = [
        _gradients(out, ours, grad),
        _gradients(out_exact, exact, grad.double()),
        _gradients(out_plain, plain, grad),
    ]
    for got, want, like_plain in zip(*grads, strict=True):
        _assert_close(got, want, like_plain)


@every_device
@every_op
@pytest.mark.parametrize("activation", definitions.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_definition(name: str, dtype: torch.dtype, activation: str, device: str) -> None:
    sizes = {"lead": (3, 13), "K": 40, "N": 37, "Nout": 29}
    _check(name, ARGUMENTS[name](device, dtype, activation=activation, **sizes))


@every_device
@every_op
@pytest.mark.parametrize("sizes", [(33, 64, 431, 65), (8, 192, 433, 24), (128, 20, 427, 256)])
def test_matches_definition_at_sizes_no_tile_divides(
    name: str, sizes: tuple[int, ...], device: str
) -> None:
    rows, K, N, Nout = sizes
    _check(name, ARGUMENTS[name](device, torch.bfloat16, lead=(rows,), K=K, N=N, Nout=Nout))


@every_op
@settings(max_examples=50, deadline=None)
@given(
    lead=st.sampled_from([(), (0,), (1,), (7,), (2, 3), (2, 0, 3), (1, 2, 1, 5)]),
    K=st.sampled_from([0, 1, 8, 13]), N=st.sampled_from([0, 1, 8, 17]),
    Nout=st.sampled_from([0, 1, 8]), b_gate=st.booleans(), b_up=st.booleans(),
    b_down=st.booleans(), activation=st.sampled_from(sorted(definitions.ACTIVATIONS)),
)  # fmt: skip
def test_any_sizes(name: str, **sizes: Any) -> None:
    _check(name, ARGUMENTS[name]("cpu", torch.float64, **sizes))


@every_device
def test_an_empty_product_still_adds_the_bias(device: str) -> None:
    x, w_gate, w_up, b_gate, b_up, w_down, b_down, _ = gated_mlp_args(device, torch.float32, K=0)
    hidden = (torch.relu(b_gate) * b_up).expand(7, 10)
    assert torch.equal(ikbo.gated_linear(x, w_gate, w_up, b_gate, b_up, "relu"), hidden)
    assert torch.equal(ikbo.linear_act(x, w_up, b_up, "relu"), torch.relu(b_up).expand(7, 10))
    empty = w_gate.new_empty(0, 5)
    out = ikbo.gated_mlp(x.new_ones(7, 5), empty, empty, None, None, w_down[:, :0], b_down)
    assert torch.equal(out, b_down.expand(7, 6))


@every_op
@pytest.mark.parametrize("activation", definitions.ACTIVATIONS)
def test_gradcheck(name: str, activation: str) -> None:
    sizes = {"lead": (2, 2), "K": 3, "N": 4, "Nout": 2}
    *inputs, activation = _leaves(
        ARGUMENTS[name]("cpu", torch.float64, activation=activation, **sizes)
    )
    assert torch.autograd.gradcheck(lambda *x: _call(name, (*x, activation)), inputs)


@every_device
@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_gradient_alone_has_the_same_bits(name: str, dtype: torch.dtype, device: str) -> None:
    """Whatever else is wanted; and a gradient not asked for is not there."""
    inputs = _leaves(ARGUMENTS[name](device, dtype, activation="gelu"))
    out = _call(name, inputs)
    together = _gradients(out, inputs, torch.ones_like(out))
    for i, expected in enumerate(together):
        alone = tuple(
            a.detach().requires_grad_(i == j) if isinstance(a, Tensor) else a
            for j, a in enumerate(inputs)
        )
        _call(name, alone).backward(torch.ones_like(out))
        assert torch.equal(alone[i].grad, expected)
        assert all(a.grad is None for j, a in enumerate(alone[:-1]) if j != i)


@every_device
@every_op
def test_unwanted_results_have_size_0(name: str, device: str) -> None:
    x, *rest = ARGUMENTS[name](device, torch.float32)
    out, *saved = getattr(torch.ops.ikbo, f"{name}_fwd")(x, *rest)
    weights = [w for w in rest if isinstance(w, Tensor) and w.dim() == 2]
    backward = getattr(torch.ops.ikbo, f"{name}_bwd")
    grads = backward(out, x, *weights, *saved, "silu", 0)
    assert all(g.numel() == 0 for g in grads)
    for bit in range(len(grads)):
        sizes = [g.numel() for g in backward(out, x, *weights, *saved, "silu", 1 << bit)]
        assert [i for i, size in enumerate(sizes) if size] == [bit]


def test_linear_act_saves_only_what_its_derivative_needs() -> None:
    x, w, b, _ = linear_act_args("cpu", torch.float32)
    for activation in definitions.ACTIVATIONS:
        out, preact = torch.ops.ikbo.linear_act_fwd(x, w, b, activation)
        needed = activation in ("relu2", "silu", "gelu", "gelu_tanh")
        assert preact.shape == (out.shape if needed else (0,))


@every_device
@every_gated_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_weights_equal_separate_ones(name: str, dtype: torch.dtype, device: str) -> None:
    """The halves of [gate; up] and of [up; gate] are views that are used as they are."""
    x, w_gate, w_up, b_gate, b_up, *rest = ARGUMENTS[name](device, dtype, lead=(33,), K=24, N=19)
    want = _call(name, (x, w_gate, w_up, b_gate, b_up, *rest))
    weight, bias = torch.cat([w_gate, w_up]), torch.cat([b_gate, b_up])
    assert torch.equal(_call(name, (x, *weight.chunk(2), *bias.chunk(2), *rest)), want)
    weight, bias = torch.cat([w_up, w_gate]), torch.cat([b_up, b_gate])
    gate_last = (weight[19:], weight[:19], bias[19:], bias[:19])
    assert torch.equal(_call(name, (x, *gate_last, *rest)), want)
    # Gradients go to both halves of one leaf.
    leaf = torch.cat([w_gate, w_up]).requires_grad_()
    _call(name, (x, *leaf.chunk(2), b_gate, b_up, *rest)).sum().backward()
    apart = _leaves((w_gate, w_up))
    _call(name, (x, *apart, b_gate, b_up, *rest)).sum().backward()
    assert torch.equal(leaf.grad, torch.cat([w.grad for w in apart]))


@every_device
@every_op
def test_strided_misaligned_and_expanded_operands(name: str, device: str) -> None:
    args = ARGUMENTS[name](device, torch.bfloat16, lead=(4, 9), K=20, N=12)
    want = _call(name, args)

    def misaligned(t: Tensor) -> Tensor:
        return torch.cat([t.new_full((1,), float("nan")), t.flatten()])[1:].view(t.shape)

    def row_stride_65(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(t, (0, 65 - t.shape[-1]), value=float("nan"))[
            ..., : t.shape[-1]
        ]

    def interleaved(t: Tensor) -> Tensor:
        return torch.stack([t, t + 1], dim=-1)[..., 0]

    def column_major(t: Tensor) -> Tensor:
        return t.mT.contiguous().mT if t.dim() > 1 else t

    for change in (misaligned, row_stride_65, interleaved, column_major):
        changed = tuple(change(a) if isinstance(a, Tensor) else a for a in args)
        torch.testing.assert_close(_call(name, changed), want, rtol=0.01, atol=0.01)
    x, w, *rest = args
    one_row = _call(name, (x[:1, :1], w, *rest))
    many = _call(name, (x[:1, :1].expand(4, 9, 20), w, *rest))
    torch.testing.assert_close(many, one_row.expand(many.shape), rtol=0.01, atol=0.01)
    wide = _wide(args)
    inputs = _leaves(wide)
    out = _call(name, inputs)
    dense = torch.ones_like(out)
    expanded = dense.new_ones(()).expand(out.shape)  # what .sum().backward() passes
    first = _gradients(out, inputs, expanded, retain_graph=True)
    for a, b in zip(first, _gradients(out, inputs, dense), strict=True):
        torch.testing.assert_close(a, b)


@every_device
@every_op
def test_backward_twice_gives_the_same_bits(name: str, device: str) -> None:
    inputs = _leaves(ARGUMENTS[name](device, torch.bfloat16, lead=(33,), K=24, N=19))
    before = [a.detach().clone() for a in inputs if isinstance(a, Tensor)]
    out = _call(name, inputs)
    grad = torch.ones_like(out)
    first = _gradients(out, inputs, grad, retain_graph=True)
    second = _gradients(out, inputs, grad, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    tensors = [a for a in inputs if isinstance(a, Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert bool((grad == 1).all())


@every_device
@pytest.mark.parametrize("quarter", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_quarter_of_the_columns_cannot_hide(
    dtype: torch.dtype, quarter: int, device: str
) -> None:
    """At a wide hidden size the right result passes, and one with a quarter misread does not."""
    args = gated_mlp_args(device, dtype, lead=(16,), K=64, N=2048, Nout=48)
    exact, plain = definitions.gated_mlp(*_wide(args)), definitions.gated_mlp(*args)
    assert_matches_definition(ikbo.gated_mlp(*args), exact, plain)
    columns = slice(quarter * 512, (quarter + 1) * 512)
    x, w_gate, w_up, b_gate, b_up, *rest = args
    for wrong in ("gate", "up", "bias"):
        changed = [w_gate.clone(), w_up.clone(), b_gate.clone(), b_up.clone()]
        if wrong == "bias":
            changed[2][columns] = 0
        else:
            changed[wrong == "up"][columns] = changed[wrong == "up"][columns].roll(1, 0)
        with pytest.raises(AssertionError, match="error"):
            assert_matches_definition(ikbo.gated_mlp(x, *changed, *rest), exact, plain)


@every_device
@every_op
def test_nan_stays_in_its_row_and_column(name: str, device: str) -> None:
    args = ARGUMENTS[name](device, torch.float32)
    clean = _call(name, args)
    x = args[0].clone()
    x[3, 5] = float("nan")
    dirty = _call(name, (x, *args[1:]))
    assert bool(dirty[3].isnan().all())
    rows = [0, 1, 2, 4, 5, 6]
    assert torch.equal(dirty[rows], clean[rows])
    if name != "gated_mlp":
        w = args[1].clone()
        w[2, 1] = float("inf")
        dirty = _call(name, (args[0], w, *args[2:]))
        columns = [i for i in range(10) if i != 2]
        assert torch.equal(dirty[:, columns], clean[:, columns])
        assert not torch.equal(dirty[:, 2], clean[:, 2])


@every_device
@every_op
def test_one_rounding_at_the_end(name: str, device: str) -> None:
    """gate * up, or act of a sum, from unrounded values: plain torch rounds each step."""
    one_and_a_bit = 1 + 2.0**-8  # halfway between two bfloat16 values; the sum has it exactly
    x = torch.tensor([[1.0, 2.0**-8]], dtype=torch.bfloat16, device=device)
    w = torch.ones(1, 2, dtype=torch.bfloat16, device=device)
    if name == "linear_act":
        got, want = ikbo.linear_act(x, w, None, "relu2"), one_and_a_bit**2
    elif name == "gated_linear":
        got, want = ikbo.gated_linear(x, w, w, activation="none"), one_and_a_bit**2
    else:  # the hidden tensor is rounded before it meets w_down
        got = ikbo.gated_mlp(x, w, w, None, None, 1.5 * w[:, :1], activation="none")
        want = 1.5 * float(torch.tensor(one_and_a_bit**2).bfloat16())
    assert float(got) == float(torch.tensor(want).bfloat16())
    assert name == "gated_mlp" or float(got) != 1.0  # what rounding the sum first gives


@every_op
def test_memory_is_bounded_by_the_workspace(name: str) -> None:
    """Beside its output, inference needs a workspace of about 64 MiB, not a hidden tensor."""
    rows, hidden = 24_000, 1024
    args = ARGUMENTS[name]("cpu", torch.bfloat16, lead=(rows,), K=8, N=hidden, Nout=8)
    out_bytes = _call(name, args).numel() * 2
    with torch.profiler.profile(profile_memory=True) as profile:
        _call(name, args)
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    hidden_bytes = rows * hidden * 4
    assert out_bytes <= peak <= out_bytes + 1.25 * 2**26 < out_bytes + hidden_bytes


@every_device
@every_op
def test_slices_join_without_a_seam(name: str, device: str) -> None:
    """More rows than one slice of the reference, and than 2^16 blocks of one row."""
    sizes = {"lead": (70_000,), "K": 3, "N": 130 if name == "linear_act" else 66, "Nout": 2}
    args = ARGUMENTS[name](device, torch.float32, **sizes)
    exact, plain = (getattr(definitions, name)(*a) for a in (_wide(args), args))
    assert_matches_definition(_call(name, args), exact, plain)
    ours, wide = _leaves(args), _leaves(_wide(args))
    grads = _gradients(_call(name, ours), ours, torch.ones_like(plain))
    wants = _gradients(getattr(definitions, name)(*wide), wide, torch.ones_like(exact))
    for got, want in zip(grads, wants, strict=True):
        # 70,000 terms: the error of a float32 sum, relative to the sum's typical size.
        rms = want.square().mean().sqrt()
        assert float((got.double() - want).abs().max() / rms) < 1e-4


@every_op
def test_messages_say_what_was_expected(name: str) -> None:
    args = ARGUMENTS[name]("cpu", torch.float32)
    first, bias = ("w", "b") if name == "linear_act" else ("w_gate", "b_gate")
    at_bias = 2 if name == "linear_act" else 3
    wrongs: list[tuple[int, Any, str]] = [
        (0, args[0][0, 0], r"expected x of shape \[..., K\], got \[\]"),
        (0, args[0].int(), "expected x in float16, bfloat16, float32 or float64, got int32"),
        (1, args[1][0], rf"expected {first} of shape \[out_features, in_features\], got \[12\]"),
        (1, args[1][:, 1:], rf"expected {first}.size\(1\) == x.size\(-1\) \(12\), got {first}"),
        (1, args[1].double(), rf"expected {first} in the dtype of x \(float32\), got float64"),
        (
            at_bias,
            args[at_bias][None],
            rf"expected {bias} of shape \[out_features\], got \[1, 10\]",
        ),
        (at_bias, args[at_bias][:1], rf"expected {bias}.size\(0\) == {first}.size\(0\) \(10\)"),
        (at_bias, args[at_bias].half(), f"expected {bias} in the dtype of x"),
        (-1, "swish", "expected activation to be none, relu"),
    ]
    if name != "linear_act":
        wrongs.append((2, args[2][1:], r"expected w_up.size\(0\) == w_gate.size\(0\) \(10\)"))
    if name == "gated_mlp":
        wrongs.append((5, args[5].T, r"expected w_down.size\(1\) == w_gate.size\(0\) \(10\)"))
        wrongs.append((6, args[6][1:], r"expected b_down.size\(0\) == w_down.size\(0\) \(6\)"))
    for i, wrong, message in wrongs:
        changed = list(args)
        changed[i] = wrong
        if i == 2 and name != "linear_act":
            changed[4] = None  # which would be named first
        with pytest.raises(RuntimeError, match=f"ikbo.{name}: {message}"):
            _call(name, tuple(changed))


@every_op
def test_second_derivatives_are_refused(name: str) -> None:
    args = _leaves(ARGUMENTS[name]("cpu", torch.float32))
    (grad,) = torch.autograd.grad(_call(name, args).square().sum(), args[0], create_graph=True)
    with pytest.raises(RuntimeError, match="only first derivatives exist"):
        grad.sum().backward()


@every_op
@pytest.mark.parametrize("region", [torch.bfloat16, torch.float16])
def test_autocast(name: str, region: torch.dtype) -> None:
    args = ARGUMENTS[name]("cpu", torch.float32)
    with torch.autocast("cpu", region):
        got = _call(name, args)
        weight = args[1].requires_grad_()
        _call(name, args).float().sum().backward()
    narrow = tuple(a.detach().to(region) if isinstance(a, Tensor) else a for a in args)
    assert torch.equal(got, _call(name, narrow)) and got.dtype == region
    assert weight.grad is not None and weight.grad.dtype == torch.float32


@every_device
@every_gated_op
def test_python_function_fills_out(name: str, device: str) -> None:
    args = ARGUMENTS[name](device, torch.float32, lead=(3, 4))
    function = getattr(ikbo, name)
    want = _call(name, args)
    assert torch.equal(function(*args), want)
    strided = torch.full((4, 3, 2 * want.shape[-1]), 7.0, device=device)
    for out in (torch.full_like(want, 7.0), strided.transpose(0, 1)[..., ::2]):
        assert function(*args, out=out) is out
        assert torch.equal(out, want)
    assert bool((strided[..., 1::2] == 7).all())


def test_defaults_are_swiglu() -> None:
    x, w_gate, w_up, _, _, w_down, _, _ = gated_mlp_args("cpu", torch.float64)
    hidden = torch.nn.functional.silu(x @ w_gate.T) * (x @ w_up.T)
    torch.testing.assert_close(ikbo.gated_linear(x, w_gate, w_up), hidden)
    torch.testing.assert_close(
        ikbo.gated_mlp(x, w_gate, w_up, None, None, w_down), hidden @ w_down.T
    )
    torch.testing.assert_close(ikbo.linear_act(x, w_gate), x @ w_gate.T)
