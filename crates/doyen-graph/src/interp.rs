//! The reference interpreter: runs a checked, unlowered graph with every operator's scalar reference.
//!
//! It is the judge of every backend and never tuned. Values are freed when nobody reads them any more; the memory of a
//! run is bounded, so that a graph that asks for a terabyte is an error and not the end of the process.

use crate::{
    ir::{Constant, Dim, Fact, Graph, GraphError, Node, ValueId},
    ops::OpError,
};
use doyen_tensor::{ByteCount, Tensor, TensorError};
use std::sync::Arc;

/// Memory a run may take for computed values, unless told otherwise.
pub const DEFAULT_MEMORY_LIMIT: ByteCount = ByteCount(4 << 30);

/// Why a run failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RunError {
    /// A graph input that is missing, unknown or of another type or shape than declared.
    #[error("graph input {name:?}: expected {expected}, found {found}")]
    Input {
        /// Input name.
        name: String,
        /// What the graph declares.
        expected: String,
        /// What was given.
        found: String,
    },
    /// An operator refuses its inputs.
    #[error(transparent)]
    Node(#[from] GraphError),
    /// A constant that cannot be laid out as a tensor.
    #[error("constant {name:?}: {source}")]
    Constant {
        /// Value name.
        name: String,
        /// Why.
        #[source]
        source: TensorError,
    },
    /// A node whose results would not fit the memory limit.
    #[error("node {node:?} ({op}): its outputs need {needed} beside {live} in use; the limit is {limit}")]
    Memory {
        /// Node name.
        node: String,
        /// Operator.
        op: String,
        /// Bytes of its outputs.
        needed: ByteCount,
        /// Bytes of the values alive.
        live: ByteCount,
        /// The limit.
        limit: ByteCount,
    },
}

/// Runs a graph. The graph must have passed [`crate::check::check`].
#[derive(Debug)]
pub struct Interpreter<'g> {
    graph: &'g Graph,
    /// Values that are read for the last time by each node, by node index.
    dying: Vec<Vec<ValueId>>,
    memory_limit: ByteCount,
}

impl<'g> Interpreter<'g> {
    /// An interpreter of this graph with [`DEFAULT_MEMORY_LIMIT`].
    pub fn new(graph: &'g Graph) -> Self {
        let mut last = vec![None; graph.values().len()];
        for (n, node) in graph.nodes.iter().enumerate() {
            for v in node.inputs.iter().chain(&node.outputs).flatten() {
                last[v.index()] = Some(n);
            }
        }
        for v in &graph.outputs {
            last[v.index()] = None;
        }
        let mut dying = vec![Vec::new(); graph.nodes.len()];
        for (v, n) in last.into_iter().enumerate() {
            if let Some(n) = n {
                dying[n].push(ValueId(v as u32));
            }
        }
        Self { graph, dying, memory_limit: DEFAULT_MEMORY_LIMIT }
    }

    /// The same with another bound on the memory of computed values.
    #[must_use]
    pub const fn with_memory_limit(mut self, limit: ByteCount) -> Self {
        self.memory_limit = limit;
        self
    }

    /// Runs the graph on named inputs; the results are in the order of the graph's outputs.
    ///
    /// # Errors
    /// When an input is missing, unknown or of the wrong type or shape, an operator refuses its inputs (with the
    /// node's name), or memory would exceed the limit.
    pub fn run(&self, inputs: &[(&str, Tensor)]) -> Result<Vec<Tensor>, RunError> {
        self.run_with(inputs, |_, _| {})
    }

    /// As [`Interpreter::run`]; `see` is shown every computed value when its node has run.
    ///
    /// # Errors
    /// As [`Interpreter::run`].
    pub fn run_with(
        &self,
        inputs: &[(&str, Tensor)],
        mut see: impl FnMut(ValueId, &Tensor),
    ) -> Result<Vec<Tensor>, RunError> {
        let mut values = Values { tensors: vec![None; self.graph.values().len()], live: 0 };
        self.feed(inputs, &mut values)?;
        for (node, dying) in self.graph.nodes.iter().zip(&self.dying) {
            for &v in node.inputs.iter().flatten() {
                self.materialise(v, &mut values)?;
            }
            let outputs = self.node(node, &values)?;
            for (&v, tensor) in node.outputs.iter().zip(outputs) {
                if let Some(v) = v {
                    see(v, &tensor);
                    values.set(v, tensor);
                }
            }
            for &v in dying {
                values.free(v);
            }
        }
        let mut out = Vec::with_capacity(self.graph.outputs.len());
        for &v in &self.graph.outputs {
            self.materialise(v, &mut values)?;
            out.push(values.get(v).cloned().ok_or_else(|| missing(&self.graph.value(v).name))?);
        }
        Ok(out)
    }

    fn feed(&self, inputs: &[(&str, Tensor)], values: &mut Values) -> Result<(), RunError> {
        for (name, tensor) in inputs {
            let id = self.graph.find(name).filter(|v| self.graph.inputs.contains(v));
            let Some(id) = id else {
                return Err(RunError::Input {
                    name: (*name).to_owned(),
                    expected: "an input of the graph".into(),
                    found: "none of this name".into(),
                });
            };
            accepts(&self.graph.value(id).fact, tensor).map_err(|expected| RunError::Input {
                name: (*name).to_owned(),
                expected,
                found: format!("{}{}", tensor.dtype(), tensor.shape()),
            })?;
            values.set(id, tensor.clone());
        }
        for &v in &self.graph.inputs {
            if values.get(v).is_none() {
                let value = self.graph.value(v);
                return Err(RunError::Input {
                    name: value.name.clone(),
                    expected: declared(&value.fact),
                    found: "nothing".into(),
                });
            }
        }
        Ok(())
    }

    /// Makes a constant a tensor when it is first read.
    fn materialise(&self, v: ValueId, values: &mut Values) -> Result<(), RunError> {
        if values.get(v).is_some() {
            return Ok(());
        }
        let value = self.graph.value(v);
        if let Some(c) = &value.fact.constant {
            let tensor =
                c.to_tensor().map_err(|source| RunError::Constant { name: value.name.clone(), source })?;
            values.tensors[v.index()] = Some((tensor, 0));
        }
        Ok(())
    }

    fn node(&self, node: &Node, values: &Values) -> Result<Vec<Tensor>, RunError> {
        let inputs: Vec<Option<&Tensor>> = node
            .inputs
            .iter()
            .map(|v| v.map(|v| values.get(v).ok_or_else(|| missing(&self.graph.value(v).name))).transpose())
            .collect::<Result<_, _>>()?;
        let expected = self.bound(node, &inputs, values.live)?;
        let outputs = node.op.eval(&inputs, node.outputs.len()).map_err(|e| node.error(e))?;
        for (fact, output) in expected.iter().zip(&outputs) {
            accepts(fact, output).map_err(|expected| {
                let found = format!("{}{}", output.dtype(), output.shape());
                node.error(OpError::other(format!("its shape rule says {expected}, its result is {found}")))
            })?;
        }
        // Operators may leave optional outputs at the end uncomputed only where the node does not name them.
        if node.outputs.iter().skip(outputs.len()).any(Option::is_some) {
            let e = format!("expected {} outputs, the operator has {}", node.outputs.len(), outputs.len());
            return Err(node.error(OpError::other(e)).into());
        }
        Ok(outputs)
    }

    /// Refuses a node whose outputs would not fit, by its shape rule on the shapes and data at hand.
    /// Returns what the rule says of the outputs.
    fn bound(&self, node: &Node, inputs: &[Option<&Tensor>], live: u64) -> Result<Vec<Fact>, RunError> {
        let facts: Vec<Option<Fact>> =
            inputs.iter().map(|t| t.map(|t| Fact::from(Arc::new(Constant::from(t.clone()))))).collect();
        let facts: Vec<Option<&Fact>> = facts.iter().map(Option::as_ref).collect();
        let outputs = node.op.infer_outputs(&facts, node.outputs.len()).map_err(|e| node.error(e))?;
        let mut needed = 0u64;
        for (fact, _) in outputs.iter().zip(&node.outputs).filter(|(_, v)| v.is_some()) {
            if let (Some(shape), Some(dtype)) = (fact.concrete_shape(), fact.dtype) {
                let bytes = shape.bytes(dtype).map_err(|e| node.error(e.into()))?;
                needed = needed.saturating_add(bytes as u64);
            }
        }
        if live.saturating_add(needed) > self.memory_limit.0 {
            return Err(RunError::Memory {
                node: node.name.clone(),
                op: node.op_name(),
                needed: ByteCount(needed),
                live: ByteCount(live),
                limit: self.memory_limit,
            });
        }
        Ok(outputs)
    }
}

/// The values of a run, with the bytes each counts for.
struct Values {
    tensors: Vec<Option<(Tensor, u64)>>,
    live: u64,
}

impl Values {
    fn get(&self, v: ValueId) -> Option<&Tensor> {
        self.tensors[v.index()].as_ref().map(|(t, _)| t)
    }

    fn set(&mut self, v: ValueId, tensor: Tensor) {
        self.free(v);
        let bytes = tensor.bytes().len() as u64;
        self.live += bytes;
        self.tensors[v.index()] = Some((tensor, bytes));
    }

    fn free(&mut self, v: ValueId) {
        if let Some((_, bytes)) = self.tensors[v.index()].take() {
            self.live -= bytes;
        }
    }
}

fn missing(name: &str) -> RunError {
    RunError::Node(GraphError::Graph(format!("value {name:?} has no producer; was the graph checked?")))
}

fn declared(fact: &Fact) -> String {
    let shape = fact.shape.as_ref().map_or_else(|| " of any shape".into(), |_| fact.shape_text());
    fact.dtype.map_or_else(|| format!("a tensor{shape}"), |d| format!("{d}{shape}"))
}

/// Whether a tensor is what an input declares; the declaration otherwise. Names of dimensions are not compared: exporters
/// use one name for extents that differ.
fn accepts(fact: &Fact, tensor: &Tensor) -> Result<(), String> {
    let same_type = fact.dtype.is_none_or(|d| d == tensor.dtype());
    let same_shape = fact.shape.as_ref().is_none_or(|s| {
        s.len() == tensor.shape().len()
            && s.iter().zip(tensor.shape().iter()).all(|(d, &n)| d.compatible(&Dim::Known(n)))
    });
    if same_type && same_shape { Ok(()) } else { Err(declared(fact)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{check::check, ir::Attrs};
    use doyen_tensor::DType;

    /// `y = x + c`, then `z = y + y`.
    fn graph() -> Graph {
        let mut g = Graph::new("g", [("", 21)]);
        let x = g.add_input("x", Fact::new(DType::F32, [Dim::from("n")]));
        let c = g.add_constant("c", Tensor::from_slice([1], &[1.0f32]).unwrap());
        let add = ("", "Add");
        let y = g.add_node("first", add, Attrs::default(), &[Some(x), Some(c)], &["y"]).unwrap()[0];
        let z = g.add_node("second", add, Attrs::default(), &[Some(y), Some(y)], &["z"]).unwrap()[0];
        g.add_output(z);
        check(&mut g).unwrap();
        g
    }

    #[test]
    fn runs_and_shows_every_value() {
        let g = graph();
        let mut seen = Vec::new();
        let x = Tensor::from_slice([2], &[1.0f32, 2.0]).unwrap();
        let out = Interpreter::new(&g)
            .run_with(&[("x", x)], |v, t| seen.push((g.value(v).name.clone(), t.to_f32().unwrap())))
            .unwrap();
        assert_eq!(out[0].to_f32().unwrap(), [4.0, 6.0]);
        assert_eq!(seen, [("y".to_owned(), vec![2.0, 3.0]), ("z".to_owned(), vec![4.0, 6.0])]);
    }

    #[test]
    fn inputs_must_be_those_declared() {
        let g = graph();
        let run = |inputs: &[(&str, Tensor)]| Interpreter::new(&g).run(inputs).unwrap_err().to_string();
        assert_eq!(run(&[]), "graph input \"x\": expected float32[n], found nothing");
        let ints = Tensor::from_slice([2], &[1i64, 2]).unwrap();
        assert_eq!(run(&[("x", ints.clone())]), "graph input \"x\": expected float32[n], found int64[2]");
        assert!(run(&[("y", ints)]).contains("none of this name"));
    }

    #[test]
    fn memory_is_bounded_before_a_node_runs() {
        let g = graph();
        let x = Tensor::from_slice([100], &[1.0f32; 100]).unwrap();
        let interpreter = Interpreter::new(&g).with_memory_limit(ByteCount(1000));
        // x is dead when z is made, so that never more than two of the three are alive.
        interpreter.run(&[("x", x.clone())]).unwrap();
        let tight = Interpreter::new(&g).with_memory_limit(ByteCount(700)).run(&[("x", x)]).unwrap_err();
        assert!(matches!(&tight, RunError::Memory { node, .. } if node == "first"), "{tight}");
    }
}
