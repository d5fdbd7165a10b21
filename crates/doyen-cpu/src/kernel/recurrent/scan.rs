//! The inner loops of linear attention: one head's state, [`WIDTH`] value channels of it at a time.
//!
//! Value channels do not meet in the recurrence, so that a block of them goes through all tokens of a sequence in the first
//! level cache: 128 key channels by 32 value channels are 16 KiB.

use crate::kernel::{
    math::{exp, fma},
    multiversion::multiversion,
};

/// Value channels of a block.
pub(super) const WIDTH: usize = 32;

/// What a token does to a block of the state.
pub(super) struct Token<'a> {
    /// `[key_size]`.
    pub(super) key: &'a [f32],
    /// Factor on each key channel of the state: `exp(decay)`; empty where the rule does not decay.
    pub(super) factors: &'a [f32],
    /// Value channels of the block, zeros past the last.
    pub(super) value: [f32; WIDTH],
    /// The update rate, where the rule corrects.
    pub(super) beta: Option<f32>,
}

multiversion! {
    /// Moves a block `[key_size, WIDTH]` of the state one token on.
    pub(super) fn advance(state: &mut [f32], token: &Token<'_>) = advance_body;
}
multiversion! {
    /// `scale * S^T q` of a block.
    pub(super) fn project(state: &[f32], query: &[f32], scale: f32) -> [f32; WIDTH] = project_body;
}
multiversion! {
    /// `exp` of log-space decays.
    pub(super) fn factors(decay: &[f32], out: &mut [f32]) = factors_body;
}

#[inline(always)]
fn factors_body<const FMA: bool>(decay: &[f32], out: &mut [f32]) {
    for (o, &d) in out.iter_mut().zip(decay) {
        *o = exp::<FMA>(d);
    }
}

#[inline(always)]
fn row_mut(row: &mut [f32]) -> &mut [f32; WIDTH] {
    row.try_into().expect("a row of a block")
}

/// `acc + a * row`.
#[inline(always)]
fn add_scaled<const FMA: bool>(acc: &mut [f32; WIDTH], a: f32, row: &[f32]) {
    for (acc, &v) in acc.iter_mut().zip(row) {
        *acc = fma::<FMA>(a, v, *acc);
    }
}

/// `S^T x`, even and odd rows apart: two chains of additions hide each other's latency.
#[inline(always)]
fn transposed<const FMA: bool>(state: &[f32], x: impl Fn(usize) -> f32) -> [f32; WIDTH] {
    let (mut even, mut odd) = ([0.0; WIDTH], [0.0; WIDTH]);
    let mut pairs = state.chunks_exact(2 * WIDTH);
    let mut i = 0;
    for pair in &mut pairs {
        add_scaled::<FMA>(&mut even, x(i), &pair[..WIDTH]);
        add_scaled::<FMA>(&mut odd, x(i + 1), &pair[WIDTH..]);
        i += 2;
    }
    for row in pairs.remainder().chunks_exact(WIDTH) {
        add_scaled::<FMA>(&mut even, x(i), row);
    }
    for (e, o) in even.iter_mut().zip(odd) {
        *e += o;
    }
    even
}

#[inline(always)]
fn advance_body<const FMA: bool>(state: &mut [f32], token: &Token<'_>) {
    let decays = !token.factors.is_empty();
    let mut delta = token.value;
    if let Some(beta) = token.beta {
        let said = if decays {
            transposed::<FMA>(state, |i| token.key[i] * token.factors[i])
        } else {
            transposed::<FMA>(state, |i| token.key[i])
        };
        for (d, s) in delta.iter_mut().zip(said) {
            *d = beta * (*d - s);
        }
    }
    if decays {
        let rows = state.chunks_exact_mut(WIDTH).zip(token.key).zip(token.factors);
        for ((row, &k), &f) in rows {
            for (s, &d) in row_mut(row).iter_mut().zip(&delta) {
                *s = fma::<FMA>(k, d, f * *s);
            }
        }
    } else {
        for (row, &k) in state.chunks_exact_mut(WIDTH).zip(token.key) {
            add_scaled::<FMA>(row_mut(row), k, &delta);
        }
    }
}

#[inline(always)]
fn project_body<const FMA: bool>(state: &[f32], query: &[f32], scale: f32) -> [f32; WIDTH] {
    let mut y = transposed::<FMA>(state, |i| query[i]);
    for y in &mut y {
        *y *= scale;
    }
    y
}
