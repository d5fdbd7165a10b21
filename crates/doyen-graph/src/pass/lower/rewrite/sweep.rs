//! Drops nodes without a reader, and the values and constants nothing mentions any more.

use crate::lowered::{ConstId, LValueId, Lowered, Operand};

/// Removes what no output depends on and numbers the rest anew.
pub(super) fn sweep(graph: &mut Lowered) {
    let mut read = vec![false; graph.values.len()];
    for v in graph.outputs.iter().chain(&graph.inputs).chain(&graph.tokens) {
        read[v.index()] = true;
    }
    let mut kept = Vec::with_capacity(graph.nodes.len());
    let mut constants = vec![false; graph.constants.len()];
    for mut node in std::mem::take(&mut graph.nodes).into_iter().rev() {
        for output in &mut node.outputs {
            *output = output.filter(|v| read[v.index()]);
        }
        if node.outputs.iter().all(Option::is_none) {
            continue;
        }
        for operand in node.inputs.iter().flatten() {
            match operand {
                Operand::Value(v) => read[v.index()] = true,
                Operand::Const(c) => constants[c.index()] = true,
            }
        }
        kept.push(node);
    }
    kept.reverse();
    graph.nodes = kept;
    graph.positions = graph.positions.filter(|v| read[v.index()]);
    renumber(graph, &read, &constants);
}

fn renumber(graph: &mut Lowered, read: &[bool], constants: &[bool]) {
    let values = numbers(read);
    let consts = numbers(constants);
    let value = |v: LValueId| LValueId(values[v.index()]);
    for node in &mut graph.nodes {
        for operand in node.inputs.iter_mut().flatten() {
            *operand = match *operand {
                Operand::Value(v) => Operand::Value(value(v)),
                Operand::Const(c) => Operand::Const(ConstId(consts[c.index()])),
            };
        }
        for output in node.outputs.iter_mut().flatten() {
            *output = value(*output);
        }
    }
    let ports = graph.outputs.iter_mut().chain(&mut graph.inputs);
    for v in ports.chain(&mut graph.tokens).chain(&mut graph.positions) {
        *v = value(*v);
    }
    retain(&mut graph.values, read);
    retain(&mut graph.constants, constants);
}

/// The new number of each kept item.
fn numbers(kept: &[bool]) -> Vec<u32> {
    let mut next = 0;
    kept.iter()
        .map(|&k| {
            let number = next;
            next += u32::from(k);
            number
        })
        .collect()
}

fn retain<T>(items: &mut Vec<T>, kept: &[bool]) {
    let mut i = 0;
    items.retain(|_| {
        i += 1;
        kept[i - 1]
    });
}
