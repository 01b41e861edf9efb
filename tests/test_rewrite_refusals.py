"""What ikbo.rewrite must leave alone, with the reason in the report, and what it won't take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ikbo
from ikbo.rewrite import Report
from ikbo.rewrite.lineage import Kind, trace_lineage

USER = {"user": ikbo.Context(inputs=["user"], map="user_index")}
Function = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A function of the copied user rows [B, 5, 8] and the candidates [B, 8]."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
        return self.function(user[user_index], candidate)


def _inputs(n_users: int = 3, n_candidates: int = 7) -> tuple[Tensor, ...]:
    user, candidate = torch.randn(n_users, 5, 8), torch.randn(n_candidates, 8)
    return user, candidate, torch.randint(0, n_users, (n_candidates,))


def _report(model: nn.Module) -> Report:
    return ikbo.rewrite(model, _inputs(), USER, ["candidate"])[1]


STAY = {
    "softmax over rows": (lambda u, c: u.softmax(0), "the dimension of the rows"),
    "sum over rows": (lambda u, c: u.sum((0, 1)), "the dimension of the rows"),
    "sum of everything": (lambda u, c: u.sum(), "no rule"),
    "cumsum over rows": (lambda u, c: u.cumsum(0), "the dimension of the rows"),
    "one row": (lambda u, c: u[0], "the dimension of the rows"),
    "rows in another order": (lambda u, c: u.flip(0), "the dimension of the rows"),
    "rows joined to rows": (lambda u, c: torch.cat([u, u], 0), "the dimension of the rows"),
    "a view across rows": (
        lambda u, c: u.transpose(0, 1).flatten().view(c.shape[0], 40), "cuts across rows",
    ),
    "a product of rows with rows": (lambda u, c: u[:, 0].T @ u[:, 0], "in different dimensions"),
    "an op without a rule": (lambda u, c: torch.fft.rfft(u).abs(), "no rule"),
    "a sort of rows": (lambda u, c: u.sort(0).values, "the dimension of the rows"),
    "attention between rows": (
        lambda u, c: F.scaled_dot_product_attention(*[u.transpose(0, 1)] * 3), "attends over rows",
    ),
    "a value of its own for each row": (
        lambda u, c: u * torch.arange(c.shape[0])[:, None, None], "a value of its own",
    ),
    "layer norm over rows": (
        lambda u, c: F.layer_norm(u.permute(1, 2, 0), (u.shape[0],)), "over the dimension of the",
    ),
    "a mask for each row": (
        lambda u, c: F.scaled_dot_product_attention(
            u[:, None], u[:, None], u[:, None], (c[:, None, None, :5] > 0)
        ),
        "other rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STAY)
def test_stays(name: str) -> None:
    function, reason = STAY[name]
    report = _report(Model(function))
    assert any(reason in e.reason for e in report.of("left")), str(report)
    assert report.copies
    for sizes in ((3, 7), (6, 6), (4, 20)):
        report.verify(_inputs(*sizes))


WEIGHT, SQUARE, TRILINEAR = torch.randn(3, 16), torch.randn(8, 8), torch.randn(2, 8, 8)


def _both(u: Tensor, c: Tensor) -> Tensor:
    return torch.cat([u[:, 0], c], 1)


def _stacked(u: Tensor, c: Tensor) -> Tensor:
    return torch.cat([u, c[:, None]], 1)


def _gram(u: Tensor, c: Tensor) -> Tensor:
    return _stacked(u, c) @ _stacked(u, c).mT


def _lengths(u: Tensor) -> Tensor:
    return u[:, 0, 0].abs().mul(3).long()[:, None]


def _attended(u: Tensor, c: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(c[:, None], u, u, mask[:, None])


# Beside what the algebra splits or replaces: it must see the difference.
BESIDE: dict[str, Function] = {
    "a mask of the last keys": lambda u, c: _attended(u, c, torch.arange(5)[None] >= _lengths(u)),
    "positions from one": lambda u, c: _attended(u, c, torch.arange(1, 6)[None] <= _lengths(u)),
    "other positions": lambda u, c: _attended(u, c, torch.arange(5).flip(0)[None] < _lengths(u)),
    "every other position": lambda u, c: _attended(u, c, torch.arange(0, 10, 2) < _lengths(u)),
    "lengths that aren't whole": lambda u, c: _attended(
        u, c, torch.arange(5)[None] < u[:, :1, 0].abs() * 3
    ),
    "a mask for each query": lambda u, c: F.scaled_dot_product_attention(
        torch.stack([c, c.sin()], 1), u, u,
        torch.arange(5) < torch.cat([_lengths(u)] * 2, 1)[..., None],
    ),
    "a causal mask": lambda u, c: F.scaled_dot_product_attention(
        torch.stack([c, c], 1), u, u, is_causal=True
    ),
    "a scale of the candidate's": lambda u, c: (
        c[:, None] @ u.mT * c[:, None, :1]
    ).softmax(-1) @ u,
    "softmax over the queries": lambda u, c: (torch.stack([c, c], 1) @ u.mT).softmax(1) @ u,
    "weights that are used twice": lambda u, c: (
        lambda w: (w @ u)[:, 0] + w.amax(-1)
    )((c[:, None] @ u.mT).softmax(-1)),
    "softmax in another type": lambda u, c: (
        (c[:, None] @ u.mT).softmax(-1, dtype=torch.float64).float() @ u
    ),
    "parts of different types": lambda u, c: torch.cat([u[:, 0].double(), c], 1).float() @ WEIGHT.T,
    "rows one after another": lambda u, c: F.linear(torch.cat([u[:, 0], c], 0), SQUARE),
    "a bilinear form of the user": lambda u, c: F.bilinear(u[:, 0], u[:, 1], TRILINEAR) * c[:, :2],
    "a bilinear form of a history": lambda u, c: F.bilinear(
        u, c[:, None].expand(-1, 5, -1).clone(), TRILINEAR
    ),
    "a product of three without a weight": lambda u, c: torch.einsum("bi,bi,bi->b", u[:, 0], c, c),
    "a trace": lambda u, c: torch.einsum("bi,ii,bi->b", u[:, 0], SQUARE, c),
    "any leading dimensions": lambda u, c: torch.einsum("...i,ij,...j->...", u[:, 0], SQUARE, c),
    "the rows' index last": lambda u, c: torch.einsum("ib,ij,bj->b", u[:, 0].T, SQUARE, c),
    "a bias twice": lambda u, c: torch.addmm(WEIGHT[:, 0], _both(u, c), WEIGHT.T, beta=2),
    "a bias for each row": lambda u, c: torch.addmm(c[:, :3], _both(u, c), WEIGHT.T),
    "a sum over two dimensions": lambda u, c: _stacked(u, c).sum((1, 2)),
    "a sum in another type": lambda u, c: _stacked(u, c).sum(1, dtype=torch.float64),
    "every other column": lambda u, c: _both(u, c)[:, ::2],
    "the last columns": lambda u, c: _both(u, c)[:, -3:].sin() * _both(u, c)[:, -20:3],
    "rows and the stack in one": lambda u, c: _stacked(u, c).flatten(0, 1) @ SQUARE,
    "a stack against itself": lambda u, c: _both(u, c)[:, None] * _both(u, c)[:, :, None],
    "a slice of a product": lambda u, c: _gram(u, c)[:, 2:4, 1:],
    "a product in three dimensions": lambda u, c: _gram(u, c).unflatten(1, (2, 3)),
    "pairs by a mask": lambda u, c: _gram(u, c)[:, torch.ones(6, 6).tril(-1) > 0],
    "pairs by one index": lambda u, c: _gram(u, c)[:, torch.tensor([0, 5, 2])],
    "pairs from the end": lambda u, c: _gram(u, c)[:, torch.tensor([-1, 0]), torch.tensor([2, -6])],
    "pairs in a table": lambda u, c: _gram(u, c)[:, torch.arange(4).view(2, 2), torch.arange(2)],
    "pairs of other pairs": lambda u, c: _stacked(u, c)[:, 1:] @ _stacked(u, c)[:, :4].mT,
    "the sum of both products": lambda u, c: _stacked(u, c).mT @ _stacked(u, c),
    "a sum of three": lambda u, c: F.linear(2 + torch.cat([u[:, 0] - c + u[:, 1], c], 1), WEIGHT),
    "a weighted sum": lambda u, c: F.linear(
        torch.cat([torch.add(u[:, 0], c, alpha=3), c], 1), WEIGHT
    ),
    "stacked in front": lambda u, c: torch.stack([u[:, 0], c]).sin(),
    "one part twice": lambda u, c: F.linear(torch.cat([u[:, 0] - c] * 2, 1), WEIGHT),
    "gelu by tanh": lambda u, c: F.gelu(F.linear(_both(u, c), WEIGHT), approximate="tanh"),
    "a linear map that isn't a matrix": lambda u, c: _both(u, c) @ WEIGHT[0],
}  # fmt: skip


ATTENTION = [n for n in BESIDE if any(w in n for w in ("mask of", "mask for", "causal", "position",
             "whole", "scale", "softmax", "used twice"))]  # fmt: skip


@pytest.mark.parametrize("of_attention", [True, False])
def test_beside_the_algebra(of_attention: bool) -> None:
    """All of them at once: result i of a failure is the i-th."""
    functions = [f for n, f in BESIDE.items() if (n in ATTENTION) == of_attention]
    report = _report(Model(lambda u, c: [f(u, c) for f in functions]))  # type: ignore[arg-type,return-value]
    assert not (of_attention and report.of("replaced by candidate_attention")), str(report)
    for sizes in ((3, 7), (1, 2), (4, 20)):
        report.verify(_inputs(*sizes))


def test_dropout_in_training_stays_and_in_eval_sinks() -> None:
    class Dropped(Model):
        def __init__(self, p: float) -> None:
            super().__init__(lambda u, c: u)
            self.dropout = nn.Dropout(p)

        def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
            return self.dropout(user[user_index]) * candidate[:, None]

    report = _report(Dropped(0.5).train())
    assert any("dropout in training" in e.reason for e in report.of("left")), str(report)
    assert not report.of("sunk")
    assert _report(Dropped(0.0).train()).of("sunk")
    assert _report(Dropped(0.5).eval()).of("sunk")


def test_attention_dropout_in_training_stays() -> None:
    report = _report(Model(lambda u, c: F.scaled_dot_product_attention(u, u, u, dropout_p=0.5)))
    assert any("dropout in training" in e.reason for e in report.of("left")), str(report)


def test_batch_norm_in_training_stays_and_in_eval_sinks() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(5)

        def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
            return self.norm(user[user_index]) * candidate[:, None]

    report = _report(Normed().train())
    assert any("BatchNorm in training" in e.reason for e in report.of("left")), str(report)
    report.verify(_inputs())
    with pytest.raises(ValueError, match="updates no buffers to split, as in eval mode"):
        ikbo.rewrite(Normed().train(), _inputs(), USER, ["candidate"], split=True)
    report = _report(Normed().eval())
    assert any("BatchNorm in eval" in e.reason for e in report.of("sunk")), str(report)
    report.verify(_inputs())


def test_random_numbers_stay() -> None:
    report = _report(Model(lambda u, c: u + torch.rand_like(u)))
    assert any("no rule for aten.rand_like" in e.reason for e in report.of("left")), str(report)


def test_a_weight_made_of_candidates_does_not_split() -> None:
    def function(u: Tensor, c: Tensor) -> Tensor:
        weight = c.mean(0)[None].expand(2, -1)
        return F.linear(torch.cat([u[:, 0, :4], c[:, :4]], 1), weight)

    report = _report(Model(function))
    assert not report.of("replaced") and not report.of("split")
    report.verify(_inputs())


def test_masked_target_attention_keeps_its_mask() -> None:
    def function(u: Tensor, c: Tensor) -> Tensor:
        keys = u[:, None]
        return F.scaled_dot_product_attention(
            c[:, None, None], keys, keys, keys[..., 0][..., None, :] > 0
        )

    report = _report(Model(function))
    assert not report.of("replaced by candidate_attention")
    report.verify(_inputs())


def test_other_sizes_stay_symbolic() -> None:
    """A history whose length is free, too: stacked products, masks and sums of it."""

    class Free(nn.Module):
        def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
            u = user[user_index]
            rows = torch.cat([u, candidate[:, None]], 1)
            dots = u @ candidate[:, :, None]
            mask = torch.arange(u.shape[1])[None] < 2
            seen = F.scaled_dot_product_attention(candidate[:, None], u, u, mask[:, None])
            return (rows @ rows.mT).sum((1, 2)) + dots.sum((1, 2)) + seen.sum((1, 2))

    users, candidates, length = (torch.export.Dim(n) for n in ("user", "candidates", "length"))
    shapes = ({0: users, 1: length}, {0: candidates}, {0: candidates})
    program = torch.export.export(Free(), _inputs(), dynamic_shapes=shapes)
    _, report = ikbo.rewrite(program, _inputs(), USER, ["candidate"])
    for n in (5, 1, 9):
        user, candidate, index = _inputs(4, 20)
        report.verify((user[:, :1].expand(-1, n, -1) * torch.rand(n, 1), candidate, index))


def test_unknown_names_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"expected names of inputs \(.*\), got item"):
        ikbo.rewrite(Model(lambda u, c: u), _inputs(), USER, ["item"])
    twice = {**USER, "query": ikbo.Context(inputs=["user"], map="user_index")}
    with pytest.raises(ValueError, match="expected input 'user' in one batch"):
        ikbo.rewrite(Model(lambda u, c: u), _inputs(), twice, ["candidate"])
    with pytest.raises(ValueError, match="another name"):
        ikbo.rewrite(Model(lambda u, c: u), _inputs(), {"candidates": USER["user"]}, ["candidate"])


def test_a_name_is_no_list_of_names() -> None:
    for contexts, candidates in (
        ({"user": ikbo.Context("user", "user_index")}, ["candidate"]),
        (USER, "candidate"),
    ):
        with pytest.raises(ValueError, match=r"expected a list of names, got '(user|candidate)'"):
            ikbo.rewrite(Model(lambda u, c: u), _inputs(), contexts, candidates)


def test_inputs_that_the_original_refuses_are_not_made_up() -> None:
    class Tiled(nn.Module):
        def forward(self, user: Tensor, candidate: Tensor) -> Tensor:
            return user.sum(0) * torch.linalg.cholesky(candidate)

    contexts = {"user": ikbo.Context(["user"])}
    given = torch.randn(3, 2, 2), torch.eye(2).expand(4, 2, 2).clone()
    _, report = ikbo.rewrite(Tiled(), given, contexts, ["candidate"])
    with pytest.raises(ValueError, match="the original takes none that are made up"):
        report.verify()
    report.verify(given)


def test_examples_of_one_row_are_an_error() -> None:
    with pytest.raises(ValueError, match="at least 2 rows for user, got 1 in 'user'"):
        ikbo.rewrite(Model(lambda u, c: u), _inputs(1), USER, ["candidate"])


def test_lineage_and_its_reasons() -> None:
    class Ranker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
            tower = self.linear(user.mean(1))
            copied = tower[user_index]
            return copied * candidate + copied.mean(0) + self.linear.weight.sum(0)

    users, candidates = torch.export.Dim("user"), torch.export.Dim("candidates")
    shapes = ({0: users}, {0: candidates}, {0: candidates})
    program = torch.export.export(Ranker(), _inputs(), dynamic_shapes=shapes)
    graph = program.run_decompositions({}).graph
    seeds = {"user": "user", "candidate": "candidates", "user_index": "candidates"}
    found = {n.name: lineage for n, lineage in trace_lineage(graph, seeds).items()}
    kinds = {name: lineage.kind for name, lineage in found.items()}
    assert kinds["p_linear_weight"] is Kind.SHARED and kinds["sum_1"] is Kind.SHARED
    assert kinds["user"] is kinds["linear"] is Kind.CONTEXT and found["linear"].axis == "user"
    assert kinds["candidate"] is Kind.CANDIDATE
    assert kinds["index"] is Kind.CONTEXT and found["index"].axis == "candidates"
    (product,) = (n for n in kinds if n.startswith("mul"))
    assert kinds[product] is Kind.MIXED and found[product].axis == "candidates"
    assert found["mean_1"].axis is None and "the dimension of the rows" in found["mean_1"].reason
    assert all(lineage.reason for lineage in found.values())
