"""The norm kernels on a GPU: every way a row lies over threads, layouts, guards, row counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ikbo
from ikbo import _host
from ikbo.testing import assert_matches_definition, definitions

from .memory import peak_bytes

NAN = float("nan")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
GUARD = 64
# Every number of vectors a thread and of CTAs a row, rows that leave threads idle, odd ones.
COLUMNS = [1, 7, 8, 32, 64, 127, 128, 256, 257, 384, 576, 640, 769, 1000, 1024, 1280, 2048, 2560,
           4095, 4096, 6144, 8192, 16384, 16392, 65537, 131072, 262144, 262152]  # fmt: skip
FP16_COLUMNS = [100, 384, 1024, 4096, 20001]  # only its conversions differ from bf16's
WIDTHS = [(dtype, n) for dtype in (torch.bfloat16, torch.float32) for n in COLUMNS]
WIDTHS += [(torch.float16, n) for n in FP16_COLUMNS]
ROWS = [0, 7, 1000]  # a few, whose weights are loaded early; more
NORMS = ["rms_norm", "layer_norm"]
every_norm = pytest.mark.parametrize("name", NORMS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_width = pytest.mark.parametrize(("dtype", "columns"), WIDTHS)


@pytest.fixture(autouse=True)
def _kernels_only() -> Iterator[None]:
    torch.manual_seed(0)
    with ikbo.strict():
        yield


def randn(*sizes: int, dtype: torch.dtype = torch.bfloat16, shift: float = 0.5) -> Tensor:
    return (torch.randn(*sizes, device="cuda") + shift).to(dtype)


def guarded(tensor: Tensor, shift: int = 0) -> Tensor:
    """The same values with NaN around them, `shift` elements past an aligned address."""
    size = tensor.numel() + 2 * GUARD + shift
    flat = torch.full((size,), NAN, dtype=tensor.dtype, device="cuda")
    inner = flat[GUARD + shift : GUARD + shift + tensor.numel()].view(tensor.shape)
    return inner.copy_(tensor)


def forward(name: str, *args: Any) -> tuple[Tensor, ...]:
    return tuple(getattr(torch.ops.ikbo, f"{name}_fwd")(*args))


def define(name: str, *args: Any) -> tuple[Tensor, ...]:
    results = getattr(definitions, name)(*args)
    return (results,) if isinstance(results, Tensor) else tuple(results)


def rows_of(rows: int, columns: int) -> int:
    """Fewer rows where they are long: the test's time and memory."""
    return min(rows, max(9, 2**23 // columns))


def check_forward(name: str, args: list[Any]) -> None:
    """args: x, [residual,] weight, bias, eps, offset."""
    wide = [a.double() if isinstance(a, Tensor) else a for a in args]
    exact, plain = define(name, *wide), define(name, *args)
    results = forward(name, *args)
    for result, want, ours in zip(results[: len(exact)], exact, plain, strict=True):
        assert result.dtype == ours.dtype
        rounds = result.dtype is not torch.float32
        assert_matches_definition(result, want, None if rounds else ours, multiple=4.0)


def gradients(name: str, args: list[Any], grads: list[Tensor]) -> list[Tensor]:
    """Of the definition, by autograd."""
    leaves = [a.detach().requires_grad_() if isinstance(a, Tensor) else a for a in args]
    tensors = [a for a in leaves if isinstance(a, Tensor)]
    return list(torch.autograd.grad(define(name, *leaves), tensors, grads))


def backward(
    name: str, grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    *statistics: Tensor, offset: float = 0.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    op = getattr(torch.ops.ikbo, f"{name}_bwd")
    return tuple(op(grad, x, weight, bias, *statistics, offset, 1, 7))


def check_backward(
    name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, grad: Tensor,
    offset: float = 0.0,
) -> None:  # fmt: skip
    statistics = forward(name, x, weight, bias, 1e-5, offset)[1:]
    got = backward(name, grad, x, weight, bias, *statistics, offset=offset)
    args = [x, weight, bias, 1e-5, offset]
    exact = gradients(
        name, [a.double() if isinstance(a, Tensor) else a for a in args], [grad.double()]
    )
    plain = gradients(
        name, [a.float() if isinstance(a, Tensor) else a for a in args], [grad.float()]
    )
    wanted = [g for g, a in zip(got, [x, weight, bias], strict=True) if a is not None]
    for result, want, ours in zip(wanted, exact, plain, strict=True):
        assert result.shape == want.shape
        if result.numel() == 0:
            continue
        if grad.numel() == 0:
            assert (result == 0).all()
            continue
        largest = want.abs().max()
        error = (result.double() - want).abs().max()
        of_plain = (ours.double() - want).abs().max()
        step = torch.finfo(result.dtype).eps
        # Of a few columns little but cancellation is left; the last term is that of what is added.
        floor = 1e-6 * grad.double().abs().max() * statistics[-1].double().max().clamp_min(1)
        assert error <= 4 * of_plain + step * largest + floor, (result.shape, error, largest)


@pytest.mark.gpu
@every_norm
@every_width
def test_forward(name: str, dtype: torch.dtype, columns: int) -> None:
    weight, bias = randn(columns, dtype=dtype), randn(columns, dtype=torch.float32)
    for rows in sorted({rows_of(r, columns) for r in ROWS}):
        check_forward(name, [guarded(randn(rows, columns, dtype=dtype)), weight, bias, 1e-5, 1.0])
    check_forward(name, [randn(3, columns, dtype=dtype), None, None, 1e-5, 0.0])


@pytest.mark.gpu
@every_norm
@every_width
def test_backward(name: str, dtype: torch.dtype, columns: int) -> None:
    weight, bias = randn(columns, dtype=dtype), randn(columns, dtype=dtype)
    for rows in sorted({rows_of(r, columns) for r in ROWS}):
        x, grad = (guarded(randn(rows, columns, dtype=dtype)) for _ in range(2))
        check_backward(name, x, weight, bias, grad, 1.0)
    x, grad = randn(5, columns, dtype=dtype), randn(5, columns, dtype=dtype)
    check_backward(name, x, None, None, grad)
    check_backward(name, x, weight, None, grad)
    check_backward(name, x, None, bias, grad)


@pytest.mark.gpu
@every_norm
@pytest.mark.parametrize("columns", [127, 384, 1024, 4096, 65536])
@pytest.mark.parametrize(("x_dtype", "residual_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_residual(
    name: str, x_dtype: torch.dtype, residual_dtype: torch.dtype, columns: int
) -> None:
    op = f"add_{name}"
    rows = rows_of(133, columns)
    x, residual = randn(rows, columns, dtype=x_dtype), randn(rows, columns, dtype=residual_dtype)
    weight = randn(columns, dtype=torch.float32)
    check_forward(op, [x, residual, weight, None, 1e-5, 0.0])

    _, residual_out, *statistics = forward(op, x, residual, weight, None, 1e-5, 0.0)
    grad, grad_sum = randn(rows, columns, dtype=x_dtype), randn(rows, columns, dtype=residual_dtype)
    got = getattr(torch.ops.ikbo, f"{op}_bwd")(
        grad, grad_sum, residual_out, weight, None, *statistics, 0.0, x_dtype, residual_dtype, 1, 7
    )
    # What was normalised, as the backward sees it.
    args = [residual_out, torch.zeros_like(residual_out), weight, None, 1e-5, 0.0]
    wide = [a.double() if isinstance(a, Tensor) else a for a in args]
    want = gradients(op, wide, [grad.double(), grad_sum.double()])
    for result, exact in zip([got[0], got[1], got[2]], [want[0], want[1], want[2]], strict=True):
        if result.numel():
            # The statistics are those of the sum before it was rounded.
            loss = torch.finfo(residual_dtype).eps
            error = (result.double() - exact).abs().max()
            step = torch.finfo(result.dtype).eps
            assert error <= (4 * step + 4 * loss) * exact.abs().max()


@pytest.mark.gpu
@every_norm
@every_dtype
@pytest.mark.parametrize("columns", [8, 100, 257, 384, 640, 1000, 1152, 4095, 4096, 20001])
def test_layouts(name: str, dtype: torch.dtype, columns: int) -> None:
    """Misaligned bases, rows apart, results of the same bits."""
    rows = 37
    x, grad = randn(rows, columns, dtype=dtype), randn(rows, columns, dtype=dtype)
    weight, bias = randn(columns, dtype=dtype), randn(columns, dtype=dtype)
    apart = torch.full((rows, columns + 3), NAN, dtype=dtype, device="cuda")
    apart[:, :columns] = x
    tail = [weight, bias, 1e-5]
    y, *statistics = forward(name, x, *tail)
    grads = backward(name, grad, x, weight, bias, *statistics)
    for other in (guarded(x, 1), guarded(x, 3), apart[:, :columns]):
        same = forward(name, other, *tail)
        for a, b in zip((y, *statistics), same, strict=True):
            assert torch.equal(a, b)
        again = backward(name, guarded(grad, 1), other, weight, bias, *statistics)
        assert torch.equal(grads[0], again[0])
        # Of whole, aligned rows the sums over rows have another order.
        for a, b in zip(grads[1:], again[1:], strict=True):
            step = 2 * torch.finfo(dtype).eps + 1e-5
            assert (a - b).abs().max() <= step * a.abs().max()
    canary = torch.full((rows, columns + 7), 3.0, dtype=dtype, device="cuda")
    out = canary.view(-1)[5 : 5 + rows * columns].view(rows, columns)
    getattr(torch.ops.ikbo, name).out(x, *tail, out=out)
    assert torch.equal(out, y)
    assert (canary.view(-1)[:5] == 3).all() and (canary.view(-1)[5 + rows * columns :] == 3).all()


@pytest.mark.gpu
@every_norm
@every_dtype
@pytest.mark.parametrize("columns", [128, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 12288, 16384,
                                     65536, 131072, 262144])  # fmt: skip
def test_backward_of_whole_rows(name: str, dtype: torch.dtype, columns: int) -> None:
    """Gradients of x have the bits of the same rows at an odd address, which go through rings:
    with sums over rows apart and not, and whatever is wanted of them."""
    if dtype is torch.float32:
        columns //= 2
    weight, bias = randn(columns, dtype=dtype), randn(columns, dtype=dtype)
    for rows in sorted({rows_of(r, columns) for r in (1, 6, 127, 700, 2500)}):
        x, grad = (guarded(randn(rows, columns, dtype=dtype)) for _ in range(2))
        for w, b in ((weight, bias), (weight, None), (None, bias), (None, None)):
            check_backward(name, x, w, b, grad)
        statistics = forward(name, x, weight, bias)[1:]
        for w, offset in ((weight, 0.0), (None, 0.0), (weight, 1.0), (weight.float(), 1.0)):
            results = backward(name, grad, x, w, bias, *statistics, offset=offset)
            apart = (guarded(grad, 1), guarded(x, 1))
            odd = backward(name, *apart, w, bias, *statistics, offset=offset)
            assert torch.equal(results[0], odd[0])
            again = backward(name, grad, x, w, bias, *statistics, offset=offset)
            assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))


@pytest.mark.gpu
@every_norm
@pytest.mark.parametrize("columns", [1024, 2048, 4096, 6144, 16384, 32768, 65536, 262144])
def test_forward_of_much_more_than_l2_holds(name: str, columns: int) -> None:
    """As the backward."""
    rows = 2**26 // columns + 3
    x, weight, bias = randn(rows, columns), randn(columns), randn(columns)
    results = forward(name, x, weight, bias)
    last = slice(rows - 9, rows)
    for all_rows, few in zip(results, forward(name, x[last], weight, bias), strict=True):
        assert torch.equal(all_rows[last], few)
    total = torch.ops.ikbo.add_rms_norm(x, x, weight)[0]
    assert torch.equal(total[last], torch.ops.ikbo.add_rms_norm(x[last], x[last], weight)[0])


@pytest.mark.gpu
@every_norm
@pytest.mark.parametrize("columns", [8192, 65536, 262144])
def test_backward_of_much_more_than_l2_holds(name: str, columns: int) -> None:
    """The last rows, whose lines in L2 are made ordinary again, have the bits they have alone."""
    rows = 2**28 // columns + 3
    x, grad = randn(rows, columns), randn(rows, columns)
    weight, bias = randn(columns), randn(columns)
    statistics = forward(name, x, weight, bias)[1:]
    results = backward(name, grad, x, weight, bias, *statistics)
    again = backward(name, grad, x, weight, bias, *statistics)
    assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
    last = slice(rows - 9, rows)
    few = backward(name, grad[last], x[last], weight, bias, *(s[last] for s in statistics))
    assert torch.equal(results[0][last], few[0])


@pytest.mark.gpu
@every_norm
@every_dtype
@pytest.mark.parametrize("columns", [32, 128, 384, 640, 1152, 2304, 4096, 8192, 12288, 16384,
                                     16896, 24576, 32768, 49152, 262144])  # fmt: skip
def test_whole_rows_have_the_same_bits(name: str, dtype: torch.dtype, columns: int) -> None:
    """Aligned rows, many and few, against the same ones at an odd address. Of clusters so many that
    they keep pace."""
    rows = 2**24 // columns
    x, weight, bias = (randn(n, columns, dtype=dtype) for n in (rows, 1, 1))
    for w, b, offset in (
        (weight[0], bias[0], 0.0), (weight[0], None, 0.0), (None, bias[0], 0.0),
        (None, None, 0.0), (weight[0], bias[0], 1.0),
    ):  # fmt: skip
        results = forward(name, x, w, b, 1e-5, offset)
        for a, c in zip(results, forward(name, guarded(x, 1), w, b, 1e-5, offset), strict=True):
            assert torch.equal(a, c)
        for a, c in zip(results, forward(name, x[-3:], w, b, 1e-5, offset), strict=True):
            assert torch.equal(a[-3:], c)
    check_forward(name, [x[-9:], weight[0], bias[0], 1e-5, 0.0])


@pytest.mark.gpu
@every_norm
@every_dtype
@pytest.mark.parametrize("columns", [64, 640, 4096, 65536])
def test_whole_rows_of_several_types_have_the_same_bits(
    name: str, dtype: torch.dtype, columns: int
) -> None:
    rows = max(9, 2**22 // columns)
    x, residual, weight, bias = (randn(n, columns, dtype=dtype) for n in (rows, rows, 1, 1))
    op = getattr(torch.ops.ikbo, f"add_{name}_fwd")
    fp32 = torch.float32
    for r, w, b, out in (
        (residual, weight[0], None, dtype), (residual.float(), weight[0].float(), bias[0], fp32),
        (residual, None, bias[0].float(), fp32),
    ):  # fmt: skip
        results = op(x, r, w, b, 1e-5, 0.0, out, out)
        again = op(guarded(x, 1), guarded(r, 1), w, b, 1e-5, 0.0, out, out)
        few = op(x[-3:], r[-3:], w, b, 1e-5, 0.0, out, out)
        for a, c, d in zip(results, again, few, strict=True):
            assert torch.equal(a, c) and torch.equal(a[-3:], d)


@pytest.mark.gpu
@every_norm
@every_dtype
@pytest.mark.parametrize("columns", [128, 640, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 12288,
                                     32768, 262144])  # fmt: skip
def test_quantised_rows_have_the_same_bits(name: str, dtype: torch.dtype, columns: int) -> None:
    """Where the largest result is known early and where not, against rows at an odd address, and
    against few; and against the norm's own results. From 2048 to 5120 columns enough rows for CTAs
    that take two, and an odd number."""
    rows = 2201 if 2048 <= columns <= 5120 else max(9, 2**22 // columns)
    x, weight, bias = (randn(n, columns, dtype=dtype) for n in (rows, 1, 1))
    for w, b, offset in (
        (weight[0], None, 0.0), (None, None, 0.0), (weight[0], bias[0], 0.0),
        (weight[0], bias[0], 1.0),
    ):  # fmt: skip
        y = forward(name, x, w, b, 1e-5, offset)[0].float()
        for given in (None, torch.full((1,), 2.0**-6, device="cuda")):
            quantise = getattr(torch.ops.ikbo, f"{name}_quant")
            y_q, scales, *statistics = quantise(x, w, b, given, 1e-5, offset)
            again = quantise(guarded(x, 1), w, b, given, 1e-5, offset)
            few = quantise(x[-3:], w, b, given, 1e-5, offset)
            for a, c, d in zip((y_q, scales, *statistics), again, few, strict=True):
                assert torch.equal(a.view(torch.uint8), c.view(torch.uint8))
                assert torch.equal(a[-3:].view(torch.uint8), d.view(torch.uint8))
            if given is None:
                step = 2 * torch.finfo(dtype).eps  # y is rounded, what is quantised isn't
                torch.testing.assert_close(scales, y.abs().amax(1) / 448, rtol=step, atol=0)
                assert (y_q.float().abs().amax(1) == 448).all()
            scale = scales[:, None] if given is None else given
            wanted = y.clamp(-448 * scale, 448 * scale)
            error = (y_q.float() * scale - wanted).abs()
            assert (error <= wanted.abs() * 2.0**-4 * 1.1 + scale * 2.0**-10 * 1.1).all()


@pytest.mark.gpu
@every_norm
@pytest.mark.parametrize("columns", [64, 1000, 8192, 40000])
def test_expanded_gradients(name: str, columns: int) -> None:
    x, weight = randn(9, columns), randn(columns)
    ones = torch.ones((), device="cuda", dtype=torch.bfloat16)
    column = randn(9, 1)
    row = randn(1, columns)
    for grad in (ones.expand(9, columns), column.expand(9, columns), row.expand(9, columns)):
        check_backward(name, x, weight, None, grad)


@pytest.mark.gpu
@every_norm
@every_dtype
@pytest.mark.parametrize("columns", [7, 64, 128, 256, 384, 1000, 2048, 8192, 32768, 262144])
def test_rows_do_not_depend_on_their_number(name: str, dtype: torch.dtype, columns: int) -> None:
    rows = rows_of(4000, columns)
    x, grad = randn(rows, columns, dtype=dtype), randn(rows, columns, dtype=dtype)
    weight, bias = randn(columns, dtype=dtype), randn(columns, dtype=dtype)
    every = forward(name, x, weight, bias)
    every_grad = backward(name, grad, x, weight, bias, *every[1:])[0]
    for first, count in ((0, 1), (rows // 2, 1), (rows // 3, min(7, rows - rows // 3))):
        some = slice(first, first + count)
        part = forward(name, x[some], weight, bias)
        for a, b in zip(every, part, strict=True):
            assert torch.equal(a[some], b)
        part_grad = backward(name, grad[some], x[some], weight, bias, *part[1:])[0]
        assert torch.equal(every_grad[some], part_grad)
        without_bias = backward(name, grad[some], x[some], weight, None, *part[1:])[0]
        assert torch.equal(part_grad, without_bias)


@pytest.mark.gpu
@every_norm
@pytest.mark.parametrize("columns", [96, 128, 256, 1000, 2048, 4096, 65536])
def test_same_bits_each_time_and_nan_stays_in_its_row(name: str, columns: int) -> None:
    rows = rows_of(700, columns)
    x, grad, weight = randn(rows, columns), randn(rows, columns), randn(columns)

    def run(x: Tensor) -> list[Tensor]:
        y, *statistics = forward(name, x, weight, weight)
        return [y, *statistics, *backward(name, grad, x, weight, weight, *statistics)]

    first = run(x)
    for again in (run(x), run(x)):
        for a, b in zip(first, again, strict=True):
            assert torch.equal(a, b)
    bad = x.clone()
    bad[rows // 2, columns - 1] = NAN
    clean = torch.arange(rows, device="cuda") != rows // 2
    results = run(bad)
    for a, b in zip(first[:-2], results[:-2], strict=True):
        assert torch.equal(a[clean], b[clean])
        assert not torch.isfinite(b[~clean]).all()


@pytest.mark.gpu
@every_norm
def test_many_rows_by_ticket(name: str) -> None:
    """Enough of them for the counter, whose rows come in any order. They aren't aligned: others
    have no ring. The bits are those of aligned rows."""
    x, weight, bias = guarded(randn(9000, 4096), shift=1), randn(4096), randn(4096)
    assert '"by_ticket": true' in _explained(x, aligned=False)
    y = forward(name, x, weight, bias)[0]
    assert torch.equal(y, forward(name, x.clone(), weight, bias)[0])
    assert torch.equal(y[::1000], forward(name, x[::1000].contiguous(), weight, bias)[0])
    check_forward(name, [x[-300:], weight, bias, 1e-5, 0.0])
    assert torch.isfinite(y).all()


def _explained(x: Tensor, aligned: bool) -> str:
    rows, columns = x.shape
    device = torch.cuda.get_device_properties(0)
    limits = _host.DeviceLimits(device.multi_processor_count, device.L2_cache_size, 232448)
    return repr(_host.norm_config(rows, columns, (2, 0, 0), False, False, limits, 1, aligned))


# ---- head_norm: heads of a fused projection, where they lie --------------------------------------
@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize(("H", "Hk", "D"), [(8, 2, 128), (3, 3, 64), (5, 1, 80), (2, 1, 257)])
def test_head_norm_of_a_fused_projection(H: int, Hk: int, D: int, dtype: torch.dtype) -> None:
    """Query and key heads as slices of one qkv, forward and backward, without copies of x or grad;
    results of the same bits as from contiguous tensors."""
    B, S, heads = 3, 41, H + 2 * Hk
    qkv = guarded(randn(B, S, heads * D, dtype=dtype)).view(B, S, heads, D)
    grads = randn(B, S, heads, D, dtype=dtype)
    for first, count in ((0, H), (H, Hk)):
        weight = randn(count, D, dtype=dtype)
        x, grad = (t[:, :, first : first + count] for t in (qkv, grads))
        y, rstd = torch.ops.ikbo.head_norm_fwd(x, weight, 1e-6, 0.5)
        taken = peak_bytes(lambda: torch.ops.ikbo.head_norm_fwd(x, weight, 1e-6, 0.5))  # noqa: B023
        assert taken <= y.nbytes + rstd.nbytes
        same, same_rstd = torch.ops.ikbo.head_norm_fwd(x.contiguous(), weight, 1e-6, 0.5)
        assert torch.equal(y, same) and torch.equal(rstd, same_rstd)
        exact = definitions.head_norm(x.double(), weight.double(), 1e-6, 0.5)
        ours = definitions.head_norm(x, weight, 1e-6, 0.5) if dtype is torch.float32 else None
        assert_matches_definition(y, exact, ours, multiple=4.0)

        got = torch.ops.ikbo.head_norm_bwd(grad, x, weight, rstd, 0.5, 3)
        again = torch.ops.ikbo.head_norm_bwd(
            grad.contiguous(), x.contiguous(), weight, rstd, 0.5, 3
        )
        leaves = [t.double().requires_grad_() for t in (x, weight)]
        wide = definitions.head_norm(*leaves, 1e-6, 0.5)
        wanted = torch.autograd.grad(wide, leaves, grad.double())
        for result, other, want in zip(got, again, wanted, strict=True):
            assert torch.equal(result, other)
            error = (result.double() - want).abs().max()
            step = max(torch.finfo(dtype).eps, 1e-5)
            assert error <= step * want.abs().max()


@pytest.mark.gpu
def test_head_norm_backward_into_the_projection() -> None:
    """Autograd through slices: each gradient lands where its heads lie."""
    qkv = randn(2, 19, 6, 64, dtype=torch.float32).requires_grad_()
    weights = [randn(n, 64, dtype=torch.float32).requires_grad_() for n in (4, 1)]
    slices = (slice(0, 4), slice(4, 5))

    def loss(norm: Any, *args: Any) -> Tensor:
        parts = [norm(qkv[:, :, s], w) for s, w in zip(slices, weights, strict=True)]
        return torch.stack([(p * p * p).sum() for p in parts]).sum()

    got = torch.autograd.grad(loss(ikbo.head_norm), [qkv, *weights])
    want = torch.autograd.grad(loss(definitions.head_norm), [qkv, *weights])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
    assert bool((got[0][:, :, 5:] == 0).all())


# ---- slow --------------------------------------------------------------------------------------
@pytest.mark.gpu_slow
@every_norm
@pytest.mark.parametrize("columns", [257, 1024, 4096, 32768])
def test_rows_four_gigabytes_apart(name: str, columns: int) -> None:
    """Have the bits they have side by side."""
    step = 2**31 + 8
    flat = torch.empty(2 * step + columns, dtype=torch.bfloat16, device="cuda")
    x, near = flat.as_strided((3, columns), (step, 1)), randn(3, columns)
    x.copy_(near)
    weight, bias, grad = randn(columns), randn(columns), randn(3, columns)
    results, wanted = forward(name, x, weight, bias), forward(name, near, weight, bias)
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))
    got = backward(name, grad, x, weight, bias, *results[1:])
    assert torch.equal(got[0], backward(name, grad, near, weight, bias, *results[1:])[0])


@pytest.mark.gpu_slow
@every_norm
@pytest.mark.parametrize("columns", [257, 4096, 262144, 300_001])
def test_more_than_2_31_elements(name: str, columns: int) -> None:
    """Rows at both ends and in the middle have the bits of a call of their own."""
    rows = 2**31 // columns + 50
    x, grad = (torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    some = torch.tensor([0, 1, rows // 2, rows - 2, rows - 1], device="cuda")
    x[some], grad[some] = randn(len(some), columns), randn(len(some), columns)
    weight, bias = (randn(columns, dtype=torch.float32) for _ in range(2))
    results = forward(name, x, weight, bias)
    few = forward(name, x[some], weight, bias)
    for a, b in zip(results, few, strict=True):
        assert torch.equal(a[some], b)
    statistics = results[1:]
    del results
    grads = backward(name, grad, x, weight, bias, *statistics)
    few_grads = backward(name, grad[some], x[some], weight, bias, *few[1:])
    assert torch.equal(grads[0][some], few_grads[0])
    for a, b in zip(grads[1:], few_grads[1:], strict=True):  # rows of zeros add nothing
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu_slow
@every_norm
@pytest.mark.parametrize(
    ("rows", "columns"), [(9000, 257), (3000, 1024), (8200, 2048), (300, 16384), (60, 131072)]
)
def test_ten_thousand_repeats(name: str, rows: int, columns: int) -> None:
    x, grad, weight = randn(rows, columns), randn(rows, columns), randn(columns)

    def run() -> list[Tensor]:
        y, *statistics = forward(name, x, weight, weight)
        return [y, *statistics, *backward(name, grad, x, weight, weight, *statistics)]

    want = run()
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(10_000):
        for got, expected in zip(run(), want, strict=True):
            differs |= (got != expected).any()
    assert not differs
