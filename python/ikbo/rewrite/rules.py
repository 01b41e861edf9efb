"""One rule per ATen op: along which dimension it treats the rows of a batch one by one.

A row-wise op commutes with a gather of rows, ``f(x[map]) = f(x)[map]``. A rule says where the rows
stand in the result, or refuses with a reason. An op without a rule is a barrier.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
ALL = torch.iinfo(torch.int64).max  # the end of a slice that has none
INTEGERS = (torch.int32, torch.int64)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the rows of a batch stand: dimension ``dim``, of size ``outer * rows * inner``."""

    dim: int = 0
    outer: int = 1
    inner: int = 1

    def at(self, dim: int) -> Place:
        """The same rows in another dimension."""
        return dataclasses.replace(self, dim=dim)

    @property
    def leading(self) -> bool:
        """Whether index i of dimension 0 is row i."""
        return self == Place()


class RefusedError(Exception):
    """The op can't be shown to treat rows one by one; the message is the reason."""


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for every batch size."""
    return statically_known_true(a == b)


def value(node: Any) -> Any:
    """What export knows of a node's result: a fake tensor, a symbolic integer, or a tuple."""
    assert isinstance(node, fx.Node)
    return node.meta.get("val")


def argument(node: fx.Node, index: int) -> fx.Node:
    """An argument that is a node."""
    found = node.args[index]
    assert isinstance(found, fx.Node)
    return found


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor)


@dataclasses.dataclass(frozen=True)
class Call:
    """One op with where rows stand in its arguments; arguments without a place have no rows."""

    node: fx.Node
    places: Mapping[fx.Node, Place]

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by the schema's names, defaults included."""
        return named_arguments(self.node)

    @property
    def x(self) -> fx.Node:
        """The first argument."""
        if not is_tensor(self.node.args[0]):
            raise RefusedError("its first argument is not a tensor")
        return argument(self.node, 0)

    @property
    def tensors(self) -> list[fx.Node]:
        return [n for n in self.node.all_input_nodes if is_tensor(n)]

    @property
    def rows_of_x(self) -> Place:
        place = self.places.get(self.x)
        if place is None:
            raise RefusedError("its first argument has no rows")
        return place

    def shape(self, node: fx.Node) -> tuple[Any, ...]:
        return tuple(value(node).shape)

    def only_x(self) -> Place:
        """The place of the first argument, if no other has rows."""
        if any(n in self.places for n in self.tensors if n is not self.x):
            raise RefusedError("an argument that must be shared differs between rows")
        return self.rows_of_x


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op by the schema's names, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = node.target._schema.arguments
    named = {a.name: a.default_value for a in arguments}
    named |= dict(zip((a.name for a in arguments), node.args, strict=False))
    return named | dict(node.kwargs)


Function = Callable[[Call], Place]


@dataclasses.dataclass(frozen=True)
class Rule:
    """Where the rows go, and in words why the op treats them one by one."""

    function: Function
    reason: str


RULES: dict[Any, Rule] = {}


def place_of_result(node: fx.Node, places: Mapping[fx.Node, Place]) -> tuple[Place, str]:
    """Where rows stand in the result of a node, and the reason.

    Raises:
        RefusedError: no rule, or its condition doesn't hold.
    """
    if node.target is operator.getitem:
        return places[argument(node, 0)], "one of the results of the op before it"
    rule = RULES.get(node.target)
    if rule is None:
        raise RefusedError(f"no rule for {node.target}")
    return rule.function(Call(node, places)), rule.reason


def _overloads(names: str, skip: Iterable[str] = ()) -> Iterator[Any]:
    for name in names.split():
        base, _, wanted = name.partition(".")
        packet = getattr(aten, base, None)
        if packet is None:  # not in this torch
            continue
        for overload in packet.overloads():
            mutates = any(
                a.alias_info and a.alias_info.is_write
                for a in getattr(packet, overload)._schema.arguments
            )
            if not mutates and overload not in skip and wanted in ("", overload):
                yield getattr(packet, overload)


def _rule(names: str, reason: str, skip: Iterable[str] = ()) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        for overload in _overloads(names, skip):
            RULES[overload] = Rule(function, reason)
        return function

    return register


def _dim(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


def _dims(dims: Any, rank: int) -> set[int]:
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        raise RefusedError("it reduces over every dimension, the rows included")
    return {_dim(d, rank) for d in (dims if isinstance(dims, (list, tuple)) else [dims])}


def _off(place: Place, dims: set[int], what: str) -> None:
    if place.dim in dims:
        raise RefusedError(f"{what} the dimension of the rows")


ELEMENTWISE = (
    "abs acos add add.Tensor asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil "
    "celu clamp clamp_max clamp_min cos cosh div elu eq erf exp exp2 expm1 floor floor_divide fmod "
    "ge gelu gt hardsigmoid hardswish hardtanh isfinite isinf isnan le leaky_relu lerp log log10 "
    "log1p log2 log_sigmoid logaddexp logical_and logical_not logical_or logical_xor logit lt "
    "masked_fill maximum minimum mish mul nan_to_num ne neg pow reciprocal relu relu6 remainder "
    "round rsqrt rsub selu sigmoid sign silu sin sinh softplus softsign sqrt square sub tan tanh "
    "threshold true_divide trunc _prelu_kernel addcmul addcdiv"
)
COPIES = (
    "clone contiguous alias detach lift_fresh_copy _to_copy to.dtype to.dtype_layout type_as "
    "zeros_like ones_like full_like"
)


@_rule(ELEMENTWISE, "element-wise")
@_rule("where", "element-wise", skip=["default"])  # where(condition) alone is nonzero
@_rule(COPIES, "a copy, element by element")
def _elementwise(c: Call) -> Place:
    found: tuple[int, Place] | None = None
    for n in c.tensors:
        place = c.places.get(n)
        if place is None:
            continue
        from_right = len(c.shape(n)) - place.dim
        if found is not None and (found[0], found[1].at(0)) != (from_right, place.at(0)):
            raise RefusedError("the rows of its arguments stand in different dimensions")
        found = from_right, place
    assert found is not None
    from_right, place = found
    for n in c.tensors:
        shape = c.shape(n)
        if n not in c.places and len(shape) >= from_right and not same(shape[-from_right], 1):
            raise RefusedError("an argument without lineage has a value of its own for each row")
    return place.at(len(c.shape(c.node)) - from_right)


@_rule("dropout native_dropout", "dropout that does nothing: p is 0, or not training")
def _dropout(c: Call) -> Place:
    if c.named["p"] != 0 and c.named["train"] is not False:
        raise RefusedError("dropout in training draws anew for each row")
    return c.rows_of_x


REDUCTIONS = (
    "sum.dim_IntList mean.dim nansum amax amin argmax argmin max.dim min.dim var.correction "
    "std.correction any.dim any.dims all.dim all.dims logsumexp prod.dim_int linalg_vector_norm "
    "norm.ScalarOpt_dim"
)


@_rule(REDUCTIONS, "a reduction within each row")
def _reduction(c: Call) -> Place:
    place, rank = c.only_x(), len(c.shape(c.x))
    dims = _dims(c.named["dim"], rank)
    _off(place, dims, "it reduces over")
    return place if c.named["keepdim"] else place.at(place.dim - sum(d < place.dim for d in dims))


@_rule("softmax.int log_softmax.int _softmax _log_softmax cumsum cumprod topk sort flip roll glu "
       "logcumsumexp", "works along another dimension than the rows'")  # fmt: skip
def _along(c: Call) -> Place:
    place = c.only_x()
    dims = c.named.get("dim", c.named.get("dims"))
    _off(place, _dims(dims, len(c.shape(c.x))), "it works along")
    return place


@_rule("layer_norm native_layer_norm rms_norm _fused_rms_norm", "normalises within each row")
def _norm(c: Call) -> Place:
    place = c.only_x()
    if place.dim >= len(c.shape(c.x)) - len(c.named["normalized_shape"]):
        raise RefusedError("it normalises over the dimension of the rows")
    return place


@_rule("batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
       "_native_batch_norm_legit_functional native_batch_norm _batch_norm_no_update",
       "BatchNorm in eval: a fixed scale and shift of each channel",
       skip=["no_stats"])  # fmt: skip
def _batch_norm(c: Call) -> Place:
    if c.named.get("training", False) is not False:
        raise RefusedError("BatchNorm in training takes its statistics over the rows")
    if c.node.target is not aten.batch_norm.default and any(u.args[1] != 0 for u in c.node.users):
        raise RefusedError("its statistics, which are no rows, are used too")
    place = c.only_x()
    _off(place, {1}, "its channels are")
    return place


@_rule("group_norm", "normalises within each row")
def _group_norm(c: Call) -> Place:
    place = c.only_x()
    if not place.leading:
        raise RefusedError("its rows are not the leading dimension")
    return place


@_rule("conv1d.default conv2d.default conv3d.default avg_pool1d max_pool1d",
       "a convolution or pooling within each row")  # fmt: skip
def _convolution(c: Call) -> Place:
    place = c.only_x()
    weight = c.named.get("weight")
    rank = 3 if weight is None else len(c.shape(weight))
    if not place.leading or len(c.shape(c.x)) != rank:
        raise RefusedError("its rows are not the batch dimension")
    return place


@_rule("linear", "a linear map of each row")
def _linear(c: Call) -> Place:
    place = c.only_x()
    _off(place, {len(c.shape(c.x)) - 1}, "the product sums over")
    return place


@_rule("embedding", "a look-up for each index")
def _embedding(c: Call) -> Place:
    indices = c.named["indices"]
    if c.named["weight"] in c.places or indices not in c.places:
        raise RefusedError("its table differs between rows")
    place: Place = c.places[indices]
    return place


@_rule("matmul mm bmm", "a product for each row")
def _matmul(c: Call) -> Place:
    return _product(c, argument(c.node, 0), argument(c.node, 1))


@_rule("addmm baddbmm", "a product for each row, plus a term")
def _addmm(c: Call) -> Place:
    term, a, b = (argument(c.node, i) for i in range(3))
    place = _product(c, a, b)
    from_right = len(c.shape(c.node)) - place.dim
    shape, its = c.shape(term), c.places.get(term)
    if its is not None and (len(shape) - its.dim != from_right or its.at(0) != place.at(0)):
        raise RefusedError("the rows of its arguments stand in different dimensions")
    if its is None and len(shape) >= from_right and not same(shape[-from_right], 1):
        raise RefusedError("an argument without lineage has a value of its own for each row")
    return place


def _product(c: Call, a: fx.Node, b: fx.Node) -> Place:
    ranks, rank = {a: len(c.shape(a)), b: len(c.shape(b))}, len(c.shape(c.node))
    if min(ranks.values()) < 2:
        raise RefusedError("no rule for products with vectors")
    places = {n: c.places[n] for n in (a, b) if n in c.places}
    if not places:
        raise RefusedError("its factors have no rows")
    batched = [(ranks[n] - p.dim, p.at(0)) for n, p in places.items()]
    from_right, place = batched[0]
    if any(other != batched[0] for other in batched):
        raise RefusedError("the rows of its factors stand in different dimensions")
    if from_right <= 2:
        # Rows of `a` or columns of `b`: kept, where the other factor has none.
        kept = a if from_right == 2 else b
        if set(places) != {kept}:
            raise RefusedError("the product sums over, or pairs, rows")
        return place.at(rank - from_right)
    for n in (a, b):
        if n not in places and ranks[n] >= from_right and not same(c.shape(n)[-from_right], 1):
            raise RefusedError("an argument without lineage has a value of its own for each row")
    return place.at(rank - from_right)


@_rule("einsum", "a product in which the rows' index is kept")
def _einsum(c: Call) -> Place:
    equation, operands = c.node.args[:2]
    assert isinstance(equation, str) and isinstance(operands, (list, tuple))
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or "." in equation:
        raise RefusedError("no rule for einsum without '->' or with '...'")
    places = {(t[p.dim], p.at(0)) for t, n in zip(terms, operands, strict=True)
              if isinstance(n, fx.Node) and (p := c.places.get(n)) is not None}  # fmt: skip
    if len(places) != 1:
        raise RefusedError("the rows of its operands have different indices")
    ((letter, place),) = places
    for term, n in zip(terms, operands, strict=True):
        if term.count(letter) > (1 if n in c.places else 0):
            raise RefusedError("an operand without rows shares their index, or it is repeated")
    if letter not in output:
        raise RefusedError("it sums over the rows")
    return place.at(output.index(letter))


@_rule("scaled_dot_product_attention", "attention within each row")
def _attention(c: Call) -> Place:
    named = c.named
    if named["dropout_p"] != 0:
        raise RefusedError("dropout in training draws anew for each row")
    place = c.rows_of_x
    rank = len(c.shape(c.x))
    for name in ("query", "key", "value"):
        if c.places.get(named[name]) != place or len(c.shape(named[name])) != rank:
            raise RefusedError(f"its {name} doesn't have the rows of the others")
    if place.dim > rank - 3:
        raise RefusedError("it attends over rows")
    mask = named["attn_mask"]
    if mask is not None:
        from_right, shape = rank - place.dim, c.shape(mask)
        its = c.places.get(mask)
        if its is None and len(shape) >= from_right and not same(shape[-from_right], 1):
            raise RefusedError("its mask has a value of its own for each row")
        if its is not None and (len(shape) - its.dim != from_right or its.at(0) != place.at(0)):
            raise RefusedError("the rows of its mask stand in another dimension")
    return place


@_rule("view.default reshape.default _unsafe_view.default", "a view that keeps each row together")
def _view(c: Call) -> Place:
    place, shape, out = c.rows_of_x, c.shape(c.x), c.shape(c.node)
    before = math.prod(shape[: place.dim]) * place.outer
    after = place.inner * math.prod(shape[place.dim + 1 :])
    for dim in range(len(out)):
        outer = _quotient(before, math.prod(out[:dim]))
        inner = _quotient(after, math.prod(out[dim + 1 :]))
        if outer is None or inner is None:
            continue
        # outer * rows * inner, without dividing the symbolic size
        scaled = shape[place.dim] * outer * inner
        if same(out[dim] * place.outer * place.inner, scaled):
            return Place(dim, outer, inner)
    raise RefusedError("the view cuts across rows")


def _quotient(whole: Any, part: Any) -> int | None:
    if isinstance(whole, int) and isinstance(part, int):
        return whole // part if part and whole % part == 0 and whole else None
    return 1 if same(whole, part) else None


@_rule("expand", "repeats within each row")
def _expand(c: Call) -> Place:
    place, shape, out = c.rows_of_x, c.shape(c.x), c.shape(c.node)
    dim = place.dim + len(out) - len(shape)
    if not same(out[dim], shape[place.dim]):
        raise RefusedError("it repeats rows")
    return place.at(dim)


@_rule("permute", "a permutation of dimensions")
def _permute(c: Call) -> Place:
    place, rank = c.rows_of_x, len(c.shape(c.x))
    return place.at([_dim(d, rank) for d in c.named["dims"]].index(place.dim))


@_rule("transpose.int", "a permutation of dimensions")
def _transpose(c: Call) -> Place:
    place, rank = c.rows_of_x, len(c.shape(c.x))
    a, b = _dim(c.named["dim0"], rank), _dim(c.named["dim1"], rank)
    return place.at({a: b, b: a}.get(place.dim, place.dim))


@_rule("t", "a permutation of dimensions")
def _t(c: Call) -> Place:
    place = c.rows_of_x
    return place.at(1 - place.dim) if len(c.shape(c.x)) == 2 else place


@_rule("unsqueeze", "a new dimension of size 1")
def _unsqueeze(c: Call) -> Place:
    place, rank = c.rows_of_x, len(c.shape(c.node))
    return place.at(place.dim + (_dim(c.named["dim"], rank) <= place.dim))


@_rule("squeeze.dim squeeze.dims", "drops dimensions of size 1 other than the rows'")
def _squeeze(c: Call) -> Place:
    place, shape = c.rows_of_x, c.shape(c.x)
    dims = _dims(c.named["dim"], len(shape))
    _off(place, dims, "it may drop")
    return place.at(place.dim - sum(d < place.dim and same(shape[d], 1) for d in dims))


@_rule("select.int unbind.int", "takes the same part of each row")
def _select(c: Call) -> Place:
    place, dim = c.rows_of_x, _dim(c.named["dim"], len(c.shape(c.x)))
    _off(place, {dim}, "it takes parts of")
    return place.at(place.dim - (dim < place.dim))


@_rule("slice.Tensor split.Tensor split_with_sizes chunk narrow", "takes the same part of each row")
def _slice(c: Call) -> Place:
    place, named = c.only_x(), c.named
    # x[:, 0] begins with the slice of all rows.
    all_rows = named.get("start") in (0, None) and named.get("end") in (None, ALL)
    if c.node.target is not aten.slice.Tensor or not all_rows or named["step"] != 1:
        _off(place, _dims(named["dim"], len(c.shape(c.x))), "it takes parts of")
    return place


@_rule("index_select gather", "takes the same, or its own, part of each row")
def _take(c: Call) -> Place:
    place, index = c.rows_of_x, c.named["index"]
    _off(place, {_dim(c.named["dim"], len(c.shape(c.x)))}, "it takes parts of")
    one_index = c.node.target is aten.index_select.default
    if c.places.get(index) != (None if one_index else place):
        raise RefusedError("its index doesn't have the rows of its argument")
    return place


@_rule("index.Tensor", "a look-up for each index, or the same part of each row")
def _index(c: Call) -> Place:
    *whole, index = c.named["indices"]
    if any(i is not None for i in whole) or value(index).dtype not in INTEGERS:
        raise RefusedError("no rule for several indices or a mask")
    if c.x not in c.places and not whole:
        return c.places[index]
    place = c.only_x()
    if place.dim >= len(whole):
        raise RefusedError("it takes parts of the dimension of the rows")
    return place


@_rule("cat stack", "joins along another dimension than the rows'")
def _cat(c: Call) -> Place:
    tensors = list(c.named["tensors"])
    places = {c.places.get(n) for n in tensors}
    ranks = {len(c.shape(n)) for n in tensors}
    place = next((p for p in places if p is not None), None)
    if place is None or len(places) != 1 or len(ranks) != 1:
        raise RefusedError("not all that it joins have the same rows")
    dim = _dim(c.named["dim"], len(c.shape(c.node)))
    if c.node.target is aten.stack.default:
        return place.at(place.dim + (dim <= place.dim))
    _off(place, {dim}, "it joins along")
    return place


@_rule("constant_pad_nd pad", "pads within each row")
def _pad(c: Call) -> Place:
    place = c.only_x()
    if place.dim >= len(c.shape(c.x)) - len(c.named["pad"]) // 2:
        raise RefusedError("it pads the dimension of the rows")
    return place


@_rule("_assert_tensor_metadata", "a check of dtype, device and layout")
def _assert_metadata(c: Call) -> Place:
    if c.named.get("size") is not None or c.named.get("stride") is not None:
        raise RefusedError("it checks sizes")
    return c.rows_of_x
