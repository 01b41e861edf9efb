"""explain, counters, strict, warmup, sm_limit: what the library says of itself."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import ikbo
from ikbo._library import library

from .cases.linear import concat_linear_args
from .installed import run_python

MAP = torch.tensor([1, 0, 1], dtype=torch.int32)


@pytest.fixture(autouse=True)
def _from_zero() -> None:
    ikbo.reset_counters()


def test_explain_on_the_cpu() -> None:
    assert ikbo.explain("group_candidates", MAP, 2) == {
        "op": "group_candidates",
        "path": "cpu",
        "reason": "CPU tensors",
    }


def test_explain_takes_keyword_arguments() -> None:
    assert ikbo.explain("group_candidates", cand_to_user=MAP, n_users=2)["path"] == "cpu"


def test_explain_covers_every_op_of_a_family() -> None:
    args = concat_linear_args("cpu", torch.float32)
    for op in ("concat_linear", "concat_linear_fwd"):
        assert ikbo.explain(op, *args)["op"] in ("concat_linear", "concat_linear_fwd")


def test_explain_of_an_unknown_op() -> None:
    with pytest.raises(AttributeError, match="no_such_op"):
        ikbo.explain("no_such_op")


def test_explain_is_of_this_thread() -> None:
    """Another thread's calls don't show."""
    ikbo.explain("group_candidates", MAP, 2)
    seen: list[bytes] = []
    thread = threading.Thread(
        target=lambda: seen.append(library().ikbo_explain(b"group_candidates"))
    )
    thread.start()
    thread.join()
    assert seen == [b"null"]


def test_counters_count_calls() -> None:
    assert ikbo.counters() == {}
    for _ in range(3):
        ikbo.group_candidates(MAP, 2)
    assert ikbo.counters() == {("group_candidates", "cpu"): 3}
    ikbo.reset_counters()
    assert ikbo.counters() == {}


def test_counters_from_many_threads() -> None:
    def work() -> None:
        for _ in range(50):
            ikbo.group_candidates(MAP, 2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ikbo.counters() == {("group_candidates", "cpu"): 200}


def test_a_call_that_fails_its_checks_is_not_counted() -> None:
    with pytest.raises(RuntimeError, match=r"ikbo.group_candidates: expected n_users >= 0, got -1"):
        ikbo.group_candidates(MAP, -1)
    assert ikbo.counters() == {}


def test_strict_leaves_the_cpu_alone() -> None:
    with ikbo.strict():
        ikbo.group_candidates(MAP, 2)
    assert ikbo.counters() == {("group_candidates", "cpu"): 1}


SLOW_PATH = """
import torch, ikbo
args = (torch.ones(3, 2), torch.ones(1, 2), torch.ones(4, 2), torch.ones(4, 2))
args = [a.double().cuda() for a in args] + [None, torch.zeros(3, dtype=torch.int32).cuda()]
for _ in range(3):
    torch.ops.ikbo.concat_linear(*args)
try:
    with ikbo.strict():
        torch.ops.ikbo.concat_linear(*args)
except RuntimeError as error:
    print(error)
torch.ops.ikbo.concat_linear(*args)
print(ikbo.counters())
"""


@pytest.mark.gpu
def test_slow_path_on_a_gpu_warns_once_and_raises_under_strict() -> None:
    """float64 has no kernel. In a process of its own: the warning comes once a process."""
    done = run_python(SLOW_PATH)
    raised, counted = done.stdout.splitlines()
    assert done.stderr.count("ikbo.concat_linear runs on the reference path") == 1, done.stderr
    assert "ikbo.concat_linear: strict mode expects a Hopper kernel" in raised
    assert counted == "{('concat_linear', 'reference'): 4}"


@pytest.mark.gpu
def test_explain_on_a_gpu_shows_the_launch() -> None:
    record = ikbo.explain("group_candidates", MAP.cuda(), 2)
    assert record["path"] == "sm90"
    assert record["config"]["kernel"] == "group_candidates_sm90"
    assert record["config"]["launches"] == 1


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta"])
def test_warmup_wants_a_gpu(device: Any) -> None:
    with pytest.raises(RuntimeError, match=r"ikbo.warmup: expected a CUDA device, got"):
        ikbo.warmup(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", [0, "cuda:0"])
def test_warmup_without_a_driver_names_the_cuda_error(device: Any) -> None:
    with pytest.raises(RuntimeError, match=r"ikbo.warmup: ikbo: CUDA call .* failed: cudaError"):
        ikbo.warmup(device)


@pytest.mark.gpu
@pytest.mark.parametrize("device", [None, 0, "cuda", torch.device("cuda", 0)])
def test_warmup_of_a_gpu(device: Any) -> None:
    ikbo.warmup(device)


def test_sm_limit_nests_and_ends() -> None:
    assert library().ikbo_sm_limit() == 0
    with ikbo.sm_limit(64):
        assert library().ikbo_sm_limit() == 64
        with ikbo.sm_limit(8):
            assert library().ikbo_sm_limit() == 8
        assert library().ikbo_sm_limit() == 64
    assert library().ikbo_sm_limit() == 0


def test_sm_limit_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), ikbo.sm_limit(5):
        raise KeyError
    assert library().ikbo_sm_limit() == 0


@pytest.mark.parametrize("sms", [0, -3])
def test_sm_limit_wants_a_positive_number(sms: int) -> None:
    with pytest.raises(ValueError, match=rf"ikbo.sm_limit: expected at least 1 SM, got {sms}"):
        ikbo.sm_limit(sms).__enter__()
