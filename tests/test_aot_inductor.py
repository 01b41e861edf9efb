"""Every op under Inductor: compiled in place with gradients, and in an AOTInductor package that is
compiled once and runs at other batch sizes."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import Tensor

import ikbo

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
E, H, D = 16, 2, 8  # width, heads, head dim


class Ranker(torch.nn.Module):
    """Every differentiable op once, strung together as a ranking model would."""

    def __init__(self) -> None:
        super().__init__()

        def weight(*sizes: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*sizes) / sizes[-1] ** 0.5)

        torch.manual_seed(0)
        self.w_cand, self.w_user = weight(6, 4), weight(6, 5)
        self.query, self.heads = weight(H * D, E), weight(H, D)
        self.first, self.second = weight(E, 8 * E), weight(E, E)
        self.gate, self.up, self.down = weight(24, E), weight(24, E), weight(E, 24)
        self.scale, self.shift = weight(1, E), weight(1, E)

    def forward(
        self, e_cand: Tensor, e_user: Tensor, history: Tensor, m: ikbo.CandidateMap
    ) -> Tensor:
        scale, shift = self.scale[0], self.shift[0]
        rows = ikbo.linear_compression(e_cand, e_user, self.w_cand, self.w_user, None, m, "gelu")
        # The users' share of two more products, computed once a user.
        part = self.w_user @ e_user
        rows = rows + ikbo.linear_compression_add(e_cand, self.w_cand, part, None, m)
        q = ikbo.linear_act(rows[:, :1], self.query, None, "silu").unflatten(2, (H, D))
        keys = history.unflatten(2, (H, D))
        attended = ikbo.candidate_attention(ikbo.head_norm(q, self.heads), keys, keys, m).flatten(1)
        x_cand, x_user = torch.cat([rows.flatten(1), attended], 1), e_user[:, 0]
        w_user, w_cand = self.first[:, :E], self.first[:, E:]
        x = ikbo.concat_linear(x_cand, x_user, w_cand, w_user, shift, m, "relu")
        again = ikbo.concat_linear_add(attended, self.second, x_user, None, m, "sigmoid")
        x, total = ikbo.add_rms_norm(x, again, scale)
        x, total = ikbo.add_layer_norm(x, total, scale, shift)
        x = ikbo.rms_norm(x, scale) + ikbo.layer_norm(total, scale, shift)
        gated = ikbo.gated_linear(x, self.gate, self.up, activation="gelu_tanh")
        mlp = ikbo.gated_mlp(x, self.gate, self.up, None, None, self.down, activation="relu2")
        return mlp + gated @ self.down.T


class Quantizer(torch.nn.Module):
    """The ops without gradients."""

    def forward(self, x: Tensor, residual: Tensor) -> list[Tensor]:
        results = [ikbo.rms_norm_quant(x), ikbo.layer_norm_quant(x)]
        results += [ikbo.add_rms_norm_quant(x, residual), ikbo.add_layer_norm_quant(x, residual)]
        return [t for result in results for t in result]


Inputs = tuple[Tensor, Tensor, Tensor, ikbo.CandidateMap]


def _inputs(users: list[int], n_users: int, device: str) -> Inputs:
    m = ikbo.candidate_map(users, n_users=n_users, device=device)
    sizes = (len(users), 4, E), (n_users, 5, E), (n_users, 7, E)
    return (*(torch.randn(*size, device=device) for size in sizes), m)


def test_the_models_here_call_every_op() -> None:
    ikbo.reset_counters()
    with torch.no_grad():
        Ranker()(*_inputs([0, 1, 1], 2, "cpu"))
        Quantizer()(torch.randn(3, E), torch.randn(3, E))
    called = {op for op, _ in ikbo.counters()}
    every_op = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("ikbo::")]
    names = {name.removeprefix("ikbo::").split(".")[0] for name in every_op}
    assert called == {name for name in names if not name.endswith(("_fwd", "_bwd"))}


@pytest.mark.parametrize("device", DEVICES)
def test_inductor_with_gradients_and_symbolic_sizes(device: str) -> None:
    model = Ranker().to(device)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for users, n_users in (([0, 1, 1, 2, 0, 1], 3), ([3, 0, -1, 2, 2, 3, 1], 4)):
        inputs = _inputs(users, n_users, device)
        results = []
        for call in (compiled, model):
            model.zero_grad()
            out = call(*inputs)
            out.square().sum().backward()
            results.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


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
            torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)
