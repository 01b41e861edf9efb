"""Each device primitive of csrc/hopper alone, by the small kernels of tests/device.

They live in a library of their own, which isn't part of the wheel:

    cmake --build build/cmake --target ikbo_device_tests

It is looked for at build/cmake/libikbo_device_tests.so, or where IKBO_DEVICE_TESTS says.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
from collections.abc import Callable, Sequence

import pytest
import torch

from ikbo.testing import definitions

from .installed import REPOSITORY

pytestmark = pytest.mark.gpu

LIBRARY = pathlib.Path(
    os.environ.get("IKBO_DEVICE_TESTS", REPOSITORY / "build/cmake/libikbo_device_tests.so")
)
TYPES = [torch.bfloat16, torch.float16, torch.float32]  # as ElementType numbers them
NAN = float("nan")

Call = Callable[..., None]


def load() -> Call:
    """call(name, *arguments) runs ikbo_test_NAME and waits for it; tensors go as pointers."""
    library = ctypes.CDLL(str(LIBRARY))

    def call(name: str, *arguments: object) -> None:
        function = getattr(library, f"ikbo_test_{name}")
        function.restype = ctypes.c_char_p
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = function(*map(_argument, arguments), stream)
        if error is not None:
            raise RuntimeError(error.decode())
        torch.cuda.synchronize()

    return call


@pytest.fixture(scope="module")
def call() -> Call:
    if not LIBRARY.exists():
        pytest.skip(f"{LIBRARY} isn't built: cmake --build build/cmake --target ikbo_device_tests")
    return load()


def _argument(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, bool):
        return ctypes.c_bool(value)
    if isinstance(value, int):
        # As ctypes passes a plain int, the upper half of one on the stack is whatever lay there.
        return ctypes.c_int64(value)
    return value


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


# ---- wgmma -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("n", [8, 64, 128, 224, 256])
@pytest.mark.parametrize(
    "form", range(6), ids=["kk", "kn", "mk", "mn", "registers_k", "registers_n"]
)
@pytest.mark.parametrize("add", [False, True])
def test_wgmma(call: Call, dtype: torch.dtype, n: int, form: int, add: bool) -> None:
    a, b = _normal(64, 64, dtype=dtype), _normal(n, 64, dtype=dtype)
    d = _normal(64, n) if add else torch.full((64, n), NAN, device="cuda")
    expected = a.double() @ b.double().T + (d.double() if add else 0)
    call("wgmma", n, form, dtype == torch.bfloat16, a, b, d, add)
    # fp32 sums of 64 exact products; a misplaced element is off by about 1.
    torch.testing.assert_close(d.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
def test_mma(call: Call, dtype: torch.dtype) -> None:
    a, b, d = _normal(16, 16, dtype=dtype), _normal(8, 16, dtype=dtype), _normal(16, 8)
    expected = a.double() @ b.double().T + d.double()
    call("mma", dtype == torch.bfloat16, a, b, d)
    torch.testing.assert_close(d.double(), expected, atol=1e-4, rtol=0)


# ---- copy engine -------------------------------------------------------------------------------
def _c_array(kind: type, values: Sequence[int]) -> ctypes.Array:
    return (kind * len(values))(*values)


def _layout(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    box: Sequence[int],
    at: Sequence[int],
    swizzled: bool,
) -> tuple[object, ...]:
    """The launchers' view of a tensor; sizes, box and `at` outermost first, as torch has them."""
    strides = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
    return (
        tensor.dim(), TYPES.index(tensor.dtype), swizzled, tensor,
        _c_array(ctypes.c_int64, sizes[::-1]), _c_array(ctypes.c_int64, strides[::-1]),
        _c_array(ctypes.c_int64, box[::-1]), _c_array(ctypes.c_int32, at[::-1]),
    )  # fmt: skip


def _boxed(tensor: torch.Tensor, box: Sequence[int], at: Sequence[int]) -> torch.Tensor:
    """The box at `at`, zero where it leaves the tensor."""
    out = tensor.new_zeros(tuple(box))
    inside, source = [], []
    for size, length, start in zip(tensor.shape, box, at, strict=True):
        low, high = max(0, -start), max(0, min(length, size - start))
        inside.append(slice(low, high))
        source.append(slice(start + low, start + high))
    out[tuple(inside)] = tensor[tuple(source)]
    return out


def _swizzle(box: torch.Tensor) -> torch.Tensor:
    """A box with rows of 128 bytes as the 128-byte swizzle lays it out, and back again."""
    rows = box.reshape(-1, 8, 128 // 8 // box.element_size())
    chunk, row = torch.arange(8)[None, :], torch.arange(rows.shape[0])[:, None]
    places = (chunk ^ row % 8).to(box.device)
    return rows.gather(1, places[:, :, None].expand_as(rows)).reshape(box.shape)


def _slice_of_nan(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of these sizes whose neighbours in memory, in every dimension, are NaN."""
    padded = torch.full([size + 8 for size in sizes], NAN, device="cuda", dtype=dtype)
    inner = padded[tuple(slice(0, size) for size in sizes)]
    inner.copy_(_normal(*sizes, dtype=dtype))
    return inner


BOXES = [
    # sizes, box, at: whole inside, over each edge, before the start, all outside
    ((40, 64), (16, 64), (8, 0)),
    ((40, 64), (16, 64), (32, 0)),
    ((40, 200), (8, 64), (3, 192)),
    ((40, 64), (8, 64), (-3, -16)),  # loads only: a store from before the start is illegal
    ((40, 64), (8, 64), (40, 0)),
    ((5, 40, 64), (1, 16, 64), (2, 32, 0)),
    ((5, 40, 72), (2, 8, 64), (4, 36, 64)),
    ((3, 4, 24, 64), (1, 2, 8, 64), (1, 3, 20, 0)),
    ((3, 4, 24, 64), (2, 2, 8, 64), (2, 2, 8, 32)),
]  # fmt: skip


def _fit(
    dtype: torch.dtype, box: Sequence[int], at: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """fp32 rows of 128 bytes hold 32 elements."""
    return (*box[:-1], 32 if dtype == torch.float32 else 64), tuple(at)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("sizes", "box", "at"), BOXES)
def test_tma_load(
    call: Call, dtype: torch.dtype, swizzled: bool, sizes: tuple[int, ...], box: tuple[int, ...],
    at: tuple[int, ...],
) -> None:  # fmt: skip
    box, at = _fit(dtype, box, at)
    tensor = _slice_of_nan(sizes, dtype)
    expected = _boxed(tensor, box, at)
    for hint in range(3):
        out = torch.full(box, NAN, device="cuda", dtype=dtype)
        call("tma_load", *_layout(tensor, sizes, box, at, swizzled), hint, out)
        assert torch.equal(_swizzle(out) if swizzled else out, expected)


def test_tma_load_stays_in_its_batch(call: Call) -> None:
    """K rows past a batch are zeros, not the next batch's first rows (here NaN)."""
    tensor = _normal(3, 20, 64, dtype=torch.bfloat16)
    tensor[2] = NAN
    out = torch.full((1, 32, 64), NAN, device="cuda", dtype=torch.bfloat16)
    call("tma_load", *_layout(tensor, tensor.shape, out.shape, (1, 0, 0), True), 0, out)
    assert torch.equal(_swizzle(out)[0, :20], tensor[1])
    assert torch.equal(_swizzle(out)[0, 20:], torch.zeros_like(out[0, 20:]))


@pytest.mark.parametrize(
    ("sizes", "at"),
    [
        ((40, 64), (8, 0)),
        ((40, 64), (24, 0)),
        ((5, 40, 64), (2, 24, 0)),
        ((3, 4, 24, 64), (1, 3, 8, 0)),
    ],
)
@pytest.mark.parametrize("swizzled", [False, True])
def test_tma_multicast(
    call: Call, sizes: tuple[int, ...], at: tuple[int, ...], swizzled: bool
) -> None:
    """Each of two CTAs loads one of two boxes that follow in the rows, into both."""
    tensor = _slice_of_nan(sizes, torch.bfloat16)
    box = (*[1] * (len(sizes) - 2), 16, 64)
    both = (*[1] * (len(sizes) - 2), 32, 64)
    out = torch.full((2, 32, 64), NAN, device="cuda", dtype=torch.bfloat16)
    call("tma_multicast", *_layout(tensor, sizes, box, at, swizzled), out)
    expected = _boxed(tensor, both, at).reshape(32, 64)
    for cta in range(2):
        assert torch.equal(_swizzle(out[cta]) if swizzled else out[cta], expected)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("sizes", "box", "at"), [b for b in BOXES if min(b[2]) >= 0])
def test_tma_store(
    call: Call, dtype: torch.dtype, swizzled: bool, sizes: tuple[int, ...], box: tuple[int, ...],
    at: tuple[int, ...],
) -> None:  # fmt: skip
    box, at = _fit(dtype, box, at)
    source = _normal(*box, dtype=dtype)
    for hint in range(3):
        tensor = _slice_of_nan(sizes, dtype)
        padded = tensor._base
        assert padded is not None
        expected = padded.clone()
        written = [
            slice(max(0, start), max(0, min(size, start + length)))
            for size, length, start in zip(sizes, box, at, strict=True)
        ]
        read = [
            slice(max(0, -start), max(0, min(length, size - start)))
            for size, length, start in zip(sizes, box, at, strict=True)
        ]
        expected[tuple(written)] = source[tuple(read)]
        laid_out = _swizzle(source) if swizzled else source
        call("tma_store", *_layout(tensor, sizes, box, at, swizzled), hint, laid_out.contiguous())
        assert torch.equal(padded.nan_to_num(1e4), expected.nan_to_num(1e4))


def test_tensor_map_refusals(call: Call) -> None:
    tensor = _normal(8, 64, dtype=torch.bfloat16)
    out = torch.empty(8, 256, device="cuda", dtype=torch.bfloat16)

    def load(x: torch.Tensor, box: tuple[int, int], swizzled: bool) -> None:
        call("tma_load", *_layout(x, x.shape, box, (0, 0), swizzled), 0, out)

    shape = r"sizes \[56, 8\], byte strides \[128\], box \[64, 8\]"
    with pytest.raises(RuntimeError, match=shape + ".*16-byte aligned base"):
        load(tensor[:, 1:57], (8, 64), False)
    with pytest.raises(RuntimeError, match=r"byte strides \[126\].*multiples of 16 bytes"):
        load(_normal(8, 63, dtype=torch.bfloat16), (8, 56), False)
    with pytest.raises(RuntimeError, match="at most 128 bytes under the 128-byte swizzle"):
        load(tensor, (8, 72), True)
    with pytest.raises(RuntimeError, match="box rows of a multiple of 16 bytes"):
        load(tensor, (8, 12), False)
    with pytest.raises(RuntimeError, match="box sizes from 1 to 256"):
        load(tensor, (257, 64), False)
    with pytest.raises(RuntimeError, match="sizes from 1 to"):
        load(tensor[:0], (8, 64), False)


# ---- ldmatrix, stmatrix ------------------------------------------------------------------------
def _fragments(tiles: torch.Tensor) -> torch.Tensor:
    """[4, 8, 8] tiles as registers: [lane, tile, 2]; lane l holds (l / 4, 2 (l % 4) + {0, 1})."""
    return tiles.reshape(4, 8, 4, 2).permute(1, 2, 0, 3).reshape(32, 4, 2).contiguous()


@pytest.mark.parametrize("transposed", [False, True])
def test_load_tiles(call: Call, transposed: bool) -> None:
    tiles = torch.arange(256, device="cuda", dtype=torch.int16).reshape(4, 8, 8)
    out = torch.full((32, 4, 2), -1, device="cuda", dtype=torch.int16)
    call("fragments", int(transposed), tiles, out)
    assert torch.equal(out, _fragments(tiles.transpose(1, 2) if transposed else tiles))


@pytest.mark.parametrize("transposed", [False, True])
def test_store_tiles(call: Call, transposed: bool) -> None:
    tiles = torch.arange(256, device="cuda", dtype=torch.int16).reshape(4, 8, 8)
    out = torch.full_like(tiles, -1)
    call("fragments", 2 + transposed, _fragments(tiles), out)
    assert torch.equal(out, tiles.transpose(1, 2) if transposed else tiles)


@pytest.mark.parametrize("rounds", [1, 2, 9])
def test_async_copy(call: Call, rounds: int) -> None:
    """Rows gathered from anywhere; some lanes, and the whole of one round, have none."""
    source = torch.arange(4000, device="cuda", dtype=torch.int32).reshape(1000, 4)
    rows = torch.randint(0, 1000, (rounds, 32), device="cuda", dtype=torch.int32)
    rows[:, ::5] = -1
    rows[rounds // 2] = -1
    out = torch.full((rounds, 32, 4), -1, device="cuda", dtype=torch.int32)
    call("async_copy", rounds, rows, source, out)
    nothing = torch.tensor([1, 2, 3, 4], device="cuda", dtype=torch.int32)
    expected = torch.where((rows >= 0)[..., None], source[rows.clamp(min=0).long()], nothing)
    assert torch.equal(out, expected.flip(1))


# ---- clusters, ring, tickets -------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_cluster(call: Call, size: int) -> None:
    clusters, rounds = 5, 7
    out = torch.full((size * clusters, 4), -1, device="cuda", dtype=torch.int32)
    call("cluster", size, clusters, rounds, out)
    cta = torch.arange(size * clusters, device="cuda", dtype=torch.int32)
    expected = [
        cta % size,
        cta // size,
        torch.full_like(cta, clusters),
        torch.full_like(cta, rounds),
    ]
    assert torch.equal(out, torch.stack(expected, dim=1))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shared_memory_of_a_cluster(call: Call, size: int) -> None:
    clusters = 5
    out = torch.full((clusters, size, 2, 32, 4), NAN, device="cuda")
    call("cluster_memory", size, clusters, out)
    number = torch.arange(32.0 * size * clusters, device="cuda").reshape(clusters, size, 32)
    own = torch.stack([number, -number, number + 0.25, number + 0.5], dim=-1)
    assert torch.equal(out[:, :, 0], own.roll(-2, 1))
    assert torch.equal(out[:, :, 1], own.roll(-1, 1))


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(("tiles", "blocks"), [(1, 1), (1, 20), (2, 1), (7, 2), (8, 3), (9, 14)])
def test_pipeline(call: Call, cluster: int, turns: bool, tiles: int, blocks: int) -> None:
    """Three slots; tiles shorter than the ring, as long and longer; a consumer that skips tiles."""
    clusters = 20
    source = torch.randint(-8, 9, (tiles, blocks, 2, 128), device="cuda").float()
    groups = 1 if turns else 2
    out = torch.full((groups, cluster * clusters, tiles, 128), NAN, device="cuda")
    call("pipeline", turns, cluster, clusters, tiles, blocks, source, out)
    weights = torch.arange(1, blocks + 1, device="cuda").float()
    rows = source[:, :, 0] + 2 * source[:, :, 1]
    expected = (rows * weights[None, :, None]).sum(1)
    assert torch.equal(out, expected.expand_as(out))


@pytest.mark.parametrize("ctas", [1, 7, 264])
@pytest.mark.parametrize("tiles", [0, 1, 5, 3001])
def test_tickets_visit_each_tile_once(call: Call, ctas: int, tiles: int) -> None:
    counter = torch.zeros(1, device="cuda", dtype=torch.int32)
    visits = torch.zeros(max(tiles, 1), device="cuda", dtype=torch.int32)
    call("tickets", ctas, tiles, counter, visits)
    assert torch.equal(visits[:tiles], torch.full_like(visits[:tiles], 0x010101))
    assert counter.item() == tiles + ctas  # each CTA drew one past the end


@pytest.mark.parametrize("overlap", [False, True])
def test_dependent_launch(call: Call, overlap: bool) -> None:
    ctas, launches = 264, 40
    first = torch.arange(256 * ctas, device="cuda", dtype=torch.int32)
    a, b = first.clone(), torch.full_like(first, -1)
    call("dependent_launch", ctas, launches, overlap, a, b)
    expected = first
    for _ in range(launches):
        expected = 3 * expected.roll(-1280) + 1
    assert torch.equal(a, expected)


def test_warp_group(call: Call) -> None:
    """Indices, elected lanes, a named barrier's two sides, more registers than an equal share."""
    rounds = 9
    source = torch.randint(-99, 99, (rounds, 128), device="cuda", dtype=torch.int32)
    out = torch.zeros(6 + 256, device="cuda", dtype=torch.int32)
    call("warp_group", rounds, source, out)
    assert out[:6].tolist() == [4, 4, 4, 0x00F, 0x0F0, 0xF00]
    weights = torch.arange(1, rounds + 1, device="cuda", dtype=torch.int32)[:, None]
    assert torch.equal(out[6:134], (source.flip(1) * weights).sum(0, dtype=torch.int32))
    values = [source[0] + i for i in range(190)]
    for _ in range(rounds):
        for i in range(190):
            values[i] = values[i] * 3 + values[(i + 1) % 190]
    expected = torch.zeros_like(source[0])
    for value in values:
        expected ^= value
    assert torch.equal(out[134:], expected)


# ---- activations -------------------------------------------------------------------------------
# The order of enum Activation is that of the definitions.
@pytest.mark.parametrize(
    ("index", "name"), list(enumerate(definitions.ACTIVATIONS)), ids=list(definitions.ACTIVATIONS)
)
def test_activation(call: Call, index: int, name: str) -> None:
    spread = torch.logspace(-30, 30, 20001, dtype=torch.float64)
    x = torch.cat([torch.linspace(-100, 100, 200001, dtype=torch.float64), spread, -spread])
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), NAN], dtype=torch.float64)
    x = torch.cat([x, special]).to("cuda", torch.float32)
    y = torch.full_like(x, 7.0)
    call("activation", index, x, y, x.numel())
    expected = definitions.ACTIVATIONS[name](x.double())
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.abs() > torch.finfo(torch.float32).max)
    finite = y.isfinite()
    y, expected = y[finite].double(), expected[finite]
    # The tails, where 1 + erf and 1 + tanh have lost their digits even in fp64.
    z = x[finite].double()
    if name == "gelu":
        expected = torch.where(z < 0, z * 0.5 * torch.special.erfc(-z / 2**0.5), expected)
    if name == "gelu_tanh":
        expected = z * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))
    # Below 1e-36 results may be flushed to zero.
    error = (y - expected).abs() / expected.abs().clamp(min=1e-31)
    assert error.max() < 3e-5, (name, z[error.argmax()])
