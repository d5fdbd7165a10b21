//! Text to tokens and back, with the built-in model's tokenizer.
//!
//! `cargo bench -p doyen-text`

use criterion::{Criterion, Throughput};
use doyen_text::{Detokenizer, Specials, Tokenizer};
use std::{hint::black_box, time::Duration};

const TOKENIZER: &[u8] = include_bytes!("../../doyen/builtin/tokenizer.json");

const PARAGRAPH: &str = "The list() method returns a new list; `sorted(values, key=len)` sorts it by length. \
                         Zürich, naïve, 東京 and 🦀 take several bytes.\n\n    for i in range(10):\n        print(i)\n";

fn main() {
    let mut c = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
        .configure_from_args();
    let tokenizer = Tokenizer::from_bytes(TOKENIZER, None).expect("the built-in tokenizer");
    let text = PARAGRAPH.repeat(16);
    let ids = tokenizer.encode(&text).expect("text can be tokenized");
    let mut group = c.benchmark_group("tokenizer");
    group.throughput(Throughput::Bytes(text.len() as u64));
    group.bench_function("encode", |b| b.iter(|| tokenizer.encode(black_box(&text)).expect("as before")));
    group.bench_function("decode", |b| {
        b.iter(|| tokenizer.decode(black_box(&ids), Specials::Skip).expect("as before"));
    });
    group.bench_function("decode token by token", |b| {
        b.iter(|| {
            let mut text = Detokenizer::new(&tokenizer);
            let bytes: usize = ids.iter().map(|&id| text.push(id).len()).sum();
            bytes + text.finish().len()
        });
    });
    group.bench_function("load", |b| {
        b.iter(|| Tokenizer::from_bytes(black_box(TOKENIZER), None).expect("as before"));
    });
    group.finish();
    c.final_summary();
}
