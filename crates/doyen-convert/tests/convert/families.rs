//! Families of tiny random checkpoints that `scripts/make-goldens.py` made, against what `transformers` computes.

use crate::{common::Place, goldens::check_recorded};
use doyen_convert::Options;
use doyen_tensor::FloatType;
use std::{fs, path::PathBuf};

fn data(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/families")).join(name)
}

/// Greedy tokens beyond the first few take the slow interpreter through as many prompts again.
const GREEDY: usize = 4;

fn family(name: &str) {
    let place = Place::new();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(data(name).join(file), place.checkpoint().join(file)).unwrap();
    }
    let tokenizer = r#"{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}"#;
    fs::write(place.checkpoint().join("tokenizer.json"), tokenizer).unwrap();
    let long_context = name.ends_with("_long_context");
    let (checkpoint, options) =
        (place.checkpoint(), Options { long_context, ..Options::float(FloatType::F32) });
    check_recorded(name, (&checkpoint, &options), &data(name).join("golden.safetensors"), 3, GREEDY);
}

macro_rules! families {
    ($($name:ident),* $(,)?) => {
        $(
            #[test]
            fn $name() {
                family(stringify!($name));
            }
        )*

        /// Every reference is judged.
        #[test]
        fn none_is_left_out() {
            let mut found: Vec<String> =
                fs::read_dir(data("")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            found.sort();
            let mut judged = vec![$(stringify!($name)),*];
            judged.sort_unstable();
            assert_eq!(found, judged);
        }
    };
}

families!(
    afmoe,
    arcee,
    cohere,
    cohere2,
    cwm,
    deepseek_v2_groups,
    deepseek_v3,
    dots1,
    ernie,
    ernie_moe,
    exaone4,
    exaone_moe,
    flex_olmo,
    gemma,
    gemma2,
    gemma3_in_wrapper,
    gemma3_linear,
    glm,
    glm4_moe_groups,
    glm4_moe_lite,
    granite,
    granite_hybrid,
    granite_hybrid_moe,
    granite_moe,
    granite_moe_shared,
    helium,
    hunyuan3,
    hunyuan_dense,
    hunyuan_moe,
    hyperclovax,
    jais2,
    lfm2,
    lfm2_moe,
    minimax_m2,
    ministral3,
    mistral,
    mistral_in_wrapper,
    mixtral,
    mixtral_fused,
    nemotron,
    olmo2,
    olmo3,
    olmoe,
    phi,
    phi3,
    phi3_long_context,
    phi3_longrope,
    phimoe,
    qwen2_5_vl,
    qwen2_moe,
    qwen3_5,
    qwen3_5_moe,
    qwen3_5_moe_in_wrapper,
    qwen3_vl,
    qwen3_vl_moe,
    seed_oss,
    smollm3,
    solar_open,
    stablelm,
    stablelm_parallel,
    starcoder2,
    vault_gemma,
    youtu,
);
