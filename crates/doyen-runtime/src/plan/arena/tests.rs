//! Layouts of small graphs by hand, and of random ones judged by running them symbolically on the arena.

use super::*;
use doyen_graph::lowered::{Extent, LNode, LValue};
use doyen_tensor::DType;
use proptest::prelude::*;
use std::collections::BTreeSet;

fn chain(n: u32) -> Lowered {
    let values = (0..=n)
        .map(|i| LValue {
            name: format!("v{i}"),
            dtype: DType::F32,
            declared: DType::F32,
            dims: vec![Extent::Tokens(4)],
        })
        .collect();
    let nodes = (0..n)
        .map(|i| LNode {
            name: format!("n{i}"),
            op: if i == 1 { LOp::View } else { LOp::SiluMul },
            inputs: vec![Some(Operand::Value(LValueId(i)))],
            outputs: vec![Some(LValueId(i + 1))],
        })
        .collect();
    Lowered { values, nodes, inputs: vec![LValueId(0)], outputs: vec![LValueId(n)], ..Lowered::default() }
}

const LIMITS: Limits = Limits { tokens: 8, rows: 1, sequences: 1, context: 8, page_size: 8 };

#[test]
fn a_chain_needs_two_buffers_and_views_alias() {
    let layout = layout(&chain(6), &LIMITS, &[], false).unwrap();
    assert_eq!(layout.bytes, 2 * 128);
    assert_eq!(layout.slots[1], layout.slots[2]);
    for i in [0usize, 2, 3, 4, 5] {
        assert_ne!(layout.slots[i], layout.slots[i + 1]);
    }
}

#[test]
fn kept_values_never_share() {
    let layout = layout(&chain(6), &LIMITS, &[], true).unwrap();
    assert_eq!(layout.bytes, 6 * 128);
}

/// Node 2 reads what node 3 may not write over, and so on to the end of the run.
#[test]
fn values_of_a_run_share_nothing() {
    let (graph, run) = (chain(6), 2..5);
    let layout = layout(&graph, &LIMITS, std::slice::from_ref(&run), false).unwrap();
    let of_run: BTreeSet<_> = (run.start..=run.end).map(|v| layout.slots[v].unwrap().offset).collect();
    assert_eq!(of_run.len(), 4);
}

/// A node of a drawn graph: whether it is a view, which earlier values it reads, the sizes of what it writes.
type Drawn = (bool, Vec<usize>, Vec<u8>);

/// A graph of these nodes after two inputs and the token ids; the last value and some others are outputs.
fn drawn(nodes: &[Drawn], outputs: &[usize]) -> Lowered {
    let mut graph = Lowered::default();
    let value = |graph: &mut Lowered, size: u8| {
        let dims = match size % 3 {
            0 => vec![Extent::Fixed(1), Extent::Tokens(1 + size as usize)],
            1 => vec![Extent::Rows(1), Extent::Fixed(3 * size as usize)],
            _ => vec![Extent::Fixed(40 * size as usize)],
        };
        let id = LValueId(graph.values.len() as u32);
        graph.values.push(LValue {
            name: format!("v{}", id.0),
            dtype: if size.is_multiple_of(2) { DType::F32 } else { DType::I64 },
            declared: DType::F32,
            dims,
        });
        id
    };
    graph.tokens = Some(value(&mut graph, 0));
    graph.inputs = vec![value(&mut graph, 5), value(&mut graph, 2)];
    for (n, (view, reads, writes)) in nodes.iter().enumerate() {
        let known = graph.values.len();
        let reads: Vec<LValueId> = reads.iter().map(|r| LValueId((r % known) as u32)).collect();
        let (op, reads, writes) = if *view {
            let like = graph.value(reads[0]).clone();
            let id = LValueId(known as u32);
            graph.values.push(LValue { name: format!("v{known}"), ..like });
            (LOp::View, vec![reads[0]], vec![Some(id)])
        } else {
            // A size of 255 is a result that nobody wants.
            let writes = writes.iter().map(|&w| (w != 255).then(|| value(&mut graph, w))).collect();
            (LOp::SiluMul, reads, writes)
        };
        graph.nodes.push(LNode {
            name: format!("n{n}"),
            op,
            inputs: reads.into_iter().map(|r| Some(Operand::Value(r))).collect(),
            outputs: writes,
        });
    }
    let known = graph.values.len();
    graph.outputs = outputs.iter().map(|o| LValueId((o % known) as u32)).collect();
    graph
}

/// Bytes `ALIGN` at a time, each with the value that was last written there.
struct Memory(Vec<Option<u32>>);

impl Memory {
    fn lines(slot: Slot) -> Range<usize> {
        assert_eq!((slot.offset % ALIGN, slot.len % ALIGN), (0, 0), "slots are whole lines");
        slot.offset / ALIGN..(slot.offset + slot.len) / ALIGN
    }

    fn write(&mut self, slot: Slot, owner: LValueId) {
        self.0[Self::lines(slot)].fill(Some(owner.0));
    }

    fn holds(&self, slot: Slot, owner: LValueId) -> bool {
        self.0[Self::lines(slot)].iter().all(|o| *o == Some(owner.0))
    }
}

/// Runs the graph on the layout: every value that is read must still be there.
fn simulate(graph: &Lowered, layout: &Layout) {
    let roots = roots(graph);
    let root = |v: LValueId| roots[v.index()];
    let slot = |v: LValueId| layout.slots[v.index()].expect("a value that is used has a slot");
    let mut memory = Memory(vec![None; layout.bytes / ALIGN]);
    for &v in graph.tokens.iter().chain(&graph.inputs) {
        memory.write(slot(v), v);
    }
    for node in &graph.nodes {
        for operand in node.inputs.iter().flatten() {
            let Operand::Value(v) = *operand else { continue };
            assert!(memory.holds(slot(v), root(v)), "{} reads {v:?}, overwritten", node.name);
        }
        if node.op == LOp::View {
            continue;
        }
        for &v in node.outputs.iter().flatten() {
            memory.write(slot(v), v);
        }
        // Kernels read inputs while they write outputs, and outputs while they write others.
        for operand in node.inputs.iter().flatten() {
            let Operand::Value(v) = *operand else { continue };
            assert!(memory.holds(slot(v), root(v)), "{} writes over its input {v:?}", node.name);
        }
        for &v in node.outputs.iter().flatten() {
            assert!(memory.holds(slot(v), v), "{} writes over its output {v:?}", node.name);
        }
    }
    for &v in &graph.outputs {
        assert!(memory.holds(slot(v), root(v)), "output {v:?} was overwritten");
    }
}

proptest! {
    #[test]
    fn what_is_alive_is_never_overwritten(
        nodes in prop::collection::vec(
            (prop::bool::weighted(0.2), prop::collection::vec(any::<usize>(), 1..4), prop::collection::vec(any::<u8>(), 1..4)),
            1..40,
        ),
        outputs in prop::collection::vec(any::<usize>(), 1..4),
        tokens in 1usize..20, rows in 1usize..5,
    ) {
        let graph = drawn(&nodes, &outputs);
        let limits = Limits { tokens, rows, ..LIMITS };
        let shared = layout(&graph, &limits, &[], false).unwrap();
        simulate(&graph, &shared);
        let kept = layout(&graph, &limits, &[], true).unwrap();
        simulate(&graph, &kept);
        prop_assert!(shared.bytes <= kept.bytes);
        let all: usize = graph.values.iter().enumerate()
            .filter(|(v, _)| roots(&graph)[*v].index() == *v)
            .map(|(v, _)| value_bytes(&graph, LValueId(v as u32), &limits).unwrap()).sum();
        prop_assert_eq!(kept.bytes, all, "kept values lie side by side");
    }
}
