"""The packed copy of a weight that ikbo.nn's linears keep for inference: used where it may be,
never out of date, never stored. On the CPU no kernel wants one; the tests say that one does."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikbo
from ikbo.nn import _packed
from ikbo.nn._packed import PackedCopy, read_as_it_is

KU, KC, OUT, WIDTH = 5, 4, 4, 8
USERS = torch.tensor([2, 0, 0, 1, -1, 2, 0], dtype=torch.int32)
KINDS: dict[str, Any] = {
    "linear_compression": ikbo.nn.LinearCompression,
    "concat_linear": ikbo.nn.ConcatLinear,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packed, "runs_kernels", lambda matrix: True)


def _integers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sums of their products are exact, in whatever order."""
    return torch.randint(-3, 4, shape).to(dtype)


def _module(kind: str, ku: int = KU, kc: int = KC, dtype: torch.dtype = torch.float32) -> Any:
    linear = nn.Linear(ku + kc, OUT, dtype=dtype)
    linear.weight.data = _integers(OUT, ku + kc, dtype=dtype)
    linear.bias.data = _integers(OUT, dtype=dtype)
    return KINDS[kind].from_linear(linear, ku)


def _inputs(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    width = (WIDTH,) if kind == "linear_compression" else ()
    return _integers(len(USERS), KC, *width, dtype=dtype), _integers(3, KU, *width, dtype=dtype)


def _without_copies(module: Any, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """By the functions, with the weight's own columns."""
    function = getattr(ikbo, {v: k for k, v in KINDS.items()}[type(module)])
    return function(*inputs, module.w_cand, module.w_user, module.bias, USERS.to(inputs[0].device))


def _keeps(module: Any) -> bool:
    kept = {module._packed_user is not None, module._packed_cand is not None}
    assert len(kept) == 1
    return kept.pop()


def _check(module: Any, inputs: tuple[Tensor, Tensor]) -> None:
    """What inference reads is the weight as it is now, and so are the results."""
    with torch.no_grad():
        for operand, half in zip(module._operands(), module._split_weight(), strict=True):
            assert torch.equal(operand, half)
        users = USERS.to(inputs[0].device)
        want = _without_copies(module, inputs)
        assert torch.equal(module(*inputs, users), want)
        part = module.user_part(inputs[1])
        assert torch.equal(module.forward_with_user_part(inputs[0], part, users), want)


# ---- what is packed, and how -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("matrix", "readable"),
    [
        (lambda t: t[:, :16], True),
        (lambda t: t[:, :13], True),  # rows still start 24 elements apart
        (lambda t: t[:, 8:13], True),
        (lambda t: t[:, 4:], False),  # the base
        (lambda t: t[:, :13].contiguous(), False),  # the row stride
        (lambda t: t[:, ::2], False),
        (lambda t: t.T, False),
        (lambda t: t[:1, :13].contiguous(), True),  # one row has no stride
        (lambda t: t[:, ::24], True),  # one column neither
        (lambda t: t[:, :0], True),
        (lambda t: t[:0, 1:], True),
    ],
)
def test_what_can_be_read_as_it_is(matrix: Callable[[Tensor], Tensor], readable: bool) -> None:
    assert read_as_it_is(matrix(torch.zeros(6, 24, dtype=torch.bfloat16))) == readable


@pytest.mark.parametrize("columns", [1, 63, 64, 65])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_copy_can_be_read(columns: int, dtype: torch.dtype) -> None:
    matrix = torch.randn(5, 70).to(dtype)[:, 1 : 1 + columns]
    packed = PackedCopy(matrix).read()
    assert torch.equal(packed, matrix) and read_as_it_is(packed)
    assert packed.stride(0) == (64 if columns <= 64 else 128)
    buffer = packed.as_strided((5, packed.stride(0)), packed.stride())
    assert bool((buffer[:, columns:] == 0).all())


@every_kind
def test_it_is_made_once(kind: str, kernels_on_the_cpu: None) -> None:
    module, inputs = _module(kind), _inputs(kind)
    _check(module, inputs)
    assert _keeps(module)
    with torch.no_grad():
        first, again = module._operands(), module._operands()
    assert all(a is b and a.stride(0) % 64 == 0 for a, b in zip(first, again, strict=True))


@every_kind
def test_only_halves_that_cannot_be_read_are_packed(kind: str, kernels_on_the_cpu: None) -> None:
    for ku, kc, packs in ((8, 16, (False, False)), (4, 12, (False, True)), (5, 4, (True, True))):
        module = _module(kind, ku, kc, torch.bfloat16)
        with torch.no_grad():
            module._operands()
        assert (module._packed_user is not None, module._packed_cand is not None) == packs


def test_nothing_is_packed_on_the_cpu() -> None:
    module = _module("concat_linear", dtype=torch.bfloat16)
    _check(module, _inputs("concat_linear", torch.bfloat16))
    assert not _keeps(module)


# ---- changes of the weight ---------------------------------------------------------------------
def _step(module: Any) -> None:
    module.weight.grad = _integers(*module.weight.shape)
    torch.optim.SGD([module.weight], lr=1.0).step()


def _in_place(module: Any) -> None:
    with torch.no_grad():
        module.w_user.add_(1)
        module.weight[:, KU:].mul_(2)


def _in_inference_mode(module: Any) -> None:
    with torch.inference_mode():
        module.weight.add_(1)


def _other_data(module: Any) -> None:
    module.weight.data = module.weight.data + 1


def _other_data_at_the_same_address(module: Any) -> None:
    address = module.weight.data_ptr()
    module.weight.data = torch.zeros(1)  # frees it
    for _ in range(100):
        new = _integers(OUT, KU + KC)
        if new.data_ptr() == address:
            break
    module.weight.data = new


def _loaded(module: Any, assign: bool = False) -> None:
    state = {name: value + 1 for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=assign)


def _other_parameter(module: Any) -> None:
    module.weight = nn.Parameter(_integers(OUT, KU + KC))


def _there_and_back(module: Any) -> None:
    module.double()
    module.weight.data.add_(1)
    module.float()


CHANGES: dict[str, Callable[[Any], None]] = {
    "step": _step,
    "in_place": _in_place,
    "in_inference_mode": _in_inference_mode,
    "other_data": _other_data,
    "other_data_at_the_same_address": _other_data_at_the_same_address,
    "loaded": _loaded,
    "loaded_assign": lambda module: _loaded(module, assign=True),
    "other_parameter": _other_parameter,
    "there_and_back": _there_and_back,
    "reset": lambda module: module.reset_parameters() or module.weight.data.round_(),
}


@every_kind
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_followed(kind: str, change: str, kernels_on_the_cpu: None) -> None:
    module, inputs = _module(kind), _inputs(kind)
    _check(module, inputs)
    before = module.weight.detach().clone()
    CHANGES[change](module)
    assert not torch.equal(module.weight, before)
    _check(module, inputs)
    assert _keeps(module)


def test_moving_the_module_leaves_nothing_behind(kernels_on_the_cpu: None) -> None:
    module = _module("concat_linear")
    _check(module, _inputs("concat_linear"))
    assert not _keeps(module.to(torch.float64))


def test_changes_that_torch_does_not_count(kernels_on_the_cpu: None) -> None:
    """Seen once the mode is set, or after a step of training."""
    module, inputs = _module("concat_linear"), _inputs("concat_linear")
    _check(module, inputs)
    for forget in (module.eval, lambda: module(*inputs, USERS)):
        module.weight.data.add_(1)
        forget()
        assert not _keeps(module)
        _check(module, inputs)


def test_a_computed_weight(kernels_on_the_cpu: None) -> None:
    """Each call makes a new tensor, of version 0, often where the last one was."""

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    module, inputs = _module("concat_linear"), _inputs("concat_linear")
    nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
    for _ in range(3):
        with torch.no_grad():
            module.parametrizations.weight.original.add_(1)
            part = module.user_part(inputs[1])
            assert torch.equal(part, inputs[1] @ module.w_user.T)
    assert copy.deepcopy(module)._packed_user is None


# ---- where it is not used ----------------------------------------------------------------------
@every_kind
def test_gradients_reach_the_weight(kind: str, kernels_on_the_cpu: None) -> None:
    module, inputs = _module(kind), _inputs(kind)
    _check(module, inputs)
    out = module(*inputs, USERS)
    assert not _keeps(module)
    out.square().sum().backward()
    want = torch.autograd.grad(_without_copies(module, inputs).square().sum(), module.weight)
    assert torch.equal(module.weight.grad, want[0])


@every_kind
def test_gradients_pass_a_frozen_weight(kind: str, kernels_on_the_cpu: None) -> None:
    """Also where the copy was made in inference mode, whose tensors autograd can't save."""
    module, inputs = _module(kind).requires_grad_(False), _inputs(kind)
    with torch.inference_mode():
        module(*inputs, USERS)
    inputs[0].requires_grad_(), inputs[1].requires_grad_()
    got = torch.autograd.grad(module(*inputs, USERS).square().sum(), inputs)
    assert _keeps(module)
    want = torch.autograd.grad(_without_copies(module, inputs).square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_weights_made_in_inference_mode(kernels_on_the_cpu: None) -> None:
    with torch.inference_mode():
        module, inputs = _module("concat_linear"), _inputs("concat_linear")
        for _ in range(2):
            assert torch.equal(module(*inputs, USERS), _without_copies(module, inputs))
            module.weight.add_(1)
    assert not _keeps(module)


@every_kind
def test_recorded_programs_follow_the_weight(kind: str, kernels_on_the_cpu: None) -> None:
    torch._dynamo.reset()
    module, inputs = _module(kind), (*_inputs(kind), USERS)
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        compiled(*inputs)
        traced = torch.jit.trace(module, inputs, check_trace=False)
        exported = torch.export.export(module, inputs).module()
        assert not _keeps(module)
        module.weight.add_(1)
        exported.load_state_dict(module.state_dict())
        for program in (compiled, traced, exported):
            assert torch.equal(program(*inputs), _without_copies(module, inputs[:2]))
        assert not _keeps(module)


def test_transformed_and_symbolic_weights(kernels_on_the_cpu: None) -> None:
    module, inputs = _module("concat_linear"), _inputs("concat_linear")
    _check(module, inputs)
    with torch.no_grad():
        graph = torch.fx.symbolic_trace(module)
        assert torch.equal(graph(*inputs, USERS), module(*inputs, USERS))
        stacked = {k: torch.stack([v, v + 1]) for k, v in module.state_dict().items()}
        results = torch.vmap(
            lambda state: torch.func.functional_call(module, state, (*inputs, USERS))
        )(stacked)
        assert torch.equal(results[0], module(*inputs, USERS))
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            fake = copy.deepcopy(module)
        assert type(fake.user_part(inputs[1])) is not Tensor


@every_kind
def test_it_is_neither_stored_nor_copied(kind: str, kernels_on_the_cpu: None) -> None:
    module, inputs = _module(kind), _inputs(kind)
    _check(module, inputs)
    assert list(module.state_dict()) == ["weight", "bias"] and not list(module.buffers())
    buffer = io.BytesIO()
    torch.save(module, buffer)
    assert b"Packed" not in buffer.getvalue()
    buffer.seek(0)
    for other in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):
        assert not _keeps(other)
        other.weight.data.add_(1)
        _check(other, inputs)
    _check(module, inputs)
    assert _keeps(module)


# ---- on a GPU ----------------------------------------------------------------------------------
def _on_gpu(kind: str) -> tuple[Any, tuple[Tensor, Tensor]]:
    module = _module(kind, dtype=torch.bfloat16).cuda()
    cand, user = _inputs(kind, torch.bfloat16)
    return module, (cand.cuda(), user.cuda())


@pytest.mark.gpu
@every_kind
def test_packed_on_a_gpu(kind: str) -> None:
    module, inputs = _on_gpu(kind)
    for _ in range(2):
        _check(module, inputs)
        assert _keeps(module)
        with torch.no_grad():
            first, again = module._operands(), module._operands()
            assert all(a is b for a, b in zip(first, again, strict=True))
            module.weight.sub_(1)
    wide = module.float()
    with torch.no_grad():
        wide._operands()
    assert not _keeps(wide)  # no kernel takes float32


@pytest.mark.gpu
def test_a_copy_is_not_read_before_it_is_written() -> None:
    module, _ = _on_gpu("concat_linear")
    torch.cuda.synchronize()
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(writer):
            torch.cuda._sleep(200_000_000)  # cycles; a tenth of a second
            module._operands()
        with torch.cuda.stream(reader):
            read = [operand.clone() for operand in module._operands()]
    torch.cuda.synchronize()
    for got, want in zip(read, module._split_weight(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
@every_kind
def test_a_captured_graph_follows_the_weight(kind: str) -> None:
    module, inputs = _on_gpu(kind)
    users = USERS.cuda()
    with torch.no_grad():
        module(*inputs, users)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            module(*inputs, users)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = module(*inputs, users)
        module.weight.sub_(1)
        module(*inputs, users)
        graph.replay()
        assert torch.equal(out, _without_copies(module, inputs))
