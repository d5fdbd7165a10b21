//! Int8 activations in portable Rust: the judge of the vector kernels.

use super::lane_sum;
use crate::kernel::{
    linear::{Columns, LANES, tiles},
    quantize::{GROUP, Int8Row, Prepared, place},
};
use doyen_tensor::{
    FloatView,
    format::{Bits, MiniMatrix, mini::E2M1_DOUBLED},
};
use std::ops::Range;

/// Prepared rows of activations that a row of weights meets at a time.
const BATCH: usize = 8;

/// Rows of a matrix of E2M1 times prepared tokens.
pub(super) fn rows(
    w: &MiniMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    let terms = acts.layout().terms();
    let at = Int8Row::new(w.cols, w.scales.block(w.cols), GROUP);
    for n in out.range() {
        for batch in tiles(0..acts.rows(), BATCH) {
            let mut sums = [[0f32; LANES]; BATCH];
            for (g, cols) in groups(w).enumerate() {
                let weights = decoded(w, n, &cols);
                let scale = w.scale(n, cols.start / w.scales.block(w.cols));
                for (t, lanes) in batch.clone().zip(&mut sums) {
                    let row = acts.row(t);
                    let word = &row[at.scales + 4 * g..][..4];
                    let scale_a = f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                    let dot: i32 = cols
                        .clone()
                        .zip(&weights)
                        .map(|(k, &w)| i32::from(w) * i32::from(row[place(Bits::B4, k)] as i8))
                        .sum();
                    let lane = &mut lanes[g % LANES];
                    *lane = (dot as f32).mul_add(scale * scale_a, *lane);
                }
            }
            for (t, lanes) in batch.clone().zip(&sums) {
                let bias = bias.filter(|_| t.is_multiple_of(terms)).map_or(0.0, |b| b.get(n));
                // Codes stand for twice their value.
                out.put(t, terms, n..n + 1, &[lane_sum(lanes) * (0.5 * w.global) + bias]);
            }
        }
    }
}

/// The columns of each group: blocks are cut into runs of at most [`GROUP`].
fn groups(w: &MiniMatrix<'_>) -> impl Iterator<Item = Range<usize>> {
    tiles(0..w.cols, w.scales.block(w.cols)).flat_map(|block| tiles(block, GROUP))
}

/// Twice the values of some columns of a row.
fn decoded(w: &MiniMatrix<'_>, n: usize, cols: &Range<usize>) -> [i8; GROUP] {
    let mut out = [0; GROUP];
    for (out, k) in out.iter_mut().zip(cols.clone()) {
        *out = E2M1_DOUBLED[usize::from(w.code(n, k))];
    }
    out
}
