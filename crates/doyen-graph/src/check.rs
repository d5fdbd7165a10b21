//! Checks a graph and fills in what is known of its values.
//!
//! [`check`] sorts the nodes topologically, refuses what no run could make sense of, and runs every operator's shape
//! rule, comparing with what the file declares. Called on every decoded or built graph, before any pass.

use crate::{
    ir::{Dim, Fact, Graph, GraphError, NodeId},
    ops::{Op, OpError},
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    fmt,
};

/// An operator this project does not know, and where it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownOperator {
    /// Operator, with its domain if it is not the default.
    pub op: String,
    /// Names of the nodes.
    pub nodes: Vec<String>,
}

impl fmt::Display for UnknownOperator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (node", self.op)?;
        if self.nodes.len() > 1 {
            f.write_str("s")?;
        }
        for (i, n) in self.nodes.iter().enumerate() {
            write!(f, "{} {n:?}", if i > 0 { "," } else { "" })?;
        }
        f.write_str(")")
    }
}

/// Why a graph cannot run.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CheckError {
    /// Operators this project does not know: all of them.
    #[error("operators not known here (functions inside a model are not expanded): {}", list(.0))]
    UnknownOperators(Vec<UnknownOperator>),
    /// Anything else.
    #[error(transparent)]
    Graph(#[from] GraphError),
}

fn list(ops: &[UnknownOperator]) -> String {
    ops.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Every unknown operator of the graph, with the nodes that use it.
pub fn unknown_operators(graph: &Graph) -> Vec<UnknownOperator> {
    let mut by_op: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for n in graph.nodes.iter().filter(|n| n.op == Op::Unknown) {
        by_op.entry(n.op_name()).or_default().push(n.name.clone());
    }
    by_op.into_iter().map(|(op, nodes)| UnknownOperator { op, nodes }).collect()
}

/// Sorts the nodes, checks every node, and records inferred types and shapes.
///
/// # Errors
/// When an operator is not known (all are listed), a value has two producers or none, nodes feed each other in a
/// cycle, or a node's inputs or declared outputs contradict its operator.
pub fn check(graph: &mut Graph) -> Result<(), CheckError> {
    let unknown = unknown_operators(graph);
    if !unknown.is_empty() {
        return Err(CheckError::UnknownOperators(unknown));
    }
    sort(graph)?;
    for n in 0..graph.nodes.len() {
        infer(graph, NodeId(n as u32))?;
    }
    Ok(())
}

/// Orders the nodes so that producers come before consumers, keeping the file's order where it is free.
fn sort(graph: &mut Graph) -> Result<(), GraphError> {
    let producers = producers(graph)?;
    let count = graph.nodes.len();
    let mut waits = vec![0usize; count];
    let mut feeds: Vec<Vec<usize>> = vec![Vec::new(); count];
    for (n, node) in graph.nodes.iter().enumerate() {
        for &v in node.inputs.iter().flatten() {
            match producers[v.index()] {
                Producer::Node(p) => {
                    feeds[p].push(n);
                    waits[n] += 1;
                }
                Producer::Given => {}
                Producer::Nobody => {
                    return Err(GraphError::Graph(format!(
                        "node {:?} ({}): its input {:?} is produced by no node, and is neither a graph input nor an \
                         initializer",
                        node.name,
                        node.op_name(),
                        graph.value(v).name
                    )));
                }
            }
        }
    }
    for &v in &graph.outputs {
        if matches!(producers[v.index()], Producer::Nobody) {
            return Err(GraphError::Graph(format!(
                "graph output {:?} is produced by no node",
                graph.value(v).name
            )));
        }
    }
    let mut ready: BinaryHeap<_> = (0..count).filter(|&n| waits[n] == 0).map(Reverse).collect();
    let mut order = Vec::with_capacity(count);
    while let Some(Reverse(n)) = ready.pop() {
        order.push(n);
        for &f in &feeds[n] {
            waits[f] -= 1;
            if waits[f] == 0 {
                ready.push(Reverse(f));
            }
        }
    }
    if order.len() < count {
        return Err(cycle(graph, &feeds, &waits));
    }
    let mut nodes: Vec<_> = std::mem::take(&mut graph.nodes).into_iter().map(Some).collect();
    graph.nodes = order.into_iter().filter_map(|n| nodes[n].take()).collect();
    Ok(())
}

#[derive(Debug, Clone, Copy)]
enum Producer {
    /// A graph input or a constant.
    Given,
    Node(usize),
    Nobody,
}

fn producers(graph: &Graph) -> Result<Vec<Producer>, GraphError> {
    let mut out: Vec<Producer> = graph
        .values()
        .iter()
        .map(|v| if v.fact.constant.is_some() { Producer::Given } else { Producer::Nobody })
        .collect();
    for &v in &graph.inputs {
        out[v.index()] = Producer::Given;
    }
    let mut computed = vec![None; out.len()];
    for (n, node) in graph.nodes.iter().enumerate() {
        for &v in node.outputs.iter().flatten() {
            let name = &graph.value(v).name;
            if let Some(first) = computed[v.index()].replace(n) {
                let first: &crate::ir::Node = &graph.nodes[first];
                return Err(GraphError::Graph(format!(
                    "value {name:?} has two producers: node {:?} ({}) and node {:?} ({})",
                    first.name,
                    first.op_name(),
                    node.name,
                    node.op_name()
                )));
            }
            if matches!(out[v.index()], Producer::Given) && graph.inputs.contains(&v) {
                return Err(GraphError::Graph(format!(
                    "value {name:?} is a graph input, and node {:?} ({}) produces it again",
                    node.name,
                    node.op_name()
                )));
            }
            out[v.index()] = Producer::Node(n);
        }
    }
    Ok(out)
}

/// Names the nodes of one cycle.
fn cycle(graph: &Graph, feeds: &[Vec<usize>], waits: &[usize]) -> GraphError {
    // Every node that still waits is on a cycle or behind one; walking backwards along waiting producers finds it.
    let mut waiting_producer = vec![None; waits.len()];
    for (p, consumers) in feeds.iter().enumerate().filter(|(p, _)| waits[*p] > 0) {
        for &c in consumers {
            waiting_producer[c] = Some(p);
        }
    }
    let mut seen = vec![false; waits.len()];
    let mut at = (0..waits.len()).find(|&n| waits[n] > 0);
    while let Some(n) = at.filter(|&n| !seen[n]) {
        seen[n] = true;
        at = waiting_producer[n];
    }
    let mut names = Vec::new();
    let mut step = at;
    while let Some(n) = step {
        names.push(format!("{:?}", graph.nodes[n].name));
        step = waiting_producer[n].filter(|&p| Some(p) != at);
    }
    names.reverse();
    GraphError::Graph(format!("nodes feed each other in a cycle: {}", names.join(" -> ")))
}

/// Runs a node's shape rule and merges the result into what is declared of its outputs.
fn infer(graph: &mut Graph, id: NodeId) -> Result<(), GraphError> {
    let node = &graph.nodes[id.index()];
    let facts =
        node.op.infer_outputs(&graph.input_facts(node), node.outputs.len()).map_err(|e| node.error(e))?;
    if facts.len() < node.outputs.len() {
        let e = format!("expected at most {} outputs, found {}", facts.len(), node.outputs.len());
        return Err(node.error(OpError::other(e)));
    }
    let mut merged = Vec::new();
    for (&v, inferred) in node.outputs.iter().zip(facts) {
        let Some(v) = v else { continue };
        let value = graph.value(v);
        let fact = merge(&value.fact, inferred).map_err(|(declared, inferred)| {
            node.error(OpError::other(format!(
                "output {:?}: expected {declared} as declared, found {inferred} by its inputs",
                value.name
            )))
        })?;
        merged.push((v, fact));
    }
    for (v, fact) in merged {
        graph.value_mut(v).fact = fact;
    }
    Ok(())
}

/// Both facts together: numbers win over names, declared names over inferred ones.
///
/// A declaration without a single number is a placeholder: exporters write those with the wrong rank, so the inferred
/// shape replaces it.
fn merge(declared: &Fact, inferred: Fact) -> Result<Fact, (String, String)> {
    let text = |f: &Fact| f.dtype.map_or(f.shape_text(), |d| format!("{d}{}", f.shape_text()));
    let differ = |inferred: &Fact| (text(declared), text(inferred));
    if let (Some(a), Some(b)) = (declared.dtype, inferred.dtype)
        && a != b
    {
        return Err(differ(&inferred));
    }
    let shape = match (&declared.shape, &inferred.shape) {
        (None, s) | (s, None) => s.clone(),
        (Some(a), Some(b)) if a.len() != b.len() && a.iter().all(|d| d.known().is_none()) => Some(b.clone()),
        (Some(a), Some(b)) => {
            if a.len() != b.len() || !a.iter().zip(b).all(|(a, b)| a.compatible(b)) {
                return Err(differ(&inferred));
            }
            let one = |(a, b): (&Dim, &Dim)| match (a, b) {
                (Dim::Known(_), _) | (Dim::Named(_), Dim::Named(_) | Dim::Unknown) => a.clone(),
                _ => b.clone(),
            };
            Some(a.iter().zip(b).map(one).collect())
        }
    };
    Ok(Fact { dtype: declared.dtype.or(inferred.dtype), shape, constant: inferred.constant })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{Attrs, Node, ValueId};
    use doyen_tensor::DType;

    fn node(g: &mut Graph, name: &str, op_type: &str, input: &str, output: &str) {
        let op = if op_type == "Identity" {
            Op::parse("", op_type, 21, &Attrs::default()).unwrap()
        } else {
            Op::Unknown
        };
        let (input, output) = (g.intern(input), g.intern(output));
        g.nodes.push(Node {
            name: name.into(),
            domain: String::new(),
            op_type: op_type.into(),
            attrs: Attrs::default(),
            op,
            inputs: vec![Some(input)],
            outputs: vec![Some(output)],
        });
    }

    fn graph(nodes: &[(&str, &str, &str, &str)]) -> Graph {
        let mut g = Graph::new("g", [("", 21)]);
        g.add_input("x", Fact::new(DType::F32, [Dim::from("n"), Dim::Known(3)]));
        for (name, op, input, output) in nodes {
            node(&mut g, name, op, input, output);
        }
        let y = g.intern("y");
        g.add_output(y);
        g
    }

    fn refusal(nodes: &[(&str, &str, &str, &str)]) -> String {
        check(&mut graph(nodes)).unwrap_err().to_string()
    }

    #[test]
    fn sorts_and_infers() {
        let mut g = graph(&[("b", "Identity", "h", "y"), ("a", "Identity", "x", "h")]);
        let y = g.find("y").unwrap();
        g.value_mut(y).fact = Fact::new(DType::F32, [Dim::Known(7), Dim::Unknown]);
        check(&mut g).unwrap();
        assert_eq!(g.nodes.iter().map(|n| n.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(g.value(y).fact.shape, Some(vec![Dim::Known(7), Dim::Known(3)]));
        // Checking again changes nothing.
        check(&mut g).unwrap();
        assert_eq!(g.value(ValueId(y.0)).fact.shape, Some(vec![Dim::Known(7), Dim::Known(3)]));
    }

    #[test]
    fn every_unknown_operator_is_listed() {
        let message = refusal(&[("a", "Foo", "x", "h"), ("b", "Bar", "h", "i"), ("c", "Foo", "i", "y")]);
        assert!(message.ends_with(r#"Bar (node "b"); Foo (nodes "a", "c")"#), "{message}");
    }

    #[test]
    fn structure_is_checked() {
        let cycle = refusal(&[
            ("in", "Identity", "x", "y"),
            ("a", "Identity", "q", "p"),
            ("b", "Identity", "p", "q"),
            ("behind", "Identity", "q", "r"),
        ]);
        assert!(cycle.contains(r#""b" -> "a""#) || cycle.contains(r#""a" -> "b""#), "{cycle}");
        assert!(!cycle.contains("behind"), "{cycle}");
        let own = refusal(&[("a", "Identity", "y", "y")]);
        assert!(own.ends_with(r#"cycle: "a""#), "{own}");
        let twice = refusal(&[("a", "Identity", "x", "y"), ("b", "Identity", "x", "y")]);
        assert!(
            twice.contains(r#"value "y" has two producers: node "a" (Identity) and node "b" (Identity)"#),
            "{twice}"
        );
        let ghost = refusal(&[("a", "Identity", "ghost", "y")]);
        assert!(ghost.contains(r#"node "a" (Identity): its input "ghost""#), "{ghost}");
        let nothing = refusal(&[("a", "Identity", "x", "h")]);
        assert!(nothing.contains(r#"graph output "y""#), "{nothing}");
        let input = refusal(&[("a", "Identity", "x", "y"), ("b", "Identity", "y", "x")]);
        assert!(input.contains("is a graph input"), "{input}");
    }

    #[test]
    fn declarations_must_agree() {
        let mut g = graph(&[("a", "Identity", "x", "y")]);
        let y = g.find("y").unwrap();
        g.value_mut(y).fact = Fact::new(DType::F32, [Dim::from("n"), Dim::Known(4)]);
        let message = check(&mut g).unwrap_err().to_string();
        assert_eq!(
            message,
            "node \"a\" (Identity): output \"y\": expected float32[n,4] as declared, found float32[n,3] by its inputs"
        );
        for (declared, fits) in
            [(vec![Dim::from("p"), "q".into(), "r".into()], true), (vec![Dim::Known(3)], false)]
        {
            g.value_mut(y).fact = Fact::new(DType::F32, declared);
            assert_eq!(check(&mut g).is_ok(), fits);
        }
    }
}
