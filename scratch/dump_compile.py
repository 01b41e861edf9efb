"""What torch.compile runs for forward norms: config of each kernel, and its files."""
import os, sys, glob, json, shutil, time
case = sys.argv[1]; out = sys.argv[2]
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"/tmp/ind_{case}"
os.environ["TRITON_CACHE_DIR"] = f"/tmp/ind_{case}/triton"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
import torch
import torch.nn.functional as F
from torch._inductor.runtime import triton_heuristics as th
kind, shape, dt = case.split("_")
M, N = map(int, shape.split("x")); dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dt]
x = torch.randn(M, N, dtype=dtype, device="cuda"); w = torch.randn(N, dtype=dtype, device="cuda"); b = torch.randn(N, dtype=dtype, device="cuda")
said = []
old = th.CachingAutotuner.run
def run(self, *a, **k):
    r = old(self, *a, **k)
    for l in self.launchers:
        said.append(f"{self.fn.__name__ if hasattr(self.fn,'__name__') else self.fn} {l.config} regs {getattr(l,'n_regs',None)} spills {getattr(l,'n_spills',None)} shared {getattr(l,'shared',None)}")
    said.append(f"  of {len(self.configs)} configs" if self.configs else "")
    return r
th.CachingAutotuner.run = run
with torch.inference_mode():
    f = torch.compile((lambda x, w, b: F.rms_norm(x, (N,), w, 1e-6)) if kind == "rms" else (lambda x, w, b: F.layer_norm(x, (N,), w, b, 1e-6)))
    f(x, w, b); torch.cuda.synchronize(); said.clear(); f(x, w, b); torch.cuda.synchronize()
print(case, said[:3], flush=True)
os.makedirs(out, exist_ok=True)
n = 0
for p in glob.glob(f"/tmp/ind_{case}/**/*", recursive=True):
    if os.path.isfile(p) and p.endswith((".py", ".best_config", ".cubin", ".json", ".ptx")):
        shutil.copy(p, f"{out}/{os.path.basename(os.path.dirname(p))[:6]}_{os.path.basename(p)}")
open(f"{out}/said.txt", "w").write("\n".join(said))
