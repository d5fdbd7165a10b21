//! Bounds what decoding may allocate, before it does.
//!
//! In protobuf an empty submessage takes two bytes of the file and a hundred or more in memory, so a few megabytes of
//! them would fill a machine. This walk over the wire format adds up what the messages will take and refuses a file
//! that is out of all proportion. Lengths that reach past the file are left to the decoder, which checks them.

use super::{
    error::DecodeError,
    proto::{
        AttributeProto, FunctionProto, GraphProto, NodeProto, OperatorSetIdProto, SparseTensorProto,
        StringStringEntryProto, TensorProto, TypeProto, ValueInfoProto, tensor_shape_proto::Dimension,
    },
};

/// Memory any file may take for its structure.
const BASE: u64 = 64 << 20;
/// Memory per byte of the file beyond that; exporters' graphs measure 4 to 8.
const PER_BYTE: u64 = 16;

/// The messages that can repeat, and those on the way to them.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Model,
    Graph,
    Node,
    Attribute,
    Tensor,
    Sparse,
    ValueInfo,
    Type,
    TypeTensor,
    Shape,
    Dimension,
    Function,
    Opset,
    Entry,
    /// Strings and byte strings in a list.
    Text,
}

impl Kind {
    /// The message in a length-delimited field, when it has a size worth counting.
    const fn field(self, number: u64) -> Option<Self> {
        Some(match (self, number) {
            (Self::Model, 7) => Self::Graph,
            (Self::Model, 8) => Self::Opset,
            (Self::Model, 14) | (Self::Tensor, 13) => Self::Entry,
            (Self::Model, 25) => Self::Function,
            (Self::Graph, 1) | (Self::Function, 7) => Self::Node,
            (Self::Graph | Self::Attribute, 5) | (Self::Sparse, 1) => Self::Tensor,
            (Self::Graph, 11..=13) => Self::ValueInfo,
            (Self::Graph, 15) => Self::Sparse,
            (Self::Node, 1 | 2) | (Self::Attribute, 9) | (Self::Tensor, 6) => Self::Text,
            (Self::Node, 5) => Self::Attribute,
            (Self::ValueInfo, 2) => Self::Type,
            (Self::Type, 1) => Self::TypeTensor,
            (Self::TypeTensor, 2) => Self::Shape,
            (Self::Shape, 1) => Self::Dimension,
            _ => return None,
        })
    }

    const fn size(self) -> usize {
        match self {
            Self::Node => size_of::<NodeProto>(),
            Self::Attribute => size_of::<AttributeProto>(),
            Self::Tensor => size_of::<TensorProto>(),
            Self::Sparse => size_of::<SparseTensorProto>(),
            Self::ValueInfo => size_of::<ValueInfoProto>(),
            Self::Function => size_of::<FunctionProto>(),
            Self::Opset => size_of::<OperatorSetIdProto>(),
            Self::Entry => size_of::<StringStringEntryProto>(),
            Self::Dimension => size_of::<Dimension>(),
            Self::Text => size_of::<String>(),
            Self::Graph => size_of::<GraphProto>(),
            // Inline in the message that holds them.
            Self::Model | Self::TypeTensor | Self::Shape => 0,
            Self::Type => size_of::<TypeProto>(),
        }
    }
}

/// Refuses a model whose messages would take far more memory than its bytes justify.
pub(super) fn check(model: &[u8]) -> Result<(), DecodeError> {
    let budget = BASE + PER_BYTE * model.len() as u64;
    let mut spent = 0;
    walk(model, Kind::Model, &mut spent, budget);
    if spent > budget {
        return Err(DecodeError::Protobuf(format!(
            "its {} bytes hold messages that would take more than {budget} bytes of memory",
            model.len()
        )));
    }
    Ok(())
}

/// Adds up a message; stops at the budget, or where the bytes stop being protobuf. The depth is that of [`Kind`].
fn walk(mut bytes: &[u8], kind: Kind, spent: &mut u64, budget: u64) {
    while *spent <= budget {
        let Some(tag) = varint(&mut bytes) else { return };
        let payload = match tag & 7 {
            0 => varint(&mut bytes).map(|_| None),
            1 => take(&mut bytes, 8).map(|_| None),
            2 => varint(&mut bytes).and_then(|len| take(&mut bytes, len)).map(Some),
            5 => take(&mut bytes, 4).map(|_| None),
            _ => None,
        };
        let Some(payload) = payload else { return };
        if let (Some(payload), Some(child)) = (payload, kind.field(tag >> 3)) {
            *spent += child.size() as u64;
            if matches!(child, Kind::Text | Kind::Entry) {
                *spent += payload.len() as u64;
            } else {
                walk(payload, child, spent, budget);
            }
        }
    }
}

fn take<'a>(bytes: &mut &'a [u8], len: u64) -> Option<&'a [u8]> {
    let (head, tail) = bytes.split_at_checked(usize::try_from(len).ok()?)?;
    *bytes = tail;
    Some(head)
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for i in 0..10 {
        let (&b, tail) = bytes.split_first()?;
        *bytes = tail;
        value |= u64::from(b & 0x7f).checked_shl(7 * i)?;
        if b < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_megabytes_of_empty_nodes_are_refused() {
        let nodes = 4 << 20;
        let mut model = vec![0x3a];
        prost::encoding::encode_varint(2 * nodes, &mut model);
        model.extend([0x0a, 0x00].repeat(nodes as usize));
        let message = check(&model).unwrap_err().to_string();
        assert!(message.contains("bytes of memory"), "{message}");
    }

    #[test]
    fn wild_lengths_and_varints_end_the_walk() {
        for bytes in [&[0x3a, 0xff, 0xff, 0xff, 0xff, 0x0f][..], &[0xff; 20], &[0x3b], &[]] {
            check(bytes).unwrap();
        }
    }
}
