"""candidate_attention: the definition, gradients, every form of history, ranges, NaN, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ikbo
from ikbo.testing import assert_matches_definition, definitions

from .cases import Maker
from .cases.attention import FORMS, candidate_attention_args

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)
every_form = pytest.mark.parametrize("form", FORMS)
NAN = float("nan")
Args = tuple[Any, ...]


def _out(args: Args) -> Tensor:
    return torch.ops.ikbo.candidate_attention(*args)


def _fwd(args: Args) -> tuple[Tensor, Tensor]:
    return torch.ops.ikbo.candidate_attention_fwd(*args)


def _definition(args: Args) -> tuple[Tensor, Tensor]:
    return definitions.candidate_attention(*args[:6], args[8])


def _to(args: Args, dtype: torch.dtype) -> Args:
    return (*(t.to(dtype) for t in args[:3]), *args[3:])


def _gradients(f: Callable[[Args], Tensor], args: Args, seed: int = 1) -> list[Tensor]:
    """Gradients of q, k and v for a random weight of each result, 0 where the result is NaN."""
    inputs = [t.detach().clone().requires_grad_() for t in args[:3]]
    out = f((*inputs, *args[3:]))
    weight = Maker(str(out.device), torch.float64, seed=seed)(*out.shape).to(out.dtype)
    weight = torch.where(out.isnan(), 0, weight)
    # With no user at all, the definition's k and v stand apart from its result.
    return list(torch.autograd.grad(out, inputs, weight, materialize_grads=True))


def _set(args: Args, *, users: Any = None, kv_start: Any = None, kv_len: Any = None) -> Args:
    """The arguments with another map or other ranges, lists in int32."""
    changed = list(args)
    for i, values in ((3, kv_start), (4, kv_len), (5, users)):
        if values is not None:
            values = torch.as_tensor(values)
            fits = bool(((values < 2**31) & (values >= -(2**31))).all())
            dtype = torch.int32 if fits else torch.int64
            changed[i] = values.to(args[0].device, dtype)
    return tuple(changed)


# ---- the definition ----------------------------------------------------------------------------


@every_device
@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("S", [1, 3])
def test_matches_definition(dtype: torch.dtype, form: str, S: int, device: str) -> None:
    args = candidate_attention_args(device, dtype, form=form, B=37, S=S, U=5, L=64, D=24, Dv=16)
    out, lse = _fwd(args)
    exact_out, exact_lse = _definition(_to(args, torch.float64))
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_matches_definition(out, exact_out, _definition(args)[0])
    assert_matches_definition(lse, exact_lse, _definition(_to(args, torch.float32))[1])


SIZES = {
    "B": st.sampled_from([0, 1, 2, 7]),
    "S": st.sampled_from([0, 1, 3, 64]),
    "U": st.sampled_from([0, 1, 3, 8]),
    "L": st.sampled_from([0, 1, 7, 64, 130]),
    "heads": st.sampled_from([(1, 1), (4, 4), (6, 2), (3, 1)]),
    "D": st.sampled_from([1, 8, 17]),
    "Dv": st.sampled_from([0, 1, 8, 20]),
    "form": st.sampled_from(FORMS),
    "scale": st.sampled_from([None, 0.0, -0.7, 2.0]),
}


@settings(max_examples=60, deadline=None)
@given(**SIZES)
def test_any_sizes(heads: tuple[int, int], **sizes: Any) -> None:
    """In float64, so that results and gradients are those of the definition to the last digits."""
    args = candidate_attention_args("cpu", torch.float64, H=heads[0], Hk=heads[1], **sizes)
    out, lse = _fwd(args)
    want_out, want_lse = _definition(args)
    torch.testing.assert_close(out, want_out)
    torch.testing.assert_close(lse, want_lse)
    assert torch.equal(_out(args), out)
    torch.testing.assert_close(
        _gradients(_out, args), _gradients(lambda a: _definition(a)[0], args)
    )


@every_device
@every_form
def test_gradcheck(form: str, device: str) -> None:
    args = candidate_attention_args(
        device, torch.float64, form=form, B=4, S=2, L=2, H=2, Hk=1, D=2, Dv=1
    )
    inputs = [t.requires_grad_() for t in args[:3]]
    assert torch.autograd.gradcheck(lambda *x: _out((*x, *args[3:])), inputs)


@every_device
@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_match_the_definition(form: str, dtype: torch.dtype, device: str) -> None:
    args = candidate_attention_args(
        device, dtype, form=form, B=40, S=3, U=4, L=70, H=6, Hk=2, D=16, Dv=24
    )
    plain = _gradients(lambda a: _definition(a)[0], args)
    exact = _gradients(lambda a: _definition(a)[0], _to(args, torch.float64))
    for ours, e, p in zip(_gradients(_out, args), exact, plain, strict=True):
        # In float32 plain's many short sums come out ahead of one long sum.
        assert_matches_definition(ours, e, p, multiple=4 if dtype is torch.float32 else 2)


@every_device
def test_work_in_several_slices(device: str) -> None:
    """More query rows a user than one slice of the workspace holds."""
    args = candidate_attention_args(
        device, torch.float64, form="dense_len", B=6, S=64, U=2, L=2048, H=8, Hk=1, D=4, Dv=4
    )
    torch.testing.assert_close(_fwd(args), _definition(args))
    torch.testing.assert_close(
        _gradients(_out, args), _gradients(lambda a: _definition(a)[0], args)
    )


@every_device
def test_all_forms_agree(device: str) -> None:
    def args(form: str) -> Args:
        return candidate_attention_args(device, torch.float64, form=form, B=9, U=4, L=33)

    want = _fwd(args("dense_len"))
    for form in FORMS[2:]:
        torch.testing.assert_close(_fwd(args(form)), want)


@every_device
def test_users_may_share_a_slot(device: str) -> None:
    """Flat ranges may overlap; a shared key's gradient is the sum over the users that read it."""
    q, k, v, *_ = candidate_attention_args(device, torch.float64, B=6, U=1, L=8)
    users = torch.tensor([0, 1, 2, 2, 1, 0], device=device)
    args = (q, k[0], v[0], None, None, users, None, None, None)
    args = _set(args, kv_start=[0, 2, 2], kv_len=[5, 6, 3])
    torch.testing.assert_close(_fwd(args), _definition(args))
    torch.testing.assert_close(
        _gradients(_out, args), _gradients(lambda a: _definition(a)[0], args)
    )


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_scores_do_not_overflow(dtype: torch.dtype, device: str) -> None:
    """Scores near 1e9, beyond float16 and where exp of them is infinite: the largest takes all."""
    q, k, v, *rest = candidate_attention_args(device, dtype, B=9, L=40, rows_without_user=False)
    args = (q * 1e4, k * 1e4, v, *rest)
    out, lse = _fwd(args)
    exact_out, exact_lse = _definition(_to(args, torch.float64))
    assert bool(out.isfinite().all())
    assert_matches_definition(out, exact_out)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=0)


# ---- rows and ranges ---------------------------------------------------------------------------


@every_device
def test_rows_without_a_user(device: str) -> None:
    """-1 gives 0 and -inf, any other stray value NaN; what those rows hold reaches no gradient."""
    args = candidate_attention_args(device, torch.float32, form="dense_len", B=6, U=2)
    args = _set(args, users=[0, -1, 1, 2, -7, 2**31 - 1])
    clean = _fwd(args)
    want = _gradients(_out, args)
    args[0][[1, 3, 4, 5]] = NAN
    out, lse = _fwd(args)
    assert bool((out[1] == 0).all()) and bool((lse[1] == float("-inf")).all())
    assert bool(out[3:].isnan().all()) and bool(lse[3:].isnan().all())
    assert torch.equal(out[[0, 2]], clean[0][[0, 2]]) and bool(out[[0, 2]].isfinite().all())
    assert bool(lse[[0, 2]].isfinite().all())
    inputs = [t.requires_grad_() for t in args[:3]]
    grad_out = torch.full_like(out, NAN)
    grad_out[[0, 2]] = Maker(device, torch.float64, seed=1)(*out.shape).to(out)[[0, 2]]
    _out(args).backward(grad_out)
    for got, grad in zip(inputs, want, strict=True):
        assert torch.equal(got.grad, grad)
    assert bool((inputs[0].grad[[1, 3, 4, 5]] == 0).all())


@every_device
def test_wide_map_values_are_not_wrapped_into_range(device: str) -> None:
    args = candidate_attention_args(device, torch.float32, B=3, U=2)
    out = _out(_set(args, users=[2**32, 1, -1]))
    assert bool(out[0].isnan().all()) and bool(out[1].isfinite().all())
    assert bool((out[2] == 0).all())


@every_device
@every_form
def test_empty_history(form: str, device: str) -> None:
    """User 1's is empty in every form but the dense one without lengths."""
    L = 0 if form == "dense" else 5
    args = candidate_attention_args(device, torch.float32, form=form, B=6, L=L)
    args = _set(args, users=[1, 0, 1, 2, 0, 1])
    out, lse = _fwd(args)
    empty = [0, 2, 5] if L else slice(None)
    assert bool((out[empty] == 0).all()) and bool((lse[empty] == float("-inf")).all())
    grads = _gradients(_out, args)
    assert bool((grads[0][empty] == 0).all()) and all(bool(g.isfinite().all()) for g in grads)


BAD_RANGES = {
    "negative length": ("dense_len", None, [5, -1, 3]),
    "length > L": ("dense_len", None, [5, 6, 3]),
    "length that int32 wraps": ("dense_len", None, [5, 2**32 + 1, 3]),
    "start + length > T": ("slab", [0, 18, 5], [5, 3, 3]),
    "start > T": ("slab", [0, 21, 5], [5, 0, 3]),
    "negative start": ("slab", [0, -1, 5], [5, 3, 3]),
    "negative length of a slot": ("slab", [0, 5, 5], [5, -3, 3]),
    "start that int32 wraps": ("slab", [0, 2**32, 5], [5, 3, 3]),
    "sum that int64 wraps": ("slab", [0, 2**63 - 1, 5], [5, 2**63 - 1, 3]),
    "smallest int64": ("slab", [0, -(2**63), 5], [5, 3, 3]),
}


@every_device
@pytest.mark.parametrize("name", BAD_RANGES)
def test_a_range_that_leaves_its_tensor_makes_its_user_nan(name: str, device: str) -> None:
    form, start, length = BAD_RANGES[name]
    args = candidate_attention_args(device, torch.float32, form=form, B=5, U=3, L=5)
    bad = _set(args, users=[0, 1, 2, 1, -1], kv_start=start, kv_len=length)
    good_start = None if start is None else [start[0], 0, start[2]]
    good = _set(bad, kv_start=good_start, kv_len=[length[0], 0, length[2]])
    for got, want in zip(_fwd(bad), _fwd(good), strict=True):
        assert bool(got[[1, 3]].isnan().all())
        assert torch.equal(got[[0, 2, 4]], want[[0, 2, 4]])
    for got, want in zip(_gradients(_out, bad), _gradients(_out, good), strict=True):
        assert torch.equal(got, want)


@every_device
def test_offsets_that_leave_the_tensor_or_decrease(device: str) -> None:
    args = candidate_attention_args(device, torch.float32, form="offsets", B=5, U=3, L=5)
    keys = args[1].shape[0]
    for offsets, wrong in (([0, 3, keys + 1, keys], [1, 2]), ([-1, 3, 3, keys], [0])):
        out, lse = _fwd(_set(args, users=[0, 1, 2, 1, -1], kv_start=offsets))
        for row, user in enumerate([0, 1, 2, 1, -1]):
            assert bool(out[row].isnan().all() == (user in wrong))
            assert bool(lse[row].isnan().all() == (user in wrong))


@every_device
def test_ranges_up_to_the_end_are_valid(device: str) -> None:
    args = candidate_attention_args(device, torch.float64, form="slab", B=5, U=3, L=5)
    args = _set(args, kv_start=[20, 15, 0], kv_len=[0, 5, 20])
    out, lse = _fwd(args)
    assert not bool(out.isnan().any() | lse.isnan().any())
    torch.testing.assert_close((out, lse), _definition(args))


# ---- NaN and infinities ------------------------------------------------------------------------


@every_device
@pytest.mark.parametrize("form", ["dense_len", "left_padded", "slab"])
@pytest.mark.parametrize("stray", [NAN, float("inf")])
def test_what_lies_outside_the_histories_changes_nothing(
    form: str, stray: float, device: str
) -> None:
    args = candidate_attention_args(device, torch.float32, form=form, B=9, U=4, L=7)
    want, want_grads = _fwd(args), _gradients(_out, args)
    k, v, start, length = args[1], args[2], args[3], args[4]
    start = torch.arange(4, device=device) * 7 if start is None else start
    place = torch.arange(k.numel() // k.shape[-1] // k.shape[-2], device=device)
    inside = ((place >= start[:, None]) & (place < (start + length)[:, None])).any(0)
    assert bool(inside.any()) and bool((~inside).any())
    for t in (k, v):
        t.view(-1, *t.shape[-2:])[~inside] = stray
    for got, clean in zip(_fwd(args), want, strict=True):
        assert torch.equal(got, clean)
    for got, clean in zip(_gradients(_out, args), want_grads, strict=True):
        assert torch.equal(got, clean)
    for grad in want_grads[1:]:
        assert bool((grad.reshape(-1, *grad.shape[-2:])[~inside] == 0).all())


@every_device
@pytest.mark.parametrize("what", ["q", "k", "v", "grad_out"])
@pytest.mark.parametrize("stray", [NAN, float("inf")])
def test_nan_and_inf_stay_where_they_came_from(what: str, stray: float, device: str) -> None:
    args = candidate_attention_args(device, torch.float32, B=6, U=3, L=5)
    args = _set(args, users=[0, 1, 2, 0, 1, 2])
    clean, clean_grads = _out(args), _gradients(_out, args)
    grad_out = Maker(device, torch.float64, seed=1)(*clean.shape).to(clean)
    if what == "grad_out":
        grad_out[1] = stray
    else:
        args[{"q": 0, "k": 1, "v": 2}[what]][1] = stray
    hit = [] if what == "grad_out" else [1] if what == "q" else [1, 4]  # rows of out
    kept = [b for b in range(6) if b not in hit]
    inputs = [t.detach().requires_grad_() for t in args[:3]]
    dirty = _out((*inputs, *args[3:]))
    assert torch.equal(dirty[kept], clean[kept]) and not bool(dirty[hit].isfinite().any())
    dirty.backward(grad_out)
    rows = [0, 2, 3, 5] + ([4] if what in ("q", "grad_out") else [])
    assert torch.equal(inputs[0].grad[rows], clean_grads[0][rows])
    assert not bool(inputs[0].grad[1].isfinite().any())
    for got, want in zip(inputs[1:], clean_grads[1:], strict=True):
        assert torch.equal(got.grad[[0, 2]], want[[0, 2]])
    assert not bool(inputs[1].grad[1].isfinite().any())
    if what != "v":  # v has no part in its own gradient
        assert not bool(inputs[2].grad[1].isfinite().all())


# ---- how the arguments may come ----------------------------------------------------------------


@every_device
def test_grouping_arguments_change_nothing(device: str) -> None:
    for users in ([0, 0, 1, 2, 2, -1, -1], [2, -1, 0, 2, 1, 0, -1]):
        m = ikbo.candidate_map(users, n_users=3, device=device)
        args = candidate_attention_args(device, torch.float32, B=7, U=3)
        args = (*args[:5], m.cand_to_user, None, None, None)
        want = [*_fwd(args), *_gradients(_out, args)]
        groupings = [(m.user_offsets, m.order)]
        if users[-2:] == [-1, -1]:
            groupings.append((m.user_offsets, None))
        for grouping in groupings:
            grouped = (*args[:6], *grouping, None)
            for a, b in zip(want, [*_fwd(grouped), *_gradients(_out, grouped)], strict=True):
                assert torch.equal(a, b)


def _strided(t: Tensor) -> Tensor:
    return torch.stack([t, t + 1], dim=-1)[..., 0]


@every_device
@pytest.mark.parametrize("form", ["dense_len", "left_padded"])
def test_strided_and_expanded_operands(form: str, device: str) -> None:
    args = candidate_attention_args(device, torch.float64, form=form, B=8, S=3)
    want, want_grads = _fwd(args), _gradients(_out, args)
    heads_first = [t.transpose(-3, -2).contiguous().transpose(-3, -2) for t in args[:3]]
    for views in ([_strided(t) for t in args[:3]], heads_first):
        ranges = [None if t is None else _strided(t) for t in args[3:6]]
        strided = (*views, *ranges, *args[6:])
        torch.testing.assert_close(_fwd(strided), want)
        inputs = [t.detach().requires_grad_() for t in views]
        out = _out((*inputs, *strided[3:]))
        out.backward(_strided(Maker(device, torch.float64, seed=1)(*out.shape)))
        torch.testing.assert_close([t.grad for t in inputs], want_grads)
    dense, expanded = ([t.detach().requires_grad_() for t in args[:3]] for _ in range(2))
    _out((*expanded, *args[3:])).sum().backward()  # an expanded gradient
    out = _out((*dense, *args[3:]))
    out.backward(torch.ones_like(out))
    for a, b in zip(expanded, dense, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@every_device
def test_one_history_expanded_over_users(device: str) -> None:
    args = list(candidate_attention_args(device, torch.float64, form="dense_len"))
    args[1:3] = [t[:1].expand_as(t) for t in args[1:3]]
    torch.testing.assert_close(_fwd(tuple(args)), _definition(tuple(args)))


@every_device
def test_strided_out(device: str) -> None:
    args = candidate_attention_args(device, torch.float32)
    want = _out(args)
    out = torch.full_like(want, NAN).permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)
    assert not out.is_contiguous()
    torch.ops.ikbo.candidate_attention.out(*args, out=out)
    assert torch.equal(out, want)


@every_device
def test_gradients_not_asked_for_are_not_made(device: str) -> None:
    args = candidate_attention_args(device, torch.float32)
    out, lse = _fwd(args)
    saved = (torch.ones_like(out), *args[:3], out, lse, *args[3:])
    everything = torch.ops.ikbo.candidate_attention_bwd(*saved, 7)
    for mask in range(8):
        grads = torch.ops.ikbo.candidate_attention_bwd(*saved, mask)
        for bit, (got, want) in enumerate(zip(grads, everything, strict=True)):
            assert torch.equal(got, want) if mask >> bit & 1 else got.shape == (0,)


# ---- memory ------------------------------------------------------------------------------------


def _peak_bytes(run: Callable[[], Any]) -> int:
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize("form", ["dense", "jagged"])
def test_no_copy_of_the_users_per_candidate(form: str) -> None:
    """Peak memory is a bounded workspace, far below one broadcast of k or all scores at once."""
    B, H, L, D = 1024, 8, 2048, 64
    args = candidate_attention_args(
        "cpu", torch.float32, form=form, B=B, S=1, U=3, L=L, H=H, Hk=1, D=D, Dv=8
    )
    args = _set(args, users=[0] * B)
    broadcast, scores, workspace = 4 * B * L * D, 4 * B * H * L, 64 << 20
    for run, results in (
        (lambda: _out(args), _out(args).nbytes),
        (lambda: _gradients(_out, args), 4 * sum(t.nbytes for t in args[:3])),
    ):
        peak = _peak_bytes(run)
        assert 0 < peak <= workspace + 4 * results + 2**20 < min(broadcast / 4, 2 * scores)


# ---- messages, autograd, Python ----------------------------------------------------------------


def test_messages_say_what_was_expected() -> None:
    dense = candidate_attention_args("cpu", torch.float32)
    flat = candidate_attention_args("cpu", torch.float32, form="jagged")
    offsets = candidate_attention_args("cpu", torch.float32, form="offsets")
    start, length = flat[3:5]
    for args, i, wrong, message in (
        (dense, 0, dense[0][0], r"expected q of shape \[B, S, H, D\]"),
        (dense, 0, dense[0].long(), "expected q in float16, bfloat16, float32 or float64"),
        (dense, 0, dense[0][..., :0], r"expected q.size\(3\), the head dim D, to be at least 1"),
        (dense, 0, dense[0][:, :, :3], "to be a multiple of the kv heads, got 3 query heads and 2"),
        (dense, 1, dense[1][0, 0], r"expected k of shape \[U, L, Hk, D\], or flat"),
        (dense, 1, dense[1][..., :7], r"expected k.size\(3\) == q.size\(3\) \(8\)"),
        (dense, 1, dense[1].double(), "expected k in the dtype of q"),
        (dense, 1, dense[1][:, :, :0], r"expected v.size\(2\) == k.size\(2\)"),
        (dense, 2, dense[2][:2], r"expected v.size\(0\) == k.size\(0\)"),
        (dense, 2, dense[2][0], r"expected v of shape \[U, L, Hk, Dv\]"),
        (dense, 2, dense[2].double(), "expected v in the dtype of q"),
        (dense, 3, start, "expected no kv_start with dense k"),
        (dense, 4, length[:2], r"expected kv_len of shape \[U\] = \[3\]"),
        (dense, 4, length.float(), "expected kv_len in int32 or int64, got float32"),
        (flat, 3, None, "expected kv_start with flat k .* got kv_len alone"),
        (offsets, 3, None, "expected kv_start with flat k .* got neither it nor kv_len"),
        (offsets, 3, start[:0], r"expected offsets kv_start \[U \+ 1\], got none at all"),
        (flat, 4, length[:2], r"expected kv_len of shape \[U\] = \[3\]"),
        (flat, 2, flat[2][1:], r"expected v.size\(0\) == k.size\(0\)"),
        (dense, 5, dense[5].float(), "expected cand_to_user in int32 or int64, got float32"),
        (dense, 5, dense[5][:2], r"expected cand_to_user of shape \[B\]"),
        (dense, 7, dense[5], "expected user_offsets beside order"),
    ):
        with pytest.raises(RuntimeError, match=f"ikbo.candidate_attention: .*{message}"):
            _out((*args[:i], wrong, *args[i + 1 :]))


def test_a_gradient_into_lse_is_refused() -> None:
    args = candidate_attention_args("cpu", torch.float32, rows_without_user=False)
    inputs = [t.requires_grad_() for t in args[:3]]
    out, lse = _fwd(args)
    with pytest.raises(RuntimeError, match="candidate_attention_fwd: lse is not differentiable"):
        torch.autograd.grad(out.sum() + lse[:, :, :1].sum(), inputs)
    out, lse = _fwd(args)
    grads = torch.autograd.grad((out * lse.detach()[..., None].transpose(1, 2)).sum(), inputs)
    assert all(bool(g.abs().sum() > 0) for g in grads)


def test_second_derivatives_are_refused() -> None:
    args = candidate_attention_args("cpu", torch.float32)
    q = args[0].requires_grad_()
    (grad,) = torch.autograd.grad(_out(args).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="only first derivatives exist"):
        grad.sum().backward()


@pytest.mark.parametrize("region", [torch.bfloat16, torch.float16])
def test_autocast(region: torch.dtype) -> None:
    args = candidate_attention_args("cpu", torch.float32, form="jagged")
    with torch.autocast("cpu", region):
        assert _out(args).dtype == region
        inputs = [t.requires_grad_() for t in args[:3]]
        _out(args).float().sum().backward()
    for t in inputs:
        assert t.grad is not None and t.grad.dtype == torch.float32


@every_device
def test_python_function_takes_maps_and_out(device: str) -> None:
    q, k, v, _, kv_len, users, _, _, _ = candidate_attention_args(
        device, torch.float32, form="dense_len"
    )
    want = _out((q, k, v, None, kv_len, users, None, None, 0.3))
    m = ikbo.candidate_map(users, n_users=3)
    for users_as in (users, m):
        got = ikbo.candidate_attention(q, k, v, users_as, kv_len=kv_len, scale=0.3)
        assert torch.equal(got, want)
    out = torch.empty_like(want)
    assert ikbo.candidate_attention(q, k, v, m, kv_len=kv_len, scale=0.3, out=out) is out
    assert torch.equal(out, want)


def _nested(values: Tensor, lengths: Tensor) -> Tensor:
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


@every_device
def test_nested_histories(device: str) -> None:
    args = candidate_attention_args(device, torch.float64, form="jagged")
    q, k, v, _, kv_len, users, *_ = args
    offsets = torch.cat([kv_len.new_zeros(1), kv_len.cumsum(0)]).long()
    k_leaf, v_leaf = k.clone().requires_grad_(), v.clone().requires_grad_()

    def nest(t: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(t, offsets)

    out = ikbo.candidate_attention(q, nest(k_leaf), nest(v_leaf), users)
    torch.testing.assert_close(out, _out(args))
    out.backward(Maker(device, torch.float64, seed=1)(*out.shape))
    _, want_k, want_v = _gradients(_out, args)
    torch.testing.assert_close([k_leaf.grad, v_leaf.grad], [want_k, want_v])


@every_device
def test_nested_histories_with_holes(device: str) -> None:
    """torch.nested.narrow has lengths of its own beside the offsets."""
    q, k, v, _, kv_len, users, *_ = candidate_attention_args(
        device, torch.float64, form="dense_len"
    )
    start = torch.zeros_like(kv_len, dtype=torch.int64)
    nested_k = torch.nested.narrow(k, 1, start, kv_len.long(), layout=torch.jagged)
    v_values = v.flatten(0, 1)
    nested_v = torch.nested.nested_tensor_from_jagged(
        v_values, nested_k.offsets(), nested_k.lengths()
    )
    got = ikbo.candidate_attention(q, nested_k, nested_v, users)
    torch.testing.assert_close(got, _out((q, k, v, None, kv_len, users, None, None, None)))


def test_nested_messages() -> None:
    q, k, v, _, kv_len, users, *_ = candidate_attention_args("cpu", torch.float32, form="jagged")
    nested_k, nested_v = _nested(k, kv_len.long()), _nested(v, kv_len.long())
    with pytest.raises(ValueError, match="expected nested k and v with the same offsets"):
        ikbo.candidate_attention(q, nested_k, nested_v, users)
    with pytest.raises(
        ValueError, match=r"expected v as a jagged nested tensor .* got a 3-D tensor"
    ):
        ikbo.candidate_attention(q, nested_k, v, users)
    with pytest.raises(ValueError, match="expected neither kv_start nor kv_len with nested"):
        ikbo.candidate_attention(q, nested_k, nested_k, users, kv_len=kv_len)
