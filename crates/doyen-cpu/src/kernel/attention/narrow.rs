//! New rows on their way into a store: f32 to the stored type.

use super::store::{KvScales, KvType};
use crate::kernel::multiversion::multiversion;

/// `narrow(type, x, scales of the head, out)`, one row.
pub(super) type Narrow = fn(KvType, &[f32], KvScales<'_>, &mut [u8]);

multiversion! {
    pub(super) fn narrow(ty: KvType, x: &[f32], scales: KvScales<'_>, out: &mut [u8]) = narrow_body;
}

#[inline(always)]
fn narrow_body<const FMA: bool>(ty: KvType, x: &[f32], scales: KvScales<'_>, out: &mut [u8]) {
    let scale = |i: usize| match scales {
        KvScales::Tensor(s) => s,
        KvScales::Channel(s) => s[i],
    };
    // The cast of NaN is 0: who appends keeps note of such rows.
    let code = |i: usize, lo: f32, hi: f32| (x[i] / scale(i)).round_ties_even().clamp(lo, hi) as i8;
    match ty {
        KvType::F32 => {
            for (o, x) in out.as_chunks_mut().0.iter_mut().zip(x) {
                *o = x.to_le_bytes();
            }
        }
        KvType::F16 => {
            for (o, &x) in out.as_chunks_mut().0.iter_mut().zip(x) {
                *o = f16_bits(x).to_le_bytes();
            }
        }
        KvType::BF16 => {
            for (o, &x) in out.as_chunks_mut().0.iter_mut().zip(x) {
                *o = bf16_bits(x).to_le_bytes();
            }
        }
        KvType::Int8 => {
            for (i, o) in out.iter_mut().enumerate() {
                *o = code(i, -128.0, 127.0) as u8;
            }
        }
        KvType::Int4 => {
            for (i, o) in out.iter_mut().enumerate() {
                let nibble = |i| (code(i, -8.0, 7.0) + 8) as u8;
                *o = nibble(2 * i) | nibble(2 * i + 1) << 4;
            }
        }
    }
}

/// f32 to f16 without a branch, so that it vectorises. To nearest, ties to even; what is beyond the largest f16 becomes
/// infinite, so that it shows; NaN stays one.
///
/// Adding the power of two whose last place is f16's at this magnitude rounds there (at 2^-14 and below, that of
/// subnormals). The result is exact in f16; its product with 2^-112 has f16's exponent, at f32's place.
#[inline(always)]
fn f16_bits(x: f32) -> u16 {
    // Has the exponent that f16's infinities have.
    const INFINITE: f32 = 65536.0;
    const SMALLEST_NORMAL: u32 = 127 - 14;
    const BIAS: f32 = f32::from_bits((127 - 112) << 23);
    let a = x.abs();
    let a = if a > INFINITE { INFINITE } else { a };
    let exponent = (a.to_bits() >> 23).max(SMALLEST_NORMAL);
    let place = f32::from_bits((exponent + 13) << 23);
    let rounded = (a + place) - place;
    ((rounded * BIAS).to_bits() >> 13) as u16 & 0x7fff | (x.to_bits() >> 16) as u16 & 0x8000
}

/// f32 to bf16, to nearest, ties to even; NaN stays one.
#[inline(always)]
fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let bits = if x.is_nan() { bits | 0x40_0000 } else { rounded };
    (bits >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detect::Isa;
    use half::{bf16, f16};
    use proptest::prelude::*;

    fn narrowed(isa: Isa, ty: KvType, x: &[f32]) -> Vec<u16> {
        let mut out = vec![0; 2 * x.len()];
        narrow(isa)(ty, x, KvScales::Tensor(1.0), &mut out);
        out.as_chunks().0.iter().map(|&b| u16::from_le_bytes(b)).collect()
    }

    fn same_as_half(x: &[f32]) {
        for isa in Isa::all() {
            let (h, b) = (narrowed(isa, KvType::F16, x), narrowed(isa, KvType::BF16, x));
            for (i, &x) in x.iter().enumerate() {
                let (got, near) = (f16::from_bits(h[i]), f16::from_f32(x));
                assert!(
                    got.to_bits() == near.to_bits() || (got.is_nan() && x.is_nan()),
                    "{x:e}: {got} {near}"
                );
                let (got, near) = (bf16::from_bits(b[i]), bf16::from_f32(x));
                assert!(
                    got.to_bits() == near.to_bits() || (got.is_nan() && x.is_nan()),
                    "{x:e}: {got} {near}"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn any_bits_narrow_as_half_does(bits in prop::collection::vec(any::<u32>(), 1..70)) {
            same_as_half(&bits.iter().map(|&b| f32::from_bits(b)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn every_f16_and_its_neighbours_narrow_as_half_does() {
        let mut x = Vec::new();
        for bits in 0..=u16::MAX {
            let v = f16::from_bits(bits).to_f32();
            // Itself, the middle to the next one, and what is just beside that.
            let middle = v.to_bits() + 0x1000;
            x.extend([v, f32::from_bits(middle - 1), f32::from_bits(middle), f32::from_bits(middle + 1)]);
            let tie = f32::midpoint(v, f16::from_bits(bits ^ 1).to_f32());
            x.extend([tie, f32::from_bits(tie.to_bits() + 1), f32::from_bits(tie.to_bits().wrapping_sub(1))]);
        }
        same_as_half(&x);
    }
}
