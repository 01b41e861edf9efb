"""SM clock and power while a case replays: python clocks.py CASE... ; which is power-limited and what a step's clocks are."""
import subprocess, sys, time
import torch, ikbo
import attn_bench as b
torch.set_grad_enabled(False)
for case in sys.argv[1:]:
    i = b.Inputs(case)
    for name, call in (("ikbo", i.ikbo), ("sdpa", i.sdpa)):
        if i.kind and name == "sdpa": continue
        call(); torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for _ in range(50): call()
        s, e = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        t = time.time(); n = 0
        p = None
        s.record()
        while time.time() - t < 1.0:
            g.replay(); n += 50
            if p is None and time.time() - t > .3:
                p = subprocess.Popen("nvidia-smi --query-gpu=clocks.sm,power.draw.instant,clocks_event_reasons.active --format=csv,noheader", shell=True, stdout=subprocess.PIPE, text=True)
            torch.cuda.synchronize() if n % 500 == 0 else None
        e.record(); e.synchronize()
        print(f"{case:22} {name:5} {s.elapsed_time(e)*1e3/n:8.1f} us  {p.communicate()[0].strip()}", flush=True)
