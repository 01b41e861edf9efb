"""What ikbo.rewrite reports: costs, reasons, made-up inputs; ikbo.shadow."""

from __future__ import annotations

import threading
import warnings

import models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ikbo
from ikbo.rewrite import Report
from ikbo.rewrite.verify import Pair

from .installed import run_python

USER = {"user": ikbo.Context(inputs=["user"], map="user_index")}
D = 8


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.out = nn.Linear(D, 16), nn.Linear(16 + D, 4)

    def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
        return self.out(torch.cat([self.tower(user[user_index]), candidate], 1))


def _inputs(n_users: int = 3, n_candidates: int = 7) -> tuple[Tensor, ...]:
    index = torch.randint(0, n_users, (n_candidates,))
    return torch.randn(n_users, D), torch.randn(n_candidates, D), index


def _report(model: nn.Module) -> Report:
    return ikbo.rewrite(model, _inputs(), USER, ["candidate"])[1]


def test_costs_are_functions_of_the_batches() -> None:
    report = _report(Ranker())
    before, after = report.before, report.after
    # Products only, by hand: the tower and the last linear, then the same once a user.
    products = {o.op: o for o in before.ops if o.op != "fused"}
    assert set(products) == {"aten.linear.default"}
    dense = [sum(o.flop for o in c.ops if o.op != "fused") for c in (before, after)]
    assert str(dense[0]) == f"{2 * (D * 16 + 24 * 4)}*candidates"
    assert dense[1].subs({"user": 3, "candidates": 7}) == (
        2 * D * 16 * 3 + 2 * (16 * 3 + D * 7) * 4
    )  # fmt: skip
    flop, moved = after.at(user=15, candidates=1024)
    assert flop < before.at(user=15, candidates=1024)[0] and moved > 0
    with pytest.raises(ValueError, match="expected a size for each of user"):
        after.at(candidates=9)
    ceilings = {"copy_TBps": 4.2, "matmul_TFLOPS": 680.0}
    assert report.speedup(**ceilings, user=15, candidates=1024) > 1.2
    seconds = before.seconds(**ceilings, user=15, candidates=1024)
    assert seconds > before.at(user=15, candidates=1024)[1] / 4.2e12 * 0.99


def test_costs_of_ops_by_hand() -> None:
    """Attention, batched and einsum products, bilinear forms, and the ops that replace them."""

    class Ops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack, self.form = nn.Parameter(torch.randn(3, 6)), nn.Bilinear(D, D, 2)

        def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
            rows = torch.cat([user[user_index], candidate[:, None]], 1)
            attended = F.scaled_dot_product_attention(
                candidate[:, None, None], *[rows[:, None]] * 2
            )
            compressed = torch.einsum("mk,bkd->bmd", self.stack, rows)
            form = self.form(candidate, candidate)
            squares = torch.bmm(rows, rows.transpose(1, 2)).sum((1, 2))
            return attended.sum((1, 2, 3)) + compressed.sum((1, 2)) + form.sum(1) + squares

    user, candidate, index = torch.randn(3, 5, D), torch.randn(7, D), torch.randint(0, 3, (7,))
    _, report = ikbo.rewrite(Ops(), (user, candidate, index), USER, ["candidate"])
    before = {o.op: str(o.flop) for o in report.before.ops}
    assert before["aten.scaled_dot_product_attention.default"] == f"{4 * 6 * D}*candidates"
    assert before["aten.einsum.default"] == f"{2 * 3 * 6 * D}*candidates"
    assert before["aten.bilinear.default"] == f"{2 * 2 * D * D}*candidates"
    assert before["aten.bmm.default"] == f"{2 * 6 * 6 * D}*candidates"
    after = {o.op: o for o in report.after.ops}
    compression = after["ikbo.linear_compression.default"].flop
    assert compression.subs({"user": 1, "candidates": 0}) == 2 * 3 * 5 * D
    assert compression.subs({"user": 0, "candidates": 1}) == 2 * 3 * 1 * D
    report.verify()


def test_report_reads_as_a_page() -> None:
    model = models.DIN(models.SMALL).eval()
    given = models.arguments(model, models.SMALL, 9, 3)
    _, report = ikbo.rewrite(model, given, models.contexts(model), ["candidate_ids"])
    page = str(report)
    for part in (
        "moved:", "left:", "copies of rows that remain:\n  none", "read element by element",
        "a linear map over a concatenation", "flop before:", "candidates", "user", "bytes after:",
    ):  # fmt: skip
        assert part in page, page
    assert max(map(len, page.splitlines())) < 200
    assert all(e.reason and e.lineage for e in report.entries)


def test_copies_tell_who_reads_them() -> None:
    class Both(nn.Module):
        def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
            copied = user[user_index]
            return copied * candidate, copied.cumsum(0)

    (copy,) = _report(Both()).copies
    assert not copy.elementwise and set(copy.readers) == {"aten.mul.Tensor", "aten.cumsum.default"}

    class Gate(nn.Module):
        def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
            return (user[user_index].sigmoid() * candidate).sum(1)

    (copy,) = _report(Gate()).copies
    assert copy.elementwise and copy.readers == ("aten.mul.Tensor",)
    assert not _report(Gate()).broadcasts


def test_verify_makes_inputs_up() -> None:
    """Every kind of size, unsorted maps, users without candidates, -1 in the maps."""
    report = _report(Ranker())
    checks = report.verify()
    cases = [c.case for c in checks]
    assert cases == ["a random ratio", "a random ratio", "users without candidates", "U = 1",
                     "B = 1", "U = B = 1", "B = U", "-1 in the maps, the last row"]  # fmt: skip
    assert all(0 <= c.error <= c.bound for c in checks)
    assert report.verify(seed=0) == checks and report.verify(seed=1) != checks


def test_verify_and_padding_rows() -> None:
    """Rows of -1 where the original takes none: the others' results stay."""

    class Selected(Ranker):
        def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
            return self.out(torch.cat([user.index_select(0, user_index), candidate], 1))

    model = Selected()
    model.out = nn.Linear(2 * D, 4)
    report = _report(model)
    assert report.verify()[-1].case == "padding rows"

    class Gate(nn.Module):
        def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
            return user.index_select(0, user_index) * candidate

    assert _report(Gate()).verify()[-1].case == "padding rows: refused, as by the original"


def test_verify_of_counts() -> None:
    class Counts(nn.Module):
        def forward(self, user: Tensor, counts: Tensor, candidate: Tensor) -> Tensor:
            n = candidate.shape[0]
            return user.repeat_interleave(counts, dim=0, output_size=n).exp() * candidate

    contexts = {"user": ikbo.Context(inputs=["user", "counts"])}
    given = torch.randn(3, D), torch.tensor([2, 0, 5]), torch.randn(7, D)
    _, report = ikbo.rewrite(Counts(), given, contexts, ["candidate"])
    assert report.of("sunk") and len(report.verify()) == 7


def test_importing_ikbo_imports_nothing_of_the_pass() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import ikbo; "
        "new = set(sys.modules) - before; assert not {'sympy', 'ikbo.rewrite.engine'} & new, new; "
        "from ikbo.rewrite import Report; assert callable(ikbo.rewrite)"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


# Shadow mode.


def _negated(*args: Tensor) -> Tensor:
    return -_score(*args)


def _score(user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
    return (user[user_index] * candidate).sum(1)


def test_shadow_compares_a_sample() -> None:
    model = Ranker()
    program, report = ikbo.rewrite(model, _inputs(), USER, ["candidate"])
    served = ikbo.shadow(report.original, program, 0.5, seed=0)
    for _ in range(40):
        given = _inputs(2, 30)
        torch.testing.assert_close(served(*given), model(*given))
    s = served.statistics
    assert s.calls == 40 and 8 <= s.compared <= 32
    assert 0 < s.largest_difference < 1e-5 and s.top_k_overlap > 0.99
    assert not s.fell_back and s.nonfinite_original == s.nonfinite_rewritten == s.errors == 0


def test_shadow_notes_differences_and_serves_the_rewritten() -> None:
    served = ikbo.shadow(_score, _negated, 1.0, top_k=3)
    given = _inputs(2, 30)
    torch.testing.assert_close(served(*given), -_score(*given))
    assert served.statistics.largest_difference > 1 and served.statistics.top_k_overlap == 0
    assert not served.statistics.fell_back


def test_shadow_falls_back() -> None:
    served = ikbo.shadow(_score, _negated, 1.0, tolerance=1e-3)
    given = _inputs(2, 30)
    with pytest.warns(UserWarning, match=r"the original serves from here on: results differ by"):
        torch.testing.assert_close(served(*given), _score(*given))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        torch.testing.assert_close(served(*given), _score(*given))
    assert served.statistics.compared == 1 and "differ" in served.statistics.fell_back
    served.reset()
    assert served.statistics.calls == 0 and not served.statistics.fell_back


def test_shadow_falls_back_on_nan_and_errors() -> None:
    def nan(*args: Tensor) -> Tensor:
        result = _score(*args)
        result[0] = float("nan")
        return result

    def raising(*args: Tensor) -> Tensor:
        raise RuntimeError("no memory")

    given = _inputs(2, 30)
    for broken, why in ((nan, "NaN or infinite: 1 results, 0"), (raising, "raised RuntimeError")):
        served = ikbo.shadow(_score, broken, 1.0, tolerance=1.0)
        with pytest.warns(UserWarning, match=why):
            torch.testing.assert_close(served(*given), _score(*given))
    assert served.statistics.errors == 1
    with pytest.raises(RuntimeError, match="no memory"):
        ikbo.shadow(_score, raising, 0.0)(*given)
    ikbo.shadow(nan, nan, 1.0, tolerance=1.0)(*given)  # the same in both is no difference


def test_shadow_takes_several_threads_and_no_wrong_fraction() -> None:
    served = ikbo.shadow(_score, _score, 0.5)
    given = _inputs()
    threads = [
        threading.Thread(target=lambda: [served(*given) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served.statistics.calls == 200
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.5"):
        ikbo.shadow(_score, _score, 1.5)


class Difference(nn.Module):
    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + self.shift) - (y + self.shift) if self.shift else x - y


def test_a_result_near_zero_is_held_to_what_is_typical_of_it() -> None:
    x, y = torch.tensor([1.0, -1.0]), torch.tensor([-0.3, 0.4])
    programs = [torch.export.export(Difference(s), (x, y)) for s in (0.0, 16.0)]
    near_zero = ((x, x + 1e-5), {})
    with pytest.raises(AssertionError, match=r"> bound .* for rounding"):
        Pair(*programs).compare(near_zero)
    seasoned = Pair(*programs)
    seasoned.compare(((x, y), {}))
    check = seasoned.compare(near_zero)
    assert 0 < check.error <= check.bound <= 64 * torch.finfo(torch.float32).eps * 1.4
