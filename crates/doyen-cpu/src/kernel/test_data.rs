//! Data for kernel tests.

use doyen_tensor::FloatType;
use half::{bf16, f16};

/// `n` numbers in -1 .. 1 without pattern, the same for the same seed.
pub(crate) fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// `x` stored in a float type.
pub(crate) fn stored(ty: FloatType, x: &[f32]) -> Vec<u8> {
    match ty {
        FloatType::F32 => x.iter().flat_map(|v| v.to_le_bytes()).collect(),
        FloatType::F16 => x.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        FloatType::BF16 => x.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
    }
}
