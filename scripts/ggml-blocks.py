"""Makes crates/doyen-convert/tests/data/ggml-blocks.gguf: a block or a few of every quantized type that is read, of random
bits, and the values that the `gguf` package (https://pypi.org/project/gguf) makes of them.

    pip install gguf; python scripts/ggml-blocks.py crates/doyen-convert/tests/data/ggml-blocks.gguf
"""

import sys

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T, GGUFWriter, quants

# Where float16 numbers lie in a block: random bits there would be NaN, infinite or of absurd size.
HALVES = {
    T.Q4_0: [0],
    T.Q4_1: [0, 2],
    T.Q5_0: [0],
    T.Q5_1: [0, 2],
    T.Q8_0: [0],
    T.Q2_K: [80, 82],
    T.Q3_K: [108],
    T.Q4_K: [0, 2],
    T.Q5_K: [0, 2],
    T.Q6_K: [208],
    T.IQ4_NL: [0],
    T.IQ4_XS: [0],
    T.MXFP4: [],
}
COLUMNS = 256

rng = np.random.default_rng(1)
writer = GGUFWriter(sys.argv[1], "blocks")
for ty, halves in HALVES.items():
    values, size = GGML_QUANT_SIZES[ty]
    blocks = rng.integers(0, 256, (COLUMNS // values, size), dtype=np.uint8)
    for at in halves:
        numbers = rng.normal(0, 0.1, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    if ty == T.MXFP4:
        # The smallest exponents, which are no ordinary powers of two, and usual ones.
        blocks[:, 0] = [0, 1, 2, 100, 120, 127, 128, 140]
    row = blocks.reshape(1, -1)
    writer.add_tensor(ty.name, row, raw_dtype=ty)
    writer.add_tensor(f"{ty.name}.values", quants.dequantize(row, ty).astype(np.float32).reshape(1, COLUMNS))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
