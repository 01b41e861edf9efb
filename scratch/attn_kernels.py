"""Kernels of candidate_attention side by side, in one process: IKBO_ATTENTION_KERNEL is read by each
call of a library built with -DIKBO_ATTENTION_VARIANTS.

PYTHONPATH=<ikbo>:<folder of attn_bench.py> python attn_kernels.py [--cases REGEX] [--rounds N]

One line a case: cuDNN's or flash attention's time, then of each kernel its time and the median over
rounds of peer / kernel (uniform) or of choice / kernel (jagged, unsorted). WRONG: relative error
above 6e-3 on a slice. "-" is the choice made without the variable.
"""

import argparse
import os
import re
import statistics
import time

import attn_bench as bench
import torch

import ikbo

UNIFORM = "- 7 10 12 13"
KERNELS = {  # first pattern that matches
    "^L1024_s1_|^one|^D": "-",
    "^jag": "- 15 16 17",
    "^shuf": "- 12 13",
    "^L512": "- 12 13 18",
    "^L(2048|4096|8192|16384)": "- 9 12 13 19",
    "": UNIFORM,
}


def chosen(kernel):
    os.environ["IKBO_ATTENTION_KERNEL"] = "" if kernel == "-" else kernel


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--cases", default=".")
    p.add_argument("--rounds", type=int, default=7)
    a = p.parse_args()
    began = time.time()
    bench.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    torch.set_grad_enabled(False)
    backends = {k: bench.BACKENDS[k] for k in ("cudnn", "flash")}
    print("ikbo", ikbo.__file__)
    for name in (c for c in bench.CASES if re.search(a.cases, c)):
        torch.cuda.empty_cache()
        kernels = next(v for k, v in KERNELS.items() if re.search(k, name)).split()
        i = bench.Inputs(name)
        wrong = []
        for k in kernels:
            chosen(k)
            error = bench.check(i)
            if not error < 6e-3:
                wrong.append(f"{k} ({error:.2g})")
        calls = {}
        for k in kernels:
            def ours(j, k=k):
                chosen(k)
                return j.ikbo()
            calls[k] = ours
        if not i.kind:
            bench.BACKENDS = backends if re.search("_s1_", name) else {"cudnn": backends["cudnn"]}
            for peer, backend in bench.BACKENDS.items():
                def theirs(j, backend=backend):
                    with bench.sdpa_kernel(backend):
                        return j.sdpa()
                calls[peer] = theirs
        torch.cuda.synchronize()
        first = min(bench.timed(lambda: calls["-"](i)) for _ in range(3))
        for call in calls.values():
            call(i)
        if first > 200:
            made = {n: lambda c=c: bench.timed(lambda: c(i)) for n, c in calls.items()}
        else:
            sets = [i]
            count = max(2, min(24, 100_000_000 // i.bytes + 1))
            sets += [bench.Inputs(name, s) for s in range(1, count)]
            made = {}
            for n, c in calls.items():
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for j in sets:
                        c(j)  # its result's memory is the next one's
                made[n] = lambda graph=graph: bench.timed(graph.replay) / len(sets)
        times = {n: [] for n in made}
        order = list(made)
        for _ in range(a.rounds):
            for n in order:
                times[n].append(min(made[n](), made[n]()))
            order = order[1:] + order[:1]
        us = {n: statistics.median(t) for n, t in times.items()}
        peers = [n for n in us if n in backends]
        yard = min(peers, key=us.get) if peers else "-"
        cells = [
            f"{n}: {us[n]:.1f} ({statistics.median(x / y for x, y in zip(times[yard], times[n])):.3f})"
            for n in kernels
        ]
        must = bench.CASES[name][7]
        head = f"{yard} {us[yard]:.1f}" if peers else ""
        print(f"{name:20} {head:13} must {must}  " + "  ".join(cells), flush=True)
        if i.kind == "jag":
            print(f"{'':20} TFLOP/s: " + "  ".join(f"{n}: {i.flop / us[n] / 1e6:.0f}" for n in kernels))
        if wrong:
            print(f"WRONG {name}: {', '.join(wrong)}", flush=True)
        del made
    print(f"{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
