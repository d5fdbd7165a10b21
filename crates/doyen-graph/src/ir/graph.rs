//! Values, nodes and the graph that owns them.

use super::{Attrs, Constant, Fact};
use crate::ops::{Op, OpError};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// A value of one graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

/// A node of one graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

impl ValueId {
    /// The id as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl NodeId {
    /// The id as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A named value with what is declared or known of it.
#[derive(Debug, Clone)]
pub struct Value {
    /// Name in the file; unique.
    pub name: String,
    /// Declared type and shape, and the data of an initializer.
    pub fact: Fact,
}

/// One operator application.
#[derive(Debug, Clone)]
pub struct Node {
    /// Name in the file, or a made-up unique one (`/QMoE_17`).
    pub name: String,
    /// Operator domain, "" for ai.onnx.
    pub domain: String,
    /// Operator name.
    pub op_type: String,
    /// Attributes as written, for encoding and display.
    pub attrs: Attrs,
    /// The operator with its attributes parsed and checked.
    pub op: Op,
    /// Inputs; `None` where an optional input is absent.
    pub inputs: Vec<Option<ValueId>>,
    /// Outputs; `None` where nobody wants it.
    pub outputs: Vec<Option<ValueId>>,
}

/// What is wrong with a graph, with the node it is wrong at.
#[derive(Debug, Clone, thiserror::Error)]
pub enum GraphError {
    /// An operator refuses its attributes or inputs.
    #[error("node {node:?} ({op}): {source}")]
    Node {
        /// Node name.
        node: String,
        /// Operator, with its domain if it is not the default.
        op: String,
        /// What is wrong.
        #[source]
        source: Box<OpError>,
    },
    /// Something about the graph as a whole.
    #[error("{0}")]
    Graph(String),
}

/// A graph in the order of its nodes (topological once checked).
#[derive(Debug, Clone, Default)]
pub struct Graph {
    /// Name of the graph.
    pub name: String,
    /// Version per operator domain ("" is ai.onnx).
    pub opsets: BTreeMap<String, i64>,
    /// Key-value pairs of the model.
    pub metadata: BTreeMap<String, String>,
    /// Nodes.
    pub nodes: Vec<Node>,
    /// Graph inputs, initializers excluded.
    pub inputs: Vec<ValueId>,
    /// Graph outputs.
    pub outputs: Vec<ValueId>,
    values: Vec<Value>,
    by_name: HashMap<String, ValueId>,
}

impl Graph {
    /// An empty graph with these opsets.
    pub fn new(name: impl Into<String>, opsets: impl IntoIterator<Item = (&'static str, i64)>) -> Self {
        Self {
            name: name.into(),
            opsets: opsets.into_iter().map(|(d, v)| (d.to_owned(), v)).collect(),
            ..Self::default()
        }
    }

    /// All values, by id.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// The value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// The value, to change what is known of it.
    pub fn value_mut(&mut self, id: ValueId) -> &mut Value {
        &mut self.values[id.index()]
    }

    /// The value of this name.
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.by_name.get(name).copied()
    }

    /// The value of this name, made with an empty fact if there is none.
    pub fn intern(&mut self, name: &str) -> ValueId {
        if let Some(id) = self.find(name) {
            return id;
        }
        let id = ValueId(self.values.len() as u32);
        self.values.push(Value { name: name.to_owned(), fact: Fact::default() });
        self.by_name.insert(name.to_owned(), id);
        id
    }

    /// A graph input.
    pub fn add_input(&mut self, name: &str, fact: Fact) -> ValueId {
        let id = self.intern(name);
        self.value_mut(id).fact = fact;
        self.inputs.push(id);
        id
    }

    /// A constant value.
    pub fn add_constant(&mut self, name: &str, constant: impl Into<Constant>) -> ValueId {
        let id = self.intern(name);
        self.value_mut(id).fact = Fact::from(Arc::new(constant.into()));
        id
    }

    /// Marks a value as a graph output.
    pub fn add_output(&mut self, id: ValueId) {
        self.outputs.push(id);
    }

    /// A node whose operator is parsed from its attributes; its outputs are named by the caller.
    ///
    /// # Errors
    /// When the operator is not known or refuses its attributes.
    pub fn add_node(
        &mut self,
        name: &str,
        (domain, op_type): (&str, &str),
        attrs: Attrs,
        inputs: &[Option<ValueId>],
        outputs: &[&str],
    ) -> Result<Vec<ValueId>, GraphError> {
        let opset = self.opsets.get(domain).copied().unwrap_or(1);
        let op = Op::parse(domain, op_type, opset, &attrs)
            .map_err(|source| node_error(name, domain, op_type, source))?;
        let outputs: Vec<ValueId> = outputs.iter().map(|o| self.intern(o)).collect();
        self.nodes.push(Node {
            name: name.to_owned(),
            domain: domain.to_owned(),
            op_type: op_type.to_owned(),
            attrs,
            op,
            inputs: inputs.to_vec(),
            outputs: outputs.iter().copied().map(Some).collect(),
        });
        Ok(outputs)
    }

    /// What is known of a node's inputs, in order; `None` where an input is absent.
    pub fn input_facts(&self, node: &Node) -> Vec<Option<&Fact>> {
        node.inputs.iter().map(|i| i.map(|i| &self.value(i).fact)).collect()
    }

    /// The node that makes each value, by value index.
    pub fn producers(&self) -> Vec<Option<NodeId>> {
        let mut out = vec![None; self.values.len()];
        for (n, node) in self.nodes.iter().enumerate() {
            for v in node.outputs.iter().flatten() {
                out[v.index()] = Some(NodeId(n as u32));
            }
        }
        out
    }
}

impl Node {
    /// Operator name for messages, with its domain if it is not the default.
    pub fn op_name(&self) -> String {
        op_name(&self.domain, &self.op_type)
    }

    /// Wraps an operator's error with this node's name.
    pub fn error(&self, source: OpError) -> GraphError {
        node_error(&self.name, &self.domain, &self.op_type, source)
    }
}

fn node_error(node: &str, domain: &str, op_type: &str, source: OpError) -> GraphError {
    GraphError::Node { node: node.to_owned(), op: op_name(domain, op_type), source: Box::new(source) }
}

fn op_name(domain: &str, op_type: &str) -> String {
    if domain.is_empty() { op_type.to_owned() } else { format!("{domain}::{op_type}") }
}
