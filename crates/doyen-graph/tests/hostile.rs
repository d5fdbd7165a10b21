//! Damaged models: decoding, checking and running never panics and never takes memory out of proportion, whatever the
//! bytes are. Real models are damaged at random, so that most of what is damaged is still a model.

mod common;

use bytes::Bytes;
use doyen_graph::{
    check::check,
    interp::Interpreter,
    ir::Graph,
    onnx::{ExternalFiles, ExternalPlan, decode, encode},
    package::Manifest,
    testkit::Case,
};
use doyen_tensor::{ByteCount, Tensor};
use proptest::{collection::vec, prelude::*, sample::Index};
use std::{collections::BTreeMap, fs, sync::LazyLock};

/// A data file that is there under every name.
struct AnyFile;

impl ExternalFiles for AnyFile {
    fn file(&self, _: &str) -> Result<Bytes, String> {
        Ok(Bytes::from(vec![0x5a; 1 << 16]))
    }
}

struct Seed {
    name: String,
    model: Vec<u8>,
    inputs: Vec<Tensor>,
}

static SEEDS: LazyLock<Vec<Seed>> = LazyLock::new(|| {
    let cases = Case::find(&common::shared("conformance").join("cases")).unwrap();
    let seed = |c: Case| Seed {
        model: fs::read(c.path.join("model.onnx")).unwrap(),
        inputs: c.data_sets().unwrap().into_iter().next().map_or_else(Vec::new, |s| s.inputs),
        name: c.name,
    };
    cases.into_iter().map(seed).collect()
});

#[derive(Debug, Clone)]
enum Damage {
    Set(Index, u8),
    Flip(Index, u8),
    Cut(Index),
    Repeat(Index, Index),
    Remove(Index, u8),
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        4 => (any::<Index>(), any::<u8>()).prop_map(|(i, b)| Damage::Set(i, b)),
        4 => (any::<Index>(), 0..8u8).prop_map(|(i, b)| Damage::Flip(i, b)),
        1 => any::<Index>().prop_map(Damage::Cut),
        1 => (any::<Index>(), any::<Index>()).prop_map(|(a, b)| Damage::Repeat(a, b)),
        1 => (any::<Index>(), 1..16u8).prop_map(|(i, n)| Damage::Remove(i, n)),
    ]
}

fn apply(bytes: &mut Vec<u8>, damage: &Damage) {
    if bytes.is_empty() {
        return;
    }
    let len = bytes.len();
    match damage {
        Damage::Set(i, b) => bytes[i.index(len)] = *b,
        Damage::Flip(i, bit) => bytes[i.index(len)] ^= 1 << bit,
        Damage::Cut(i) => bytes.truncate(i.index(len)),
        Damage::Repeat(a, b) => {
            let (a, b) = (a.index(len), b.index(len));
            let piece = bytes[a.min(b)..a.max(b)].to_vec();
            bytes.extend(piece);
        }
        Damage::Remove(i, n) => {
            let start = i.index(len);
            bytes.drain(start..(start + usize::from(*n)).min(len));
        }
    }
}

/// Decodes, checks and runs; errors are what is expected here, panics are not.
fn survive(model: Vec<u8>, inputs: &[Tensor]) {
    let Ok(mut graph) = decode(Bytes::from(model), &AnyFile) else { return };
    if check(&mut graph).is_err() || graph.inputs.len() != inputs.len() {
        return;
    }
    let named: Vec<(&str, Tensor)> =
        graph.inputs.iter().zip(inputs).map(|(&v, t)| (graph.value(v).name.as_str(), t.clone())).collect();
    let _ = Interpreter::new(&graph).with_memory_limit(ByteCount(16 << 20)).run(&named);
}

proptest! {
    // PROPTEST_CASES asks for more.
    #![proptest_config(ProptestConfig {
        cases: ProptestConfig::default().cases.max(4000),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn damaged_models_are_errors(which in any::<Index>(), damages in vec(damage(), 1..6)) {
        let seed = which.get(&SEEDS);
        let mut model = seed.model.clone();
        for d in &damages {
            apply(&mut model, d);
        }
        survive(model, &seed.inputs);
    }

    #[test]
    fn noise_is_an_error(bytes in vec(any::<u8>(), 0..300)) {
        let _ = decode(Bytes::from(bytes.clone()), &AnyFile);
        let _ = Manifest::parse(&bytes);
    }
}

/// What identifies a graph, by names.
fn summary(g: &Graph) -> impl PartialEq + std::fmt::Debug + use<> {
    let name = |v: &Option<doyen_graph::ir::ValueId>| v.map_or(String::new(), |v| g.value(v).name.clone());
    let nodes: Vec<_> = g
        .nodes
        .iter()
        .map(|n| {
            let attrs: BTreeMap<String, String> =
                n.attrs.iter().map(|(k, a)| (k.to_owned(), format!("{a:?}"))).collect();
            let (inputs, outputs): (Vec<_>, Vec<_>) =
                (n.inputs.iter().map(name).collect(), n.outputs.iter().map(name).collect());
            (n.name.clone(), n.op_name(), attrs, inputs, outputs)
        })
        .collect();
    let ports = |ids: &[doyen_graph::ir::ValueId]| -> Vec<_> {
        ids.iter()
            .map(|&v| (g.value(v).name.clone(), g.value(v).fact.dtype, g.value(v).fact.shape.clone()))
            .collect()
    };
    let read: std::collections::BTreeSet<_> =
        g.nodes.iter().flat_map(|n| n.inputs.iter().flatten()).chain(&g.outputs).collect();
    let constants: BTreeMap<String, Tensor> = read
        .into_iter()
        .filter_map(|&v| {
            Some((g.value(v).name.clone(), g.value(v).fact.constant.as_ref()?.to_tensor().unwrap()))
        })
        .collect();
    (nodes, ports(&g.inputs), ports(&g.outputs), constants, g.opsets.clone(), g.metadata.clone())
}

#[test]
fn what_is_decoded_encodes_to_the_same_graph() {
    let mut compared = 0;
    for seed in SEEDS.iter() {
        let Ok(graph) = decode(Bytes::from(seed.model.clone()), &AnyFile) else { continue };
        // An attribute of a kind nobody reads (a subgraph) has no bytes to write.
        let Ok(bytes) = encode(&graph, &ExternalPlan::new()) else { continue };
        let again = decode(Bytes::from(bytes.clone()), &AnyFile).unwrap();
        assert_eq!(summary(&graph), summary(&again), "{}", seed.name);
        assert_eq!(bytes, encode(&again, &ExternalPlan::new()).unwrap(), "{}", seed.name);
        compared += 1;
    }
    assert!(compared > 300, "only {compared} models were compared");
}
