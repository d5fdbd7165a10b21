//! GGUF files that are wrong somewhere: refused with file, place, expected and found, whatever the bytes.

use crate::common::{
    Checkpoint, Place,
    gguf::{Gguf, Meta, Tensor},
};
use bytes::Bytes;
use doyen_convert::{
    ConvertError, Options, Silent, Target, convert,
    gguf::{GgmlType, is_gguf, try_read},
};
use proptest::prelude::*;
use std::{fs, path::Path};

fn llama() -> Gguf {
    Gguf::of(&Checkpoint::llama(), "llama")
}

fn read(bytes: Vec<u8>) -> Result<(), ConvertError> {
    try_read(&Bytes::from(bytes), Path::new("model.gguf"))
}

#[track_caller]
fn refused(file: &Gguf, words: &[&str]) {
    let e = read(file.bytes()).expect_err("the file must be refused").to_string();
    for word in words.iter().chain(&["model.gguf"]) {
        assert!(e.contains(word), "{word:?} is missing: {e}");
    }
}

#[test]
fn sound_files_are_read() {
    read(llama().bytes()).unwrap();
    let mut moe = Gguf::of(&Checkpoint::qwen3_moe(), "qwen3moe");
    read(moe.bytes()).unwrap();
    moe.set("general.alignment", Meta::U32(32));
    read(moe.bytes()).unwrap();
}

#[test]
fn headers() {
    let sound = llama().bytes();
    let with = |at: usize, bytes: &[u8]| {
        let mut out = sound.clone();
        out[at..at + bytes.len()].copy_from_slice(bytes);
        read(out).unwrap_err().to_string()
    };
    for (at, bytes, words) in [
        (0, b"GGML".to_vec(), ["not a GGUF file", "GGML"]),
        (4, 1u32.to_le_bytes().to_vec(), ["version is 1", "expected 2 or 3"]),
        (4, 3u32.to_be_bytes().to_vec(), ["big-endian", "little-endian"]),
        (8, u64::MAX.to_le_bytes().to_vec(), ["number of tensors", "18446744073709551615"]),
        (16, (1u64 << 40).to_le_bytes().to_vec(), ["number of key-value pairs", "1099511627776"]),
        (24, u64::MAX.to_le_bytes().to_vec(), ["key 0", "18446744073709551615"]),
    ] {
        let e = with(at, &bytes);
        assert!(words.iter().all(|w| e.contains(w)) && e.contains("model.gguf"), "{e}");
    }
    for len in [0, 3, 20, 100, sound.len() / 2, sound.len() - 1] {
        let e = read(sound[..len].to_vec()).unwrap_err().to_string();
        assert!(e.contains("expected") && e.contains("model.gguf"), "{len}: {e}");
    }
}

#[test]
fn metadata() {
    for (key, value, words) in [
        ("general.architecture", Meta::Text("mamba".into()), ["\"mamba\"", "llama, qwen2"]),
        ("general.architecture", Meta::U32(1), ["general.architecture is 1", "a text"]),
        ("general.alignment", Meta::U32(0), ["general.alignment is 0", "power of two"]),
        ("general.alignment", Meta::U32(48), ["general.alignment is 48", "power of two"]),
        ("llama.block_count", Meta::U32(1 << 30), ["llama.block_count is 1073741824", "at most"]),
        ("llama.embedding_length", Meta::U32(0), ["llama.embedding_length is 0", "positive"]),
        ("llama.attention.head_count_kv", Meta::U32(3), ["llama.attention.head_count_kv is 3", "divisor"]),
        ("llama.attention.head_count", Meta::I32s(vec![2, 4]), ["different numbers", "all layers"]),
        ("llama.rope.dimension_count", Meta::U32(8), ["llama.rope.dimension_count is 8", "16"]),
        ("llama.rope.scaling.type", Meta::Text("longrope".into()), ["\"longrope\"", "\"linear\""]),
        ("llama.rope.freq_base", Meta::F32(f32::NAN), ["llama.rope.freq_base", "finite"]),
        ("llama.logit_scale", Meta::F32(2.0), ["llama.logit_scale is 2", "no recipe"]),
        ("tokenizer.ggml.model", Meta::Text("t5".into()), ["\"t5\"", "gpt2"]),
        ("tokenizer.ggml.pre", Meta::Text("novel".into()), ["\"novel\"", "qwen2"]),
        ("tokenizer.ggml.merges", Meta::Texts(vec!["\" #".into()]), ["\" #", "rank 0"]),
        ("tokenizer.ggml.eos_token_id", Meta::U32(64), ["tokenizer.ggml.eos_token_id is 64", "below 64"]),
        ("tokenizer.ggml.token_type", Meta::I32s(vec![1]), ["a list of 1 numbers", "64 tokens"]),
        ("tokenizer.ggml.tokens", Meta::Texts(vec!["a".into()]), ["tokenizer.ggml", "1"]),
        ("tokenizer.ggml.tokens", Meta::Texts(vec!["a".into(); 64]), ["\"a\" at 0 and again at 1", "once"]),
    ] {
        let mut file = llama();
        file.set(key, value);
        refused(&file, &words);
    }
    let mut twice = llama();
    twice.pairs.push(twice.pairs[0].clone());
    refused(&twice, &["general.architecture", "twice"]);
    let mut fewer = llama();
    fewer.set("tokenizer.ggml.token_type", Meta::I32s(vec![1; 63]));
    fewer.set("tokenizer.ggml.tokens", Meta::Texts((0..63u8).map(|i| char::from(33 + i).into()).collect()));
    refused(&fewer, &["a list of 63 texts", "64, the rows of the token embedding"]);
}

#[test]
fn directories() {
    let broken = |change: &dyn Fn(&mut Tensor)| {
        let mut file = llama();
        change(file.tensor("blk.0.attn_q.weight"));
        file
    };
    let name = "blk.0.attn_q.weight";
    refused(&broken(&|t| t.ty = 4), &[name, "number 4", "Q4_K"]);
    refused(&broken(&|t| t.shape = vec![0, 32]), &[name, "extents of 1 or more", "found 0"]);
    refused(&broken(&|t| t.shape = vec![1; 5]), &[name, "1 to 4 dimensions", "found 5"]);
    refused(&broken(&|t| t.shape = vec![1 << 33, 1 << 33]), &[name, "overflow"]);
    refused(&broken(&|t| t.shape = vec![1 << 40, 32]), &[name, "end of the file", "truncated"]);
    refused(&broken(&|t| t.ty = GgmlType::Q4K.number()), &[name, "multiple of 256", "found 32"]);
    refused(&broken(&|t| t.shape = vec![33, 32]), &["starts at byte", "inside of", name]);
    refused(&broken(&|t| t.shape = vec![8, 32]), &[name, "whole heads of 16"]);
    let mut twice = llama();
    twice.tensors.push(twice.tensors[0].clone());
    refused(&twice, &["output.weight", "once", "twice"]);
    let mut headless = llama();
    headless.tensors.retain(|t| t.name != "token_embd.weight");
    refused(&headless, &["token_embd.weight", "no such tensor"]);
}

/// What only the recipes can tell, with the names of the file.
#[test]
fn tensors_that_do_not_fit_the_model() {
    let refusal = |file: &Gguf| {
        let place = Place::new();
        let path = place.checkpoint().join("model.gguf");
        file.write(&path);
        let e = convert(&path, &Target::new(place.package()), &Options::default(), &mut Silent);
        let e = e.expect_err("the conversion must fail").to_string();
        assert_eq!(place.entries(), ["checkpoint"], "{e}");
        e
    };
    let mut missing = llama();
    missing.tensors.retain(|t| t.name != "blk.0.ffn_up.weight");
    let e = refusal(&missing);
    assert!(e.contains("\"blk.0.ffn_up.weight\"") && e.contains("not in the checkpoint"), "{e}");
    let mut other = llama();
    other.tensor("blk.0.ffn_up.weight").shape = vec![24, 64];
    let e = refusal(&other);
    assert!(e.contains("\"blk.0.ffn_up.weight\"") && e.contains("[48, 32]") && e.contains("[24, 64]"), "{e}");
    let mut unread = llama();
    unread.tensor("blk.0.ffn_up.weight").ty = 26;
    let e = refusal(&unread);
    assert!(e.contains("\"blk.0.ffn_up.weight\"") && e.contains("I32") && e.contains("Q8_0"), "{e}");
    let mut unused = llama();
    unused.add_f32("blk.0.attn_sinks.weight", &[2], &[0.0; 2]);
    let e = refusal(&unused);
    assert!(e.contains("does not use") && e.contains("attn_sinks"), "{e}");
    let mut infinite = llama();
    infinite.tensor("blk.0.ffn_up.weight").bytes[4 * 33..4 * 34]
        .copy_from_slice(&f32::INFINITY.to_le_bytes());
    let e = refusal(&infinite);
    assert!(e.contains("\"blk.0.ffn_up.weight\"") && e.contains("inf at [1,1]"), "{e}");
}

#[test]
fn sets_of_files() {
    let place = Place::new();
    let path = |i: usize| place.checkpoint().join(format!("m-0000{i}-of-00002.gguf"));
    let refusal = |path: &Path| {
        convert(path, &Target::new(place.package()), &Options::default(), &mut Silent)
            .unwrap_err()
            .to_string()
    };
    let mut first = llama();
    let mut second = Gguf { tensors: vec![first.tensors.pop().unwrap()], ..Gguf::default() };
    for (i, part) in [&mut first, &mut second].into_iter().enumerate() {
        part.set("split.no", Meta::U32(i as u32));
        part.set("split.count", Meta::U32(2));
    }
    first.write(&path(1));
    let e = refusal(&path(1));
    assert!(e.contains("m-00002-of-00002.gguf is missing"), "{e}");
    first.write(&path(2));
    let e = refusal(&path(1));
    assert!(e.contains("split.no is 0") && e.contains("m-00002"), "{e}");
    second.tensors.push(first.tensors[0].clone());
    second.write(&path(2));
    let e = refusal(&path(1));
    assert!(e.contains("once in all files"), "{e}");
    second.tensors.pop();
    second.write(&path(2));
    first.set("split.tensors.count", Meta::U32(99));
    first.write(&path(1));
    let e = refusal(&path(2));
    assert!(e.contains("split.tensors.count is 99"), "{e}");
    let renamed = place.checkpoint().join("model.gguf");
    fs::rename(path(1), &renamed).unwrap();
    let e = refusal(&renamed);
    assert!(e.contains("split.count is 2") && e.contains("-00001-of-00002.gguf"), "{e}");
}

#[test]
fn files_are_known_by_name_or_content() {
    let place = Place::new();
    let named = place.checkpoint().join("x.gguf");
    fs::write(&named, "nothing").unwrap();
    let unnamed = place.checkpoint().join("x.bin");
    llama().write(&unnamed);
    assert!(is_gguf(&named) && is_gguf(&unnamed));
    fs::write(&unnamed, "GG").unwrap();
    assert!(!is_gguf(&unnamed) && !is_gguf(&place.checkpoint()));
}

proptest! {
    /// A damaged file is an error or a file that can be read; nothing panics, nothing is allocated that the file does
    /// not hold.
    #[test]
    fn damaged_files_never_panic(
        edits in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..8),
        front in any::<bool>(),
        cut in any::<proptest::sample::Index>(),
        truncate in any::<bool>(),
        moe in any::<bool>(),
    ) {
        let file = if moe { Gguf::of(&Checkpoint::qwen3_moe(), "qwen3moe") } else { llama() };
        let mut bytes = file.bytes();
        let reach = if front { bytes.len().min(4096) } else { bytes.len() };
        for (at, value) in &edits {
            bytes[at.index(reach)] = *value;
        }
        if truncate {
            bytes.truncate(cut.index(bytes.len()));
        }
        let _ = read(bytes);
    }
}
