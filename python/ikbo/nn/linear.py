"""Linears over user and candidate features that are never concatenated."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from .. import ops
from ..ops import CandidateMap
from ._common import check_activation, share_parameters
from ._packed import PackedCopy, packed


class _SplitLinear(nn.Module):
    """The parameters of an nn.Linear over [user; candidate], their two views and packed copies."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    # Of the class too: modules pickled before these existed lack them.
    recompute: bool = False
    _packed_user: PackedCopy | None = None
    _packed_cand: PackedCopy | None = None

    def __init__(
        self,
        user_size: int,
        cand_size: int,
        out_size: int,
        bias: bool = True,
        activation: str = "none",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        user_first: bool = True,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.activation = check_activation(type(self).__name__, activation)
        self.user_first = user_first
        self.recompute = recompute
        self._user_size, self._cand_size = user_size, cand_size
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        linear = nn.Linear(user_size + cand_size, out_size, bias, device, dtype)
        share_parameters(linear, self)

    def reset_parameters(self) -> None:
        """Initialises the parameters as nn.Linear does."""
        self.to_linear().reset_parameters()

    @property
    def w_user(self) -> Tensor:
        """The user's columns of the weight: a view, which follows in-place updates."""
        return self._split_weight()[0]

    @property
    def w_cand(self) -> Tensor:
        """The candidate's columns of the weight: a view, which follows in-place updates."""
        return self._split_weight()[1]

    def _split_weight(self) -> tuple[Tensor, Tensor]:
        # One split of both: its backward makes the weight's gradient in one concatenation.
        sizes = [self._user_size, self._cand_size]
        first, second = torch.split_with_sizes(
            self.weight, sizes if self.user_first else sizes[::-1], dim=1
        )
        return (first, second) if self.user_first else (second, first)

    def _operands(self) -> tuple[Tensor, Tensor]:
        """The user's and the candidate's columns as the kernels like them."""
        w_user, w_cand = self._split_weight()
        return packed(self, "_packed_user", w_user), packed(self, "_packed_cand", w_cand)

    def _drop_copies(self) -> None:
        self._packed_user = self._packed_cand = None

    def train(self, mode: bool = True) -> Self:
        """Sets the mode, and drops what inference keeps of the weight."""
        self._drop_copies()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._drop_copies()  # or .cpu() would leave them on the GPU
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    @classmethod
    def _from_linear(
        cls, linear: nn.Linear, user_size: int, activation: str, user_first: bool, recompute: bool
    ) -> Self:
        if not 0 <= user_size <= linear.in_features:
            raise ValueError(
                f"ikbo.nn.{cls.__name__}: expected the user's share within the Linear's "
                f"{linear.in_features} input features, got {user_size}."
            )
        module = cls(
            user_size, linear.in_features - user_size, linear.out_features,
            linear.bias is not None, activation, user_first=user_first, recompute=recompute,
            device="meta",
        )  # fmt: skip
        share_parameters(linear, module)
        return module

    def to_linear(self) -> nn.Linear:
        """An nn.Linear over the concatenation with the same parameters, without the activation."""
        out_size, in_size = self.weight.shape
        linear = nn.Linear(in_size, out_size, self.bias is not None, device="meta")
        share_parameters(self, linear)
        return linear

    def _repr_tail(self) -> str:
        order = "" if self.user_first else ", user_first=False"
        memory = ", recompute=True" if self.recompute else ""
        return f"bias={self.bias is not None}, activation={self.activation}{order}{memory}"


class ConcatLinear(_SplitLinear):
    """The nn.Linear after a concatenation of user and candidate features, without concatenating.

    ``out[b] = act(cat(x_user[u(b)], x_cand[b]) @ weight.T + bias)`` with ``u(b)`` the user of
    candidate b; the user's product is computed once per user. Parameters, initialisation and state
    dict are those of ``nn.Linear(user_features + cand_features, out_features)``.

    Inference may keep a copy of the weight, as :class:`LinearCompression` says.

    Args:
        user_features: Ku, features of a user; the first columns of the weight.
        cand_features: Kc, features of a candidate.
        out_features: N.
        bias: whether there is a bias.
        activation: none, relu, relu2, silu, gelu, gelu_tanh or sigmoid.
        user_first: False where the columns are [candidate; user].
        recompute: training with relu2, silu, gelu or gelu_tanh makes the pre-activation again in
            the backward instead of keeping it; see :func:`ikbo.concat_linear`.

    Attributes:
        weight: ``[N, Ku + Kc]``.
        bias: ``[N]`` or None.
        w_user, w_cand: the columns of the user and of the candidate, views of ``weight``.
    """

    def __init__(
        self,
        user_features: int,
        cand_features: int,
        out_features: int,
        bias: bool = True,
        activation: str = "none",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        user_first: bool = True,
        recompute: bool = False,
    ) -> None:
        super().__init__(
            user_features, cand_features, out_features, bias, activation, device, dtype,
            user_first=user_first, recompute=recompute,
        )  # fmt: skip
        self.user_features = user_features
        self.cand_features = cand_features
        self.out_features = out_features

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        user_features: int,
        activation: str = "none",
        user_first: bool = True,
        *,
        recompute: bool = False,
    ) -> Self:
        """A ConcatLinear with a Linear's own parameters: what trains one trains both.

        Args:
            linear: applied to a concatenation of user and candidate features until now.
            user_features: how many of its input features are the user's.
            activation: the activation after it, if it is to be fused.
            user_first: False where the concatenation is [candidate; user].
            recompute: as in the constructor.

        Raises:
            ValueError: the Linear has fewer input features.
        """
        return cls._from_linear(linear, user_features, activation, user_first, recompute)

    def forward(self, x_cand: Tensor, x_user: Tensor, candidates: CandidateMap | Tensor) -> Tensor:
        """See :func:`ikbo.concat_linear`: ``[B, Kc], [U, Ku]`` -> ``[B, N]``."""
        w_user, w_cand = self._operands()
        return ops.concat_linear(
            x_cand, x_user, w_cand, w_user, self.bias, candidates, self.activation,
            recompute=self.recompute,
        )  # fmt: skip

    def user_part(self, x_user: Tensor) -> Tensor:
        """The user's product ``x_user @ w_user.T`` ``[U, N]``, to be computed once per request."""
        return F.linear(x_user, self._operands()[0])

    def forward_with_user_part(
        self, x_cand: Tensor, user_part: Tensor, candidates: CandidateMap | Tensor
    ) -> Tensor:
        """:meth:`forward` with ``user_part`` ``[U, N]`` at hand, in the dtype of x_cand or fp32."""
        return ops.concat_linear_add(
            x_cand, self._operands()[1], user_part, self.bias, candidates, self.activation,
            recompute=self.recompute,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return (
            f"user_features={self.user_features}, cand_features={self.cand_features}, "
            f"out_features={self.out_features}, {self._repr_tail()}"
        )


class LinearCompression(_SplitLinear):
    """Compresses stacked user and candidate embeddings: ``act(weight @ stacked + bias[:, None])``.

    ``stacked[b] = cat(e_user[u(b)], e_cand[b])`` is never made and the user's product is computed
    once per user. Parameters, initialisation and state dict are those of
    ``nn.Linear(user_rows + cand_rows, out_rows)``, applied along the stacked axis.

    Where a half of the weight (fp16 or bf16, on a GPU) can't be read as it lies, for its rows don't
    begin at multiples of 16 bytes, inference keeps a packed copy of it. It is no part of the state
    dict and follows what torch counts as a change of the weight: optimisers, ``load_state_dict``,
    ``.to()``, any write in place, another tensor. Writes through ``weight.data`` aren't counted:
    call ``.eval()`` after them. Training, compiled, exported and captured (CUDA graph) programs and
    weights made under ``inference_mode`` use no copy; the op packs such a half in each call.

    Args:
        user_rows: Ku, embeddings of a user; the first columns of the weight.
        cand_rows: Kc, embeddings of a candidate.
        out_rows: M.
        bias: whether there is a bias.
        activation: none, relu, relu2, silu, gelu, gelu_tanh or sigmoid.
        user_first: False where the columns are [candidate; user].
        recompute: training with relu2, silu, gelu or gelu_tanh makes the pre-activation again in
            the backward instead of keeping it; see :func:`ikbo.linear_compression`.

    Attributes:
        weight: ``[M, Ku + Kc]``.
        bias: ``[M]`` or None.
        w_user, w_cand: the columns of the user and of the candidate, views of ``weight``.
    """

    def __init__(
        self,
        user_rows: int,
        cand_rows: int,
        out_rows: int,
        bias: bool = True,
        activation: str = "none",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        user_first: bool = True,
        recompute: bool = False,
    ) -> None:
        super().__init__(
            user_rows, cand_rows, out_rows, bias, activation, device, dtype,
            user_first=user_first, recompute=recompute,
        )  # fmt: skip
        self.user_rows = user_rows
        self.cand_rows = cand_rows
        self.out_rows = out_rows

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        user_rows: int,
        activation: str = "none",
        user_first: bool = True,
        *,
        recompute: bool = False,
    ) -> Self:
        """A LinearCompression with a Linear's own parameters: what trains one trains both.

        Args:
            linear: applied along the stacked axis until now: ``linear(stacked.mT).mT``.
            user_rows: how many of the stacked embeddings are the user's.
            activation: the activation after it, if it is to be fused.
            user_first: False where the stack is [candidate; user].
            recompute: as in the constructor.

        Raises:
            ValueError: the Linear has fewer input features.
        """
        return cls._from_linear(linear, user_rows, activation, user_first, recompute)

    def forward(self, e_cand: Tensor, e_user: Tensor, candidates: CandidateMap | Tensor) -> Tensor:
        """See :func:`ikbo.linear_compression`: ``[B, Kc, N], [U, Ku, N]`` -> ``[B, M, N]``."""
        w_user, w_cand = self._operands()
        return ops.linear_compression(
            e_cand, e_user, w_cand, w_user, self.bias, candidates, self.activation,
            recompute=self.recompute,
        )  # fmt: skip

    def user_part(self, e_user: Tensor) -> Tensor:
        """The user's product ``w_user @ e_user`` ``[U, M, N]``, to be computed once per request."""
        return self._operands()[0] @ e_user

    def forward_with_user_part(
        self, e_cand: Tensor, user_part: Tensor, candidates: CandidateMap | Tensor
    ) -> Tensor:
        """:meth:`forward` with ``user_part`` ``[U, M, N]`` at hand, in e_cand's dtype or fp32."""
        return ops.linear_compression_add(
            e_cand, self._operands()[1], user_part, self.bias, candidates, self.activation,
            recompute=self.recompute,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return (
            f"user_rows={self.user_rows}, cand_rows={self.cand_rows}, out_rows={self.out_rows}, "
            f"{self._repr_tail()}"
        )
