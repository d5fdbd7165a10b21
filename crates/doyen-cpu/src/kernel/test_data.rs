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

/// A small deterministic generator: proptest shrinks its seed and the shapes, not thousands of numbers.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    /// Numbers in -1 ..= 1.
    pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (self.next() % 20001) as f32 / 10000.0 - 1.0).collect()
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

/// `x` stored in a float type.
pub(crate) fn stored(ty: FloatType, x: &[f32]) -> Vec<u8> {
    match ty {
        FloatType::F32 => x.iter().flat_map(|v| v.to_le_bytes()).collect(),
        FloatType::F16 => x.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        FloatType::BF16 => x.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
    }
}

/// erfc in f64: the series of erf near zero, a continued fraction in the tail.
pub(crate) fn erfc64(x: f64) -> f64 {
    if x < 0.0 {
        return 2.0 - erfc64(-x);
    }
    if x < 2.5 {
        let (mut term, mut sum) = (x, x);
        for k in 1..200 {
            term *= -x * x / f64::from(k);
            sum += term / f64::from(2 * k + 1);
        }
        return 1.0 - std::f64::consts::FRAC_2_SQRT_PI * sum;
    }
    let mut f = x;
    for k in (1..200).rev() {
        f = x + f64::from(k) / 2.0 / f;
    }
    (-x * x).exp() / f / std::f64::consts::PI.sqrt()
}
