"""Every rule of ikbo.rewrite, made wrong on purpose: Report.verify must see it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ikbo
from ikbo.rewrite import Report, broadcasts, engine, merging, rules
from ikbo.rewrite.algebra import (
    activations,
    attention,
    bilinear,
    concatenation,
    forms,
    linear,
    registry,
    scores,
    sparse,
    stacks,
)
from ikbo.rewrite.broadcasts import Broadcast
from ikbo.rewrite.engine import Rewriter
from ikbo.rewrite.rules import Call, Place, aten
from ikbo.rewrite.values import Gathered, Grid, Joined, Lazy

from .test_rewrite_refusals import USER, Function, Model

torch.manual_seed(0)
SQUARE, THIN, BIAS = torch.randn(8, 8) / 3, torch.randn(6, 5) / 2, torch.randn(8)
WIDE, STACK = torch.randn(8, 16) / 4, torch.randn(4, 6) / 2
KERNEL, MEAN, VARIANCE = torch.randn(4, 5, 3), torch.randn(5), torch.rand(5) + 1
THIN_16, WIDE_BIAS = torch.randn(3, 16) / 4, torch.randn(16)
TABLE, TRILINEAR = torch.randn(2, 8), torch.randn(4, 8, 8) / 8


def _inputs(n_users: int = 3, n_candidates: int = 7) -> tuple[Tensor, ...]:
    user, candidate = torch.randn(n_users, 5, 8), torch.randn(n_candidates, 8)
    # In an order that is no other when read from the end.
    return user, candidate, (torch.arange(n_candidates) // 2) % n_users


# What a program is made of: ATen's core ops; bfloat16 inputs; a GPU's (monkeypatched) programs.
CORE, HALF, GPU = "core", "half", "gpu"


def _given(mode: str = "") -> tuple[Tensor, ...]:
    return tuple(t.bfloat16() if mode == HALF and t.is_floating_point() else t for t in _inputs())


def _report(function: Function, mode: str = "") -> Report:
    if mode != CORE:
        return ikbo.rewrite(Model(function), _given(mode), USER, ["candidate"])[1]
    users, candidates = torch.export.Dim("user"), torch.export.Dim("candidates")
    shapes = ({0: users}, {0: candidates}, {0: candidates})
    program = torch.export.export(Model(function), _inputs(), dynamic_shapes=shapes)
    return ikbo.rewrite(program.run_decompositions(), _inputs(), USER, ["candidate"])[1]


# Row-wise rules: the mutant says that the rows stand in the next dimension.

ROW_WISE: dict[str, Function] = {
    "_elementwise": lambda u, c: u.sin(),
    "_dropout": lambda u, c: torch.native_dropout(u, 0.5, False)[0],
    "_reduction": lambda u, c: u.sum(2),
    "_along": lambda u, c: u.softmax(2),
    "_norm": lambda u, c: F.layer_norm(u, (8,)),
    "_batch_norm": lambda u, c: F.batch_norm(u, MEAN, VARIANCE),
    "_group_norm": lambda u, c: F.group_norm(u, 5),
    "_convolution": lambda u, c: F.conv1d(u, KERNEL),
    "_linear": lambda u, c: F.linear(u, SQUARE),
    "_embedding": lambda u, c: F.embedding((u > 0).long(), TABLE),
    "_matmul": lambda u, c: u @ SQUARE,
    "_addmm": lambda u, c: torch.addmm(BIAS, u[:, 0], SQUARE),
    "_einsum": lambda u, c: torch.einsum("bld,df->blf", u, SQUARE),
    "_attention": lambda u, c: F.scaled_dot_product_attention(u, u, u),
    "_expand": lambda u, c: u[:, :1].expand(-1, 5, -1),
    "_permute": lambda u, c: u.permute(0, 2, 1),
    "_transpose": lambda u, c: u.transpose(1, 2),
    "_t": lambda u, c: u[:, 0].t(),
    "_unsqueeze": lambda u, c: u.unsqueeze(2),
    "_squeeze": lambda u, c: u[:, :1].squeeze(1),
    "_select": lambda u, c: u[:, 1],
    "_slice": lambda u, c: u[:, :, 2:],
    "_take": lambda u, c: u.index_select(1, torch.tensor([4, 1, 2])),
    "_index": lambda u, c: u[:, torch.tensor([4, 1, 2])],
    "_cat": lambda u, c: torch.cat([u, u], 1),
    "_pad": lambda u, c: F.pad(u, (1, 1)),
    "_view": lambda u, c: u.reshape(-1, 8),
}
NO_RESULT = {"_assert_metadata"}  # a check, whose result nobody reads


def _moved(function: rules.Function) -> rules.Function:
    def mutant(c: Call) -> Place:
        place = function(c)
        if place.inner > 1:  # rows that are merged with another dimension, in the other order
            return dataclasses.replace(place, inner=1, outer=place.inner)
        result = c.node.meta["val"]
        return place.at(
            (place.dim + 1) % (result[0] if isinstance(result, tuple) else result).dim()
        )

    return mutant


def test_every_row_wise_rule_has_a_mutant() -> None:
    assert {r.function.__name__ for r in rules.RULES.values()} == {*ROW_WISE, *NO_RESULT}


def test_row_wise_rules_as_they_are() -> None:
    """All at once; each by itself is what the mutants differ in."""
    sound = _report(lambda u, c: [f(u, c) for f in ROW_WISE.values()])  # type: ignore[return-value]
    assert len(sound.of("sunk")) >= len(ROW_WISE) and not sound.of("left")[len(ROW_WISE) :]
    sound.verify(_inputs())


@pytest.mark.parametrize("name", ROW_WISE)
def test_a_row_wise_rule_made_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for op, rule in rules.RULES.items():
        if rule.function.__name__ == name:
            wrong = rules.Rule(_moved(rule.function), rule.reason)
            monkeypatch.setitem(rules.RULES, op, wrong)
    with pytest.raises(AssertionError, match=r"became|error"):
        _report(ROW_WISE[name]).verify(_inputs())


# What rules refuse: the mutant takes the rows for untouched.

ACROSS_ROWS: dict[str, tuple[Any, Function]] = {
    "cumsum over rows": (aten.cumsum.default, lambda u, c: u.cumsum(0)),
    "softmax over rows": (aten.softmax.int, lambda u, c: u.softmax(0)),
    "flip of rows": (aten.flip.default, lambda u, c: u.flip(0)),
    "sort of rows": (aten.sort.default, lambda u, c: u.sort(0).values),
    "sum over rows": (aten.sum.dim_IntList, lambda u, c: u.sum(0)),
    "attention between rows": (
        aten.scaled_dot_product_attention.default,
        lambda u, c: F.scaled_dot_product_attention(*[u.transpose(0, 1)] * 3),
    ),
    "BatchNorm in training": (
        aten._native_batch_norm_legit_functional.default,
        lambda u, c: F.batch_norm(u, MEAN.clone(), VARIANCE.clone(), training=True),
    ),
    "dropout in training": (aten.native_dropout.default, lambda u, c: F.dropout(u, 0.5, True)),
    "products among rows": (
        aten.matmul.default, lambda u, c: u.permute(1, 0, 2) @ u.permute(1, 2, 0),
    ),
}  # fmt: skip


def test_rules_refuse() -> None:
    sound = _report(lambda u, c: [f(u, c) for _, f in ACROSS_ROWS.values()])  # type: ignore[return-value]
    sound.verify(_inputs())


@pytest.mark.parametrize("name", ACROSS_ROWS)
def test_a_rule_that_refuses_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, function = ACROSS_ROWS[name]
    monkeypatch.setitem(
        rules.RULES, op, rules.Rule(lambda c: next(iter(c.places.values())), "wrong on purpose")
    )
    with pytest.raises(AssertionError, match=r"became|error"):
        _report(function).verify(_inputs())


# Forms of copies: the mutant reads the map from its end.


class Repeats(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
        forms: dict[str, Callable[[], Tensor]] = {
            "_index": lambda: user[user_index],
            "_index_select": lambda: user.index_select(0, user_index),
            "_embedding": lambda: F.embedding(user_index, user.flatten(1)),
            "_gather": lambda: user.flatten(1).gather(0, user_index[:, None].expand(-1, 40)),
            "_repeat_by_number": lambda: user.repeat_interleave(3, dim=0),
            "_expanded_and_merged": lambda: user[:, None].expand(-1, 3, -1, -1).reshape(-1, 5, 8),
            "_repeat_by_counts": lambda: user.repeat_interleave(
                user[:, 0, 0].long().abs() * 0 + 2, dim=0, output_size=2 * user.shape[0]
            ),
        }
        return forms[self.form]().sin()


# One row has no order, and FBGEMM's forms are in test_rewrite_sparse.
FORMS = ["_index", "_index_select", "_embedding", "_gather", "_repeat_by_number",
         "_expanded_and_merged", "_repeat_by_counts"]  # fmt: skip


def test_every_form_of_a_copy_has_a_mutant() -> None:
    recognised = {f.__name__ for f in broadcasts.FORMS.values()} | {"_expanded_and_merged"}
    assert recognised == {*FORMS, "_one_row"}


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_by_a_wrong_map(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Rewriter._map_node

    def mutant(self: Rewriter, node: Any, found: Broadcast, rows: Any) -> Any:
        made = plain(self, node, found, rows)
        return None if made is None else self.builder.call(aten.flip.default, made, [0])

    monkeypatch.setattr(engine.Rewriter, "_map_node", mutant)
    report = ikbo.rewrite(Repeats(form), _inputs(), USER, ["candidate"])[1]
    assert report.of("sunk"), str(report)
    with pytest.raises(AssertionError, match="error"):
        report.verify(_inputs())


# The algebra: a result that is 1 % off, and errors of each kind that one would make.


def _joined(u: Tensor, c: Tensor) -> Tensor:
    return torch.cat([u[:, 0], c], 1)


def _stack(u: Tensor, c: Tensor) -> Tensor:
    return torch.cat([u, c[:, None]], 1)


def _gram(u: Tensor, c: Tensor) -> Tensor:
    rows = _stack(u, c)
    return torch.bmm(rows, rows.transpose(1, 2))


def _target_attention(u: Tensor, c: Tensor) -> Tensor:
    q, k = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (c[:, None], u))
    return F.scaled_dot_product_attention(q, k, k)


def _attention_by_hand(u: Tensor, c: Tensor) -> Tensor:
    q, k = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (c[:, None], u))
    return (q @ k.transpose(2, 3) / 3.0).softmax(-1) @ k


def _masked(u: Tensor, c: Tensor) -> Tensor:
    """Lengths 3, 4 and 5, one for each user."""
    lengths = 3 + (u[:, 0, 0].abs() * 100).long() % 3
    mask = torch.arange(5)[None] < lengths[:, None]
    return F.scaled_dot_product_attention(c[:, None], u, u, mask[:, None])


def _crossed(u: Tensor, c: Tensor) -> Tensor:
    """A low-rank cross over user and candidate, then another linear map."""
    x0 = _joined(u, c)
    return F.linear(x0 * F.linear(F.linear(x0, THIN_16), THIN_16.T, WIDE_BIAS) - x0, WIDE)


def _compressed_fm(u: Tensor, c: Tensor) -> Tensor:
    """Wukong's: products of the rows with few of their combinations, and other combinations."""
    rows = _stack(u, c)
    products = rows @ (rows.transpose(1, 2) @ STACK.T)
    return torch.cat([products.flatten(1), F.linear(rows.transpose(1, 2), STACK).flatten(1)], 1)


def _products_of_joins(u: Tensor, c: Tensor) -> Tensor:
    rows = (u * c[:, None]).transpose(1, 2)
    return torch.cat([rows @ STACK[:3, :5].T, F.linear(rows, STACK[:3, 1:], BIAS[:3])], 2)


def _two_compressions(u: Tensor, c: Tensor) -> Tensor:
    rows = _stack(u, c)
    return torch.cat([STACK @ rows, STACK.flip(0) @ rows], 1)


def _pairs(u: Tensor, c: Tensor) -> Tensor:
    rows = torch.cat([u, torch.stack([c, c.sin()], 1)], 1)
    return torch.bmm(rows, rows.transpose(1, 2))[:, LOWER[0], LOWER[1]]


def _cross_and_score(u: Tensor, c: Tensor) -> Tensor:
    """A low-rank cross, and of it one column."""
    x0 = _joined(u, c)
    crossed = x0 * F.linear(F.linear(x0, THIN_16), THIN_16.T, WIDE_BIAS) + x0 + x0.sin()
    return F.linear(torch.cat([crossed, c.sin()], 1), SCORE, BIAS[:1])


def _few_of_joins(u: Tensor, c: Tensor) -> Tensor:
    return F.linear(torch.cat([u[:, 0] * c, c], 1), WIDE[:2], BIAS[:2])


def _half(*tensors: Tensor) -> list[Tensor]:
    return [t.bfloat16() for t in tensors]


LOWER = torch.tril_indices(7, 7, -1)
SCORE = torch.randn(1, 24) / 5
PAIRED = torch.randn(8, 21) / 5
ALGEBRA: dict[Any, tuple[Function, str]] = {
    activations.fuse_activation: (lambda u, c: F.silu(F.linear(_joined(u, c), WIDE)), ""),
    activations.chained: (
        lambda u, c: F.linear(F.relu(F.linear(_joined(u, c), *_half(WIDE))), *_half(SQUARE[:1])),
        HALF,
    ),
    attention.attention: (_target_attention, ""),
    bilinear.bilinear: (lambda u, c: F.bilinear(u[:, 0], c, TRILINEAR, BIAS[:4]), ""),
    bilinear.einsum: (lambda u, c: torch.einsum("bi,ij,bj->b", u[:, 0], SQUARE, c), ""),
    concatenation.concatenation: (_joined, ""),
    concatenation.stack: (lambda u, c: torch.stack([u[:, 0], c, u[:, 1]], 1).sin(), ""),
    concatenation.elementwise: (lambda u, c: F.linear(_joined(u, c) * _joined(u, c), WIDE), ""),
    concatenation.flatten: (lambda u, c: _stack(u, c).flatten(1) @ torch.ones(48, 2), ""),
    concatenation.columns: (lambda u, c: _joined(u, c)[:, 3:9], ""),
    concatenation.one_of_split: (lambda u, c: _joined(u, c).split([3, 9, 4], 1)[1].sin(), ""),
    linear.linear: (lambda u, c: F.linear(_joined(u, c), WIDE, BIAS), ""),
    linear.addmm: (lambda u, c: F.linear(_joined(u, c), WIDE, BIAS), CORE),
    linear.matmul: (lambda u, c: STACK @ _stack(u, c), ""),
    linear.compression: (lambda u, c: torch.einsum("mk,bkd->bmd", STACK, _stack(u, c)), ""),
    scores.over_joins: (
        lambda u, c: F.linear(torch.cat([u[:, 0] * c, c], 1), WIDE[:1], BIAS[:1]), GPU,
    ),
    stacks.product: (_gram, ""),
    stacks.reduction: (lambda u, c: _stack(u, c).mean(1), ""),
    stacks.pairs: (_pairs, ""),
    stacks.flat_grid: (lambda u, c: _gram(u, c).flatten(1), ""),
}  # fmt: skip
SPARSE = {f for fs in registry.ALGEBRA.values() for f in fs if inspect.getmodule(f) is sparse}


def _off(r: Rewriter, lazy: Lazy, factor: float) -> Lazy:
    if isinstance(lazy, Gathered):
        return dataclasses.replace(lazy, source=_off(r, lazy.source, factor))
    if isinstance(lazy, Joined):
        first, *rest = lazy.parts
        return dataclasses.replace(lazy, parts=(_off(r, first, factor), *rest))
    if isinstance(lazy, Grid):
        (first, *rest), *rows = lazy.blocks
        return Grid(((_off(r, first, factor), *rest), *rows))
    assert isinstance(lazy, torch.fx.Node)
    return r.builder.call(aten.mul.Tensor, lazy, factor)


def test_every_function_of_the_algebra_has_a_mutant() -> None:
    registered = {f for functions in registry.ALGEBRA.values() for f in functions}
    assert registered == {*ALGEBRA, *SPARSE}


def test_algebra_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [*ALGEBRA.values(), *((f, mode) for *_, f, mode in MISTAKES.values())]
    for mode in ("", HALF, CORE, GPU):
        if mode == GPU:
            monkeypatch.setattr(registry, "counts_launches", lambda device: True)
        functions = [f for f, its in found if its == mode]
        _report(lambda u, c: [f(u, c) for f in functions], mode).verify(_given(mode))  # type: ignore[return-value]  # noqa: B023


@pytest.mark.parametrize("rule", ALGEBRA, ids=lambda f: f.__name__)
def test_algebra_that_is_one_percent_off(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    function, mode = ALGEBRA[rule]
    monkeypatch.setattr(registry, "counts_launches", lambda device: mode == GPU)
    calls = []

    def mutant(r: Rewriter, node: Any) -> Any:
        done = rule(r, node)
        if done is None:
            return None
        calls.append(node)
        return _off(r, done[0], 1.25 if mode == HALF else 1.01), *done[1:]

    for target, functions in registry.ALGEBRA.items():
        wrong = [mutant if f is rule else f for f in functions]
        monkeypatch.setitem(registry.ALGEBRA, target, wrong)
    report = _report(function, mode)
    assert calls
    with pytest.raises(AssertionError, match="error"):
        report.verify(_given(mode))


def _swapped(r: Rewriter, weight: Any, ranges: list[Any]) -> Any:
    width = weight.meta["val"].shape[1]
    shifted = [((a + 1) % (width - (b - a) + 1), 0) for a, b in ranges]
    moved = [(a, a + y - x) for (a, _), (x, y) in zip(shifted, ranges, strict=True)]
    views = [r.builder.call(aten.slice.Tensor, weight, 1, a, b) for a, b in moved]
    return views[0] if len(views) == 1 else r.builder.call(aten.cat.default, views, 1)


def _sum_of_signs(r: Rewriter, weight: Any, terms: list[Any]) -> Any:
    plus = [dataclasses.replace(t, sign=1) for t in terms]
    return _WEIGHT_SUM(r, weight, plus)


_WEIGHT_SUM, _WITHIN, _SPLIT = linear._weight_sum, stacks._within, linear._split
_TIMES, _COLUMNS_OF, _MATRIX = forms._times, forms.columns_of, forms._matrix
_MERGED = forms._merged
_ATTEND, _LENGTHS = attention._candidate_attention, attention._lengths
_WHOLE, _SPREAD, _WHOLE_BYTES = stacks._whole, linear._spread, linear.in_whole_bytes
_MERGE, _OF_COPIES = merging._merge, merging._of_copies


_FACTORS, _WEIGHT_OF, _WITH_COLUMNS = scores._times, scores._weight_of, scores._with_columns


def _with_others(parts: list[Any]) -> list[Any]:
    return [(part, columns) for (part, _), (_, columns) in zip(parts, parts[::-1], strict=True)]


def _turned(builder: Any, weight: Any) -> Any:
    return builder.call(aten.flip.default, weight, [1])


def _turned_weight(r: Rewriter, x: Any, first: Any) -> Any:
    halves = _WHOLE_BYTES(r, x, first)
    return tuple(dataclasses.replace(h, weight=_turned(r.builder, h.weight)) for h in halves)


def _shifted(r: Rewriter, term: Any, weight: Any) -> Any:
    spread = _SPREAD(r, term, weight)
    return spread and (spread[0], _turned(r.builder, spread[1]))


def _turned_copies(builder: Any, node: Any) -> Any:
    product = _OF_COPIES(builder, node)
    turned = product and builder.call(aten.flip.default, product.weight, [0])
    return product and dataclasses.replace(product, weight=turned)


MISTAKES: dict[str, tuple[Any, str, Any, Function, str]] = {
    "wrong columns": (linear, "_columns", _swapped, lambda u, c: F.linear(_joined(u, c), WIDE), ""),
    "a bias dropped": (
        linear, "_split", lambda r, node, joined, w, bias: _SPLIT(r, node, joined, w, None),
        lambda u, c: F.linear(_joined(u, c), WIDE, BIAS), "",
    ),
    "a difference taken for a sum": (
        linear, "_weight_sum", _sum_of_signs,
        lambda u, c: F.linear(torch.cat([u[:, 0] - c, c], 1), WIDE), "",
    ),
    "another scale": (
        attention, "_candidate_attention",
        lambda r, query, q, k, v, scale, n=None: _ATTEND(r, query, q, k, v, None),
        _attention_by_hand, "",
    ),
    "one key less": (
        attention, "_lengths",
        lambda r, mask, k: r.builder.call(aten.sub.Tensor, _LENGTHS(r, mask, k), 1), _masked, "",
    ),
    "pairs of the transposed block": (
        stacks, "_within", lambda sizes, i: _WITHIN(sizes, sum(sizes) - 1 - i), _pairs, "",
    ),
    "a form without its constant": (
        forms, "_times", lambda r, a, b: _TIMES(r, a, b)[:1], _crossed, "",
    ),
    "a form's constant twice": (
        forms, "_merged", lambda r, form: _MERGED(r, [*form, form[-1]]), _crossed, "",
    ),
    "a form of the wrong columns of the thin map": (
        concatenation, "columns_of",
        lambda r, node, dim, a, b: _COLUMNS_OF(r, node, dim, 8 - a, 8 - a + b - a), _crossed, "",
    ),
    "a form's matrix of the weights without the context": (
        forms, "_matrix",
        lambda r, source, *rest: _MATRIX(r, r.builder.call(aten.ones_like.default, source), *rest),
        _crossed, "",
    ),
    "the wrong activation": (
        activations, "ACTIVATIONS", {**activations.ACTIVATIONS, aten.silu.default: "relu"},
        lambda u, c: F.silu(F.linear(_joined(u, c), WIDE)), "",
    ),
    "a product that isn't symmetric taken for one": (
        stacks, "_transpose_of", lambda a, b: True,
        lambda u, c: torch.bmm(_stack(u, c), _stack(u.sin(), c).transpose(1, 2)), "",
    ),
    "a wrong activation of a Linear by itself": (
        activations, "ACTIVATIONS", {**activations.ACTIVATIONS, aten.silu.default: "sigmoid"},
        lambda u, c: F.silu(F.linear(c, *_half(SQUARE, BIAS))) + u[:, 0], HALF,
    ),
    "zero columns met by others of the weight": (
        linear, "in_whole_bytes", _turned_weight,
        lambda u, c: F.linear(torch.cat([u[:, 0, :5], c], 1), *_half(WIDE[:, :13])), HALF,
    ),
    "a score without the constant of a cross": (
        scores, "_times", lambda r, a, b: _FACTORS(r, a, b)[:1], _cross_and_score, GPU,
    ),
    "a cross met by the weights of another row": (
        scores, "_weight_of", lambda r, *rest: r.builder.call(
            aten.roll.default, _WEIGHT_OF(r, *rest), [1], [0]), _cross_and_score, GPU,
    ),
    "joins that meet each other's columns": (
        scores, "_with_columns",
        lambda r, x, weight: _with_others(_WITH_COLUMNS(r, x, weight)), _few_of_joins, GPU,
    ),
    "columns of the wrong product": (
        stacks, "_whole", lambda block: (_WHOLE(block)[0], 0), _pairs, GPU,
    ),
    "a weight spread over the wrong columns": (
        linear, "_spread", _shifted, lambda u, c: F.linear(_pairs(u, c), PAIRED), GPU,
    ),
    "compressions merged as if they had the same weights": (
        merging, "_merge_joins",
        lambda b, group: [n.replace_all_uses_with(group[0]) for n in group], _two_compressions, "",
    ),
    "products merged with one weight": (
        merging, "_merge",
        lambda b, its: _MERGE(b, [dataclasses.replace(p, weight=its[0].weight) for p in its]),
        _products_of_joins, "",
    ),
    "a merged product without its bias": (
        merging, "_merge",
        lambda b, its: _MERGE(b, [dataclasses.replace(p, bias=None) for p in its]),
        _products_of_joins, "",
    ),
    "a product of copies with the parts' weights the other way round": (
        merging, "_of_copies", _turned_copies, _compressed_fm, GPU,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_the_algebra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, wrong, function, mode = MISTAKES[name]
    monkeypatch.setattr(registry, "counts_launches", lambda device: mode == GPU)
    monkeypatch.setattr(where, attribute, wrong)
    with pytest.raises(AssertionError, match="error"):
        _report(function, mode).verify(_given(mode))
