//! Pairs the state that goes into a run with the state that comes out of it.
//!
//! Evidence, strongest first: one operator reads the past and writes the present; the names differ only in words such
//! as past and present; the ports are as many and alike in the same order.

use super::{
    PortError, list,
    name::{self, Role},
    same_layout,
};
use crate::{
    ir::{Graph, Node, ValueId},
    lowered::CachePorts,
    package::manifest::Manifest,
    pass::lower::{StatePair, StatePorts},
};
use std::collections::{BTreeMap, BTreeSet};

/// What was paired.
#[derive(Debug, Default)]
pub(super) struct States {
    pub(super) pairs: Vec<StatePair>,
    /// Outputs that are state.
    pub(super) presents: BTreeSet<ValueId>,
}

/// What a state is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Half(Role),
    Fixed,
}

#[derive(Debug, Clone, Copy)]
struct Pair {
    past: ValueId,
    present: ValueId,
    kind: Kind,
    layer: Option<usize>,
    /// The operator that owns the state, when one reads the past directly.
    owner: Option<usize>,
}

/// Pairs every input in `past` with an output.
pub(super) fn pair(
    graph: &Graph,
    manifest: &Manifest,
    past: &[ValueId],
    outputs: &[ValueId],
) -> Result<States, PortError> {
    let mut open: BTreeSet<ValueId> = outputs.iter().copied().collect();
    let mut found: BTreeMap<ValueId, (ValueId, Option<(usize, Kind)>)> = BTreeMap::new();
    for &p in past {
        if let Some((node, kind, present)) = owner(graph, p)
            && open.remove(&present)
        {
            found.insert(p, (present, Some((node, kind))));
        }
    }
    let rest: Vec<ValueId> = past.iter().copied().filter(|p| !found.contains_key(p)).collect();
    for (p, present) in by_name(graph, &rest, &open)? {
        open.remove(&present);
        found.insert(p, (present, owner(graph, p).map(|(node, kind, _)| (node, kind))));
    }
    let rest: Vec<ValueId> = rest.into_iter().filter(|p| !found.contains_key(p)).collect();
    let left: Vec<ValueId> = outputs.iter().copied().filter(|v| open.contains(v)).collect();
    for (p, present) in by_order(graph, &rest, &left)? {
        found.insert(p, (present, owner(graph, p).map(|(node, kind, _)| (node, kind))));
    }
    let pairs = past
        .iter()
        .filter_map(|p| found.get(p).map(|&(present, owned)| (*p, present, owned)))
        .map(|(past, present, owned)| describe(graph, manifest, past, present, owned))
        .collect::<Result<Vec<_>, _>>()?;
    let presents = pairs.iter().map(|p| p.present).collect();
    Ok(States { pairs: group(graph, &pairs)?, presents })
}

/// The operator that reads `past` as its state, and the output it writes the state to.
fn owner(graph: &Graph, past: ValueId) -> Option<(usize, Kind, ValueId)> {
    const KEY: Kind = Kind::Half(Role::Key);
    const VALUE: Kind = Kind::Half(Role::Value);
    // Input of the past, output of the present.
    let ports = |n: &Node| -> &'static [(usize, usize, Kind)] {
        match n.op_type.as_str() {
            "GroupQueryAttention" => &[(3, 1, KEY), (4, 2, VALUE)],
            "MultiHeadAttention" => &[(6, 1, KEY), (7, 2, VALUE)],
            "Attention" if n.domain.is_empty() => &[(4, 1, KEY), (5, 2, VALUE)],
            "LinearAttention" | "CausalConvWithState" => &[(3, 1, Kind::Fixed)],
            _ => &[],
        }
    };
    let mut found = graph.nodes.iter().enumerate().flat_map(|(i, n)| {
        ports(n).iter().filter_map(move |&(input, output, kind)| {
            (n.inputs.get(input).copied().flatten() == Some(past))
                .then(|| n.outputs.get(output).copied().flatten().map(|present| (i, kind, present)))
                .flatten()
        })
    });
    // Two operators on one state: which of their outputs goes on is not for us to say.
    found.next().filter(|_| found.next().is_none())
}

/// Pairs by names that differ only in the words for the ends of a run.
fn by_name(
    graph: &Graph,
    past: &[ValueId],
    outputs: &BTreeSet<ValueId>,
) -> Result<Vec<(ValueId, ValueId)>, PortError> {
    let mut by_signature: BTreeMap<Vec<String>, (Vec<ValueId>, Vec<ValueId>)> = BTreeMap::new();
    for &p in past {
        by_signature.entry(name::signature(&graph.value(p).name)).or_default().0.push(p);
    }
    for &o in outputs {
        if let Some((_, outputs)) = by_signature.get_mut(&name::signature(&graph.value(o).name)) {
            outputs.push(o);
        }
    }
    let mut out = Vec::new();
    for (pasts, presents) in by_signature.into_values() {
        match (pasts.as_slice(), presents.as_slice()) {
            (_, []) => {}
            (&[p], &[o]) if same_layout(graph, p, o) => out.push((p, o)),
            (&[p], &[o]) => {
                return Err(PortError::State(format!(
                    "graph input {} and output {} have matching names but not one layout",
                    list(graph, &[p]),
                    list(graph, &[o])
                )));
            }
            _ => {
                return Err(PortError::State(format!(
                    "state ports are ambiguous by name: inputs {} against outputs {}",
                    list(graph, &pasts),
                    list(graph, &presents)
                )));
            }
        }
    }
    Ok(out)
}

/// Pairs what is left in order, when there are as many outputs and each pair is alike.
fn by_order(
    graph: &Graph,
    past: &[ValueId],
    outputs: &[ValueId],
) -> Result<Vec<(ValueId, ValueId)>, PortError> {
    if past.is_empty() {
        return Ok(Vec::new());
    }
    let outputs: Vec<ValueId> = outputs
        .iter()
        .copied()
        // Logits may still be among them; state of that shape would be ambiguous anyway.
        .filter(|&o| past.iter().any(|&p| same_layout(graph, p, o)))
        .collect();
    let alike = past.len() == outputs.len()
        && past.iter().zip(&outputs).all(|(&p, &o)| {
            let (a, b) = (name::layer(&graph.value(p).name), name::layer(&graph.value(o).name));
            same_layout(graph, p, o) && (a.is_none() || b.is_none() || a == b)
        });
    if alike {
        return Ok(past.iter().copied().zip(outputs).collect());
    }
    Err(PortError::State(format!(
        "graph inputs {} are neither token ids, mask nor positions, and no outputs pair with them by operator, name or \
         order; outputs left are {}",
        list(graph, past),
        list(graph, &outputs)
    )))
}

/// Says what a pair is: by its operator, by the manifest's template, by its name and layout.
fn describe(
    graph: &Graph,
    manifest: &Manifest,
    past: ValueId,
    present: ValueId,
    owned: Option<(usize, Kind)>,
) -> Result<Pair, PortError> {
    let input = &graph.value(past).name;
    let template = |key: &str, default: &'static str| {
        name::template_layer(manifest.decoder.inputs.get(key).map_or(default, String::as_str), input)
    };
    let by_template =
        template("past_key_names", "past_key_values.%d.key").map(|layer| (layer, Role::Key)).or_else(|| {
            template("past_value_names", "past_key_values.%d.value").map(|layer| (layer, Role::Value))
        });
    let layer = by_template.map(|(layer, _)| layer).or_else(|| name::layer(input));
    let kind = match owned {
        Some((_, kind)) => kind,
        None => unowned_kind(graph, past, by_template.map(|(_, role)| role))?,
    };
    Ok(Pair { past, present, kind, layer, owner: owned.map(|(node, _)| node) })
}

/// What a state is that no operator owns: keys and values grow along axis 2 of 4, other states do not grow at all.
fn unowned_kind(graph: &Graph, past: ValueId, template: Option<Role>) -> Result<Kind, PortError> {
    let value = graph.value(past);
    let grows = value.fact.rank().is_none_or(|r| r == 4) && value.fact.dim(2).known().is_none();
    let fixed = value.fact.shape.as_ref().is_some_and(|s| s.iter().skip(1).all(|d| d.known().is_some()));
    match template.or_else(|| name::role(&value.name)) {
        Some(role) if grows => Ok(Kind::Half(role)),
        _ if fixed => Ok(Kind::Fixed),
        _ => Err(PortError::State(format!(
            "graph input {} is a state of unknown kind: neither its operator, its name nor its shape says whether it \
             holds keys, values or a state of fixed size",
            list(graph, &[past])
        ))),
    }
}

/// Joins keys with their values, and numbers the layers.
fn group(graph: &Graph, pairs: &[Pair]) -> Result<Vec<StatePair>, PortError> {
    let numbered = pairs.iter().all(|p| p.layer.is_some());
    let mut halves: BTreeMap<(usize, usize), [Option<Pair>; 2]> = BTreeMap::new();
    let mut out = Vec::new();
    let mut ordinals = [0usize; 2];
    for p in pairs {
        let role = match p.kind {
            Kind::Fixed => {
                let layer = p.layer.filter(|_| numbered).unwrap_or(out.len());
                let name = |v| graph.value(v).name.clone();
                let ports = StatePorts::Fixed { past: name(p.past), present: name(p.present) };
                out.push(StatePair { layer, ports });
                continue;
            }
            Kind::Half(role) => role as usize,
        };
        let layer = p.layer.filter(|_| numbered).unwrap_or(ordinals[role]);
        ordinals[role] += 1;
        // An owner joins its two halves whatever their names are.
        let key = p.owner.map_or((1, layer), |node| (0, node));
        if let Some(other) = halves.entry(key).or_default()[role].replace(*p) {
            return Err(PortError::State(format!(
                "two states hold the same half of layer {layer}: {}",
                list(graph, &[other.past, p.past])
            )));
        }
    }
    for (ordinal, halves) in halves.into_values().enumerate() {
        let [Some(k), Some(v)] = halves else {
            let lonely: Vec<ValueId> = halves.iter().flatten().map(|p| p.past).collect();
            return Err(PortError::State(format!(
                "graph input {} is half of an attention state; its other half is missing",
                list(graph, &lonely)
            )));
        };
        let layer = if numbered && k.layer == v.layer { k.layer } else { None };
        let name = |v| graph.value(v).name.clone();
        let ports = CachePorts {
            past_key: name(k.past),
            past_value: name(v.past),
            present_key: name(k.present),
            present_value: name(v.present),
        };
        out.push(StatePair { layer: layer.unwrap_or(ordinal), ports: StatePorts::KeyValue(ports) });
    }
    out.sort_by_key(|s| s.layer);
    Ok(out)
}
