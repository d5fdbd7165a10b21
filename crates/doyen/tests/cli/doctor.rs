//! `doctor`, `DOYEN_CPU`, and what is said of threads.

use super::common::{Run, command, doyen};
use serde_json::Value;

fn with_isa(isa: &str, args: &[&str]) -> Run {
    command(args).env("DOYEN_CPU", isa).output().unwrap().into()
}

#[test]
fn doctor_measures_and_explains() {
    let report: Value = serde_json::from_str(doyen(["doctor", "--json"]).ok()).unwrap();
    let bandwidth = report["bandwidth"].as_array().unwrap();
    assert_eq!(bandwidth[0]["threads"], 1);
    assert_eq!(bandwidth.last().unwrap()["threads"], report["machine"]["cores_allowed"]);
    assert!(bandwidth.iter().all(|b| b["gb_s"]["median"].as_f64() > Some(0.0)), "{report}");
    assert!(report["kernels"].as_object().unwrap().len() >= 6);
    assert!(report["notes"].as_array().unwrap().len() >= 2);
    assert_eq!(report["isa"], report["isa_best"]);
    let text = doyen(["doctor"]);
    for line in [
        "cpu ",
        "features ",
        "cores ",
        "memory ",
        "kernels ",
        "huge pages ",
        "page cache ",
        "read loop ",
        "- decode",
    ] {
        assert!(text.ok().lines().any(|l| l.starts_with(line)), "{line}: {text:?}");
    }
}

#[test]
fn an_instruction_set_is_forced_and_said() {
    let report: Value = serde_json::from_str(with_isa("scalar", &["doctor", "--json"]).ok()).unwrap();
    assert_eq!(report["isa"], "scalar");
    let kernels = report["kernels"].as_object().unwrap();
    assert!(kernels.values().all(|k| k.as_str().unwrap().starts_with("scalar")), "{kernels:?}");

    let run = with_isa("scalar", &["run", "-p", "To", "-n", "2", "--temperature", "0", "--verbose"]);
    run.ok();
    run.says(&["note: scalar kernels run", "scalar"]);
    for isa in ["avx9", "AVX2 ", "../x"] {
        for args in [&["run", "-p", "x", "-n", "1"][..], &["bench"], &["doctor"], &["show"]] {
            let run = with_isa(isa, args);
            if args == ["show"] {
                // A package is shown whether it can run here or not.
                assert!(run.ok().contains("cannot run"), "{run:?}");
            } else {
                let known = "known are scalar, avx2, avxvnni, avx512, amx, neon";
                run.refused(&["DOYEN_CPU", isa, known, "this machine has scalar"]);
            }
        }
    }
    let other = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
    with_isa(other, &["doctor"]).refused(&[other, "this machine does not have it; it has scalar"]);
    with_isa("", &["run", "-p", "To", "-n", "1"]).ok();
}

#[test]
fn more_threads_than_cpus_are_warned_of() {
    let machine: Value = serde_json::from_str(doyen(["doctor", "--json"]).ok()).unwrap();
    let allowed = machine["machine"]["cores_allowed"].as_u64().unwrap();
    let run = |threads: u64| doyen(["run", "-p", "To", "-n", "1", "--threads", &threads.to_string()]);
    let more = run(allowed + 1);
    more.ok();
    more.says(&["warning: --threads", &allowed.to_string()]);
    assert!(!run(1).stderr.contains("warning"));
}
