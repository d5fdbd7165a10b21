//! Packages of other producers: they lower to what ONNX Runtime computed from them.

use super::equal::{agrees, lowered};
use crate::{
    ir::Graph,
    lowered::{LNode, LOp},
    naive::{Naive, NewTokens},
    ops::Op,
    package::{DirSource, Package},
    pass::lower::LowerSpec,
};
use safetensors::SafeTensors;
use std::{path::PathBuf, sync::Arc};

const VOCAB: usize = 1024;

fn package(name: &str) -> PathBuf {
    let shared = std::env::var_os("DOYEN_SHARED").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")),
        PathBuf::from,
    );
    let path = shared.join("goldens").join(name);
    assert!(path.is_dir(), "{} is not there; set DOYEN_SHARED", path.display());
    path
}

fn open(name: &str) -> (Graph, LowerSpec) {
    let source = DirSource::open(package(name)).unwrap();
    let package = Package::open(Arc::new(source)).unwrap_or_else(|e| panic!("{name}: {e}"));
    (package.graph, package.ports)
}

/// Whole prompts through the lowered graph, against logits that ONNX Runtime computed from the package.
fn matches_ort(name: &str, tolerance: f32) {
    let (graph, spec) = open(name);
    let bytes = std::fs::read(package(name).join("golden-ort.safetensors")).unwrap();
    let ort = SafeTensors::deserialize(&bytes).unwrap();
    let prompts = std::fs::read(package(name).join("../golden.safetensors")).unwrap();
    let prompts = SafeTensors::deserialize(&prompts).unwrap();
    let lowered = lowered(&graph, &spec);
    for k in 0..3 {
        let prompt = prompts.tensor(&format!("prompt_{k}")).unwrap();
        let tokens: Vec<u32> =
            prompt.data().chunks(8).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let want = ort.tensor(&format!("ort_logits_{k}")).unwrap();
        let want: Vec<f32> =
            want.data().chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let rows: Vec<u32> = (0..tokens.len() as u32).collect();
        let mut run = Naive::new(lowered.clone()).unwrap();
        let got = run.step(&[NewTokens { sequence: 0, tokens: &tokens }], &rows, &[]).unwrap();
        let got = got[0].to_f32().unwrap();
        assert_eq!(got.len(), want.len());
        let worst = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0f32, f32::max);
        assert!(worst < tolerance, "{name}, prompt {k}: off by {worst}");
    }
}

#[test]
fn llama_by_mobius() {
    matches_ort("llama/package-mobius", 2e-4);
    let (mut graph, spec) = open("llama/package-mobius");
    let l = agrees(&mut graph, &spec, VOCAB, 2e-4);
    assert!(l.nodes.iter().any(|n| n.op == LOp::SiluMul));
}

#[test]
fn llama_by_genai_in_4_bits() {
    let (mut graph, spec) = open("llama/package-genai-int4");
    agrees(&mut graph, &spec, VOCAB, 2e-4);
}

/// Experts written out densely, with TopK, Softmax and Equal.
#[test]
fn qwen3_moe_by_mobius_with_dense_experts() {
    matches_ort("qwen3_moe/package-mobius", 2e-4);
    let (mut graph, spec) = open("qwen3_moe/package-mobius");
    let l = agrees(&mut graph, &spec, VOCAB, 2e-4);
    assert_eq!(
        l.nodes.iter().filter(|n| matches!(&n.op, LOp::Attention(a) if a.qk_norm.is_some())).count(),
        3
    );
    let count = |is: &dyn Fn(&LOp) -> bool| l.nodes.iter().filter(|n| is(&n.op)).count();
    assert_eq!(count(&|op| matches!(op, LOp::Experts(e) if e.experts == 12 && e.k == 3)), 3);
    assert_eq!(count(&|op| matches!(op, LOp::Route(r) if r.normalize)), 3);
}

#[test]
fn gemma3_by_mobius() {
    matches_ort("gemma3/package-mobius", 2e-4);
}

#[test]
fn gpt_oss_by_genai_with_sliding_caches() {
    matches_ort("gpt_oss/package-genai-fp32", 2e-4);
    for name in ["gpt_oss/package-genai-fp32", "gpt_oss/package-genai-int4"] {
        let (graph, spec) = open(name);
        let l = lowered(&graph, &spec);
        assert_eq!(
            l.groups.iter().map(|g| (g.window, g.layers.len())).collect::<Vec<_>>(),
            [(Some(16), 2), (None, 2)]
        );
    }
}

/// Multi-head latent attention with expanded caches and its mask written out in plain operators.
#[test]
fn deepseek_v2_by_mobius() {
    matches_ort("deepseek_v2/package-mobius", 2e-4);
    let (graph, spec) = open("deepseek_v2/package-mobius");
    let l = lowered(&graph, &spec);
    let latent = |n: &&LNode| matches!(&n.op, LOp::LatentAttention(a) if a.causal && a.window.is_none());
    assert_eq!(l.nodes.iter().filter(latent).count(), 4);
    // 64 channels and 16 shared ones, instead of 4 heads of 48 and 24.
    let groups: Vec<_> =
        l.groups.iter().map(|g| (g.kv_heads, g.k_head_size, g.v_head_size, g.layers.len())).collect();
    assert_eq!(groups, [(1, 80, 0, 4)]);
}

/// Recurrent layers beside an attention; the transposes around the convolutions are gone.
#[test]
fn qwen3_next_by_mobius() {
    matches_ort("qwen3_next/package-mobius", 2e-4);
    let (mut graph, spec) = open("qwen3_next/package-mobius");
    let l = agrees(&mut graph, &spec, VOCAB, 2e-4);
    assert!(!l.nodes.iter().any(|n| matches!(n.op, LOp::Op(Op::Transpose(_)))));
    let states: Vec<(&str, &[usize])> = l.states.iter().map(|s| (&*s.past, &*s.dims)).collect();
    assert_eq!(states.len(), 6);
    assert_eq!(states[0], ("past_key_values.0.conv_state", &[3, 256][..]));
    assert_eq!(states[1], ("past_key_values.0.recurrent_state", &[4, 32, 32][..]));
}
