//! From the hidden to the intermediate size: FC1, FC3 and the activation function, chunk by chunk of intermediate rows.

use super::{
    Bank, Experts, Gate, Projection,
    activation::Operand,
    phases::{Groups, each_chunk},
};
use crate::{
    kernel::{
        linear::{Columns, Linear, Output},
        quantize::Prepared,
    },
    pool::Pool,
};
use std::ops::Range;

/// What the chunks of one call share.
pub(super) struct Inner<'p> {
    pub(super) experts: &'p Experts,
    pub(super) bank: &'p dyn Bank,
    pub(super) groups: &'p Groups<'p>,
    /// Activations for FC1 and for FC3, a row a token.
    pub(super) acts: Prepared<'p>,
    pub(super) acts3: Prepared<'p>,
    /// Rows of FC1, then those of FC3: `[routes, inter]` or `[routes, 2 inter]`.
    pub(super) h: Output<'p>,
    /// Results: `[routes, inter]`.
    pub(super) a: Output<'p>,
}

/// Some intermediate rows of one expert for all of its routes.
struct Chunk<'p> {
    expert: usize,
    /// Positions of the routes, and their tokens.
    positions: Range<usize>,
    tokens: &'p [u32],
    /// Intermediate rows.
    rows: Range<usize>,
}

impl Inner<'_> {
    /// All chunks, over the pool.
    pub(super) fn run(&self, pool: &Pool) {
        let inter = self.experts.shape.inter;
        let mut bytes = self.bank.weights(Projection::Fc1, 0).bytes();
        if self.experts.fc3.is_some() {
            bytes += self.bank.weights(Projection::Fc3, 0).bytes();
        }
        let row = (bytes / inter, self.experts.fc1.format().rows_together());
        each_chunk(pool, self.groups.active.len(), inter, row, &|i, rows| {
            let positions = self.groups.range(i);
            let tokens = &self.groups.token[positions.clone()];
            let chunk = Chunk { expert: self.groups.active[i] as usize, positions, tokens, rows };
            self.products(&chunk);
            self.activate(&chunk);
        });
    }

    /// Columns of `of` for the routes of a chunk.
    fn part<'o>(chunk: &Chunk<'_>, of: &Output<'o>, columns: Range<usize>) -> Columns<'o> {
        // Their columns of `h` and `a` are as disjoint as chunks are, and a chunk drops a part before it takes another over its columns.
        // SAFETY: chunks are disjoint in (positions, rows), and use one part of a range at a time.
        unsafe { of.part(chunk.positions.clone(), columns) }
    }

    fn product(
        &self,
        chunk: &Chunk<'_>,
        (fc, linear): (Projection, &Linear),
        acts: &Prepared<'_>,
        to: &Output<'_>,
        rows: Range<usize>,
    ) {
        let (weights, bias) = (self.bank.weights(fc, chunk.expert), self.bank.bias(fc, chunk.expert));
        linear.rows(&weights, &acts.pick(chunk.tokens), bias, &mut Self::part(chunk, to, rows));
    }

    fn products(&self, chunk: &Chunk<'_>) {
        let (e, inter, rows) = (self.experts, self.experts.shape.inter, chunk.rows.clone());
        let fc1 = |rows| self.product(chunk, (Projection::Fc1, &e.fc1), &self.acts, &self.h, rows);
        match e.gate {
            Gate::Interleaved => fc1(2 * rows.start..2 * rows.end),
            Gate::None | Gate::Separate => fc1(rows.clone()),
            Gate::Concatenated => {
                fc1(rows.clone());
                fc1(inter + rows.start..inter + rows.end);
            }
        }
        if let Some(fc3) = &e.fc3 {
            // SAFETY: as for FC1: a chunk's rows and positions are its own, and FC3's columns lie behind FC1's.
            let to = unsafe { self.h.shared_window(inter..2 * inter) };
            self.product(chunk, (Projection::Fc3, fc3), &self.acts3, &to, rows);
        }
    }

    fn activate(&self, chunk: &Chunk<'_>) {
        let (e, inter, rows) = (self.experts, self.experts.shape.inter, chunk.rows.clone());
        let first = match e.gate {
            Gate::Interleaved => 2 * rows.start..2 * rows.end,
            _ => rows.clone(),
        };
        let mut h = Self::part(chunk, &self.h, first.clone());
        let second = matches!(e.gate, Gate::Concatenated | Gate::Separate)
            .then(|| inter + rows.start..inter + rows.end);
        let mut l = second.map(|columns| (Self::part(chunk, &self.h, columns.clone()), columns));
        let mut a = Self::part(chunk, &self.a, rows.clone());
        for p in 0..chunk.tokens.len() {
            let h = h.row(p, first.clone());
            let operand = match (&mut l, e.gate) {
                (Some((l, columns)), _) => Operand::Gated(h, l.row(p, columns.clone())),
                (None, Gate::Interleaved) => Operand::Pairs(h),
                (None, _) => Operand::Plain(h),
            };
            e.activation.apply(e.isa, operand, a.row(p, rows.clone()));
        }
    }
}
