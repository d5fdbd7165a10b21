//! Float activations: a chunk of a row is decoded to f32, then meets the activations of a batch.

use super::{CHUNK, Piece, Sums, each_piece};
use crate::kernel::{linear::Columns, multiversion::multiversion, quantize::Prepared};
use doyen_tensor::{
    FloatView,
    format::{
        Element, MiniMatrix,
        mini::{E2M1_DOUBLED, e4m3},
    },
};

/// Values of a byte of two E2M1 codes.
static E2M1: [[f32; 2]; 256] = {
    let mut out = [[0.0; 2]; 256];
    let mut i = 0;
    while i < 256 {
        out[i] = [E2M1_DOUBLED[i & 15] as f32 * 0.5, E2M1_DOUBLED[i >> 4] as f32 * 0.5];
        i += 1;
    }
    out
};

/// Values of E4M3FN codes.
static E4M3: [f32; 256] = {
    let mut out = [0.0; 256];
    let mut i = 0;
    while i < 256 {
        out[i] = e4m3(i as u8);
        i += 1;
    }
    out
};

multiversion! {
    /// Rows of a matrix times prepared tokens, plainly laid out.
    pub fn rows(
        w: &MiniMatrix<'_>,
        acts: &Prepared<'_>,
        bias: Option<FloatView<'_>>,
        out: &mut Columns<'_>,
    ) = rows_body;
}

#[inline(always)]
fn rows_body<const FMA: bool>(
    w: &MiniMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    let mut row = [0f32; CHUNK];
    each_piece(w, acts, bias, out, w.global, |piece, r, batch, sums: &mut Sums| {
        decode(w.element, piece, &mut row);
        let row = &row[..piece.cols.len()];
        for (t, sums) in batch.zip(sums.iter_mut()) {
            let x = &acts.row(t)[4 * piece.cols.start..4 * piece.cols.end];
            add_dot(row, x, &mut sums[r]);
        }
    });
}

/// The values of a piece, its scales applied.
#[inline(always)]
fn decode(element: Element, piece: &Piece<'_>, row: &mut [f32; CHUNK]) {
    let row = &mut row[..piece.cols.len()];
    match element {
        Element::E2M1 => {
            for (pair, &byte) in row.chunks_mut(2).zip(piece.codes) {
                pair.copy_from_slice(&E2M1[usize::from(byte)][..pair.len()]);
            }
        }
        Element::E4M3 => {
            for (v, &byte) in row.iter_mut().zip(piece.codes) {
                *v = E4M3[usize::from(byte)];
            }
        }
    }
    let (mut rest, mut start) = (row, piece.cols.start);
    for scale in piece.scales {
        let end = (start / piece.block + 1) * piece.block;
        let len = rest.len();
        let (own, behind) = std::mem::take(&mut rest).split_at_mut((end - start).min(len));
        for v in own.iter_mut() {
            *v *= scale;
        }
        (rest, start) = (behind, end);
        if rest.is_empty() {
            return;
        }
    }
}

/// `lanes[c % 8] += row[c] * x[c]`.
#[inline(always)]
fn add_dot(row: &[f32], x: &[u8], lanes: &mut [f32; 8]) {
    let mut acc = *lanes;
    let (eights, rest) = row.as_chunks::<8>();
    let words = x.as_chunks::<4>().0;
    for (ws, xs) in eights.iter().zip(words.as_chunks::<8>().0) {
        for ((a, w), x) in acc.iter_mut().zip(ws).zip(xs) {
            *a = w.mul_add(f32::from_le_bytes(*x), *a);
        }
    }
    for ((a, w), x) in acc.iter_mut().zip(rest).zip(&words[8 * eights.len()..]) {
        *a = w.mul_add(f32::from_le_bytes(*x), *a);
    }
    *lanes = acc;
}
