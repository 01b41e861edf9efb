"""ikbo.rewrite on small models of each kind: what moves, what stays, and that nothing changes."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ikbo
from ikbo.rewrite import Report

USER = {"user": ikbo.Context(inputs=["user"], map="user_index")}
D = 8


def _map(n_users: int, n_candidates: int) -> Tensor:
    return torch.randint(0, n_users, (n_candidates,))


def _inputs(n_users: int, n_candidates: int, *user_sizes: int) -> tuple[Tensor, ...]:
    user = torch.randn(n_users, *(user_sizes or (D,)))
    return user, torch.randn(n_candidates, D), _map(n_users, n_candidates)


def _targets(program: torch.export.ExportedProgram) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


def _rewrite(model: nn.Module, *user_sizes: int) -> tuple[torch.export.ExportedProgram, Report]:
    program, report = ikbo.rewrite(model, _inputs(3, 7, *user_sizes), USER, ["candidate"])
    for n_users, n_candidates in ((3, 7), (5, 40), (1, 1), (1, 9), (6, 6), (9, 2)):
        report.verify(_inputs(n_users, n_candidates, *user_sizes))
    return program, report


class Tower(nn.Module):
    """A user tower, written after the copy, and an MLP over the concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.user_tower = nn.Sequential(
            nn.Linear(D, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.1), nn.BatchNorm1d(16)
        )
        self.mlp = nn.Sequential(nn.Linear(16 + D, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
        tower = self.user_tower(user[user_index])
        return self.mlp(torch.cat([tower, candidate], dim=1))


def test_tower_runs_once_per_user_and_the_mlp_splits() -> None:
    program, report = _rewrite(Tower().eval())
    assert not report.copies and not report.of("left"), str(report)
    assert len(report.of("replaced by concat_linear")) == 1
    fused = [n for n in program.graph.nodes if "concat_linear" in str(n.target)]
    assert fused[0].args[-1] == "relu"


def test_names_of_parameters_stay_and_a_checkpoint_of_the_original_loads() -> None:
    model = Tower().eval()
    program, _ = _rewrite(model)
    assert dict(program.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert all(p is q for (_, p), (_, q) in zip(
        sorted(program.named_parameters()), sorted(model.named_parameters()), strict=True
    ))  # fmt: skip
    module, other, args = program.module(), Tower().eval(), _inputs(3, 7)
    module.load_state_dict(other.state_dict())
    torch.testing.assert_close(module(*args), other(*args))


def test_gradients_equal_the_originals() -> None:
    model = Tower().eval().double()
    args = tuple(t.double() if t.is_floating_point() else t for t in _inputs(3, 7))
    program, _ = ikbo.rewrite(model, args, USER, ["candidate"])
    user = args[0].requires_grad_()
    want = torch.autograd.grad(model(*args).square().sum(), [user, *model.parameters()])
    module = program.module()
    parameters = dict(module.named_parameters())
    ours = [parameters[n] for n, _ in model.named_parameters()]
    got = torch.autograd.grad(module(*args).square().sum(), [user, *ours])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


class Compression(nn.Module):
    """Stacked embeddings compressed, in one of the ways in which people write it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(5 + 2, 3, bias=form == "linear"), form

    def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
        rows = torch.stack([candidate, candidate.sin()], 1)
        stacked = torch.cat([user.index_select(0, user_index), rows], 1)
        weight = self.linear.weight
        if self.form == "linear":
            return self.linear(stacked.transpose(1, 2)).transpose(1, 2)
        if self.form == "einsum":
            return torch.einsum("mk,bkd->bmd", weight, stacked)
        return weight @ stacked


@pytest.mark.parametrize("form", ["linear", "einsum", "matmul"])
def test_linear_compression(form: str) -> None:
    _, report = _rewrite(Compression(form), 5, D)
    assert len(report.of("replaced by linear_compression")) == 1 and not report.copies, str(report)


class ActivationUnit(nn.Module):
    """DIN's: an MLP over [h, c, h - c, h * c] weighs the history."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4 * D, 6), nn.Sigmoid(), nn.Linear(6, 1))

    def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
        history = user[user_index]
        target = candidate.unsqueeze(1).expand(-1, history.shape[1], -1)
        joined = torch.cat([history, target, history - target, history * target], -1)
        return (self.mlp(joined) * history).sum(1)


def test_activation_unit_splits_its_first_linear() -> None:
    _, report = _rewrite(ActivationUnit(), 5, D)
    assert len(report.of("split")) == 1
    reasons = {e.reason for e in report.of("left")}
    assert all("element-wise join" in r for r in reasons), str(report)


class SelfAttention(nn.Module):
    """Self-attention among the user's tokens, then pooled and joined."""

    def __init__(self, module: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.norm, self.out, self.module = nn.RMSNorm(D), nn.Linear(2 * D, 1), module

    def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
        h = user[user_index]
        if self.module:
            h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        else:
            h = h + F.scaled_dot_product_attention(h, h, h, is_causal=True)
        return self.out(torch.cat([candidate, h.mean(1)], 1))


@pytest.mark.parametrize("module", [True, False])
def test_self_attention_among_user_tokens_sinks(module: bool) -> None:
    _, report = _rewrite(SelfAttention(module), 5, D)
    assert not report.copies and not report.of("left"), str(report)
    assert any("attention" in e.op or "bmm" in e.op for e in report.of("sunk"))


class TargetAttention(nn.Module):
    """The candidate attends over the user's history, by SDPA or by hand."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.by_hand = by_hand

    def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
        history, n = user[user_index], candidate.shape[0]
        q = self.q(candidate).view(n, 1, 2, D // 2).transpose(1, 2)
        k, v = (f(history).view(n, -1, 2, D // 2).transpose(1, 2) for f in (self.k, self.v))
        if self.by_hand:
            out = (q @ k.transpose(-2, -1) / 2.0).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).flatten(1)


@pytest.mark.parametrize("by_hand", [True, False])
def test_target_attention(by_hand: bool) -> None:
    _, report = _rewrite(TargetAttention(by_hand), 5, D)
    assert len(report.of("replaced by candidate_attention")) == 1
    assert not report.copies and not report.of("left"), str(report)


class Masked(nn.Module):
    """Target attention over histories of different lengths, one head without a dimension of it."""

    def __init__(self, heads: bool) -> None:
        super().__init__()
        self.k, self.heads = nn.Linear(D, D), heads

    def forward(
        self, user: Tensor, length: Tensor, candidate: Tensor, user_index: Tensor
    ) -> Tensor:
        keys = self.k(user)[user_index]
        mask = (torch.arange(5)[None] < length[:, None])[user_index][:, None]
        if self.heads:
            keys = keys[:, None]
            return F.scaled_dot_product_attention(
                candidate[:, None, None], keys, keys, mask[:, None]
            )
        return F.scaled_dot_product_attention(candidate[:, None], keys, keys, mask)


@pytest.mark.parametrize("heads", [True, False])
def test_a_mask_of_lengths_becomes_kv_len(heads: bool) -> None:
    def inputs(lengths: list[int], n_candidates: int) -> tuple[Tensor, ...]:
        user, candidate, index = _inputs(len(lengths), n_candidates, 5, D)
        return user, torch.tensor(lengths), candidate, index

    contexts = {"user": ikbo.Context(inputs=["user", "length"], map="user_index")}
    _, report = ikbo.rewrite(Masked(heads), inputs([2, 3, 5], 7), contexts, ["candidate"])
    assert report.of("replaced by candidate_attention") and not report.copies, str(report)
    # None at all, all, and more than there are.
    for lengths in ([2, 3, 5], [0, 1], [9, 0, 5, -3]):
        report.verify(inputs(lengths, 20))


class Spelled(nn.Module):
    """torch's modules and other spellings of attention of the candidate over the history."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.attention, self.form = nn.MultiheadAttention(D, 2, batch_first=True), form

    def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
        history, query = user[user_index], candidate[:, None]
        if self.form == "module":
            return self.attention(query, history, history, need_weights=False)[0]
        if self.form == "one head":
            return F.scaled_dot_product_attention(query, history, history)
        return (query @ history.mT / 3.0).softmax(-1) @ history


@pytest.mark.parametrize("form", ["module", "one head", "one head by hand"])
def test_spellings_of_target_attention(form: str) -> None:
    _, report = _rewrite(Spelled(form).eval(), 5, D)
    assert len(report.of("replaced by candidate_attention")) == 1 and not report.copies, str(report)


class Nothing(nn.Module):
    """Statistics over the copied rows themselves: nothing may move past the first op."""

    def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
        copied = user[user_index]
        return (copied - copied.mean(0)) * candidate + copied.softmax(0) + copied.cumsum(0)


def test_a_model_in_which_nothing_may_move() -> None:
    program, report = _rewrite(Nothing())
    assert not report.of("sunk") and not report.of("replaced") and not report.of("split")
    assert _targets(program).count("aten.index_select.default") == 1
    assert "the dimension of the rows" in str(report)


class Maps(nn.Module):
    """One tower over a copy made in a given form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(D, D), form

    def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
        if self.form == "index":
            copied = user[user_index]
        elif self.form == "long":
            copied = user[user_index.int().long()]
        elif self.form == "index_select":
            copied = torch.index_select(user, 0, user_index)
        else:
            copied = user.gather(0, user_index[:, None].expand(-1, D))
        return self.linear(copied).relu() + candidate


@pytest.mark.parametrize("form", ["index", "long", "index_select", "gather"])
def test_forms_of_the_copy(form: str) -> None:
    _, report = _rewrite(Maps(form))
    assert {e.op for e in report.of("sunk")} >= {"aten.linear.default", "aten.relu.default"}


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, user: Tensor, counts: Tensor, candidate: Tensor) -> Tensor:
        n = candidate.shape[0]
        return self.linear(user.repeat_interleave(counts, dim=0, output_size=n)) * candidate


def test_repeat_interleave_by_counts() -> None:
    def inputs(counts: list[int]) -> tuple[Tensor, ...]:
        n = sum(counts)
        return torch.randn(len(counts), D), torch.tensor(counts), torch.randn(n, D)

    contexts = {"user": ikbo.Context(inputs=["user", "counts"])}
    _, report = ikbo.rewrite(Counts(), inputs([2, 0, 5]), contexts, ["candidate"])
    assert report.of("sunk"), str(report)
    for counts in ([2, 0, 5], [4], [1, 1, 1, 1], [0, 0, 9]):
        report.verify(inputs(counts))


class Repeats(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(D, D), form

    def forward(self, user: Tensor) -> Tensor:
        if self.form == "repeat_interleave":
            copied = user.repeat_interleave(3, dim=0)
        else:
            copied = user.unsqueeze(1).expand(-1, 3, -1).reshape(-1, D)
        return self.linear(copied).exp()


@pytest.mark.parametrize("form", ["repeat_interleave", "expand"])
def test_a_fixed_number_of_candidates_per_user(form: str) -> None:
    contexts = {"user": ikbo.Context(inputs=["user"])}
    _, report = ikbo.rewrite(Repeats(form), (torch.randn(3, D),), contexts, [])
    assert len(report.of("sunk")) == 2, str(report)
    report.verify((torch.randn(5, D),))


def test_one_user_expanded() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2 * D, 3)

        def forward(self, user: Tensor, candidate: Tensor) -> Tensor:
            copied = user.exp().expand(candidate.shape[0], -1)
            return self.linear(torch.cat([copied, candidate], 1))

    batch = {0: torch.export.Dim("candidates")}
    args = torch.randn(1, D), torch.randn(7, D)
    exported = torch.export.export(One(), args, dynamic_shapes=(None, batch))
    contexts = {"user": ikbo.Context(inputs=["user"])}
    _, report = ikbo.rewrite(exported, args, contexts, ["candidate"])
    assert report.of("replaced by concat_linear"), str(report)
    report.verify((torch.randn(1, D), torch.randn(50, D)))


def test_negative_indices_count_from_the_end_as_before() -> None:
    _, report = _rewrite(Tower().eval())
    user, candidate, _ = _inputs(4, 9)
    report.verify((user, candidate, torch.randint(-4, 4, (9,))))


class TwoContexts(nn.Module):
    """A user and a query, and a vendor reached through the user: chained maps."""

    def __init__(self) -> None:
        super().__init__()
        self.vendor_net, self.mlp = nn.Linear(D, D), nn.Sequential(nn.Linear(4 * D, 5), nn.SiLU())

    def forward(
        self, user: Tensor, vendor: Tensor, vendor_of_user: Tensor, query: Tensor,
        candidate: Tensor, user_index: Tensor, query_index: Tensor,
    ) -> Tensor:  # fmt: skip
        of_user = self.vendor_net(vendor[vendor_of_user][user_index])
        parts = [user[user_index], of_user, query[query_index].relu(), candidate]
        return self.mlp(torch.cat(parts, 1))


def test_several_contexts_and_chained_maps() -> None:
    contexts = {
        "vendor": ikbo.Context(inputs=["vendor"], map="vendor_of_user"),
        "user": ikbo.Context(inputs=["user", "vendor_of_user"], map="user_index"),
        "query": ikbo.Context(inputs=["query"], map="query_index"),
    }

    def inputs(v: int, u: int, q: int, b: int) -> tuple[Tensor, ...]:
        return (torch.randn(u, D), torch.randn(v, D), _map(v, u), torch.randn(q, D),
                torch.randn(b, D), _map(u, b), _map(q, b))  # fmt: skip

    _, report = ikbo.rewrite(TwoContexts(), inputs(2, 3, 4, 9), contexts, ["candidate"])
    assert len(report.of("replaced by concat_linear")) == 1
    moved = [e for e in report.of("sunk") if "linear" in e.op]
    assert len(moved) == 1, str(report)
    for sizes in ((2, 3, 4, 9), (1, 1, 1, 1), (3, 8, 2, 50)):
        report.verify(inputs(*sizes))


class Copied(nn.Module):
    """Written for inputs that are copied already, a row for each candidate."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.tower = nn.Embedding(10, D), nn.Linear(D, D)
        self.mlp = nn.Linear(3 * D, 2)

    def forward(self, user: Tensor, ids: dict[str, Tensor], candidate: Tensor) -> Tensor:
        table = self.embedding(ids["clicks"]).mean(1)
        return self.mlp(torch.cat([self.tower(user).relu(), table, candidate], 1))


def test_inputs_copied_already_are_lifted() -> None:
    model = Copied()
    contexts = {"user": ikbo.Context(inputs=["user", "ids"], map="user_index")}
    clicks = torch.randint(0, 10, (7, 4))
    copied = (torch.randn(7, D), {"clicks": clicks}, torch.randn(7, D))
    program, report = ikbo.rewrite(model, copied, contexts, ["candidate"])
    assert not report.copies and report.of("replaced by concat_linear"), str(report)
    assert type(model) is Copied
    user, ids, candidate = torch.randn(4, D), torch.randint(0, 10, (4, 4)), torch.randn(20, D)
    index = _map(4, 20)
    want = model(user[index], {"clicks": ids[index]}, candidate)
    got = program.module()(user, {"clicks": ids}, candidate, user_index=index)
    torch.testing.assert_close(got, want)
    assert program.state_dict.keys() == model.state_dict().keys()


class Features(nn.Module):
    """Stacked or concatenated in the ways that torch has names for."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.out, self.form = nn.Linear(2 * D, 3), form

    def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
        u = user[user_index.clamp(0)]
        if self.form == "stack":
            return self.out(torch.stack([u, candidate], 1).flatten(1))
        return self.out(getattr(torch, self.form)([u, candidate], *[1] * (self.form != "hstack")))


@pytest.mark.parametrize("form", ["stack", "hstack", "concat", "concatenate"])
def test_other_names_of_concatenation(form: str) -> None:
    _, report = _rewrite(Features(form))
    assert report.of("replaced by concat_linear") and not report.copies, str(report)
    assert report.verify()[-1].case == "padding rows"  # a map that is computed of an input


def test_equal_copies_merge() -> None:
    class Twice(nn.Module):
        def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
            return user[user_index] * candidate + user.index_select(0, user_index)

    program, report = _rewrite(Twice())
    assert len(report.of("merged")) == 1
    assert _targets(program).count("aten.index_select.default") == 1


def test_core_aten_programs() -> None:
    """Linears as addmm, LayerNorm as native_layer_norm: what other exporters make."""
    users, candidates = torch.export.Dim("user"), torch.export.Dim("candidates")
    shapes = ({0: users}, {0: candidates}, {0: candidates})
    args = _inputs(3, 7)
    exported = torch.export.export(Tower().eval(), args, dynamic_shapes=shapes)
    core = exported.run_decompositions()
    assert "aten.addmm.default" in _targets(core)
    _, report = ikbo.rewrite(core, args, USER, ["candidate"])
    assert report.of("replaced by concat_linear") and not report.copies, str(report)
    report.verify(_inputs(5, 40))


def test_the_program_is_saved_and_loaded(tmp_path: pathlib.Path) -> None:
    program, _ = _rewrite(Tower().eval())
    torch.export.save(program, tmp_path / "rewritten.pt2")
    again = torch.export.load(tmp_path / "rewritten.pt2")
    args = _inputs(5, 20)
    want = program.module()(*args)
    torch.testing.assert_close(again.module()(*args), want)


def test_training_graphs_are_untouched_by_verify() -> None:
    """Buffers that a program updates are copied for each run."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(D)

        def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
            return self.norm(user[user_index]) + candidate

    model = Norm().train()
    before = copy.deepcopy(model.state_dict())
    _, report = _rewrite(model)
    after: dict[str, Any] = model.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert any("BatchNorm in training" in e.reason for e in report.of("left"))
