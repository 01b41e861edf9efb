"""ikbo.nn: the plain module's parameters, state dict, results and gradients, without the copies."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikbo
from ikbo.testing import definitions

from .cases import Maker

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)
KU, KC, OUT, WIDTH, USERS = 5, 3, 4, 6, 3
CAND_TO_USER = [2, 0, 0, 1, 2, 2, 0]


class PlainGatedMLP(nn.Module):
    def __init__(self, dim: int, hidden: int, out: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias)
        self.up_proj = nn.Linear(dim, hidden, bias)
        self.down_proj = nn.Linear(hidden, out, bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        result: Tensor = self.down_proj(hidden)
        return result


# (ikbo's module, the plain module) with the same parameters.
PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "concat_linear": (
        lambda: ikbo.nn.ConcatLinear(KU, KC, OUT),
        lambda: nn.Linear(KU + KC, OUT),
    ),
    "concat_linear_no_bias": (
        lambda: ikbo.nn.ConcatLinear(KU, KC, OUT, bias=False),
        lambda: nn.Linear(KU + KC, OUT, bias=False),
    ),
    "linear_compression": (
        lambda: ikbo.nn.LinearCompression(KU, KC, OUT),
        lambda: nn.Linear(KU + KC, OUT),
    ),
    "candidate_attention": (
        lambda: ikbo.nn.CandidateAttention(8, 2),
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    ),
    "candidate_attention_no_bias": (
        lambda: ikbo.nn.CandidateAttention(8, 2, bias=False),
        lambda: nn.MultiheadAttention(8, 2, bias=False, batch_first=True),
    ),
    "candidate_attention_kdim": (
        lambda: ikbo.nn.CandidateAttention(8, 2, kdim=5, vdim=3),
        lambda: nn.MultiheadAttention(8, 2, kdim=5, vdim=3, batch_first=True),
    ),
    "rms_norm": (lambda: ikbo.nn.RMSNorm((3, 6)), lambda: nn.RMSNorm((3, 6))),
    "rms_norm_no_weight": (
        lambda: ikbo.nn.RMSNorm(6, 1e-3, elementwise_affine=False),
        lambda: nn.RMSNorm(6, 1e-3, elementwise_affine=False),
    ),
    "layer_norm": (lambda: ikbo.nn.LayerNorm(6), lambda: nn.LayerNorm(6)),
    "layer_norm_no_bias": (
        lambda: ikbo.nn.LayerNorm((3, 6), 1e-3, bias=False),
        lambda: nn.LayerNorm((3, 6), 1e-3, bias=False),
    ),
    "layer_norm_no_weight": (
        lambda: ikbo.nn.LayerNorm(6, elementwise_affine=False),
        lambda: nn.LayerNorm(6, elementwise_affine=False),
    ),
    "gated_mlp": (
        lambda: ikbo.nn.GatedMLP(5, 9, 4, bias=True),
        lambda: PlainGatedMLP(5, 9, 4, True),
    ),
    "gated_mlp_no_bias": (lambda: ikbo.nn.GatedMLP(5, 9), lambda: PlainGatedMLP(5, 9, 5, False)),
}
every_pair = pytest.mark.parametrize("pair", PAIRS)
LINEARS = ["concat_linear", "concat_linear_no_bias", "linear_compression"]
every_linear = pytest.mark.parametrize("pair", LINEARS)


def _build(pair: str, device: str = "cpu") -> tuple[nn.Module, nn.Module]:
    """Both modules in float64 with the same random parameters."""
    ours, plain = (make().to(device, torch.float64) for make in PAIRS[pair])
    random = Maker(device, torch.float64, seed=3)
    for parameter in plain.parameters():
        parameter.data.copy_(random(*parameter.shape))
    ours.load_state_dict(plain.state_dict())
    return ours, plain


def _inputs(pair: str, device: str = "cpu") -> tuple[Tensor, ...]:
    """The module's tensors, in the order of its forward."""
    random = Maker(device, torch.float64)
    rows = len(CAND_TO_USER)
    if pair.startswith("concat_linear"):
        shapes: tuple[tuple[int, ...], ...] = ((rows, KC), (USERS, KU))
    elif pair.startswith("linear_compression"):
        shapes = ((rows, KC, WIDTH), (USERS, KU, WIDTH))
    elif pair == "candidate_attention_kdim":
        shapes = ((rows, 2, 8), (USERS, 4, 5), (USERS, 4, 3))
    elif pair.startswith("candidate_attention"):
        shapes = ((rows, 2, 8), (USERS, 4, 8))
    else:
        shapes = ((2, 3, 6),) if "norm" in pair else ((2, 3, 5),)
    return tuple(random(*shape).requires_grad_() for shape in shapes)


def _users(device: str = "cpu") -> Tensor:
    return torch.tensor(CAND_TO_USER, dtype=torch.int32, device=device)


def _ours(pair: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    users = _users(inputs[0].device.type)
    if pair == "candidate_attention_kdim":
        query, history, values = inputs
        result: Tensor = module(query, history, users, values=values)
    elif pair.startswith(("concat", "linear", "candidate")):
        result = module(*inputs, users)
    else:
        result = module(*inputs)
    return result


def _plain(pair: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """The usual way: the user's tensors copied to each candidate."""
    copied = [t[_users(t.device.type)] for t in inputs[1:]]
    if pair.startswith("concat_linear"):
        result: Tensor = module(torch.cat([copied[0], inputs[0]], dim=1))
    elif pair.startswith("linear_compression"):
        result = module(torch.cat([copied[0], inputs[0]], dim=1).mT).mT
    elif pair.startswith("candidate_attention"):
        result, _ = module(inputs[0], copied[0], copied[-1], need_weights=False)
    else:
        result = module(*inputs)
    return result


@every_pair
def test_initialised_as_the_plain_module(pair: str) -> None:
    """The same values for the same seed, and the generator left in the same state."""
    states = []
    for make in PAIRS[pair]:
        torch.manual_seed(11)
        states.append((make().state_dict(), torch.rand(1)))
    (ours, ours_next), (plain, plain_next) = states
    assert list(ours) == list(plain) and torch.equal(ours_next, plain_next)
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


@pytest.mark.parametrize("pair", [p for p in PAIRS if not p.startswith("candidate_attention")])
def test_reset_parameters_after_the_meta_device(pair: str) -> None:
    """As large models are built. (nn.MultiheadAttention has no such method.)"""
    with torch.device("meta"):
        module = PAIRS[pair][0]()
    assert all(p.is_meta for p in module.parameters())
    module.to_empty(device="cpu")
    torch.manual_seed(11)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    torch.manual_seed(11)
    fresh = PAIRS[pair][0]().state_dict()
    assert all(torch.equal(value, fresh[name]) for name, value in module.state_dict().items())


@every_pair
def test_state_dicts_go_both_ways(pair: str) -> None:
    ours, plain = (make() for make in PAIRS[pair])
    for source, target in ((plain, ours), (ours, plain)):
        for parameter in source.parameters():
            nn.init.normal_(parameter)
        assert str(target.load_state_dict(source.state_dict())) == "<All keys matched successfully>"
        assert all(
            torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True)
        )


@every_device
@every_pair
def test_equals_the_plain_module(pair: str, device: str) -> None:
    ours, plain = _build(pair, device)
    inputs, inputs_plain = _inputs(pair, device), _inputs(pair, device)
    got, want = _ours(pair, ours, inputs), _plain(pair, plain, inputs_plain)
    torch.testing.assert_close(got, want)
    weight = Maker(device, torch.float64, seed=1)(*want.shape)
    (got * weight).sum().backward()
    (want * weight).sum().backward()
    for a, b in zip(inputs, inputs_plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None, name
        torch.testing.assert_close(a.grad, b.grad)


@every_pair
def test_in_place_updates_are_seen(pair: str) -> None:
    """An optimiser's step, and a write to one element, change both next results alike."""
    ours, plain = _build(pair)
    if not list(ours.parameters()):
        pytest.skip("the module has no parameters")
    inputs = _inputs(pair)
    before = _ours(pair, ours, inputs)
    for module, call in ((ours, _ours), (plain, _plain)):
        call(pair, module, inputs).square().sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        with torch.no_grad():
            next(module.parameters()).view(-1)[0].add_(1.0)
    after = _ours(pair, ours, inputs)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, _plain(pair, plain, inputs))


@every_pair
def test_deepcopy_and_pickle(pair: str) -> None:
    ours, _ = _build(pair)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    inputs = _inputs(pair)
    want = _ours(pair, ours, inputs)
    for other in (copy.deepcopy(ours), torch.load(buffer, weights_only=False)):
        assert torch.equal(_ours(pair, other, inputs), want)
        assert repr(other) == repr(ours)
        for parameter in other.parameters():
            parameter.data.zero_()
    assert torch.equal(_ours(pair, ours, inputs), want)  # nothing is shared with the copies


@every_pair
def test_compiles_into_one_graph(pair: str) -> None:
    torch._dynamo.reset()
    ours, _ = _build(pair)
    inputs = _inputs(pair)
    candidates = ikbo.candidate_map(_users(), n_users=USERS)
    shared = pair.startswith(("concat", "linear", "candidate"))
    args = (*inputs[:2], candidates) if shared else inputs
    kwargs = {"values": inputs[2]} if len(inputs) == 3 else {}
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args, **kwargs), ours(*args, **kwargs))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            lambda: ikbo.nn.ConcatLinear(5, 3, 4, activation="silu"),
            "ConcatLinear(user_features=5, cand_features=3, out_features=4, bias=True, "
            "activation=silu)",
        ),
        (
            lambda: ikbo.nn.LinearCompression(5, 3, 4, bias=False, user_first=False),
            "LinearCompression(user_rows=5, cand_rows=3, out_rows=4, bias=False, activation=none, "
            "user_first=False)",
        ),
        (lambda: ikbo.nn.LayerNorm(6), "LayerNorm((6,), eps=1e-05, elementwise_affine=True"),
        (lambda: ikbo.nn.RMSNorm(6), "RMSNorm((6,), eps=None, elementwise_affine=True)"),
        (
            lambda: ikbo.nn.CandidateAttention(8, 2, kdim=5),
            "CandidateAttention(\n  embed_dim=8, num_heads=2, bias=True, kdim=5, vdim=8\n",
        ),
        (lambda: ikbo.nn.GatedMLP(2, 3), "GatedMLP(\n  activation=silu\n  (gate_proj): Linear("),
    ],
)
def test_repr(module: Callable[[], nn.Module], text: str) -> None:
    assert repr(module()).startswith(text)


# ---- linears ----------------------------------------------------------------


def _linear_class(pair: str) -> Any:
    return ikbo.nn.LinearCompression if pair == "linear_compression" else ikbo.nn.ConcatLinear


@every_linear
def test_the_users_columns_come_first_and_are_views(pair: str) -> None:
    ours, _ = _build(pair)
    assert torch.equal(ours.w_user, ours.weight[:, :KU])
    assert torch.equal(ours.w_cand, ours.weight[:, KU:])
    assert {n for n, _ in ours.named_parameters()} <= {"weight", "bias"} and not list(
        ours.buffers()
    )
    with torch.no_grad():
        ours.w_user.fill_(7.0)
        ours.weight[:, KU:].fill_(8.0)
    assert bool((ours.weight[:, :KU] == 7).all()) and bool((ours.w_cand == 8).all())


@every_linear
@pytest.mark.parametrize("user_first", [True, False])
def test_from_and_to_linear_share_the_parameters(pair: str, user_first: bool) -> None:
    _, plain = _build(pair)
    ours = _linear_class(pair).from_linear(plain, KU, "silu", user_first=user_first)
    assert ours.weight is plain.weight and ours.bias is plain.bias
    back = ours.to_linear()
    assert back.weight is plain.weight and back.bias is plain.bias and type(back) is nn.Linear
    assert (back.in_features, back.out_features) == (KU + KC, OUT)
    x_cand, x_user = _inputs(pair)
    sides = [x_user[_users()], x_cand]
    stacked = torch.cat(sides if user_first else sides[::-1], dim=1)
    want = nn.functional.silu(plain(stacked.mT).mT if x_cand.dim() == 3 else plain(stacked))
    torch.testing.assert_close(ours(x_cand, x_user, _users()), want)
    want.sum().backward()
    expected = plain.weight.grad.clone()
    plain.weight.grad = None
    ours(x_cand, x_user, _users()).sum().backward()
    torch.testing.assert_close(back.weight.grad, expected)


@every_linear
def test_from_linear_keeps_the_mode_and_no_other_random_numbers(pair: str) -> None:
    _, plain = _build(pair)
    before = torch.get_rng_state()
    assert not _linear_class(pair).from_linear(plain.eval(), KU).training
    assert torch.equal(torch.get_rng_state(), before)


@every_linear
@pytest.mark.parametrize("activation", definitions.ACTIVATIONS)
def test_user_part_once_per_request(pair: str, activation: str) -> None:
    _, plain = _build(pair)
    ours = _linear_class(pair).from_linear(plain, KU, activation)
    x_cand, x_user = _inputs(pair)
    part = ours.user_part(x_user)
    want = ours(x_cand, x_user, _users())
    torch.testing.assert_close(ours.forward_with_user_part(x_cand, part, _users()), want)
    grads = [
        torch.autograd.grad(out.square().sum(), [x_cand, x_user, *ours.parameters()])
        for out in (want, ours.forward_with_user_part(x_cand, part, _users()))
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@every_linear
@pytest.mark.parametrize("strict", [False, True])
def test_recompute(pair: str, strict: bool) -> None:
    """The same gradients with no [rows, OUT, ...] kept for them, and programs as without it."""
    _, plain = _build(pair)
    x_cand, x_user = _inputs(pair)
    grads, kept = [], []
    for recompute in (False, True):
        ours = _linear_class(pair).from_linear(plain, KU, "gelu", recompute=recompute)
        assert ours.recompute == recompute and ("recompute=True" in repr(ours)) == recompute
        for part in (None, ours.user_part(x_user).detach()):
            shapes: list[torch.Size] = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, shapes=shapes: shapes.append(t.shape) or t, lambda t: t
            ):
                if part is None:
                    out = ours(x_cand, x_user, _users())
                else:
                    out = ours.forward_with_user_part(x_cand, part, _users())
            kept.append(out.shape in shapes)
            grads.append(torch.autograd.grad(out.square().sum(), [x_cand, *ours.parameters()]))
    assert kept == [True, True, False, False]
    for with_it, without in ((grads[2], grads[0]), (grads[3], grads[1])):
        assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))
    program = torch.export.export(ours, (x_cand, x_user, _users()), strict=strict)
    assert torch.equal(program.module()(x_cand, x_user, _users()), ours(x_cand, x_user, _users()))


def test_linears_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"ikbo.nn.ConcatLinear: expected activation to be one of"):
        ikbo.nn.ConcatLinear(1, 1, 1, activation="tanh")
    with pytest.raises(ValueError, match=r"expected the user's share within the Linear's 4 input"):
        ikbo.nn.ConcatLinear.from_linear(nn.Linear(4, 2), 5)


# ---- attention ----------------------------------------------------------------


@pytest.mark.parametrize("kdim", [None, 5])
def test_multihead_attention_shares_the_parameters(kdim: int | None) -> None:
    plain = nn.MultiheadAttention(8, 2, dropout=0.1, kdim=kdim, vdim=kdim, batch_first=True)
    ours = ikbo.nn.CandidateAttention.from_multihead_attention(plain.eval())
    back = ours.to_multihead_attention()
    for other in (ours, back):
        for (name, a), (name_b, b) in zip(
            plain.named_parameters(), other.named_parameters(), strict=True
        ):
            assert name == name_b and a is b
    assert back.batch_first and back.dropout == 0.1 and not back.training and not ours.training


def test_kv_len_is_a_key_padding_mask() -> None:
    """What lies beyond a user's length doesn't matter, and its gradient is zero."""
    ours, plain = _build("candidate_attention")
    query, history = _inputs("candidate_attention")
    kv_len = torch.tensor([4, 1, 2], dtype=torch.int32)
    got = ours(query, history, _users(), kv_len)
    copied, beyond = history[_users()], torch.arange(4) >= kv_len[_users(), None]
    want, _ = plain(query, copied, copied, key_padding_mask=beyond, need_weights=False)
    torch.testing.assert_close(got, want)
    (grad,) = torch.autograd.grad(got.sum(), history)
    assert bool((grad[1, 1:] == 0).all()) and bool((grad[2, 2:] == 0).all())
    assert bool((grad[0] != 0).any(-1).all())


def test_history_projected_once_per_request() -> None:
    for pair in ("candidate_attention", "candidate_attention_kdim"):
        ours, _ = _build(pair)
        query, *history = _inputs(pair)
        k, v = ours.project_history(*history)
        assert k.shape == v.shape == (USERS, 4, 2, 4)
        want = _ours(pair, ours, (query, *history))
        assert torch.equal(ours.attend(query, k, v, _users()), want)


def test_attention_refuses_what_it_does_not_support() -> None:
    make = ikbo.nn.CandidateAttention.from_multihead_attention
    with pytest.raises(ValueError, match="expected add_bias_kv=False, got True"):
        make(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    with pytest.raises(ValueError, match="expected add_zero_attn=False, got True"):
        make(nn.MultiheadAttention(8, 2, add_zero_attn=True))
    with pytest.raises(ValueError, match="a positive multiple of num_heads, got embed_dim=8"):
        ikbo.nn.CandidateAttention(8, 3)
    ours = make(nn.MultiheadAttention(8, 2, dropout=0.1))
    inputs = (torch.randn(7, 2, 8), torch.randn(3, 4, 8), _users())
    with pytest.raises(RuntimeError, match=r"expected dropout == 0 in training, got 0.1"):
        ours(*inputs)
    assert ours.eval()(*inputs).shape == (7, 2, 8)


# ---- norms ----------------------------------------------------------------


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rms_norm_without_eps(dtype: torch.dtype, device: str) -> None:
    """eps=None is torch's: of the type sums are kept in, which small rows tell apart."""
    x = Maker(device, dtype)(4, 6, scale=3e-4)
    got, want = (kind(6).to(device, dtype)(x) for kind in (ikbo.nn.RMSNorm, nn.RMSNorm))
    assert got.dtype == dtype
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norms_refuse_another_shape(kind: str) -> None:
    for affine in (True, False):
        module = getattr(ikbo.nn, kind)((3, 6), elementwise_affine=affine)
        for shape in ((3, 5), (6,), (3, 6, 1)):
            with pytest.raises(
                ValueError, match=rf"ikbo.nn.{kind}: expected x of shape \[..., 3, 6\]"
            ):
                module(torch.randn(shape))


# ---- gated MLP ----------------------------------------------------------------


@pytest.mark.parametrize("activation", definitions.ACTIVATIONS)
def test_gated_mlp_activations(activation: str) -> None:
    module = ikbo.nn.GatedMLP(5, 9, activation=activation, bias=True, dtype=torch.float64)
    x = torch.randn(2, 5, dtype=torch.float64)
    hidden = definitions.ACTIVATIONS[activation](module.gate_proj(x)) * module.up_proj(x)
    torch.testing.assert_close(module(x), module.down_proj(hidden))
    with pytest.raises(ValueError, match=r"ikbo.nn.GatedMLP: expected activation to be one of"):
        ikbo.nn.GatedMLP(5, 9, activation="swish")
