"""linear_compression against torch's batched products."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cases import Case, Draw, Maker, compiled, map_args

NOTE = (
    "Done beforehand, untimed: `ikbo` gets weights whose rows are a multiple of 64 elements apart, "
    "as `ikbo.nn.LinearCompression` keeps them, and embeddings as they are; "
    "`torch_decomposed_*` get weights and embeddings padded to a multiple of 8 along K (of the "
    "embeddings, a copy that a model would pay for). `ikbo_pack_per_call` is `ikbo` with plain "
    "contiguous weights, which the op packs in every call."
)


def cases(scaled: Callable[[int], int]) -> list[Case]:
    def case(
        name: str, batch: int, ratio: int, M: int = 433, N: int = 256, Ku: int = 1178,
        Kc: int = 866, shuffled: bool = False,
    ) -> Case:  # fmt: skip
        def inputs(draw: Draw) -> SimpleNamespace:
            users = draw.user_map(scaled(batch), scaled(ratio), shuffled)
            m, n, ku, kc = scaled(M), scaled(N), scaled(Ku), scaled(Kc)
            return SimpleNamespace(
                e_cand=draw.randn(users.n_candidates, kc, n),
                e_user=draw.randn(users.n_users, ku, n),
                w_cand=draw.randn(m, kc), w_user=draw.randn(m, ku), map=users,
            )  # fmt: skip

        contestants = {"ikbo": _ikbo(_rows_apart)}
        if Ku % 8 or Kc % 8:
            contestants["ikbo_pack_per_call"] = _ikbo(torch.Tensor.contiguous)
        contestants |= {
            "torch_decomposed_padded": _padded(_decomposed),
            "torch_decomposed_compiled": _padded(lambda *args: compiled(_decomposed)(*args)),
            "torch_bmm": _bmm,
            "torch_gather_bmm": _gather_bmm,
        }
        return Case(name, inputs, contestants)

    return [
        case("B1024_r70", 1024, 70),
        case("B512_r70", 512, 70),
        case("B2048_r70", 2048, 70),
        case("B3072_r70", 3072, 70),
        case("B1024_r2", 1024, 2),
        case("B1024_r10", 1024, 10),
        case("B1024_r1000", 1024, 1000),
        case("B64_r8", 64, 8),
        case("B8_r8", 8, 8),
        case("B1_r1", 1, 1),
        case("small_B1024_r70", 1024, 70, M=128, N=64, Ku=512, Kc=512),
        case("shuf_B1024_r70", 1024, 70, shuffled=True),
    ]


def _rows_apart(w: Tensor) -> Tensor:
    """Rows a multiple of 64 elements apart, zeros between them: what the kernel reads as it is."""
    return F.pad(w, (0, -w.shape[1] % 64))[:, : w.shape[1]]


def _ikbo(prepare: Callable[[Tensor], Tensor]) -> Maker:
    def make(i: Any) -> Callable[[], Tensor]:
        w_cand, w_user = prepare(i.w_cand), prepare(i.w_user)
        return lambda: torch.ops.ikbo.linear_compression(
            i.e_cand, i.e_user, w_cand, w_user, None, *map_args(i.map)
        )

    return make


def _decomposed(
    e_cand: Tensor, e_user: Tensor, w_cand: Tensor, w_user: Tensor, users: Tensor
) -> Tensor:
    return w_cand @ e_cand + (w_user @ e_user).index_select(0, users)


def _padded(function: Callable[..., Tensor]) -> Maker:
    """Both K padded to a multiple of 8 beforehand, which cuBLAS needs for its fast kernels."""

    def make(i: Any) -> Callable[[], Tensor]:
        embeddings = [F.pad(e, (0, 0, 0, -e.shape[1] % 8)) for e in (i.e_cand, i.e_user)]
        weights = [F.pad(w, (0, -w.shape[1] % 8)) for w in (i.w_cand, i.w_user)]
        return lambda: function(*embeddings, *weights, i.map.cand_to_user)

    return make


def _concatenated(i: Any) -> Tensor:
    return torch.cat((i.e_user.index_select(0, i.map.cand_to_user), i.e_cand), 1)


def _bmm(i: Any) -> Callable[[], Tensor]:
    """The concatenation is there already: the product alone."""
    w, e = torch.cat((i.w_user, i.w_cand), 1), _concatenated(i)
    return lambda: w @ e


def _gather_bmm(i: Any) -> Callable[[], Tensor]:
    w = torch.cat((i.w_user, i.w_cand), 1)
    return lambda: w @ _concatenated(i)
