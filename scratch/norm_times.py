"""norm_times.py FILTER...: ikbo and the best copy (and compile, with COMPILE=1), medians; copy / ikbo, compile / ikbo"""
import os, sys, statistics, time, torch
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", "/tmp/inductor"); os.environ.setdefault("TRITON_CACHE_DIR", "/tmp/inductor/triton")
from benchmarks import ops
from benchmarks.cases import DTYPES
from benchmarks.timing import CudaTimer, measure
import dataclasses
t0 = time.time(); timer = CudaTimer()
keep = {"ikbo", "copy"} | ({"compile"} if "COMPILE" in os.environ else set())
for case in ops.cases("norms"):
    if not any(f in case.name for f in sys.argv[1:]): continue
    c = dataclasses.replace(case, contestants={k: v for k, v in case.contestants.items() if k in keep})
    for d in case.dtypes:
        rows = {r["impl"]: r for r in measure(c, d, torch.device("cuda"), timer, 9)}
        i = rows["ikbo"]
        said = f"{case.name:26} {d} ikbo {i.get('us')} {i.get('error', '')}"
        for k in keep - {"ikbo"}:
            r = rows[k]; said += f" {k} {r.get('us')} {r.get('ratio')} {r.get('error', '')}"
        print(said, flush=True)
    torch.cuda.empty_cache()
print(f"{time.time() - t0:.0f} s")
