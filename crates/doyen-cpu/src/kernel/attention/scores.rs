//! Register tiles of scores: some query rows against four keys at a time.

use super::{
    SPLIT,
    element::Element,
    lanes::Lanes,
    panel::{Ahead, PAD, Scores, tile_rows, with_rows},
};

/// Keys whose scores are summed up together.
const KEYS: usize = 4;

/// # Safety
/// The machine has the instruction set of `L`; the lengths of `s` were checked.
#[inline(always)]
pub(super) unsafe fn scores_all<L: Lanes, E: Element>(s: Scores<'_>) {
    let Scores { q, rows, d, k, keys, ahead, out } = s;
    let tiles = rows.div_ceil(L::ROWS);
    let mut ahead = Ahead::new(ahead, tiles * (keys / KEYS) * (d / L::LANES));
    let pitch = d.next_multiple_of(PAD);
    let mut row = 0;
    while row < rows {
        let taken = tile_rows::<L>(rows - row);
        let (q, out) = (q[row * pitch..].as_ptr(), out[row * SPLIT..].as_mut_ptr());
        // SAFETY: rows `row .. row + taken` of queries and scores; at most L::ROWS <= 4 of them.
        unsafe { with_rows!(taken, score_tile::<L, E>(q, d, k.as_ptr(), keys, out, &mut ahead)) }
        row += taken;
    }
}

/// Scores of `R` rows.
///
/// # Safety
/// `q [R, d]` in rows padded to `PAD`, `k` has `keys` rows of `d`, and `out` room for `keys` in `R` rows.
#[inline(always)]
unsafe fn score_tile<L: Lanes, E: Element, const R: usize>(
    q: *const f32,
    d: usize,
    k: *const u8,
    keys: usize,
    out: *mut f32,
    ahead: &mut Ahead,
) {
    let row = E::bytes(d);
    let mut j = 0;
    while j + KEYS <= keys {
        // SAFETY: keys j .. j + KEYS are there, and so is the room for their scores.
        unsafe {
            let acc = dots::<L, E, R, KEYS>(q, d, k.add(j * row), ahead);
            for (r, &acc) in acc.iter().enumerate() {
                L::sum4(acc, out.add(r * SPLIT + j));
            }
        }
        j += KEYS;
    }
    while j < keys {
        // SAFETY: key j is there, and so is the room for its scores.
        unsafe {
            let acc = dots::<L, E, R, 1>(q, d, k.add(j * row), ahead);
            for (r, &[acc]) in acc.iter().enumerate() {
                *out.add(r * SPLIT + j) = L::sum(acc);
            }
        }
        j += 1;
    }
}

/// Lane-wise products of `R` queries with `K` keys.
///
/// # Safety
/// `q [R, d]` in rows padded to `PAD`, `k [K, d]`.
#[allow(clippy::needless_range_loop, reason = "a register tile has two indices")]
#[inline(always)]
unsafe fn dots<L: Lanes, E: Element, const R: usize, const K: usize>(
    q: *const f32,
    d: usize,
    k: *const u8,
    ahead: &mut Ahead,
) -> [[L::V; K]; R] {
    let (pitch, row) = (d.next_multiple_of(PAD), E::bytes(d));
    // SAFETY: whole vectors up to `whole`; then `d - whole` numbers of the keys and padding of the queries.
    unsafe {
        let mut acc = [[L::zero(); K]; R];
        let mut x = [L::zero(); R];
        let whole = d / L::LANES * L::LANES;
        let mut c = 0;
        while c < whole {
            ahead.step::<L>();
            for (r, x) in x.iter_mut().enumerate() {
                *x = L::load(q.add(r * pitch + c));
            }
            for j in 0..K {
                let y = E::load::<L>(k.add(j * row + E::bytes(c)));
                for r in 0..R {
                    acc[r][j] = L::fma(x[r], y, acc[r][j]);
                }
            }
            c += L::LANES;
        }
        if whole < d {
            for j in 0..K {
                let y = rest::<L, E>(k.add(j * row + E::bytes(whole)), d - whole);
                for (r, acc) in acc.iter_mut().enumerate() {
                    acc[j] = L::fma(L::load(q.add(r * pitch + whole)), y, acc[j]);
                }
            }
        }
        acc
    }
}

/// `n` numbers and zeros.
///
/// # Safety
/// There are `n < L::LANES` numbers at `p`.
#[inline(always)]
pub(super) unsafe fn rest<L: Lanes, E: Element>(p: *const u8, n: usize) -> L::V {
    let mut x = [0.0; PAD];
    // SAFETY: the caller's promise; a buffer of PAD numbers has all lanes.
    unsafe {
        let row = std::slice::from_raw_parts(p, E::bytes(n));
        for (i, x) in x.iter_mut().enumerate().take(n) {
            *x = E::get(row, i);
        }
        L::load(x.as_ptr())
    }
}
