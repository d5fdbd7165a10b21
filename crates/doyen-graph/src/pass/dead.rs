//! Dead code: nodes whose results nothing reads, and constants nothing reads any more.

use crate::ir::{Graph, Node};

/// Removes nodes that no graph output depends on, names of unread outputs, and the data of unread constants.
/// Returns how many nodes went.
pub fn dead(graph: &mut Graph) -> usize {
    let mut read = vec![false; graph.values().len()];
    for v in &graph.outputs {
        read[v.index()] = true;
    }
    let before = graph.nodes.len();
    let mut kept: Vec<Node> = Vec::with_capacity(before);
    for mut node in std::mem::take(&mut graph.nodes).into_iter().rev() {
        for output in &mut node.outputs {
            *output = output.filter(|v| read[v.index()]);
        }
        if node.outputs.iter().all(Option::is_none) {
            continue;
        }
        for v in node.inputs.iter().flatten() {
            read[v.index()] = true;
        }
        kept.push(node);
    }
    kept.reverse();
    graph.nodes = kept;
    for id in (0..read.len()).filter(|&i| !read[i]) {
        graph.value_mut(crate::ir::ValueId(id as u32)).fact.constant = None;
    }
    before - graph.nodes.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{Attrs, Fact};
    use doyen_tensor::{DType, Tensor};

    #[test]
    fn unread_nodes_and_constants_go() {
        let mut g = Graph::new("g", [("", 21)]);
        let x = g.add_input("x", Fact::new(DType::F32, [2.into()]));
        let w = g.add_constant("w", Tensor::scalar(1f32));
        let identity = ("", "Identity");
        let y = g.add_node("keep", identity, Attrs::default(), &[Some(x)], &["y"]).unwrap()[0];
        let a = g.add_node("drop", identity, Attrs::default(), &[Some(w)], &["a"]).unwrap()[0];
        g.add_node("drop too", identity, Attrs::default(), &[Some(a)], &["b"]).unwrap();
        g.add_output(y);
        assert_eq!(dead(&mut g), 2);
        assert_eq!(g.nodes.len(), 1);
        assert_eq!(g.nodes[0].name, "keep");
        assert!(g.value(w).fact.constant.is_none());
    }
}
