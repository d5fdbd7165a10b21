//! Causal convolution, each channel by itself (operator contract, section 3.6): `y[t] = act(bias + sum_j w[j] xx[t + j d])`
//! with `xx` the state and then the input.
//!
//! Workers take ranges of channels through all sequences; a token's channels lie side by side, so that every tap is one
//! multiplication of vectors.

use super::States;
use crate::{
    detect::Isa,
    kernel::{
        math::{fma, sigmoid},
        multiversion::multiversion,
        rows::for_rows,
    },
    pool::{Pool, UnsafeSlice},
};

/// Channels that workers are given together: some cache lines, so that no two write one.
const BLOCK: usize = 64;

/// A convolution with its constants.
#[derive(Debug, Clone, Copy)]
pub struct ConvParams<'a> {
    /// `[taps, channels]`: the export's `[channels, 1, taps]` transposed.
    pub weight: &'a [f32],
    /// `[channels]`.
    pub bias: Option<&'a [f32]>,
    /// Channels.
    pub channels: usize,
    /// Inputs that an output sees.
    pub taps: usize,
    /// Tokens between two of them.
    pub dilation: usize,
    /// Whether the sum goes through `x * sigmoid(x)`.
    pub silu: bool,
}

impl ConvParams<'_> {
    /// Tokens of the state.
    pub const fn held(&self) -> usize {
        (self.taps - 1) * self.dilation
    }
}

/// The convolution of one instruction set.
#[derive(Debug, Clone, Copy)]
pub struct CausalConv {
    tap: fn(&[f32], &[f32], &mut [f32]),
    silu: fn(&mut [f32]),
}

impl CausalConv {
    /// The kernel for `isa`.
    pub fn new(isa: Isa) -> Self {
        Self { tap: tap(isa), silu: silu(isa) }
    }

    /// `y` for `x`, both `[tokens, channels]`, and the states `[held, channels]` after it.
    ///
    /// # Panics
    /// When weights, states or values are not of the parameters' extents.
    pub fn run(&self, pool: &Pool, p: &ConvParams<'_>, states: &States<'_>, x: &[f32], y: &mut [f32]) {
        assert_eq!(p.weight.len(), p.taps * p.channels, "weights");
        assert_eq!(states.size, p.held() * p.channels, "elements of a state");
        assert_eq!(x.len(), y.len(), "lengths of input and output");
        let tokens = states.all_tokens();
        let (blocks, y) = (p.channels.div_ceil(BLOCK), UnsafeSlice::new(y));
        for_rows(pool, blocks, tokens * BLOCK * p.taps, &|blocks| {
            let channels = blocks.start * BLOCK..(blocks.end * BLOCK).min(p.channels);
            for s in 0..states.sequences() {
                let of = Channels { p, states, x, sequence: s, from: channels.start, to: channels.end };
                for t in 0..states.tokens(s).len() {
                    let at = (states.tokens(s).start + t) * p.channels;
                    // SAFETY: every worker has its own channels of every token.
                    let y = unsafe { y.range(at + channels.start..at + channels.end) };
                    self.token(&of, t, y);
                }
                of.keep();
            }
        });
    }

    fn token(&self, of: &Channels<'_>, t: usize, y: &mut [f32]) {
        let p = of.p;
        match p.bias {
            Some(bias) => y.copy_from_slice(&bias[of.from..of.to]),
            None => y.fill(0.0),
        }
        for j in 0..p.taps {
            if let Some(x) = of.input(t + j * p.dilation) {
                (self.tap)(&p.weight[j * p.channels + of.from..j * p.channels + of.to], x, y);
            }
        }
        if p.silu {
            (self.silu)(y);
        }
    }
}

/// Some channels of one sequence in a step.
struct Channels<'a> {
    p: &'a ConvParams<'a>,
    states: &'a States<'a>,
    x: &'a [f32],
    sequence: usize,
    from: usize,
    to: usize,
}

impl Channels<'_> {
    /// Row `t` of the state and then the input; `None` where it is zeros.
    fn input(&self, t: usize) -> Option<&[f32]> {
        let channels = self.p.channels;
        match t.checked_sub(self.p.held()) {
            Some(t) => {
                let at = (self.states.tokens(self.sequence).start + t) * channels;
                Some(&self.x[at + self.from..at + self.to])
            }
            None => self.states.before(self.sequence, t * channels + self.from..t * channels + self.to),
        }
    }

    /// Writes the state: the last rows of what the step saw.
    fn keep(&self) {
        let (channels, new) = (self.p.channels, self.states.tokens(self.sequence).len());
        for t in 0..self.p.held() {
            let range = t * channels + self.from..t * channels + self.to;
            // SAFETY: every worker has its own channels of every sequence's state.
            let row = unsafe { self.states.after(self.sequence, range) };
            match self.input(new + t) {
                Some(x) => row.copy_from_slice(x),
                None => row.fill(0.0),
            }
        }
    }
}

multiversion! {
    fn tap(w: &[f32], x: &[f32], y: &mut [f32]) = tap_body;
}
multiversion! {
    fn silu(y: &mut [f32]) = silu_body;
}

#[inline(always)]
fn tap_body<const FMA: bool>(w: &[f32], x: &[f32], y: &mut [f32]) {
    for ((y, &x), &w) in y.iter_mut().zip(x).zip(w) {
        *y = fma::<FMA>(w, x, *y);
    }
}

#[inline(always)]
fn silu_body<const FMA: bool>(y: &mut [f32]) {
    for y in y {
        *y *= sigmoid::<FMA>(*y);
    }
}
