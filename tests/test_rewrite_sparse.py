"""ikbo.rewrite on the sparse forms of a copy: FBGEMM's ops and TorchRec's inverse indices.

With fbgemm-gpu-cpu installed these tests run on its ops, else on stand-ins.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ikbo
from ikbo.rewrite import Report
from ikbo.rewrite.algebra import registry, sparse
from ikbo.rewrite.engine import Rewriter
from ikbo.rewrite.rules import aten
from ikbo.rewrite.values import Gathered, Jagged, Offsets

from . import fbgemm_stand_in

fbgemm_stand_in.install()
fbgemm: Any = torch.ops.fbgemm
IDS, D, TABLES = 50, 8, 3
USER = {"user": ikbo.Context(["lengths"], "user_index", jagged=["ids"])}


class Selected(nn.Module):
    """Ids of a feature with several values, selected for each candidate, then pooled or padded."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.table, self.out, self.form = nn.Embedding(IDS, D), nn.Linear(2 * D, 3), form

    def forward(
        self, ids: Tensor, lengths: Tensor, candidate: Tensor, user_index: Tensor
    ) -> Tensor:
        values, of_each = fbgemm.jagged_index_select(ids[:, None], lengths, user_index)
        values, begins = values.squeeze(1), fbgemm.asynchronous_complete_cumsum(of_each)
        if self.form == "padded":
            rows = fbgemm.jagged_to_padded_dense(self.table(values), [begins], [4])
            keys = rows[:, None]
            return F.scaled_dot_product_attention(candidate[:, None, None], keys, keys)
        last = self.form == "pooled"
        begins = begins if last else begins[:-1]
        pooled = F.embedding_bag(
            values, self.table.weight, begins, mode="sum", include_last_offset=last
        )
        return self.out(torch.cat([pooled, candidate], 1))


def _selected(n_users: int, n_candidates: int) -> tuple[Tensor, ...]:
    lengths = torch.randint(1, 4, (n_users,))
    ids = torch.randint(0, IDS, (int(lengths.sum()),))
    index = torch.randint(0, n_users, (n_candidates,))
    return ids, lengths, torch.randn(n_candidates, D), index


@pytest.mark.parametrize(
    ("form", "becomes"),
    [("pooled", "concat_linear"), ("pooled by begins", "concat_linear"),
     ("padded", "candidate_attention")],
)  # fmt: skip
def test_jagged_index_select(form: str, becomes: str) -> None:
    _, report = ikbo.rewrite(Selected(form), _selected(5, 9), USER, ["candidate"])
    assert report.of(f"replaced by {becomes}") and not report.copies, str(report)
    assert not any("jagged_index_select" in str(n.target) for n in report.rewritten.graph.nodes)
    for sizes in ((5, 9), (1, 1), (3, 20), (8, 2)):
        report.verify(_selected(*sizes))
    with pytest.raises(ValueError, match=r"expected inputs for verify.*of no batch"):
        report.verify()
    flop, bytes_moved = report.after.at(user=5, candidates=9, ids_elements=12)
    assert flop > 0 and bytes_moved > 0


class Inverse(nn.Module):
    """Pooled embeddings of several features, expanded by an inverse index for each."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.out, self.form = nn.Linear(3 * D, 3), form

    def forward(self, a: Tensor, b: Tensor, candidate: Tensor, inverse: Tensor) -> Tensor:
        if self.form == "group_index_select_dim0":
            a, b = fbgemm.group_index_select_dim0([a, b], list(torch.unbind(inverse)))
        elif self.form == "index_select_dim0":
            a, b = (fbgemm.index_select_dim0(x, i) for x, i in zip((a, b), inverse, strict=True))
        else:
            a, b = (x.index_select(0, i) for x, i in zip((a, b), inverse, strict=True))
        return self.out(torch.cat([a.relu(), b.relu(), candidate], 1))


@pytest.mark.parametrize("form", ["group_index_select_dim0", "index_select_dim0", "index_select"])
def test_inverse_indices_of_torchrec(form: str) -> None:
    def inputs(n_users: int, n_candidates: int) -> tuple[Tensor, ...]:
        rows = torch.randn(n_users, D), torch.randn(n_users, D), torch.randn(n_candidates, D)
        return (*rows, torch.randint(0, n_users, (2, n_candidates)))

    contexts = {"user": ikbo.Context(["a", "b"], "inverse")}
    _, report = ikbo.rewrite(Inverse(form), inputs(3, 9), contexts, ["candidate"])
    assert report.of("replaced by concat_linear") and not report.broadcasts, str(report)
    assert len([e for e in report.of("sunk") if "relu" in e.op]) == 2
    report.verify()
    report.verify(inputs(6, 50))


@pytest.mark.parametrize("form", ["group_index_select_dim0", "index_select_dim0"])
def test_an_inverse_index_read_wrong(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of these forms: the map from its end."""
    rows = torch.randn(3, D), torch.randn(3, D), torch.randn(5, D)
    given = (*rows, torch.tensor([[0, 1, 2, 2, 2], [0, 0, 0, 0, 1]]))
    plain = Rewriter._map_node

    def mutant(self: Rewriter, *args: Any) -> Any:
        return self.builder.call(aten.flip.default, plain(self, *args), [0])

    monkeypatch.setattr(Rewriter, "_map_node", mutant)
    contexts = {"user": ikbo.Context(["a", "b"], "inverse")}
    _, report = ikbo.rewrite(Inverse(form), given, contexts, ["candidate"])
    with pytest.raises(AssertionError, match="error"):
        report.verify(given)


class Reordered(nn.Module):
    """A request's sparse features, copied to its ads by reorder_batched_ad_*."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(IDS, D), nn.Linear((TABLES + 1) * D, 3)

    def forward(
        self, lengths: Tensor, counts: Tensor, ids: Tensor, copied_ids: Tensor, candidate: Tensor
    ) -> Tensor:
        n = candidate.shape[0]
        ads = fbgemm.asynchronous_complete_cumsum(counts)
        before = lengths.flatten()
        begins = fbgemm.asynchronous_complete_cumsum(before)
        of_each = fbgemm.reorder_batched_ad_lengths(before, ads, n, True)
        after = fbgemm.asynchronous_complete_cumsum(of_each)
        values = fbgemm.reorder_batched_ad_indices(
            begins, ids, after, ads, n, True, copied_ids.shape[0]
        )
        pooled = F.embedding_bag(
            values, self.table.weight, after, mode="sum", include_last_offset=True
        )
        rows = pooled.view(TABLES, n, D).transpose(0, 1).flatten(1)
        return self.out(torch.cat([rows, candidate], 1))


def _reordered(counts: list[int]) -> tuple[Tensor, ...]:
    lengths = torch.randint(0, 4, (len(counts), TABLES), dtype=torch.int32)
    of_each = torch.tensor(counts, dtype=torch.int32)
    ids = torch.randint(0, IDS, (int(lengths.sum()),))
    copied = torch.zeros(int((lengths.sum(1) * of_each).sum()))
    return lengths, of_each, ids, copied, torch.randn(sum(counts), D)


REQUEST = {"user": ikbo.Context(["lengths", "counts"], jagged=["ids", "copied_ids"])}


def test_reorder_batched_ads_with_broadcast() -> None:
    _, report = ikbo.rewrite(Reordered(), _reordered([2, 3, 4]), REQUEST, ["candidate"])
    assert report.of("replaced by concat_linear") and not report.copies, str(report)
    for counts in ([2, 3, 4], [1, 0, 5, 2], [7], [1, 1]):
        report.verify(_reordered(counts))


def test_offsets_that_are_inputs_prove_nothing() -> None:
    """Only offsets computed of the lengths are known to be theirs."""

    class Given(Reordered):
        def forward(  # type: ignore[override]
            self, lengths: Tensor, counts: Tensor, ids: Tensor, copied_ids: Tensor, begins: Tensor,
            candidate: Tensor,
        ) -> Tensor:  # fmt: skip
            n = candidate.shape[0]
            ads = fbgemm.asynchronous_complete_cumsum(counts)
            of_each = fbgemm.reorder_batched_ad_lengths(lengths.flatten(), ads, n, True)
            after = fbgemm.asynchronous_complete_cumsum(of_each)
            values = fbgemm.reorder_batched_ad_indices(
                begins, ids, after, ads, n, True, copied_ids.shape[0]
            )
            return F.embedding_bag(
                values, self.table.weight, after, mode="sum", include_last_offset=True
            )

    def inputs(counts: list[int]) -> tuple[Tensor, ...]:
        *rest, candidate = _reordered(counts)
        return (*rest, fbgemm_stand_in.complete_cumsum(rest[0].flatten()), candidate)

    contexts = {
        "user": dataclasses.replace(REQUEST["user"], jagged=["ids", "copied_ids", "begins"])
    }
    _, report = ikbo.rewrite(Given(), inputs([2, 3, 4]), contexts, ["candidate"])
    assert not report.of("sunk"), str(report)
    report.verify(inputs([1, 4]))


def _doubled(r: Any, lazy: Any) -> Any:
    """Lengths, offsets and rows of others."""
    if isinstance(lazy, Jagged):
        flipped = r.builder.call(aten.flip.default, lazy.values, [0])
        return dataclasses.replace(lazy, values=flipped)
    if isinstance(lazy, Offsets):
        of = lazy.lengths
        flipped = r.builder.call(aten.flip.default, of.source, [0])
        return dataclasses.replace(lazy, lengths=dataclasses.replace(of, source=flipped))
    assert isinstance(lazy, Gathered)
    flipped = r.builder.call(aten.flip.default, lazy.source, [0])
    return dataclasses.replace(lazy, source=flipped)


def _report_of(rule: Any) -> tuple[Report, tuple[Tensor, ...]]:
    if rule in (sparse.reordered_lengths, sparse.reordered_values):
        given = _reordered([2, 3, 4])
        return ikbo.rewrite(Reordered(), given, REQUEST, ["candidate"])[1], given
    form = {sparse.padded: "padded", sparse.without_last: "pooled by begins"}.get(rule, "pooled")
    given = (
        torch.arange(7),
        torch.tensor([1, 4, 2]),
        torch.randn(5, D),
        torch.tensor([0, 2, 1, 1, 0]),
    )
    return ikbo.rewrite(Selected(form), given, USER, ["candidate"])[1], given


SPARSE = [sparse.jagged_rows, sparse.reordered_lengths, sparse.reordered_values, sparse.offsets,
          sparse.without_last, sparse.padded, sparse.bag]  # fmt: skip


@pytest.mark.parametrize("rule", SPARSE, ids=lambda f: f.__name__)
def test_a_sparse_rule_made_wrong(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values, lengths or rows in the other order: verify sees it, or nothing is moved."""
    torch.manual_seed(1)
    calls = []

    def mutant(r: Any, node: Any) -> Any:
        done = rule(r, node)
        if done is not None:
            calls.append(node)
            done = (_doubled(r, done[0]), *done[1:])
        return done

    for target, functions in registry.ALGEBRA.items():
        monkeypatch.setitem(
            registry.ALGEBRA, target, [mutant if f is rule else f for f in functions]
        )
    report, given = _report_of(rule)
    assert calls
    if rule in (sparse.offsets, sparse.without_last, sparse.reordered_lengths):
        # Offsets of other lengths than the values': the pass itself refuses what comes next.
        assert not any("each jagged row" in e.reason for e in report.of("sunk")), str(report)
        return
    with pytest.raises(AssertionError, match="error"):
        report.verify(given)


def test_every_sparse_function_has_a_mutant() -> None:
    registered = {f for functions in registry.ALGEBRA.values() for f in functions}
    assert {f for f in registered if f.__module__ == sparse.__name__} == set(SPARSE)


def test_nothing_of_fbgemm_is_imported() -> None:
    code = (
        "import sys, ikbo; assert not [m for m in sys.modules if 'fbgemm' in m or 'torchrec' in m]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
