//! Routing: which `k` experts a token goes to, and with what weights.
//!
//! The `k` largest router logits are selected, in descending order, ties to the lowest index; `-inf` is an ordinary
//! value, and NaN comes after every number. Mixing weights follow section 1.6 of the operator contract; softmax
//! of nothing but `-inf`, or of a NaN, is NaN, which the experts carry on. Called between the router's product
//! and [`super::experts`].

use crate::pool::{Pool, UnsafeSlice};
use std::cmp::Ordering;

/// Jitter of the sparse mixer: entries further than twice this (relatively) from the largest are masked.
const SPARSE_MIXER_EPS: f32 = 0.01;

/// Where mixing weights come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Weighting {
    /// Softmax over all experts, those of the selected ones: no router weights, normalize 0.
    SoftmaxAll,
    /// Softmax over the selected experts: no router weights, normalize 1.
    SoftmaxSelected,
    /// The router weights of the selected experts as they are: normalize 0.
    Given,
    /// The router weights divided by their sum over the selected experts, 0 where that sum is 0: normalize 1.
    GivenNormalized,
    /// `use_sparse_mixer` (Phi-3.5-MoE): see [`Router::row`].
    SparseMixer,
}

impl Weighting {
    /// The rule of QMoE and MoE for their attributes. `None` for router weights with a sparse mixer, which no rule
    /// covers. (ONNX Runtime's CPU kernel of QMoE ignores normalize 0 when there are no router weights: whoever has to
    /// match it takes [`Weighting::SoftmaxSelected`] then.)
    pub const fn of(normalize: bool, router_weights: bool, sparse_mixer: bool) -> Option<Self> {
        Some(match (sparse_mixer, router_weights, normalize) {
            (true, true, _) => return None,
            (true, false, _) => Self::SparseMixer,
            (false, true, true) => Self::GivenNormalized,
            (false, true, false) => Self::Given,
            (false, false, true) => Self::SoftmaxSelected,
            (false, false, false) => Self::SoftmaxAll,
        })
    }

    /// Whether router weights are read.
    pub const fn needs_router_weights(self) -> bool {
        matches!(self, Self::Given | Self::GivenNormalized)
    }
}

/// Routing of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Router {
    experts: usize,
    k: usize,
    weighting: Weighting,
}

impl Router {
    /// Routing to `k` of `experts`; `None` unless `1 <= k <= experts`.
    pub const fn new(experts: usize, k: usize, weighting: Weighting) -> Option<Self> {
        if k == 0 || k > experts { None } else { Some(Self { experts, k, weighting }) }
    }

    /// Experts per token.
    pub const fn k(&self) -> usize {
        self.k
    }

    /// Number of experts.
    pub const fn experts(&self) -> usize {
        self.experts
    }

    /// Selects for one token: `logits` are `experts` values, and so are `router_weights` where the weighting needs
    /// them; `ids` and `weights` receive `k` values.
    ///
    /// The sparse mixer selects in `k` rounds: with `m` the largest score `s`, entries with
    /// `(m - s) / max(|s|, m) > 0.02` are masked, the weight is the softmax over the others of the round's winner,
    /// and the winner's score is -inf in the next round.
    ///
    /// # Panics
    /// When a length is not the stated one.
    pub fn row(&self, logits: &[f32], router_weights: Option<&[f32]>, ids: &mut [u32], weights: &mut [f32]) {
        assert_eq!(logits.len(), self.experts, "router logits of a token");
        assert!(ids.len() == self.k && weights.len() == self.k, "routes of a token");
        let given = router_weights.unwrap_or_default();
        assert!(
            !self.weighting.needs_router_weights() || given.len() == self.experts,
            "router weights of a token"
        );
        select(logits, ids, weights);
        match self.weighting {
            Weighting::SoftmaxAll => softmax(logits, weights),
            Weighting::SoftmaxSelected => {
                let largest = weights[0];
                let sum: f32 = weights.iter().map(|&v| (v - largest).exp()).sum();
                for w in weights.iter_mut() {
                    *w = (*w - largest).exp() / sum;
                }
            }
            Weighting::Given => pick(given, ids, weights),
            Weighting::GivenNormalized => {
                pick(given, ids, weights);
                let sum: f32 = weights.iter().sum();
                for w in weights.iter_mut() {
                    *w = if sum == 0.0 { 0.0 } else { *w / sum };
                }
            }
            Weighting::SparseMixer => sparse_mixer(logits, ids, weights),
        }
    }

    /// [`Router::row`] for `[tokens, experts]` logits (and router weights) into `[tokens, k]` routes, over the pool.
    ///
    /// # Panics
    /// When a length is not the stated one.
    pub fn run(
        &self,
        pool: &Pool,
        logits: &[f32],
        router_weights: Option<&[f32]>,
        ids: &mut [u32],
        weights: &mut [f32],
    ) {
        let (e, k) = (self.experts, self.k);
        let tokens = logits.len() / e;
        assert_eq!(logits.len(), tokens * e, "router logits");
        assert!(router_weights.is_none_or(|w| w.len() == logits.len()), "router weights");
        assert!(ids.len() == tokens * k && weights.len() == tokens * k, "routes");
        let (ids, weights) = (UnsafeSlice::new(ids), UnsafeSlice::new(weights));
        pool.for_each(tokens, &|t| {
            // SAFETY: every token has its own range.
            let ids = unsafe { ids.range(t * k..(t + 1) * k) };
            // SAFETY: as above.
            let weights = unsafe { weights.range(t * k..(t + 1) * k) };
            let row = t * e..(t + 1) * e;
            self.row(&logits[row.clone()], router_weights.map(|w| &w[row]), ids, weights);
        });
    }
}

/// Whether `a` is selected before a `b` of lower index.
fn before(a: f32, b: f32) -> bool {
    match a.partial_cmp(&b) {
        Some(order) => order == Ordering::Greater,
        None => b.is_nan() && !a.is_nan(),
    }
}

/// The `ids.len()` largest, descending, with their values: insertion into a sorted list, as `k` is small.
fn select(logits: &[f32], ids: &mut [u32], values: &mut [f32]) {
    let mut filled = 0;
    for (e, &v) in logits.iter().enumerate() {
        let mut at = filled;
        while at > 0 && before(v, values[at - 1]) {
            at -= 1;
        }
        if at == ids.len() {
            continue;
        }
        filled = (filled + 1).min(ids.len());
        ids.copy_within(at..filled - 1, at + 1);
        values.copy_within(at..filled - 1, at + 1);
        (ids[at], values[at]) = (e as u32, v);
    }
}

/// Softmax over `logits` of the selected `values`, of which the first is the largest.
fn softmax(logits: &[f32], values: &mut [f32]) {
    let largest = values[0];
    let sum: f32 = logits.iter().map(|&v| (v - largest).exp()).sum();
    for v in values.iter_mut() {
        *v = (*v - largest).exp() / sum;
    }
}

fn pick(from: &[f32], ids: &[u32], out: &mut [f32]) {
    for (o, &id) in out.iter_mut().zip(ids) {
        *o = from[id as usize];
    }
}

/// Weights of the rounds; `select` has found the winners, since masking never removes the largest score.
fn sparse_mixer(logits: &[f32], ids: &[u32], weights: &mut [f32]) {
    for round in 0..ids.len() {
        let m = logits[ids[round] as usize];
        let sum: f32 = logits
            .iter()
            .enumerate()
            .filter(|&(e, s)| !ids[..round].contains(&(e as u32)) && !masked(*s, m))
            .map(|(_, s)| (s - m).exp())
            .sum();
        weights[round] = 1.0 / sum;
    }
}

fn masked(s: f32, m: f32) -> bool {
    (m - s) / s.abs().max(m) > 2.0 * SPARSE_MIXER_EPS
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn route(logits: &[f32], given: Option<&[f32]>, k: usize, weighting: Weighting) -> (Vec<u32>, Vec<f32>) {
        let (mut ids, mut weights) = (vec![99; k], vec![99.0; k]);
        Router::new(logits.len(), k, weighting).unwrap().row(logits, given, &mut ids, &mut weights);
        (ids, weights)
    }

    fn near(found: &[f32], expected: &[f32]) {
        assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?} for {expected:?}");
    }

    /// The worked example of contract 1.6.
    #[test]
    fn worked_example() {
        let (logits, given) = ([2.0, 1.0, 0.0, -1.0], [0.2, 0.1, 0.6, 0.1]);
        let cases = [
            (Weighting::of(true, false, false), [0.7310586, 0.2689414]),
            (Weighting::of(false, false, false), [0.6439143, 0.2368828]),
            (Weighting::of(false, true, false), [0.2, 0.1]),
            (Weighting::of(true, true, false), [0.6666667, 0.3333333]),
        ];
        for (weighting, expected) in cases {
            let (ids, weights) = route(&logits, Some(&given), 2, weighting.unwrap());
            assert_eq!(ids, [0, 1]);
            near(&weights, &expected);
        }
        assert_eq!(Weighting::of(true, true, true), None);
    }

    #[test]
    fn ties_infinities_and_nan() {
        const INF: f32 = f32::INFINITY;
        assert_eq!(route(&[1.0, 3.0, 3.0, 3.0], None, 2, Weighting::SoftmaxSelected).0, [1, 2]);
        let (ids, weights) =
            route(&[-INF, 5.0, -INF, 5.0], Some(&[0.1, -0.2, 0.3, 0.4]), 2, Weighting::Given);
        assert_eq!((ids, weights), (vec![1, 3], vec![-0.2, 0.4]));
        let (ids, weights) = route(&[-INF, 5.0, -INF], None, 2, Weighting::SoftmaxSelected);
        assert_eq!((ids, weights), (vec![1, 0], vec![1.0, 0.0]));
        let nan = f32::NAN;
        assert_eq!(route(&[nan, -INF, nan, 0.0], Some(&[1.0; 4]), 3, Weighting::Given).0, [3, 1, 0]);
        assert_eq!(route(&[nan; 3], Some(&[1.0; 3]), 2, Weighting::Given).0, [0, 1]);
        let (_, weights) = route(&[1.0, 0.0], Some(&[1.0, -1.0]), 2, Weighting::GivenNormalized);
        assert_eq!(weights, [0.0, 0.0]);
        assert!(
            Router::new(4, 5, Weighting::Given).is_none() && Router::new(4, 0, Weighting::Given).is_none()
        );
    }

    /// Scores 10, 9.9 and 5: in round one 9.9 is within 2 %, in round two 5 is masked.
    #[test]
    fn sparse_mixer_rounds() {
        let (ids, weights) = route(&[5.0, 10.0, 9.9], None, 2, Weighting::SparseMixer);
        assert_eq!(ids, [1, 2]);
        near(&weights, &[1.0 / (1.0 + (-0.1f32).exp()), 1.0]);
        let (ids, weights) = route(&[0.0, 0.0, -1.0], None, 2, Weighting::SparseMixer);
        assert_eq!(ids, [0, 1]);
        near(&weights, &[0.5, 1.0]);
    }

    proptest! {
        /// Selection is the head of a stable descending sort.
        #[test]
        fn selects_like_a_stable_sort(logits in proptest::collection::vec(-3i8..4, 1..40), k in 1usize..10) {
            let k = k.min(logits.len());
            let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
            let mut order: Vec<u32> = (0..logits.len() as u32).collect();
            order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
            let (ids, weights) = route(&logits, None, k, Weighting::SoftmaxSelected);
            prop_assert_eq!(&ids, &order[..k]);
            prop_assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        }
    }
}
