//! The loops over keys and values: register tiles of query rows against a run of stored rows.
//!
//! A score is one vector accumulator over the channels and the sum of its lanes; a weighted sum takes the keys one
//! after the other. So the bits of a row depend neither on the tile it is in nor on how keys are cut into runs. Stored
//! rows are widened in registers, once for the rows of a tile, and the lines of the next run are asked for meanwhile; where many
//! tiles meet a run, it is widened beforehand ([`Loops::widen`]) and meets the loops of f32, which give the same bits.

use super::{
    SPLIT,
    element::{BF16, Element, F16, F32, Int4, Int8},
    lanes::{Lanes, Portable},
    store::KvType,
};
use crate::detect::Isa;

/// Numbers that rows of queries are padded to a multiple of, with zeros: the lanes of the widest vector.
pub(super) const PAD: usize = 16;
const LINE: usize = 64;

/// `out[r * SPLIT + j] = q[r] . k[j]`.
pub(super) struct Scores<'a> {
    /// `[rows, d rounded up to PAD]`, zeros at the end of rows.
    pub(super) q: &'a [f32],
    pub(super) rows: usize,
    pub(super) d: usize,
    /// `[keys, d]` as stored.
    pub(super) k: &'a [u8],
    pub(super) keys: usize,
    /// What will be read next.
    pub(super) ahead: &'a [u8],
    pub(super) out: &'a mut [f32],
}

/// `acc[r * pitch + c] += sum_j p[r * SPLIT + j] v[j][c]`, keys in ascending order.
pub(super) struct Accumulate<'a> {
    pub(super) p: &'a [f32],
    pub(super) rows: usize,
    pub(super) d: usize,
    /// `[keys, d]` as stored.
    pub(super) v: &'a [u8],
    pub(super) keys: usize,
    /// What will be read next.
    pub(super) ahead: &'a [u8],
    pub(super) acc: &'a mut [f32],
    /// Distance of rows in `acc`.
    pub(super) pitch: usize,
}

/// The loops of one instruction set and storage type.
#[derive(Debug, Clone, Copy)]
pub(super) struct Loops {
    pub(super) scores: fn(Scores<'_>),
    pub(super) accumulate: fn(Accumulate<'_>),
    /// Stored numbers as f32; of codes, without their scale.
    pub(super) widen: fn(&[u8], &mut [f32]),
}

impl Loops {
    /// The loops for rows of `d` numbers.
    pub(super) fn new(isa: Isa, ty: KvType, d: usize) -> Self {
        match ty {
            KvType::F32 => Self::of::<F32>(isa, d),
            KvType::F16 => Self::of::<F16>(isa, d),
            KvType::BF16 => Self::of::<BF16>(isa, d),
            KvType::Int8 => Self::of::<Int8>(isa, d),
            KvType::Int4 => Self::of::<Int4>(isa, d),
        }
    }

    fn of<E: Element>(isa: Isa, d: usize) -> Self {
        let _ = d;
        match isa {
            // Whole vectors of 8 lanes are faster than vectors of 16 and a rest.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(_) | Isa::Amx(_) if d.is_multiple_of(16) => x86::avx512::<E>(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) | Isa::AvxVnni(_) | Isa::Avx512(_) | Isa::Amx(_) => x86::avx2::<E>(),
            _ => Self {
                scores: portable::scores::<E>,
                accumulate: portable::accumulate::<E>,
                widen: portable::widen::<E>,
            },
        }
    }
}

impl Scores<'_> {
    fn check<E: Element>(&self) {
        assert!(self.q.len() >= self.rows * self.d.next_multiple_of(PAD), "queries");
        assert_eq!(self.k.len(), self.keys * E::bytes(self.d), "keys");
        assert!(self.rows > 0 && self.out.len() >= (self.rows - 1) * SPLIT + self.keys, "scores");
    }
}

impl Accumulate<'_> {
    fn check<E: Element>(&self) {
        assert!(self.rows > 0 && self.p.len() >= (self.rows - 1) * SPLIT + self.keys, "weights");
        assert_eq!(self.v.len(), self.keys * E::bytes(self.d), "values");
        assert!(self.acc.len() >= (self.rows - 1) * self.pitch + self.d, "sums");
    }
}

mod portable {
    use super::{
        super::{scores::scores_all, sums::accumulate_all},
        Accumulate, Element, Portable, Scores, widen_all,
    };

    pub(super) fn scores<E: Element>(s: Scores<'_>) {
        s.check::<E>();
        // SAFETY: arrays need no instruction set; the lengths were checked.
        unsafe { scores_all::<Portable, E>(s) }
    }

    pub(super) fn accumulate<E: Element>(a: Accumulate<'_>) {
        a.check::<E>();
        // SAFETY: as above.
        unsafe { accumulate_all::<Portable, E>(a) }
    }

    pub(super) fn widen<E: Element>(stored: &[u8], out: &mut [f32]) {
        // SAFETY: arrays need no instruction set.
        unsafe { widen_all::<Portable, E>(stored, out) }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{
        super::{
            lanes_x86::{Ymm, Zmm},
            scores::scores_all,
            sums::accumulate_all,
        },
        Accumulate, Element, Loops, Scores, widen_all,
    };

    macro_rules! loops {
        ($name:ident, $features:literal, $lanes:ty) => {
            /// For holders of the proof of these features.
            pub(super) fn $name<E: Element>() -> Loops {
                fn scores<E: Element>(s: Scores<'_>) {
                    #[target_feature(enable = $features)]
                    fn inner<E: Element>(s: Scores<'_>) {
                        // SAFETY: the features are those of the lanes; the lengths were checked.
                        unsafe { scores_all::<$lanes, E>(s) }
                    }
                    s.check::<E>();
                    // SAFETY: `Loops::of` asks for the proof of the features.
                    unsafe { inner::<E>(s) }
                }
                fn accumulate<E: Element>(a: Accumulate<'_>) {
                    #[target_feature(enable = $features)]
                    fn inner<E: Element>(a: Accumulate<'_>) {
                        // SAFETY: the features are those of the lanes; the lengths were checked.
                        unsafe { accumulate_all::<$lanes, E>(a) }
                    }
                    a.check::<E>();
                    // SAFETY: `Loops::of` asks for the proof of the features.
                    unsafe { inner::<E>(a) }
                }
                fn widen<E: Element>(stored: &[u8], out: &mut [f32]) {
                    #[target_feature(enable = $features)]
                    fn inner<E: Element>(stored: &[u8], out: &mut [f32]) {
                        // SAFETY: the features are those of the lanes.
                        unsafe { widen_all::<$lanes, E>(stored, out) }
                    }
                    // SAFETY: `Loops::of` asks for the proof of the features.
                    unsafe { inner::<E>(stored, out) }
                }
                Loops { scores: scores::<E>, accumulate: accumulate::<E>, widen: widen::<E> }
            }
        };
    }

    loops!(avx2, "avx2,fma,f16c", Ymm);
    loops!(avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c", Zmm);
}

/// As [`Loops::widen`].
///
/// # Safety
/// The machine has the instruction set of `L`.
#[inline(always)]
unsafe fn widen_all<L: Lanes, E: Element>(stored: &[u8], out: &mut [f32]) {
    assert_eq!(stored.len(), E::bytes(out.len()), "stored numbers");
    let whole = out.len() / L::LANES * L::LANES;
    for i in (0..whole).step_by(L::LANES) {
        // SAFETY: the caller's promise, and there are as many numbers.
        unsafe { L::store(out.as_mut_ptr().add(i), E::load::<L>(stored.as_ptr().add(E::bytes(i)))) }
    }
    for (i, out) in out.iter_mut().enumerate().skip(whole) {
        *out = E::get(stored, i);
    }
}

/// Lines to ask for, a few at every step of a loop: in bursts they would hold up the loads behind them, and memory and
/// arithmetic would take turns.
pub(super) struct Ahead {
    next: *const u8,
    end: *const u8,
    lines: usize,
}

impl Ahead {
    pub(super) fn new(data: &[u8], steps: usize) -> Self {
        let std::ops::Range { start, end } = data.as_ptr_range();
        Self { next: start, end, lines: data.len().div_ceil(LINE).div_ceil(steps.max(1)) }
    }

    #[inline(always)]
    pub(super) fn step<L: Lanes>(&mut self) {
        for _ in 0..self.lines {
            if self.next >= self.end {
                return;
            }
            L::prefetch(self.next);
            self.next = self.next.wrapping_add(LINE);
        }
    }
}

/// Rows of the next tile when `left` are left: tiles as even as can be.
#[inline(always)]
pub(super) fn tile_rows<L: Lanes>(left: usize) -> usize {
    left.div_ceil(left.div_ceil(L::ROWS))
}

/// Calls `$f::<$($types),*, R>($args)` with the number of rows as a constant.
macro_rules! with_rows {
    ($rows:expr, $f:ident::<$($t:ident),*>($($arg:expr),*)) => {
        match $rows {
            1 => $f::<$($t),*, 1>($($arg),*),
            2 => $f::<$($t),*, 2>($($arg),*),
            3 => $f::<$($t),*, 3>($($arg),*),
            _ => $f::<$($t),*, 4>($($arg),*),
        }
    };
}
pub(super) use with_rows;
