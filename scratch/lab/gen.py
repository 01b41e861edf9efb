
out = []
def add(T, N, lanes, warps, vec, layer, regs, kx, kw, ky, pdl):
    kws = ["late", "early", "earlyL", "lateall", "lateL"][kw]
    out.append(f'  add<{T}, {lanes}, {warps}, {vec}, {str(layer).lower()}, {regs}, {kx}, {kw}, {ky}, {str(pdl).lower()}>("{"ln" if layer else "rms"}_{N}{T} w{warps} v{vec} r{regs} x{kx} {kws} y{ky} {"pdl" if pdl else "-"}");')
for layer in (False, True):
    for N, lanes, vec in ((256, 8, 4), (512, 16, 4), (768, 32, 3), (1024, 32, 4)):
        for kx in (5, 15, 25, 35, 45):
            for ky in (0, 1, 2):
                add("B", N, lanes, 2, vec, layer, 64 if not layer else 72, kx, 1, ky, True)
                if kx in (5, 15): add("B", N, lanes, 2, vec, layer, 64 if not layer else 72, kx, 0, ky, True)
        add("B", N, lanes, 1, vec, layer, 64, 5, 2, 0, False)
        add("B", N, lanes, 2, vec, layer, 64, 5, 2, 0, True)
    def over(T, N, packets):
        for kx in (5, 15, 25, 45):
            for ky in (0, 1, 2):
                if packets <= 64:
                    add(T, N, packets * 8, packets // 4, 4, layer, 64, kx, 0, ky, True)
                    add(T, N, packets * 16, packets // 2, 2, layer, 40, kx, 0 if layer else 1, ky, True)
                    if kx in (5, 15): add(T, N, packets * 16, packets // 2, 2, layer, 40, kx, 4, ky, True)
        v = 2 if packets <= 64 else 4
        for kx in (21, 11, 22, 1, 0):
            for ky in (0, 1, 2):
                add(T, N, 32 * packets // v, packets // v, v, layer, 32, kx, 4, ky, True)
        add(T, N, 32 * packets // v, packets // v, v, layer, 32, 21, 4, 0, False)
        add(T, N, 32 * packets // v, packets // v, v, layer, 32, 21, 3, 0, False)
    over("B", 4096, 16); over("B", 8192, 32); over("B", 16384, 64); over("B", 32768, 128); over("F", 4096, 32)
open("variants.inc", "w").write("\n".join(dict.fromkeys(out)) + "\n"); print(len(out))
