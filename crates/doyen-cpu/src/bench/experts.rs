//! A layer of experts, as QMoE computes it: interleaved SwiGLU, other random routes in every call.

use super::{
    BenchError, Env, Labels, Matrices, QuantFormat, Rng, Subject, Work, data::memory, linear::numerics,
};
use crate::{
    kernel::{
        experts::{Activation, Bank, Experts, Formats, Gate, Projection, Routes, Shape},
        linear::{Format, Mode, Weights},
    },
    pool::Pool,
    session::Memory,
};
use doyen_tensor::FloatView;
use std::sync::Arc;

/// A layer of experts.
#[derive(Debug, Clone, Copy)]
pub struct ExpertLayer {
    /// Experts E.
    pub experts: usize,
    /// Experts per token k.
    pub top_k: usize,
    /// Hidden size H.
    pub hidden: usize,
    /// Intermediate size I; FC1 has 2 I rows, gate and linear ones in turn.
    pub inter: usize,
    /// How FC1 `[2 I, H]` is stored.
    pub fc1: QuantFormat,
    /// How FC2 `[H, I]` is stored.
    pub fc2: QuantFormat,
}

/// Copies of a layer's weights, one after the other.
struct Copies {
    experts: usize,
    fc1: Matrices,
    fc2: Matrices,
}

/// One of them.
struct Layer<'a> {
    copies: &'a Copies,
    copy: usize,
}

impl Bank for Layer<'_> {
    fn weights(&self, projection: Projection, expert: usize) -> Weights<'_> {
        let Copies { experts, fc1, fc2 } = self.copies;
        let matrices = if projection == Projection::Fc2 { fc2 } else { fc1 };
        Weights::Int(matrices.get(self.copy * experts + expert))
    }

    fn bias(&self, _: Projection, _: usize) -> Option<FloatView<'_>> {
        None
    }
}

impl ExpertLayer {
    fn bind(&self, env: &Env<'_>) -> Result<Experts, BenchError> {
        let sizes = [
            ("experts", self.experts),
            ("experts per token", self.top_k),
            ("hidden", self.hidden),
            ("inter", self.inter),
            ("block", self.fc1.block.min(self.fc2.block)),
        ];
        if let Some((what, _)) = sizes.into_iter().find(|(_, n)| *n == 0) {
            return Err(BenchError::Zero(what));
        }
        if self.top_k > self.experts {
            return Err(BenchError::Unsupported(format!(
                "{} experts per token out of {}: give at most as many as there are",
                self.top_k, self.experts
            )));
        }
        let format =
            |f: QuantFormat, cols: usize| Format::Int { bits: f.bits, block: f.block.min(cols), cols };
        let formats =
            Formats { fc1: format(self.fc1, self.hidden), fc2: format(self.fc2, self.inter), fc3: None };
        let shape = Shape { experts: self.experts, hidden: self.hidden, inter: self.inter };
        let swiglu = Activation::SwiGlu { alpha: 1.0, beta: 0.0, limit: f32::INFINITY };
        Experts::new(shape, formats, swiglu, Gate::Interleaved, env.mode, env.isa)
            .map_err(|e| BenchError::Unsupported(e.to_string()))
    }

    fn expert_bytes(&self) -> Option<usize> {
        let fc1 = self.fc1.bytes(self.inter.checked_mul(2)?, self.hidden)?;
        fc1.checked_add(self.fc2.bytes(self.hidden, self.inter)?)
    }
}

impl Subject for ExpertLayer {
    fn bytes(&self) -> Option<usize> {
        self.expert_bytes()?.checked_mul(self.experts)
    }

    fn touched(&self, _tokens: usize) -> usize {
        self.expert_bytes().and_then(|b| b.checked_mul(self.top_k)).unwrap_or(usize::MAX)
    }

    fn call_bytes(&self, env: &Env<'_>, tokens: usize) -> Result<Option<usize>, BenchError> {
        let experts = self.bind(env)?;
        let numbers = || {
            let per_token = self.hidden.checked_mul(2)?.checked_add(self.top_k.checked_mul(2)?)?;
            let bytes = per_token.checked_mul(tokens)?.checked_mul(size_of::<f32>())?;
            bytes.checked_add(self.experts)?.checked_add(experts.scratch_len(tokens, self.top_k)?)
        };
        Ok(numbers())
    }

    fn works<'a>(
        &self,
        env: &Env<'a>,
        rng: &mut Rng,
        copies: usize,
        tokens: &[usize],
    ) -> Result<Vec<Box<dyn Work + 'a>>, BenchError> {
        let experts = self.bind(env)?;
        let n = copies * self.experts;
        let weights = Arc::new(Copies {
            experts: self.experts,
            fc1: Matrices::random(rng, n, (2 * self.inter, self.hidden), self.fc1)?,
            fc2: Matrices::random(rng, n, (self.hidden, self.inter), self.fc2)?,
        });
        let expert_bytes = self.expert_bytes().ok_or(BenchError::Overflow("an expert"))?;
        let work = |&tokens: &usize| -> Result<Box<dyn Work + 'a>, BenchError> {
            let scratch = experts.scratch_len(tokens, self.top_k);
            let scratch = scratch.ok_or(BenchError::Overflow("the scratch of the experts"))?;
            Ok(Box::new(Call {
                pool: env.pool,
                layer: *self,
                experts,
                mode: env.mode,
                weights: Arc::clone(&weights),
                expert_bytes,
                copies,
                copy: 0,
                tokens,
                rng: rng.fork(),
                ids: vec![0; tokens * self.top_k],
                route_weights: vec![1.0 / self.top_k as f32; tokens * self.top_k],
                seen: vec![false; self.experts],
                x: rng.floats(tokens * self.hidden),
                out: vec![0.0; tokens * self.hidden],
                scratch: memory(scratch, "scratch")?,
            }))
        };
        tokens.iter().map(work).collect()
    }
}

struct Call<'a> {
    pool: &'a Pool,
    layer: ExpertLayer,
    experts: Experts,
    mode: Mode,
    weights: Arc<Copies>,
    expert_bytes: usize,
    copies: usize,
    copy: usize,
    tokens: usize,
    rng: Rng,
    ids: Vec<u32>,
    route_weights: Vec<f32>,
    /// Experts that the current routes use.
    seen: Vec<bool>,
    x: Vec<f32>,
    out: Vec<f32>,
    scratch: Memory,
}

impl Work for Call<'_> {
    fn labels(&self) -> Labels {
        let ExpertLayer { experts, top_k, hidden, inter, fc1, fc2 } = self.layer;
        let mut labels = vec![
            ("m", self.tokens.to_string()),
            ("experts", experts.to_string()),
            ("top_k", top_k.to_string()),
            ("hidden", hidden.to_string()),
            ("inter", inter.to_string()),
            ("fc1", fc1.bits.get().to_string()),
            ("fc2", fc2.bits.get().to_string()),
        ];
        labels.extend(fc1.labels());
        labels.push(("numerics", numerics(self.mode)));
        let kernel = |p| self.experts.linear(p).map_or_else(String::new, |l| l.kernel().to_string());
        labels.push(("kernel", format!("{}/{}", kernel(Projection::Fc1), kernel(Projection::Fc2))));
        labels
    }

    fn macs(&self) -> f64 {
        let ExpertLayer { top_k, hidden, inter, .. } = self.layer;
        3.0 * self.tokens as f64 * top_k as f64 * hidden as f64 * inter as f64
    }

    /// Draws different experts for each token.
    fn prepare(&mut self, call: usize) -> usize {
        self.copy = call % self.copies;
        self.seen.fill(false);
        for routes in self.ids.chunks_mut(self.layer.top_k) {
            draw(&mut self.rng, routes, self.layer.experts);
            for &e in &*routes {
                self.seen[e as usize] = true;
            }
        }
        self.seen.iter().filter(|s| **s).count() * self.expert_bytes
    }

    fn run(&mut self) {
        let layer = Layer { copies: &self.weights, copy: self.copy };
        let routes = Routes { k: self.layer.top_k, experts: &self.ids, weights: &self.route_weights };
        self.experts.run(self.pool, &layer, &self.x, routes, &mut self.out, &mut self.scratch);
    }
}

/// Different experts out of `0 .. n`, all sets equally likely (Floyd's algorithm).
fn draw(rng: &mut Rng, routes: &mut [u32], n: usize) {
    for i in 0..routes.len() {
        let last = (n - routes.len() + i) as u32;
        let e = rng.below(last as usize + 1) as u32;
        routes[i] = if routes[..i].contains(&e) { last } else { e };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_of_a_token_differ() {
        let mut rng = Rng::default();
        let mut counts = [0; 6];
        for _ in 0..3000 {
            let mut routes = [0; 4];
            draw(&mut rng, &mut routes, 6);
            for (i, &e) in routes.iter().enumerate() {
                assert!(!routes[..i].contains(&e), "{routes:?}");
                counts[e as usize] += 1;
            }
        }
        assert!(counts.iter().all(|c| (1850..2150).contains(c)), "{counts:?}");
    }
}
