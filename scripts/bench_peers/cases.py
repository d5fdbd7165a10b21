"""What is measured of single operators: shapes, formats, and the bytes and operations that a call cannot do without."""

from dataclasses import dataclass

# Random weights of about the size that trained ones have, so that activations keep their scale.
WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Format:
    """Block-quantized rows: codes of `bits` bits, one scale of `scale_bytes` bytes per `block` columns, no zero points."""

    bits: int
    block: int

    def row_bytes(self, columns: int, scale_bytes: int) -> int:
        return columns * self.bits // 8 + columns // self.block * scale_bytes

    def __str__(self):
        return f"{self.bits}/{self.block}"


@dataclass(frozen=True)
class QMoe:
    """A layer of experts with fused, interleaved SwiGLU: FC1 [2 I, H] and FC2 [H, I] for each expert."""

    format: Format
    tokens: int
    experts: int = 64
    top_k: int = 8
    hidden: int = 2048
    inter: int = 768

    op = "qmoe"

    @property
    def name(self):
        return f"QMoE {self.format} M={self.tokens}"

    def expert_bytes(self, scale_bytes: int) -> int:
        fc1 = 2 * self.inter * self.format.row_bytes(self.hidden, scale_bytes)
        return fc1 + self.hidden * self.format.row_bytes(self.inter, scale_bytes)

    def copy_bytes(self, scale_bytes: int) -> int:
        return self.experts * self.expert_bytes(scale_bytes)

    def flops(self) -> float:
        return 2.0 * self.tokens * self.top_k * 3 * self.inter * self.hidden

    @property
    def memory_bound(self):
        return self.tokens <= 8


@dataclass(frozen=True)
class MatMul:
    """MatMulNBits: y [M, N] = x [M, K] W^T."""

    format: Format
    tokens: int
    rows: int = 4096
    columns: int = 4096

    op = "matmulnbits"

    @property
    def name(self):
        return f"MatMulNBits {self.format} M={self.tokens}"

    def copy_bytes(self, scale_bytes: int) -> int:
        return self.rows * self.format.row_bytes(self.columns, scale_bytes)

    def flops(self) -> float:
        return 2.0 * self.tokens * self.rows * self.columns

    @property
    def memory_bound(self):
        return self.tokens <= 8


@dataclass(frozen=True)
class Attention:
    """GroupQueryAttention of the last `tokens` of `context` positions, keys and values in f32, no rotary embedding."""

    tokens: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128

    op = "gqa"

    @property
    def name(self):
        kind = "decode" if self.tokens == 1 else "prefill"
        return f"GroupQueryAttention {kind} {self.context}"

    def copy_bytes(self, _scale_bytes: int = 0) -> int:
        return 2 * self.kv_heads * self.context * self.head_size * 4

    def flops(self) -> float:
        visible = self.tokens * self.context - self.tokens * (self.tokens - 1) / 2
        return 4.0 * self.heads * self.head_size * visible

    @property
    def memory_bound(self):
        return self.tokens == 1


def operator_cases(quick: bool):
    """All cases, grouped so that a group shares its weights. `quick` keeps one of each kind."""
    tokens = [1, 128] if quick else [1, 8, 128, 512]
    formats = [(4, 32)] if quick else [(4, 32), (4, 128), (2, 32), (2, 128), (8, 32), (8, 128)]
    for bits, block in formats:
        yield [QMoe(Format(bits, block), m) for m in tokens]
    for bits in [4] if quick else [2, 4, 8]:
        yield [MatMul(Format(bits, 32), m) for m in ([1] if quick else [1, 512])]
    for context in [4096] if quick else [4096, 32768]:
        yield [Attention(1, context)]
    for context in [512] if quick else [512, 2048]:
        yield [Attention(context, context)]
