//! Types whose 256 values have quantized scales of their own.
//!
//! A scale here is a float16 times an integer of at most 8 bits: at most 19 significant bits, exact in float32.

use super::{NON_LINEAR, Unpacked, half_at, nibbles};

/// 16 groups of 16: scale and minimum 4 bits each, codes 2 bits in planes of 32 bytes.
pub(super) fn q2_k(b: &[u8; 84], out: &mut Unpacked) {
    let (d, min) = (half_at(b, 80), half_at(b, 82));
    for &s in &b[..16] {
        out.scales.push(d * f32::from(s & 15));
        out.mins.push(-(min * f32::from(s >> 4)));
    }
    planes(&b[16..80], |q, _| q as i8, &mut out.codes);
}

/// 16 groups of 16: scale 6 bits around 32, codes 2 bits in planes and a third bit in a mask, around 4.
pub(super) fn q3_k(b: &[u8; 110], out: &mut Unpacked) {
    let d = half_at(b, 108);
    let packed = &b[96..108];
    for i in 0..16 {
        let low = packed[i % 8] >> (4 * (i / 8)) & 15;
        let high = packed[8 + i % 4] >> (2 * (i / 4)) & 3;
        out.scales.push(d * f32::from((low | high << 4) as i8 - 32));
    }
    // Value i of plane p has its third bit in bit p of byte i % 32.
    let third = |i: usize| b[i % 32] >> (i / 32) & 1;
    planes(&b[32..96], |q, i| (q | third(i) << 2) as i8 - 4, &mut out.codes);
}

/// The 2-bit codes of 64 bytes, with the number of each value: a half of 128 values is four planes of one pair of bits
/// over 32 bytes.
fn planes(bytes: &[u8], code: impl Fn(u8, usize) -> i8, out: &mut Vec<i8>) {
    out.extend((0..256).map(|i| {
        let (half, plane, byte) = (i / 128, i % 128 / 32, i % 32);
        code(bytes[32 * half + byte] >> (2 * plane) & 3, i)
    }));
}

/// 8 groups of 32: scale and minimum 6 bits each, codes 4 bits.
pub(super) fn q4_k(b: &[u8; 144], out: &mut Unpacked) {
    scales_and_mins(b, out);
    for bytes in b[16..].chunks_exact(32) {
        nibbles(bytes, |q| q as i8, &mut out.codes);
    }
}

/// As [`q4_k`], with a fifth bit for each code: group g has it in bit g of 32 bytes.
pub(super) fn q5_k(b: &[u8; 176], out: &mut Unpacked) {
    scales_and_mins(b, out);
    let start = out.codes.len();
    for bytes in b[48..].chunks_exact(32) {
        nibbles(bytes, |q| q as i8, &mut out.codes);
    }
    for (i, code) in out.codes[start..].iter_mut().enumerate() {
        *code += ((b[16 + i % 32] >> (i / 32) & 1) << 4) as i8;
    }
}

/// Scale and minimum of 8 groups, 6 bits each in 12 bytes behind two float16 factors: the first four groups in the low
/// bits of bytes 0 to 7, the last four in the nibbles of bytes 8 to 11 with their upper two bits on top of bytes 0 to 7.
fn scales_and_mins(b: &[u8], out: &mut Unpacked) {
    let (d, min) = (half_at(b, 0), half_at(b, 2));
    let p = &b[4..16];
    for g in 0..8 {
        let (s, m) = if g < 4 {
            (p[g] & 63, p[g + 4] & 63)
        } else {
            (p[g + 4] & 15 | (p[g - 4] >> 6) << 4, p[g + 4] >> 4 | (p[g] >> 6) << 4)
        };
        out.scales.push(d * f32::from(s));
        out.mins.push(-(min * f32::from(m)));
    }
}

/// 16 groups of 16: scale a signed byte, codes 4 low bits and 2 high bits in planes, around 32.
pub(super) fn q6_k(b: &[u8; 210], out: &mut Unpacked) {
    let (low, high, scales, d) = (&b[..128], &b[128..192], &b[192..208], half_at(b, 208));
    out.scales.extend(scales.iter().map(|&s| d * f32::from(s as i8)));
    out.codes.extend((0..256).map(|i| {
        // A half of 128 values is four runs of 32; runs 0 and 2 share bytes, as do 1 and 3.
        let (half, run, l) = (i / 128, i % 128 / 32, i % 32);
        let four = low[64 * half + 32 * (run % 2) + l] >> (4 * (run / 2)) & 15;
        let two = high[32 * half + l] >> (2 * run) & 3;
        (four | two << 4) as i8 - 32
    }));
}

/// 8 groups of 32: scale 6 bits around 32, codes 4 bits that choose from a table.
pub(super) fn iq4_xs(b: &[u8; 136], out: &mut Unpacked) {
    let d = half_at(b, 0);
    let high = u16::from_le_bytes([b[2], b[3]]);
    for g in 0..8 {
        let low = b[4 + g / 2] >> (4 * (g % 2)) & 15;
        let scale = low | ((high >> (2 * g) & 3) as u8) << 4;
        out.scales.push(d * f32::from(scale as i8 - 32));
    }
    for bytes in b[8..].chunks_exact(16) {
        nibbles(bytes, |q| NON_LINEAR[usize::from(q)], &mut out.codes);
    }
}
