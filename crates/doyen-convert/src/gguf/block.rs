//! Blocks of quantized GGUF types, unpacked to codes, scales and minimums.
//!
//! Layouts follow the registry's block structs, all numbers little-endian. `value = scale * code + min`, in float32 and in
//! this order of operations, is what the format defines, so the values here are bitwise those of any other reader.

mod legacy;
mod super_block;

use super::types::GgmlType;
use half::f16;

/// Unpacked rows: one code a column, one scale (and minimum) a group.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Unpacked {
    /// Codes within [`super::types::Codes::range`].
    pub codes: Vec<i8>,
    /// Scales, exact in float32.
    pub scales: Vec<f32>,
    /// Minimums, exact in float32; empty for types without.
    pub mins: Vec<f32>,
    /// Zero points of the codes; empty for types without.
    pub zero_points: Vec<u8>,
}

impl Unpacked {
    /// The value of every column.
    pub fn values(&self, group: usize) -> impl Iterator<Item = f32> {
        self.codes.chunks(group).enumerate().flat_map(move |(g, codes)| {
            let scale = self.scales[g];
            let min = self.mins.get(g).copied();
            let zero = self.zero_points.get(g).copied();
            codes.iter().map(move |&q| {
                let steps = match zero {
                    None => f32::from(q),
                    Some(z) => f32::from(q.cast_unsigned()) - f32::from(z),
                };
                let product = scale * steps;
                min.map_or(product, |m| product + m)
            })
        })
    }
}

impl Unpacked {
    /// Rows of two matrices in turn, each of `cols` columns in `groups` groups, this one's first.
    #[must_use]
    pub fn interleaved(&self, other: &Self, (cols, groups): (usize, usize)) -> Self {
        fn zip<T: Copy>(a: &[T], b: &[T], n: usize) -> Vec<T> {
            a.chunks(n).zip(b.chunks(n)).flat_map(|(x, y)| [x, y].concat()).collect()
        }
        Self {
            codes: zip(&self.codes, &other.codes, cols),
            scales: zip(&self.scales, &other.scales, groups),
            mins: zip(&self.mins, &other.mins, groups),
            zero_points: zip(&self.zero_points, &other.zero_points, groups),
        }
    }
}

/// Appends the blocks in `bytes`, a whole number of them. Types without codes append nothing.
pub fn unpack(ty: GgmlType, bytes: &[u8], out: &mut Unpacked) {
    match ty {
        GgmlType::Q4_0 => each(bytes, |b| legacy::q4_0(b, out)),
        GgmlType::Q4_1 => each(bytes, |b| legacy::q4_1(b, out)),
        GgmlType::Q5_0 => each(bytes, |b| legacy::q5_0(b, out)),
        GgmlType::Q5_1 => each(bytes, |b| legacy::q5_1(b, out)),
        GgmlType::Q8_0 => each(bytes, |b| legacy::q8_0(b, out)),
        GgmlType::IQ4NL => each(bytes, |b| legacy::iq4_nl(b, out)),
        GgmlType::MXFP4 => each(bytes, |b| legacy::mxfp4(b, out)),
        GgmlType::Q2K => each(bytes, |b| super_block::q2_k(b, out)),
        GgmlType::Q3K => each(bytes, |b| super_block::q3_k(b, out)),
        GgmlType::Q4K => each(bytes, |b| super_block::q4_k(b, out)),
        GgmlType::Q5K => each(bytes, |b| super_block::q5_k(b, out)),
        GgmlType::Q6K => each(bytes, |b| super_block::q6_k(b, out)),
        GgmlType::IQ4XS => each(bytes, |b| super_block::iq4_xs(b, out)),
        GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 | GgmlType::F64 | GgmlType::Unread(_) => {}
    }
}

fn each<const N: usize>(bytes: &[u8], block: impl FnMut(&[u8; N])) {
    bytes.as_chunks::<N>().0.iter().for_each(block);
}

/// The float16 at `at`, which must lie in the block.
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The 16 code values of the non-linear 4-bit types.
const NON_LINEAR: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Appends two codes a byte: all low nibbles first, then the high ones.
fn nibbles(bytes: &[u8], code: impl Fn(u8) -> i8, out: &mut Vec<i8>) {
    out.extend(bytes.iter().map(|&b| code(b & 15)));
    out.extend(bytes.iter().map(|&b| code(b >> 4)));
}

#[cfg(test)]
mod tests;
