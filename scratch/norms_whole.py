"""The norms' forward of whole rows, in graphs.

First bits against the kernel with rings (IKBO_NORM_X=o). Then a line a case:
  case  copy us  old us, copy/old, compile/old (as recorded)  new us, copy/new  other choices us copy/choice
Choices: 8 (eight warps a CTA of rows within warps), e / n (weights early / late)."""

import argparse
import itertools
import math
import os
import statistics
import time

import torch

import ikbo  # noqa: F401
from benchmarks.device_tests import COPY_ARGUMENTS, COPY_FORMS, function

start = time.time()
parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, default=60.0)
parser.add_argument("--no-check", action="store_true")
parser.add_argument("filters", nargs="*")
options = parser.parse_args()
KEY, EPS = "IKBO_NORM_X", 1e-6
ops = torch.ops.ikbo
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


RECORD = {
    "rms_32768x4096": "133.31 0.949 c1.060",
    "ln_32768x4096": "135.07 0.935 c1.351",
    "rms_32768x1024": "37.97 0.877 c0.887",
    "ln_32768x1024": "38.10 0.877 c0.898",
    "rms_8x8192": "3.17 0.572 c0.910",
    "ln_8x8192": "3.42 0.533 c1.091",
    "rms_128x4096": "3.35 0.679 c0.929",
    "ln_128x4096": "3.56 0.636 c1.006",
    "rms_1024x1024": "3.19 0.875 c0.916",
    "ln_1024x1024": "3.42 0.814 c1.017",
    "rms_131072x128": "21.06 0.877 c0.838",
    "ln_131072x128": "21.61 0.864 c0.853",
    "rms_32768x256": "10.12 0.978 c0.974",
    "ln_32768x256": "10.51 0.950 c1.002",
    "rms_32768x384": "14.93 0.952 c0.957",
    "ln_32768x384": "16.34 0.868 c0.916",
    "rms_32768x512": "20.30 0.916 c0.885",
    "ln_32768x512": "19.86 0.940 c0.931",
    "rms_32768x640": "23.66 0.917 c0.996",
    "ln_32768x640": "24.18 0.885 c0.996",
    "rms_32768x768": "28.06 0.901 c0.913",
    "ln_32768x768": "29.90 0.869 c0.871",
    "rms_32768x2048": "72.14 0.886 c1.028",
    "ln_32768x2048": "73.82 0.864 c1.344",
    "rms_32768x8192": "264.05 0.949 c0.943",
    "ln_32768x8192": "266.56 0.940 c1.067",
    "rms_32768x16384": "524.10 0.951 c0.978",
    "ln_32768x16384": "526.94 0.946 c0.965",
    "rms_32768x32768": "1103.86 0.908 c0.919",
    "ln_32768x32768": "1117.17 0.896 c1.157",
    "rms_16384x65536": "1129.62 0.887 c1.289",
    "ln_16384x65536": "1136.22 0.881 c1.525",
    "rms_8192x131072": "1090.82 0.920 c1.427",
    "ln_8192x131072": "1075.57 0.931 c1.510",
    "rms_4096x262144": "1099.74 0.911 c1.433",
    "ln_4096x262144": "1073.92 0.933 c1.638",
    "rms_522240x257": "151.95 0.830 c1.074",
    "ln_522240x257": "154.51 0.817 c1.592",
    "rms_174592x769": "154.62 0.819 c1.349",
    "ln_174592x769": "150.03 0.840 c1.844",
    "rms_32768x4095": "188.93 0.671 c1.148",
    "ln_32768x4095": "218.94 0.576 c1.626",
    "rms_16384x4096": "132.48 0.954 c0.952",
    "ln_16384x4096": "133.47 0.949 c0.948",
    "rms_4096x131072": "1108.08 0.904 c1.433",
    "ln_4096x131072": "1096.90 0.915 c1.446",
    "add_rms_32768x4096": "271.65 0.922 c0.978",
    "fp8_rms_32768x4096": "109.70 0.872 c1.460",
    "fp8_ln_32768x4096": "168.88 0.568 c1.586"
}


def choose(c):
    os.environ[KEY] = c


def randn(*shape, dtype=bf16):
    return torch.randn(*shape, dtype=dtype, device="cuda")


def check():
    wrong = calls = 0
    lengths = [8, 16, 32, 64, 128, 192, 256, 320, 384, 512, 576, 640, 768, 1024, 1152, 1280, 1536,
               2048, 2560, 4096, 5120, 8192, 12288, 16384, 32768, 65536, 131072, 262144]
    for dtype in (bf16, fp32, fp16):
        for N in lengths:
            if dtype == fp32 and N > 131072 or dtype == fp16 and N % 3:
                continue
            for rows in (1, 37, 700 if N < 10000 else 5):
                x = randn(rows, N, dtype=dtype) + 3 * randn(rows, 1, dtype=dtype)
                x[rows // 2, N // 2] = math.nan if rows > 30 else 0
                w, b, w32 = randn(N, dtype=dtype), randn(N, dtype=dtype), randn(N, dtype=fp32)
                r, r32 = randn(rows, N, dtype=dtype), randn(rows, N, dtype=fp32)
                every = {}
                for ww, bb in ((w, b), (w, None), (None, b), (None, None), (w32, b), (w32, w32)):
                    for off in (0.0, 1.0) if ww is not None else (0.0,):
                        k = f"w{ww is not None and str(ww.dtype)[-4:]} b{bb is not None} {off}"
                        every["rms " + k] = lambda ww=ww, bb=bb, off=off: ops.rms_norm_fwd(x, ww, bb, EPS, off)
                        every["ln " + k] = lambda ww=ww, bb=bb, off=off: ops.layer_norm_fwd(x, ww, bb, EPS, off)
                for rr in (r, r32):
                    every[f"add {rr.dtype}"] = lambda rr=rr: ops.add_rms_norm_fwd(x, rr, w, None, EPS)
                    every[f"addln {rr.dtype}"] = lambda rr=rr: ops.add_layer_norm_fwd(x, rr, w, b, EPS)
                every["addln wide"] = lambda: ops.add_layer_norm_fwd(x, r, w32, b, EPS, 0.0, fp32, fp32)
                every["out"] = lambda: ops.layer_norm_fwd(x, w, b, EPS, 0.0, fp32)
                scale = torch.full((1,), 0.03, device="cuda")
                every["q ln"] = lambda: ops.layer_norm_quant(x, w, b, None, EPS)
                every["q1 ln"] = lambda: ops.layer_norm_quant(x, w, b, scale, EPS)
                every["q add"] = lambda: ops.add_layer_norm_quant(x, r, w, b, None, EPS)
                every["q1 rms"] = lambda: ops.rms_norm_quant(x, w, None, scale, EPS)
                every["q rms"] = lambda: ops.rms_norm_quant(x, w, None, None, EPS)
                for name, fn in every.items():
                    choose("o")
                    want = fn()
                    for c in ("", "e", "n", "8"):
                        if c == "8" and N > 1152:
                            continue
                        choose(c)
                        got = fn()
                        calls += 1
                        same = all(
                            torch.equal(a.contiguous().view(torch.uint8), z.contiguous().view(torch.uint8))
                            for a, z in zip(got, want)
                        )
                        if not same:
                            wrong += 1
                            if wrong < 12:
                                print("DIFFERS", N, rows, dtype, name, repr(c), flush=True)
    # heads of a fused projection
    for T, H, total, D in itertools.product((1, 50, 3000), (8, 5), (12,), (64, 128, 80, 256)):
        qkv = randn(T, total, D)
        w = randn(H, D)
        res = []
        for c in ("o", "", "e", "n"):
            choose(c)
            res.append(ops.head_norm_fwd(qkv[:, 2 : 2 + H], w, EPS, 0.5))
        for got in res[1:]:
            calls += 1
            if not all(map(torch.equal, got, res[0])):
                wrong += 1
                print("DIFFERS head", T, H, D, flush=True)
    torch.cuda.synchronize()
    print(f"check: {calls} calls, {wrong} differ, {time.time() - start:.0f} s", flush=True)


def graph_of(calls, pool):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        kept = [call() for call in calls]
    del kept
    return graph


events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]


def sample(graph, calls, us):
    reps = max(1, min(8, math.ceil(400 / (us * calls))))
    graph.replay()
    events[0].record()
    for _ in range(reps):
        graph.replay()
    events[1].record()
    events[1].synchronize()
    return events[0].elapsed_time(events[1]) * 1e3 / (reps * calls)


IN_WARP = [(131072, 128), (32768, 256), (32768, 384), (32768, 512), (32768, 640), (32768, 768), (32768, 1024)]
BOTH = ("rms", "ln")
CASES = [(k, 32768, 4096, bf16, 1.5, []) for k in ("fp8_rms", "fp8_ln")]
CASES += [(k, M, N, bf16, 1.5, ["8"] if N < 1025 else []) for M, N in ((32768, 1024), (32768, 8192), (131072, 128)) for k in ("fp8_rms", "fp8_ln")]
CASES += [(k, 32768, 32768, bf16, 2, []) for k in BOTH]
CASES += [(k, M, N, bf16, 2, []) for M, N in [(16384, 65536), (8192, 131072), (4096, 262144)] for k in BOTH]
CASES += [(k, 4096, 131072, fp32, 2, []) for k in BOTH]
CASES += [(k, 8192, 65536, bf16, t, []) for k, t in (("add_rms", 4), ("add_ln", 4), ("fp8_rms", 1.5), ("fp8_ln", 1.5))]
CASES += [(k, M, N, bf16, 2, []) for M, N in IN_WARP for k in BOTH]
CASES += [(k, 32768, N, bf16, 2, []) for N in (2048, 4096, 8192, 16384) for k in BOTH]
CASES += [("add_rms", 32768, 4096, bf16, 4, []), ("head", 16384, 128, bf16, 2 * 32, []), ("rms", 8, 8192, bf16, 2, []), ("ln", 8, 8192, bf16, 2, []),
          ("rms", 128, 4096, bf16, 2, []), ("ln", 128, 4096, bf16, 2, []), ("rms", 1024, 1024, bf16, 2, []), ("ln", 1024, 1024, bf16, 2, []),
          ("rms", 16384, 4096, fp32, 2, []), ("ln", 16384, 4096, fp32, 2, [])]


def measure(kind, M, N, dtype, tensors, choices):
    size = dtype.itemsize
    name = f"{kind}_{M}x{N}{'_fp32' if dtype is fp32 else ''}"
    if options.filters and not any(f in name for f in options.filters):
        return
    if time.time() - start > options.seconds:
        print("out of time before", name, flush=True)
        return
    moved = int(tensors * M * N * size)
    sets = max(1, min(300, math.ceil(400e6 / moved)))
    calls = max(sets, 2)
    if kind == "head":
        xs = [randn(M, 48, N) for _ in range(sets)]
        ws = [randn(32, N) for _ in range(sets)]
    else:
        xs = [randn(M, N, dtype=dtype) for _ in range(sets)]
        ws = [randn(N, dtype=fp32 if kind.startswith("w32") else dtype) for _ in range(sets)]
    bs = [randn(N, dtype=dtype) for _ in range(sets)]
    if kind.startswith("add"):
        rs = [randn(M, N, dtype=fp32 if "32" in kind else dtype) for _ in range(sets)]

    def ours(i):
        x, w, b = xs[i], ws[i], bs[i]
        if kind == "head":
            return ops.head_norm(x[:, :32], w, EPS)
        if kind.startswith("add"):
            if kind.endswith("ln"):
                return ops.add_layer_norm(x, rs[i], w, b, EPS)
            return ops.add_rms_norm(x, rs[i], w, None, EPS)
        if kind.startswith("fp8"):
            if kind.endswith("ln"):
                return ops.layer_norm_quant(x, w, b, None, EPS)
            return ops.rms_norm_quant(x, w, None, None, EPS)
        if kind.endswith("ln"):
            return ops.layer_norm(x, w, b, EPS)
        return ops.rms_norm(x, w, None, EPS)

    pool, graphs = torch.cuda.graph_pool_handle(), {}
    for c in ("", *choices):
        choose(c)
        ours(0)
        graphs[c] = graph_of([lambda i=i: ours(i % sets) for i in range(calls)], pool)
    copy = function("copy", COPY_ARGUMENTS)
    part = moved // 2 // 16 * 16
    pairs = [torch.empty(2, part, dtype=torch.uint8, device="cuda") for _ in range(sets)]
    for form in range(COPY_FORMS):
        def run(i, form=form):
            t = pairs[i % sets]
            copy(t[0].data_ptr(), None, t[1].data_ptr(), part, form)
        run(0)
        graphs[f"copy{form}"] = graph_of([lambda i=i, run=run: run(i) for i in range(calls)], pool)
    times = {c: [] for c in graphs}
    for _ in range(5):
        for c, graph in graphs.items():
            times[c].append(sample(graph, calls, moved / 4e6 + 2))
    us = {c: statistics.median(t) for c, t in times.items()}
    best = min(us[f"copy{f}"] for f in range(COPY_FORMS))
    more = "  ".join(f"{c} {us[c]:.2f} {best / us[c]:.3f}" for c in choices)
    old = RECORD.get(name, "") if not name.endswith("fp32") else RECORD.get(name[:-5], "")
    print(f"{name:22s} copy {best:8.2f}  old {old:21s} new {us['']:8.2f} "
          f"{best / us['']:.3f}  {more}", flush=True)


if not options.no_check:
    check()
for case in CASES:
    measure(*case)
    torch.cuda.empty_cache()
print(f"{time.time() - start:.0f} s", flush=True)
