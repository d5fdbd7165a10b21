//! `AttributeProto` to [`Attr`].

use super::{
    external::{ExternalFiles, Ranges},
    proto::{AttributeProto, NodeProto, attribute_proto::AttributeType},
    tensor,
};
use crate::{
    ir::{Attr, Attrs},
    ops::OpError,
};

/// The attributes of a node. Kinds nobody reads (subgraphs, sparse tensors) are kept by their name only, so that the
/// operator that gets one refuses it.
pub(super) fn decode(
    node: &NodeProto,
    files: &dyn ExternalFiles,
    ranges: &mut Ranges,
) -> Result<Attrs, OpError> {
    let mut attrs = Attrs::default();
    for a in &node.attribute {
        let name = a.name();
        if attrs.iter().any(|(k, _)| k == name) {
            return Err(OpError::attribute(name, "one value", "the attribute twice"));
        }
        if !a.ref_attr_name().is_empty() {
            return Err(OpError::attribute(name, "a value", "a reference to a function's attribute"));
        }
        attrs.set(name, value(a, files, ranges)?);
    }
    Ok(attrs)
}

fn value(a: &AttributeProto, files: &dyn ExternalFiles, ranges: &mut Ranges) -> Result<Attr, OpError> {
    let text = |bytes: &[u8]| {
        String::from_utf8(bytes.to_vec()).map_err(|_| OpError::attribute(a.name(), "UTF-8", "other bytes"))
    };
    let kind = AttributeType::try_from(a.r#type.unwrap_or(0)).map_err(|_| {
        OpError::attribute(a.name(), "a known attribute type", format!("type {}", a.r#type.unwrap_or(0)))
    })?;
    Ok(match kind {
        AttributeType::Int => Attr::Int(a.i()),
        AttributeType::Float => Attr::Float(a.f()),
        AttributeType::String => Attr::Str(text(a.s())?),
        AttributeType::Ints => Attr::Ints(a.ints.clone()),
        AttributeType::Floats => Attr::Floats(a.floats.clone()),
        AttributeType::Strings => Attr::Strs(a.strings.iter().map(|s| text(s)).collect::<Result<_, _>>()?),
        AttributeType::Tensor => {
            let proto = a.t.as_ref().ok_or_else(|| OpError::attribute(a.name(), "a tensor", "nothing"))?;
            let tensor = tensor::from_proto(proto, files, ranges)
                .map_err(|e| OpError::attribute(a.name(), "a readable tensor", e))?;
            Attr::Tensor(tensor)
        }
        AttributeType::Graph => Attr::Other("subgraph"),
        AttributeType::Graphs => Attr::Other("subgraphs"),
        AttributeType::Tensors => Attr::Other("tensors"),
        AttributeType::SparseTensor => Attr::Other("sparse tensor"),
        AttributeType::SparseTensors => Attr::Other("sparse tensors"),
        AttributeType::TypeProto => Attr::Other("type"),
        AttributeType::TypeProtos => Attr::Other("types"),
        AttributeType::Undefined => Attr::Other("undefined"),
    })
}
