"""Translates a CUDA file of this repository into C++ for the host: inline PTX into calls of lanes.h, shared memory into
static arrays, and a wrapper for every kernel.

Usage: translate.py FILE HEADER OUT
"""

import re
import sys

# What an instruction becomes, by the beginning of its text; the first match counts.
INSTRUCTIONS = [
    ("cvt.f32.f16 ", "f = half_value(h);"),
    ("cvt.rn.f16.f32 ", "h = to_half(f);"),
    ("cvt.rn.bf16.f32 ", "h = to_brain(f);"),
    ("cvt.rn.f16x2.f32 ", "d = to_half(lo) | (u32)to_half(hi) << 16;"),
    ("cvt.rn.bf16x2.f32 ", "d = to_brain(lo) | (u32)to_brain(hi) << 16;"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.f16.", "emulated_mma<false>(c, a, b0, b1);"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.", "emulated_mma<true>(c, a, b0, b1);"),
    ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 ", "emulated_ldmatrix4(r, address);"),
    ("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 ", "emulated_ldmatrix4_transposed(r, address);"),
    ("ex2.approx.ftz.f32 ", "y = exp2f(x);"),
    ("rcp.approx.ftz.f32 ", "y = 1.f / x;"),
    ("cp.async.cg.shared.global [%0], [%1], 16, %2", "if (live) memcpy(at_shared(to), from, 16); else memset(at_shared(to), 0, 16);"),
    ("cp.async.cg.shared.global [%0], [%1], 16;", "memcpy(to, from, 16);"),
    ("fma.rn.f16x2 ", "d = to_half((double)half_value(a) * half_value(b) + half_value(c)) | "
     "(u32)to_half((double)half_value(a >> 16) * half_value(b >> 16) + half_value(c >> 16)) << 16;"),
    ("fma.rn.bf16x2 ", "d = to_brain((double)brain_value(a) * brain_value(b) + brain_value(c)) | "
     "(u32)to_brain((double)brain_value(a >> 16) * brain_value(b >> 16) + brain_value(c >> 16)) << 16;"),
    ("lop3.b32 ", "d = (v & mask) | base;"),
    ("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 ", "memcpy(v, p, 16);"),
    ("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 ", "memcpy(v, p, 8);"),
    ("mbarrier.init.", "emulated_barrier_init(at, count);"),
    ("mbarrier.arrive.expect_tx.", "emulated_barrier_expect(at, bytes);"),
    ("mbarrier.arrive.", "emulated_barrier_arrive(at);"),
    (r"{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.", "passed = emulated_barrier_passed(at, parity);"),
    (r"{\n\t.reg .pred p;\n\telect.sync ", "is = threadIdx.x % 32 == 0;"),
    ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes ",
     "memcpy(at_shared(to), from, bytes), emulated_barrier_complete(at, bytes);"),
    # Blocks run one after the other: a cluster of several has no emulation.
    ("mapa.shared::cluster.", "if (block) abort(); there = address;"),
    ("ld.shared::cluster.", "memcpy(&v, at_shared(there), 4);"),
]
# Copies are done and writes seen at once, launches run one after the other.
NOTHING = ("cp.async.commit", "cp.async.wait", "fence.", "griddepcontrol.", "prefetch.", "barrier.cluster.",
           "wgmma.fence", "wgmma.commit", "wgmma.wait")


def instruction(text: str) -> str:
    words = re.search(r'"([^"]*)"', text)[1]
    if not words or words.startswith(NOTHING):
        return ";"
    for begins, becomes in INSTRUCTIONS:
        if words.startswith(begins):
            return becomes
    raise SystemExit(f"the emulator does not know {words!r}: teach it in translate.py and lanes.h")


def translate(text: str) -> str:
    text = re.sub(r"#define WGMMA\(N, A, B, TYPE\).*?(?=\ntemplate <>)",
                  "#define WGMMA(N, A, B, TYPE) emulated_wgmma<N>(c, a, b, TYPE[0] == 'b')\n", text, flags=re.S)
    out, at = [], 0
    for found in re.finditer(r"\basm(?: volatile)?\(", text):
        end = text.index(");", found.end()) + 2
        out += [text[at:found.start()], instruction(text[found.start():end])]
        at = end
    text = "".join(out) + text[at:]
    text = re.sub(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];", r"\1* \2 = (\1*)lanes::shared;", text)
    return re.sub(r"#pragma (unroll.*|once)", "", text.replace("__shared__", "static"))


def main() -> None:
    source, header, out = sys.argv[1:]
    text = translate(open(source).read())
    kernels = re.findall(r"__global__ void __launch_bounds__\([^)]*\) (\w+)\(const __grid_constant__ (\w+) p\)", text)
    text = re.sub(r'extern "C" __global__ void __launch_bounds__\([^)]*\)', "static void", text)
    wrappers = [
        f'extern "C" __attribute__((visibility("default"))) unsigned emulated_size_{name}() {{ return sizeof({params}); }}\n'
        f'extern "C" __attribute__((visibility("default"))) void emulated_run_{name}(const void* p, const unsigned* grid, '
        f"const unsigned* block) {{\n"
        f"    lanes::run([](const void* p) {{ {name}(*(const {params}*)p); }}, p, grid, block);\n}}\n"
        for name, params in kernels
    ]
    text = text.replace('#include "doyen.cuh"', translate(open(header).read()))
    with open(out, "w") as file:
        file.write('#include "lanes.h"\n' + text + "\n" + "".join(wrappers))


if __name__ == "__main__":
    main()
