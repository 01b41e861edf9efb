"""The example models rewritten on a GPU: equal results, compiled and in a package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import MODELS, SMALL, DCNv2, arguments, contexts
from torch import Tensor, nn
from torch.export import ExportedProgram

import ikbo
from ikbo.rewrite import Report

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SIZES = [(9, 3), (1, 1), (40, 1), (1, 5), (1400, 20)]


def _rewritten(name: str, dtype: torch.dtype) -> tuple[nn.Module, ExportedProgram, Report]:
    model = MODELS[name](SMALL).eval().requires_grad_(False).to(DEVICE, dtype)
    given = arguments(model, SMALL, 9, 3, DEVICE, dtype)
    return model, *ikbo.rewrite(model, given, contexts(model), ["candidate_ids"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_changes(name: str, dtype: torch.dtype) -> None:
    _, _, report = _rewritten(name, dtype)
    assert report.verify()


def _close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.float(), want.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_compiled(name: str) -> None:
    model, program, _ = _rewritten(name, torch.float32)
    compiled = torch.compile(program.module(check_guards=False), fullgraph=True, dynamic=True)
    for sizes in SIZES:
        given = arguments(model, SMALL, *sizes, DEVICE)
        _close(compiled(**given), model(**given))


@pytest.mark.parametrize("name", MODELS)
def test_one_package_for_all_sizes(name: str, tmp_path: Any) -> None:
    model, program, _ = _rewritten(name, torch.float32)
    path = torch._inductor.aoti_compile_and_package(program, package_path=f"{tmp_path}/{name}.pt2")
    package = torch._inductor.aoti_load_package(path)
    for sizes in SIZES:
        given = arguments(model, SMALL, *sizes, DEVICE)
        _close(package(**given), model(**given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_crosses_of_low_rank(dtype: torch.dtype) -> None:
    """A rank so low beside these few features that a score's crosses become narrow maps."""
    model = DCNv2(SMALL, rank=2).eval().requires_grad_(False).to(DEVICE, dtype)
    given = arguments(model, SMALL, 9, 3, DEVICE, dtype)
    program, report = ikbo.rewrite(model, given, contexts(model), ["candidate_ids"])
    assert report.of("merged") and not report.broadcasts and report.verify()
    compiled = torch.compile(program.module(check_guards=False), fullgraph=True, dynamic=True)
    for sizes in SIZES:
        given = arguments(model, SMALL, *sizes, DEVICE, dtype)
        want = model(**given).float()
        bound = 1e-4 if dtype is torch.float32 else 0.05
        torch.testing.assert_close(compiled(**given).float(), want, rtol=bound, atol=bound)
