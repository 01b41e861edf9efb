import os
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", "/tmp/inductor"); os.environ.setdefault("TRITON_CACHE_DIR", "/tmp/inductor/triton"); os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
import sys, torch
import torch.nn.functional as F
torch._dynamo.config.recompile_limit = 64
def rms(x, w, b): return F.rms_norm(x, w.shape, w, 1e-6)
def ln(x, w, b): return F.layer_norm(x, w.shape, w, b, 1e-6)
fns = {}
def compiled(kind, n, dt):
    key = kind, n, dt
    if key not in fns:
        torch._dynamo.reset() if False else None
        f = rms if kind == "rms" else ln
        fns[key] = torch.compile(f, dynamic=False)
    return fns[key]
if __name__ == "__main__":
    kind, m, n, dt = sys.argv[1].split("_"); m, n = int(m), int(n)
    dt = {"B": torch.bfloat16, "H": torch.float16, "F": torch.float32}[dt]
    with torch.inference_mode():
        x = torch.randn(m, n, dtype=dt, device="cuda"); w = torch.randn(n, dtype=dt, device="cuda")
        compiled(kind, n, dt)(x, w, w.clone()); torch.cuda.synchronize(); print("warm", sys.argv[1])
