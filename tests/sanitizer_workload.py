"""What test_sanitizer.py runs under compute-sanitizer: every kernel once, on small odd shapes."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

import ikbo


def concat_linear(B: int, U: int, N: int, Kc: int, Ku: int, activation: str) -> None:
    """Weights with odd row strides are packed first."""
    x_cand, x_user, w_cand, w_user = (
        torch.randn(rows, (k + 7) // 8 * 8, dtype=torch.bfloat16, device="cuda")[:, :k]
        for rows, k in ((B, Kc), (U, Ku), (N, Kc), (N, Ku))
    )
    bias = torch.randn(N, dtype=torch.bfloat16, device="cuda")
    users = torch.randint(-1, U + 1, (B,), dtype=torch.int32, device="cuda")
    torch.ops.ikbo.concat_linear(x_cand, x_user, w_cand, w_user, bias, users)
    packed = (w_cand.contiguous(), w_user.contiguous())
    torch.ops.ikbo.concat_linear_fwd(x_cand, x_user, *packed, bias, users, activation=activation)
    part = torch.randn(U, N, device="cuda")
    torch.ops.ikbo.concat_linear_add(x_cand, w_cand, part, bias, users)


def linear_compression(B: int, U: int, M: int, N: int, Kc: int, Ku: int, activation: str) -> None:
    """Weights with odd row strides are packed first."""
    e_cand, e_user, w_cand, w_user, bias = (
        torch.randn(*sizes, dtype=torch.bfloat16, device="cuda")
        for sizes in ((B, Kc, N), (U, Ku, N), (M, Kc), (M, Ku), (M,))
    )
    users = torch.randint(-1, U + 1, (B,), dtype=torch.int32, device="cuda")
    torch.ops.ikbo.linear_compression_fwd(
        e_cand, e_user, w_cand, w_user, bias, users, activation=activation
    )
    part = torch.randn(U, M, N, device="cuda")
    torch.ops.ikbo.linear_compression_add(e_cand, w_cand, part, bias, users)


def gated(M: int, N: int, K: int, out_features: int, activation: str) -> None:
    """Weights with odd row strides are packed first."""
    x, w_gate, w_up = (
        torch.randn(rows, (K + 7) // 8 * 8, dtype=torch.bfloat16, device="cuda")[:, :K]
        for rows in (M, N, N)
    )
    w_down = torch.randn(out_features, N, dtype=torch.bfloat16, device="cuda")
    bias = torch.randn(N, dtype=torch.bfloat16, device="cuda")
    mlp = (x, w_gate, w_up.contiguous(), bias, None, w_down, None, activation)
    torch.ops.ikbo.gated_mlp(*mlp)
    out, *saved = torch.ops.ikbo.gated_mlp_fwd(*mlp)
    torch.ops.ikbo.gated_mlp_bwd(out, x, w_gate, w_up, w_down, *saved, activation, 0b1111111)
    out, preact = torch.ops.ikbo.linear_act_fwd(x, w_gate, bias, activation)
    torch.ops.ikbo.linear_act_bwd(out, x, w_gate, preact, activation, 0b111)
    torch.ops.ikbo.linear_act(x, w_gate[:3], None, activation)


def candidate_attention(
    B: int, S: int, U: int, L: int, H: int, Hk: int, D: int, Dv: int, flat: bool
) -> None:
    """Histories of any length, candidates in any order and grouped, some without a user; backward
    where flash attention takes it."""
    q = torch.randn(B, S, H, D, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(U, L, Hk, d, dtype=torch.bfloat16, device="cuda") for d in (D, Dv))
    kv_len = torch.randint(0, L + 1, (U,), dtype=torch.int32, device="cuda")
    start = None
    if flat:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        start = torch.arange(0, U * L, L, dtype=torch.int32, device="cuda")
    users = torch.randint(-1, U + 1, (B,), dtype=torch.int32, device="cuda")
    out, lse = torch.ops.ikbo.candidate_attention_fwd(q, k, v, start, kv_len, users)
    counts = torch.full((U,), B // U, dtype=torch.int32)
    m = ikbo.candidate_map(counts=counts, n_candidates=B, device="cuda")
    grouped = (m.cand_to_user, m.user_offsets, m.order)
    torch.ops.ikbo.candidate_attention(q, k, v, start, kv_len, *grouped)
    if not flat:
        # Candidates spread evenly over users, as is guessed where B is a multiple of U, and not.
        torch.ops.ikbo.candidate_attention(q, k, v, None, None, *grouped)
        counts[0] -= 1
        counts[-1] += 1
        m = ikbo.candidate_map(counts=counts, n_candidates=B, device="cuda")
        grouped = (m.cand_to_user, m.user_offsets, m.order)
        torch.ops.ikbo.candidate_attention(q, k, v, None, None, *grouped)
        torch.ops.ikbo.candidate_attention_bwd(
            torch.ones_like(out), q, k, v, out, lse, start, kv_len, users, None, None, None, 7
        )


# Reach every norm kernel for aligned rows compiled for a type of two bytes, and halved those for
# fp32: all numbers of vectors and lanes, within a warp and over several, rows that fit or don't.
NORM_COLUMNS = [5, 64, 100, 128, 130, 257, 384, 500, 512, 576, 640, 700, 1001, 1024, 1030, 1280,
                2304, 2560, 8192, 9001]  # fmt: skip
NORM_COLUMNS_APART = [128, 1024, 1152, 2048, 4096]


def norm(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, apart: int = 0) -> None:
    x, residual, grad = (
        torch.randn(rows, columns + apart, dtype=dtype, device="cuda")[:, apart:] for _ in range(3)
    )
    weight, bias = (torch.randn(columns, dtype=dtype, device="cuda") for _ in range(2))
    _, mean, rstd = torch.ops.ikbo.layer_norm_fwd(x, weight, bias)
    torch.ops.ikbo.layer_norm_bwd(grad, x, weight, bias, mean, rstd, 0.0, 1, 0b111)
    torch.ops.ikbo.rms_norm_bwd(grad, x, weight, None, rstd, 0.0, 1, 0b11)
    torch.ops.ikbo.rms_norm_fwd(x, weight)
    _, total, rstd = torch.ops.ikbo.add_rms_norm_fwd(x, residual, weight)
    torch.ops.ikbo.add_rms_norm_bwd(
        grad, grad, total, weight, None, rstd, 0.0, dtype, dtype, 1, 0b1111
    )


def norm_quant(rows: int, columns: int, apart: int = 1) -> None:
    """A scale a row, and one for all; rows at odd addresses, or not."""
    x = torch.randn(rows, columns + apart, dtype=torch.bfloat16, device="cuda")[:, apart:]
    weight = torch.randn(columns, dtype=torch.bfloat16, device="cuda")
    torch.ops.ikbo.layer_norm_quant(x, weight, weight)
    torch.ops.ikbo.rms_norm_quant(x, weight)
    torch.ops.ikbo.rms_norm_quant(x, None, None, torch.ones(1, device="cuda"))


def head_norm(tokens: int, heads: int, D: int) -> None:
    """Heads in the middle of wider rows, both ways."""
    qkv = torch.randn(tokens, heads + 4, D, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(heads, D, dtype=torch.bfloat16, device="cuda")
    x, grad = qkv[:, 2 : 2 + heads], qkv[:, :heads]
    _, rstd = torch.ops.ikbo.head_norm_fwd(x, weight)
    torch.ops.ikbo.head_norm_bwd(grad, x, weight, rstd, 0.0, 0b11)


def group_candidates(rows: int, n_users: int) -> None:
    users = torch.randint(-1, n_users + 1, (rows,), dtype=torch.int32, device="cuda")
    ikbo.group_candidates(users, n_users)


WORK: list[tuple[Callable[..., None], tuple[object, ...]]] = [
    (group_candidates, (33, 3)),
    (group_candidates, (8191, 16000)),
    (group_candidates, (20001, 300)),
    (group_candidates, (1001, 70000)),
    (linear_compression, (9, 2, 65, 72, 77, 9, "gelu")),
    (linear_compression, (150, 7, 128, 64, 70, 130, "none")),
    (linear_compression, (700, 7, 433, 64, 70, 66, "silu")),
    (concat_linear, (33, 3, 72, 77, 1100, "gelu")),
    (concat_linear, (2354, 40, 800, 57, 41, "silu")),
    (concat_linear, (13567, 2000, 136, 9, 17, "relu2")),
    (concat_linear, (5750, 3, 264, 500, 8, "gelu_tanh")),
    (candidate_attention, (33, 5, 4, 300, 2, 2, 64, 64, False)),
    (candidate_attention, (33, 5, 4, 300, 4, 2, 128, 128, True)),
    (candidate_attention, (40, 3, 3, 200, 2, 1, 192, 128, False)),
    (candidate_attention, (40, 3, 3, 200, 2, 2, 136, 200, True)),
    (candidate_attention, (40, 3, 4, 300, 2, 2, 128, 128, False)),  # a guess, right and wrong
    (candidate_attention, (8, 1, 2, 3000, 1, 1, 128, 128, False)),  # keys in parts
    (candidate_attention, (600, 64, 9, 130, 2, 2, 64, 64, True)),  # tickets
    (candidate_attention, (800, 64, 9, 200, 2, 2, 128, 128, True)),  # tickets, sorted
    (candidate_attention, (140, 128, 140, 520, 1, 1, 128, 128, False)),  # rounds of tiles
    (gated, (5, 72, 1030, 136, "silu")),
    (gated, (33, 72, 77, 136, "gelu")),
    (gated, (65, 8816, 1487, 136, "silu")),
    (gated, (13384, 80, 66, 136, "relu2")),
    (gated, (4659, 408, 82, 776, "gelu_tanh")),
    (gated, (300, 264, 136, 200, "gelu")),
    *((norm, (37, columns)) for columns in NORM_COLUMNS),
    *((norm, (37, columns, torch.float16)) for columns in NORM_COLUMNS),
    *((norm, (37, -(-columns // 2), torch.float32)) for columns in NORM_COLUMNS),
    *((norm, (37, columns, torch.bfloat16, 1)) for columns in NORM_COLUMNS_APART),
    (norm, (9, 20_000)),  # clusters of 2 and 4
    # Of 8 and 16. Of more rows two CTAs of clusters of 16 are on an SM: then synccheck 2025.3 takes
    # one's barriers for the other's, in a kernel of 40 lines too.
    (norm, (5, 131_072)),
    (norm, (9, 262_144)),  # of 16
    (norm, (9, 262_145)),  # looped
    # Whole rows, more than have their sums apart, that don't fill the last turn.
    *((norm, (271, columns)) for columns in (128, 256, 384, 512, 768, 1024, 2048, 4096, 8192)),
    *((norm, (271, columns, torch.float32)) for columns in (192, 2048, 4096)),
    (norm, (271, 384, torch.float16)),
    (norm, (135, 12_288)),
    (norm, (135, 16_384)),
    (norm, (9, 40_001)),
    (norm, (9000, 257)),
    (norm, (9000, 769)),
    (norm, (36_000, 33)),  # several turns a warp, several rows a CTA
    (norm, (2200, 1030)),
    (norm, (37, 4095, torch.float16)),
    (norm, (37, 2047, torch.float32)),
    (norm, (9000, 257, torch.bfloat16, 1)),
    (norm, (4300, 1024)),  # enough rows for weights to be loaded late
    (norm, (600, 4095)),
    (norm, (1030, 16_384, torch.bfloat16, 1)),  # tickets
    (norm, (9, 32_768)),  # both parts of a row in one CTA
    (norm, (9, 16_896)),  # clusters of 3 vectors a thread
    *((norm_quant, (37, columns, 0)) for columns in NORM_COLUMNS_APART),
    (norm_quant, (9, 262_144)),
    (norm_quant, (9, 262_145)),
    (norm_quant, (9000, 257)),
    (norm_quant, (600, 4095)),
    (norm_quant, (2121, 2048, 0)),  # enough rows for CTAs that take two, odd
    (norm_quant, (1061, 4096, 0)),
    (head_norm, (300, 5, 128)),
]


# The works of a name, shared out over so many processes. Of the norms' kernels, which have many
# barriers, synccheck's tables hold some dozens; after them it reports accesses that aren't there.
PARTS = {"norm": 12}


def names() -> list[str]:
    """Of all parts: NAME, or NAME/PART."""
    functions = sorted({function.__name__ for function, _ in WORK})
    return [
        f"{name}/{part}" if name in PARTS else name
        for name in functions
        for part in range(PARTS.get(name, 1))
    ]


def main() -> None:
    """The parts named on the command line. Says what it begins, so that a finding has a name: work
    ends before the next begins."""
    with ikbo.strict():
        for argument in sys.argv[1:]:
            name, _, part = argument.partition("/")
            works = [work for work in WORK if work[0].__name__ == name]
            for function, arguments in works[int(part or 0) :: PARTS.get(name, 1)]:
                print(function.__name__, arguments, flush=True)
                function(*arguments)
                torch.cuda.synchronize()


if __name__ == "__main__":
    main()
