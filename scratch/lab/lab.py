import ctypes, os, statistics, sys, time, torch
import torch.nn.functional as F
import ikbo, comp
from benchmarks.device_tests import COPY_ARGUMENTS, COPY_FORMS, function
from benchmarks.timing import CudaTimer, interleave
lib = ctypes.CDLL(sys.argv[1]); only = sys.argv[2] if len(sys.argv) > 2 else ""
lib.lab_names.restype = ctypes.c_char_p
lib.lab_run.argtypes = [ctypes.c_char_p] + [ctypes.c_void_p] * 4 + [ctypes.c_int64, ctypes.c_void_p]
timer = CudaTimer(); copy = function("copy", COPY_ARGUMENTS)
cases = {}
for line in lib.lab_names().decode().splitlines():
    *name, n, size, kind = line.split(" "); name = " ".join(name)
    cases.setdefault((name.split()[0]), []).append((name, int(n), int(size), kind))
t0 = time.time()
def nothing(): pass
with torch.inference_mode():
    for key in sorted(cases, key=lambda k: (k.split("_")[0], cases[k][0][2], cases[k][0][1])):
        if only and only != "all" and only not in key: continue
        n, size, kind = cases[key][0][1:]
        m = 131072 if n == 128 else 16384 if size == 4 else 32768
        if n == 32768: m = 16384
        dt = torch.float16 if key.endswith("H") else torch.float32 if size == 4 else torch.bfloat16
        count = max(2, min(32, 200_000_000 // (2 * m * n * size) + 1))
        if len(sys.argv) > 3: count = min(200, int(float(sys.argv[3]) * 1e9 / (2 * m * n * size)))
        sets = []
        for i in range(count):
            sets.append((torch.randn(m, n, dtype=dt, device="cuda"), torch.empty(m, n, dtype=dt, device="cuda"), torch.randn(n, dtype=dt, device="cuda"), torch.randn(n, dtype=dt, device="cuda")))
        x, y, w, b = sets[0]
        ref = F.rms_norm(x, (n,), w, 1e-6) if kind == "rms" else F.layer_norm(x, (n,), w, b, 1e-6)
        calls = {}
        def lab(name):
            def one(s):
                r = lib.lab_run(name.encode(), s[0].data_ptr(), s[1].data_ptr(), s[2].data_ptr(), s[3].data_ptr(), m, torch.cuda.current_stream().cuda_stream)
                assert r == 0, (name, r)
            return one
        bad = []
        for name, *_ in cases[key]:
            one = lab(name); y.fill_(float("nan")); one(sets[0]); torch.cuda.synchronize()
            err = ((y.float() - ref.float()).norm() / ref.float().norm()).item()
            if not err < 6e-3: bad.append((name, err)); continue
            calls[name] = one
        part = m * n * size
        for form in range(COPY_FORMS):
            calls[f"copy{form}"] = lambda s, f=form: copy(s[0].data_ptr(), None, s[1].data_ptr(), part, f)
        calls["ikbo"] = (lambda s: torch.ops.ikbo.rms_norm(s[0], s[2], None, 1e-6)) if kind == "rms" else (lambda s: torch.ops.ikbo.layer_norm(s[0], s[2], s[3], 1e-6))
        fn = comp.compiled(kind, n, dt) if "COMPILE" in os.environ else (lambda x, w, b: None)
        if "COMPILE" in os.environ: torch._dynamo.reset(); fn(x, w, b)
        else: fn = lambda x, w, b: copy(x.data_ptr(), None, sets[0][1].data_ptr(), m * n * size, 0)
        calls["compile"] = lambda s: fn(s[0], s[2], s[3])
        samplers = {k: timer.graph([lambda s=s, c=c: c(s) for s in sets], 2 if count < 30 else 1) for k, c in calls.items()}
        us = {k: statistics.median(v) for k, v in interleave(samplers, dict.fromkeys(samplers, 9 if count < 30 else 5)).items()}
        best = min(us[f"copy{f}"] for f in range(COPY_FORMS))
        print(f"## {key} M={m} copy {best:.2f} (form {[round(us[f'copy{f}'] / best, 3) for f in range(COPY_FORMS)]}) ikbo {us['ikbo']:.2f} {best / us['ikbo']:.3f} compile {us['compile']:.2f} {best / us['compile']:.3f} bad {bad} t {time.time() - t0:.0f}")
        for k in sorted((k for k in us if k[:4] not in ("copy", "ikbo", "comp")), key=us.get):
            print(f"   {best / us[k]:.3f} {us[k]:8.2f}  {k}")
        del sets, samplers, x, y, ref; torch.cuda.empty_cache()
