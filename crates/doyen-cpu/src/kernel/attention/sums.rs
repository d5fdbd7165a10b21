//! Register tiles of weighted sums: some rows of weights against strips of channels.

use super::{
    SPLIT,
    element::Element,
    lanes::Lanes,
    panel::{Accumulate, Ahead, PAD, tile_rows, with_rows},
    scores::rest,
};

/// Keys between which sums leave the registers when values come from memory.
const STREAMED_KEYS: usize = 16;

/// # Safety
/// The machine has the instruction set of `L`; the lengths of `a` were checked.
#[inline(always)]
pub(super) unsafe fn accumulate_all<L: Lanes, E: Element>(a: Accumulate<'_>) {
    let Accumulate { p, rows, d, v, keys, ahead, acc, pitch } = a;
    let strips = d.div_ceil(4 * L::LANES);
    let mut ahead = Ahead::new(ahead, rows.div_ceil(L::ROWS) * strips * keys);
    // One register tile waits for memory: it goes along the rows as they lie there.
    let block = if rows <= 2 * L::ROWS { STREAMED_KEYS } else { keys.max(1) };
    for first in (0..keys).step_by(block) {
        let keys = block.min(keys - first);
        let v = v[first * E::bytes(d)..].as_ptr();
        let mut row = 0;
        while row < rows {
            let taken = tile_rows::<L>(rows - row);
            let (p, acc) = (p[row * SPLIT + first..].as_ptr(), acc[row * pitch..].as_mut_ptr());
            let tile = Sums { p, keys, v, d, acc, pitch };
            // SAFETY: rows `row .. row + taken` of weights and sums; at most L::ROWS <= 4 of them.
            unsafe { with_rows!(taken, sum_tile::<L, E>(&tile, &mut ahead)) }
            row += taken;
        }
    }
}

/// Some rows of [`Accumulate`].
struct Sums {
    p: *const f32,
    keys: usize,
    v: *const u8,
    d: usize,
    acc: *mut f32,
    pitch: usize,
}

/// Weighted sums of `R` rows, in strips of channels that stay in registers.
///
/// # Safety
/// `R` rows of weights and sums, `keys` rows of values.
#[inline(always)]
unsafe fn sum_tile<L: Lanes, E: Element, const R: usize>(t: &Sums, ahead: &mut Ahead) {
    let mut c = 0;
    // SAFETY: each call covers channels c .. c + W * LANES <= d, then the rest.
    unsafe {
        while c + 4 * L::LANES <= t.d {
            strip::<L, E, R, 4>(t, c, ahead);
            c += 4 * L::LANES;
        }
        if c + 2 * L::LANES <= t.d {
            strip::<L, E, R, 2>(t, c, ahead);
            c += 2 * L::LANES;
        }
        if c + L::LANES <= t.d {
            strip::<L, E, R, 1>(t, c, ahead);
            c += L::LANES;
        }
        if c < t.d {
            last_strip::<L, E, R>(t, c);
        }
    }
}

/// `W` vectors of channels from `c` on.
///
/// # Safety
/// As for [`sum_tile`], and `c + W * L::LANES <= d`.
#[inline(always)]
unsafe fn strip<L: Lanes, E: Element, const R: usize, const W: usize>(t: &Sums, c: usize, ahead: &mut Ahead) {
    let row = E::bytes(t.d);
    // SAFETY: the channels are inside of rows, keys below `keys`.
    unsafe {
        let mut acc = [[L::zero(); W]; R];
        for (r, acc) in acc.iter_mut().enumerate() {
            for (w, acc) in acc.iter_mut().enumerate() {
                *acc = L::load(t.acc.add(r * t.pitch + c + w * L::LANES));
            }
        }
        let mut v = t.v.add(E::bytes(c));
        for j in 0..t.keys {
            ahead.step::<L>();
            add_row::<L, E, R, W>(&mut acc, t.p.add(j), v);
            v = v.wrapping_add(row);
        }
        for (r, acc) in acc.iter().enumerate() {
            for (w, &acc) in acc.iter().enumerate() {
                L::store(t.acc.add(r * t.pitch + c + w * L::LANES), acc);
            }
        }
    }
}

/// `acc[r] += p[r] * v`.
///
/// # Safety
/// `R` weights `SPLIT` apart, `W` vectors of values.
#[allow(clippy::needless_range_loop, reason = "a register tile has two indices")]
#[inline(always)]
unsafe fn add_row<L: Lanes, E: Element, const R: usize, const W: usize>(
    acc: &mut [[L::V; W]; R],
    p: *const f32,
    v: *const u8,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut x = [L::zero(); R];
        for (r, x) in x.iter_mut().enumerate() {
            *x = L::splat(*p.add(r * SPLIT));
        }
        for w in 0..W {
            let y = E::load::<L>(v.add(E::bytes(w * L::LANES)));
            for r in 0..R {
                acc[r][w] = L::fma(x[r], y, acc[r][w]);
            }
        }
    }
}

/// The channels from `c` on, fewer than a vector has lanes.
///
/// # Safety
/// As for [`sum_tile`], and `c < d < c + L::LANES`.
#[inline(always)]
unsafe fn last_strip<L: Lanes, E: Element, const R: usize>(t: &Sums, c: usize) {
    let (row, n) = (E::bytes(t.d), t.d - c);
    for r in 0..R {
        let mut buffer = [0.0; PAD];
        // SAFETY: channels c .. d of sums and values; a buffer of PAD numbers has all lanes.
        unsafe {
            let sums = std::slice::from_raw_parts_mut(t.acc.add(r * t.pitch + c), n);
            buffer[..n].copy_from_slice(sums);
            let mut acc = L::load(buffer.as_ptr());
            for j in 0..t.keys {
                let y = rest::<L, E>(t.v.add(j * row + E::bytes(c)), n);
                acc = L::fma(L::splat(*t.p.add(r * SPLIT + j)), y, acc);
            }
            L::store(buffer.as_mut_ptr(), acc);
            sums.copy_from_slice(&buffer[..n]);
        }
    }
}
