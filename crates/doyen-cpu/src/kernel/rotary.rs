//! Rotary position embedding in place, in both pairings, over all or the first part of a head.
//!
//! Contract section 3.3: the pair `(x1, x2)` becomes `(x1 cos - x2 sin, x1 sin + x2 cos)`. Half-split pairs channel `i`
//! with `i + rd/2`, interleaved pairs `2i` with `2i + 1`; channels from `rd` on pass through. Called by bound steps,
//! which know each token's position.

use super::{multiversion::multiversion, rows::for_rows, widen};
use crate::{
    detect::Isa,
    pool::{Pool, UnsafeSlice},
};
use doyen_tensor::FloatView;

/// Frequencies widened at a time: a quarter KiB each of cosines and sines on the stack.
const CHUNK: usize = 64;

/// Why rotary caches cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RotaryError {
    /// The caches are not `[positions, half]` both.
    #[error("rotary caches hold {cos} cosines and {sin} sines, not whole rows of {half} each")]
    Shape {
        /// Cosines.
        cos: usize,
        /// Sines.
        sin: usize,
        /// Frequencies per position.
        half: usize,
    },
    /// A position outside of the caches.
    #[error("position {position} is outside of the rotary caches, which end before {positions}")]
    Position {
        /// The position.
        position: u32,
        /// Rows of the caches.
        positions: usize,
    },
}

/// Cosines and sines per position, `[positions, half]`, in any stored float type.
#[derive(Debug, Clone, Copy)]
pub struct RotaryCache<'a> {
    cos: FloatView<'a>,
    sin: FloatView<'a>,
    half: usize,
}

impl<'a> RotaryCache<'a> {
    /// Caches of `half` frequencies (half the rotating channels) per position.
    ///
    /// # Errors
    /// When the two do not have the same whole number of rows.
    pub fn new(cos: FloatView<'a>, sin: FloatView<'a>, half: usize) -> Result<Self, RotaryError> {
        if half == 0 || cos.len() != sin.len() || !cos.len().is_multiple_of(half) {
            return Err(RotaryError::Shape { cos: cos.len(), sin: sin.len(), half });
        }
        Ok(Self { cos, sin, half })
    }

    /// Number of positions.
    pub const fn positions(&self) -> usize {
        self.cos.len() / self.half
    }

    /// Channels that rotate.
    pub const fn rotary_dim(&self) -> usize {
        2 * self.half
    }
}

/// Where the heads lie: token `t` has `heads` heads of `head_size` channels side by side from `t * token_stride` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Elements from one token to the next.
    pub token_stride: usize,
    /// Heads of a token.
    pub heads: usize,
    /// Channels of a head.
    pub head_size: usize,
}

/// Rotary kernel of one instruction set and pairing.
#[derive(Debug, Clone, Copy)]
pub struct RotaryKernel {
    widen: fn(FloatView<'_>, &mut [f32]),
    interleaved: bool,
    rotate: fn(&mut [f32], usize, usize, &[f32], &[f32]),
}

impl RotaryKernel {
    /// The kernel for `isa`.
    pub fn new(isa: Isa, interleaved: bool) -> Self {
        let rotate = if interleaved { rotate_pairs(isa) } else { rotate_halves(isa) };
        Self { widen: widen::widen(isa), interleaved, rotate }
    }

    /// Rotates token `t` of `x` to `positions[t]`.
    ///
    /// # Errors
    /// When a position is outside of the caches; nothing has been rotated then.
    ///
    /// # Panics
    /// When `x` does not hold `positions.len()` tokens, or more channels rotate than a head has.
    pub fn apply(
        &self,
        pool: &Pool,
        x: &mut [f32],
        heads: Heads,
        positions: &[u32],
        cache: &RotaryCache<'_>,
    ) -> Result<(), RotaryError> {
        let width = heads.heads * heads.head_size;
        assert!(
            cache.rotary_dim() <= heads.head_size,
            "{} of {} channels",
            cache.rotary_dim(),
            heads.head_size
        );
        assert!(width <= heads.token_stride || positions.len() <= 1, "heads overlap");
        if let Some(&position) = positions.iter().find(|p| **p as usize >= cache.positions()) {
            return Err(RotaryError::Position { position, positions: cache.positions() });
        }
        let x = UnsafeSlice::new(x);
        for_rows(pool, positions.len(), width, &|range| {
            for t in range {
                let start = t * heads.token_stride;
                // SAFETY: tokens are at least `width` apart, and each token belongs to one worker.
                let token = unsafe { x.range(start..start + width) };
                self.token(token, heads.head_size, positions[t] as usize, cache);
            }
        });
        Ok(())
    }

    fn token(&self, token: &mut [f32], head_size: usize, position: usize, cache: &RotaryCache<'_>) {
        let half = cache.half;
        let (mut cos, mut sin) = ([0.0; CHUNK], [0.0; CHUNK]);
        for first in (0..half).step_by(CHUNK) {
            let n = CHUNK.min(half - first);
            (self.widen)(cache.cos.slice(position * half + first, n), &mut cos[..n]);
            (self.widen)(cache.sin.slice(position * half + first, n), &mut sin[..n]);
            let at = if self.interleaved { 2 * first } else { first };
            for head in token.chunks_exact_mut(head_size) {
                (self.rotate)(head, at, half, &cos[..n], &sin[..n]);
            }
        }
    }
}

multiversion! {
    fn rotate_halves(head: &mut [f32], at: usize, half: usize, cos: &[f32], sin: &[f32]) = halves_body;
}
multiversion! {
    fn rotate_pairs(head: &mut [f32], at: usize, half: usize, cos: &[f32], sin: &[f32]) = pairs_body;
}

#[inline(always)]
fn halves_body<const FMA: bool>(head: &mut [f32], at: usize, half: usize, cos: &[f32], sin: &[f32]) {
    let (low, high) = head.split_at_mut(half);
    for (((a, b), &c), &s) in low[at..].iter_mut().zip(&mut high[at..]).zip(cos).zip(sin) {
        (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
    }
}

#[inline(always)]
fn pairs_body<const FMA: bool>(head: &mut [f32], at: usize, _half: usize, cos: &[f32], sin: &[f32]) {
    for ((pair, &c), &s) in head[at..].chunks_exact_mut(2).zip(cos).zip(sin) {
        let (a, b) = (pair[0], pair[1]);
        pair[0] = a * c - b * s;
        pair[1] = a * s + b * c;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::test_data::{noise, stored};
    use doyen_tensor::FloatType;
    use proptest::prelude::*;
    use std::num::NonZeroUsize;

    fn expected(
        x: &[f32],
        heads: Heads,
        positions: &[u32],
        cache: &RotaryCache<'_>,
        interleaved: bool,
    ) -> Vec<f64> {
        let mut y: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
        for (t, &p) in positions.iter().enumerate() {
            for h in 0..heads.heads {
                let base = t * heads.token_stride + h * heads.head_size;
                for i in 0..cache.half {
                    let (a, b) = if interleaved {
                        (base + 2 * i, base + 2 * i + 1)
                    } else {
                        (base + i, base + i + cache.half)
                    };
                    let c = f64::from(cache.cos.get(p as usize * cache.half + i));
                    let s = f64::from(cache.sin.get(p as usize * cache.half + i));
                    (y[a], y[b]) = (y[a] * c - y[b] * s, y[a] * s + y[b] * c);
                }
            }
        }
        y
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn agrees_with_f64(
            tokens in 0usize..4, heads in 1usize..4, half in prop_oneof![1usize..9, Just(32), 60usize..80],
            pass in 0usize..9, gap in 0usize..5, interleaved: bool, ty in 0usize..3, seed: u64, threads in 1usize..3,
        ) {
            let ty = [FloatType::F32, FloatType::F16, FloatType::BF16][ty];
            let (cos, sin) = (stored(ty, &noise(seed, 7 * half)), stored(ty, &noise(seed ^ 1, 7 * half)));
            let view = |b| FloatView::new(ty, b).unwrap();
            let cache = RotaryCache::new(view(&cos), view(&sin), half).unwrap();
            let head_size = 2 * half + pass;
            let heads = Heads { token_stride: heads * head_size + gap, heads, head_size };
            let positions: Vec<u32> = (0..tokens as u32).map(|t| (t * 5 + seed as u32 % 7) % 7).collect();
            let x = noise(seed ^ 2, tokens * heads.token_stride);
            let pool = Pool::new(NonZeroUsize::new(threads).unwrap(), false).unwrap();
            for isa in Isa::all() {
                let mut y = x.clone();
                RotaryKernel::new(isa, interleaved).apply(&pool, &mut y, heads, &positions, &cache).unwrap();
                for (g, e) in y.iter().zip(expected(&x, heads, &positions, &cache, interleaved)) {
                    prop_assert!((f64::from(*g) - e).abs() < 1e-6, "{g} {e}");
                }
            }
        }
    }

    #[test]
    fn positions_outside_of_the_caches_are_refused_before_anything_moves() {
        let ones = stored(FloatType::F32, &[1.0; 8]);
        let view = FloatView::new(FloatType::F32, &ones).unwrap();
        let cache = RotaryCache::new(view, view, 2).unwrap();
        let pool = Pool::new(NonZeroUsize::MIN, false).unwrap();
        let heads = Heads { token_stride: 4, heads: 1, head_size: 4 };
        let mut x = vec![1.0; 8];
        let err =
            RotaryKernel::new(Isa::detect(), false).apply(&pool, &mut x, heads, &[0, 4], &cache).unwrap_err();
        assert_eq!(err, RotaryError::Position { position: 4, positions: 4 });
        assert_eq!(x, vec![1.0; 8]);
        assert!(RotaryCache::new(view, view, 3).is_err());
        assert!(RotaryCache::new(view, view.slice(0, 4), 2).is_err());
    }
}
