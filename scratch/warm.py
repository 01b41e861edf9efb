"""warm.py I N: compiles every N-th case's compiled contestants once, so that the compiler's cache holds them."""
import sys, time, torch
from benchmarks import ops
from benchmarks.cases import DTYPES, Draw
i, n = int(sys.argv[1]), int(sys.argv[2])
work = [("models", c, "bf16") for c in ops.cases("models")] + [("norms", c, d) for c in ops.cases("norms") for d in c.dtypes]
with torch.inference_mode():
    for op, case, dtype in work[i::n]:
        t = time.perf_counter(); said = []
        inputs = case.inputs(Draw(torch.device("cuda"), DTYPES[dtype]))
        for impl, maker in case.contestants.items():
            if op == "norms" and impl != "compile": continue
            try:
                torch._dynamo.reset()
                maker(inputs)(); torch.cuda.synchronize(); said.append(impl)
            except Exception as e:
                said.append(f"{impl} {type(e).__name__}: {str(e)[:200]}")
        del inputs; torch.cuda.empty_cache()
        print(f"warm {op} {case.name} {dtype} {said} {time.perf_counter() - t:.1f} s", flush=True)
