//! GGUF files: the same package as from the checkpoint they were made of; quantized types carried over.

use crate::{
    common::{
        Checkpoint, Place,
        gguf::{Gguf, Meta},
    },
    packages::{logits, open},
};
use doyen_convert::{
    Options, Part, Report, Silent, Target, convert,
    gguf::{GgmlType, Unpacked, unpack},
    options::{Setting, Width},
    report::Form,
};
use doyen_tensor::{FloatType, format::Bits};
use std::{fs, path::Path};

fn f32_options() -> Options {
    Options { dtype: FloatType::F32, ..Options::default() }
}

fn converted(file: &Gguf, options: &Options) -> (Place, Report) {
    let place = Place::new();
    let path = place.checkpoint().join("model.gguf");
    file.write(&path);
    let report = convert(&path, &Target::new(place.package()), options, &mut Silent).unwrap();
    (place, report)
}

fn read(dir: &Path, name: &str) -> Vec<u8> {
    fs::read(dir.join(name)).unwrap()
}

/// Weights and graph are those of the checkpoint; only what the model says about its making differs.
#[test]
fn float_files_become_the_checkpoint_they_came_from() {
    let mut moe = Checkpoint::qwen3_moe();
    moe.config["norm_topk_prob"] = true.into();
    let qwen2 = Checkpoint::qwen2_plain();
    for (c, arch) in [(Checkpoint::llama(), "llama"), (qwen2, "qwen2"), (moe, "qwen3moe")] {
        let (from_gguf, report) = converted(&Gguf::of(&c, arch), &f32_options());
        assert_eq!(report.architecture, c.config["architectures"][0].as_str().unwrap());
        let plain = c.write();
        plain.convert(&f32_options()).unwrap();
        let data = |p: &Place| read(&p.package(), "model.onnx.data");
        assert!(data(&from_gguf) == data(&plain), "{arch}: the data files differ");
        let ops = |p: &Place| -> Vec<String> {
            open(&p.package()).graph.nodes.iter().map(|n| format!("{n:?}")).collect()
        };
        assert_eq!(ops(&from_gguf), ops(&plain), "{arch}");
    }
}

/// A llama whose matrices have blocks of this type; norms stay float.
fn quantized(ty: GgmlType) -> Gguf {
    let mut c = Checkpoint::llama();
    let values = ty.block().0;
    let (hidden, inner) = (values.max(32), values.max(64));
    c.config["hidden_size"] = hidden.into();
    c.config["intermediate_size"] = inner.into();
    c.tensors.clear();
    c.add("model.embed_tokens.weight", &[64, hidden]);
    c.add("model.norm.weight", &[hidden]);
    c.add("lm_head.weight", &[64, hidden]);
    let p = "model.layers.0";
    c.add(&format!("{p}.input_layernorm.weight"), &[hidden]);
    c.add(&format!("{p}.post_attention_layernorm.weight"), &[hidden]);
    // Two heads of half the width each, one for keys and values.
    c.config["head_dim"] = (hidden / 2).into();
    for (name, rows, cols) in
        [("q", hidden, hidden), ("k", hidden / 2, hidden), ("v", hidden / 2, hidden), ("o", hidden, hidden)]
    {
        c.add(&format!("{p}.self_attn.{name}_proj.weight"), &[rows, cols]);
    }
    for (name, rows, cols) in [("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)] {
        c.add(&format!("{p}.mlp.{name}_proj.weight"), &[rows, cols]);
    }
    let mut file = Gguf::of(&c, "llama");
    for (i, t) in file.tensors.iter_mut().enumerate().filter(|(_, t)| t.shape.len() == 2) {
        t.ty = ty.number();
        t.bytes = blocks(ty, (t.shape[0] * t.shape[1]) as usize, i as u64);
    }
    file
}

/// Random blocks whose float16 numbers are small.
fn blocks(ty: GgmlType, values: usize, seed: u64) -> Vec<u8> {
    let (per_block, size) = ty.block();
    let halves: &[usize] = match ty {
        GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0 | GgmlType::IQ4NL | GgmlType::IQ4XS => &[0],
        GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4K | GgmlType::Q5K => &[0, 2],
        GgmlType::Q2K => &[80, 82],
        GgmlType::Q3K => &[108],
        GgmlType::Q6K => &[208],
        _ => &[],
    };
    let mut state = seed.wrapping_mul(0x9E37_79B9) + 7;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as u8
    };
    let mut out = Vec::new();
    for _ in 0..values / per_block {
        let start = out.len();
        out.extend((0..size).map(|_| next()));
        for &at in halves {
            // Exponents of 2^-10 to 2^-7, either sign.
            let bits = u16::from_le_bytes([out[start + at], (out[start + at + 1] & 0x8f) | 0x14]);
            out[start + at..start + at + 2].copy_from_slice(&bits.to_le_bytes());
        }
        if ty == GgmlType::MXFP4 {
            out[start] = 118 + out[start] % 4;
        }
    }
    out
}

fn quantized_types() -> impl Iterator<Item = GgmlType> {
    GgmlType::read().filter(|t| t.codes().is_some())
}

/// The package of the carried codes computes what the package of the dequantized values computes.
#[test]
fn carried_codes_compute_what_their_values_compute() {
    for ty in quantized_types() {
        let file = quantized(ty);
        let (carried, report) = converted(&file, &f32_options());
        for fate in report.fates.iter().filter(|f| f.origin.from == ty.name()) {
            let embedding = fate.origin.part == Part::Embedding && ty.codes().unwrap().minimum;
            let is_carried = matches!(fate.origin.form, Form::Codes { carried: true, .. });
            assert_eq!(is_carried, !embedding, "{ty}: {fate}");
            assert!(embedding || fate.deviation.relative() < 1e-7, "{ty}: {fate}");
        }
        // Tables with float zero points have no operator, so those are requantized: compared at the same width.
        let table = ty.codes().unwrap().minimum.then_some(Width::Bits(Bits::B8));
        let (dequantized, _) = converted(
            &file,
            &Options { embed: table.or(Some(Width::Float)), ..Options::float(FloatType::F32) },
        );
        let (a, b) = (logits(&open(&carried.package())), logits(&open(&dequantized.package())));
        let spread = b.iter().fold(0f32, |m, v| m.max(v.abs()));
        let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(worst <= 2e-5 * spread && spread > 0.0, "{ty}: {worst} of {spread}");
    }
}

/// Each stored type by name in the report; widths that were asked for requantize.
#[test]
fn widths_that_are_asked_for_requantize() {
    let file = quantized(GgmlType::Q6K);
    let settings = vec![Setting::Mlp(Width::Bits(Bits::B4))];
    let (_, report) = converted(&file, &Options { settings, ..f32_options() });
    let of = |part: Part| report.fates.iter().find(|f| f.origin.part == part).unwrap();
    let mlp = of(Part::Mlp);
    assert_eq!((mlp.origin.from.as_str(), mlp.tensors), ("Q6_K", 3));
    assert!((0.01..0.2).contains(&mlp.deviation.relative()), "{mlp}");
    assert!(mlp.to_string().contains("requantized to 4 bits, block 32, zero points"), "{mlp}");
    let attention = of(Part::Attention);
    assert!(attention.to_string().contains("carried as 8 bits, block 16: exact"), "{attention}");
    assert_eq!(attention.tensors, 4);
    assert_eq!(of(Part::Norms).deviation.error, 0.0);
}

/// A file says what float type its scales need.
#[test]
fn float16_is_enough_for_float16_scales() {
    for (ty, dtype) in
        [(GgmlType::Q4_0, FloatType::F16), (GgmlType::Q4_1, FloatType::F32), (GgmlType::Q6K, FloatType::F32)]
    {
        let place = Place::new();
        let path = place.checkpoint().join("model.gguf");
        quantized(ty).write(&path);
        assert_eq!(doyen_convert::Input::open(&path).unwrap().default_dtype(), dtype, "{ty}");
    }
    let (_, report) = converted(&quantized(GgmlType::Q4_0), &Options::default());
    let mlp = report.fates.iter().find(|f| f.origin.part == Part::Mlp).unwrap();
    assert!(mlp.to_string().contains("carried as 4 bits, block 32: exact"), "{mlp}");
}

/// Experts in Q4_0 with down projections in Q8_0: one bank of 4 and 8 bits, exact.
#[test]
fn experts_become_one_bank() {
    let mut c = Checkpoint::qwen3_moe();
    c.config["norm_topk_prob"] = true.into();
    let mut file = Gguf::of(&c, "qwen3moe");
    for (i, (name, ty)) in
        [("gate", GgmlType::Q4_0), ("up", GgmlType::Q4_0), ("down", GgmlType::Q8_0)].into_iter().enumerate()
    {
        let t = file.tensor(&format!("blk.1.ffn_{name}_exps.weight"));
        t.ty = ty.number();
        t.bytes = blocks(ty, t.shape.iter().product::<u64>() as usize, i as u64);
    }
    let (carried, report) = converted(&file, &f32_options());
    let text: Vec<String> = report.fates.iter().map(ToString::to_string).collect();
    assert!(
        text.iter().any(|t| t.contains("experts fc1")
            && t.contains("2 Q4_0")
            && t.contains("4 bits, block 32: exact")),
        "{text:#?}"
    );
    assert!(
        text.iter().any(|t| t.contains("experts fc2")
            && t.contains("1 Q8_0")
            && t.contains("8 bits, block 32: exact")),
        "{text:#?}"
    );
    let package = open(&carried.package());
    assert_eq!(package.graph.nodes.iter().filter(|n| n.op_type == "QMoE").count(), 1);
    // The same experts as float weights, everything else as above.
    for t in file.tensors.iter_mut().filter(|t| t.name.contains("_exps")) {
        let ty = GgmlType::new(t.ty).unwrap();
        let mut unpacked = Unpacked::default();
        unpack(ty, &t.bytes, &mut unpacked);
        t.bytes = unpacked.values(32).flat_map(f32::to_le_bytes).collect();
        t.ty = 0;
    }
    let settings = vec![Setting::Experts(Width::Float)];
    let (float, _) = converted(&file, &Options { settings, ..f32_options() });
    let (a, b) = (logits(&package), logits(&open(&float.package())));
    let spread = b.iter().fold(0f32, |m, v| m.max(v.abs()));
    let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(worst <= 2e-5 * spread, "{worst} of {spread}");
}

/// `rope_freqs.weight` divides the frequencies.
#[test]
fn rotary_factors_change_the_caches() {
    let c = Checkpoint::llama();
    let mut file = Gguf::of(&c, "llama");
    let (plain, _) = converted(&file, &f32_options());
    file.add_f32("rope_freqs.weight", &[8], &[1.0; 8]);
    let (ones, _) = converted(&file, &f32_options());
    assert!(read(&ones.package(), "model.onnx.data") == read(&plain.package(), "model.onnx.data"));
    file.tensors.pop();
    file.add_f32("rope_freqs.weight", &[8], &[1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]);
    let (scaled, _) = converted(&file, &f32_options());
    let sines = |p: &Place| {
        let package = open(&p.package());
        let id = package.graph.find("sin_cache").unwrap();
        let constant = package.graph.value(id).fact.constant.clone().unwrap();
        constant.to_tensor().unwrap().to_f32().unwrap()
    };
    let (a, b) = (sines(&plain), sines(&scaled));
    assert_eq!(a[8..10], b[8..10]);
    let angle = 10000f64.powf(-4.0 / 16.0) as f32 / 2.0;
    assert!((b[10] - angle.sin()).abs() < 1e-7, "{} {}", b[10], angle.sin());
}

/// A Phi-3 with half of each head rotated, and the same as a GGUF file.
fn phi3() -> (Checkpoint, Gguf) {
    let (short, long): (Vec<f32>, Vec<f32>) = ((0..8).map(|i| 1.0 + i as f32 / 4.0).collect(), vec![4.0; 8]);
    let mut c = Checkpoint::llama();
    c.tensors.clear();
    c.config["architectures"][0] = "Phi3ForCausalLM".into();
    for (field, value) in [("head_dim", 32.into()), ("partial_rotary_factor", 0.5.into())] {
        c.config[field] = value;
    }
    // sqrt(1 + ln(64 / 16) / ln(16)), as a number that float32 holds.
    c.config["rope_scaling"] = serde_json::json!({
        "rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": 1.5f32.sqrt(),
        "original_max_position_embeddings": 16,
    });
    c.add("model.embed_tokens.weight", &[64, 32]);
    c.add("model.norm.weight", &[32]);
    c.add("lm_head.weight", &[64, 32]);
    let layer = "model.layers.0";
    c.add(&format!("{layer}.input_layernorm.weight"), &[32]);
    c.add(&format!("{layer}.post_attention_layernorm.weight"), &[32]);
    c.add(&format!("{layer}.self_attn.qkv_proj.weight"), &[4 * 32, 32]);
    c.add(&format!("{layer}.self_attn.o_proj.weight"), &[32, 64]);
    c.add(&format!("{layer}.mlp.gate_up_proj.weight"), &[96, 32]);
    c.add(&format!("{layer}.mlp.down_proj.weight"), &[32, 48]);
    let mut file = Gguf::of(&c, "phi3");
    file.set("phi3.rope.dimension_count", Meta::U32(16));
    file.set("phi3.attention.sliding_window", Meta::U32(0));
    file.set("phi3.rope.scaling.original_context_length", Meta::U32(16));
    file.set("phi3.rope.scaling.attn_factor", Meta::F32(1.5f32.sqrt()));
    file.add_f32("rope_factors_long.weight", &[8], &long);
    file.add_f32("rope_factors_short.weight", &[8], &short);
    (c, file)
}

/// Either side of LongRoPE, as from the checkpoint.
#[test]
fn long_factors_are_tensors() {
    let (c, file) = phi3();
    for long_context in [false, true] {
        let options = Options { long_context, ..f32_options() };
        let (from_gguf, report) = converted(&file, &options);
        let (length, hint) =
            if long_context { (64, "with the long factors") } else { (16, "--long-context") };
        assert!(report.notices.iter().any(|n| n.contains("longrope") && n.contains(hint)), "{report:?}");
        let plain = c.write();
        plain.convert(&options).unwrap();
        let data = |p: &Place| read(&p.package(), "model.onnx.data");
        assert!(data(&from_gguf) == data(&plain), "long: {long_context}");
        assert_eq!(open(&from_gguf.package()).manifest.context_length, Some(length));
    }
    let mut half = file.clone();
    half.tensors.pop();
    let place = Place::new();
    let path = place.checkpoint().join("model.gguf");
    half.write(&path);
    let e =
        convert(&path, &Target::new(place.package()), &f32_options(), &mut Silent).unwrap_err().to_string();
    assert!(e.contains("rope_factors_short.weight") && e.contains("no such tensor"), "{e}");
    // Other rotations have no long side.
    Gguf::of(&Checkpoint::llama(), "llama").write(&path);
    let options = Options { long_context: true, ..f32_options() };
    let e = convert(&path, &Target::new(place.package()), &options, &mut Silent).unwrap_err().to_string();
    assert!(e.contains("longrope") && e.contains("--long-context") && e.contains("default"), "{e}");
}

/// A window of no positions is none, whatever the family assumes where nothing is said.
#[test]
fn windows_of_nothing() {
    for arch in ["gemma2", "gemma3"] {
        let mut file = Gguf::of(&Checkpoint::llama(), arch);
        for norm in ["post_attention_norm", "post_ffw_norm"] {
            file.add_f32(&format!("blk.0.{norm}.weight"), &[32], &[1.0; 32]);
        }
        for norm in ["attn_q_norm", "attn_k_norm"].iter().filter(|_| arch == "gemma3") {
            file.add_f32(&format!("blk.0.{norm}.weight"), &[16], &[1.0; 16]);
        }
        let slides = |file: &Gguf| {
            let (place, _) = converted(file, &f32_options());
            open(&place.package()).graph.nodes.iter().any(|n| format!("{n:?}").contains("local_window_size"))
        };
        assert!(slides(&file), "{arch}");
        file.set(&format!("{arch}.attention.sliding_window"), Meta::U32(0));
        assert!(!slides(&file), "{arch}");
    }
}

#[test]
fn several_files_are_one_model() {
    let whole = Gguf::of(&Checkpoint::qwen2_plain(), "qwen2");
    let (one, _) = converted(&whole, &f32_options());
    let place = Place::new();
    let (first, rest) = whole.tensors.split_at(3);
    let path = |i: usize| place.checkpoint().join(format!("m-0000{i}-of-00002.gguf"));
    for (i, tensors) in [first, rest].into_iter().enumerate() {
        let mut part = Gguf { tensors: tensors.to_vec(), ..Gguf::default() };
        if i == 0 {
            part.pairs.clone_from(&whole.pairs);
        }
        part.set("split.no", Meta::U32(i as u32));
        part.set("split.count", Meta::U32(2));
        part.set("split.tensors.count", Meta::U32(whole.tensors.len() as u32));
        part.write(&path(i + 1));
    }
    // Either file leads to the other.
    for i in [1, 2] {
        let target = place.package().with_extension(i.to_string());
        convert(&path(i), &Target::new(&target), &f32_options(), &mut Silent).unwrap();
        assert!(read(&target, "model.onnx.data") == read(&one.package(), "model.onnx.data"));
    }
}
