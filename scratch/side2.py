import statistics, sys, torch, ikbo
from benchmarks.device_tests import COPY_ARGUMENTS, function
from benchmarks.timing import CudaTimer, interleave
timer = CudaTimer(); copy = function("copy", COPY_ARGUMENTS); bf = torch.bfloat16
mm_a = torch.randn(8192, 4096, dtype=bf, device="cuda"); mm_b = torch.randn(4096, 4096, dtype=bf, device="cuda"); mm_c = torch.mm(mm_a, mm_b)
with torch.inference_mode():
    for kind, m, n in (("rms", 32768, 4096), ("ln", 32768, 1024), ("rms", 8192, 131072)):
        sets = [torch.randn(m, n, dtype=bf, device="cuda") for _ in range(6 if n > 9999 else 12)]; w = torch.randn(n, dtype=bf, device="cuda")
        norm = (lambda x: torch.ops.ikbo.rms_norm(x, w, None, 1e-6)) if kind == "rms" else (lambda x: torch.ops.ikbo.layer_norm(x, w, w, 1e-6))
        calls = {"norm": norm}
        for mb, times in ((12, 5), (20, 5), (0, 1)):
            a, b = (torch.randint(255, (max(mb, 1) << 20,), dtype=torch.uint8, device="cuda") for _ in range(2))
            def after(mb=mb, times=times, a=a, b=b):
                if not mb: torch.mm(mm_a, mm_b, out=mm_c); return
                for _ in range(times): copy(a.data_ptr(), None, b.data_ptr(), mb << 20, 0)
            calls[f"{times}x{mb}"] = lambda x, after=after: after()
            calls[f"norm+{times}x{mb}"] = lambda x, after=after: (norm(x), after())
        samplers = {k: timer.graph([lambda s=s, c=c: c(s) for s in sets], 2) for k, c in calls.items()}
        us = {k: statistics.median(v) for k, v in interleave(samplers, dict.fromkeys(samplers, 7)).items()}
        print(f"{sys.argv[1]:6} {kind} {m}x{n} norm {us['norm']:.2f}  behind it:", "  ".join(f"{k} {us['norm+' + k] - us['norm']:.2f} (alone {us[k]:.2f})" for k in us if "norm" not in k), flush=True)
        del sets, samplers; torch.cuda.empty_cache()
