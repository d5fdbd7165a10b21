//! Int8 activations in portable Rust: the judge of the vector kernels.

use super::{Piece, each_piece};
use crate::kernel::{
    linear::{Columns, LANES},
    quantize::{GROUP, Int8Row, Prepared, place},
};
use doyen_tensor::{
    FloatView,
    format::{Bits, MiniMatrix, mini::E2M1_DOUBLED},
};

/// Columns that one multiplication of scales is for.
pub(super) const RUN: usize = 8;

/// Rows of a matrix of E2M1 times prepared tokens.
pub(super) fn rows(
    w: &MiniMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    let at = Int8Row::new(w.cols, w.scales.block(w.cols), GROUP);
    // Codes stand for twice their value.
    each_piece(w, acts, bias, out, 0.5 * w.global, |piece, r, batch, sums| {
        for (t, sums) in batch.zip(sums.iter_mut()) {
            add_piece(piece, &at, acts.row(t), &mut sums[r]);
        }
    });
}

fn add_piece(piece: &Piece<'_>, at: &Int8Row, acts: &[u8], lanes: &mut [f32; LANES]) {
    let group = piece.block.min(GROUP);
    for c in piece.cols.clone().step_by(RUN) {
        let dot: i32 = (c..(c + RUN).min(piece.cols.end))
            .map(|k| {
                let i = k - piece.cols.start;
                let code = piece.codes[i / 2] >> (4 * (i % 2)) & 15;
                i32::from(E2M1_DOUBLED[usize::from(code)]) * i32::from(acts[place(Bits::B4, k)] as i8)
            })
            .sum();
        let scale = piece.scales[c / piece.block - piece.cols.start / piece.block];
        let word = &acts[at.scales + 4 * (c / group)..][..4];
        let scale_a = f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
        let lane = &mut lanes[c / RUN % LANES];
        *lane = (dot as f32).mul_add(scale * scale_a, *lane);
    }
}
