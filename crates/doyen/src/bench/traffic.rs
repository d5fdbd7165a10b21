//! The bytes a decoding step has to move: weights it reads, experts its tokens reach, keys and values it attends to, states
//! it moves on.
//!
//! Activations are left out: they stay in caches. Tables that are looked up (embeddings, rotary caches) count the rows of
//! the step's tokens; everything else counts whole, once for each node that reads it.

use doyen_graph::{
    device::{Device, Program},
    ir::Constant,
    lowered::{LNode, LOp, Lowered, Operand},
    ops::Op,
};

/// Bytes of one step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Traffic {
    /// Weights that every step reads: dense products, norms, routers, the head; and the rows of tables.
    pub dense: f64,
    /// Weights of the experts that are active.
    pub experts: f64,
    /// Keys and values read, and states of fixed size read and written.
    pub kv: f64,
}

impl Traffic {
    /// Of a step of one token for each of `sequences` sequences that have `positions` positions each. How many different
    /// experts a batch reaches is what random routing would give; with one sequence it is exact.
    pub fn of(program: &Program, device: &dyn Device, sequences: usize, positions: f64) -> Self {
        let graph = &program.graph;
        let mut traffic = Self::default();
        for node in &graph.nodes {
            let (dense, experts) = weights(graph, node, sequences as f64);
            traffic.dense += dense;
            traffic.experts += experts;
        }
        let page_bytes = device.page_bytes(graph, program.limits.page_size);
        for (group, bytes) in graph.groups.iter().zip(page_bytes) {
            let per_position = bytes.0 as f64 / program.limits.page_size as f64;
            let seen = group.window.map_or(positions, |w| positions.min(w as f64));
            traffic.kv += per_position * seen * sequences as f64;
        }
        traffic.kv += 2.0 * graph.state_bytes().0 as f64 * sequences as f64;
        traffic
    }

    /// All of it.
    pub fn total(&self) -> f64 {
        self.dense + self.experts + self.kv
    }
}

/// Bytes of a node's constants that a step of `tokens` tokens reads: dense ones, and those of active experts.
fn weights(graph: &Lowered, node: &LNode, tokens: f64) -> (f64, f64) {
    let mut sums = (0.0, 0.0);
    for (i, operand) in node.inputs.iter().enumerate() {
        let Some(Operand::Const(c)) = operand else { continue };
        let data = &graph.constant(*c).data;
        let whole = bytes(data);
        match &node.op {
            LOp::Experts(e) => sums.1 += whole * active(e.experts, e.k, tokens) / e.experts.max(1) as f64,
            LOp::Op(Op::Gather(_) | Op::GatherBlockQuantized(_)) => sums.0 += rows(data, tokens),
            // Inputs 3 and 4 are the rotary caches.
            LOp::Attention(_) if i == 3 || i == 4 => sums.0 += rows(data, tokens),
            _ => sums.0 += whole,
        }
    }
    sums
}

fn bytes(data: &Constant) -> f64 {
    data.shape().iter().product::<usize>() as f64 * data.dtype().bits() as f64 / 8.0
}

/// Bytes of one row for each token.
fn rows(data: &Constant, tokens: f64) -> f64 {
    let rows = data.shape().first().copied().unwrap_or(1).max(1) as f64;
    bytes(data) * (tokens / rows).min(1.0)
}

/// Expected number of different experts when each of `tokens` tokens takes `k` of `experts` at random.
fn active(experts: usize, k: usize, tokens: f64) -> f64 {
    let e = experts.max(1) as f64;
    e * (1.0 - (1.0 - (k as f64 / e).min(1.0)).powf(tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn active_experts() {
        assert_eq!(active(64, 8, 1.0), 8.0);
        assert!((active(64, 8, 8.0) - 42.0).abs() < 0.5);
        assert!((active(64, 8, 1e6) - 64.0).abs() < 1e-9);
        assert_eq!(active(1, 1, 1.0), 1.0);
    }
}
