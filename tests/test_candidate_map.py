"""CandidateMap, candidate_map and group_candidates: grouping, ranges, torch's transformations."""

from __future__ import annotations

import io

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ikbo

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)


def grouped_by_sorting(users: Tensor, n_users: int) -> tuple[Tensor, Tensor]:
    """The definition: a stable sort, rows without a user last."""
    users = users.cpu().long()
    keys = torch.where((users >= 0) & (users < n_users), users, n_users)
    order = keys.argsort(stable=True)
    offsets = torch.searchsorted(keys[order], torch.arange(n_users + 1))
    return order.int(), offsets.int()


def check_grouping(users: Tensor, n_users: int) -> None:
    order, offsets = torch.ops.ikbo.group_candidates(users, n_users)
    want_order, want_offsets = grouped_by_sorting(users, n_users)
    assert order.dtype == offsets.dtype == torch.int32
    assert order.device == offsets.device == users.device
    assert torch.equal(order.cpu(), want_order) and torch.equal(offsets.cpu(), want_offsets)


@settings(max_examples=200, deadline=None)
@given(users=st.lists(st.integers(-3, 9), max_size=40), n_users=st.integers(0, 8))
def test_any_small_map(users: list[int], n_users: int) -> None:
    check_grouping(torch.tensor(users, dtype=torch.int32), n_users)


@every_device
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("rows", "n_users"),
    [
        (0, 0), (0, 5), (1, 1), (31, 3), (32, 1), (33, 255), (1000, 256), (1025, 254), (1025, 255),
        (4099, 65535), (4096, 300), (4097, 16383), (8192, 65535), (8192, 16383), (8193, 7),
        (8193, 255), (8193, 256), (100003, 70000),
        (8192 * 3, 255), (8192 * 3 + 1, 2**20), (1000003, 11), (1000003, 2**24 + 1),
    ],
)  # fmt: skip
def test_sizes_around_every_tile(rows: int, n_users: int, dtype: torch.dtype, device: str) -> None:
    users = torch.randint(-2, n_users + 2, (rows,), dtype=dtype)
    check_grouping(users.to(device), n_users)


@every_device
@pytest.mark.parametrize(
    "pattern", ["ascending", "descending", "one user", "no user", "alternating"]
)
def test_adversarial_maps(pattern: str, device: str) -> None:
    rows, n_users = 20011, 1000
    users = {
        "ascending": torch.arange(rows) * n_users // rows,
        "descending": (rows - 1 - torch.arange(rows)) * n_users // rows,
        "one user": torch.full((rows,), 500),
        "no user": torch.full((rows,), -1),
        "alternating": torch.arange(rows) % 2 * 999,
    }[pattern]
    check_grouping(users.int().to(device), n_users)


@every_device
def test_wide_values_stay_out_of_range(device: str) -> None:
    check_grouping(torch.tensor([2**32 + 1, 1, 2**62, -(2**40), 0], device=device), 2)


@every_device
def test_strided_map(device: str) -> None:
    users = torch.randint(0, 9, (400,), dtype=torch.int32, device=device)
    check_grouping(users[::3], 9)


@every_device
def test_opcheck_compile_and_export(device: str) -> None:
    users = torch.tensor([1, 0, -1, 1], dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.ikbo.group_candidates.default, (users, 2))
    compiled = torch.compile(ikbo.group_candidates, fullgraph=True, dynamic=True)
    for got, want in zip(compiled(users, 2), ikbo.group_candidates(users, 2), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
def test_graph_replay_sees_new_data() -> None:
    users = torch.randint(0, 300, (5000,), dtype=torch.int32, device="cuda")
    ikbo.warmup()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        order, offsets = torch.ops.ikbo.group_candidates(users, 300)
    for _ in range(3):
        users.copy_(torch.randint(-1, 301, (5000,)))
        graph.replay()
        want_order, want_offsets = grouped_by_sorting(users, 300)
        assert torch.equal(order.cpu(), want_order) and torch.equal(offsets.cpu(), want_offsets)


@pytest.mark.gpu
def test_two_streams_at_once() -> None:
    maps = [torch.randint(0, 70000, (200001,), dtype=torch.int32, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in maps]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for users, stream in zip(maps, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append((users, torch.ops.ikbo.group_candidates(users, 70000)))
    torch.cuda.synchronize()
    wants = {id(users): grouped_by_sorting(users, 70000) for users in maps}
    for users, (order, offsets) in results:
        want_order, want_offsets = wants[id(users)]
        assert torch.equal(order.cpu(), want_order) and torch.equal(offsets.cpu(), want_offsets)


@pytest.mark.gpu
def test_gpu_takes_the_kernel_and_says_so() -> None:
    users = torch.zeros(10, dtype=torch.int32, device="cuda")
    ikbo.reset_counters()
    with ikbo.strict():
        record = ikbo.explain("group_candidates", users, 3)
    assert record["path"] == "sm90" and record["config"]["launches"] == 1
    assert ikbo.counters() == {("group_candidates", "sm90"): 1}


@pytest.mark.gpu_slow
def test_ten_thousand_repeats_give_the_same_bits() -> None:
    users = torch.randint(-1, 3001, (50021,), dtype=torch.int32, device="cuda")
    order, offsets = torch.ops.ikbo.group_candidates(users, 3000)
    differs = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        again, offsets_again = torch.ops.ikbo.group_candidates(users, 3000)
        differs += (again != order).sum() + (offsets_again != offsets).sum()
    assert int(differs) == 0


@pytest.mark.gpu_slow
def test_hundreds_of_millions_of_rows() -> None:
    users = torch.randint(0, 1000, (400_000_000,), dtype=torch.int32, device="cuda")
    order, offsets = torch.ops.ikbo.group_candidates(users, 1000)
    sorted_users = users[order.long()]
    assert bool((sorted_users.diff() >= 0).all())
    same_user = sorted_users.diff() == 0
    assert bool((order.diff()[same_user] > 0).all())
    counts = torch.bincount(users, minlength=1000)
    assert torch.equal(offsets.diff().long(), counts) and int(offsets[-1]) == users.numel()


def test_messages() -> None:
    users = torch.zeros(3, dtype=torch.int32)
    for args, message in (
        ((users[None], 1), r"expected cand_to_user of shape \[B\], got \[1, 3\]"),
        ((users.float(), 1), "expected cand_to_user in int32 or int64, got float32"),
        ((users, -1), "expected n_users >= 0, got -1"),
        ((users, 2**31), "expected fewer than 2"),
    ):
        with pytest.raises(RuntimeError, match=f"ikbo.group_candidates: {message}"):
            torch.ops.ikbo.group_candidates(*args)


# ---- candidate_map -----------------------------------------------------------------------------


@every_device
@given(users=st.lists(st.integers(-1, 4), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_from_indices(users: list[int], device: str) -> None:
    m = ikbo.candidate_map(users, n_users=5, device=device)
    order, offsets = grouped_by_sorting(torch.tensor(users), 5)
    assert m.cand_to_user.tolist() == users and m.n_candidates == len(users) and m.n_users == 5
    assert torch.equal(m.order.cpu(), order) and torch.equal(m.user_offsets.cpu(), offsets)
    assert m.cand_to_user.device.type == device and m.check() is m


@given(counts=st.lists(st.integers(0, 5), max_size=12), padding=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_from_counts_and_offsets(counts: list[int], padding: int) -> None:
    users = [u for u, n in enumerate(counts) for _ in range(n)]
    offsets = [sum(counts[:u]) for u in range(len(counts) + 1)]
    rows = len(users) + padding
    for m in (
        ikbo.candidate_map(counts=counts, n_candidates=rows),
        ikbo.candidate_map(offsets=torch.tensor(offsets), n_candidates=rows),
    ):
        assert m.cand_to_user.tolist() == users + [-1] * padding
        assert m.user_offsets.tolist() == offsets and m.order is None


def test_sources_other_than_lists() -> None:
    want = [0, 2, 2]
    for source in (tuple(want), numpy.array(want), torch.tensor(want, dtype=torch.uint8)):
        assert ikbo.candidate_map(source, n_users=3).cand_to_user.tolist() == want


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ikbo.candidate_map(), "exactly one of indices, counts and offsets, got none"),
        (lambda: ikbo.candidate_map([0], counts=[1], n_users=1), "got indices and counts"),
        (lambda: ikbo.candidate_map([0]), "indices need n_users"),
        (lambda: ikbo.candidate_map([0, 3, 1], n_users=3), "got 3 in row 1"),
        (lambda: ikbo.candidate_map([-2], n_users=3), "got -2 in row 0"),
        (lambda: ikbo.candidate_map(torch.tensor([2**32]), n_users=3), "expected users in"),
        (lambda: ikbo.candidate_map([0.5], n_users=3), "1-D sequence of integers, got torch.float"),
        (lambda: ikbo.candidate_map([[0]], n_users=3), "1-D sequence of integers"),
        (lambda: ikbo.candidate_map(counts=[1, -1]), "counts >= 0, got -1"),
        (lambda: ikbo.candidate_map(counts=[1], n_users=1), "n_users goes with indices"),
        (lambda: ikbo.candidate_map(counts=[3], n_candidates=2), "below the 3 candidates"),
        (lambda: ikbo.candidate_map(offsets=[]), "length U \\+ 1 >= 1, got 0"),
        (lambda: ikbo.candidate_map(offsets=[1, 2]), "ascending from 0"),
        (lambda: ikbo.candidate_map(offsets=[0, 3, 2]), "ascending from 0"),
    ],
)
def test_mistakes_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.gpu
def test_device_maps_are_checked_on_demand() -> None:
    m = ikbo.candidate_map(torch.tensor([0, 7], device="cuda"), n_users=3)
    with pytest.raises(ValueError, match="row 1"):
        m.check()
    with pytest.raises(ValueError, match="need n_candidates"):
        ikbo.candidate_map(counts=torch.tensor([1], device="cuda"))


class _Uses(torch.nn.Module):
    def forward(self, x: Tensor, m: ikbo.CandidateMap) -> Tensor:
        return x[m.cand_to_user.long()] * m.n_users


def test_a_map_is_an_argument_of_compiled_and_exported_programs() -> None:
    x, m = torch.randn(3, 2), ikbo.candidate_map([2, 0, 1, 1], n_users=3)
    want = _Uses()(x, m)
    assert torch.equal(torch.compile(_Uses(), fullgraph=True, backend="aot_eager")(x, m), want)
    program = torch.export.export(_Uses(), (x, m))
    saved = io.BytesIO()
    torch.export.save(program, saved)
    saved.seek(0)
    assert torch.equal(torch.export.load(saved).module()(x, m), want)
    leaves, spec = torch.utils._pytree.tree_flatten(m)
    assert len(leaves) == 3 and torch.utils._pytree.tree_unflatten(leaves, spec).n_users == 3
