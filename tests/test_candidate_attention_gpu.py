"""The candidate attention kernels on a GPU: sizes where they break, lengths, layouts, streams."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import ikbo
from ikbo.testing import assert_matches_definition, definitions

from .memory import peak_bytes
from .test_linear_compression_gpu import GUARD, NAN, guarded

DTYPES = [torch.bfloat16, torch.float16]
HEADS = [(64, 64), (128, 128), (192, 128), (256, 256), (40, 72), (8, 8), (136, 24)]  # D, Dv


def randn(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*sizes, device="cuda").to(dtype)


def problem(
    counts: list[int], S: int, L: int, H: int = 2, Hk: int = 2, D: int = 128, Dv: int = 128,
    dtype: torch.dtype = torch.bfloat16, lengths: list[int] | None = None,
    scale: float | None = None,
) -> list[Any]:  # fmt: skip
    """`counts` candidates a user, grouped; what lies beyond the lengths is NaN."""
    B, U = sum(counts), len(counts)
    m = ikbo.candidate_map(counts=torch.tensor(counts), device="cuda")
    k, v = randn(U, L, Hk, D, dtype=dtype), randn(U, L, Hk, Dv, dtype=dtype)
    kv_len = None
    if lengths is not None:
        kv_len = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        for u, n in enumerate(lengths):
            k[u, n:], v[u, n:] = NAN, NAN
    return [guarded(randn(B, S, H, D, dtype=dtype)), guarded(k), guarded(v), None, kv_len,
            m.cand_to_user, m.user_offsets, m.order, scale]  # fmt: skip


def fwd(args: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.ops.ikbo.candidate_attention_fwd(*args)


def definition(args: list[Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """With the keys beyond a user's length set to zero, which the definition ignores anyhow."""
    q, k, v, kv_start, kv_len, users, _, _, scale = args
    q, k, v = (t.to(dtype) for t in (q, k.nan_to_num(), v.nan_to_num()))
    return definitions.candidate_attention(q, k, v, kv_start, kv_len, users, scale)


def check_in_a_graph_and_on_streams(call: Callable[[], Tensor], want: Tensor) -> None:
    """The same bits by a graph and, at the same time, on two streams."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = call()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(5):
        replayed.zero_()
        torch.cuda.synchronize()
        got = []
        for stream in streams:
            with torch.cuda.stream(stream):
                got.append(call())
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, want) for x in (*got, replayed))


def check(args: list[Any]) -> Tensor:
    with ikbo.strict():
        out, lse = fwd(args)
        assert torch.equal(torch.ops.ikbo.candidate_attention(*args), out)
    exact_out, exact_lse = definition(args, torch.float64)
    assert_matches_definition(out, exact_out, definition(args, out.dtype)[0])
    plain = definition(args, torch.float32)[1]
    assert_matches_definition(lse, exact_lse, plain, multiple=4.0)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("S", [1, 3, 63, 64, 65, 100, 256])
@pytest.mark.parametrize("L", [1, 17, 127, 128, 129, 1000])
def test_rows_and_keys(S: int, L: int) -> None:
    dtype = DTYPES[(S + L) % 2]
    check(problem([3, 1, 0, 6], S, L, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("D", "Dv"), HEADS)
@pytest.mark.parametrize(("H", "Hk"), [(1, 1), (6, 2), (4, 1)])
def test_heads(D: int, Dv: int, H: int, Hk: int, dtype: torch.dtype) -> None:
    check(problem([5, 2, 9], 20, 200, H, Hk, D, Dv, dtype))
    check(problem([5, 2, 9], 70, 300, H, Hk, D, Dv, dtype, lengths=[300, 1, 130]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "counts", [[1] * 300, [700], [64] * 20, [0, 130, 0, 0, 1, 0], [2] * 100 + [90] + [0] * 50]
)
def test_users_of_all_sizes(counts: list[int]) -> None:
    check(problem(counts, 7, 150))
    lengths = [(37 * u) % 151 for u in range(len(counts))]
    check(problem(counts, 7, 150, lengths=lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(24))
def test_many_tiles_a_cta(seed: int) -> None:
    """On one to three SMs: tiles of all sizes follow one another in a CTA, with histories of none,
    one or several blocks, candidates in any order."""
    random = Random(seed)
    U = random.choice([1, 5, 40])
    L = random.choice([1, 100, 128, 129, 500])
    S = random.choice([1, 3, 20, 64, 100])
    counts = [random.choice([0, 1, 2, 9, 40]) for _ in range(U)]
    counts[-1] = 3
    lengths = [random.choice([0, 1, L // 2, L, L]) for _ in range(U)]
    D, Dv = random.choice(HEADS[:4])
    args = problem(counts, S, L, 4, random.choice([1, 4]), D, Dv, DTYPES[seed % 2], lengths)
    if random.random() < 0.5:
        users = args[5][torch.randperm(len(args[5]), device="cuda")]
        users[:1] = -1
        m = ikbo.candidate_map(users, n_users=U)
        args[5:8] = [m.cand_to_user, m.user_offsets, m.order]
    with ikbo.sm_limit(random.choice([1, 2, 3])):
        check(args)


@pytest.mark.gpu
def test_tickets() -> None:
    """Whichever CTA takes a tile, the bits are the same."""
    lengths = [(97 * u) % 601 for u in range(48)]
    args = problem([8] * 48, 128, 600, lengths=lengths)
    assert ikbo.explain("candidate_attention", *args)["config"]["tickets"]
    out = check(args)
    for _ in range(10):
        assert torch.equal(fwd(args)[0], out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed, _ = fwd(args)
    for _ in range(3):
        replayed.zero_()
        graph.replay()
        assert torch.equal(replayed, out)


@pytest.mark.gpu
def test_tiles_shared_out_by_keys() -> None:
    """Tiles that don't fill a round: the same bits each time, in graphs and on two streams."""
    args = problem([2] * 70, 64, 1000)
    assert ikbo.explain("candidate_attention", *args)["config"]["shared_blocks"] == 8
    out = check(args)
    check_in_a_graph_and_on_streams(lambda: fwd(args)[0], out)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(24))
def test_shared_tiles_of_all_sizes(seed: int) -> None:
    """On a few SMs, users with more and fewer tiles than was taken for granted, candidates in any
    order, rows without a user."""
    random = Random(seed)
    sms = random.choice([2, 3, 5, 8])
    S, L = random.choice([20, 64, 100]), random.choice([700, 1000, 1024, 3000])
    counts = [random.choice([0, 1, 2, 9, 20]) for _ in range(sms)]
    counts[-1] = 3
    args = problem(counts, S, L, random.choice([1, 2, 3]), 1, dtype=DTYPES[seed % 2])
    if random.random() < 0.5:
        users = args[5][torch.randperm(len(args[5]), device="cuda")]
        users[:1] = -1
        m = ikbo.candidate_map(users, n_users=len(counts))
        args[5:8] = [m.cand_to_user, m.user_offsets, m.order]
    with ikbo.sm_limit(sms):
        check(args)


@pytest.mark.gpu
def test_tall_tiles_of_small_heads() -> None:
    """Three consumers, some without rows in a user's last tile."""
    lengths = [(97 * u) % 601 for u in range(40)]
    for counts in ([6] * 40, [5, 7] * 20):
        for args in (
            problem(counts, 64, 500, 4, 2, 64, 64),
            problem(counts, 64, 600, 4, 4, 64, 64, torch.float16, lengths),
        ):
            assert "192x128" in ikbo.explain("candidate_attention", *args)["config"]["kernel"]
            check(args)


@pytest.mark.gpu
def test_offsets_give_the_same() -> None:
    lengths = [300, 0, 17, 140]
    args = problem([9, 3, 30, 2], 20, 300, lengths=lengths)
    want = fwd(args)
    flat = [torch.cat([t[u, :n] for u, n in enumerate(lengths)]) for t in args[1:3]]
    offsets = torch.tensor([0, 300, 300, 317, 457], device="cuda")
    for start in (offsets, offsets.int()):
        got = fwd([args[0], *flat, start, None, *args[5:]])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0, 30.0])
def test_scales(scale: float) -> None:
    check(problem([9, 4], 33, 300, scale=scale))


@pytest.mark.gpu
def test_large_scores() -> None:
    args = problem([9, 4], 33, 300, scale=1.0)
    args[0].mul_(30)
    args[1].mul_(30)
    check(args)


@pytest.mark.gpu
def test_few_tiles_and_long_histories() -> None:
    """Keys are cut into parts: also where some users have fewer keys than there are parts."""
    args = problem([40], 1, 8000)
    assert ikbo.explain("candidate_attention", *args)["config"]["parts"] > 1
    check(args)
    check(problem([5, 3, 0, 7], 2, 4000, lengths=[4000, 3, 5, 1111]))
    users = problem([5, 3], 2, 4000, lengths=[4000, 0])
    users[5] = users[5].clone()
    users[5][-1] = -1
    users[6] = torch.tensor([0, 5, 7], dtype=torch.int32, device="cuda")
    check(users)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(
    "counts", [[6, 1, 0, 1], [3, 3, 0], [10] + [1] * 9, [0] * 9 + [8], [3, 0, 2, 1]]
)
def test_more_tiles_or_fewer_than_spread_evenly(counts: list[int], D: int) -> None:
    """Of keys cut into parts: CTAs are as many as parts if candidates are spread evenly."""
    args = problem(counts, 64, 2100, D=D, Dv=D)
    config = ikbo.explain("candidate_attention", *args)["config"]
    assert config["parts"] > 1
    out = check(args)
    for _ in range(5):
        assert torch.equal(fwd(args)[0], out)
    lengths = [(511 * u + 2100) % 2101 for u in range(len(counts))]
    padded = problem(counts, 64, 2100, D=D, Dv=D, lengths=lengths)
    padded[5] = padded[5].clone()
    padded[5][-1] = -1
    padded[5:8] = [padded[5], None, None]
    check(padded)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(
    ("S", "L", "sms"), [(1, 1, 132), (1, 4100, 132), (40, 600, 132), (40, 200, 5), (90, 1000, 2)]
)
def test_first_tiles_guessed_right_and_wrong(S: int, L: int, sms: int, D: int) -> None:
    """A CTA begins with the tile that it has if candidates are spread evenly over users. In one
    graph they are, then aren't, then some have no user."""
    even = [8] * 8
    args = problem(even, S, L, D=D, Dv=D)
    with ikbo.sm_limit(sms):
        assert ikbo.explain("candidate_attention", *args)["config"]["expected_tiles"] > 0
        fwd(args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = fwd(args)
        for counts in (even, [7, 9] * 4, [64] + [0] * 7, [0] * 7 + [64], [8] * 7 + [3], even):
            n = sum(counts)
            m = ikbo.candidate_map(counts=torch.tensor(counts), device="cuda")
            args[5].fill_(-1)
            args[5][:n] = m.cand_to_user
            args[6].copy_(m.user_offsets)
            out.zero_()
            graph.replay()
            want = check(args)
            assert torch.equal(out, want) and torch.equal(lse, fwd(args)[1])


@pytest.mark.gpu
@pytest.mark.parametrize(("counts", "L", "cut"), [([40], 8000, True), ([64] * 32, 600, False)])
def test_short_launches_that_read_what_the_one_before_wrote(
    counts: list[int], L: int, cut: bool
) -> None:
    """Their CTAs start before it ends: on one stream, on two, and in a graph."""
    args = problem(counts, 1, L)
    assert (ikbo.explain("candidate_attention", *args)["config"]["parts"] > 1) == cut

    def chain(after_each: Callable[[], None] = lambda: None) -> Tensor:
        q = args[0]
        for _ in range(6):
            q, _ = fwd([q * 30, *args[1:]])
            q, _ = fwd([q, *args[1:]])
            after_each()
        return q

    want = chain(torch.cuda.synchronize)
    check_in_a_graph_and_on_streams(chain, want)


@pytest.mark.gpu
@pytest.mark.parametrize("flat", [False, True])
def test_rows_without_a_user_and_ranges_out_of_range(flat: bool) -> None:
    args = problem([3, 4, 2, 2, 3], 20, 140, lengths=[140, 0, 17, 140, 64])
    users = args[5].clone()
    users[-3:] = torch.tensor([-1, 99, -7], dtype=torch.int32)
    args[5:8] = [users, None, None]
    if flat:
        args[1], args[2] = args[1].flatten(0, 1), args[2].flatten(0, 1)
        args[3] = torch.arange(0, 700, 140, dtype=torch.int32, device="cuda")
        args[4][3] = 10**6
    else:
        args[4][3] = 141
    with ikbo.strict():
        out, lse = fwd(args)
    exact_out, exact_lse = definition(args, torch.float64)
    assert_matches_definition(out, exact_out, definition(args, out.dtype)[0])
    assert_matches_definition(lse, exact_lse, definition(args, torch.float32)[1], multiple=4.0)


@pytest.mark.gpu
@pytest.mark.parametrize("S", [1, 3, 8, 20, 64, 128])
@pytest.mark.parametrize("L", [300, 4000])
def test_unsorted_maps_give_the_same(S: int, L: int) -> None:
    """Rows that lie 1, 4, 8 or 64 together; with 4000 keys cut into parts where S is small."""
    args = problem([30, 0, 50, 7], S, L, lengths=[L, 5, 100, 77])
    want, want_lse = fwd(args)
    shuffle = torch.randperm(87, device="cuda")
    m = ikbo.candidate_map(args[5][shuffle].cpu(), n_users=4, device="cuda")
    shuffled = [args[0][shuffle], *args[1:5], m.cand_to_user, m.user_offsets, m.order, None]
    for grouping in ((m.user_offsets, m.order), (None, None)):
        shuffled[6:8] = grouping
        with ikbo.strict():
            out, lse = fwd(shuffled)
        assert torch.equal(out, want[shuffle]) and torch.equal(lse, want_lse[shuffle])


@pytest.mark.gpu
def test_strided_operands() -> None:
    args = problem([30, 50, 7], 24, 300, D=64, Dv=64)
    want, _ = fwd(args)
    q, k, v = args[:3]
    qkv = torch.full((87, 24, 3, 2, 64), NAN, dtype=torch.bfloat16, device="cuda")
    qkv[:, :, 1] = q
    kv = torch.full((3, 300, 2, 2, 64), NAN, dtype=torch.bfloat16, device="cuda")
    kv[:, :, 0], kv[:, :, 1] = k, v
    heads_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    keys_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    for q_, k_, v_ in (
        (qkv[:, :, 1], kv[:, :, 0], kv[:, :, 1]),
        (heads_first, *keys_first),
    ):
        with ikbo.strict():
            assert torch.equal(fwd([q_, k_, v_, *args[3:]])[0], want)


@pytest.mark.gpu
def test_out_is_written_and_nothing_else() -> None:
    args = problem([30, 50, 7], 25, 300)
    want, _ = fwd(args)
    out = guarded(torch.zeros_like(want))
    torch.ops.ikbo.candidate_attention.out(*args, out=out)
    flat = out._base
    assert flat is not None and torch.equal(out, want)
    assert bool(flat[:GUARD].isnan().all()) and bool(flat[-GUARD:].isnan().all())


@pytest.mark.gpu
def test_nan_stays_with_its_candidate_and_its_user() -> None:
    args = problem([30, 50, 7], 20, 300)
    clean, _ = fwd(args)
    args[0][12, 3], args[2][2, 299] = NAN, NAN
    dirty, _ = fwd(args)
    touched = torch.zeros(87, 20, dtype=torch.bool, device="cuda")
    touched[12, 3] = touched[80:] = True
    assert torch.equal(dirty[~touched], clean[~touched])
    assert bool(dirty[touched].isnan().any(-1).all())


@pytest.mark.gpu
@pytest.mark.parametrize("ordered", [False, True])
def test_workspace_does_not_grow_with_keys(ordered: bool) -> None:
    """Beside the result and lse next to nothing, also where candidates come in any order."""
    peaks = []
    for L in (500, 8000):
        args = problem([64] * 8, 16, L)
        if ordered:
            m = ikbo.candidate_map(args[5][torch.randperm(512, device="cuda")], n_users=8)
            args[5:8] = [m.cand_to_user, m.user_offsets, m.order]
        out, lse = fwd(args)
        peaks.append(peak_bytes(lambda: fwd(args)) - out.nbytes - lse.nbytes)  # noqa: B023
    assert max(peaks) <= 1 << 20


@pytest.mark.gpu
def test_two_streams_at_once_and_the_same_bits() -> None:
    cases = [problem([64] * 8, 32, 700), problem([3] * 100, 40, 500)]
    want = [fwd(args)[0] for args in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        got = []
        for stream, args in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                got.append(fwd(args)[0])
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[40], [30, 50, 7]])
def test_graph_replay_with_changed_lengths(counts: list[int]) -> None:
    args = problem(counts, 3, 3000, lengths=[3000] * len(counts))
    args[1], args[2] = args[1].nan_to_num(), args[2].nan_to_num()
    fwd(args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fwd(args)
    for length in (2999, 17, 0, 3000):
        args[4].fill_(length)
        args[0].normal_()
        graph.replay()
        want, want_lse = fwd(args)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


# ---- backward ----------------------------------------------------------------------------------


def gradients(args: list[Any], weight: Tensor) -> tuple[Tensor, ...]:
    inputs = [t.detach().requires_grad_() for t in args[:3]]
    out = torch.ops.ikbo.candidate_attention(*inputs, *args[3:])
    return torch.autograd.grad(out, inputs, weight.to(out.dtype))


def exact_gradients(
    args: list[Any], weight: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    q, k, v, *_ = args
    inputs = [t.detach().nan_to_num().to(dtype).requires_grad_() for t in (q, k, v)]
    out, _ = definitions.candidate_attention(*inputs, *args[3:6], args[8])
    return torch.autograd.grad(out, inputs, weight.to(dtype))


def backward_args(
    form: str, order: bool = False, dtype: torch.dtype = torch.bfloat16, **sizes: Any
) -> tuple[list[Any], Tensor]:
    """A problem with an empty history, a user without candidates and rows without a user, and the
    gradient of its result: NaN where rows without a user are."""
    args = problem([30, 0, 50, 7, 3], 20, 300, dtype=dtype, lengths=[300, 7, 129, 0, 64], **sizes)
    users = args[5].clone()
    users[-3:] = torch.tensor([-1, 99, -1], dtype=torch.int32)
    if order:
        users = users[torch.randperm(90, device="cuda")]
    m = ikbo.candidate_map(users, n_users=5)
    args[5:8] = [m.cand_to_user, m.user_offsets, m.order]
    if form == "dense":
        args[1:3], args[4] = [t.nan_to_num() for t in args[1:3]], None
    elif form == "offsets":
        for i in (1, 2):
            histories = [t[:n] for t, n in zip(args[i], args[4].tolist(), strict=True)]
            args[i] = torch.cat([*histories, torch.full_like(args[i][0, :5], NAN)])
        args[3] = torch.tensor([0, 300, 307, 436, 436, 500], dtype=torch.int32, device="cuda")
        args[4] = None
    weight = randn(*args[0].shape[:3], args[2].shape[-1]).double()
    weight[(m.cand_to_user < 0) | (m.cand_to_user > 4)] = 0
    return args, weight


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["dense", "dense_len", "offsets"])
@pytest.mark.parametrize("order", [False, True])
def test_gradients_by_flash_attention(form: str, order: bool, dtype: torch.dtype) -> None:
    for sizes in ({}, {"H": 6, "Hk": 2, "D": 64, "Dv": 64}, {"D": 40, "Dv": 72}):
        args, weight = backward_args(form, order, dtype, **sizes)
        with ikbo.strict():
            got = gradients(args, weight)
        exact, plain = exact_gradients(args, weight), exact_gradients(args, weight, dtype)
        for ours, e, p in zip(got, exact, plain, strict=True):
            assert_matches_definition(ours, e, p)


@pytest.mark.gpu
def test_what_the_backward_runs_is_explained() -> None:
    def record(args: list[Any]) -> Any:
        out, lse = fwd(args)
        return ikbo.explain("candidate_attention_bwd", out, *args[:3], out, lse, *args[3:], 7)

    args = problem([3, 4], 5, 60, lengths=[60, 9])
    assert record(args)["path"] == "library"
    assert "deterministic" in record(args)["config"]
    args[8] = -1.0
    assert "a scale that isn't positive" in record(args)["reason"]
    args = problem([3, 4], 5, 60, lengths=[60, 9])
    args[1], args[2] = args[1].flatten(0, 1).nan_to_num(), args[2].flatten(0, 1).nan_to_num()
    args[3] = torch.tensor([0, 60], dtype=torch.int32, device="cuda")
    assert "which users may share" in record(args)["reason"]


@pytest.mark.gpu
def test_deterministic_backward() -> None:
    args, weight = backward_args("dense_len")
    torch.use_deterministic_algorithms(True)
    try:
        first = gradients(args, weight)
        for _ in range(5):
            for a, b in zip(gradients(args, weight), first, strict=True):
                assert torch.equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu_slow
def test_more_than_2_to_the_31_elements_of_q() -> None:
    B, S, H, D = 270_000, 32, 2, 128
    q = torch.empty(B, S, H, D, dtype=torch.bfloat16, device="cuda").normal_()
    assert q.numel() > 2**31
    k, v = randn(2, 130, H, D), randn(2, 130, H, D)
    m = ikbo.candidate_map(counts=torch.tensor([B - 9, 9]), device="cuda")
    out = ikbo.candidate_attention(q, k, v, m)
    for rows in (slice(0, 3), slice(B - 12, B)):
        args = [q[rows], k, v, None, None, m.cand_to_user[rows], None, None, None]
        exact = definition(args, torch.float64)[0]
        assert_matches_definition(out[rows], exact, definition(args, torch.bfloat16)[0])
