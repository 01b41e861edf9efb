"""The norms' forward with and without rings (IKBO_NORM_DIRECT) side by side, in one process.

  PYTHONPATH=... python scratch/norms_direct.py [--seconds 60] [--compile] [filter ...]

First a check of every layout: rows that don't fill a CTA, without weight, without bias. "bits" are
the layouts whose y and statistics are the present kernel's bit for bit. Then a line a case:

  case  present_us  compile/present  candidate present/candidate ...  best

"*": faster than torch.compile, of which benchmarks/results/h200/norms.json has the time; --compile
measures it anew (some seconds a case). All times are of a call inside a graph, as in the record.
The candidates' names: csrc/kernels/norm/direct.h.
"""

import argparse
import json
import math
import os
import statistics
import time
from pathlib import Path

import torch

import ikbo  # noqa: F401

start = time.time()
parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, default=60.0)
parser.add_argument("--compile", action="store_true")
parser.add_argument("filters", nargs="*")
options = parser.parse_args()

KEY = "IKBO_NORM_DIRECT"
EPS = 1e-6
ROUNDS = 5
ops = torch.ops.ikbo
bf16, fp32 = torch.bfloat16, torch.float32

SMALL = {
    (8, 8192): ["1", "1e", "512x2x1", "512x2x1e", "1024x1x1", "1024x1x1e", "1024x1x1ep"],
    (128, 4096): ["1", "1e", "256x2x1e", "512x1x1", "512x1x1e", "512x1x1ep"],
    (1024, 1024): ["1", "1e", "1:128", "1e:128", "64x2x1e", "128x1x1", "128x1x1e", "128x1x1ep"],
}
LARGE = {
    (131072, 128): ["1", "1e", "1p", "8x2x1", "16x1x2", "16x1x4", "16x1x4e", "16x1x4p"],
    (32768, 256): ["1", "1p", "32x1x2", "32x1x4", "32x1x4e"],
    (32768, 384): ["1", "1p", "1:128", "16x3x2"],
    (32768, 512): ["1", "1p", "1:128", "32x2x1", "32x2x1p", "32x2x2", "32x2x2e"],
    (32768, 640): ["1", "1p", "1:128"],
    (32768, 768): ["1", "1p", "1:128", "32x3x2", "96x1x1", "96x1x1e"],
    (32768, 1024): ["1", "1p", "1:128", "64x2x1", "128x1x1", "128x1x1p", "128x1x1e", "128x1x2"],
    (32768, 2048): ["1", "1p", "128x2x1", "256x1x1", "256x1x1e"],
    (32768, 4096): ["1", "1p", "256x2x1", "512x1x1"],
    (32768, 8192): ["1", "1p", "512x2x1", "1024x1x1"],
    (32768, 16384): ["1", "1p", "1024x2x1"],
    (32768, 32768): ["1024x4x1", "1024x4x1p"],
}
CASES = [(*shape, bf16, cands) for shape, cands in (SMALL | LARGE).items()]
CASES.append((16384, 4096, fp32, ["1", "1e", "512x2x1", "512x2x1e"]))
RECORD = Path(__file__).parent.parent / "benchmarks/results/h200/norms.json"


def choose(candidate):
    if candidate == "base":
        os.environ.pop(KEY, None)
    else:
        os.environ[KEY] = candidate


def tag(dtype):
    return "fp32" if dtype is fp32 else "bf16"


def recorded():
    """compile's time over ours, of each case."""
    times = {}
    if RECORD.exists():
        for row in json.loads(RECORD.read_text())["rows"]:
            times.setdefault((row["case"], row["dtype"]), {})[row["impl"]] = row.get("us")
    both = {k: v for k, v in times.items() if v.get("compile") and v.get("ikbo")}
    return {k: v["compile"] / v["ikbo"] for k, v in both.items()}


def forward(layer, x, w, b):
    if layer:
        return ops.layer_norm_fwd(x, w, b, EPS)
    return ops.rms_norm_fwd(x, w, None, EPS)


def exact(layer, x, w, b):
    x = x.double()
    if layer:
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    if w is not None:
        y = y * w.double()
    return y + b.double() if layer and b is not None else y


def check():
    """Prints what isn't close, and which candidates have the present bits. Returns the errors."""
    errors, wanted, same = 0, 0, {}
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*shape, dtype):
        return torch.randn(*shape, dtype=dtype, device="cuda", generator=generator)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _, N, dtype, candidates in CASES:
            for rows in (1, 37, 1000):
                x = random(rows, N, dtype=dtype) + 3.0 * random(rows, 1, dtype=dtype)
                weight, bias = random(N, dtype=dtype), random(N, dtype=dtype)
                for layer in (False, True):
                    for w, b in ((weight, bias), (None, bias), (weight, None), (None, None)):
                        choose("base")
                        base = forward(layer, x, w, b)
                        want = exact(layer, x, w, b)
                        for candidate in candidates:
                            choose(candidate)
                            got = forward(layer, x, w, b)
                            wanted += 1
                            key = (N, tag(dtype), candidate)
                            same[key] = same.get(key, True) and all(map(torch.equal, got, base))
                            error = ((got[0].double() - want).norm() / want.norm()).item()
                            base_error = ((base[0].double() - want).norm() / want.norm()).item()
                            stats = max(
                                (a - c).abs().max().item()
                                for a, c in zip(got[1:], base[1:], strict=True)
                            )
                            if not error <= 1.01 * base_error + 1e-7 or not stats <= 1e-5:
                                errors += 1
                                print(
                                    f"WRONG {N} {tag(dtype)} {candidate} rows {rows} layer {layer} "
                                    f"w {w is not None} b {b is not None}: {error:.2e} "
                                    f"({base_error:.2e}), statistics {stats:.1e}",
                                    flush=True,
                                )
        choose("base")
        torch.cuda.synchronize()
    ran = sum(e.count for e in profile.key_averages() if "norm_forward_direct" in e.key)
    bits = [f"{n}:{c}" for (n, _, c), equal in same.items() if equal]
    print(
        f"check: {wanted} calls, {ran} of them direct, {errors} wrong; bits: {' '.join(bits)}",
        flush=True,
    )
    return errors + (ran != wanted)


def sets_of(total):
    return max(1, min(300, math.ceil(400e6 / total)))


def graph_of(calls, pool):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        kept = [call() for call in calls]
    del kept
    return graph


events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]


def sample(graph, calls, us):
    """Of one call, in us, of about 500 us of replays; the first hides what launching takes."""
    reps = max(1, min(8, math.ceil(500 / (us * calls))))
    graph.replay()
    events[0].record()
    for _ in range(reps):
        graph.replay()
    events[1].record()
    events[1].synchronize()
    return events[0].elapsed_time(events[1]) * 1e3 / (reps * calls)


def compiled(layer, N):
    if layer:
        return torch.compile(
            lambda x, w, b: torch.nn.functional.layer_norm(x, (N,), w, b, EPS), dynamic=False
        )
    return torch.compile(
        lambda x, w, b: torch.nn.functional.rms_norm(x, (N,), w, EPS), dynamic=False
    )


def measure(M, N, dtype, candidates, targets):
    size = 2 if dtype is bf16 else 4
    total = 2 * M * N * size
    sets = sets_of(total)
    calls = max(sets, 2)
    xs = [torch.randn(M, N, dtype=dtype, device="cuda") for _ in range(sets)]
    ws = [torch.randn(N, dtype=dtype, device="cuda") for _ in range(sets)]
    bs = [torch.randn(N, dtype=dtype, device="cuda") for _ in range(sets)]
    for layer in (False, True):
        name = f"{'ln' if layer else 'rms'}_fwd_{M}x{N}"
        if options.filters and not any(f in name for f in options.filters):
            continue
        if time.time() - start > options.seconds:
            print("out of time before", name, flush=True)
            return
        pool, graphs = torch.cuda.graph_pool_handle(), {}

        def ours(i, layer=layer):
            if layer:
                return ops.layer_norm(xs[i], ws[i], bs[i], EPS)
            return ops.rms_norm(xs[i], ws[i], None, EPS)

        for candidate in ("base", *candidates):
            choose(candidate)
            ours(0)
            graphs[candidate] = graph_of([lambda i=i: ours(i % sets) for i in range(calls)], pool)
        choose("base")
        if options.compile:
            torch._dynamo.reset()
            fn = compiled(layer, N)
            fn(xs[0], ws[0], bs[0])
            graphs["compile"] = graph_of(
                [
                    lambda i=i, fn=fn: fn(xs[i % sets], ws[i % sets], bs[i % sets])
                    for i in range(calls)
                ],
                pool,
            )
        times = {c: [] for c in graphs}
        for _ in range(ROUNDS):
            for candidate, graph in graphs.items():
                times[candidate].append(sample(graph, calls, total / 4e6 + 2))
        us = {c: statistics.median(t) for c, t in times.items()}
        target = (
            us["compile"] / us["base"] if options.compile else targets.get((name, tag(dtype)), 0.0)
        )
        cells = [
            f"{c} {us['base'] / us[c]:.3f}{'*' if us[c] < target * us['base'] else ''}"
            for c in candidates
        ]
        best = min(candidates, key=us.get)
        print(
            f"{name:20s} {tag(dtype)} {us['base']:8.2f} {target:.3f}  {'  '.join(cells)}  best "
            f"{best if us[best] < us['base'] else 'base'} {min(us[best], us['base']):.2f}",
            flush=True,
        )


print(
    f"{torch.cuda.get_device_name()} {torch.__version__}; case present_us compile/present "
    "candidate present/candidate ...",
    flush=True,
)
failed = check()
targets = recorded()
for case in CASES:
    measure(*case, targets)
print(f"{time.time() - start:.0f} s, check {'FAILED' if failed else 'passed'}", flush=True)
