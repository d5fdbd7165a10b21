//! Checkpoints whose weights are quantized: codes carried over compute what their values compute.

use crate::{
    common::{Checkpoint, Place},
    packages::{logits, open},
};
use doyen_convert::{Options, Part, Report, options::Setting, options::Width, report::Form};
use doyen_tensor::{FloatType, format::Bits};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::json;
use std::{collections::BTreeMap, fs};

/// Raw tensors of a checkpoint.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

const GROUP: usize = 16;

fn f32_options() -> Options {
    Options { dtype: FloatType::F32, ..Options::default() }
}

fn raw(c: &Checkpoint) -> Tensors {
    let bytes = |v: &[f32]| v.iter().flat_map(|x| x.to_le_bytes()).collect();
    c.tensors.iter().map(|(n, (shape, v))| (n.clone(), (Dtype::F32, shape.clone(), bytes(v)))).collect()
}

fn write(c: &Checkpoint, tensors: &Tensors) -> Place {
    let place = c.write();
    let views =
        tensors.iter().map(|(n, (ty, shape, b))| (n, TensorView::new(*ty, shape.clone(), b).unwrap()));
    safetensors::serialize_to_file(views, None, &place.checkpoint().join("model.safetensors")).unwrap();
    place
}

fn projections(c: &Checkpoint) -> Vec<String> {
    let inside = |n: &&String| n.starts_with("model.layers.") && n.contains("_proj.weight");
    c.tensors.keys().filter(inside).map(|n| n.trim_end_matches(".weight").to_owned()).collect()
}

/// Code, zero point and scale of column `k` of row `n`: different everywhere, and exact in float16.
fn code(n: usize, k: usize) -> u32 {
    ((7 * k + 3 * n + k / 5) % 16) as u32
}

fn zero(n: usize, g: usize) -> u32 {
    ((n + 2 * g) % 15 + 1) as u32
}

fn scale(n: usize, g: usize) -> f32 {
    (1 + (n + g) % 7) as f32 / 1024.0
}

fn value(n: usize, k: usize) -> f32 {
    (code(n, k) as f32 - zero(n, k / GROUP) as f32) * scale(n, k / GROUP)
}

fn words(count: usize, word: impl Fn(usize) -> u32) -> Vec<u8> {
    (0..count).flat_map(|i| word(i).to_le_bytes()).collect()
}

fn scales(n: usize, k: usize) -> (Dtype, Vec<usize>, Vec<u8>) {
    let all = (0..k / GROUP).flat_map(|g| (0..n).map(move |row| scale(row, g)));
    (Dtype::F32, vec![k / GROUP, n], all.flat_map(f32::to_le_bytes).collect())
}

/// The projections as values, and packed by `pack`.
fn checkpoints(
    config: serde_json::Value,
    pack: impl Fn(&mut Tensors, &str, usize, usize),
) -> (Checkpoint, Place) {
    let mut plain = Checkpoint::llama();
    let mut packed = raw(&plain);
    for module in projections(&plain) {
        let name = format!("{module}.weight");
        let (shape, values) = plain.tensors.get_mut(&name).unwrap();
        let (n, k) = (shape[0], shape[1]);
        *values = (0..n * k).map(|i| value(i / k, i % k)).collect();
        packed.remove(&name);
        pack(&mut packed, &module, n, k);
    }
    let mut quantized = plain.clone();
    quantized.config["quantization_config"] = config;
    let place = write(&quantized, &packed);
    (plain, place)
}

fn gptq(tensors: &mut Tensors, module: &str, n: usize, k: usize) {
    let code =
        words(k / 8 * n, |i| (0..8).fold(0, |w, lane| w | code(i % n, i / n * 8 + lane) << (4 * lane)));
    let zeros = words(k / GROUP * n / 8, |i| {
        let (g, first) = (i / (n / 8), i % (n / 8) * 8);
        (0..8).fold(0, |w, lane| w | (zero(first + lane, g) - 1) << (4 * lane))
    });
    let order = words(k, |i| (i / GROUP) as u32);
    tensors.insert(format!("{module}.qweight"), (Dtype::I32, vec![k / 8, n], code));
    tensors.insert(format!("{module}.qzeros"), (Dtype::I32, vec![k / GROUP, n / 8], zeros));
    tensors.insert(format!("{module}.scales"), scales(n, k));
    tensors.insert(format!("{module}.g_idx"), (Dtype::I32, vec![k], order));
    tensors.insert(format!("{module}.bias"), (Dtype::F32, vec![n], vec![0; 4 * n]));
}

fn awq(tensors: &mut Tensors, module: &str, n: usize, k: usize) {
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let word = |f: &dyn Fn(usize) -> u32| (0..8).fold(0, |w, i| w | f(ORDER[i]) << (4 * i));
    let codes = words(k * n / 8, |i| word(&|lane| code(i % (n / 8) * 8 + lane, i / (n / 8))));
    let zeros = words(k / GROUP * n / 8, |i| word(&|lane| zero(i % (n / 8) * 8 + lane, i / (n / 8))));
    tensors.insert(format!("{module}.qweight"), (Dtype::I32, vec![k, n / 8], codes));
    tensors.insert(format!("{module}.qzeros"), (Dtype::I32, vec![k / GROUP, n / 8], zeros));
    tensors.insert(format!("{module}.scales"), scales(n, k));
}

/// Codes of `bits` bits along the last axis, low bits first.
fn along(bits: usize, codes: impl Iterator<Item = u32>) -> Vec<u8> {
    let per_byte = 8 / bits;
    let codes: Vec<u32> = codes.collect();
    codes.chunks(per_byte).map(|c| c.iter().rev().fold(0u32, |b, q| b << bits | q) as u8).collect()
}

/// The parts of a matrix, or of `outer` matrices one after the other, whose rows go on counting.
fn olive_parts(
    tensors: &mut Tensors,
    name: &str,
    (outer, n, k): (Option<usize>, usize, usize),
    (bits, group, symmetric): (usize, usize, bool),
) {
    let rows = outer.unwrap_or(1) * n;
    let shape = |last: usize| [outer.as_slice(), &[n, last]].concat();
    let codes = (0..rows * k).map(|i| code(i / k, i % k) << (bits - 4));
    let groups = k / group;
    let scales = (0..rows * groups).flat_map(|i| scale(i / groups, i % groups).to_le_bytes());
    tensors.insert(format!("{name}_qweight"), (Dtype::U8, shape(k * bits / 8), along(bits, codes)));
    tensors.insert(format!("{name}_scales"), (Dtype::F32, shape(groups), scales.collect()));
    if !symmetric {
        let width = (groups * bits).div_ceil(8);
        let zeros = (0..rows).flat_map(|row| {
            let mut own = along(bits, (0..groups).map(|g| zero(row, g) << (bits - 4)));
            own.resize(width, 0);
            own
        });
        tensors.insert(format!("{name}_qzeros"), (Dtype::U8, shape(width), zeros.collect()));
    }
}

/// Their values.
fn olive_values(
    (n, k): (usize, usize),
    first: usize,
    (bits, group, symmetric): (usize, usize, bool),
) -> Vec<f32> {
    let step = (1u32 << (bits - 4)) as f32;
    (0..n * k)
        .map(|i| {
            let (row, col) = (first + i / k, i % k);
            let middle = if symmetric { 8 } else { zero(row, col / group) };
            (code(row, col) as f32 - middle as f32) * step * scale(row, col / group)
        })
        .collect()
}

fn olive(tensors: &mut Tensors, module: &str, n: usize, k: usize) {
    olive_parts(tensors, &format!("{module}.weight"), (None, n, k), (4, GROUP, false));
}

/// Whether every projection kept its codes, exactly.
fn kept(report: &Report) -> bool {
    let projections: Vec<_> =
        report.fates.iter().filter(|f| ["GPTQ", "AWQ", "Olive"].contains(&f.origin.from.as_str())).collect();
    !projections.is_empty()
        && projections.iter().all(|f| {
            matches!(f.origin.form, Form::Codes { carried: true, bits: Bits::B4, block: GROUP, .. })
                && f.deviation.error == 0.0
        })
}

#[test]
fn four_bit_codes_are_kept() {
    let awq_config = json!({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"});
    let gptq_config = json!({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": false});
    let olive_config = json!({"quant_method": "olive", "bits": 4, "symmetric": false, "group_size": GROUP});
    for (plain, place) in
        [checkpoints(gptq_config, gptq), checkpoints(awq_config, awq), checkpoints(olive_config, olive)]
    {
        // The tables are not quantized in either; what matters here is the same in both.
        let tables = Options { embed: Some(Width::Float), lm_head: Some(Width::Float), ..f32_options() };
        let report = place.convert(&tables).unwrap();
        assert!(kept(&report), "{:?}", report.fates);
        let reference = plain.write();
        reference.convert(&Options::float(FloatType::F32)).unwrap();
        let (found, expected) = (logits(&open(&place.package())), logits(&open(&reference.package())));
        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(worst <= 1e-5, "{worst}");
        let settings = vec![Setting::Mlp(Width::Bits(Bits::B8)), Setting::Attention(Width::Bits(Bits::B8))];
        fs::remove_dir_all(place.package()).unwrap();
        assert!(!kept(&place.convert(&Options { settings, ..tables }).unwrap()), "a width was asked for");
    }
}

#[test]
fn eight_bit_floats_become_floats() {
    let mut plain = Checkpoint::llama();
    let mut packed = raw(&plain);
    for module in projections(&plain) {
        let name = format!("{module}.weight");
        let (shape, values) = plain.tensors.get_mut(&name).unwrap();
        let (n, k) = (shape[0], shape[1]);
        let tiles = [n.div_ceil(16), k.div_ceil(16)];
        let factor = |i: usize| (1 + i % 5) as f32 / 256.0;
        // 1, -1.5 and 2 in turn.
        let code = |i: usize| [0x38u8, 0xBC, 0x40][i % 3];
        let float = |i: usize| [1.0f32, -1.5, 2.0][i % 3];
        *values = (0..n * k).map(|i| float(i) * factor(i / k / 16 * tiles[1] + i % k / 16)).collect();
        packed.insert(name, (Dtype::F8_E4M3, vec![n, k], (0..n * k).map(code).collect()));
        let factors = (0..tiles[0] * tiles[1]).flat_map(|i| factor(i).to_le_bytes()).collect();
        packed.insert(format!("{module}.weight_scale_inv"), (Dtype::F32, tiles.to_vec(), factors));
        let activations = 0.5f32.to_le_bytes().to_vec();
        packed.insert(format!("{module}.activation_scale"), (Dtype::F32, Vec::new(), activations));
    }
    let mut quantized = plain.clone();
    quantized.config["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": [16, 16]});
    let place = write(&quantized, &packed);
    let tables = Options { embed: Some(Width::Float), lm_head: Some(Width::Float), ..f32_options() };
    let report = place.convert(&tables).unwrap();
    let fates: Vec<_> = report.fates.iter().filter(|f| f.origin.from == "FP8").collect();
    assert!(!fates.is_empty() && fates.iter().all(|f| f.deviation.error == 0.0), "{:?}", report.fates);
    assert!(fates.iter().all(|f| matches!(f.origin.form, Form::Float(FloatType::F32))));
    let reference = plain.write();
    reference.convert(&Options::float(FloatType::F32)).unwrap();
    let data = |p: &Place| fs::read(p.package().join("model.onnx.data")).unwrap();
    assert!(data(&place) == data(&reference), "the same weights");
}

#[test]
fn parts_that_do_not_fit_are_named() {
    let config = || json!({"quant_method": "gptq", "bits": 4, "group_size": GROUP});
    let change = |change: &dyn Fn(&mut Tensors, &str)| {
        let pack = |t: &mut Tensors, module: &str, n: usize, k: usize| {
            gptq(t, module, n, k);
            if module.ends_with("mlp.up_proj") {
                change(t, module);
            }
        };
        checkpoints(config(), pack).1.refusal(&f32_options())
    };
    for (e, words) in [
        (change(&|t, m| drop(t.remove(&format!("{m}.scales")))), ["up_proj.scales", "not in the checkpoint"]),
        (
            change(&|t, m| t.get_mut(&format!("{m}.qzeros")).unwrap().1 = vec![3, 4]),
            ["up_proj.qzeros", "expected shape"],
        ),
        (
            change(&|t, m| t.get_mut(&format!("{m}.qweight")).unwrap().0 = Dtype::F32),
            ["up_proj.qweight", "I32"],
        ),
        (
            change(&|t, m| t.get_mut(&format!("{m}.g_idx")).unwrap().2.reverse()),
            ["up_proj.g_idx", "desc_act"],
        ),
        (
            change(&|t, m| t.get_mut(&format!("{m}.bias")).unwrap().2[3] = 0x3f),
            ["up_proj.bias", "does not use"],
        ),
    ] {
        for word in words {
            assert!(e.contains(word), "no {word:?} in {e}");
        }
    }
}

/// Experts in one tensor, gate and up at 4 bits with zero points, down at 8 without, as overrides of Olive make them.
#[test]
fn mixed_widths_of_fused_experts_are_kept() {
    const EXPERTS: usize = 4;
    let (up, down) = ((4, GROUP, false), (8, GROUP, true));
    let mut plain = Checkpoint::qwen3_moe();
    let experts = "model.layers.1.mlp.experts";
    for e in 0..EXPERTS {
        let mut set = |name: &str, values: Vec<f32>| {
            plain.tensors.get_mut(&format!("{experts}.{e}.{name}.weight")).unwrap().1 = values;
        };
        set("gate_proj", olive_values((32, 32), e * 64, up));
        set("up_proj", olive_values((32, 32), e * 64 + 32, up));
        set("down_proj", olive_values((32, 32), e * 32, down));
    }
    let mut packed = raw(&plain);
    packed.retain(|name, _| !name.starts_with(experts));
    olive_parts(&mut packed, &format!("{experts}.gate_up_proj"), (Some(EXPERTS), 64, 32), up);
    olive_parts(&mut packed, &format!("{experts}.down_proj"), (Some(EXPERTS), 32, 32), down);
    let mut quantized = plain.clone();
    // The override is a pattern here, which says nothing to those who look names up.
    quantized.config["quantization_config"] = json!({
        "quant_method": "olive", "bits": 4, "symmetric": false, "group_size": GROUP,
        "overrides": {"re:.*down_proj": {"bits": 8, "symmetric": true}},
    });
    let float = Options::float(FloatType::F32);
    let kept: Vec<Setting> =
        float.settings.iter().copied().filter(|s| !matches!(s, Setting::Experts(_))).collect();
    let options = Options { settings: kept, ..float.clone() };
    let place = write(&quantized, &packed);
    let report = place.convert(&options).unwrap();
    for (part, bits) in [(Part::ExpertsFc1, Bits::B4), (Part::ExpertsFc2, Bits::B8)] {
        let fate = report.fates.iter().find(|f| f.origin.part == part).unwrap();
        assert_eq!((fate.origin.from.as_str(), fate.deviation.error), ("Olive", 0.0), "{fate}");
        assert!(
            matches!(fate.origin.form, Form::Codes { carried: true, bits: b, block: GROUP, .. } if b == bits),
            "{fate}"
        );
    }
    let reference = plain.write();
    reference.convert(&float).unwrap();
    let (found, expected) = (logits(&open(&place.package())), logits(&open(&reference.package())));
    let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(worst <= 1e-5, "{worst}");

    // Parts that do not fit are refused by name.
    let change = |change: &dyn Fn(&mut Tensors)| {
        let mut broken = packed.clone();
        change(&mut broken);
        write(&quantized, &broken).convert(&options).unwrap_err().to_string()
    };
    let e = change(&|t| drop(t.remove(&format!("{experts}.gate_up_proj_scales"))));
    assert!(e.contains("gate_up_proj_scales") && e.contains("not in the checkpoint"), "{e}");
    let e = change(&|t| {
        let part = t.get_mut(&format!("{experts}.down_proj_qweight")).unwrap();
        *part = (Dtype::U8, vec![EXPERTS, 32, 24], vec![0; EXPERTS * 32 * 24]);
    });
    assert!(e.contains("down_proj_qweight") && e.contains("groups of 16"), "{e}");
    let e = change(&|t| {
        let part = t.get_mut(&format!("{experts}.gate_up_proj_qzeros")).unwrap();
        *part = (Dtype::U8, vec![EXPERTS, 64, 3], vec![0; EXPERTS * 64 * 3]);
    });
    assert!(e.contains("gate_up_proj_qzeros") && e.contains("expected 1 bytes"), "{e}");
    let e = {
        let mut stated = quantized.clone();
        stated.config["quantization_config"]["overrides"] =
            json!({format!("{experts}.down_proj"): {"bits": 8, "symmetric": false}});
        write(&stated, &packed).convert(&options).unwrap_err().to_string()
    };
    assert!(e.contains("experts.down_proj_qzeros") && e.contains("symmetric: false"), "{e}");
    let e = change(&|t| drop(t.insert("model.norm.qweight".into(), (Dtype::U8, vec![1], vec![0]))));
    assert!(e.contains("model.norm.qweight") && e.contains("early releases"), "{e}");
}
