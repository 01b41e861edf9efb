"""The ops inside an AOTInductor package: compiled once, run at other batch sizes without Python."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import Tensor

import ikbo

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Ranker(torch.nn.Module):
    """One layer of each family, as a small ranking model strings them together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w_cand = torch.nn.Parameter(torch.randn(6, 4) / 2)
        self.w_user = torch.nn.Parameter(torch.randn(6, 5) / 2)
        self.first = torch.nn.Linear(6 * 16 + 16, 24)

    def forward(
        self, e_cand: Tensor, e_user: Tensor, x_user: Tensor, m: ikbo.CandidateMap
    ) -> Tensor:
        rows = ikbo.linear_compression(e_cand, e_user, self.w_cand, self.w_user, None, m, "gelu")
        weight = self.first.weight
        return ikbo.concat_linear(
            rows.flatten(1), x_user, weight[:, 16:], weight[:, :16], self.first.bias, m, "relu"
        )


def _inputs(
    users: list[int], n_users: int, device: str
) -> tuple[Tensor, Tensor, Tensor, ikbo.CandidateMap]:
    B = len(users)
    m = ikbo.candidate_map(users, n_users=n_users, device=device)
    return (
        torch.randn(B, 4, 16, device=device), torch.randn(n_users, 5, 16, device=device),
        torch.randn(n_users, 16, device=device), m,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_package_runs_at_other_batch_sizes(device: str, tmp_path: pathlib.Path) -> None:
    model = Ranker().to(device)
    B, U = torch.export.Dim("B", min=2), torch.export.Dim("U", min=2)
    with torch.no_grad():
        program = torch.export.export(
            model,
            _inputs([0, 1, 1, 2, 0, 1], 3, device),
            dynamic_shapes=({0: B}, {0: U}, {0: U}, [{0: B}, {0: U + 1}, {0: B}]),
        )
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "ranker.pt2")
        )
        compiled = torch._inductor.aoti_load_package(package)
        for users, n_users in (([3, 0, 1, -1, 2, 2, 2, 3], 4), ([0, 1], 2)):
            inputs = _inputs(users, n_users, device)
            torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)
