"""The benchmark driver without a GPU: rounds, results on file, the report, and that all contestants
of every case compute the same."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import ceilings, device_tests, ops, report, run, timing
from benchmarks.cases import Case, Draw, Maker, compiled, reset_compiler
from benchmarks.record import Record
from benchmarks.timing import CudaTimer, interleave, measure, ratio, relative_error

CPU = torch.device("cpu")
META = {
    "gpu": "NVIDIA H200", "torch": "2.11.0", "cuda": "13.0", "driver": "580", "commit": "abc",
    "date": "2026-12-01", "copy_TBps": 4.27, "matmul_TFLOPS": 680.0, "counts": True, "quick": False,
}  # fmt: skip


class ScriptedTimer:
    """Takes a call's time from its attribute ``us``; keeps the order of samples."""

    def __init__(self) -> None:
        self.played: list[Any] = []
        self.graphs: list[int] = []

    def events(self, call: Any, repeats: int) -> Callable[[], float]:
        def sample() -> float:
            call()
            self.played.append(call)
            return float(getattr(call, "us", 500.0))

        return sample

    def graph(self, calls: Sequence[Any], repeats: int) -> Callable[[], float]:
        self.graphs.append(len(calls))
        return self.events(calls[0], repeats)

    def capturable(self, call: Any) -> bool:
        return getattr(call, "capturable", True)


def maker(us: float, result: float | None = 1.0, capturable: bool = True) -> Maker:
    def make(inputs: Any) -> Any:
        def call() -> Tensor | None:
            return None if result is None else inputs.x * result

        call.us, call.capturable = us, capturable  # type: ignore[attr-defined]
        return call

    return make


def fails(inputs: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")


def case(**contestants: Maker | list[Maker]) -> Case:
    return Case("tiny", lambda draw: SimpleNamespace(x=draw.randn(16)), contestants)


def rows_of(case: Case, timer: Any = None) -> dict[str, dict[str, Any]]:
    rows = measure(case, "bf16", CPU, timer or ScriptedTimer())
    return {row["impl"]: row for row in rows}


def every_case() -> list[Any]:
    each = [(op, case) for op in ops.OPS for case in ops.cases(op, shrink=64) if op != "gemm"]
    return [pytest.param(case, id=f"{op}-{case.name}") for op, case in each]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", every_case())
def test_contestants_agree(case: Case, device: str) -> None:
    contestants = {k: v for k, v in case.contestants.items() if k not in report.CEILINGS}
    if case.name.startswith("rms_bwd") and device == "cpu":
        del contestants["eager"]  # calls an op of torch that has no CPU implementation
    most = 1e-2 if case.name.startswith("fp8") else 1e-4  # fp8: a last bit can decide a rounding
    inputs = case.inputs(Draw(torch.device(device), torch.float32))
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        results = {
            impl: [make(inputs)() for make in (makers if isinstance(makers, list) else [makers])]
            for impl, makers in contestants.items()
        }
    reset_compiler()
    [expected] = results.pop("ikbo")
    for impl, each in results.items():
        for result in each:
            assert relative_error(result, expected) < most, impl


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ops.cases("gemm", shrink=64), ids=lambda case: case.name)
def test_gemm_contestants_agree(case: Case, dtype: torch.dtype) -> None:
    """Of half-precision matrices, on a GPU: the kernel takes no others."""
    inputs = case.inputs(Draw(torch.device("cuda"), dtype))
    try:
        ours = case.contestants["ikbo"](inputs)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    cublas = case.contestants["cublas"](inputs)
    assert relative_error(ours(), cublas()) < 5e-3
    assert ours() is ours()


def test_gemm_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IKBO_DEVICE_TESTS", str(tmp_path / "none.so"))
    row = rows_of(ops.cases("gemm", shrink=64)[0])["ikbo"]
    assert row["error"].startswith(
        f"FileNotFoundError: expected ikbo_test_gemm in {tmp_path}/none.so: "
    )


@pytest.mark.gpu
@pytest.mark.parametrize("form", range(device_tests.COPY_FORMS))
@pytest.mark.parametrize("count", [1, 255, 256, 5000, 3_000_001])  # of 16 bytes
def test_copies_copy(form: int, count: int) -> None:
    a, b = (torch.randint(255, (16 * count,), dtype=torch.uint8, device="cuda") for _ in range(2))
    try:
        copy = device_tests.function("copy", device_tests.COPY_ARGUMENTS)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    for second, want in ((None, a), (b, a ^ b)):
        to = torch.full((16 * count + 16,), 77, dtype=torch.uint8, device="cuda")
        copy(a.data_ptr(), second.data_ptr() if second is not None else None, to.data_ptr(),
             16 * count, form)  # fmt: skip
        assert torch.equal(to[:-16], want) and bool((to[-16:] == 77).all())


@pytest.mark.parametrize("op", ops.OPS)
def test_cases_are_told_apart(op: str) -> None:
    cases = ops.cases(op)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert next(iter(case.contestants)) == "ikbo"
        assert len(case.contestants) > 1 and case.dtypes


def test_compiled_is_one_function_until_reset() -> None:
    first = compiled(torch.neg)
    assert compiled(torch.neg) is first
    reset_compiler()
    assert compiled(torch.neg) is not first


def test_rows() -> None:
    rows = rows_of(case(ikbo=maker(200), slower=maker(500, 1.01), copy=maker(150, None)))
    assert list(rows) == ["ikbo", "slower", "copy"]
    for row in rows.values():
        assert (row["case"], row["dtype"], row["timing"]) == ("tiny", "bf16", "events")
        assert len(row["samples"]) == timing.ROUNDS >= 9 and row["us"] == row["samples"][0]
    assert "ratio" not in rows["ikbo"] and "relerr" not in rows["copy"]
    assert (rows["slower"]["ratio"], rows["copy"]["ratio"]) == (2.5, 0.75)
    assert 0.005 < rows["slower"]["relerr"] < 0.015


def test_a_failing_contestant_gets_a_row() -> None:
    rows = rows_of(case(ikbo=maker(200), oom=fails, wrong=maker(100, 1.1), fine=maker(300)))
    assert rows["oom"]["error"] == "OutOfMemoryError: CUDA out of memory."
    assert "differs from ikbo's by 0.09" in rows["wrong"]["error"]
    assert "us" not in rows["oom"] and "us" not in rows["wrong"]
    assert rows["fine"]["ratio"] == 1.5


def test_yardsticks_are_timed_without_ikbo() -> None:
    rows = rows_of(case(ikbo=fails, fine=maker(300)))
    assert "error" in rows["ikbo"] and rows["fine"]["us"] == 300 and "ratio" not in rows["fine"]
    broken = Case("broken", fails, {"ikbo": maker(1)})
    assert "error" in rows_of(broken)["ikbo"]
    assert list(rows_of(case(ikbo=fails, also=fails))["also"]) == ["case", "dtype", "impl", "error"]


def test_short_work_is_timed_by_graphs_for_all() -> None:
    timer = ScriptedTimer()
    rows = rows_of(case(ikbo=maker(2000), quick=maker(10)), timer)
    assert {row["timing"] for row in rows.values()} == {"graph"}
    # As many sets as rotate at most; of the slow one only what fits a round.
    assert timer.graphs == [timing.ROUND_US // 2000, timing.MAX_SETS]
    timer = ScriptedTimer()
    slow = case(ikbo=maker(2000), slower=maker(3000))
    assert {row["timing"] for row in rows_of(slow, timer).values()} == {"events"}
    asked = dataclasses.replace(slow, by_graphs=True)
    assert {row["timing"] for row in rows_of(asked, timer).values()} == {"graph"}
    rows = rows_of(case(ikbo=maker(2000, capturable=False), quick=maker(10)))
    assert {row["timing"] for row in rows.values()} == {"events"}


def test_sets_exceed_the_cache() -> None:
    def inputs(draw: Draw) -> SimpleNamespace:
        return SimpleNamespace(x=torch.zeros(1, dtype=draw.dtype).expand(25_000_000))

    timer = ScriptedTimer()
    big = Case("big", inputs, {"ikbo": lambda i: maker(10, None)(i)})
    measure(big, "bf16", CPU, timer)
    assert timer.graphs == [timing.ROTATING_BYTES // 50_000_000 + 1]


def test_slow_contestants_sit_out() -> None:
    rows = rows_of(case(ikbo=maker(60_000), fine=maker(300)))
    assert len(rows["ikbo"]["samples"]) == timing.SLOW_ROUNDS
    assert len(rows["fine"]["samples"]) == timing.ROUNDS
    assert rows["fine"]["ratio"] == 0.005


def test_the_quickest_variant_runs() -> None:
    assert rows_of(case(ikbo=maker(200), copy=[maker(400), maker(250)]))["copy"]["us"] == 250


def test_interleave_takes_turns() -> None:
    log: list[str] = []
    samplers = {name: lambda name=name: float(len(log.append(name) or log)) for name in "abc"}
    samples = interleave(samplers, {"a": 3, "b": 1, "c": 3})
    assert "".join(log) == "abc" + "ca" + "ca"
    assert samples == {"a": [1, 5, 7], "b": [2], "c": [3, 4, 6]}


def test_ratio_is_the_median_of_rounds() -> None:
    assert ratio([2, 10, 3], [1, 1, 3]) == 2  # medians alone would say 3
    assert ratio([2, 4, 90, 90], [1, 1]) == 3  # only rounds that both played


def test_relative_error() -> None:
    x = torch.tensor([3.0, 4.0])
    assert relative_error(x * 1.5, x) == 0.5
    assert relative_error((x, x.int()), (x, (x + 5).int())) > 0.5
    assert not relative_error(torch.tensor([3.0, float("nan")]), x) < timing.MAX_RELERR
    with pytest.raises(ValueError, match="longer"):
        relative_error((x,), (x, x))


def test_record_is_resumed_at_the_same_commit(tmp_path: Path) -> None:
    path = tmp_path / "new" / "op.json"
    row = {"case": "a", "dtype": "bf16", "impl": "ikbo", "us": 1.0, "samples": [1.0]}
    Record(path, META).add([row])
    assert json.loads(path.read_text()) == {"meta": META, "rows": [row]}
    assert [p.name for p in path.parent.iterdir()] == ["op.json"]

    again = Record(path, META | {"date": "later"})
    assert again.has("a", "bf16") and not again.has("a", "fp16") and not again.has("b", "bf16")
    again.add([row | {"dtype": "fp16"}])
    result = json.loads(path.read_text())
    assert result["meta"]["date"] == "later" and len(result["rows"]) == 2

    for change in ({"commit": "def"}, {"quick": True}, {"gpu": "NVIDIA H100"}):
        assert not Record(path, META | change).has("a", "bf16")
    Record(path, META | {"counts": False}).add([])
    assert not Record(path, META).has("a", "bf16")


def test_driver_stops_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [case.name for case in ops.cases("group_candidates")]
    shrunk = ops.cases
    measured: list[str] = []

    def stop_after(limit: int) -> None:
        def measure_some(case: Case, *args: Any) -> list[timing.Row]:
            if len(measured) == limit:
                raise KeyboardInterrupt
            measured.append(case.name)
            return measure(case, *args)

        monkeypatch.setattr(run, "measure", measure_some)

    monkeypatch.setattr(ops, "cases", lambda op: shrunk(op, 64))
    monkeypatch.setattr(run, "_hopper", lambda: CPU)
    monkeypatch.setattr(run, "_meta", lambda timer, device, commit: META | {"commit": commit})
    monkeypatch.setattr(run, "CudaTimer", ScriptedTimer)
    monkeypatch.setattr("sys.argv", ["run.py", "--op", "group_candidates", "--out", str(tmp_path)])
    stop_after(2)
    with pytest.raises(KeyboardInterrupt):
        run.main()
    stop_after(100)
    run.main()
    assert measured == names
    result = json.loads((tmp_path / "group_candidates.json").read_text())
    assert [row["case"] for row in result["rows"]] == [n for n in names for _ in range(2)]
    assert all(row["dtype"] == "int32" and "us" in row for row in result["rows"])
    line = f"[1/3] group_candidates {names[2]} int32: ikbo 500 us, torch_sort 1x"
    assert line in capsys.readouterr().out


def test_driver_refuses_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(SystemExit, match=r"expected a Hopper GPU .*found NVIDIA A100"):
        run._hopper()


def test_commit_comes_from_the_environment_without_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.delenv("IKBO_COMMIT", raising=False)
    with pytest.raises(SystemExit, match="IKBO_COMMIT"):
        run._commit()
    monkeypatch.setenv("IKBO_COMMIT", "abc")
    assert run._commit() == "abc"


def test_ceilings() -> None:
    timer = ScriptedTimer()
    assert ceilings.copy_TBps(timer, CPU, 10**6) == pytest.approx(2e6 / 500e-6 / 1e12)
    assert ceilings.matmul_TFLOPS(timer, CPU, 32) == pytest.approx(2 * 32**3 / 500e-6 / 1e12)
    makers = ceilings.same_size_copies(4096)
    assert len(makers) > 1
    for make in makers:
        assert make(SimpleNamespace(x=torch.empty(0)))() is None


def results(**ratios: float) -> dict[str, Any]:
    rows = [{"case": "c1", "dtype": "bf16", "impl": "ikbo", "us": 123.456},
            {"case": "c1", "dtype": "fp16", "impl": "torch", "us": 1.0, "ratio": 77.0},
            {"case": "c2", "dtype": "bf16", "impl": "ikbo", "error": "OutOfMemoryError: no"},
            {"case": "c2", "dtype": "bf16", "impl": "torch", "us": 9.0}]  # fmt: skip
    rows += [{"case": "c1", "dtype": "bf16", "impl": peer, "us": 1.0, "ratio": ratio}
             for peer, ratio in ratios.items()]  # fmt: skip
    rows += [{"case": "c1", "dtype": "bf16", "impl": "broken", "error": "ValueError: x"}]
    return {"meta": META, "rows": rows}


def test_report_shows_gains_and_losses() -> None:
    data = {"norms": results(torch=1.254, other=0.5, copy=0.9)}
    text = report.figures(data, {"norms": "benchmarks/results/h200/norms"}, set())
    assert "| case | `ikbo`, µs | torch | other | copy | broken |" in text
    assert "| c1 | 124 | 1.25 | 0.5 | 0.9 | error |" in text
    assert "| c2 | error |  |  |  |  |" in text
    assert "<b>norms</b>: faster than every yardstick in 0 of 2 cases" in text
    assert "[norms.json](benchmarks/results/h200/norms.json): NVIDIA H200" in text
    assert "77" not in text and ".svg" not in text
    text = report.figures({"norms": results(torch=1.254, copy=0.9)}, {"norms": "x"}, {"norms"})
    assert "in 1 of 2 cases" in text and "![norms](x.svg)" in text


def test_report_takes_other_ways_to_call_ikbo_for_no_yardstick() -> None:
    data = {"linear_compression": results(ikbo_pack_per_call=0.98, torch=1.25)}
    text = report.figures(data, {"linear_compression": "x"}, set())
    assert "| case | `ikbo`, µs | ikbo_pack_per_call | torch | broken |" in text
    assert "| c1 | 124 | 0.98 | 1.25 | error |" in text
    assert "faster than every yardstick in 1 of 2 cases" in text
    assert "`ikbo_pack_per_call` is `ikbo` with plain contiguous weights" in text


def test_every_other_way_to_call_ikbo_is_explained() -> None:
    for op in ops.OPS:
        impls = {impl for case in ops.cases(op) for impl in case.contestants}
        for impl in impls:
            assert not impl.startswith(report.OURS) or f"`{impl}`" in ops.note(op)


def test_report_leaves_out_what_does_not_count(tmp_path: Path) -> None:
    assert report.figures(report.load(tmp_path), {}, set()) == report.NO_FIGURES
    kinds = {"norms": {}, "gated_mlp": {"counts": False}, "concat_linear": {"quick": True}}
    for op, change in kinds.items():
        data = results(torch=2.0) | {"meta": META | change}
        (tmp_path / f"{op}.json").write_text(json.dumps(data))
    assert list(report.load(tmp_path)) == ["norms"]


def test_report_replaces_its_block_alone() -> None:
    readme = "# ikbo\n<!-- figures -->\nold\n<!-- /figures -->\nrest\n"
    new = report.replace_block(readme, r"new \1")
    assert new == "# ikbo\n<!-- figures -->\n\nnew \\1\n\n<!-- /figures -->\nrest\n"
    assert report.replace_block(new, r"new \1") == new
    with pytest.raises(SystemExit, match="got 0"):
        report.replace_block("# ikbo\n", "new")


def test_plot(tmp_path: Path) -> None:
    path = tmp_path / "norms.svg"
    drawn = report.plot("norms", results(torch=2.0), path)
    assert drawn == path.exists() == (importlib.util.find_spec("matplotlib") is not None)


@pytest.mark.gpu
def test_cuda_timer() -> None:
    timer, x = CudaTimer(), torch.randn(16 << 20, device="cuda")
    targets = [torch.empty_like(x) for _ in range(4)]
    copies = [lambda t=t: t.copy_(x) for t in targets]
    assert timer.capturable(copies[0])
    assert not timer.capturable(lambda: x[:8].sum().item())
    assert torch.cuda.get_sync_debug_mode() == 0
    by_events, by_graph = timer.events(copies[0], 9)(), timer.graph(copies, 9)()
    # 128 MiB read and written take 30 us at the bandwidth of a Hopper GPU.
    assert 20 < by_graph < 80 and 0.5 < by_events / by_graph < 2
