import ctypes, os, torch
lib = ctypes.CDLL(os.path.join(os.path.dirname(os.path.abspath(__file__)), "libocc.so")); lib.scratch_occ.restype = ctypes.c_char_p
torch.zeros(1, device="cuda"); n = ctypes.c_int64()
for per in (1, 2):
    row = []
    for c in (1, 2, 3, 4, 5, 6, 7, 8, 16):
        e = lib.scratch_occ(ctypes.c_int64(c), ctypes.c_int64((228 // per - 1) * 1024), ctypes.byref(n)); row.append((c, n.value if not e else e))
    print("CTAs an SM", per, "clusters at once", row)
