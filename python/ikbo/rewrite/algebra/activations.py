"""An activation joins the product before it; Linears with one, or behind one, are `linear_act`."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..engine import Done, Rewriter
from ..rules import RULES, argument, aten, named_arguments, value
from ..values import Gathered, Lazy
from .forms import linear_map
from .registry import algebra_for, ikbo

ACTIVATIONS: dict[Any, str] = {
    aten.relu.default: "relu",
    aten.silu.default: "silu",
    aten.gelu.default: "gelu",
    aten.sigmoid.default: "sigmoid",
}
FUSING = (ikbo.concat_linear.default, ikbo.linear_compression.default)
CHAINED = (ikbo.concat_linear.default, ikbo.linear_act.default)
FEW = 8  # fewer columns than this have a kernel of their own
JOINED = "an activation fused with the product before it"
FOLLOWS = "a Linear whose kernel begins while the one before it ends"


@algebra_for(*ACTIVATIONS)
def fuse_activation(r: Rewriter, node: fx.Node) -> Done | None:
    """``act(concat_linear(...))`` or ``act(linear(...))`` in one op."""
    before = node.args[0] if node.args else None
    if not isinstance(before, fx.Node) or len(before.users) != 1:
        return None
    product = r.lazy(before)
    activation = ACTIVATIONS[node.target]
    if activation == "gelu" and named_arguments(node)["approximate"] == "tanh":
        activation = "gelu_tanh"
    if isinstance(product, fx.Node) and product.target in FUSING and len(product.args) == 8:
        fused = r.builder.call(product.target, *product.args, activation)  # type: ignore[arg-type]
        return fused, "replaced", JOINED
    done = _linear_act(r, product, activation)
    return None if done is None else (done, "replaced by linear_act", JOINED)


@algebra_for(aten.linear.default, aten.addmm.default)
def chained(r: Rewriter, node: fx.Node) -> Done | None:
    """A Linear of few columns and no activation behind another of these kernels.

    Wider ones stay: cuBLAS is quicker (256 to 1024 columns of 4096 rows: 7.6 against 11.6 us), and
    a compiler lets it write into a concatenation.
    """
    named = named_arguments(node)
    x, columns = r.lazy(named["input" if "input" in named else "mat1"]), value(node).shape[-1]
    source = x.source if isinstance(x, Gathered) else x
    if not isinstance(source, fx.Node) or source.target not in CHAINED:
        return None
    if not isinstance(columns, int) or columns >= FEW:
        return None
    made = r.as_it_is(node)
    done = None if made is None else _linear_act(r, made, "none")
    return None if done is None else (done, "replaced by linear_act", FOLLOWS)


def _linear_act(r: Rewriter, product: Lazy, activation: str) -> Lazy | None:
    """``linear_act`` for a Linear, also one of copied rows, if a kernel takes it."""
    source = product.source if isinstance(product, Gathered) else product
    if not isinstance(source, fx.Node):
        return None
    if source.target is ikbo.linear_act.default:
        operands: Any = source.args[:3] if source.args[3] == "none" else None
    else:
        operands = linear_map(r, source)
    if operands is None or not _is_taken(*operands[:2]):
        return None
    made = r.builder.call(ikbo.linear_act.default, *operands, activation)
    return Gathered(made, product.map, product.place) if isinstance(product, Gathered) else made


def _is_taken(x: fx.Node, weight: fx.Node) -> bool:
    """Whether a kernel takes these features: of half precision, in rows of whole 16 bytes.

    A view of what a norm makes is left to the compiler: for an op that isn't its own it writes that
    by one more kernel (12 us for 4096 rows of 2048).
    """
    out, features = value(weight).shape
    known = isinstance(out, int) and isinstance(features, int)
    halves = value(x).dtype in (torch.bfloat16, torch.float16)
    whole = known and features % 8 == 0 and (out % 8 == 0 or out < FEW)
    return halves and whole and not (x.target is aten.reshape.default and _is_norm(argument(x, 0)))


def _is_norm(node: fx.Node) -> bool:
    rule = RULES.get(node.target)
    return rule is not None and rule.reason == "normalises within each row"
