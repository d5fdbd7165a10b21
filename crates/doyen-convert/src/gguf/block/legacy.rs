//! Types with one scale a block of 32.

use super::{NON_LINEAR, Unpacked, half_at, nibbles};

/// float16 scale, 16 bytes of nibbles around 8.
pub(super) fn q4_0(b: &[u8; 18], out: &mut Unpacked) {
    out.scales.push(half_at(b, 0));
    nibbles(&b[2..], |q| q as i8 - 8, &mut out.codes);
}

/// float16 scale and minimum, 16 bytes of nibbles.
pub(super) fn q4_1(b: &[u8; 20], out: &mut Unpacked) {
    out.scales.push(half_at(b, 0));
    out.mins.push(half_at(b, 2));
    nibbles(&b[4..], |q| q as i8, &mut out.codes);
}

/// float16 scale, a fifth bit for each of 32 codes, 16 bytes of nibbles around 16.
pub(super) fn q5_0(b: &[u8; 22], out: &mut Unpacked) {
    out.scales.push(half_at(b, 0));
    fives(&b[2..6], &b[6..], -16, &mut out.codes);
}

/// float16 scale and minimum, a fifth bit for each of 32 codes, 16 bytes of nibbles.
pub(super) fn q5_1(b: &[u8; 24], out: &mut Unpacked) {
    out.scales.push(half_at(b, 0));
    out.mins.push(half_at(b, 2));
    fives(&b[4..8], &b[8..], 0, &mut out.codes);
}

fn fives(high: &[u8], low: &[u8], shift: i8, out: &mut Vec<i8>) {
    let start = out.len();
    nibbles(low, |q| q as i8, out);
    for (i, code) in out[start..].iter_mut().enumerate() {
        let fifth = high[i / 8] >> (i % 8) & 1;
        *code += (fifth << 4) as i8 + shift;
    }
}

/// float16 scale, 32 signed bytes.
pub(super) fn q8_0(b: &[u8; 34], out: &mut Unpacked) {
    out.scales.push(half_at(b, 0));
    out.codes.extend(b[2..].iter().map(|&q| q as i8));
}

/// float16 scale, 16 bytes of nibbles that choose from a table.
pub(super) fn iq4_nl(b: &[u8; 18], out: &mut Unpacked) {
    out.scales.push(half_at(b, 0));
    nibbles(&b[2..], |q| NON_LINEAR[usize::from(q)], &mut out.codes);
}

/// Power-of-two scale, 16 bytes of 4-bit floats (e2m1). Codes are twice the floats, and the scale is half of
/// `2^(exponent - 127)`.
pub(super) fn mxfp4(b: &[u8; 17], out: &mut Unpacked) {
    const TWICE: [i8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
    // Below 2^-126 the exponent field is 0 and the mantissa's highest bits take over.
    let scale = match b[0] {
        0 => 0x0020_0000,
        1 => 0x0040_0000,
        e => u32::from(e - 1) << 23,
    };
    out.scales.push(f32::from_bits(scale));
    let code = |q: u8| if q < 8 { TWICE[usize::from(q)] } else { -TWICE[usize::from(q - 8)] };
    nibbles(&b[1..], code, &mut out.codes);
}
