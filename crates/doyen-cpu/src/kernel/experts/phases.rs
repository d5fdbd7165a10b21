//! One call of the experts: how scratch is cut, how routes are grouped, and the phases.

use super::{
    Bank, Experts, Gate, Projection, Routes,
    inner::Inner,
    scratch::{Scratch, bytes_for},
};
use crate::{
    kernel::{
        linear::{self, Linear, Output},
        quantize::Prepared,
        rows::for_rows,
    },
    pool::{Pool, UnsafeSlice},
};
use std::ops::Range;

/// Columns per item of the last phase.
const COMBINE_COLS: usize = 512;

/// Sizes of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan<'a> {
    experts: &'a Experts,
    tokens: usize,
    routes: usize,
    /// Numbers of a route between FC1 and the activation function.
    width: usize,
}

/// Routes sorted by expert; within an expert by token and slot.
pub(super) struct Groups<'s> {
    /// Experts that have routes, ascending.
    pub(super) active: &'s [u32],
    /// Route positions of active expert `i` are `bounds[i] .. bounds[i + 1]`.
    bounds: &'s [u32],
    /// Token of each position.
    pub(super) token: &'s [u32],
    /// Position of each route.
    position: &'s [u32],
}

impl Groups<'_> {
    pub(super) fn range(&self, i: usize) -> Range<usize> {
        self.bounds[i] as usize..self.bounds[i + 1] as usize
    }
}

impl<'a> Plan<'a> {
    /// The sizes; `None` on overflow.
    pub(super) fn new(experts: &'a Experts, tokens: usize, k: usize) -> Option<Self> {
        let routes = tokens.checked_mul(k)?;
        u32::try_from(routes).ok()?;
        let per_output = if experts.gate == Gate::None { 1usize } else { 2 };
        let width = per_output.checked_mul(experts.shape.inter)?;
        Some(Self { experts, tokens, routes, width })
    }

    /// Whether FC3 wants its activations in another layout than FC1.
    fn other_fc3(&self) -> Option<&'a Linear> {
        let e = self.experts;
        e.fc3.as_ref().filter(|fc3| fc3.layout() != e.fc1.layout())
    }

    /// Bytes of scratch; `None` on overflow.
    pub(super) fn bytes(&self) -> Option<usize> {
        let (e, s) = (self.experts, self.experts.shape);
        let prepared = |linear: &Linear, rows: usize| bytes_for(linear.scratch_len(rows)?, 1);
        let per_route = |n: usize| bytes_for(self.routes.checked_mul(n)?, 4);
        let parts = [
            bytes_for(s.experts.checked_add(1)?, 4)?,
            bytes_for(s.experts, 4)?,
            per_route(1)?,
            per_route(1)?,
            prepared(&e.fc1, self.tokens)?,
            self.other_fc3().map_or(Some(0), |fc3| prepared(fc3, self.tokens))?,
            per_route(self.width.max(s.hidden))?,
            per_route(s.inter)?,
            prepared(&e.fc2, self.routes)?,
        ];
        parts.into_iter().try_fold(0usize, usize::checked_add)
    }

    /// All phases. Lengths have been checked.
    pub(super) fn run(
        &self,
        pool: &Pool,
        bank: &dyn Bank,
        x: &[f32],
        routes: Routes<'_>,
        out: &mut [f32],
        scratch: &mut [u8],
    ) {
        let (e, s) = (self.experts, self.experts.shape);
        let mut rest = Scratch(scratch);
        let bounds = rest.take(s.experts + 1);
        let active = rest.take(s.experts);
        let (token, position) = (rest.take(self.routes), rest.take(self.routes));
        let groups = group(routes, bounds, active, token, position);

        let prepared = rest.take(e.fc1.layout().token_bytes() * self.tokens);
        let acts = linear::prepare(pool, e.fc1.layout(), x, self.tokens, prepared);
        let acts3 = self.other_fc3().map_or(acts, |fc3| {
            let prepared = rest.take(fc3.layout().token_bytes() * self.tokens);
            linear::prepare(pool, fc3.layout(), x, self.tokens, prepared)
        });
        // FC2's results take the place of FC1's, which nobody needs any more by then.
        let wide = rest.take::<f32>(self.routes * self.width.max(s.hidden));
        let inner = rest.take::<f32>(self.routes * s.inter);
        let (h, a) = (Output::new(wide, self.routes, self.width), Output::new(inner, self.routes, s.inter));
        Inner { experts: e, bank, groups: &groups, acts, acts3, h, a }.run(pool);

        let prepared = rest.take(e.fc2.layout().token_bytes() * self.routes);
        let acts = linear::prepare(pool, e.fc2.layout(), inner, self.routes, prepared);
        let y = Output::new(wide, self.routes, s.hidden);
        self.fc2(pool, bank, &groups, &acts, &y);
        combine(pool, routes, groups.position, wide, out, s.hidden);
    }

    /// FC2 of every route into `y`.
    fn fc2(&self, pool: &Pool, bank: &dyn Bank, groups: &Groups<'_>, acts: &Prepared<'_>, y: &Output<'_>) {
        let (fc2, hidden) = (&self.experts.fc2, self.experts.shape.hidden);
        let row_bytes = bank.weights(Projection::Fc2, 0).bytes() / hidden;
        let together = fc2.format().rows_together();
        each_chunk(pool, groups.active.len(), hidden, (row_bytes, together), &|i, rows| {
            let expert = groups.active[i] as usize;
            let positions = groups.range(i);
            let weights = bank.weights(Projection::Fc2, expert);
            let acts = acts.range(positions.clone());
            // SAFETY: chunks are disjoint in (positions, rows).
            let mut part = unsafe { y.part(positions, rows) };
            fc2.rows(&weights, &acts, bank.bias(Projection::Fc2, expert), &mut part);
        });
    }
}

/// Sorts routes by expert, by counting.
///
/// # Panics
/// When a route names no expert.
fn group<'s>(
    routes: Routes<'_>,
    bounds: &'s mut [u32],
    active: &'s mut [u32],
    token: &'s mut [u32],
    position: &'s mut [u32],
) -> Groups<'s> {
    bounds.fill(0);
    for &e in routes.experts {
        assert!((e as usize) < active.len(), "route to expert {e} of {}", active.len());
        bounds[e as usize + 1] += 1;
    }
    for e in 1..bounds.len() {
        bounds[e] += bounds[e - 1];
    }
    // Where each expert's next route goes; the list of active experts takes the place afterwards.
    let next = &mut *active;
    next.copy_from_slice(&bounds[..next.len()]);
    for (r, (&e, at)) in routes.experts.iter().zip(position.iter_mut()).enumerate() {
        *at = next[e as usize];
        token[*at as usize] = (r / routes.k) as u32;
        next[e as usize] += 1;
    }
    let mut n = 0;
    for e in 0..active.len() {
        if bounds[e] < bounds[e + 1] {
            (active[n], bounds[n]) = (e as u32, bounds[e]);
            n += 1;
        }
    }
    bounds[n] = routes.experts.len() as u32;
    Groups { active: &active[..n], bounds: &bounds[..=n], token, position }
}

/// Calls `f(i, rows)` for every active expert and every chunk of `0 .. rows`, over the pool. Of a row there are the bytes, and
/// how many belong together ([`linear::Format::rows_together`]).
pub(super) fn each_chunk(
    pool: &Pool,
    active: usize,
    rows: usize,
    (row_bytes, together): (usize, usize),
    f: &(dyn Fn(usize, Range<usize>) + Sync),
) {
    let chunk = linear::chunk_rows(pool, active * rows, row_bytes, together).min(rows);
    let chunks = rows.div_ceil(chunk);
    pool.for_each_dynamic(active * chunks, &|item| {
        let start = item % chunks * chunk;
        f(item / chunks, start..(start + chunk).min(rows));
    });
}

/// `out[t] = sum_j weight[t, j] * y[position of (t, j)]`, slots ascending.
fn combine(pool: &Pool, routes: Routes<'_>, position: &[u32], y: &[f32], out: &mut [f32], hidden: usize) {
    let parts = hidden.div_ceil(COMBINE_COLS);
    let tokens = out.len() / hidden;
    let out = UnsafeSlice::new(out);
    let part = |item: usize| {
        let (t, start) = (item / parts, item % parts * COMBINE_COLS);
        let cols = start..(start + COMBINE_COLS).min(hidden);
        // SAFETY: items are disjoint in (token, columns).
        let sum = unsafe { out.range(t * hidden + cols.start..t * hidden + cols.end) };
        sum.fill(0.0);
        let slots = t * routes.k..(t + 1) * routes.k;
        for (&at, &weight) in position[slots.clone()].iter().zip(&routes.weights[slots]) {
            let row = &y[at as usize * hidden..][cols.clone()];
            for (o, v) in sum.iter_mut().zip(row) {
                *o += weight * v;
            }
        }
    };
    for_rows(pool, tokens * parts, routes.k * COMBINE_COLS, &|items| items.for_each(part));
}
