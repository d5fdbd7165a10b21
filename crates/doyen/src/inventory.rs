//! Every weight of a graph with its format and bytes, by what it is for.

use doyen_graph::{
    ir::{Graph, Node, ValueId},
    ops::Op,
};
use doyen_tensor::{ByteCount, format::Bits};
use std::collections::{BTreeMap, BTreeSet};

/// A weight: one operand group of a node (codes, scales, zero points), or one float tensor.
#[derive(Debug, Clone)]
pub struct Weight {
    /// Name of the tensor that holds the numbers or codes.
    pub name: String,
    /// What it is for.
    pub kind: &'static str,
    /// Width, block, zero points, scale type; or the float type.
    pub format: String,
    /// Bytes of all its tensors; bytes that an earlier weight has already counted are not counted again.
    pub bytes: ByteCount,
}

/// Sum over the weights of a kind.
#[derive(Debug, Clone, Default)]
pub struct Total {
    /// Bytes.
    pub bytes: ByteCount,
    /// Formats that occur.
    pub formats: BTreeSet<String>,
}

impl Total {
    /// The formats in a line.
    pub fn format_text(&self) -> String {
        self.formats.iter().cloned().collect::<Vec<_>>().join(" + ")
    }
}

/// All weights of a graph.
#[derive(Debug, Clone, Default)]
pub struct Inventory {
    /// In the order of the nodes.
    pub weights: Vec<Weight>,
    /// By kind.
    pub totals: BTreeMap<String, Total>,
    /// Bytes of all constants, shared ones once.
    pub bytes: ByteCount,
}

/// A weight before its bytes are counted.
struct Found {
    kind: &'static str,
    format: String,
    /// Operand indices, the one that names it first.
    operands: Vec<usize>,
}

impl Inventory {
    /// Takes stock of a graph as decoded.
    pub fn new(graph: &Graph) -> Self {
        let mut inventory = Self::default();
        let mut counted = BTreeSet::new();
        for node in &graph.nodes {
            for found in weights_of(graph, node) {
                let ids: Vec<ValueId> =
                    found.operands.iter().filter_map(|&i| node.inputs.get(i).copied().flatten()).collect();
                let bytes = ids.iter().map(|&id| uncounted(graph, id, &mut counted)).sum();
                let Some(&first) = ids.first() else { continue };
                inventory.add(Weight {
                    name: graph.value(first).name.clone(),
                    kind: found.kind,
                    format: found.format,
                    bytes,
                });
            }
        }
        // Small constants that are nobody's weight (shapes, axes, epsilons) count too.
        for id in (0..graph.values().len() as u32).map(ValueId) {
            inventory.bytes += uncounted(graph, id, &mut counted);
        }
        inventory
    }

    fn add(&mut self, weight: Weight) {
        let total = self.totals.entry(weight.kind.to_owned()).or_default();
        total.bytes += weight.bytes;
        total.formats.insert(weight.format.clone());
        self.bytes += weight.bytes;
        self.weights.push(weight);
    }
}

/// Bytes of a constant that have not been counted, marking them.
fn uncounted(graph: &Graph, id: ValueId, counted: &mut BTreeSet<(usize, usize)>) -> ByteCount {
    let Some(c) = &graph.value(id).fact.constant else { return ByteCount(0) };
    let fresh = c.parts().iter().filter(|p| counted.insert((p.bytes.as_ptr() as usize, p.bytes.len())));
    fresh.map(|p| ByteCount(p.bytes.len() as u64)).sum()
}

fn dtype_name(graph: &Graph, node: &Node, i: usize) -> Option<String> {
    let id = node.inputs.get(i).copied().flatten()?;
    graph.value(id).fact.dtype.map(|d| d.to_string())
}

fn has(node: &Node, i: usize) -> bool {
    node.inputs.get(i).copied().flatten().is_some()
}

fn quantized(bits: Bits, block: Option<usize>, zero_points: bool, scales: Option<String>) -> String {
    let block = block.map_or_else(|| "row".to_owned(), |b| format!("block {b}"));
    let zero_points = if zero_points { ", zero points" } else { "" };
    format!("int{} {block}{zero_points}, {} scales", bits.get(), scales.unwrap_or_else(|| "?".into()))
}

fn weights_of(graph: &Graph, node: &Node) -> Vec<Found> {
    use doyen_graph::ops::quant::Block;
    match &node.op {
        Op::QMoe(op) => {
            let block = match op.block {
                Block::RowWise => None,
                Block::Blocks(n) => Some(n),
            };
            let projection = |kind, bits, first: usize, zero: usize| Found {
                kind,
                format: match op.kind {
                    doyen_graph::ops::qmoe::Kind::Int => {
                        quantized(bits, block, has(node, zero), dtype_name(graph, node, first + 1))
                    }
                    other => match block {
                        Some(n) => format!("{} block {n}", other.name()),
                        None => other.name().to_owned(),
                    },
                },
                operands: vec![first, first + 1, first + 2, zero],
            };
            let mut found = vec![
                projection("experts fc1", op.fc1_bits, 2, 11),
                projection("experts fc2", op.fc2_bits, 5, 12),
            ];
            if has(node, 8) {
                found.push(projection("experts fc3", op.fc3_bits, 8, 13));
            }
            found
        }
        Op::Moe(_) => ["experts fc1", "experts fc2", "experts fc3"]
            .into_iter()
            .enumerate()
            .filter(|(i, _)| has(node, 2 + 2 * i))
            .map(|(i, kind)| Found {
                kind,
                format: dtype_name(graph, node, 2 + 2 * i).unwrap_or_default(),
                operands: vec![2 + 2 * i, 3 + 2 * i],
            })
            .collect(),
        Op::MatMulNBits(op) => vec![Found {
            kind: "linear",
            format: quantized(op.bits, Some(op.block_size), has(node, 3), dtype_name(graph, node, 2)),
            operands: vec![1, 2, 3, 4, 5],
        }],
        Op::GatherBlockQuantized(op) => vec![Found {
            kind: "embedding",
            format: quantized(op.bits, Some(op.block_size), has(node, 3), dtype_name(graph, node, 2)),
            operands: vec![0, 2, 3],
        }],
        _ => float_weights(graph, node),
    }
}

/// Constant float operands of two or more dimensions are weights, of one dimension norms and biases.
fn float_weights(graph: &Graph, node: &Node) -> Vec<Found> {
    let mut found = Vec::new();
    for (i, id) in node.inputs.iter().enumerate() {
        let Some(fact) = id.map(|id| &graph.value(id).fact) else { continue };
        let Some(dtype) = fact.dtype.filter(|d| d.is_float() && fact.constant.is_some()) else { continue };
        let kind = match (node.op_type.as_str(), fact.rank()) {
            ("GroupQueryAttention", Some(2)) => "rotary caches",
            ("Gather", Some(2)) => "embedding",
            (_, Some(2..)) => "linear",
            (_, Some(1)) => "norms and biases",
            _ => continue,
        };
        found.push(Found { kind, format: dtype.to_string(), operands: vec![i] });
    }
    found
}
