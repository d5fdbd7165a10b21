//! Roles of ports by standard names, by operators and by the manifest, and ports that cannot be told apart.

use super::*;
use crate::{
    ir::{Attrs, Fact, Node},
    ops::Op,
    pass::lower::{StatePair, StatePorts},
};
use doyen_tensor::Tensor;

/// A graph of ports without a computation between them, except for the embedding.
fn graph(inputs: &[(&str, DType, &[Dim])], outputs: &[(&str, DType, &[Dim])]) -> Graph {
    let mut g = Graph::new("g", [("", 21), ("com.microsoft", 1)]);
    for (name, dtype, shape) in inputs {
        g.add_input(name, Fact::new(*dtype, shape.to_vec()));
    }
    for (name, dtype, shape) in outputs {
        let v = g.intern(name);
        g.value_mut(v).fact = Fact::new(*dtype, shape.to_vec());
        g.add_output(v);
    }
    g
}

fn node(g: &mut Graph, op_type: &str, inputs: &[(usize, &str)], outputs: &[(usize, &str)]) {
    let place = |g: &mut Graph, ports: &[(usize, &str)]| {
        let mut out = vec![None; ports.iter().map(|(i, _)| i + 1).max().unwrap_or(0)];
        for (i, name) in ports {
            out[*i] = Some(g.intern(name));
        }
        out
    };
    let (inputs, outputs) = (place(g, inputs), place(g, outputs));
    g.nodes.push(Node {
        name: op_type.into(),
        domain: String::new(),
        op_type: op_type.into(),
        attrs: Attrs::default(),
        op: Op::Unknown,
        inputs,
        outputs,
    });
}

fn ids() -> Vec<Dim> {
    vec!["b".into(), "s".into()]
}

fn cache() -> Vec<Dim> {
    vec!["b".into(), 2.into(), "p".into(), 8.into()]
}

fn logits() -> Vec<Dim> {
    vec!["b".into(), "s".into(), 100.into()]
}

const F: DType = DType::F32;
const I: DType = DType::I64;

#[test]
fn standard_names_need_no_manifest() {
    let g = graph(
        &[
            ("input_ids", I, &ids()),
            ("attention_mask", I, &ids()),
            ("past_key_values.0.key", F, &cache()),
            ("past_key_values.0.value", F, &cache()),
            ("past_key_values.1.conv_state", F, &["b".into(), 4.into(), 3.into()]),
        ],
        &[
            ("logits", F, &logits()),
            ("present.0.key", F, &cache()),
            ("present.0.value", F, &cache()),
            ("present.1.conv_state", F, &["b".into(), 4.into(), 3.into()]),
        ],
    );
    let spec = derive(&g, &Manifest::default()).unwrap();
    assert_eq!(spec.input_ids, "input_ids");
    assert_eq!(spec.attention_mask.as_deref(), Some("attention_mask"));
    assert_eq!(spec.position_ids, None);
    assert_eq!(spec.states.len(), 2);
    match &spec.states[0].ports {
        StatePorts::KeyValue(p) => assert_eq!(
            (p.past_key.as_str(), p.present_value.as_str()),
            ("past_key_values.0.key", "present.0.value")
        ),
        StatePorts::Fixed { .. } => panic!("{:?}", spec.states),
    }
    assert_eq!(spec.states[1].layer, 1);
    assert!(matches!(spec.states[1].ports, StatePorts::Fixed { .. }));
}

#[test]
fn strange_names_are_read_off_the_operators() {
    let mut g = graph(
        &[("t", I, &ids()), ("a", F, &cache()), ("b", F, &cache())],
        &[("c", F, &cache()), ("d", F, &cache()), ("y", F, &logits())],
    );
    g.add_constant("table", Tensor::from_slice([1, 1], &[0.0f32]).unwrap());
    node(&mut g, "Gather", &[(0, "table"), (1, "t")], &[(0, "h")]);
    // The operator crosses the order of the ports.
    node(&mut g, "GroupQueryAttention", &[(3, "b"), (4, "a")], &[(0, "o"), (1, "c"), (2, "d")]);
    let spec = derive(&g, &Manifest::default()).unwrap();
    assert_eq!((spec.input_ids.as_str(), spec.logits.as_str()), ("t", "y"));
    let StatePorts::KeyValue(p) = &spec.states[0].ports else { panic!("{:?}", spec.states) };
    assert_eq!((p.past_key.as_str(), p.past_value.as_str()), ("b", "a"));
    assert_eq!((p.present_key.as_str(), p.present_value.as_str()), ("c", "d"));
}

/// One export task gives recurrent states the names of caches: the operators that own them decide.
#[test]
fn recurrent_states_under_the_names_of_caches() {
    let mut g = graph(
        &[
            ("input_ids", I, &ids()),
            ("past_key_values.0.key", F, &cache()),
            ("past_key_values.0.value", F, &cache()),
            ("past_key_values.1.key", F, &cache()),
            ("past_key_values.1.value", F, &cache()),
        ],
        &[
            ("logits", F, &logits()),
            ("present.0.key", F, &cache()),
            ("present.0.value", F, &cache()),
            ("present.1.key", F, &cache()),
            ("present.1.value", F, &cache()),
        ],
    );
    node(&mut g, "CausalConvWithState", &[(3, "past_key_values.0.key")], &[(0, "c"), (1, "present.0.key")]);
    node(&mut g, "LinearAttention", &[(3, "past_key_values.0.value")], &[(0, "l"), (1, "present.0.value")]);
    let spec = derive(&g, &Manifest::default()).unwrap();
    let fixed = |s: &&StatePair| matches!(s.ports, StatePorts::Fixed { .. });
    assert_eq!((spec.states.len(), spec.states.iter().filter(fixed).count()), (3, 2));
    let StatePorts::Fixed { past, present } = &spec.states[1].ports else { panic!("{:?}", spec.states) };
    assert_eq!((past.as_str(), present.as_str()), ("past_key_values.0.value", "present.0.value"));
}

#[test]
fn what_cannot_be_told_apart_is_an_error() {
    // Two integer matrices that both select rows.
    let mut g = graph(&[("a", I, &ids()), ("b", I, &ids())], &[("logits", F, &logits())]);
    g.add_constant("table", Tensor::from_slice([1, 1], &[0.0f32]).unwrap());
    node(&mut g, "Gather", &[(0, "table"), (1, "a")], &[(0, "h")]);
    node(&mut g, "Gather", &[(0, "table"), (1, "b")], &[(0, "i")]);
    let e = derive(&g, &Manifest::default()).unwrap_err();
    assert!(matches!(e, PortError::Ambiguous { what: "token ids", .. }), "{e}");

    // State ports that nothing pairs.
    let g = graph(
        &[("input_ids", I, &ids()), ("x", F, &cache()), ("z", F, &cache())],
        &[("logits", F, &logits()), ("q", F, &cache())],
    );
    let e = derive(&g, &Manifest::default()).unwrap_err();
    assert!(matches!(&e, PortError::State(m) if m.contains("\"x\"") && m.contains("\"q\"")), "{e}");

    // Paired in order, but nothing says which half is which.
    let g = graph(
        &[("input_ids", I, &ids()), ("x", F, &cache())],
        &[("logits", F, &logits()), ("q", F, &cache())],
    );
    let e = derive(&g, &Manifest::default()).unwrap_err();
    assert!(matches!(&e, PortError::State(m) if m.contains("unknown kind")), "{e}");

    // A key without its value.
    let g = graph(
        &[("input_ids", I, &ids()), ("past_key_values.0.key", F, &cache())],
        &[("logits", F, &logits()), ("present.0.key", F, &cache())],
    );
    let e = derive(&g, &Manifest::default()).unwrap_err();
    assert!(matches!(&e, PortError::State(m) if m.contains("half")), "{e}");

    // Two outputs that could be the logits.
    let g = graph(&[("input_ids", I, &ids())], &[("y", F, &logits()), ("hidden", F, &logits())]);
    let e = derive(&g, &Manifest::default()).unwrap_err();
    assert!(matches!(e, PortError::Ambiguous { what: "logits", .. }), "{e}");
}

#[test]
fn the_manifest_decides_and_may_not_lie() {
    let g = graph(&[("input_ids", I, &ids())], &[("y", F, &logits()), ("hidden", F, &logits())]);
    let named = Manifest::parse(br#"{"model": {"decoder": {"outputs": {"logits": "y"}}}}"#).unwrap();
    assert_eq!(derive(&g, &named).unwrap().logits, "y");
    let lies = Manifest::parse(br#"{"model": {"decoder": {"outputs": {"logits": "nowhere"}}}}"#).unwrap();
    let e = derive(&g, &lies).unwrap_err().to_string();
    assert!(
        e.contains("model.decoder.outputs.logits") && e.contains("nowhere") && e.contains("hidden"),
        "{e}"
    );
}

/// What is no decoder over key and value caches is refused with the ports that say so.
#[test]
fn other_kinds_of_graphs_are_refused_with_what_was_found() {
    // GPT-2 in its old form: one port for keys and values of a layer.
    let stacked: Vec<Dim> = vec![2.into(), "b".into(), 12.into(), "p".into(), 64.into()];
    let g = graph(
        &[("input_ids", I, &ids()), ("past_0", F, &stacked)],
        &[("logits", F, &logits()), ("present_0", F, &stacked)],
    );
    let e = derive(&g, &Manifest::default()).unwrap_err().to_string();
    assert!(e.contains("\"past_0\"") && e.contains("[2,b,12,p,64]") && e.contains("unknown kind"), "{e}");

    // An encoder.
    let hidden: Vec<Dim> = vec!["b".into(), "s".into(), 768.into()];
    let g = graph(
        &[("input_ids", I, &ids()), ("attention_mask", I, &ids()), ("token_type_ids", I, &ids())],
        &[("last_hidden_state", F, &hidden)],
    );
    let e = derive(&g, &Manifest::default()).unwrap_err().to_string();
    assert!(e.contains("\"token_type_ids\"") && e.contains("neither token ids, mask nor positions"), "{e}");

    // A vision tower.
    let pixels: Vec<Dim> = vec!["b".into(), 3.into(), 224.into(), 224.into()];
    let g = graph(&[("pixel_values", F, &pixels)], &[("image_embeds", F, &hidden)]);
    let e = derive(&g, &Manifest::default()).unwrap_err().to_string();
    assert!(e.contains("token ids") && e.contains("\"pixel_values\"") && e.contains("[b,3,224,224]"), "{e}");

    // A decoder on embeddings, behind one.
    let g =
        graph(&[("inputs_embeds", F, &hidden), ("attention_mask", I, &ids())], &[("logits", F, &logits())]);
    let e = derive(&g, &Manifest::default()).unwrap_err().to_string();
    assert!(e.contains("token ids") && e.contains("\"inputs_embeds\""), "{e}");
}

/// Templates that exporters use for the names of caches, without a manifest.
#[test]
fn caches_under_other_templates() {
    for (past, present) in [
        ("past_key_values.%.", "present.%."),
        ("past_key_values.%.decoder.", "present_key_values.%.decoder."),
        ("past_self_%_", "present_self_%_"),
        ("cache.%.", "cache_out.%."),
        ("kv_in_%_", "kv_out_%_"),
    ] {
        let name = |template: &str, layer: usize, half: &str| {
            format!("{}{half}", template.replace('%', &layer.to_string()))
        };
        let halves: Vec<(usize, &str)> = (0..2).flat_map(|l| [(l, "key"), (l, "value")]).collect();
        let pasts: Vec<String> = halves.iter().map(|&(l, h)| name(past, l, h)).collect();
        let presents: Vec<String> = halves.iter().map(|&(l, h)| name(present, l, h)).collect();
        let (ids, cache, logits) = (ids(), cache(), logits());
        let mut inputs = vec![("input_ids", I, &ids[..])];
        inputs.extend(pasts.iter().map(|p| (p.as_str(), F, &cache[..])));
        let mut outputs = vec![("logits", F, &logits[..])];
        outputs.extend(presents.iter().map(|p| (p.as_str(), F, &cache[..])));
        let spec =
            derive(&graph(&inputs, &outputs), &Manifest::default()).unwrap_or_else(|e| panic!("{past}: {e}"));
        assert_eq!(spec.states.len(), 2, "{past}");
        for (l, state) in spec.states.iter().enumerate() {
            let StatePorts::KeyValue(p) = &state.ports else { panic!("{past}: {state:?}") };
            assert_eq!((state.layer, p.past_key.as_str()), (l, pasts[2 * l].as_str()));
            assert_eq!(
                (p.past_value.as_str(), p.present_key.as_str()),
                (pasts[2 * l + 1].as_str(), presents[2 * l].as_str())
            );
        }
    }
}
