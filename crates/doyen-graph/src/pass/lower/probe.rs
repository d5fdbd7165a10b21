//! Runs of the graph in thought: at batch 1, with so many cached and so many new tokens.
//!
//! Values that depend on lengths alone are computed by the scalar reference; of the others only type and extents are
//! inferred. What the results mean is decided in `meaning`.

use super::{
    LowerError,
    class::Class,
    ports::{Ports, Role, past_fact, state_fact},
};
use crate::ir::{Constant, Dim, Fact, Graph, Node, ValueId};
use doyen_tensor::{DType, Shape, Tensor, TensorError};
use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

/// Lengths of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Lengths {
    /// Cached tokens.
    pub(super) past: usize,
    /// New tokens.
    pub(super) new: usize,
}

impl Lengths {
    pub(super) const fn new(past: usize, new: usize) -> Self {
        Self { past, new }
    }

    pub(super) const fn total(self) -> usize {
        self.past + self.new
    }
}

/// A run: what is known then of each value that the included nodes make or read.
#[derive(Debug, Clone)]
pub(super) struct Run<'g> {
    pub(super) lengths: Lengths,
    graph: &'g Graph,
    facts: HashMap<ValueId, Fact>,
}

impl Run<'_> {
    /// What is known of a value.
    pub(super) fn fact(&self, id: ValueId) -> Option<&Fact> {
        self.facts.get(&id).or_else(|| {
            let own = &self.graph.value(id).fact;
            own.constant.is_some().then_some(own)
        })
    }

    /// The extents of a value, when all are known.
    pub(super) fn shape(&self, id: ValueId) -> Option<Shape> {
        self.fact(id)?.concrete_shape()
    }
}

/// Tokens that every export must take.
const ALWAYS: usize = 100;

/// Small lengths, always tried.
const SMALL: [Lengths; 7] = [
    Lengths::new(0, 1),
    Lengths::new(0, 3),
    Lengths::new(0, 5),
    Lengths::new(1, 1),
    Lengths::new(2, 3),
    Lengths::new(6, 1),
    Lengths::new(7, 5),
];

/// Positions beyond which no constant is taken for a length: twice the longest context in use, and small enough to
/// write a mask row down.
const LONGEST: usize = 1 << 18;

/// New tokens up to which a constant is also tried as the number of new tokens (masks grow with its square).
const MANY_NEW: usize = 64;

/// The lengths to try: a few small ones, and those around every integer that the included nodes read.
pub(super) fn lengths(graph: &Graph, nodes: &[bool]) -> Vec<Lengths> {
    let mut out: BTreeSet<Lengths> = SMALL.into();
    for c in integers(graph, nodes) {
        for total in c - 1..=c + 1 {
            out.extend(
                [1, 3].into_iter().filter(|&new| new <= total).map(|new| Lengths::new(total - new, new)),
            );
            if (1..=MANY_NEW).contains(&total) {
                out.extend([Lengths::new(0, total), Lengths::new(5, total)]);
            }
        }
    }
    out.into_iter().collect()
}

/// Integers above 1 in the small constants that the included nodes read.
fn integers(graph: &Graph, nodes: &[bool]) -> BTreeSet<usize> {
    /// Longer constants are tables, not parameters.
    const FEW: usize = 64;
    let mut out = BTreeSet::new();
    for (node, _) in graph.nodes.iter().zip(nodes).filter(|(_, wanted)| **wanted) {
        for c in node.inputs.iter().flatten().filter_map(|v| graph.value(*v).fact.constant.as_ref()) {
            if c.shape().numel().is_ok_and(|n| n <= FEW) {
                out.extend(
                    numbers(c)
                        .into_iter()
                        .filter(|&n| n > 1.0 && n < LONGEST as f64 && n.fract() == 0.0)
                        .map(|n| n as usize),
                );
            }
        }
    }
    out
}

fn numbers(c: &Constant) -> Vec<f64> {
    let Ok(t) = c.to_tensor() else { return Vec::new() };
    t.to_f64()
        .or_else(|_| Ok::<_, TensorError>(t.to_i64()?.into_iter().map(|v| v as f64).collect()))
        .unwrap_or_default()
}

/// Runs the included nodes.
///
/// # Errors
/// At small lengths, when an operator refuses its inputs. At others such a value is left unknown: the export itself
/// does not run there.
pub(super) fn run<'g>(
    graph: &'g Graph,
    ports: &Ports,
    class: &[Class],
    nodes: &[bool],
    lengths: Lengths,
) -> Result<Run<'g>, LowerError> {
    let mut run = Run { lengths, graph, facts: HashMap::new() };
    for (&id, &role) in &ports.roles {
        run.facts.insert(id, input_fact(graph, ports, id, role, lengths)?);
    }
    let must_run = lengths.total() <= ALWAYS;
    for (node, _) in graph.nodes.iter().zip(nodes).filter(|(_, wanted)| **wanted) {
        let is_length = node.outputs.iter().flatten().all(|v| class[v.index()] == Class::Length);
        let inputs: Option<Vec<Option<&Fact>>> =
            node.inputs.iter().map(|i| i.map_or(Some(None), |i| run.fact(i).map(Some))).collect();
        let Some(inputs) = inputs else { continue };
        let results = match node_facts(node, &inputs, is_length) {
            Ok(results) => results,
            Err(_) if !must_run => continue,
            Err(e) => return Err(e),
        };
        for (v, fact) in node.outputs.iter().zip(results) {
            if let Some(v) = v {
                run.facts.insert(*v, fact);
            }
        }
    }
    Ok(run)
}

/// Elements of a value that a run may compute: some query rows over the longest past, never its square. Of a larger one
/// only type and extents are known, so that it has no meaning.
const MANY_ELEMENTS: usize = 1 << 22;

fn node_facts(node: &Node, inputs: &[Option<&Fact>], is_length: bool) -> Result<Vec<Fact>, LowerError> {
    let inferred = node.op.infer(inputs).map_err(|e| node.error(e))?;
    let tensors: Option<Vec<Option<Tensor>>> = inputs
        .iter()
        .map(|f| match f {
            None => Some(None),
            Some(f) => f.constant.as_ref().and_then(|c| c.to_tensor().ok()).map(Some),
        })
        .collect();
    let Some(tensors) = tensors.filter(|_| is_length) else { return Ok(inferred) };
    let fits = |f: &Fact| f.concrete_shape().is_none_or(|s| s.numel().is_ok_and(|n| n <= MANY_ELEMENTS));
    if !inferred.iter().all(fits) {
        return Ok(inferred);
    }
    let refs: Vec<Option<&Tensor>> = tensors.iter().map(Option::as_ref).collect();
    let results = node.op.eval(&refs, node.outputs.len()).map_err(|e| node.error(e))?;
    Ok(results.into_iter().map(|t| Fact::from(Arc::new(Constant::from(t)))).collect())
}

fn input_fact(
    graph: &Graph,
    ports: &Ports,
    id: ValueId,
    role: Role,
    lengths: Lengths,
) -> Result<Fact, LowerError> {
    let value = graph.value(id);
    let refuse = |what: &str| {
        LowerError::port(&value.name, format!("expected {what}, found shape {}", value.fact.shape_text()))
    };
    let dtype = value.fact.dtype.unwrap_or(DType::I64);
    let rank = value.fact.rank();
    Ok(match role {
        Role::Tokens if rank == Some(2) => Fact::new(dtype, [Dim::Known(1), Dim::Known(lengths.new)]),
        Role::Tokens => return Err(refuse("token ids [batch, sequence]")),
        Role::Mask if rank == Some(2) => known(dtype, [1, lengths.total()].into(), &vec![1; lengths.total()])
            .map_err(|_| refuse("an integer mask"))?,
        Role::Mask => return Err(refuse("a mask [batch, past + sequence]")),
        Role::Positions => {
            let running = (lengths.past as i64..lengths.total() as i64).collect::<Vec<_>>();
            let (shape, copies): (Shape, usize) = match rank {
                Some(2) => ([1, lengths.new].into(), 1),
                Some(3) => ([3, 1, lengths.new].into(), 3),
                _ => return Err(refuse("positions [batch, sequence]")),
            };
            known(dtype, shape, &running.repeat(copies)).map_err(|_| refuse("integer positions"))?
        }
        Role::Past(_) => past_fact(&value.fact, lengths.past, ports.sliding.contains(&id))
            .ok_or_else(|| refuse("a cache [batch, kv_heads, past, head_size]"))?,
        Role::State(_) => state_fact(&value.fact),
    })
}

/// Integers as a tensor of the declared type.
fn known(dtype: DType, shape: Shape, values: &[i64]) -> Result<Fact, TensorError> {
    let t = match dtype {
        DType::I64 => Tensor::from_slice(shape, values)?,
        DType::I32 => Tensor::from_slice(shape, &values.iter().map(|&v| v as i32).collect::<Vec<_>>())?,
        found => return Err(TensorError::Type { expected: "int64 or int32", found }),
    };
    Ok(Fact::from(Arc::new(Constant::from(t))))
}
