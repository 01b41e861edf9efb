"""What every op owes torch: opcheck, torch.compile, torch.export, autocast, out variants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .cases import ALL_CASES, Case

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_case = pytest.mark.parametrize("case", ALL_CASES, ids=str)
every_device = pytest.mark.parametrize("device", DEVICES)
# Without test_aot_dispatch_dynamic, which differentiates every result.
EAGER_TEST_UTILS = ("test_schema", "test_autograd_registration", "test_faketensor")


def _op(name: str) -> Any:
    return getattr(torch.ops.ikbo, name).default


def _with_grad(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
    )


def _results(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


@every_device
@every_case
def test_opcheck(case: Case, device: str) -> None:
    for dtype in case.dtypes:
        torch.library.opcheck(_op(case.op), case.make(device, dtype))
        if case.has_fwd:
            torch.library.opcheck(_op(case.op), _with_grad(case.make(device, dtype)))
            utils = {} if case.all_results_differentiable else {"test_utils": EAGER_TEST_UTILS}
            fwd_args = _with_grad(case.make(device, dtype))
            torch.library.opcheck(_op(f"{case.op}_fwd"), fwd_args, **utils)


@every_device
@every_case
def test_name_and_fwd_give_the_same_bits(case: Case, device: str) -> None:
    if not case.has_fwd:
        pytest.skip("the op has no _fwd variant")
    for dtype in case.dtypes:
        args = case.make(device, dtype)
        for a, b in zip(_results(_op(case.op)(*args)), _op(f"{case.op}_fwd")(*args), strict=False):
            assert torch.equal(a, b)


@every_device
@every_case
def test_out_variant_fills_what_it_is_given(case: Case, device: str) -> None:
    if not case.has_out:
        pytest.skip("the op has no out variant")
    args = case.make(device, torch.float32)
    want = _op(case.op)(*args)
    out = torch.full_like(want, 7e30)
    assert getattr(torch.ops.ikbo, case.op).out(*args, out=out) is None
    assert torch.equal(out, want)
    torch.library.opcheck(getattr(torch.ops.ikbo, case.op).out, args, {"out": out})
    with pytest.raises(RuntimeError, match=f"ikbo.{case.op}: expected out of shape"):
        getattr(torch.ops.ikbo, case.op).out(*args, out=out.new_empty(out.numel() + 1))


@every_device
@every_case
def test_compiles_into_one_graph_with_symbolic_sizes(case: Case, device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_op(case.op), fullgraph=True, dynamic=True, backend="aot_eager")
    args = case.make(device, torch.float32)
    if not case.has_fwd:
        for got, want in zip(_results(compiled(*args)), _results(_op(case.op)(*args)), strict=True):
            assert torch.equal(got.float(), want.float())
        return
    grads = []
    for f in (compiled, _op(case.op)):
        inputs = _with_grad(case.make(device, torch.float32))
        results = _results(f(*inputs))
        sum(r.float().square().sum() for r in results).backward()
        grads.append([a.grad for a in inputs if isinstance(a, Tensor) and a.is_floating_point()])
        grads[-1].extend(r.detach() for r in results)
    for got, want in zip(*grads, strict=True):
        assert torch.equal(got, want)


class _Call(torch.nn.Module):
    def __init__(self, case: Case, scalars: dict[str, Any]) -> None:
        super().__init__()
        self.case, self.scalars = case, scalars

    def forward(self, tensors: dict[str, Tensor]) -> Any:
        return _op(self.case.op)(**tensors, **self.scalars)


@every_device
@every_case
def test_exports_with_symbolic_sizes(case: Case, device: str) -> None:
    names = [a.name for a in _op(case.op)._schema.arguments]
    given = dict(zip(names, case.make(device, torch.float32), strict=False))
    tensors = {k: v for k, v in given.items() if isinstance(v, Tensor)}
    program = torch.export.export(
        _Call(case, {k: v for k, v in given.items() if k not in tensors}),
        (tensors,),
        dynamic_shapes=({k: {0: torch.export.Dim.AUTO} for k in tensors},),
    )
    assert any(f"ikbo.{case.op}" in str(node.target) for node in program.graph.nodes)
    results = zip(_results(program.module()(tensors)), _results(_op(case.op)(**given)), strict=True)
    for got, want in results:
        assert torch.equal(got.float(), want.float())


def test_every_op_has_a_case() -> None:
    """No op escapes this file."""
    names = torch._C._dispatch_get_all_op_names()
    ours = [name.removeprefix("ikbo::") for name in names if name.startswith("ikbo::")]
    ops = {name.split(".")[0] for name in ours}
    public = {o for o in ops if not o.endswith(("_fwd", "_bwd"))} - {"group_candidates"}
    assert public == {case.op for case in ALL_CASES}
