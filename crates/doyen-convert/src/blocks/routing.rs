//! From router logits to what the experts' operators take: scores to choose by, and weights.
//!
//! The operators choose the experts with the largest `router_probs` and weight them by a softmax over those, or (QMoE
//! alone) by `router_weights` as they are. Every rule here is written in plain operators before them, so that any runtime
//! computes the same. All of it works along the last axis of `[batch, sequence, experts]`.

use super::{Builder, linear::scope};
use crate::{
    ConvertError,
    config::{Correction, Groups, Moe, Score},
    job::Rows,
    report::Part,
};
use doyen_graph::ir::{Attr, ValueId};
use doyen_tensor::FloatType;

/// How experts are chosen and weighted; values are `[batch, sequence, experts]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Routed {
    /// The experts with the largest are chosen.
    pub choice: ValueId,
    /// Their weights, where a softmax of `choice` over the chosen ones is not what is wanted.
    pub weights: Option<ValueId>,
    /// Whether `weights` are a softmax of `choice` over all experts.
    pub exponential: bool,
}

const LAST: (&str, i64) = ("axis", -1);

impl Builder<'_> {
    /// The scores and weights that `logits` mean.
    pub(crate) fn route(&mut self, module: &str, moe: &Moe, logits: ValueId) -> Result<Routed, ConvertError> {
        let routing = moe.routing;
        let at = format!("{}/{}", scope(module), moe.router.module.replace('.', "/"));
        let plain = routing.correction.is_none() && routing.groups.is_none();
        match routing.score {
            Score::SparseMixer { jitter } => {
                let weights = Some(self.sparse_mixer(&at, logits, jitter)?);
                Ok(Routed { choice: logits, weights, exponential: false })
            }
            Score::Softmax if plain && routing.normalize => {
                Ok(Routed { choice: logits, weights: None, exponential: true })
            }
            Score::Softmax if plain => {
                let weights = Some(self.along(&at, "Softmax", logits)?);
                Ok(Routed { choice: logits, weights, exponential: true })
            }
            score => {
                let logits = self.cast(&format!("{at}/float"), logits, FloatType::F32)?;
                let scores = match score {
                    Score::Sigmoid => self.node(&at, ("", "Sigmoid"), [], &[Some(logits)])?,
                    Score::Softmax | Score::SparseMixer { .. } => self.along(&at, "Softmax", logits)?,
                };
                let choice = self.choice(&at, module, moe, scores)?;
                let weights = Some(self.cast(&format!("{at}/weights"), scores, self.dtype)?);
                Ok(Routed { choice, weights, exponential: false })
            }
        }
    }

    /// Scores to choose by: corrected, limited to the best groups, and so that narrow types resolve the best.
    fn choice(
        &mut self,
        at: &str,
        module: &str,
        moe: &Moe,
        scores: ValueId,
    ) -> Result<ValueId, ConvertError> {
        let mut choice = scores;
        if let Some(correction) = moe.routing.correction {
            let bias = self.correction(module, correction, moe.experts)?;
            choice = self.node(&format!("{at}/correction"), ("", "Add"), [], &[Some(choice), Some(bias)])?;
        }
        if let Some(groups) = moe.routing.groups {
            choice = self.in_groups(&format!("{at}/groups"), groups, moe.experts, choice)?;
        }
        if self.dtype == FloatType::F32 {
            return Ok(choice);
        }
        let at = format!("{at}/choice");
        let best = self.reduce(&at, "ReduceMax", choice)?;
        let below = self.node(&at, ("", "Sub"), [], &[Some(choice), Some(best)])?;
        self.cast(&at, below, self.dtype)
    }

    fn correction(&mut self, module: &str, c: Correction, experts: usize) -> Result<ValueId, ConvertError> {
        let names = || c.tensors.iter().map(|t| format!("{module}.{t}"));
        let there = names().find(|n| self.checkpoint.contains(n));
        let name = there.or_else(|| names().next()).unwrap_or_default();
        let shape: &[usize] = if c.row { &[1, experts] } else { &[experts] };
        let rows = vec![Rows::Tensor(self.take(&name, shape)?)];
        Ok(self.store.float(&mut self.graph, &name, FloatType::F32, &[experts], rows, Part::Router))
    }

    /// Scores with those outside of the best groups at minus infinity.
    fn in_groups(
        &mut self,
        at: &str,
        groups: Groups,
        experts: usize,
        scores: ValueId,
    ) -> Result<ValueId, ConvertError> {
        let (g, each) = (groups.count, experts / groups.count);
        let split =
            self.ints(&format!("/model/constants/ints/0,0,{g},{each}"), &[0, 0, g as i64, each as i64])?;
        let joined = self.ints(&format!("/model/constants/ints/0,0,{experts}"), &[0, 0, experts as i64])?;
        let grouped = self.node(&format!("{at}/split"), ("", "Reshape"), [], &[Some(scores), Some(split)])?;
        let (best, _) = self.top_k(&format!("{at}/best"), grouped, groups.best)?;
        let axes = self.ints("/model/constants/ints/-1", &[-1])?;
        let keep = [("keepdims", 0i64.into())];
        let sums = self.node(at, ("", "ReduceSum"), keep, &[Some(best), Some(axes)])?;
        let (kept, indices) = self.top_k(&format!("{at}/kept"), sums, groups.kept)?;
        // Zero at the kept groups, minus infinity at the others.
        let out = self.floored(at, sums, FloatType::F32)?;
        let zero = self.scalar_of(FloatType::F32, 0.0)?;
        let zeros = self.node(&format!("{at}/zeros"), ("", "Mul"), [], &[Some(kept), Some(zero)])?;
        let mask = self.scatter(at, out, indices, zeros)?;
        let mask = self.node(at, ("", "Unsqueeze"), [], &[Some(mask), Some(axes)])?;
        let masked = self.node(&format!("{at}/mask"), ("", "Add"), [], &[Some(grouped), Some(mask)])?;
        self.node(&format!("{at}/join"), ("", "Reshape"), [], &[Some(masked), Some(joined)])
    }

    /// Weights of the two experts that SparseMixer chooses, which are those of the two largest logits: each has its share
    /// among the logits close to it, the first one's taken out for the second.
    fn sparse_mixer(&mut self, at: &str, logits: ValueId, jitter: f32) -> Result<ValueId, ConvertError> {
        let lowest = self.scalar(f32::NEG_INFINITY)?;
        let (best, first) = self.share(&format!("{at}/first"), logits, logits, jitter)?;
        let is_first = self.node(at, ("", "Equal"), [], &[Some(logits), Some(best)])?;
        let inputs = [Some(is_first), Some(lowest), Some(logits)];
        let rest = self.node(&format!("{at}/rest"), ("", "Where"), [], &inputs)?;
        let (_, second) = self.share(&format!("{at}/second"), logits, rest, jitter)?;
        self.node(at, ("", "Where"), [], &[Some(is_first), Some(first), Some(second)])
    }

    /// The best of what is left, and a softmax over those close to it.
    fn share(
        &mut self,
        at: &str,
        logits: ValueId,
        left: ValueId,
        jitter: f32,
    ) -> Result<(ValueId, ValueId), ConvertError> {
        let (lowest, band) = (self.scalar(f32::NEG_INFINITY)?, self.scalar(2.0 * jitter)?);
        let best = self.reduce(at, "ReduceMax", left)?;
        let distance = self.node(at, ("", "Sub"), [], &[Some(best), Some(logits)])?;
        let magnitude = self.node(at, ("", "Abs"), [], &[Some(logits)])?;
        let larger = self.node(at, ("", "Max"), [], &[Some(magnitude), Some(best)])?;
        let ratio = self.node(at, ("", "Div"), [], &[Some(distance), Some(larger)])?;
        let far = self.node(at, ("", "Greater"), [], &[Some(ratio), Some(band)])?;
        let close = self.node(at, ("", "Where"), [], &[Some(far), Some(lowest), Some(left)])?;
        Ok((best, self.along(at, "Softmax", close)?))
    }

    /// For experts whose operator knows no weights but a softmax over the chosen scores: scores with that softmax, and the
    /// sum of the chosen experts' weights.
    pub(crate) fn as_softmax(
        &mut self,
        at: &str,
        moe: &Moe,
        routed: Routed,
    ) -> Result<(ValueId, Option<ValueId>), ConvertError> {
        let Some(weights) = routed.weights else { return Ok((routed.choice, None)) };
        let (scores, chosen) = if routed.exponential {
            (routed.choice, self.top_k(at, weights, moe.top_k)?.0)
        } else {
            let (_, indices) = self.top_k(at, routed.choice, moe.top_k)?;
            let axis = [(LAST.0, LAST.1.into())];
            let chosen = self.node(at, ("", "GatherElements"), axis, &[Some(weights), Some(indices)])?;
            let logs = self.node(at, ("", "Log"), [], &[Some(chosen)])?;
            let floor = self.floored(at, routed.choice, self.dtype)?;
            (self.scatter(at, floor, indices, logs)?, chosen)
        };
        let sum = if moe.routing.normalize { None } else { Some(self.reduce(at, "ReduceSum", chosen)?) };
        Ok((scores, sum))
    }

    /// `[batch, sequence, experts]` as `[tokens, experts]`, as the operators take it.
    pub(crate) fn flat(&mut self, at: &str, x: ValueId, experts: usize) -> Result<ValueId, ConvertError> {
        let shape = self.ints(&format!("/model/constants/ints/-1,{experts}"), &[-1, experts as i64])?;
        self.node(at, ("", "Reshape"), [], &[Some(x), Some(shape)])
    }

    /// Minus infinity in the shape of `x`.
    fn floored(&mut self, at: &str, x: ValueId, ty: FloatType) -> Result<ValueId, ConvertError> {
        let lowest = self.scalar_of(ty, f32::NEG_INFINITY)?;
        self.node(&format!("{at}/lowest"), ("", "Min"), [], &[Some(x), Some(lowest)])
    }

    fn scatter(
        &mut self,
        at: &str,
        data: ValueId,
        indices: ValueId,
        updates: ValueId,
    ) -> Result<ValueId, ConvertError> {
        let axis: [(&str, Attr); 1] = [(LAST.0, LAST.1.into())];
        self.node(at, ("", "ScatterElements"), axis, &[Some(data), Some(indices), Some(updates)])
    }

    /// The largest `k` along the last axis, and where they are.
    fn top_k(&mut self, at: &str, x: ValueId, k: usize) -> Result<(ValueId, ValueId), ConvertError> {
        let k = self.ints(&format!("/model/constants/ints/{k}"), &[k as i64])?;
        let name = format!("{at}/TopK");
        let outputs = [format!("{name}/output_0"), format!("{name}/output_1")];
        let attrs = [(LAST.0, LAST.1.into())].into();
        let inputs = [Some(x), Some(k)];
        let [values, indices] =
            self.named_node(&name, ("", "TopK"), attrs, &inputs, [&outputs[0], &outputs[1]])?;
        Ok((values, indices))
    }

    /// A reduction of the last axis, which stays with extent 1.
    fn reduce(&mut self, at: &str, op: &str, x: ValueId) -> Result<ValueId, ConvertError> {
        let axis = self.ints("/model/constants/ints/-1", &[-1])?;
        self.node(at, ("", op), [("keepdims", 1i64.into())], &[Some(x), Some(axis)])
    }

    fn along(&mut self, at: &str, op: &str, x: ValueId) -> Result<ValueId, ConvertError> {
        self.node(at, ("", op), [(LAST.0, LAST.1.into())], &[Some(x)])
    }

    /// `x` in another float type; `x` itself where the package has no other.
    fn cast(&mut self, at: &str, x: ValueId, to: FloatType) -> Result<ValueId, ConvertError> {
        if self.dtype == FloatType::F32 {
            return Ok(x);
        }
        let to = [("to", i64::from(to.dtype().onnx()).into())];
        self.node(at, ("", "Cast"), to, &[Some(x)])
    }
}
