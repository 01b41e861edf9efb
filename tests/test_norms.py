"""The norms: definition, torch's own, gradients of every order, independence of the row count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ikbo
from ikbo.testing import assert_matches_definition, definitions

from .cases import Maker
from .cases.norms import head_norm_args, norm_args, schema_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NORMS = ["rms_norm", "layer_norm"]
ADD_NORMS = ["add_rms_norm", "add_layer_norm"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
every_device = pytest.mark.parametrize("device", DEVICES)
every_kind = pytest.mark.parametrize("name", NORMS + ADD_NORMS)
every_plain_kind = pytest.mark.parametrize("name", NORMS)
every_add_kind = pytest.mark.parametrize("name", ADD_NORMS)
parameters = pytest.mark.parametrize(
    ("weight", "bias"), [(True, True), (True, False), (False, True), (False, False)]
)

Args = tuple[Any, ...]


def _call(name: str, *args: Any) -> tuple[Tensor, ...]:
    results = getattr(torch.ops.ikbo, name)(*args)
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _define(name: str, *args: Any) -> tuple[Tensor, ...]:
    results = getattr(definitions, name)(*args)
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _args(name: str, device: str, dtype: torch.dtype, **kwargs: Any) -> Args:
    if name.startswith("head_norm"):
        return head_norm_args(device, dtype, **kwargs)
    return norm_args(name, device, dtype, **kwargs)


def _wide(args: Args) -> Args:
    """The same in float64, result dtypes included."""

    def wide(a: Any) -> Any:
        if isinstance(a, torch.dtype):
            return torch.float64
        return a.double() if isinstance(a, Tensor) else a

    return tuple(wide(a) for a in args)


def _tensors(args: Args) -> list[Tensor]:
    return [a for a in args if isinstance(a, Tensor)]


def _with_tensors(args: Args, tensors: Any) -> Args:
    left = iter(tensors)
    return tuple(next(left) if isinstance(a, Tensor) else a for a in args)


def _assert_close(actual: Tensor, exact: Tensor, plain: Tensor, *, multiple: float = 2.0) -> None:
    """16-bit results must be one rounding away; in float32 a multiple of plain PyTorch's error."""
    if actual.dtype is torch.float64:
        torch.testing.assert_close(actual, exact)
    else:
        rounding_only = actual.dtype in (torch.bfloat16, torch.float16)
        reference = None if rounding_only else plain
        assert_matches_definition(actual, exact, reference, multiple=multiple)


def _check(name: str, args: Args) -> None:
    results, exact, plain = _call(name, *args), _define(name, *_wide(args)), _define(name, *args)
    for r, e, p in zip(results, exact, plain, strict=True):
        assert r.dtype == p.dtype
        _assert_close(r, e, p)


# ---- values --------------------------------------------------------------------------------------


@every_device
@every_kind
@parameters
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_definition(
    name: str, dtype: torch.dtype, weight: bool, bias: bool, device: str
) -> None:
    _check(name, _args(name, device, dtype, sizes=(7, 3, 97), weight=weight, bias=bias))
    _check(name, _args(name, device, dtype, sizes=(7, 5, 24), ndim=2, weight=weight, bias=bias))


@every_device
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_norm_matches_definition(dtype: torch.dtype, device: str) -> None:
    for fused in (False, True):
        args = _args("head_norm", device, dtype, sizes=(3, 5, 4, 64), fused=fused,
                     weight_offset=0.5)  # fmt: skip
        _check("head_norm", args)
        x, weight, eps, offset = args
        for h in range(4):
            alone = torch.ops.ikbo.rms_norm(x[:, :, h], weight[h], None, eps, offset)
            assert torch.equal(alone, _call("head_norm", *args)[0][:, :, h])


@every_device
@every_plain_kind
@pytest.mark.parametrize("shape", [(8,), (1, 257), (5, 769), (2, 3, 4, 5), (5, 4096)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_torch(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], device: str
) -> None:
    t = Maker(device, dtype)
    for ndim in range(1, len(shape) + 1):
        x, weight, bias = t(*shape), t(*shape[-ndim:]), t(*shape[-ndim:])
        size = shape[-ndim:]
        if name == "rms_norm":
            got = ikbo.rms_norm(x, weight, eps=1e-6)
            plain = F.rms_norm(x, size, weight, 1e-6)
            exact = F.rms_norm(x.double(), size, weight.double(), 1e-6)
        else:
            got = ikbo.layer_norm(x, weight, bias)
            plain = F.layer_norm(x, size, weight, bias)
            exact = F.layer_norm(x.double(), size, weight.double(), bias.double())
        # Of one row it is luck whether plain PyTorch's largest error is a third or two of a unit.
        _assert_close(got, exact, plain, multiple=3.0)


@every_kind
@settings(max_examples=60, deadline=None)
@given(
    rows=st.sampled_from([(), (0,), (1,), (7,), (2, 3), (0, 4)]),
    columns=st.sampled_from([0, 1, 8, 13]),
    dtype=st.sampled_from(DTYPES), weight=st.sampled_from([False, *DTYPES]),
    bias=st.sampled_from([False, *DTYPES]), out_dtype=st.sampled_from([None, *DTYPES]),
    ndim=st.sampled_from([1, 2]), offset=st.booleans(),
)  # fmt: skip
def test_any_sizes_and_dtypes(
    name: str, rows: tuple[int, ...], columns: int, dtype: torch.dtype, weight: Any, bias: Any,
    out_dtype: Any, ndim: int, offset: bool,
) -> None:  # fmt: skip
    args = norm_args(
        name, "cpu", dtype, sizes=(*rows, *(3,) * (ndim - 1), columns), ndim=ndim, weight=weight,
        bias=bias, out_dtype=out_dtype, weight_offset=1.0 if offset and weight else 0.0,
    )  # fmt: skip
    # Parameters in float64 beside a narrower x are computed with in float32.
    exact = _define(name, *_wide(args))
    for result, want in zip(_call(name, *args), exact, strict=True):
        assert result.shape == want.shape
        step = torch.finfo(result.dtype).eps
        computed = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
        torch.testing.assert_close(result.double(), want, rtol=step + 50 * computed,
                                   atol=step * 1e-2 + 50 * computed, equal_nan=True)  # fmt: skip
    inputs = [t.requires_grad_() for t in _tensors(args)]
    sum(r.double().sum() for r in _call(name, *_with_tensors(args, inputs))).backward()
    for t in inputs:
        assert t.grad is not None and t.grad.shape == t.shape and t.grad.dtype == t.dtype


@every_device
@pytest.mark.parametrize("name", [*NORMS, *ADD_NORMS, "head_norm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics(name: str, dtype: torch.dtype, device: str) -> None:
    args = _args(name, device, dtype, sizes=(3, 4, 33))
    x = (args[0].double() + args[1].double()) if name.startswith("add_") else args[0].double()
    want = []
    if "layer" in name:
        want.append(x.mean(-1))
    want.append(
        (x.var(-1, correction=0) if "layer" in name else x.square().mean(-1)).add(1e-5).rsqrt()
    )
    got = _call(f"{name}_fwd", *args)[-len(want) :]
    for statistic, exact in zip(got, want, strict=True):
        assert statistic.dtype == (dtype if dtype is torch.float64 else torch.float32)
        torch.testing.assert_close(statistic, exact.to(statistic.dtype))


@every_device
@every_add_kind
def test_residual_is_normalised_unrounded(name: str, device: str) -> None:
    """The sum keeps what residual_out loses; residual_out is in residual's dtype or as asked."""
    t = Maker(device, torch.bfloat16)
    x, residual = t(9, 64), t(9, 64, scale=300.0)
    _check(name, (x, residual))
    y, residual_out = _call(name, x, residual)
    assert torch.equal(residual_out, (x.float() + residual.float()).bfloat16())
    rounded_first = _call(name.removeprefix("add_"), residual_out)[0]
    assert not torch.equal(y, rounded_first)
    wide = _call(name, x, residual.float())[1]
    assert wide.dtype is torch.float32 and torch.equal(wide, x.float() + residual.float())
    narrow = _call(name, x, residual, None, None, 1e-5, 0.0, torch.float32, torch.float16)
    assert [r.dtype for r in narrow] == [torch.float32, torch.float16]


@every_device
@every_plain_kind
def test_squares_that_overflow_behave_as_in_torch(name: str, device: str) -> None:
    x = Maker(device, torch.float32)(4, 33)
    x[1] *= 1e30
    x[2, 5] = float("inf")
    if name == "rms_norm":
        got, want = ikbo.rms_norm(x), F.rms_norm(x, (33,), eps=1e-6)
    else:
        got, want = ikbo.layer_norm(x), F.layer_norm(x, (33,))
    # What an infinity does to the rest of its row differs between torch's own devices.
    finite = [0, 1, 3]
    torch.testing.assert_close(got[finite], want[finite])
    assert bool((want[1] == 0).all()) and bool(got[2, 5].isnan())


@every_device
def test_layer_norm_with_a_mean_far_above_the_deviation(device: str) -> None:
    x = Maker(device, torch.float32)(16, 1000) + 1e4
    exact, plain = F.layer_norm(x.double(), (1000,)), F.layer_norm(x, (1000,))
    assert_matches_definition(ikbo.layer_norm(x), exact, plain)
    one_pass = x.square().mean(-1) - x.mean(-1).square()
    assert bool(((one_pass - 1).abs() > 1).any())  # what the two passes avoid


@every_device
@every_plain_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros(name: str, dtype: torch.dtype, device: str) -> None:
    x = torch.zeros(3, 16, dtype=dtype, device=device)
    for eps in (1e-12, 1e-6):  # 1e-12 is zero in float16
        assert bool((_call(name, x, None, None, eps)[0] == 0).all())
    assert bool(_call(name, x, None, None, 0.0)[0].isnan().all())


# ---- one row knows nothing of the others ---------------------------------------------------------


def _forward_and_grad(name: str, args: Args, grad_y: Tensor) -> list[Tensor]:
    x = args[0].detach().requires_grad_()
    results = _call(f"{name}_fwd", x, *args[1:])
    (grad,) = torch.autograd.grad(results[0], x, grad_y)
    return [*(r.detach() for r in results), grad]


def _rows(name: str, args: Args, rows: Any) -> Args:
    n = 2 if name.startswith("add_") else 1
    return (*(a[rows] for a in args[:n]), *args[n:])


@every_device
@pytest.mark.parametrize("name", [*NORMS, *ADD_NORMS, "head_norm"])
@pytest.mark.parametrize("columns", [1, 7, 64, 1000, 4099, 100_003])
def test_bits_do_not_depend_on_the_number_of_rows(name: str, columns: int, device: str) -> None:
    heads = (1,) if name == "head_norm" else ()
    args = _args(name, device, torch.float32, sizes=(45, *heads, columns))  # two slices of 100,003
    grad_y = Maker(device, torch.float32, seed=1)(45, *heads, columns)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        whole = _forward_and_grad(name, args, grad_y)
        for rows in (slice(3, 4), slice(44, 45), slice(0, 2), slice(10, 15), slice(1, 44)):
            part = _forward_and_grad(name, _rows(name, args, rows), grad_y[rows])
            for a, b in zip(part, whole, strict=True):
                assert torch.equal(a, b[rows])
    finally:
        torch.set_num_threads(threads)


@every_device
@pytest.mark.parametrize("name", [*NORMS, *ADD_NORMS, "head_norm"])
def test_nan_and_inf_stay_in_their_row(name: str, device: str) -> None:
    args = _args(name, device, torch.float32, sizes=(9, 3, 33))
    grad_y = Maker(device, torch.float32, seed=1)(9, 3, 33)
    clean = _forward_and_grad(name, args, grad_y)
    args[0][2, 1, 4], args[0][5, 0, 0] = float("nan"), float("inf")
    grad_y[7, 2, 3] = float("nan")
    dirty = _forward_and_grad(name, args, grad_y)
    touched = torch.zeros(9, 3, dtype=torch.bool, device=device)
    touched[[2, 5, 7], [1, 0, 2]] = True
    for a, b in zip(dirty, clean, strict=True):
        assert torch.equal(a[~touched], b[~touched])
    assert bool(dirty[0][2, 1].isnan().all()) and bool(
        dirty[-1][[2, 5, 7], [1, 0, 2]].isnan().any()
    )


# ---- gradients -----------------------------------------------------------------------------------


def _grads(function: Callable[..., Any], args: Args, weights: list[Tensor]) -> list[Tensor]:
    inputs = [t.detach().requires_grad_() for t in _tensors(args)]
    results = function(*_with_tensors(args, inputs))
    loss = sum((r * w.to(r.dtype)).double().sum() for r, w in zip(results, weights, strict=True))
    return list(torch.autograd.grad(loss, inputs))


@every_device
@pytest.mark.parametrize("name", [*NORMS, *ADD_NORMS, "head_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_match_the_definition(name: str, dtype: torch.dtype, device: str) -> None:
    mixed = {"weight": torch.float32, "weight_offset": 1.0}
    if name.startswith("add_"):
        mixed["residual"] = torch.float32  # so that residual_out, which backward reads, is exact
    for kwargs in ({}, mixed) if dtype is torch.float32 or "add" not in name else (mixed,):
        args = _args(name, device, dtype, sizes=(37, 3, 24), **kwargs)
        t = Maker(device, torch.float64, seed=1)
        # Representable in 16 bits, so that every side starts from the same gradient.
        weights = [t(37, 3, 24).to(dtype).double() for _ in _define(name, *args)]
        ours = _grads(lambda *a: _call(name, *a), args, weights)
        exact = _grads(lambda *a: _define(name, *a), _wide(args), weights)
        plain = _grads(lambda *a: _define(name, *a), args, weights)
        for tensor, o, e, p in zip(_tensors(args), ours, exact, plain, strict=True):
            assert o.dtype == tensor.dtype
            _assert_close(o, e, p)


@every_device
@every_add_kind
def test_backward_takes_residual_out_for_what_was_normalised(name: str, device: str) -> None:
    args = _args(name, device, torch.bfloat16, sizes=(37, 24))
    residual_out = _call(name, *args)[1]
    grad_y = Maker(device, torch.bfloat16, seed=1)(37, 24)
    got = _forward_and_grad(name, args, grad_y)[-1]
    x = residual_out.double().requires_grad_()
    y = _define(name.removeprefix("add_"), x, *_wide(args)[2:6])[0]
    # Not quite the same: rstd is that of the unrounded sum.
    torch.testing.assert_close(got.double(), torch.autograd.grad(y, x, grad_y.double())[0],
                               rtol=2**-7, atol=2**-8)  # fmt: skip


GRADCHECK = [
    ({}, "affine"),
    ({"bias": False, "weight_offset": 1.0}, "weight"),
    ({"weight": False}, "bias"),
    ({"weight": False, "bias": False}, "bare"),
    ({"sizes": (2, 2, 3), "ndim": 2}, "two_dims"),
]


@every_device
@pytest.mark.parametrize("name", [*NORMS, *ADD_NORMS])
@pytest.mark.parametrize("kwargs", [k for k, _ in GRADCHECK], ids=[i for _, i in GRADCHECK])
def test_first_and_second_derivatives(name: str, kwargs: dict[str, Any], device: str) -> None:
    args = _args(name, device, torch.float64, **{"sizes": (3, 5), **kwargs})
    inputs = [t.requires_grad_() for t in _tensors(args)]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return _call(name, *_with_tensors(args, tensors))

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@every_device
def test_first_and_second_derivatives_of_head_norm(device: str) -> None:
    x, weight, *scalars = _args("head_norm", device, torch.float64, sizes=(2, 2, 3))
    inputs = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda *t: _call("head_norm", *t, *scalars), inputs)
    assert torch.autograd.gradgradcheck(lambda *t: _call("head_norm", *t, *scalars), inputs)


@every_device
@every_add_kind
@pytest.mark.parametrize("used", [[0], [1], [0, 1]], ids=["y", "residual_out", "both"])
@pytest.mark.parametrize("needed", [[0], [1], [0, 1], [1, 2]], ids=["x", "residual", "xr", "rw"])
def test_derivatives_of_parts(name: str, used: list[int], needed: list[int], device: str) -> None:
    """Whichever results are used and whichever inputs need gradients."""
    args = _args(name, device, torch.float64, sizes=(3, 5))
    if used == [1]:  # it depends on no weight
        needed = [i for i in needed if i < 2]
    inputs = [args[i].requires_grad_() for i in needed]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        call = list(args)
        for i, t in zip(needed, tensors, strict=True):
            call[i] = t
        results = _call(name, *call)
        return tuple(results[i] for i in used)

    assert torch.autograd.gradcheck(function, inputs)
    if used != [1]:  # residual_out alone is linear: it has no second derivative
        assert torch.autograd.gradgradcheck(function, inputs)


@every_device
@pytest.mark.parametrize("name", [*NORMS, *ADD_NORMS, "head_norm"])
def test_third_derivatives_match_the_definition(name: str, device: str) -> None:
    """No silent zero: the second derivative's formula can be differentiated again."""
    args = _args(name, device, torch.float64, sizes=(2, 3, 5))
    thirds = []
    for function in (_call, _define):
        inputs = [t.detach().requires_grad_() for t in _tensors(args)]
        order = sum(r.pow(3).sum() for r in function(name, *_with_tensors(args, inputs)))
        for _ in range(3):
            grads = torch.autograd.grad(order, inputs, create_graph=True)
            order = sum(g.square().sum() for g in grads)
        thirds.append(grads)
    for got, want in zip(*thirds, strict=True):
        torch.testing.assert_close(got, want)


@every_device
@every_add_kind
def test_second_derivatives_with_two_dtypes(name: str, device: str) -> None:
    args = _args(name, device, torch.float64, sizes=(3, 5), residual=torch.float32,
                 weight=torch.float32)  # fmt: skip
    seconds = []
    for function in (_call, _define):
        inputs = [t.detach().requires_grad_() for t in _tensors(args)]
        call = _with_tensors(args, inputs)
        loss = sum(r.double().pow(3).sum() for r in function(name, *call))
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
        assert [g.dtype for g in grads] == [t.dtype for t in inputs]
        total = sum(g.double().square().sum() for g in grads)
        seconds.append(torch.autograd.grad(total, inputs))
    for got, want in zip(*seconds, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@every_device
@every_add_kind
def test_gradients_of_one_dtype_are_one_tensor(name: str, device: str) -> None:
    """residual's gradient is x's bit for bit, and only computed again for another dtype."""
    args = _args(name, device, torch.bfloat16, sizes=(5, 24))
    y, residual_out, *statistics = _call(f"{name}_fwd", *args)
    bwd = getattr(torch.ops.ikbo, f"{name}_bwd")
    call = (y, residual_out, residual_out, args[2], args[3], *statistics, 0.0)
    one = bwd(*call, torch.bfloat16, torch.bfloat16, 1, 0b1111)
    assert one[0].shape == y.shape and one[1].numel() == 0
    two = bwd(*call, torch.bfloat16, torch.float32, 1, 0b1111)
    assert two[1].dtype is torch.float32 and torch.equal(two[1].bfloat16(), one[0])
    assert torch.equal(two[0], one[0])
    none = bwd(*call, torch.bfloat16, torch.float32, 1, 0)
    assert [g.numel() for g in none] == [0] * 4
    x, residual = (a.requires_grad_() for a in args[:2])
    _call(name, x, residual, *args[2:])[0].float().sum().backward()
    assert torch.equal(x.grad, residual.grad)


@every_device
@pytest.mark.parametrize("name", [*NORMS, *ADD_NORMS, "head_norm"])
def test_backward_gives_the_same_bits_twice(name: str, device: str) -> None:
    args = _args(name, device, torch.bfloat16, sizes=(301, 2, 40))
    weights = [Maker(device, torch.float64, seed=1)(301, 2, 40)] * len(_call(name, *args))
    first, second = (_grads(lambda *a: _call(name, *a), args, weights) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- layout --------------------------------------------------------------------------------------


@every_device
@pytest.mark.parametrize("name", [*NORMS, *ADD_NORMS, "head_norm"])
def test_strided_and_expanded_operands(name: str, device: str) -> None:
    args = _args(name, device, torch.float32, sizes=(4, 6, 10))
    want = _call(name, *args)
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "every second": lambda a: torch.stack([a, a + 1], dim=-1)[..., 0],
        "misaligned": lambda a: torch.cat([a.new_zeros(1), a.flatten()])[1:].view(a.shape),
        "transposed": lambda a: a.transpose(0, -1).contiguous().transpose(0, -1),
        "padded rows": lambda a: F.pad(a, (0, 3))[..., : a.shape[-1]],
    }
    for layout in layouts.values():
        got = _call(name, *_with_tensors(args, [layout(a) for a in _tensors(args)]))
        assert all(torch.equal(g, w) and g.is_contiguous() for g, w in zip(got, want, strict=True))
    x = args[0][:1].expand(4, 6, 10)
    repeated = _call(name, x, *args[1:])
    dense = _call(name, x.contiguous(), *args[1:])
    assert all(torch.equal(a, b) for a, b in zip(repeated, dense, strict=True))


@every_device
@pytest.mark.parametrize("name", [*NORMS, *ADD_NORMS, "head_norm"])
def test_expanded_gradients(name: str, device: str) -> None:
    args = _args(name, device, torch.float32, sizes=(4, 6, 10))
    for shape in ((1, 1, 1), (4, 1, 1), (1, 1, 10)):
        ones = Maker(device, torch.float32, seed=1)(*shape).expand(4, 6, 10)
        expanded = _forward_and_grad(name, args, ones)[-1]
        assert torch.equal(expanded, _forward_and_grad(name, args, ones.contiguous())[-1])


@every_device
@every_plain_kind
def test_out(name: str, device: str) -> None:
    args = _args(name, device, torch.bfloat16, sizes=(4, 6, 10))
    want = _call(name, *args)[0]
    function = getattr(ikbo, name)
    strided = torch.zeros(4, 6, 20, dtype=torch.bfloat16, device=device)[..., ::2]
    assert function(*args, out=strided) is strided and torch.equal(strided, want)
    in_place = args[0].clone()
    function(in_place, *args[1:], out=in_place)
    assert torch.equal(in_place, want)
    with pytest.raises(RuntimeError, match=f"ikbo.{name}: expected out in bfloat16, got float32"):
        function(*args, out=want.float())


@every_device
def test_empty_call_does_nothing_but_allocate(device: str) -> None:
    x, weight = torch.empty(0, 64, device=device), torch.ones(64, device=device)
    with torch.inference_mode(), torch.profiler.profile() as profile:
        torch.ops.ikbo.rms_norm(x, weight)
    names = {e.key for e in profile.key_averages()}
    allocation = {"aten::empty", "aten::empty_strided"}
    assert {n for n in names if "::" in n} - allocation == {"ikbo::rms_norm"}


# ---- the rest ------------------------------------------------------------------------------------


@every_kind
def test_autocast_keeps_the_dtype(name: str) -> None:
    args = _args(name, "cpu", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = _call(name, *args)
    for a, b in zip(got, _call(name, *args), strict=True):
        assert torch.equal(a, b)


def test_python_functions() -> None:
    for name in (*NORMS, *ADD_NORMS):
        args = norm_args(name, "cpu", torch.float32)
        results = getattr(ikbo, name)(*args)
        results = (results,) if isinstance(results, Tensor) else results
        assert all(torch.equal(a, b) for a, b in zip(results, _call(name, *args), strict=True))
        by_name = getattr(ikbo, name)(**dict(zip(schema_of(name), args, strict=True)))
        by_name = (by_name,) if isinstance(by_name, Tensor) else by_name
        assert all(torch.equal(a, b) for a, b in zip(results, by_name, strict=True))
    args = head_norm_args("cpu", torch.float32)
    assert torch.equal(ikbo.head_norm(*args), _call("head_norm", *args)[0])
    x = torch.randn(3, 16)
    torch.testing.assert_close(ikbo.layer_norm(x), F.layer_norm(x, (16,)))  # torch's default eps


@every_kind
def test_messages_say_what_was_expected(name: str) -> None:
    args = _args(name, "cpu", torch.float32, sizes=(5, 3, 16))
    places = {argument: i for i, argument in enumerate(schema_of(name))}
    w, x = args[places["weight"]], args[0]
    wrong: list[tuple[str, Any, str]] = [
        ("x", x.long(), "expected x in float16, bfloat16, float32 or float64, got int64"),
        ("weight", w[:8], r"expected weight in the shape of x's last dimensions, got weight \[8\]"),
        ("weight", w.int(), "expected weight in float16"),
        ("weight", x.new_ones(4, 5, 3, 16), "expected weight in the shape of x's"),
        ("weight", x.new_ones(()), "expected weight in the shape of x's"),
        ("bias", w[:8], "expected bias in the shape of x's last dimensions"),
        ("bias", x[0], r"expected bias in the shape of weight, got \[3, 16\] and \[16\]"),
        ("out_dtype", torch.int32, "expected out_dtype to be float16, bfloat16, float32 or"),
        ("normalized_ndim", 2, "expected normalized_ndim == 1, the dimensions of weight, got 2"),
    ]
    if name in ADD_NORMS:
        wrong += [
            ("residual", x[0], r"expected residual in the shape of x \[5, 3, 16\], got \[3, 16\]"),
            ("residual_dtype", torch.float8_e4m3fn, "expected residual_dtype to be float16"),
        ]
    for argument, value, message in wrong:
        changed = list(args)
        changed[places[argument]] = value
        with pytest.raises(RuntimeError, match=f"ikbo.{name}: {message}"):
            _call(name, *changed)
    bare = list(_args(name, "cpu", torch.float32, weight=False, bias=False))
    for argument, value, message in [
        ("weight_offset", 1.0, "expected a weight beside weight_offset = 1, got none"),
        ("normalized_ndim", 0, r"expected normalized_ndim between 1 and x.dim\(\) \(3\), got 0"),
        ("normalized_ndim", 4, "expected normalized_ndim between 1 and"),
    ]:
        changed = list(bare)
        changed[places[argument]] = value
        with pytest.raises(RuntimeError, match=f"ikbo.{name}: {message}"):
            _call(name, *changed)


def test_messages_of_head_norm_and_of_backwards() -> None:
    x, weight, *scalars = head_norm_args("cpu", torch.float32)
    for wrong, message in (
        ((x[0, 0, 0], weight), r"expected x of shape \[..., H, D\], got \[8\]"),
        ((x, weight[0]), r"expected weight of shape \[H, D\], got \[8\]"),
        ((x, weight[:1]), "expected weight in the shape of x's last dimensions"),
    ):
        with pytest.raises(RuntimeError, match=f"ikbo.head_norm: {message}"):
            _call("head_norm", *wrong, *scalars)
    args = norm_args("rms_norm", "cpu", torch.float32)
    y, rstd = _call("rms_norm_fwd", *args)
    for grad_y, statistic, message in (
        (y[0], rstd, "expected grad_y in the shape of x"),
        (y, rstd[0], "expected rstd in the shape of x without its normalised dimensions"),
        (y, rstd.double(), "expected rstd in float32, got float64"),
    ):
        with pytest.raises(RuntimeError, match=f"ikbo.rms_norm_bwd: {message}"):
            _call("rms_norm_bwd", grad_y, *args[:3], statistic, 0.0, 1, 7)
