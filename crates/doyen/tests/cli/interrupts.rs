//! `doyen convert` ended by signals, at any time: nothing half done is left, and a package that was there stays.

use super::common::{Place, Run, command, doyen, replace_text};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    thread::sleep,
    time::Duration,
};

/// A conversion that takes a while: the embedding and the head are a hole in a file.
fn endless() -> Place {
    let place = Place::checkpoint();
    let rows = 1 << 21;
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(place.path.join("config.json")).unwrap()).unwrap();
    let hidden = config["hidden_size"].as_u64().unwrap();
    let vocab = format!("\"vocab_size\": {}", config["vocab_size"]);
    place.edit("config.json", |b| replace_text(b, &vocab, &format!("\"vocab_size\": {rows}")));
    let path = place.path.join("model.safetensors");
    let old = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(*old.first_chunk().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&old[8..8 + length]).unwrap();
    let tensors = header.as_object_mut().unwrap();
    let mut end = (old.len() - 8 - length) as u64;
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let Some(tensor) = tensors.get(name).cloned() else { continue };
        // The old bytes stay, under a name that nobody reads.
        tensors.insert(format!("unused.{name}"), tensor);
        let bytes = rows * hidden * 2;
        let new =
            serde_json::json!({"dtype": "BF16", "shape": [rows, hidden], "data_offsets": [end, end + bytes]});
        tensors.insert(name.into(), new);
        end += bytes;
    }
    let text = header.to_string();
    let mut file = File::create(&path).unwrap();
    file.write_all(&(text.len() as u64).to_le_bytes()).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.write_all(&old[8 + length..]).unwrap();
    file.set_len(8 + text.len() as u64 + end).unwrap();
    place
}

/// The same of a GGUF file: a model of one layer, whose feed-forward is a hole.
fn endless_gguf(path: &Path) {
    const WIDTH: u64 = 32;
    const HIDDEN: u64 = 1 << 23;
    fn text(out: &mut Vec<u8>, s: &str) {
        out.extend((s.len() as u64).to_le_bytes());
        out.extend(s.as_bytes());
    }
    let mut pairs = Vec::new();
    let mut count = 0u64;
    let mut pair = |key: &str, kind: u32, value: &[u8]| {
        text(&mut pairs, key);
        pairs.extend(kind.to_le_bytes());
        pairs.extend(value);
        count += 1;
    };
    let string = |s: &str| {
        let mut out = Vec::new();
        text(&mut out, s);
        out
    };
    let list = |kind: u32, len: u64, items: Vec<u8>| {
        [&kind.to_le_bytes()[..], &len.to_le_bytes()[..], &items[..]].concat()
    };
    let tokens: Vec<u8> = (0..WIDTH as u32).flat_map(|i| string(&format!("t{i}"))).collect();
    pair("general.architecture", 8, &string("llama"));
    for (key, n) in [
        ("embedding_length", WIDTH as u32),
        ("block_count", 1),
        ("feed_forward_length", HIDDEN as u32),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 2),
        ("context_length", 64),
    ] {
        pair(&format!("llama.{key}"), 4, &n.to_le_bytes());
    }
    pair("llama.attention.layer_norm_rms_epsilon", 6, &1e-5f32.to_le_bytes());
    pair("tokenizer.ggml.model", 8, &string("gpt2"));
    pair("tokenizer.ggml.pre", 8, &string("gpt-2"));
    pair("tokenizer.ggml.tokens", 9, &list(8, WIDTH, tokens));
    pair("tokenizer.ggml.token_type", 9, &list(5, WIDTH, [1u32.to_le_bytes(); WIDTH as usize].concat()));
    pair("tokenizer.ggml.merges", 9, &list(8, 0, Vec::new()));
    pair("tokenizer.ggml.bos_token_id", 4, &0u32.to_le_bytes());
    pair("tokenizer.ggml.eos_token_id", 4, &1u32.to_le_bytes());

    let (mut tensors, mut offset, mut number) = (Vec::new(), 0u64, 0u64);
    let mut tensor = |name: &str, dims: &[u64]| {
        text(&mut tensors, name);
        tensors.extend((dims.len() as u32).to_le_bytes());
        tensors.extend(dims.iter().flat_map(|d| d.to_le_bytes()));
        tensors.extend(0u32.to_le_bytes());
        tensors.extend(offset.to_le_bytes());
        offset += dims.iter().product::<u64>() * 4;
        number += 1;
    };
    for name in ["token_embd", "blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v", "blk.0.attn_output"] {
        tensor(&format!("{name}.weight"), &[WIDTH, WIDTH]);
    }
    for name in ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"] {
        tensor(&format!("{name}.weight"), &[WIDTH]);
    }
    tensor("blk.0.ffn_gate.weight", &[WIDTH, HIDDEN]);
    tensor("blk.0.ffn_up.weight", &[WIDTH, HIDDEN]);
    tensor("blk.0.ffn_down.weight", &[HIDDEN, WIDTH]);

    let head = [b"GGUF" as &[u8], &3u32.to_le_bytes(), &number.to_le_bytes(), &count.to_le_bytes()].concat();
    let bytes = [head, pairs, tensors].concat();
    let mut file = File::create(path).unwrap();
    file.write_all(&bytes).unwrap();
    file.set_len(bytes.len().next_multiple_of(32) as u64 + offset).unwrap();
}

fn start(source: &str, place: &Place, more: &[&str]) -> Child {
    let out = place.beside("out");
    let args = ["convert", source, "-o", out.to_str().unwrap()];
    let mut command = command(args.iter().chain(more));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for the folder that a conversion writes to. It appears when all is checked and the writing begins.
fn wait_for_writing(place: &Place) {
    for _ in 0..6000 {
        if place.listing().iter().any(|n| n.starts_with(".out.part-")) {
            return;
        }
        sleep(Duration::from_millis(10));
    }
    panic!("no conversion writes here: {:?}", place.listing());
}

fn send(signal: Signal, to: &Child) {
    kill(Pid::from_raw(to.id().try_into().unwrap()), signal).unwrap();
}

/// Ends a conversion while it writes.
#[track_caller]
fn interrupted(source: &str, place: &Place, more: &[&str], signal: Signal) {
    let child = start(source, place, more);
    wait_for_writing(place);
    send(signal, &child);
    let run: Run = child.wait_with_output().unwrap().into();
    run.refused(&["interrupted", "nothing was kept"]);
}

fn contents(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    files.into_iter().map(|p| (p.clone(), fs::read(p).unwrap())).collect()
}

#[test]
fn a_signal_leaves_nothing_behind() {
    let place = endless();
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        interrupted(place.arg(), &place, &[], signal);
        assert_eq!(place.listing(), ["checkpoint"]);
    }
}

#[test]
fn nor_while_a_gguf_file_is_read() {
    let place = Place::checkpoint();
    let file = place.beside("model.gguf");
    endless_gguf(&file);
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        interrupted(file.to_str().unwrap(), &place, &[], signal);
        assert_eq!(place.listing(), ["checkpoint", "model.gguf"]);
    }
}

#[test]
fn a_package_that_is_to_be_replaced_stays() {
    let place = endless();
    let (sound, out) = (Place::checkpoint(), place.beside("out"));
    doyen(["convert", sound.arg(), "-o", out.to_str().unwrap()]).ok();
    let before = contents(&out);
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        interrupted(place.arg(), &place, &["--force"], signal);
        assert_eq!(place.listing(), ["checkpoint", "out"]);
        assert_eq!(contents(&out), before);
    }
}

/// Signals from before the first byte is read until after the package has its name: it is there as a whole or not at all.
#[test]
fn whenever_it_comes() {
    let place = Place::checkpoint();
    let out = place.beside("out");
    let convert = |more: &[&str]| start(place.arg(), &place, more);
    let begun = std::time::Instant::now();
    assert!(convert(&[]).wait_with_output().unwrap().status.success());
    let (whole, takes) = (contents(&out), begun.elapsed());
    let (mut ended, mut finished) = (0, 0);
    for i in 0..24 {
        let replacing = i % 2 == 1;
        if !replacing {
            fs::remove_dir_all(&out).unwrap();
        }
        let child = convert(&["--force"]);
        sleep(takes * i / 20);
        let _ = kill(Pid::from_raw(child.id().try_into().unwrap()), Signal::SIGTERM);
        if child.wait_with_output().unwrap().status.success() {
            finished += 1;
        } else {
            ended += 1;
        }
        if replacing || out.exists() {
            assert_eq!(contents(&out), whole);
            assert_eq!(place.listing(), ["checkpoint", "out"]);
        } else {
            assert_eq!(place.listing(), ["checkpoint"]);
            assert!(convert(&[]).wait_with_output().unwrap().status.success());
        }
    }
    assert!(ended > 0, "{ended} ended, {finished} finished");
}

/// The first signal is heard between two batches of rows, mostly before the second can come: some of the attempts are to
/// end by the second, with the exit code that shells give to the signal.
#[test]
fn the_second_signal_ends_it_at_once() {
    let place = endless();
    for _ in 0..50 {
        let child = start(place.arg(), &place, &[]);
        wait_for_writing(&place);
        send(Signal::SIGTERM, &child);
        // The first has been delivered when this has.
        sleep(Duration::from_millis(1));
        send(Signal::SIGINT, &child);
        let code = child.wait_with_output().unwrap().status.code();
        for left in place.listing().iter().filter(|n| n.starts_with(".out.part-")) {
            fs::remove_dir_all(place.beside(left)).unwrap();
        }
        assert_eq!(place.listing(), ["checkpoint"]);
        match code {
            Some(130) => return,
            code => assert_eq!(code, Some(2)),
        }
    }
    panic!("no second signal ended a conversion");
}
