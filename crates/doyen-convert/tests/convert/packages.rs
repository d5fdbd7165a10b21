//! Converted packages, read back: what is stored is what the options asked for.

use crate::common::{Checkpoint, Place};
use doyen_convert::{
    Input, Options, Part, Progress, Step, Target, convert,
    options::{Block, LayerOverride, Setting, Width},
};
use doyen_graph::{
    interp::Interpreter,
    ir::{Attr, Graph, Node},
    ops::Op,
    package::{DirSource, Package},
};
use doyen_tensor::{
    FloatType, Tensor,
    format::{Bits, QuantMatrix, ZeroPoints},
};
use serde_json::Value;
use std::{fs, path::Path, sync::Arc};

pub fn open(package: &Path) -> Package {
    Package::open(Arc::new(DirSource::open(package).unwrap())).unwrap()
}

fn nodes<'g>(graph: &'g Graph, op: &str) -> Vec<&'g Node> {
    graph.nodes.iter().filter(|n| n.op_type == op).collect()
}

fn constant(graph: &Graph, name: &str) -> Tensor {
    let fact = &graph.value(graph.find(name).unwrap()).fact;
    fact.constant.as_ref().unwrap().to_tensor().unwrap()
}

fn attr(node: &Node, name: &str) -> Option<Attr> {
    node.attrs.iter().find(|(n, _)| *n == name).map(|(_, a)| a.clone())
}

fn f32_options() -> Options {
    Options { dtype: FloatType::F32, ..Options::default() }
}

/// The logits of a few tokens, by the reference interpreter.
pub fn logits(package: &Package) -> Vec<f32> {
    let ids = [5i64, 9, 2, 33];
    let mut inputs = vec![
        ("input_ids".to_owned(), Tensor::from_slice([1, 4], &ids).unwrap()),
        ("attention_mask".to_owned(), Tensor::from_slice([1, 4], &[1i64; 4]).unwrap()),
    ];
    for id in &package.graph.inputs {
        let value = package.graph.value(*id);
        if value.name.starts_with("past_key_values.") {
            let dims = [1, value.fact.dim(1).known().unwrap(), 0, value.fact.dim(3).known().unwrap()];
            inputs
                .push((value.name.clone(), Tensor::from_f32(value.fact.dtype.unwrap(), dims, &[]).unwrap()));
        }
    }
    let inputs: Vec<_> = inputs.iter().map(|(n, t)| (n.as_str(), t.clone())).collect();
    Interpreter::new(&package.graph).run(&inputs).unwrap()[0].to_f32().unwrap()
}

/// Experts of every pair of widths, block-wise and row-wise, with and without zero points: within half a step of the
/// checkpoint, gate and up rows in turn.
#[test]
fn experts_are_stored_as_asked() {
    let c = Checkpoint::qwen3_moe();
    for (fc1, fc2, block, zero_points) in [
        (Bits::B4, Bits::B4, Block::Columns(16), true),
        (Bits::B2, Bits::B8, Block::Columns(32), false),
        (Bits::B8, Bits::B2, Block::Row, true),
        (Bits::B2, Bits::B4, Block::Row, false),
    ] {
        let settings = vec![
            Setting::Fc1(Width::Bits(fc1)),
            Setting::Fc2(Width::Bits(fc2)),
            Setting::Block(block),
            Setting::ZeroPoints(zero_points),
        ];
        let place = c.write();
        let report = place.convert(&Options { settings, ..f32_options() }).unwrap();
        assert_eq!(report.notices.iter().any(|n| n.starts_with("block row")), block == Block::Row);
        let package = open(&place.package());
        let [node] = nodes(&package.graph, "QMoE")[..] else { panic!("one mixture of experts") };
        assert_eq!(attr(node, "expert_weight_bits"), Some(Attr::Int(fc2.get() as i64)));
        let narrow = (fc1 != fc2).then_some(Attr::Int(fc1.get() as i64));
        assert_eq!(attr(node, "fc1_expert_weight_bits"), narrow);
        assert_eq!(attr(node, "fc3_expert_weight_bits"), narrow);

        let part = |name: &str| constant(&package.graph, &format!("model.layers.1.mlp.experts.{name}"));
        let block = if let Block::Columns(n) = block { n } else { 32 };
        let codes = part("gate_up_proj.weight");
        let scales = part("gate_up_proj.scales");
        let zps = zero_points.then(|| part("gate_up_proj.zero_points"));
        for e in 0..4 {
            let codes = codes.outer_slice(e, e + 1).unwrap();
            let scales = scales.outer_slice(e, e + 1).unwrap();
            let zps = zps.as_ref().map(|z| z.outer_slice(e, e + 1).unwrap());
            let m = QuantMatrix {
                rows: 64,
                cols: 32,
                bits: fc1,
                block,
                codes: codes.bytes(),
                row_bytes: fc1.packed_len(32),
                scales: scales.float_view().unwrap(),
                zero_points: match &zps {
                    None => ZeroPoints::Default,
                    Some(z) if z.shape().len() == 2 => ZeroPoints::AcrossRows(z.bytes()),
                    Some(z) => {
                        ZeroPoints::PerBlock { packed: z.bytes(), row_bytes: fc1.packed_len(32 / block) }
                    }
                },
            };
            m.validate().unwrap();
            let mut row = [0.0; 32];
            for n in 0..64 {
                let name = if n % 2 == 0 { "gate_proj" } else { "up_proj" };
                let source = &c.tensors[&format!("model.layers.1.mlp.experts.{e}.{name}.weight")].1;
                m.dequantize_row(n, &mut row);
                for (k, (a, b)) in row.iter().zip(&source[n / 2 * 32..]).enumerate() {
                    assert!((a - b).abs() <= 0.5001 * m.scale(n, k / block).abs(), "{fc1:?} {e} {n} {k}");
                }
            }
        }
    }
}

/// Not renormalising, in both operators, is the same as computing it from the float model.
#[test]
fn widths_approach_the_float_model() {
    let c = Checkpoint::qwen3_moe();
    let place = c.write();
    place.convert(&Options::float(FloatType::F32)).unwrap();
    let package = open(&place.package());
    assert_eq!(nodes(&package.graph, "MoE").len(), 1);
    let float = logits(&package);

    let eight = Width::Bits(Bits::B8);
    let settings =
        ["experts=8", "mlp=8", "attention=8", "block=16"].iter().map(|s| s.parse().unwrap()).collect();
    let place = c.write();
    place.convert(&Options { settings, embed: Some(eight), lm_head: Some(eight), ..f32_options() }).unwrap();
    let package = open(&place.package());
    assert_eq!(nodes(&package.graph, "QMoE").len(), 1);
    let quantized = logits(&package);
    let worst = float.iter().zip(&quantized).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    let spread = float.iter().fold(0f32, |m, v| m.max(v.abs()));
    assert!(worst > 0.0 && worst < 0.03 * spread, "{worst} of {spread}");
}

#[test]
fn tied_tables_are_stored_once() {
    let c = Checkpoint::qwen3_moe();
    let two = Width::Bits(Bits::B2);
    for (embed, lm_head, shared) in
        [(two, two, true), (Width::Float, Width::Float, true), (two, Width::Bits(Bits::B4), false)]
    {
        let place = c.write();
        let report =
            place.convert(&Options { embed: Some(embed), lm_head: Some(lm_head), ..f32_options() }).unwrap();
        assert_eq!(report.parts.contains_key(&Part::Head), !shared);
        assert_eq!(
            report.notices.iter().any(|n| n.contains("stored twice")),
            !shared,
            "{:?}",
            report.notices
        );
        let values = logits(&open(&place.package()));
        assert!(values.len() == 4 * 64 && values.iter().all(|v| v.is_finite()));
    }
    // 32 columns are no multiple of 64: the two operators would lay the rows out differently.
    let settings = vec![Setting::Block(Block::Columns(64))];
    let place = c.write();
    let report = place.convert(&Options { settings, ..f32_options() }).unwrap();
    assert!(report.notices.iter().any(|n| n.contains("block 64 does not divide hidden_size = 32")));
    logits(&open(&place.package()));
}

#[test]
fn packed_projections_with_biases_and_yarn() {
    let c = Checkpoint::qwen2();
    let mut found = Vec::new();
    for options in [Options::float(FloatType::F32), f32_options()] {
        let place = c.write();
        let report = place.convert(&options).unwrap();
        // Original length 16 stretched by 4 is all that config.json allows.
        assert!(!report.notices.iter().any(|n| n.contains("yarn")), "{:?}", report.notices);
        let package = open(&place.package());
        let bias = constant(&package.graph, "model.layers.0.self_attn.qkv_proj.bias").to_f32().unwrap();
        let source: Vec<f32> = ["q", "k", "v"]
            .iter()
            .flat_map(|n| c.tensors[&format!("model.layers.0.self_attn.{n}_proj.bias")].1.clone())
            .collect();
        assert_eq!(bias, source);
        let cos = constant(&package.graph, "cos_cache").to_f32().unwrap();
        assert!((cos[0] - (0.1 * 4f32.ln() + 1.0)).abs() < 1e-6, "the attention factor scales the caches");
        found.push(logits(&package));
    }
    let worst = found[0].iter().zip(&found[1]).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(worst < 0.5, "{worst}");
}

#[test]
fn yarn_beyond_the_stated_context_is_told() {
    let mut c = Checkpoint::qwen2();
    c.config["rope_scaling"]["factor"] = 8.0.into();
    let notices = c.write().convert(&f32_options()).unwrap().notices.join("\n");
    assert!(notices.contains("reaches 128 positions") && notices.contains("says 64"), "{notices}");
}

#[test]
fn data_is_aligned_and_conversions_repeat() {
    let layers = LayerOverride::parse_list("0:mlp=2;1:fc1=2,fc2=8,attention=float").unwrap();
    let options = Options { layers, ..Options::default() };
    let bytes = |place: Place| {
        place.convert(&options).unwrap();
        (
            fs::read(place.package().join("model.onnx")).unwrap(),
            fs::read(place.package().join("model.onnx.data")).unwrap(),
        )
    };
    let whole = bytes(Checkpoint::qwen3_moe().write());
    assert_eq!(whole, bytes(Checkpoint::qwen3_moe().write()));
    assert_eq!(whole, bytes(Checkpoint::qwen3_moe().write_sharded()), "shards change nothing");

    // Offsets are decimal strings in the file; every one must be a multiple of the page size.
    let mut offsets = 0;
    for at in whole.0.windows(6).enumerate().filter(|(_, w)| *w == b"offset").map(|(i, _)| i) {
        // "offset", then tag and length of the value.
        let len = whole.0[at + 7] as usize;
        let text = std::str::from_utf8(&whole.0[at + 8..at + 8 + len]).unwrap();
        assert_eq!(text.parse::<u64>().unwrap() % 4096, 0);
        offsets += 1;
    }
    assert!(offsets > 20);
}

#[test]
fn manifest_and_metadata() {
    let c = Checkpoint::qwen3_moe();
    let place = c.write();
    fs::write(
        place.checkpoint().join("generation_config.json"),
        r#"{"eos_token_id": 7, "temperature": 0.6, "top_k": 20}"#,
    )
    .unwrap();
    fs::write(place.checkpoint().join("chat_template.jinja"), "{{ messages }}").unwrap();
    let layers = LayerOverride::parse_list("1:fc1=2").unwrap();
    place.convert(&Options { layers, ..Options::default() }).unwrap();
    let read = |name: &str| fs::read_to_string(place.package().join(name)).unwrap();
    let manifest: Value = serde_json::from_str(&read("genai_config.json")).unwrap();
    assert_eq!(manifest["model"]["type"], "qwen3");
    assert_eq!(manifest["model"]["eos_token_id"], 7);
    assert_eq!(manifest["model"]["pad_token_id"], 7);
    assert_eq!(manifest["model"]["context_length"], 64);
    assert_eq!(manifest["search"]["temperature"], 0.6);
    assert_eq!(manifest["search"]["top_k"], 20);
    assert_eq!(read("chat_template.jinja"), "{{ messages }}");
    let package = open(&place.package());
    let metadata = &package.graph.metadata;
    assert_eq!(metadata["doyen.source.architecture"], "Qwen3MoeForCausalLM");
    assert_eq!(
        metadata["doyen.layers"],
        "0:mlp=4,attention=8,block=32,zero-points=on;1:fc1=2,fc2=4,router=float,attention=8,block=32,zero-points=on"
    );
    assert!(package.graph.nodes.iter().all(|n| n.op != Op::Unknown));
}

#[test]
fn progress_reaches_the_end() {
    #[derive(Default)]
    struct Seen(Vec<(u64, u64)>);
    impl Progress for Seen {
        fn step(&mut self, step: Step<'_>) {
            assert!(!step.tensor.is_empty());
            self.0.push((step.done, step.total));
        }
    }
    let place = Checkpoint::qwen2().write();
    let mut seen = Seen::default();
    convert(&place.checkpoint(), &Target::new(place.package()), &Options::default(), &mut seen).unwrap();
    assert!(seen.0.is_sorted());
    let (done, total) = *seen.0.last().unwrap();
    let source: usize = Checkpoint::qwen2().tensors.values().map(|(_, v)| v.len() * 4).sum();
    assert_eq!((done, total), (source as u64, source as u64));
}

#[test]
fn an_interrupted_conversion_leaves_nothing() {
    struct Enough;
    impl Progress for Enough {
        fn step(&mut self, _: Step<'_>) {}
        fn is_interrupted(&self) -> bool {
            true
        }
    }
    let place = Checkpoint::qwen2().write();
    let target = Target::new(place.package());
    let e = convert(&place.checkpoint(), &target, &Options::default(), &mut Enough).unwrap_err();
    assert_eq!(e.to_string(), "interrupted; nothing was kept");
    let beside = place.package().parent().unwrap().to_owned();
    let names: Vec<_> = fs::read_dir(beside).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(
        !names.iter().any(|n| n.to_string_lossy().contains("part-") || place.package().ends_with(n)),
        "{names:?}"
    );
}

#[test]
fn what_a_killed_conversion_left_is_named() {
    let place = Checkpoint::qwen2().write();
    let name = place.package().file_name().unwrap().to_string_lossy().into_owned();
    let left = place.package().with_file_name(format!(".{name}.part-x1y2z3"));
    fs::create_dir(&left).unwrap();
    let report = place.convert(&Options::default()).unwrap();
    assert!(
        report.notices.iter().any(|n| n.contains(".part-x1y2z3") && n.contains("killed")),
        "{:?}",
        report.notices
    );
    assert!(left.is_dir());
}

#[test]
fn what_is_no_checkpoint_is_named() {
    let place = Checkpoint::qwen2().write();
    let open = |path: &Path| Input::open(path).unwrap_err().to_string();
    let e = open(&place.checkpoint().join("absent"));
    assert!(e.contains("absent") && e.contains("no such folder"), "{e}");
    let e = open(&place.checkpoint().join("config.json"));
    assert!(e.contains("config.json") && e.contains("give the folder"), "{e}");
}
