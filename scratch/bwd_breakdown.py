"""Per-kernel durations (CUPTI) of the norms' backward, rotating buffers, median of 20."""
import statistics, sys, collections, math
import torch, ikbo
ops = torch.ops.ikbo
SHAPES = [(131072,128),(32768,256),(32768,384),(32768,512),(32768,768),(32768,1024),(32768,2048),(32768,4096),(32768,8192),(1024,12288),(32768,32768),(8192,131072),(4096,262144),(8,8192),(128,4096)]
def name(k):
    for key in ("finish", "clear", "backward_loose", "backward", "looped"):
        if key in k: return key
    return k[:40]
for M, N in SHAPES:
    sets = max(1, min(64, math.ceil(2e8 / (M * N * 6))))
    for layer in (False, True):
        data = []
        for _ in range(sets):
            x, g = (torch.randn(M, N, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            w, b = (torch.randn(N, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            if layer:
                _, mean, rstd = ops.layer_norm_fwd(x, w, b, 1e-6)
                data.append(lambda x=x, g=g, w=w, b=b, m=mean, r=rstd: ops.layer_norm_bwd(g, x, w, b, m, r, 0.0, 1, 0b111))
            else:
                _, rstd = ops.rms_norm_fwd(x, w, None, 1e-6)
                data.append(lambda x=x, g=g, w=w, r=rstd: ops.rms_norm_bwd(g, x, w, None, r, 0.0, 1, 0b11))
        for f in data: f()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
            for i in range(20):
                data[i % sets]()
            torch.cuda.synchronize()
        t = collections.defaultdict(list); span = []
        evs = sorted((e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start)
        for e in evs: t[name(e.name)].append(e.time_range.end - e.time_range.start)
        mains = [e for e in evs if "backward" in e.name]; fins = [e for e in evs if "finish" in e.name]
        tail = [f.time_range.end - m.time_range.end for m, f in zip(mains, fins)]
        print(f"{'ln' if layer else 'rms'} {M}x{N}: " + "  ".join(f"{k} {statistics.median(v):.2f}" for k, v in t.items()) + f"  finish ends after main by {statistics.median(tail):.2f}", flush=True)
        del data
