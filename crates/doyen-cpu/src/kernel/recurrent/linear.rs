//! Linear attention (operator contract, section 3.6): every head keeps a matrix `[key_size, value_size]` that each token
//! decays, adds to and is answered from.

use super::{
    States,
    scan::{Token, WIDTH, advance, factors, project},
};
use crate::{
    detect::Isa,
    pool::{Pool, UnsafeSlice},
};
use std::ops::Range;

/// Elements of state below which a region of the pool costs more than it saves, as for other kernels.
const MIN_WORK: usize = 32 * 1024;

/// Sizes.
#[derive(Debug, Clone, Copy)]
pub struct LinearParams {
    /// Query heads.
    pub q_heads: usize,
    /// Heads that keys are given for.
    pub key_heads: usize,
    /// State and value heads.
    pub kv_heads: usize,
    /// Channels of a query or key head.
    pub key_size: usize,
    /// Channels of a value head.
    pub value_size: usize,
    /// Factor on the output.
    pub scale: f32,
}

impl LinearParams {
    /// Output heads.
    pub const fn heads(&self) -> usize {
        if self.q_heads > self.kv_heads { self.q_heads } else { self.kv_heads }
    }

    /// Elements of a sequence's state.
    pub const fn state(&self) -> usize {
        self.kv_heads * self.key_size * self.value_size
    }

    /// Elements of scratch a worker takes: a block of the state, and a token's factors.
    pub const fn scratch(&self) -> usize {
        self.key_size.saturating_mul(WIDTH + 1)
    }
}

/// The values of a step, a row a token.
#[derive(Debug, Clone, Copy)]
pub struct Operands<'a> {
    /// `[tokens, q_heads * key_size]`.
    pub query: &'a [f32],
    /// `[tokens, key_heads * key_size]`.
    pub key: &'a [f32],
    /// `[tokens, kv_heads * value_size]`.
    pub value: &'a [f32],
    /// `[tokens, kv_heads]` or `[tokens, kv_heads * key_size]`, where the rule decays.
    pub decay: Option<&'a [f32]>,
    /// `[tokens, kv_heads]` or `[tokens, 1]`, where the rule corrects.
    pub beta: Option<&'a [f32]>,
}

/// Linear attention of one instruction set.
#[derive(Debug, Clone, Copy)]
pub struct LinearAttention {
    advance: fn(&mut [f32], &Token<'_>),
    project: fn(&[f32], &[f32], f32) -> [f32; WIDTH],
    factors: fn(&[f32], &mut [f32]),
}

impl LinearAttention {
    /// The kernel for `isa`.
    pub fn new(isa: Isa) -> Self {
        Self { advance: advance(isa), project: project(isa), factors: factors(isa) }
    }

    /// `y [tokens, heads * value_size]` and the states after it. `scratch` holds [`LinearParams::scratch`] elements for each
    /// thread of the pool.
    ///
    /// # Panics
    /// When scratch, states or values are not of the parameters' extents.
    pub fn run(
        &self,
        pool: &Pool,
        p: &LinearParams,
        states: &States<'_>,
        o: &Operands<'_>,
        (scratch, y): (&mut [f32], &mut [f32]),
    ) {
        assert_eq!(states.size, p.state(), "elements of a state");
        let tokens = states.all_tokens();
        assert_eq!(y.len(), tokens * p.heads() * p.value_size, "the output");
        assert_eq!(o.query.len(), tokens * p.q_heads * p.key_size, "the query");
        assert_eq!(o.key.len(), tokens * p.key_heads * p.key_size, "the key");
        assert_eq!(o.value.len(), tokens * p.kv_heads * p.value_size, "the value");
        let blocks = p.value_size.div_ceil(WIDTH);
        let units = states.sequences() * p.kv_heads * blocks;
        let step = Step { kernel: self, p, states, o, tokens, y: UnsafeSlice::new(y) };
        let (each, split) = (p.scratch(), pool.split(units, 1));
        let scratch = UnsafeSlice::new(scratch);
        let run = |worker: usize, units: Range<usize>| {
            // SAFETY: workers have different numbers.
            let own = unsafe { scratch.range(worker * each..(worker + 1) * each) };
            for unit in units {
                let (sequence, head) = (unit / blocks / p.kv_heads, unit / blocks % p.kv_heads);
                step.unit((sequence, head), unit % blocks * WIDTH, own);
            }
        };
        let per_head = tokens + states.sequences();
        if per_head * p.kv_heads * p.key_size * p.value_size < MIN_WORK {
            return run(0, 0..units);
        }
        pool.run(&|worker| run(worker, split.range(worker)));
    }
}

/// A step of all sequences.
struct Step<'a> {
    kernel: &'a LinearAttention,
    p: &'a LinearParams,
    states: &'a States<'a>,
    o: &'a Operands<'a>,
    tokens: usize,
    y: UnsafeSlice<'a, f32>,
}

impl Step<'_> {
    /// Takes value channels `first ..` of a head, at most [`WIDTH`], through all tokens of a sequence.
    fn unit(&self, (sequence, head): (usize, usize), first: usize, scratch: &mut [f32]) {
        let p = self.p;
        let width = WIDTH.min(p.value_size - first);
        let (block, factors) = scratch.split_at_mut(p.key_size * WIDTH);
        let row = |i: usize| {
            let at = (head * p.key_size + i) * p.value_size + first;
            at..at + width
        };
        for (i, out) in block.chunks_exact_mut(WIDTH).enumerate() {
            out.fill(0.0);
            if let Some(state) = self.states.before(sequence, row(i)) {
                out[..width].copy_from_slice(state);
            }
        }
        for t in self.states.tokens(sequence) {
            self.token((t, head), (first, width), block, factors);
        }
        for (i, own) in block.chunks_exact(WIDTH).enumerate() {
            // SAFETY: every unit has its own rows and value channels of a sequence's state.
            unsafe { self.states.after(sequence, row(i)) }.copy_from_slice(&own[..width]);
        }
    }

    fn token(
        &self,
        (t, head): (usize, usize),
        (first, width): (usize, usize),
        block: &mut [f32],
        factors: &mut [f32],
    ) {
        let (p, o) = (self.p, self.o);
        let part = |x: &'_ [f32], heads: usize, head: usize, size: usize| -> Range<usize> {
            debug_assert_eq!(x.len(), self.tokens * heads * size, "rows of heads");
            let at = (t * heads + head) * size;
            at..at + size
        };
        let factors = match o.decay {
            None => &factors[..0],
            Some(decay) => {
                let per_head = decay.len() / (self.tokens * p.kv_heads);
                let own = &decay[part(decay, p.kv_heads, head, per_head)];
                if per_head == p.key_size {
                    (self.kernel.factors)(own, factors);
                } else {
                    let mut one = [0.0];
                    (self.kernel.factors)(own, &mut one);
                    factors.fill(one[0]);
                }
                &*factors
            }
        };
        let mut value = [0.0; WIDTH];
        let own = part(o.value, p.kv_heads, head, p.value_size).start + first;
        value[..width].copy_from_slice(&o.value[own..own + width]);
        let beta = o.beta.map(|beta| {
            let rates = beta.len() / self.tokens;
            beta[t * rates + head % rates]
        });
        let key = &o.key[part(o.key, p.key_heads, head / (p.kv_heads / p.key_heads), p.key_size)];
        (self.kernel.advance)(block, &Token { key, factors, value, beta });
        let readers = p.heads() / p.kv_heads;
        for out in head * readers..(head + 1) * readers {
            let query = &o.query[part(o.query, p.q_heads, out / (p.heads() / p.q_heads), p.key_size)];
            let answer = (self.kernel.project)(block, query, p.scale);
            let at = (t * p.heads() + out) * p.value_size + first;
            // SAFETY: every unit has its own heads and value channels of its sequence's tokens.
            unsafe { self.y.range(at..at + width) }.copy_from_slice(&answer[..width]);
        }
    }
}
