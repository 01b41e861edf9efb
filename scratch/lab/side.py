"""What a kernel that reads with evict_last leaves behind: copies of 12 MB to 12 MB, five times, after each norm."""
import ctypes, statistics, sys, time, torch
from benchmarks.device_tests import COPY_ARGUMENTS, COPY_FORMS, function
from benchmarks.timing import CudaTimer, interleave
lib = ctypes.CDLL(sys.argv[1]); lib.lab_names.restype = ctypes.c_char_p
lib.lab_run.argtypes = [ctypes.c_char_p] + [ctypes.c_void_p] * 4 + [ctypes.c_int64, ctypes.c_void_p]
lib.lab_copy_run.argtypes = [ctypes.c_int] * 4 + [ctypes.c_void_p] * 3 + [ctypes.c_int64, ctypes.c_void_p]
lib.lab_names(); timer = CudaTimer(); copy = function("copy", COPY_ARGUMENTS)
m, n = 32768, 4096; bf = torch.bfloat16
sets = [(torch.randn(m, n, dtype=bf, device="cuda"), torch.empty(m, n, dtype=bf, device="cuda"), torch.empty(m, n, dtype=bf, device="cuda")) for _ in range(24)]
w = torch.randn(n, dtype=bf, device="cuda")
st = lambda: torch.cuda.current_stream().cuda_stream
# what is left behind
mm_a = torch.randn(8192, 4096, dtype=bf, device="cuda"); mm_b = torch.randn(4096, 4096, dtype=bf, device="cuda"); mm_c = torch.empty(8192, 4096, dtype=bf, device="cuda")
lib.lab_demote.argtypes = [ctypes.c_int64]
for mb, times in ((12, 5), (20, 5), (24, 1), (0, 0)):
    a, b = (torch.randint(255, (max(mb, 1) << 20,), dtype=torch.uint8, device="cuda") for _ in range(2))
    def after():
        if not mb: torch.mm(mm_a, mm_b, out=mm_c)
        for _ in range(times): copy(a.data_ptr(), None, b.data_ptr(), mb << 20, 0)
    calls = {}
    for name in ("x5 late y0", "x65 late y0", "w8 v2 r32 x21 lateL y0 -", "x65 late+A y0 0", "x65 late+A y0 24", "x65 late+A y0 48", "x65 late+A y0 64"):
        parts = name.split("+A y0 ")
        full = f"rms_4096B w4 v4 r64 {name} pdl".encode()
        demote = 0
        if "+A" in name: full = b"rms_4096B w4 v4 r64 x65 late+A y0 pdl"; demote = m - int(parts[1]) * (1 << 20) // (2 * n) if parts[1] != "0" else 0
        if "x21" in name: full = f"rms_4096B {name}".encode()
        def norm(s, f=full, d=demote):
            lib.lab_demote(d); assert lib.lab_run(f, s[0].data_ptr(), s[1].data_ptr(), w.data_ptr(), w.data_ptr(), m, st()) == 0
        def both(s, norm=norm): norm(s); after()
        calls[name + " alone"] = norm; calls[name + " + copies"] = both
    calls["copies alone"] = lambda s: after()
    samplers = {k: timer.graph([lambda s=s, c=c: c(s) for s in sets], 1) for k, c in calls.items()}
    us = {k: statistics.median(v) for k, v in interleave(samplers, dict.fromkeys(samplers, 5)).items()}
    print(f"{times} copies of {mb} MB alone {us['copies alone']:.2f}")
    for k in us:
        if k.endswith(" alone") and k != "copies alone": print(f"   {k[:-6]:16} norm {us[k]:.2f} copies behind it {us[k[:-6] + ' + copies'] - us[k]:.2f}")
