//! Writes a graph as a `ModelProto`.
//!
//! Constants that a node reads (or that are graph outputs) become initializers: inline when the plan does not name
//! them, otherwise as a reference into an external file, whose bytes the caller writes. The same graph and plan give
//! the same bytes.

use super::{
    proto::{
        AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto,
        TensorProto, TensorShapeProto, TypeProto, ValueInfoProto, attribute_proto::AttributeType,
        tensor_proto, tensor_shape_proto, type_proto,
    },
    tensor,
};
use crate::ir::{Attr, Dim, Fact, Graph, Node, ValueId};
use doyen_tensor::{DType, Shape, TensorError};
use prost::{Message, bytes::Bytes};
use std::collections::{BTreeMap, BTreeSet};

/// Version of the file format that is written; readers of it know every type and operator set we use.
const IR_VERSION: i64 = 10;

/// Where an initializer's bytes lie, when they are not in the model file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExternalRef {
    /// Path of the data file, relative to the model file.
    pub location: String,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Element type.
    pub dtype: DType,
    /// Extents.
    pub shape: Shape,
}

/// The initializers that live in external files, by value name.
///
/// A named value needs no constant in the graph: its bytes may not exist yet. Set the fact's type and shape, so that
/// operators can check and infer with it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExternalPlan {
    refs: BTreeMap<String, ExternalRef>,
}

impl ExternalPlan {
    /// A plan that keeps every initializer inline.
    pub fn new() -> Self {
        Self::default()
    }

    /// Places an initializer in an external file.
    pub fn insert(&mut self, name: impl Into<String>, place: ExternalRef) {
        self.refs.insert(name.into(), place);
    }

    /// Where an initializer lies, if it is external.
    pub fn get(&self, name: &str) -> Option<&ExternalRef> {
        self.refs.get(name)
    }
}

/// Why a graph cannot be written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// An attribute of a kind that has no representation here.
    #[error("node {node:?}: attribute {attribute} of kind {kind} cannot be written")]
    Attribute {
        /// Node name.
        node: String,
        /// Attribute name.
        attribute: String,
        /// Its kind.
        kind: &'static str,
    },
    /// A graph input or output whose type is not known.
    #[error("{port} {name:?}: its element type is not known; declare it or run the checker first")]
    Port {
        /// "graph input" or "graph output".
        port: &'static str,
        /// Value name.
        name: String,
    },
    /// The plan names a value the graph does not have, or that a node computes.
    #[error("external tensor {0:?} is no constant of the graph")]
    NoSuchConstant(String),
    /// The plan disagrees with what the graph knows of a constant, or with itself.
    #[error("external tensor {name:?}: expected {expected}, found {found}")]
    External {
        /// Value name.
        name: String,
        /// What the graph says.
        expected: String,
        /// What the plan says.
        found: String,
    },
    /// A constant that cannot be laid out contiguously.
    #[error("constant {name:?}: {source}")]
    Constant {
        /// Value name.
        name: String,
        /// Why.
        #[source]
        source: TensorError,
    },
    /// Protobuf cannot hold more than 2 GiB.
    #[error(
        "the model file would have {0} bytes, protobuf allows 2147483647; move initializers to external data"
    )]
    TooLarge(usize),
}

/// The bytes of a model file for this graph.
///
/// # Errors
/// When an attribute, port or constant has no representation in the file, or the plan contradicts the graph.
pub fn encode(graph: &Graph, external: &ExternalPlan) -> Result<Vec<u8>, EncodeError> {
    let model = ModelProto {
        ir_version: Some(IR_VERSION),
        producer_name: Some("doyen".into()),
        producer_version: Some(env!("CARGO_PKG_VERSION").into()),
        graph: Some(encode_graph(graph, external)?),
        opset_import: graph
            .opsets
            .iter()
            .map(|(d, &v)| OperatorSetIdProto { domain: Some(d.clone()), version: Some(v) })
            .collect(),
        metadata_props: graph.metadata.iter().map(|(k, v)| entry(k, v)).collect(),
        ..ModelProto::default()
    };
    let len = model.encoded_len();
    if len > i32::MAX as usize {
        return Err(EncodeError::TooLarge(len));
    }
    Ok(model.encode_to_vec())
}

fn entry(key: &str, value: &str) -> StringStringEntryProto {
    StringStringEntryProto { key: Some(key.to_owned()), value: Some(value.to_owned()) }
}

fn encode_graph(graph: &Graph, external: &ExternalPlan) -> Result<GraphProto, EncodeError> {
    let computed: BTreeSet<ValueId> =
        graph.nodes.iter().flat_map(|n| n.outputs.iter().flatten().copied()).collect();
    let fed: BTreeSet<ValueId> = graph.inputs.iter().copied().collect();
    for name in external.refs.keys() {
        if graph.find(name).is_none_or(|v| computed.contains(&v) || fed.contains(&v)) {
            return Err(EncodeError::NoSuchConstant(name.clone()));
        }
    }
    let port = |port: &'static str, &id: &ValueId| {
        let value = graph.value(id);
        value_info(&value.name, &value.fact)
            .ok_or_else(|| EncodeError::Port { port, name: value.name.clone() })
    };
    let is_output: BTreeSet<ValueId> = graph.outputs.iter().copied().collect();
    Ok(GraphProto {
        name: Some(if graph.name.is_empty() { "model".into() } else { graph.name.clone() }),
        node: graph.nodes.iter().map(|n| encode_node(graph, n)).collect::<Result<_, _>>()?,
        initializer: initializers(graph, external, &computed, &fed)?,
        input: graph.inputs.iter().map(|v| port("graph input", v)).collect::<Result<_, _>>()?,
        output: graph.outputs.iter().map(|v| port("graph output", v)).collect::<Result<_, _>>()?,
        value_info: computed
            .iter()
            .filter(|v| !is_output.contains(v))
            .map(|&v| graph.value(v))
            .filter(|v| v.fact.shape.is_some())
            .filter_map(|v| value_info(&v.name, &v.fact))
            .collect(),
        ..GraphProto::default()
    })
}

/// Initializers in the order of value ids: constants that somebody reads.
fn initializers(
    graph: &Graph,
    external: &ExternalPlan,
    computed: &BTreeSet<ValueId>,
    fed: &BTreeSet<ValueId>,
) -> Result<Vec<TensorProto>, EncodeError> {
    let read: BTreeSet<ValueId> = graph
        .nodes
        .iter()
        .flat_map(|n| n.inputs.iter().flatten())
        .chain(&graph.outputs)
        .copied()
        .filter(|v| !computed.contains(v) && !fed.contains(v))
        .collect();
    let mut out = Vec::new();
    for value in read.into_iter().map(|v| graph.value(v)) {
        if let Some(place) = external.get(&value.name) {
            out.push(external_tensor(&value.name, &value.fact, place)?);
        } else if let Some(constant) = &value.fact.constant {
            let t = constant
                .to_tensor()
                .map_err(|source| EncodeError::Constant { name: value.name.clone(), source })?;
            out.push(tensor::to_proto(&value.name, &t));
        }
    }
    Ok(out)
}

fn external_tensor(name: &str, fact: &Fact, place: &ExternalRef) -> Result<TensorProto, EncodeError> {
    let found = format!("{}{}", place.dtype, place.shape);
    let differs =
        |expected: String, found: String| EncodeError::External { name: name.into(), expected, found };
    if let Some(dtype) = fact.dtype.filter(|&d| d != place.dtype) {
        return Err(differs(format!("{dtype}{}", fact.shape_text()), found));
    }
    if let Some(shape) = &fact.shape {
        let same = shape.len() == place.shape.len()
            && shape.iter().zip(place.shape.iter()).all(|(d, &n)| d.compatible(&Dim::Known(n)));
        if !same {
            return Err(differs(format!("{}{}", place.dtype, fact.shape_text()), found));
        }
    }
    let bytes = place
        .shape
        .bytes(place.dtype)
        .map_err(|source| EncodeError::Constant { name: name.to_owned(), source })?;
    if bytes as u64 != place.length {
        return Err(differs(format!("{bytes} bytes for {found}"), format!("{} bytes", place.length)));
    }
    Ok(TensorProto {
        name: Some(name.to_owned()),
        data_type: Some(place.dtype.onnx()),
        dims: place.shape.iter().map(|&d| d as i64).collect(),
        data_location: Some(tensor_proto::DataLocation::External as i32),
        external_data: vec![
            entry("location", &place.location),
            entry("offset", &place.offset.to_string()),
            entry("length", &place.length.to_string()),
        ],
        ..TensorProto::default()
    })
}

fn encode_node(graph: &Graph, node: &Node) -> Result<NodeProto, EncodeError> {
    let names = |ids: &[Option<ValueId>]| {
        ids.iter().map(|v| v.map_or(String::new(), |v| graph.value(v).name.clone())).collect()
    };
    let attribute = node
        .attrs
        .iter()
        .map(|(name, attr)| {
            encode_attr(name, attr).map_err(|kind| EncodeError::Attribute {
                node: node.name.clone(),
                attribute: name.to_owned(),
                kind,
            })
        })
        .collect::<Result<_, _>>()?;
    Ok(NodeProto {
        input: names(&node.inputs),
        output: names(&node.outputs),
        name: Some(node.name.clone()),
        op_type: Some(node.op_type.clone()),
        domain: (!node.domain.is_empty()).then(|| node.domain.clone()),
        attribute,
        ..NodeProto::default()
    })
}

fn encode_attr(name: &str, attr: &Attr) -> Result<AttributeProto, &'static str> {
    let mut out = AttributeProto { name: Some(name.to_owned()), ..AttributeProto::default() };
    let kind = match attr {
        Attr::Int(v) => {
            out.i = Some(*v);
            AttributeType::Int
        }
        Attr::Float(v) => {
            out.f = Some(*v);
            AttributeType::Float
        }
        Attr::Str(v) => {
            out.s = Some(Bytes::from(v.clone()));
            AttributeType::String
        }
        Attr::Ints(v) => {
            out.ints.clone_from(v);
            AttributeType::Ints
        }
        Attr::Floats(v) => {
            out.floats.clone_from(v);
            AttributeType::Floats
        }
        Attr::Strs(v) => {
            out.strings = v.iter().map(|s| Bytes::from(s.clone())).collect();
            AttributeType::Strings
        }
        Attr::Tensor(t) => {
            out.t = Some(tensor::to_proto("", t));
            AttributeType::Tensor
        }
        Attr::Other(kind) => return Err(kind),
    };
    out.set_type(kind);
    Ok(out)
}

/// `None` when the element type is not known.
fn value_info(name: &str, fact: &Fact) -> Option<ValueInfoProto> {
    use tensor_shape_proto::{Dimension, dimension::Value};
    let dim = |d: &Dim| Dimension {
        value: match d {
            Dim::Known(n) => Some(Value::DimValue(*n as i64)),
            Dim::Named(n) => Some(Value::DimParam(n.to_string())),
            Dim::Unknown => None,
        },
    };
    let tensor = type_proto::Tensor {
        elem_type: Some(fact.dtype?.onnx()),
        shape: fact.shape.as_ref().map(|s| TensorShapeProto { dim: s.iter().map(dim).collect() }),
    };
    Some(ValueInfoProto {
        name: Some(name.to_owned()),
        r#type: Some(TypeProto { value: Some(type_proto::Value::TensorType(tensor)) }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Attrs;
    use doyen_tensor::Tensor;

    fn graph() -> Graph {
        let mut g = Graph::new("g", [("", 21)]);
        let x = g.add_input("x", Fact::new(DType::F32, [Dim::from("batch"), Dim::Known(4)]));
        let w = g.intern("w");
        g.value_mut(w).fact = Fact::new(DType::F32, [Dim::Known(4)]);
        let c = g.add_constant("c", Tensor::from_slice([2], &[1.0f32, 2.0]).unwrap());
        for (name, input) in [("y", x), ("v", w), ("d", c)] {
            let out =
                g.add_node(name, ("", "Identity"), Attrs::default(), &[Some(input)], &[name]).unwrap()[0];
            g.value_mut(out).fact = Fact::new(DType::F32, [Dim::Unknown]);
            g.add_output(out);
        }
        g
    }

    fn plan(length: u64) -> ExternalPlan {
        let mut plan = ExternalPlan::new();
        let place = ExternalRef {
            location: "model.onnx.data".into(),
            offset: 4096,
            length,
            dtype: DType::F32,
            shape: [4].into(),
        };
        plan.insert("w", place);
        plan
    }

    #[test]
    fn external_initializers_are_references() {
        let bytes = encode(&graph(), &plan(16)).unwrap();
        assert_eq!(bytes, encode(&graph(), &plan(16)).unwrap());
        let model = ModelProto::decode(bytes.as_slice()).unwrap();
        let initializers = model.graph.unwrap().initializer;
        assert_eq!(initializers.iter().map(TensorProto::name).collect::<Vec<_>>(), ["w", "c"]);
        assert_eq!(initializers[0].data_location(), tensor_proto::DataLocation::External);
        assert_eq!(initializers[0].external_data[1], entry("offset", "4096"));
        assert_eq!(initializers[1].raw_data().len(), 8);
    }

    #[test]
    fn a_plan_that_contradicts_the_graph_is_refused() {
        assert!(matches!(encode(&graph(), &plan(12)), Err(EncodeError::External { .. })));
        let mut other = plan(16);
        let place = other.get("w").unwrap().clone();
        other.insert("nobody", place.clone());
        assert_eq!(encode(&graph(), &other), Err(EncodeError::NoSuchConstant("nobody".into())));
        let mut computed = plan(16);
        computed.insert("y", place);
        assert_eq!(encode(&graph(), &computed), Err(EncodeError::NoSuchConstant("y".into())));
    }
}
