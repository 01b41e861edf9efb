"""Multi-head attention of candidates over their user's history."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from .. import ops
from ..ops import CandidateMap
from ._common import share_parameters


class CandidateAttention(nn.Module):
    """nn.MultiheadAttention where each candidate attends to the history of its user.

    ``out[b] = out_proj(attention(q_proj(query[b]), k_proj(history[u(b)]), v_proj(history[u(b)])))``
    with ``u(b)`` the user of candidate b. Keys and values are projected and read once per user and
    never copied per candidate. Parameters, initialisation and state dict are those of
    ``nn.MultiheadAttention(embed_dim, num_heads, bias=bias, kdim=kdim, vdim=vdim)``.

    The output projection is applied to every row: one with nothing to attend to, a padding row for
    example, holds its bias.

    Args:
        embed_dim: E, features of the query and of the result; a multiple of num_heads.
        num_heads: H.
        bias: whether the projections have biases.
        kdim, vdim: features of the keys' and the values' history; ``embed_dim`` by default.
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    out_proj: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise ValueError(
                "ikbo.nn.CandidateAttention: expected embed_dim to be a positive multiple of "
                f"num_heads, got embed_dim={embed_dim} and num_heads={num_heads}."
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout = 0.0  # of a converted nn.MultiheadAttention; see _check_supported
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight",
                     "in_proj_bias"):  # fmt: skip
            self.register_parameter(name, None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device="meta")
        attention = nn.MultiheadAttention(
            embed_dim, num_heads, bias=bias, kdim=kdim, vdim=vdim, device=device, dtype=dtype
        )
        share_parameters(attention, self)

    @classmethod
    def from_multihead_attention(cls, attention: nn.MultiheadAttention) -> Self:
        """A CandidateAttention with the attention's own parameters: what trains one trains both.

        ``batch_first`` doesn't matter to the parameters; this module's inputs are batch first.

        Raises:
            ValueError: the attention has add_bias_kv or add_zero_attn.
        """
        for option, there in (
            ("add_bias_kv", attention.bias_k is not None),
            ("add_zero_attn", attention.add_zero_attn),
        ):
            if there:
                raise ValueError(
                    f"ikbo.nn.CandidateAttention: expected {option}=False, got True. There is no "
                    "equivalent; keep nn.MultiheadAttention for this layer."
                )
        module = cls(
            attention.embed_dim,
            attention.num_heads,
            attention.in_proj_bias is not None,
            attention.kdim,
            attention.vdim,
            device="meta",
        )
        module.dropout = attention.dropout
        share_parameters(attention, module)
        return module

    def to_multihead_attention(self) -> nn.MultiheadAttention:
        """An ``nn.MultiheadAttention(batch_first=True)`` with the same parameters."""
        attention = nn.MultiheadAttention(
            self.embed_dim,
            self.num_heads,
            dropout=self.dropout,
            bias=self.in_proj_bias is not None,
            kdim=self.kdim,
            vdim=self.vdim,
            batch_first=True,
            device="meta",
        )
        share_parameters(self, attention)
        return attention

    def forward(
        self,
        query: Tensor,
        history: Tensor,
        candidates: CandidateMap | Tensor,
        kv_len: Tensor | None = None,
        *,
        values: Tensor | None = None,
    ) -> Tensor:
        """Attention of each candidate over its user's history.

        Args:
            query: ``[B, S, E]``, S rows per candidate.
            history: ``[U, L, kdim]``.
            candidates: a :class:`ikbo.CandidateMap`, or int32/int64 ``[B]``.
            kv_len: int32 ``[U]``, how much of each user's history counts; by default all of it.
            values: ``[U, L, vdim]``, where the values come from something other than ``history``.

        Returns:
            ``[B, S, E]``.

        Raises:
            RuntimeError: shapes, dtypes or devices don't agree, or there is dropout in training.
        """
        k, v = self.project_history(history, values)
        return self.attend(query, k, v, candidates, kv_len)

    def project_history(
        self, history: Tensor, values: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of each user, to be computed once per request: ``[U, L, H, D]`` each."""
        if self.in_proj_weight is not None and values is None:
            # One product for both.
            bias = None if self.in_proj_bias is None else self.in_proj_bias[self.embed_dim :]
            kv = F.linear(history, self.in_proj_weight[self.embed_dim :], bias)
            k, v = kv.chunk(2, dim=-1)
        else:
            k = self._project(1, history)
            v = self._project(2, history if values is None else values)
        return self._heads(k), self._heads(v)

    def attend(
        self,
        query: Tensor,
        k: Tensor,
        v: Tensor,
        candidates: CandidateMap | Tensor,
        kv_len: Tensor | None = None,
    ) -> Tensor:
        """:meth:`forward` with the keys and values of :meth:`project_history` at hand."""
        self._check_supported()
        q = self._heads(self._project(0, query))
        attended = ops.candidate_attention(q, k, v, candidates, kv_len=kv_len)
        projected: Tensor = self.out_proj(attended.flatten(-2))
        return projected

    def _project(self, which: int, x: Tensor) -> Tensor:
        """The projection of the query (0), the key (1) or the value (2)."""
        rows = slice(which * self.embed_dim, (which + 1) * self.embed_dim)
        if self.in_proj_weight is not None:
            weight: Tensor | None = self.in_proj_weight[rows]
        else:
            weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)[which]
        assert weight is not None
        return F.linear(x, weight, None if self.in_proj_bias is None else self.in_proj_bias[rows])

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, self.head_dim)

    def _check_supported(self) -> None:
        if self.training and self.dropout > 0:
            raise RuntimeError(
                f"ikbo.nn.CandidateAttention: expected dropout == 0 in training, got "
                f"{self.dropout}. Set .dropout = 0.0, or call .eval()."
            )

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, "
            f"bias={self.in_proj_bias is not None}, kdim={self.kdim}, vdim={self.vdim}"
        )
