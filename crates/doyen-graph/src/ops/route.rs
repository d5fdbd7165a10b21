//! Top-k routing of QMoE and MoE (operator contract, section 1.6): which experts a token takes, with which weights.
//!
//! Shared by both operators' references and by backends that route on the host. Selection compares the logits as
//! stored; ties go to the lowest index.

use super::OpError;
use super::args::{ACTIVATIONS, Want, expect};
use super::util::check_type;
use crate::ir::{Attrs, Fact};

/// How a router's logits become experts and weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Routing {
    /// Experts per token.
    pub k: usize,
    /// Divide the chosen weights by their sum.
    pub normalize: bool,
    /// Phi-3.5's sparse mixer instead of a softmax over all experts.
    pub sparse_mixer: bool,
    /// Softmax over the chosen logits alone, whatever `normalize` says: what one provider's QMoE does on the CPU.
    /// Never set by an attribute; for comparison with that provider.
    pub topk_softmax_always: bool,
}

/// One route of a token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Chosen {
    /// The expert.
    pub expert: usize,
    /// Factor on the expert's output.
    pub weight: f64,
}

/// Twice the jitter epsilon (0.01) of the sparse mixer.
const SPARSE_MIXER_BAND: f64 = 0.02;

impl Routing {
    /// Reads `k`, `normalize_routing_weights` and `use_sparse_mixer`.
    ///
    /// # Errors
    /// When k is below 1 or a flag is not 0 or 1.
    pub fn parse(attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self {
            k: attrs.count("k", "experts a token")?.unwrap_or(1),
            normalize: attrs.flag("normalize_routing_weights", false)?,
            sparse_mixer: attrs.flag("use_sparse_mixer", false)?,
            topk_softmax_always: false,
        })
    }

    /// Checks `router_probs` and `router_weights` against the number of tokens and experts.
    ///
    /// # Errors
    /// Names the input, with expected and found shape, or `k` when it exceeds the experts.
    pub(super) fn check(
        &self,
        probs: &Fact,
        weights: Option<&Fact>,
        tokens: Want,
        experts: Want,
    ) -> Result<(), OpError> {
        check_type("router_probs", probs, ACTIVATIONS)?;
        expect("router_probs", probs, &[tokens, experts], "tokens, experts")?;
        if let Some(w) = weights {
            expect("router_weights", w, &[tokens, experts], "tokens, experts")?;
        }
        match experts {
            Some(e) if self.k > e => Err(OpError::attribute("k", format!("at most {e} (experts)"), self.k)),
            _ => Ok(()),
        }
    }

    /// The routes of one token, in order of selection. `given` are the mixing weights of all experts, if the graph
    /// has them.
    ///
    /// # Panics
    /// When `given` is shorter than `logits`. `k` beyond the experts takes all of them.
    pub fn route(&self, logits: &[f32], given: Option<&[f32]>) -> Vec<Chosen> {
        let order = top_k(logits, self.k);
        let s: Vec<f64> = logits.iter().map(|&v| f64::from(v)).collect();
        let mut weights: Vec<f64> = match given {
            Some(w) => order.iter().map(|&e| f64::from(w[e])).collect(),
            None if self.sparse_mixer => sparse_mixer(&s, &order),
            None if self.topk_softmax_always || self.normalize => {
                softmax(&order.iter().map(|&e| s[e]).collect::<Vec<_>>())
            }
            None => {
                let all = softmax(&s);
                order.iter().map(|&e| all[e]).collect()
            }
        };
        if self.normalize && (given.is_some() || self.sparse_mixer) {
            let sum: f64 = weights.iter().sum();
            for w in &mut weights {
                *w = if sum == 0.0 { 0.0 } else { *w / sum };
            }
        }
        order.into_iter().zip(weights).map(|(expert, weight)| Chosen { expert, weight }).collect()
    }
}

/// The `k` largest, larger first, ties by lower index. NaN ranks below everything.
fn top_k(logits: &[f32], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| {
        let (x, y) = (logits[a], logits[b]);
        y.partial_cmp(&x).unwrap_or_else(|| x.is_nan().cmp(&y.is_nan()))
    });
    order.truncate(k);
    order
}

/// Softmax in which the largest logits weigh 1 even where they are infinite, so that `-inf` alone never gives NaN.
fn softmax(s: &[f64]) -> Vec<f64> {
    let max = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let e: Vec<f64> = s.iter().map(|&v| if v == max { 1.0 } else { (v - max).exp() }).collect();
    let sum: f64 = e.iter().sum();
    e.into_iter().map(|v| v / sum).collect()
}

/// Each round: the weight of this round's largest logit in a softmax over the logits within the band below it;
/// earlier rounds' experts are out.
fn sparse_mixer(s: &[f64], order: &[usize]) -> Vec<f64> {
    let mut left = s.to_vec();
    order
        .iter()
        .map(|&e| {
            let max = left[e];
            let kept: Vec<f64> = left
                .iter()
                .map(
                    |&v| if (max - v) / v.abs().max(max) > SPARSE_MIXER_BAND { f64::NEG_INFINITY } else { v },
                )
                .collect();
            let weight = softmax(&kept)[e];
            left[e] = f64::NEG_INFINITY;
            weight
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const L: [f32; 4] = [2.0, 1.0, 0.0, -1.0];

    fn rule(k: usize, normalize: bool) -> Routing {
        Routing { k, normalize, sparse_mixer: false, topk_softmax_always: false }
    }

    fn close(got: &[Chosen], want: &[(usize, f64)]) {
        assert_eq!(got.len(), want.len());
        for (g, w) in got.iter().zip(want) {
            assert_eq!(g.expert, w.0);
            assert!((g.weight - w.1).abs() < 1e-6, "{g:?} {w:?}");
        }
    }

    /// The worked table of contract 1.6.
    #[test]
    fn worked_table() {
        close(&rule(2, false).route(&L, None), &[(0, 0.6439143), (1, 0.2368828)]);
        close(&rule(2, true).route(&L, None), &[(0, 0.7310586), (1, 0.2689414)]);
        let parity = Routing { topk_softmax_always: true, ..rule(2, false) };
        close(&parity.route(&L, None), &[(0, 0.7310586), (1, 0.2689414)]);
        let w = [0.2, 0.1, 0.6, 0.1];
        close(&rule(2, false).route(&L, Some(&w)), &[(0, 0.2), (1, 0.1)]);
        close(&rule(2, true).route(&L, Some(&w)), &[(0, 2.0 / 3.0), (1, 1.0 / 3.0)]);
    }

    #[test]
    fn ties_take_the_lowest_index_and_nan_the_last_place() {
        close(&rule(2, true).route(&[1.0, 3.0, 3.0, 3.0], None), &[(1, 0.5), (2, 0.5)]);
        let got = rule(3, false).route(&[f32::NAN, f32::NEG_INFINITY, 0.0], None);
        assert_eq!(got.iter().map(|c| c.expert).collect::<Vec<_>>(), [2, 1, 0]);
    }

    #[test]
    fn negative_zero_sum_and_infinite_inputs() {
        close(&rule(2, false).route(&L, Some(&[-0.5, 0.25, 0.0, 0.0])), &[(0, -0.5), (1, 0.25)]);
        close(&rule(2, true).route(&L, Some(&[-0.5, 0.5, 0.0, 0.0])), &[(0, 0.0), (1, 0.0)]);
        let inf = f32::NEG_INFINITY;
        close(&rule(2, true).route(&[inf, 1.0, inf, 1.0], None), &[(1, 0.5), (3, 0.5)]);
        close(&rule(2, false).route(&[inf; 4], None), &[(0, 0.25), (1, 0.25)]);
        close(&rule(1, false).route(&[1e30, f32::INFINITY], None), &[(1, 1.0)]);
    }

    #[test]
    fn sparse_mixer_by_hand() {
        let r = Routing { sparse_mixer: true, ..rule(2, false) };
        // Round 1: 0.99 is within 2 % of 1.0, 0.5 is not. Round 2: 0.99 alone.
        let first = 1.0 / (1.0 + (0.99f64 - 1.0).exp());
        close(&r.route(&[1.0, 0.99, 0.5], None), &[(0, first), (1, 1.0)]);
        close(&r.route(&[0.0, 0.0], None), &[(0, 0.5), (1, 1.0)]);
    }

    proptest! {
        #[test]
        fn normalized_weights_sum_to_one(l in proptest::collection::vec(-50f32..50.0, 1..12), k in 1usize..12) {
            let k = k.min(l.len());
            let got = rule(k, true).route(&l, None);
            prop_assert_eq!(got.len(), k);
            prop_assert!((got.iter().map(|c| c.weight).sum::<f64>() - 1.0).abs() < 1e-9);
            let plain = rule(k, false).route(&l, None);
            let sum: f64 = plain.iter().map(|c| c.weight).sum();
            for (a, b) in got.iter().zip(&plain) {
                prop_assert_eq!(a.expert, b.expert);
                prop_assert!((a.weight - b.weight / sum).abs() < 1e-9);
            }
        }
    }
}
