"""ikbo.rewrite on copied rows times thin linear maps: crosses, gates, modulations."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor, nn

import ikbo
from ikbo.rewrite import Report
from ikbo.rewrite.algebra import forms
from ikbo.testing import assert_matches_definition

USER = {"user": ikbo.Context(inputs=["user"], map="user_index")}
U, C, Q, N = 24, 8, 3, 5  # widths of the user, the candidate, the thin map and the result


class Crosses(nn.Module):
    """``x = x0 * (W x + b) + x``, W of a rank, over user's and candidate's features."""

    def __init__(self, layers: int = 3, rank: int = Q, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(U + C, rank, bias=False), nn.Linear(rank, U + C, bias=bias))
            for _ in range(layers)
        )
        self.out = nn.Linear(U + C, 1)

    def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
        x = x0 = torch.cat([user[user_index], candidate], 1)
        for layer in self.layers:
            x = x0 * layer(x) + x
        return self.out(x)


Function = Callable[[Any, Tensor, Tensor], Tensor]


class Gates(nn.Module):
    """A function of the module, the copied user's rows and the candidates'."""

    def __init__(self, function: Function, rank: int = Q, columns: int = N) -> None:
        super().__init__()
        self.function = function
        self.thin, self.wide = nn.Linear(C, rank), nn.Linear(rank, U)
        self.other, self.out = nn.Linear(C, U, bias=False), nn.Linear(U, columns)

    def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
        return self.function(self, user[user_index], candidate)


def _inputs(n_users: int, n_candidates: int) -> tuple[Tensor, ...]:
    index = torch.randint(0, n_users, (n_candidates,))
    return torch.randn(n_users, U), torch.randn(n_candidates, C), index


def _rewrite(model: nn.Module) -> tuple[torch.export.ExportedProgram, Report]:
    program, report = ikbo.rewrite(model.eval(), _inputs(3, 7), USER, ["candidate"])
    for sizes in ((3, 7), (1, 1), (6, 6), (9, 2), (2, 50)):
        report.verify(_inputs(*sizes))
    return program, report


def _has_wide_rows(program: torch.export.ExportedProgram) -> bool:
    """Whether anything of the candidates is as wide as the user's features."""
    index = next(n for n in program.graph.nodes if n.name == "user_index")
    rows = index.meta["val"].shape[0]
    values = [n.meta["val"] for n in program.graph.nodes if n.op == "call_function"]
    return any(isinstance(v, Tensor) and v.dim() == 2 and str(v.shape[0]) == str(rows)
               and int(v.shape[1]) >= U for v in values)  # fmt: skip


FORMS: dict[str, Function] = {
    "a gate": lambda m, u, c: m.out(u * m.wide(m.thin(c))),
    "a gate, the other way round": lambda m, u, c: m.out(m.wide(m.thin(c)) * u),
    "without a bias": lambda m, u, c: m.out(u * m.other(c)),
    "a modulation": lambda m, u, c: m.out(u * m.wide(m.thin(c)) + u.sin()),
    "differences": lambda m, u, c: m.out(u - (u.sin() - u * m.wide(m.thin(c)))),
    "two of them": lambda m, u, c: m.out(u * m.wide(m.thin(c)) + u.sin() * m.other(c)),
    "one twice": lambda m, u, c: m.out(u * m.other(c) + u.sin() * m.other(c)),
    "a factor of the sum": lambda m, u, c: m.out((u * m.wide(m.thin(c)) + u) * u.tanh()),
    "more columns than the thin map": lambda m, u, c: torch.cat([m.out(u * m.other(c)), c], 1),
    "matmul": lambda m, u, c: (u * m.wide(m.thin(c)) - u) @ m.other.weight,
}


@pytest.mark.parametrize("name", FORMS)
def test_the_context_meets_the_weights_once(name: str) -> None:
    torch.manual_seed(0)
    program, report = _rewrite(Gates(FORMS[name]))
    assert any(forms.REASON in e.reason for e in report.of("split")), str(report)
    assert not report.of("left") and not report.broadcasts, str(report)
    assert not _has_wide_rows(program), program


@pytest.mark.parametrize("bias", [False, True])
def test_crosses_of_low_rank(bias: bool) -> None:
    torch.manual_seed(0)
    model = Crosses(bias=bias)
    program, report = _rewrite(model)
    assert not report.of("left") and not report.broadcasts, str(report)
    assert not _has_wide_rows(program)
    # 70 candidates a user: the products of the user's half are the user's now.
    before, after = (c.at(user=1, candidates=70)[0] for c in (report.before, report.after))
    assert after < 0.6 * before
    compiled = torch.compile(program.module(check_guards=False), fullgraph=True, dynamic=True)
    given = _inputs(4, 30)
    torch.testing.assert_close(compiled(*given), model(*given), rtol=1e-4, atol=1e-5)


def test_crosses_of_core_ops() -> None:
    rows, users = torch.export.Dim("rows"), torch.export.Dim("users")
    shapes = ({0: users}, {0: rows}, {0: rows})
    program = torch.export.export(Crosses().eval(), _inputs(3, 7), dynamic_shapes=shapes)
    new, report = ikbo.rewrite(program.run_decompositions(), _inputs(3, 7), USER, ["candidate"])
    report.verify(_inputs(5, 40))
    assert not _has_wide_rows(new), str(report)


def test_gradients_of_crosses() -> None:
    torch.manual_seed(0)
    model = Crosses()
    program, _ = _rewrite(model)
    given, parameters = _inputs(4, 30), dict(model.named_parameters())

    def gradients(run: nn.Module, dtype: torch.dtype) -> tuple[Tensor, ...]:
        state = {n: p.detach().to(dtype).requires_grad_() for n, p in parameters.items()}
        args = (given[0].to(dtype), given[1].to(dtype), given[2])
        score = torch.func.functional_call(run, state, args)
        return torch.autograd.grad(score.square().sum(), list(state.values()))

    new = program.module(check_guards=False)
    runs = ((new, torch.float32), (model, torch.float64), (model, torch.float32))
    for got, want, its in zip(*(gradients(*run) for run in runs), strict=True):
        assert_matches_definition(got, want, its, multiple=8.0)


@pytest.mark.no_cover
def test_a_package_follows_a_later_checkpoint(tmp_path: pathlib.Path) -> None:
    """The weights' parts are cut out anew, when constants are folded at run time, too."""
    model, later = Crosses(2).eval(), Crosses(2).eval()
    path = torch._inductor.aoti_compile_and_package(
        _rewrite(model)[0],
        package_path=f"{tmp_path}/crosses.pt2",
        inductor_configs={
            "always_keep_tensor_constants": True,
            "joint_graph_constant_folding": False,
            "aot_inductor.use_runtime_constant_folding": True,
        },
    )
    package, given = torch._inductor.aoti_load_package(path), _inputs(4, 30)
    torch.testing.assert_close(package(*given), model(*given), rtol=1e-4, atol=1e-5)
    package.load_constants(later.state_dict(), check_full_update=False)
    torch.testing.assert_close(package(*given), later(*given), rtol=1e-4, atol=1e-5)


def test_the_matrix_is_a_part_of_the_users_program() -> None:
    model = Crosses().eval()
    _, _, (user, candidate) = ikbo.rewrite(model, _inputs(3, 7), USER, ["candidate"], split=True)
    rows, candidates, index = _inputs(4, 30)
    parts = user.module()(user=rows)
    scores = candidate.module()(candidate=candidates, user_index=index, **parts)
    torch.testing.assert_close(scores, model(rows, candidates, index), rtol=1e-4, atol=1e-5)
    # Nothing as wide as the user's features goes from one to the other.
    assert all(t.shape[-1] < U for t in parts.values())


STAY: dict[str, tuple[Function, dict[str, int]]] = {
    "a map that isn't thin": (FORMS["a gate"], {"rank": 200, "columns": 200}),
    "a product of two maps": (lambda m, u, c: m.out(u * (m.other(c) * m.other(c))), {}),
    "a map and something else": (lambda m, u, c: m.out(u * (m.other(c) + 1)), {}),
    "a map with nothing copied": (lambda m, u, c: m.out(u * m.other(c) + m.other(c)), {}),
    "an activation between": (lambda m, u, c: m.out((u * m.other(c)).relu()), {}),
    "a sum of multiples": (lambda m, u, c: m.out(torch.add(u, u * m.other(c), alpha=2)), {}),
}


@pytest.mark.parametrize("name", STAY)
def test_stays(name: str) -> None:
    torch.manual_seed(0)
    function, sizes = STAY[name]
    _, report = _rewrite(Gates(function, **sizes))
    assert not any(forms.REASON in e.reason for e in report.entries), str(report)


def test_a_wide_result_is_used_elsewhere() -> None:
    """What reads the product itself still gets it."""
    _, report = _rewrite(Gates(lambda m, u, c: torch.cat(
        [m.out(x := u * m.other(c)), x.relu()], 1)))  # fmt: skip
    assert any(forms.REASON in e.reason for e in report.of("split"))
    assert [e.op for e in report.of("left")][:1] == ["aten.mul.Tensor"]


def test_copies_of_two_contexts_are_no_form() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other, self.out = nn.Linear(C, U), nn.Linear(U, 1)

        def forward(
            self, user: Tensor, query: Tensor, candidate: Tensor, user_index: Tensor, of: Tensor
        ) -> Tensor:
            return self.out(user[user_index] * self.other(candidate) + query[of])

    contexts = {**USER, "query": ikbo.Context(inputs=["query"], map="of")}
    index = torch.tensor([0, 2, 1, 1])
    given = (torch.randn(3, U), torch.randn(5, U), torch.randn(4, C), index, 2 * index)
    _, report = ikbo.rewrite(Two(), given, contexts, ["candidate"])
    assert not any(forms.REASON in e.reason for e in report.entries), str(report)
    report.verify()


TERMS: dict[str, Function] = {
    "u": lambda m, u, c: u,
    "sin": lambda m, u, c: u.sin(),
    "gate": lambda m, u, c: u * m.wide(m.thin(c)),
    "other": lambda m, u, c: m.other(c) * u.tanh(),
    "candidate": lambda m, u, c: m.other(c),
}
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul,
}  # fmt: skip


class Random(nn.Module):
    """Several expressions of the terms, of the same weights: exporting them at once is quicker."""

    def __init__(self, expressions: list[list[tuple[str, str]]]) -> None:
        super().__init__()
        self.gates = Gates(TERMS["u"])
        self.expressions = expressions

    def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> list[Tensor]:
        u, results = user[user_index], []
        for expression in self.expressions:
            x = u
            for op, term in expression:
                x = OPS[op](x, TERMS[term](self.gates, u, candidate))
            results.append(self.gates.out(x))
        return results


@pytest.mark.no_cover
@hypothesis.settings(deadline=None, max_examples=8)
@hypothesis.given(
    expressions=st.lists(
        st.lists(st.tuples(st.sampled_from(list(OPS)), st.sampled_from(list(TERMS))),
                 min_size=1, max_size=4), min_size=4, max_size=4),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_sum_of_products(expressions: list[list[tuple[str, str]]], seed: int) -> None:
    torch.manual_seed(seed)
    model = Random(expressions).eval()
    _, report = ikbo.rewrite(model, _inputs(3, 7), USER, ["candidate"])
    report.verify(_inputs(2, 11))
    report.verify(_inputs(1, 1))
