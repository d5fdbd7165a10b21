//! Reads a model file into a graph: versions, names, types, tensors, attributes.
//!
//! What a graph cannot represent is refused here (a tensor defined twice, strings, subgraphs that an operator would
//! need). What it can represent is left to the checker: unknown operators, cycles, missing producers, shapes.
//! Functions inside the model are never expanded: an operator is looked up by domain and name, so the body that an
//! exporter ships for an operator we know does not matter, and any other stays unknown.

use super::{
    attr,
    error::DecodeError,
    external::{ExternalFiles, Ranges},
    guard,
    proto::{GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, tensor_shape_proto, type_proto},
    tensor,
};
use crate::{
    ir::{Attr, Attrs, Dim, Fact, Graph, GraphError, Node, ValueId},
    ops::{Op, OpError},
};
use bytes::Bytes;
use doyen_tensor::Tensor;
use prost::Message;
use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::Arc,
};

/// Newest version of the file format that is read.
pub const NEWEST_IR: i64 = 14;

/// Newest operator set of each domain whose operators we know.
pub const NEWEST_OPSET: [(&str, i64); 2] = [("", 28), ("com.microsoft", 1)];

/// Node errors that are reported; a file with more has one cause for all of them.
const MAX_NODE_ERRORS: usize = 64;

/// The graph of a model file. Its large tensors are views of `model` and of the data files.
///
/// # Errors
/// When the bytes are no model, its versions are newer than ours, or a tensor, a port or an operator's attributes
/// cannot be used.
pub fn decode(model: Bytes, files: &dyn ExternalFiles) -> Result<Graph, DecodeError> {
    guard::check(&model)?;
    let model = ModelProto::decode(model).map_err(|e| DecodeError::Protobuf(e.to_string()))?;
    let proto = model
        .graph
        .as_ref()
        .ok_or_else(|| DecodeError::Model("the file holds no graph; is it empty or truncated?".into()))?;
    let ir = model.ir_version();
    if ir < 1 {
        return Err(DecodeError::Model(format!("the model's IR version is {ir}; is this an ONNX file?")));
    }
    newer("ONNX IR", ir, NEWEST_IR)?;
    let mut graph = Graph::new(proto.name(), []);
    graph.opsets = opsets(&model)?;
    graph.metadata =
        model.metadata_props.iter().map(|e| (e.key().to_owned(), e.value().to_owned())).collect();
    let mut decoder = Decoder { graph, files, ranges: Ranges::default(), defined: HashSet::new() };
    decoder.graph(proto)?;
    decoder.ranges.check()?;
    Ok(decoder.graph)
}

fn newer(what: &str, found: i64, newest: i64) -> Result<(), DecodeError> {
    if found > newest {
        return Err(DecodeError::Version { what: what.to_owned(), found, newest });
    }
    Ok(())
}

fn normal_domain(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}

fn opsets(model: &ModelProto) -> Result<BTreeMap<String, i64>, DecodeError> {
    let mut out = BTreeMap::new();
    for o in &model.opset_import {
        let domain = normal_domain(o.domain());
        let shown = if domain.is_empty() { "ai.onnx" } else { domain };
        if o.version() < 1 {
            return Err(DecodeError::Model(format!(
                "opset of {shown}: version {} is impossible",
                o.version()
            )));
        }
        if let Some((_, newest)) = NEWEST_OPSET.iter().find(|(d, _)| *d == domain) {
            newer(&format!("opset of {shown}:"), o.version(), *newest)?;
        }
        if out.insert(domain.to_owned(), o.version()).is_some_and(|v| v != o.version()) {
            return Err(DecodeError::Model(format!("opset of {shown} is imported in two versions")));
        }
    }
    // Files from before operator sets (IR 1 and 2) mean the first one.
    if out.is_empty() && model.ir_version() < 3 {
        out.insert(String::new(), 1);
    }
    Ok(out)
}

struct Decoder<'a> {
    graph: Graph,
    files: &'a dyn ExternalFiles,
    ranges: Ranges,
    /// Names that are inputs or constants already.
    defined: HashSet<String>,
}

impl Decoder<'_> {
    fn graph(&mut self, proto: &GraphProto) -> Result<(), DecodeError> {
        if let Some(s) = proto.sparse_initializer.first() {
            let name = s.values.as_ref().map_or("", |v| v.name()).to_owned();
            return Err(DecodeError::Tensor { name, reason: "sparse initializers are not supported".into() });
        }
        for t in &proto.initializer {
            let tensor = tensor::from_proto(t, self.files, &mut self.ranges)?;
            self.constant(t.name(), tensor)?;
        }
        self.inputs(proto)?;
        self.nodes(proto)?;
        self.outputs(proto)?;
        self.declared(proto)
    }

    fn constant(&mut self, name: &str, tensor: Tensor) -> Result<(), DecodeError> {
        let bad = |reason: &str| DecodeError::Tensor { name: name.to_owned(), reason: reason.into() };
        if name.is_empty() {
            return Err(bad("a constant needs a name"));
        }
        if !self.defined.insert(name.to_owned()) {
            return Err(bad("it is defined twice"));
        }
        self.graph.add_constant(name, tensor);
        Ok(())
    }

    /// Graph inputs. One with an initializer of its name has a default value, and is that constant.
    fn inputs(&mut self, proto: &GraphProto) -> Result<(), DecodeError> {
        let constants: HashSet<&str> = proto.initializer.iter().map(TensorProto::name).collect();
        for v in &proto.input {
            let fact = fact("graph input", v)?;
            if constants.contains(v.name()) {
                let id = self.graph.intern(v.name());
                agrees(&self.graph.value(id).fact, &fact)
                    .map_err(|reason| value_error("graph input", v.name(), reason))?;
                continue;
            }
            if v.name().is_empty() || !self.defined.insert(v.name().to_owned()) {
                return Err(value_error(
                    "graph input",
                    v.name(),
                    "it is defined twice or has no name".into(),
                ));
            }
            self.graph.add_input(v.name(), fact);
        }
        Ok(())
    }

    fn outputs(&mut self, proto: &GraphProto) -> Result<(), DecodeError> {
        for v in &proto.output {
            let fact = fact("graph output", v)?;
            let Some(id) = self.graph.find(v.name()) else {
                return Err(value_error("graph output", v.name(), "nobody produces it".into()));
            };
            self.declare("graph output", id, fact)?;
            self.graph.add_output(id);
        }
        Ok(())
    }

    /// Declared types of intermediate values. Those of values that do not exist are ignored, and those of constants,
    /// whose data says what they are (one exporter declares its lists of one number as scalars).
    fn declared(&mut self, proto: &GraphProto) -> Result<(), DecodeError> {
        for v in &proto.value_info {
            let id = self.graph.find(v.name());
            if let Some(id) = id.filter(|&id| self.graph.value(id).fact.constant.is_none()) {
                self.declare("value", id, fact("value", v)?)?;
            }
        }
        Ok(())
    }

    fn declare(&mut self, port: &'static str, id: ValueId, fact: Fact) -> Result<(), DecodeError> {
        let value = self.graph.value_mut(id);
        agrees(&value.fact, &fact).map_err(|reason| value_error(port, &value.name, reason))?;
        value.fact.dtype = value.fact.dtype.or(fact.dtype);
        value.fact.shape = value.fact.shape.take().or(fact.shape);
        Ok(())
    }

    fn nodes(&mut self, proto: &GraphProto) -> Result<(), DecodeError> {
        let mut names: BTreeSet<String> = proto.node.iter().map(|n| n.name().to_owned()).collect();
        let mut taken = BTreeSet::new();
        let mut errors = Vec::new();
        for (i, n) in proto.node.iter().enumerate() {
            let mut name = n.name().to_owned();
            if name.is_empty() || !taken.insert(name.clone()) {
                name = format!("/{}_{i}", n.op_type());
                while !names.insert(name.clone()) {
                    name.push('_');
                }
            }
            let failed = match attr::decode(n, self.files, &mut self.ranges) {
                Ok(attrs) if is_constant(n) => self.constant_node(&name, n, attrs).err(),
                Ok(attrs) => self.node(&name, n, attrs).err(),
                Err(source) => Some(node_error(&name, n, source)),
            };
            if let Some(e) = failed {
                errors.push(e);
                if errors.len() == MAX_NODE_ERRORS {
                    break;
                }
            }
        }
        if errors.is_empty() { self.written_once() } else { Err(DecodeError::Nodes(errors)) }
    }

    /// Inputs and constants are produced by no node; two nodes that produce one value are the checker's.
    fn written_once(&self) -> Result<(), DecodeError> {
        for n in &self.graph.nodes {
            for &v in n.outputs.iter().flatten() {
                let name = &self.graph.value(v).name;
                if self.defined.contains(name) {
                    let reason = format!(
                        "node {:?} ({}) produces a graph input or constant again",
                        n.name,
                        n.op_name()
                    );
                    return Err(value_error("value", name, reason));
                }
            }
        }
        Ok(())
    }

    fn node(&mut self, name: &str, n: &NodeProto, attrs: Attrs) -> Result<(), GraphError> {
        let domain = normal_domain(n.domain());
        let op = match self.graph.opsets.get(domain).copied() {
            Some(opset) => Op::parse(domain, n.op_type(), opset, &attrs),
            None if Op::known().contains(&(domain, n.op_type())) => Err(OpError::other(format!(
                "the model does not import the operator set of domain {:?}",
                if domain.is_empty() { "ai.onnx" } else { domain }
            ))),
            None => Ok(Op::Unknown),
        };
        let op = match op {
            Err(OpError::UnknownOperator(_)) => Op::Unknown,
            op => op.map_err(|source| node_error(name, n, source))?,
        };
        let node = Node {
            name: name.to_owned(),
            domain: domain.to_owned(),
            op_type: n.op_type().to_owned(),
            attrs,
            op,
            inputs: self.values(&n.input),
            outputs: self.values(&n.output),
        };
        self.graph.nodes.push(node);
        Ok(())
    }

    /// Names to values; an empty name is an absent one, and absent ones at the end are dropped.
    fn values(&mut self, names: &[String]) -> Vec<Option<ValueId>> {
        let len = names.iter().rposition(|n| !n.is_empty()).map_or(0, |i| i + 1);
        names[..len].iter().map(|n| (!n.is_empty()).then(|| self.graph.intern(n))).collect()
    }

    fn constant_node(&mut self, name: &str, n: &NodeProto, mut attrs: Attrs) -> Result<(), GraphError> {
        let error = |source| node_error(name, n, source);
        let [output] = n.output.as_slice() else {
            return Err(error(OpError::other(format!("expected one output, found {}", n.output.len()))));
        };
        let tensor = constant_value(&mut attrs).map_err(error)?;
        self.constant(output, tensor).map_err(|e| error(OpError::other(e)))
    }
}

fn is_constant(n: &NodeProto) -> bool {
    normal_domain(n.domain()).is_empty() && n.op_type() == "Constant"
}

/// The value of a `Constant` node: exactly one of its attributes.
fn constant_value(attrs: &mut Attrs) -> Result<Tensor, OpError> {
    let mut found = attrs.iter();
    let (Some((name, value)), None) = (found.next(), found.next()) else {
        return Err(OpError::other(
            "expected exactly one of value, value_int, value_ints, value_float, value_floats",
        ));
    };
    match (name, value) {
        ("value", Attr::Tensor(t)) => Ok(t.clone()),
        ("value_int", Attr::Int(v)) => Ok(Tensor::scalar(*v)),
        ("value_float", Attr::Float(v)) => Ok(Tensor::scalar(*v)),
        ("value_ints", Attr::Ints(v)) => Ok(Tensor::from_slice([v.len()], v)?),
        ("value_floats", Attr::Floats(v)) => Ok(Tensor::from_slice([v.len()], v)?),
        ("value" | "value_int" | "value_float" | "value_ints" | "value_floats", _) => {
            Err(OpError::attribute(name, "the kind its name says", "another kind"))
        }
        ("value_string" | "value_strings" | "sparse_value", _) => {
            Err(OpError::attribute(name, "a dense tensor of numbers", "strings or a sparse tensor"))
        }
        _ => Err(OpError::unknown_attribute(name)),
    }
}

fn node_error(name: &str, n: &NodeProto, source: OpError) -> GraphError {
    let domain = normal_domain(n.domain());
    let op = if domain.is_empty() { n.op_type().to_owned() } else { format!("{domain}::{}", n.op_type()) };
    GraphError::Node { node: name.to_owned(), op, source: Box::new(source) }
}

fn value_error(port: &'static str, name: &str, reason: String) -> DecodeError {
    DecodeError::Value { port, name: name.to_owned(), reason }
}

/// What a `ValueInfoProto` declares.
fn fact(port: &'static str, v: &ValueInfoProto) -> Result<Fact, DecodeError> {
    use tensor_shape_proto::dimension::Value;
    use type_proto::Value as Type;
    let bad = |reason: String| value_error(port, v.name(), reason);
    let tensor = match v.r#type.as_ref().and_then(|t| t.value.as_ref()) {
        None => return Ok(Fact::default()),
        Some(Type::TensorType(t)) => t,
        Some(Type::SequenceType(_)) => return Err(bad("sequences are not supported".into())),
        Some(Type::MapType(_)) => return Err(bad("maps are not supported".into())),
        Some(Type::SparseTensorType(_)) => return Err(bad("sparse tensors are not supported".into())),
        Some(Type::OptionalType(_)) => return Err(bad("optional values are not supported".into())),
    };
    let dtype = match tensor.elem_type() {
        0 => None,
        n => Some(tensor::element_type(n).map_err(bad)?),
    };
    let dim = |d: &tensor_shape_proto::Dimension| match &d.value {
        Some(Value::DimValue(n)) => {
            usize::try_from(*n).map(Dim::Known).map_err(|_| bad(format!("dimension {n} is negative")))
        }
        Some(Value::DimParam(p)) if !p.is_empty() => Ok(Dim::Named(Arc::from(p.as_str()))),
        _ => Ok(Dim::Unknown),
    };
    let shape = tensor.shape.as_ref().map(|s| s.dim.iter().map(dim).collect::<Result<_, _>>()).transpose()?;
    Ok(Fact { dtype, shape, constant: None })
}

/// Whether two declarations of a value can both be true.
fn agrees(known: &Fact, declared: &Fact) -> Result<(), String> {
    let same_type = known.dtype.is_none() || declared.dtype.is_none() || known.dtype == declared.dtype;
    let same_shape = match (&known.shape, &declared.shape) {
        (Some(a), Some(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.compatible(b)),
        _ => true,
    };
    if same_type && same_shape {
        return Ok(());
    }
    let text = |f: &Fact| f.dtype.map_or(f.shape_text(), |d| format!("{d}{}", f.shape_text()));
    Err(format!("declared as {}, found {}", text(declared), text(known)))
}
