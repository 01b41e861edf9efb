"""Odd rows of the norms' forward on a GPU: every length, every address, layout and row count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

import ikbo

from .test_norms_gpu import (
    GUARD,
    NAN,
    check_forward,
    every_dtype,
    every_norm,
    forward,
    guarded,
    randn,
)

# Each number of lanes a row and of rows a warp, just below and above it; CTAs; clusters.
COLUMNS = [*range(1, 41), *range(127, 131), *range(255, 259), 383, 385, 769, 1001, 1023, 1025, 2049,
           4095, 4097, 8191, 9001]  # fmt: skip
SOME_COLUMNS = [9, 130, 257, 769, 4095, 9001]
some_columns = pytest.mark.parametrize("columns", SOME_COLUMNS)


@pytest.fixture(autouse=True)
def _kernels_only() -> Iterator[None]:
    torch.manual_seed(0)
    with ikbo.strict():
        yield


def shifts(dtype: torch.dtype) -> range:
    """Elements from one multiple of 16 bytes to the next."""
    return range(16 // dtype.itemsize)


def poisoned(rows: int, columns: int, dtype: torch.dtype, shift: int, gap: int = 0) -> Tensor:
    """NaN, and around it NaN; `.base` is all of it."""
    base = torch.full(
        (2 * GUARD + shift + rows * (columns + gap),), NAN, dtype=dtype, device="cuda"
    )
    inner = base[GUARD + shift : GUARD + shift + rows * (columns + gap)]
    return inner.view(rows, columns + gap)[:, :columns]


def check_only(out: Tensor, want: Tensor) -> None:
    """The wanted bits, and nothing around them."""
    assert torch.equal(out, want)
    assert want.isfinite().all()
    assert out._base is not None
    assert int(out._base.isfinite().sum()) == out.numel()


def check_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def operands(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, residual, weight, bias."""
    shapes = ((rows, columns), (rows, columns), (columns,), (columns,))
    return tuple(randn(*shape, dtype=dtype) for shape in shapes)


@pytest.mark.gpu
@every_norm
@every_dtype
@pytest.mark.parametrize("columns", COLUMNS)
def test_every_length(name: str, dtype: torch.dtype, columns: int) -> None:
    weight, bias = randn(columns, dtype=dtype), randn(columns, dtype=dtype)
    x = guarded(randn(37, columns, dtype=dtype), 1)
    check_forward(name, [x, weight, bias, 1e-5, 0.0])
    if columns % 3 == 0:
        check_forward(name, [x, weight.float(), None, 1e-5, 1.0])
        check_forward(name, [x, None, bias, 1e-5, 0.0])


@pytest.mark.gpu
@every_norm
@every_dtype
@some_columns
def test_every_address(name: str, dtype: torch.dtype, columns: int) -> None:
    rows = 21
    x, residual, weight, bias = operands(rows, columns, dtype)
    want, added = forward(name, x, weight, bias), forward(f"add_{name}", x, residual, weight)
    for i in shifts(dtype):
        placed = guarded(x, i)
        check_same(forward(name, placed, weight, bias), want)
        for j in shifts(dtype):
            out = poisoned(rows, columns, dtype, j)
            getattr(torch.ops.ikbo, name).out(placed, weight, bias, out=out)
            check_only(out, want[0])
            check_same(forward(f"add_{name}", placed, guarded(residual, j), weight), added)


@pytest.mark.gpu
@every_norm
@every_dtype
@some_columns
def test_rows_apart(name: str, dtype: torch.dtype, columns: int) -> None:
    """Of x, of the residual and of y, which then no longer takes x's place on chip."""
    rows = 21
    x, residual, weight, bias = operands(rows, columns, dtype)
    y, added = forward(name, x, weight, bias)[0], forward(f"add_{name}", x, residual, weight)
    for gap in (1, 3, 8):
        apart, other = (poisoned(rows, columns, dtype, 3, g) for g in (gap, gap + 2))
        apart.copy_(x), other.copy_(residual)
        for source in (x, apart):
            out = poisoned(rows, columns, dtype, 1, gap)
            getattr(torch.ops.ikbo, name).out(source, weight, bias, out=out)
            check_only(out, y)
            for r in (residual, other):
                check_same(forward(f"add_{name}", source, r, weight), added)


@pytest.mark.gpu
@every_norm
@every_dtype
@some_columns
def test_other_types(name: str, dtype: torch.dtype, columns: int) -> None:
    """Results in fp32 don't fit where x was; parameters of another type aren't held."""
    x, residual = randn(21, columns, dtype=dtype), randn(21, columns, dtype=torch.float32)
    weight, bias = randn(columns, dtype=dtype), randn(columns, dtype=dtype)
    y = forward(name, x, weight, bias, 1e-5)[0]
    wide = forward(name, x, weight, bias, 1e-5, 0.0, torch.float32)[0]
    assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), y)
    for w, b in ((weight.float(), bias), (weight, bias.float())):
        assert torch.equal(forward(name, x, w, b, 1e-5)[0], y)
    for sums in (dtype, torch.float32):
        y, total, *_ = forward(f"add_{name}", x, residual, weight, bias, 1e-5, 0.0, None, sums)
        assert total.dtype == sums
        assert torch.equal(total, (x.float() + residual).to(sums))
        same = forward(name, x.float() + residual, weight, bias, 1e-5, 0.0, dtype)[0]
        torch.testing.assert_close(y, same)


@pytest.mark.gpu
@every_norm
@every_dtype
@some_columns
def test_quantised(name: str, dtype: torch.dtype, columns: int) -> None:
    x, weight = randn(21, columns, dtype=dtype), randn(columns, dtype=dtype)
    bias = randn(columns, dtype=dtype)
    quantise = getattr(torch.ops.ikbo, f"{name}_quant")
    for b in (None, bias):
        y = forward(name, x, weight, b, 1e-5, 0.0, torch.float32)[0]
        for given in (None, torch.full((1,), 2.0**-6, device="cuda")):
            y_q, scales, *_ = quantise(x, weight, b, given, 1e-5)
            again, same_scales, *_ = quantise(guarded(x, 1), weight, b, given, 1e-5)
            assert torch.equal(y_q.view(torch.uint8), again.view(torch.uint8))
            assert torch.equal(scales, same_scales)
            if given is None:
                torch.testing.assert_close(scales, y.abs().amax(1) / 448, rtol=1e-6, atol=0)
            scale = scales[:, None] if given is None else given
            wanted = (y / scale).clamp(-448, 448)
            error = (y_q.float() - wanted).abs()
            assert (error <= wanted.abs() * 2.0**-4 * 1.1 + 2.0**-10 * 1.1).all()


@pytest.mark.gpu
@every_norm
@pytest.mark.parametrize(("rows", "columns"), [(200_001, 7), (50_003, 257), (30_001, 769),
                                               (9_001, 4095)])  # fmt: skip
def test_many_rows(name: str, rows: int, columns: int) -> None:
    """So many that a warp, or a CTA, has several, and the last one fewer: the bits of few rows."""
    x, residual = randn(rows, columns), randn(rows, columns)
    weight, bias = randn(columns), randn(columns)
    y = poisoned(rows, columns, x.dtype, 0)
    getattr(torch.ops.ikbo, name).out(guarded(x, 3), weight, bias, out=y)
    assert torch.equal(y, forward(name, x, weight, bias)[0])
    total = forward(f"add_{name}", x, residual, weight, bias)
    for part in (slice(0, 40), slice(rows // 2, rows // 2 + 40), slice(rows - 40, rows)):
        check_forward(name, [x[part], weight, bias, 1e-5, 0.0])
        assert torch.equal(y[part], forward(name, x[part].clone(), weight, bias)[0])
        few = forward(f"add_{name}", x[part].clone(), residual[part].clone(), weight, bias)
        for a, b in zip(total, few, strict=True):
            assert torch.equal(a[part], b)


@pytest.mark.gpu
@every_norm
@some_columns
def test_nan_stays_in_its_row(name: str, columns: int) -> None:
    x, weight = randn(64, columns), randn(columns)
    y = forward(name, x, weight)[0]
    clean = torch.arange(64, device="cuda") % 5 != 2
    x[~clean, columns // 2] = NAN
    with_nan = forward(name, x, weight)[0]
    assert torch.equal(with_nan[clean], y[clean])
    assert with_nan[~clean].isnan().all()
