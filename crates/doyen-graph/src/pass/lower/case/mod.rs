//! Operator cases for lowered backends: a small graph and its inputs as one step over sequences.
//!
//! * this file: what a case becomes, and graphs without state: every input is a value of the step with the extents of
//!   the tensor given, operands that must be constant are taken from the tensors given
//! * `constants`: which operands those are
//! * `attention`: GroupQueryAttention, where each batch row becomes a sequence
//! * `recurrent`: LinearAttention and CausalConvWithState, likewise
//!
//! Called by the conformance runners of the backends. The reference runs first: it gives every extent, and every
//! error that depends on the inputs.

mod attention;
mod constants;
mod recurrent;

use super::{
    emit::{Emitter, compute_type},
    rewrite,
};
use crate::{
    ir::{Constant, Fact, Graph, Node, ValueId},
    lowered::{CacheSlot, Extent, Lowered, Operand, StateId},
    ops::Op,
    pass::fold::{FoldLimits, fold},
};
use bytes::Bytes;
use doyen_tensor::{ByteCount, DType, Shape, Tensor, TensorError};
use std::{collections::HashMap, sync::Arc};

/// A case as one step of a lowered graph.
#[derive(Debug, Clone)]
pub struct LoweredCase {
    /// The graph.
    pub graph: Lowered,
    /// Values of [`Lowered::inputs`], in order, in the compute type.
    pub inputs: Vec<Tensor>,
    /// The sequences of the step, in order. A graph without state runs with one new token.
    pub sequences: Vec<CaseSequence>,
    /// How each output of the exported graph is made, in order.
    pub outputs: Vec<CaseOutput>,
}

/// A sequence of the step.
#[derive(Debug, Clone, PartialEq)]
pub struct CaseSequence {
    /// New tokens; their ids mean nothing.
    pub new: usize,
    /// Positions cached before the step.
    pub past: usize,
    /// Rows `0..past` of each cache, `[kv_heads, past, head_size]` of the stored type: keys, values.
    pub caches: Vec<(CacheSlot, Tensor, Tensor)>,
    /// States of fixed size before the step, in float32 and the extents of the graph's; zeros where none is given.
    pub states: Vec<(StateId, Tensor)>,
}

/// How an output of the exported graph is made from what the step leaves.
#[derive(Debug, Clone, PartialEq)]
pub struct CaseOutput {
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Shape,
    /// Where the elements are.
    pub source: CaseSource,
}

/// Where the elements of an output are.
#[derive(Debug, Clone, PartialEq)]
pub enum CaseSource {
    /// Folding made it; no step computes it.
    Constant(Tensor),
    /// Output `index` of the lowered graph, element for element.
    Output(usize),
    /// Output `index` of the lowered graph, `[1, tokens, size]`: the tokens of sequence `b` are rows `0..new` of batch
    /// row `b`. Other rows are not specified; they are left zero.
    Tokens(usize),
    /// The caches after the step: rows of sequence `b` are rows of batch row `b`. With a sliding cache of this
    /// capacity and window, the latest rows only.
    Cache {
        /// The cache.
        slot: CacheSlot,
        /// Values rather than keys.
        is_value: bool,
        /// Capacity and window of a sliding cache.
        sliding: Option<(usize, usize)>,
    },
    /// A state of fixed size after the step: that of sequence `b` is batch row `b`.
    State {
        /// The state.
        state: StateId,
        /// Whether the export has the state's two axes the other way round.
        swapped: bool,
    },
}

/// Why a case is not lowered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CaseRefusal {
    /// The case itself is wrong: what the reference says.
    #[error("{0}")]
    Invalid(String),
    /// A lowered graph cannot express it or cannot show the output asked for.
    #[error("not expressible over ragged tokens: {0}")]
    Inexpressible(String),
}

impl From<TensorError> for CaseRefusal {
    fn from(e: TensorError) -> Self {
        Self::Invalid(e.to_string())
    }
}

/// Memory a case may take to fold.
const CASE_LIMITS: FoldLimits = FoldLimits { node: ByteCount(256 << 20), total: ByteCount(512 << 20) };

/// Lowers a checked graph with the tensors of its inputs, in the order of [`Graph::inputs`].
///
/// # Errors
/// What the reference refuses, or why the case cannot be expressed.
pub fn lower_case(graph: &Graph, inputs: &[Tensor]) -> Result<LoweredCase, CaseRefusal> {
    if inputs.len() != graph.inputs.len() {
        let (expected, found) = (graph.inputs.len(), inputs.len());
        return Err(CaseRefusal::Invalid(format!("expected {expected} graph inputs, found {found}")));
    }
    let mut graph = graph.clone();
    let given: HashMap<ValueId, Tensor> = graph.inputs.iter().copied().zip(inputs.iter().cloned()).collect();
    for id in constants::demanded(&graph) {
        if let Some(t) = given.get(&id) {
            graph.value_mut(id).fact = Fact::from(Arc::new(Constant::from(t.clone())));
        }
    }
    fold(&mut graph, CASE_LIMITS).map_err(|e| CaseRefusal::Invalid(e.to_string()))?;
    let known = reference(&graph, &given)?;
    let mut case = Case { emit: Emitter::new(&graph), graph: &graph, known, inputs: Vec::new(), batch: None };
    for node in &graph.nodes {
        match &node.op {
            Op::GroupQueryAttention(op) => attention::lower(&mut case, node, op)?,
            Op::LinearAttention(op) => recurrent::linear_attention(&mut case, node, op)?,
            Op::CausalConv(op) => recurrent::causal_conv(&mut case, node, op)?,
            _ => case.node(node)?,
        }
    }
    case.finish()
}

/// Every value of the graph, by the scalar reference.
fn reference(
    graph: &Graph,
    given: &HashMap<ValueId, Tensor>,
) -> Result<HashMap<ValueId, Tensor>, CaseRefusal> {
    let mut known = given.clone();
    for (i, value) in graph.values().iter().enumerate() {
        if let Some(c) = &value.fact.constant {
            known.insert(ValueId(i as u32), c.to_tensor()?);
        }
    }
    for node in &graph.nodes {
        let inputs: Vec<Option<&Tensor>> =
            node.inputs.iter().map(|i| i.and_then(|i| known.get(&i))).collect();
        let results = node.op.eval(&inputs, node.outputs.len());
        let results = results.map_err(|e| CaseRefusal::Invalid(node.error(e).to_string()))?;
        for (v, t) in node.outputs.iter().zip(results) {
            if let Some(v) = v {
                known.insert(*v, t);
            }
        }
    }
    Ok(known)
}

/// A case being lowered.
struct Case<'a> {
    graph: &'a Graph,
    emit: Emitter<'a>,
    known: HashMap<ValueId, Tensor>,
    inputs: Vec<Tensor>,
    /// The sequences and the outputs that are rows of tokens or caches, once an attention was lowered.
    batch: Option<attention::Batch>,
}

impl Case<'_> {
    fn tensor(&self, id: ValueId) -> Result<&Tensor, CaseRefusal> {
        self.known
            .get(&id)
            .ok_or_else(|| CaseRefusal::Invalid(format!("{:?} has no value", self.graph.value(id).name)))
    }

    /// A value with the extents it has in the case.
    fn fixed(&mut self, id: ValueId) -> Result<crate::lowered::LValueId, CaseRefusal> {
        let t = self.tensor(id)?;
        let (dtype, dims) = (t.dtype(), t.shape().iter().map(|&d| Extent::Fixed(d)).collect());
        Ok(self.emit.value(id, dtype, dims))
    }

    fn operand(&mut self, id: ValueId) -> Result<Operand, CaseRefusal> {
        if let Some(c) = self.emit.constant(id) {
            return Ok(c);
        }
        if let Some(v) = self.emit.find(id) {
            return Ok(Operand::Value(v));
        }
        let t = widened(self.tensor(id)?)?;
        let v = self.fixed(id)?;
        self.emit.out.inputs.push(v);
        self.inputs.push(t);
        Ok(Operand::Value(v))
    }

    fn node(&mut self, node: &Node) -> Result<(), CaseRefusal> {
        let after = self.batch.as_ref().and_then(|b| node.inputs.iter().flatten().find(|v| b.covers(**v)));
        if let Some(v) = after {
            let name = &self.graph.value(*v).name;
            let reason = format!("node {:?} reads {name:?}, which is ragged there", node.name);
            return Err(CaseRefusal::Inexpressible(reason));
        }
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for v in &node.inputs {
            inputs.push(v.map(|v| self.operand(v)).transpose()?);
        }
        let mut outputs = Vec::with_capacity(node.outputs.len());
        for v in &node.outputs {
            outputs.push(v.map(|v| self.fixed(v)).transpose()?);
        }
        if let (Op::QMoe(_) | Op::Moe(_), [Some(y)]) = (&node.op, outputs.as_slice()) {
            let refused = self.emit.experts(node, &inputs, *y);
            return refused.map_err(|e| CaseRefusal::Inexpressible(e.to_string()));
        }
        self.emit.plain(node, inputs, outputs);
        Ok(())
    }

    fn finish(mut self) -> Result<LoweredCase, CaseRefusal> {
        let mut outputs = Vec::with_capacity(self.graph.outputs.len());
        for &id in &self.graph.outputs {
            let t = self.tensor(id)?.clone();
            let source = match self.batch.as_ref().and_then(|b| b.source(id)) {
                Some(source) => self.resolve(id, source),
                None => self.plain_source(id, &t),
            };
            outputs.push(CaseOutput { dtype: t.dtype(), shape: t.shape().clone(), source });
        }
        let sequences = match self.batch {
            Some(batch) => batch.sequences,
            None => vec![CaseSequence { new: 1, past: 0, caches: Vec::new(), states: Vec::new() }],
        };
        let mut graph = self.emit.out;
        rewrite::fuse(&mut graph);
        Ok(LoweredCase { graph, inputs: self.inputs, sequences, outputs })
    }

    fn plain_source(&mut self, id: ValueId, t: &Tensor) -> CaseSource {
        if self.graph.value(id).fact.constant.is_some() {
            return CaseSource::Constant(t.clone());
        }
        match self.operand(id) {
            Ok(Operand::Value(v)) => {
                self.emit.out.outputs.push(v);
                CaseSource::Output(self.emit.out.outputs.len() - 1)
            }
            _ => CaseSource::Constant(t.clone()),
        }
    }

    /// Numbers the outputs of the lowered graph that are rows of tokens.
    fn resolve(&mut self, id: ValueId, source: CaseSource) -> CaseSource {
        match (source, self.emit.find(id)) {
            (CaseSource::Tokens(_), Some(v)) => {
                self.emit.out.outputs.push(v);
                CaseSource::Tokens(self.emit.out.outputs.len() - 1)
            }
            (other, _) => other,
        }
    }
}

/// The tensor in its compute type.
fn widened(t: &Tensor) -> Result<Tensor, TensorError> {
    if compute_type(t.dtype()) == t.dtype() {
        return Ok(t.clone());
    }
    Tensor::from_slice(t.shape().clone(), &t.to_f32()?)
}

impl LoweredCase {
    /// The outputs of the exported graph, from the outputs of the lowered one, the states of fixed size of every sequence
    /// after the step, and a reader of caches: rows `0..len` of a sequence's cache, `[kv_heads, len, head_size]` of the
    /// stored type, keys and values.
    ///
    /// # Errors
    /// When a tensor is not what the case expects.
    pub fn assemble<E: From<TensorError>>(
        &self,
        results: &[Tensor],
        states: &[Vec<Tensor>],
        mut read: impl FnMut(usize, CacheSlot, usize) -> Result<(Tensor, Tensor), E>,
    ) -> Result<Vec<Tensor>, E> {
        let mut all = Vec::with_capacity(self.outputs.len());
        for o in &self.outputs {
            let missing = |i: usize| TensorError::Format(format!("the step gave no output {i}"));
            all.push(match &o.source {
                CaseSource::Constant(t) => t.clone(),
                CaseSource::Output(i) => o.stored(results.get(*i).ok_or_else(|| missing(*i))?)?,
                CaseSource::Tokens(i) => {
                    let rows = self.by_batch(o, results.get(*i).ok_or_else(|| missing(*i))?)?;
                    o.stored(&rows)?
                }
                CaseSource::Cache { slot, is_value, sliding } => {
                    let mut rows = Vec::with_capacity(self.sequences.len());
                    for (i, s) in self.sequences.iter().enumerate() {
                        let (keys, values) = read(i, *slot, s.past + s.new)?;
                        rows.push(if *is_value { values } else { keys });
                    }
                    attention::present(o, &rows, *sliding)?
                }
                CaseSource::State { state, swapped } => recurrent::present(o, states, *state, *swapped)?,
            });
        }
        Ok(all)
    }

    /// Rows of tokens as `[batch, sequence, size]` in float32.
    fn by_batch(&self, o: &CaseOutput, tokens: &Tensor) -> Result<Tensor, TensorError> {
        let from = tokens.to_f32()?;
        let (per_row, size) = (o.shape[1], o.shape[2]);
        let mut to = vec![0f32; o.shape.numel()?];
        let mut first = 0;
        for (b, s) in self.sequences.iter().enumerate() {
            let n = s.new * size;
            let at = b * per_row * size;
            to[at..at + n].copy_from_slice(&from[first..first + n]);
            first += n;
        }
        Tensor::from_slice(o.shape.clone(), &to)
    }
}

impl CaseOutput {
    /// Elements of the compute type under the output's shape and type.
    fn stored(&self, t: &Tensor) -> Result<Tensor, TensorError> {
        if self.dtype.is_float() {
            return Tensor::from_f32(self.dtype, self.shape.clone(), &t.to_f32()?);
        }
        t.reshaped(self.shape.clone())
    }

    /// A tensor of zero bytes.
    fn zeros(&self) -> Result<Vec<u8>, TensorError> {
        Ok(vec![0; self.shape.bytes(self.dtype)?])
    }

    fn of_bytes(&self, bytes: Vec<u8>) -> Result<Tensor, TensorError> {
        Tensor::from_bytes(self.dtype, self.shape.clone(), Bytes::from(bytes))
    }
}
