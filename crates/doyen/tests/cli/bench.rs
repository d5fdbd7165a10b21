//! `bench`: shapes of reports and refusals. What is measured is nobody's business here.

use super::common::{Place, Run, command, doyen};
use serde_json::Value;

fn json(args: &[&str]) -> Value {
    serde_json::from_str(doyen(args).ok()).unwrap()
}

#[track_caller]
fn is_spread(v: &Value, samples: u64) {
    let number = |key: &str| v[key].as_f64().unwrap_or_else(|| panic!("{key} in {v}"));
    assert_eq!(v["samples"], samples, "{v}");
    assert!(number("min") > 0.0, "{v}");
    for pair in ["min", "p25", "median", "p75", "max"].windows(2) {
        assert!(number(pair[0]) <= number(pair[1]), "{v}");
    }
}

#[test]
fn a_model_is_measured_beside_the_read_loop() {
    let args =
        ["bench", "--prompt", "9", "--gen", "3", "--batch", "2", "--repetitions", "2", "--threads", "1"];
    let report = json(&[&args[..], &["--json"]].concat());
    assert_eq!(report["kv_dtype"], "f16");
    let exact = json(&[&args[..], &["--json", "--numerics", "exact"]].concat());
    assert_eq!(exact["kv_dtype"], "f32");
    let kv_bytes = |report: &Value| report["memory"]["kv_bytes"].as_u64().unwrap();
    assert_eq!(kv_bytes(&exact), 2 * kv_bytes(&report));
    for key in ["first_token_ms", "prefill_tok_s", "decode_tok_s", "read_gb_s", "share_of_read"] {
        is_spread(&report[key], 2);
    }
    assert_eq!((&report["prompt"], &report["gen"], &report["batch"]), (&9.into(), &3.into(), &2.into()));
    assert!(report["load_ms"].as_f64() < report["load_to_first_token_ms"].as_f64(), "{report}");
    let bytes = &report["bytes_per_token"];
    let part = |k: &str| bytes[k].as_f64().unwrap();
    assert!((part("dense") + part("experts") + part("kv") - part("total")).abs() < 1e-3, "{bytes}");
    assert!(["dense", "experts", "kv"].into_iter().all(|k| part(k) > 0.0), "{bytes}");
    let memory = &report["memory"];
    let weights = memory["weights_bytes"].as_f64().unwrap();
    assert!(part("total") < weights, "a token does not move all experts: {report}");
    assert_eq!(
        memory["budget_bytes"].as_u64().unwrap(),
        memory["weights_bytes"].as_u64().unwrap() + memory["kv_bytes"].as_u64().unwrap() + (64 << 20)
    );
    assert!(report["kernels"].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum::<u64>() > 20);
    assert!(report["machine"]["cores_allowed"].as_u64() >= Some(1));
    let text = doyen(args);
    for line in ["prefill ", "decode ", "bytes a token ", "share of it ", "peak memory ", "kernels", "cpu  "]
    {
        assert!(text.ok().lines().any(|l| l.starts_with(line)), "{line}: {text:?}");
    }
}

#[test]
fn what_a_model_cannot_do_is_refused() {
    doyen(["bench", "--prompt", "1000", "--gen", "100"]).refused(&["1101", "1024", "--prompt", "--gen"]);
    doyen(["bench", "--batch", "99999999999999"]).refused(&["1024", "--batch"]);
    doyen(["bench", "--prompt", "18446744073709551615", "--gen", "2"]).refused(&["too large"]);
    doyen(["bench", "--prompt", "0"]).refused(&["--prompt", "expected a whole number of 1 or more"]);
    doyen(["bench", "--compute-dtype", "f16"]).refused(&["--compute-dtype", "--device cuda", "f32"]);
    doyen(["bench", "--gen", "0"]).refused(&["--gen"]);
    doyen(["bench", "--repetitions", "0"]).refused(&["--repetitions"]);
    doyen(["bench", "/nowhere"]).refused(&["/nowhere"]);
    doyen(["bench", "/nowhere", "--op", "gqa"]).refused(&["PACKAGE", "--op"]);
    doyen(["bench", "--op", "gqa", "--gen", "3"]).refused(&["--gen", "--op"]);
}

#[test]
fn packages_of_others_without_a_tokenizer_are_measured() {
    let place = Place::package();
    std::fs::remove_file(place.path.join("tokenizer.json")).unwrap();
    let report = json(&["bench", place.arg(), "--prompt", "4", "--gen", "2", "--repetitions", "1", "--json"]);
    is_spread(&report["decode_tok_s"], 1);
    assert_eq!(report["bytes_per_token"]["experts"], 0.0);
}

const SMALL: [&str; 10] =
    ["--experts", "6", "--top-k", "2", "--hidden", "64", "--inter", "32", "--repetitions", "2"];

#[test]
fn operators_are_measured_in_every_combination() {
    let qmoe = json(
        &[
            &["bench", "--op", "qmoe"][..],
            &SMALL,
            &["--bits", "4,2/8", "--block", "16,row", "--tokens", "1,5", "--json"],
        ]
        .concat(),
    );
    assert_eq!(qmoe["op"], "qmoe");
    is_spread(&qmoe["read_gb_s"], 16);
    let cases = qmoe["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 8, "{qmoe}");
    for c in cases {
        for key in ["ms", "gb_s", "share_of_read"] {
            is_spread(&c[key], 2);
        }
        assert!(c["gmac_s"].as_f64() > Some(0.0));
    }
    let case = |m: u64, fc1: u64, fc2: u64, block: Value| {
        cases.iter().any(|c| {
            (&c["m"], &c["fc1"], &c["fc2"], &c["block"]) == (&m.into(), &fc1.into(), &fc2.into(), &block)
        })
    };
    assert!(case(1, 4, 4, 16.into()) && case(5, 2, 8, "row".into()), "{qmoe}");

    let matmul = doyen(
        "bench --op matmulnbits --n 48 --k 64 --bits 2,8 --scales bf16 --zero-points --tokens 1 --repetitions 2".split(' '),
    );
    assert!(matmul.ok().contains("scales=bfloat16") && matmul.stdout.contains("of read"), "{matmul:?}");
    let gqa = json(
        &"bench --op gqa --heads 4 --kv-heads 2 --head-size 8 --context 40,64 --kv f32,f16,bf16,int8,int4 --tokens 1,7 \
          --repetitions 1 --numerics exact --json"
            .split_whitespace()
            .collect::<Vec<_>>(),
    );
    assert_eq!(gqa["cases"].as_array().unwrap().len(), 20);
}

#[test]
fn operators_refuse_what_makes_no_sense() {
    let op = |args: &str| doyen(format!("bench --op {args}").split(' '));
    op("nope").refused(&["nope", "qmoe", "matmulnbits", "gqa"]);
    op("matmulnbits --experts 4").refused(&["--experts belongs to --op qmoe"]);
    op("qmoe --heads 4").refused(&["--heads belongs to --op gqa"]);
    op("matmulnbits --bits 2/4").refused(&["2/4", "one width"]);
    op("qmoe --bits 3").refused(&["3", "2, 4 or 8"]);
    for block in ["0", "1", "8", "24", "48", "999", "-32", "rows"] {
        op(&format!("qmoe --block {block}")).refused(&[block, "16, 32, 64, 128, 256", "row"]);
        op(&format!("matmulnbits --block 32,{block}")).refused(&[block, "16, 32, 64, 128, 256", "row"]);
    }
    op("qmoe --top-k 65").refused(&["65 experts per token out of 64"]);
    op("gqa --kv-dtype f16").refused(&["--kv-dtype", "--kv"]);
    op("gqa --heads 3 --kv-heads 2").refused(&["3 query heads over 2"]);
    op("gqa --kv int4 --head-size 7").refused(&["even head size"]);
    op("gqa --context 4 --tokens 5").refused(&["5 new tokens", "context of 4"]);
    doyen(["bench", "--experts", "3"]).refused(&["--op"]);
    for zero in [
        "matmulnbits --n 0",
        "matmulnbits --k 0",
        "matmulnbits --tokens 0",
        "qmoe --experts 0",
        "qmoe --top-k 0",
        "qmoe --hidden 0",
        "qmoe --inter 0",
        "gqa --heads 0",
        "gqa --kv-heads 0",
        "gqa --head-size 0",
        "gqa --context 0",
    ] {
        op(zero).refused(&["must be at least 1"]);
    }
}

#[test]
fn operators_refuse_more_memory_than_there_is() {
    let huge = "18446744073709551615";
    for args in [
        "matmulnbits --n 9999999 --k 9999999".to_owned(),
        "matmulnbits --tokens 999999999999".to_owned(),
        format!("matmulnbits --n {huge}"),
        format!("matmulnbits --n {huge} --bits 2,4,8 --repetitions {huge}"),
        format!("matmulnbits --k {huge} --block row"),
        format!("matmulnbits --tokens {huge}"),
        "qmoe --experts 4000000".to_owned(),
        format!("qmoe --hidden {huge}"),
        format!("qmoe --inter {huge}"),
        format!("qmoe --tokens {huge}"),
        "gqa --context 999999999999".to_owned(),
        format!("gqa --context {huge}"),
        format!("gqa --heads {huge} --kv-heads 1"),
        format!("gqa --head-size {huge}"),
    ] {
        let run: Run = command(format!("bench --op {args}").split(' ')).output().unwrap().into();
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{args}: {run:?}");
        let said = ["available: give smaller", "address space", "more than"];
        assert!(said.iter().any(|w| run.stderr.contains(w)), "{args}: {run:?}");
        assert!(!run.stderr.contains("panicked") && !run.stderr.contains("overflow"), "{args}: {run:?}");
    }
}
