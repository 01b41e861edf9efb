"""An activation joins the product before it."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..engine import Done, Rewriter
from ..rules import aten, named_arguments
from .registry import algebra_for, ikbo

ACTIVATIONS: dict[Any, str] = {
    aten.relu.default: "relu",
    aten.silu.default: "silu",
    aten.gelu.default: "gelu",
    aten.sigmoid.default: "sigmoid",
}
FUSING = (ikbo.concat_linear.default, ikbo.linear_compression.default)


@algebra_for(*ACTIVATIONS)
def fuse_activation(r: Rewriter, node: fx.Node) -> Done | None:
    """``act(concat_linear(...))`` in one op."""
    before = node.args[0] if node.args else None
    if not isinstance(before, fx.Node) or len(before.users) != 1:
        return None
    product = r.lazy(before)
    if not isinstance(product, fx.Node) or product.target not in FUSING or len(product.args) != 8:
        return None
    activation = ACTIVATIONS[node.target]
    if activation == "gelu" and named_arguments(node)["approximate"] == "tanh":
        activation = "gelu_tanh"
    fused = r.builder.call(product.target, *product.args, activation)  # type: ignore[arg-type]
    return fused, "replaced", "an activation fused with the product before it"
