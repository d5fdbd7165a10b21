//! Widening stored floats to f32.
//!
//! Weights that are small and read every token (norms, biases) are widened once when a step is bound; the rest is
//! widened in registers by the kernel that reads it.

use super::multiversion::multiversion;
use crate::detect::Isa;
use doyen_tensor::{FloatType, FloatView};

/// `view` as f32, freshly allocated; for bind time.
pub fn widened(view: FloatView<'_>) -> Vec<f32> {
    let mut out = vec![0.0; view.len()];
    widen(Isa::detect())(view, &mut out);
    out
}

multiversion! {
    /// Writes the elements of a view as f32; the lengths must agree.
    pub fn widen(view: FloatView<'_>, out: &mut [f32]) = widen_body;
}

#[inline(always)]
fn widen_body<const FMA: bool>(view: FloatView<'_>, out: &mut [f32]) {
    assert_eq!(view.len(), out.len(), "widened length");
    let halves = view.bytes().as_chunks::<2>().0;
    match view.float_type() {
        FloatType::F32 => {
            for (o, b) in out.iter_mut().zip(view.bytes().as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        FloatType::BF16 => {
            for (o, b) in out.iter_mut().zip(halves) {
                *o = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            }
        }
        FloatType::F16 => {
            for (o, b) in out.iter_mut().zip(halves) {
                *o = widen_f16(u16::from_le_bytes(*b));
            }
        }
    }
}

/// f16 to f32 by bits, without a branch, so that it vectorises.
///
/// The magnitude's bits are moved to f32's place and the product with 2^112 corrects the exponent's bias, exactly and
/// for subnormals too; infinities and NaNs, which end up at 2^16 and above, get their exponent set in full.
#[inline(always)]
fn widen_f16(bits: u16) -> f32 {
    const BIAS: f32 = f32::from_bits((127 + 112) << 23);
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * BIAS;
    let special = if magnitude >= 65536.0 { 0x7f80_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | special | u32::from(bits & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn every_16_bit_pattern_widens_as_half_does() {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for isa in Isa::all() {
            let mut out = vec![0.0; 1 << 16];
            widen(isa)(FloatView::new(FloatType::F16, &all).unwrap(), &mut out);
            for (bits, &got) in (0..=u16::MAX).zip(&out) {
                let expected = f16::from_bits(bits).to_f32();
                assert!(
                    got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan()),
                    "{bits:04x}"
                );
            }
            widen(isa)(FloatView::new(FloatType::BF16, &all).unwrap(), &mut out);
            for (bits, &got) in (0..=u16::MAX).zip(&out) {
                let expected = bf16::from_bits(bits).to_f32();
                assert!(
                    got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan()),
                    "{bits:04x}"
                );
            }
        }
    }

    #[test]
    fn unaligned_f32() {
        let mut bytes = vec![0xff];
        bytes.extend([1.5f32, -0.0, 3e38].iter().flat_map(|v| v.to_le_bytes()));
        assert_eq!(widened(FloatView::new(FloatType::F32, &bytes[1..]).unwrap()), [1.5, -0.0, 3e38]);
    }
}
