"""The index arithmetic of csrc/hopper: swizzle, matrix descriptors, places in a ring."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .installed import REPOSITORY

MAX_SHARED_BYTES = 227 * 1024


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if not shutil.which("c++"):
        pytest.skip("needs a C++ compiler")
    library = tmp_path_factory.mktemp("hopper_index") / "hopper_index.so"
    source = REPOSITORY / "tests/cpp/hopper_index.cpp"
    subprocess.run(
        ["c++", "-std=c++20", "-shared", "-fPIC", "-I", REPOSITORY / "csrc", source, "-o", library],
        check=True,
        timeout=60,
    )
    loaded = ctypes.CDLL(str(library))
    loaded.swizzle.restype = ctypes.c_uint32
    loaded.descriptor_of.restype = ctypes.c_uint64
    loaded.descriptor_of.argtypes = [ctypes.c_bool, ctypes.c_uint32, ctypes.c_uint32]
    loaded.descriptor_step.restype = ctypes.c_uint64
    loaded.descriptor_step.argtypes = [ctypes.c_bool]
    return loaded


def test_swizzle_permutes_each_atom(index: ctypes.CDLL) -> None:
    for atom in range(3):
        rows = range(8 * atom, 8 * atom + 8)
        places = {index.swizzle(row, byte) for row in rows for byte in range(128)}
        assert places == set(range(1024 * atom, 1024 * atom + 1024))


def test_swizzle_keeps_chunks_and_rows(index: ctypes.CDLL) -> None:
    for row in range(16):
        for byte in range(128):
            place = index.swizzle(row, byte)
            assert place // 128 == row
            assert place % 16 == byte % 16
            assert place == index.swizzle(row, byte // 16 * 16) + byte % 16


def test_a_column_of_chunks_meets_every_bank(index: ctypes.CDLL) -> None:
    """Eight rows' 16-byte chunks, read at once by ldmatrix, lie in 32 different banks."""
    for first_row in (0, 8, 24):
        for chunk in range(8):
            rows = range(first_row, first_row + 8)
            starts = [index.swizzle(row, 16 * chunk) for row in rows]
            banks = {(start + byte) // 4 % 32 for start in starts for byte in range(0, 16, 4)}
            assert len(banks) == 32


def _fields(descriptor: int) -> dict[str, int]:
    """The fields of the PTX manual's matrix descriptor, byte offsets in bytes."""
    fields = {
        "address": (descriptor & 0x3FFF) << 4,
        "leading": (descriptor >> 16 & 0x3FFF) << 4,
        "stride": (descriptor >> 32 & 0x3FFF) << 4,
        "base_offset": descriptor >> 49 & 7,
        "swizzle": descriptor >> 62 & 3,
    }
    unused = ~(0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 7 << 49 | 3 << 62) & (1 << 64) - 1
    assert descriptor & unused == 0
    return fields


@pytest.mark.parametrize("mn_major", [False, True])
@given(
    atom=st.integers(0, MAX_SHARED_BYTES // 1024 - 1),
    window=st.integers(0, 15),
    atoms_a_block=st.integers(1, 64),
)
def test_descriptor_fields(
    index: ctypes.CDLL, mn_major: bool, atom: int, window: int, atoms_a_block: int
) -> None:
    # Above the low 18 bits an address only tells the CTA of the cluster.
    address = window << 24 | atom * 1024
    fields = _fields(index.descriptor_of(mn_major, address, atoms_a_block * 1024))
    assert fields["address"] == atom * 1024
    assert fields["stride"] == 1024
    assert fields["leading"] == (atoms_a_block * 1024 if mn_major else 16)
    assert fields["base_offset"] == 0
    assert fields["swizzle"] == 1  # 128 bytes


def _hardware_address(fields: dict[str, int], mn_major: bool, mn: int, k: int) -> int:
    """Where wgmma looks for element (mn, k) of a k16 step: the PTX manual's canonical layouts."""
    if mn_major:
        linear = (
            mn // 64 * fields["leading"] + k // 8 * fields["stride"] + k % 8 * 128 + mn % 64 * 2
        )
    else:
        linear = mn // 8 * fields["stride"] + mn % 8 * 128 + k * 2
    address = fields["address"] + linear
    return address ^ (address >> 7 & 7) << 4


@pytest.mark.parametrize("mn_major", [False, True])
@given(
    tile=st.integers(0, 100), rows_k=st.sampled_from([16, 32, 64, 128]), mn=st.integers(0, 255),
    data=st.data(),
)  # fmt: skip
def test_steps_reach_what_the_copy_engine_wrote(
    index: ctypes.CDLL, mn_major: bool, tile: int, rows_k: int, mn: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(0, (rows_k if mn_major else 64) - 1))
    base, block_bytes = tile * 1024, rows_k * 128
    step = index.descriptor_step(mn_major)
    fields = _fields(index.descriptor_of(mn_major, base, block_bytes) + k // 16 * step)
    if mn_major:
        written = base + mn // 64 * block_bytes + index.swizzle(k, mn % 64 * 2)
    else:
        written = base + index.swizzle(mn, 2 * k)
    assert _hardware_address(fields, mn_major, mn, k % 16) == written


@pytest.mark.parametrize("slots", [1, 3, 4, 7])
@pytest.mark.parametrize("one_by_one", [False, True])
@given(steps=st.lists(st.integers(0, 40), max_size=10))
def test_ring_position(index: ctypes.CDLL, slots: int, one_by_one: bool, steps: list[int]) -> None:
    out = (ctypes.c_uint32 * 2)()
    index.ring_position(slots, (ctypes.c_uint32 * len(steps))(*steps), len(steps), one_by_one, out)
    block = sum(steps)
    assert list(out) == [block % slots, block // slots % 2]
