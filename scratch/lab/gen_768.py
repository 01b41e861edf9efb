exec(open('gen.py').read().split("for layer in")[0])
for layer in (False, True):
    for N, lanes in (("768", 32), ("384", 16)):
        for warps in (2, 4):
            for kw in (0, 1):
                for regs in (48, 56, 64, 72):
                    add("B", N, lanes, warps, 3, layer, regs, 5, kw, 0, True)
open("variants.inc", "w").write("\n".join(dict.fromkeys(out)) + "\n"); print(len(out))
