"""Writes the wgmma instructions: one specialisation of Wgmma per instruction.

The operand lists can't come from a template: inline PTX numbers every register. Usage:
generate_wgmma.py OUTPUT
"""

import pathlib
import sys

TYPES = {"__nv_bfloat16": "bf16", "__half": "f16"}
MAJORS = {"kK": 0, "kMn": 1}  # the transpose bit of the instruction


def instruction(ptx: str, n: int, a_is_register: bool, majors: tuple[int, int]) -> str:
    sums = n // 2
    accumulators = ", ".join(f"%{i}" for i in range(sums))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    if a_is_register:
        a = "{" + ", ".join(f"%{sums + i}" for i in range(4)) + "}"
        inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
        b, transposes = sums + 4, f"{majors[1]}"
    else:
        a, inputs = f"%{sums}", '"l"(a)'
        b, transposes = sums + 1, f"{majors[0]}, {majors[1]}"
    return (
        f'    asm volatile("{{\\n\\t.reg .pred p;\\n\\tsetp.ne.b32 p, %{b + 1}, 0;\\n\\t"\n'
        f'        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx}.{ptx} "\n'
        f'        "{{{accumulators}}}, {a}, %{b}, p, 1, 1, {transposes};\\n\\t}}"\n'
        f"        : {outputs}\n"
        f'        : {inputs}, "l"(b), "r"(static_cast<int>(add)));\n'
    )


def specialisation(ctype: str, ptx: str, n: int, major_a: str, major_b: str) -> str:
    majors = (MAJORS[major_a], MAJORS[major_b])
    body = (
        f"template <>\nstruct Wgmma<{ctype}, {n}, Major::{major_a}, Major::{major_b}> {{\n"
        f"  __device__ static void multiply(float (&d)[{n // 2}], uint64_t a, uint64_t b,"
        f" bool add) {{\n{instruction(ptx, n, False, majors)}  }}\n"
    )
    if major_a == "kK":
        body += (
            f"  __device__ static void multiply_registers(float (&d)[{n // 2}],"
            f" const uint32_t (&a)[4], uint64_t b, bool add) {{\n"
            f"{instruction(ptx, n, True, majors)}  }}\n"
        )
    return body + "};\n"


def main() -> None:
    lines = [
        "// Made by cmake/generate_wgmma.py.\n#pragma once\n\n#include <cuda_bf16.h>\n"
        "#include <cuda_fp16.h>\n\nnamespace ikbo::hopper {\n"
    ]
    for n in range(8, 257, 8):
        for ctype, ptx in TYPES.items():
            for major_a in MAJORS:
                for major_b in MAJORS:
                    lines.append(specialisation(ctype, ptx, n, major_a, major_b))
    lines.append("}  // namespace ikbo::hopper\n")
    output = pathlib.Path(sys.argv[1])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
