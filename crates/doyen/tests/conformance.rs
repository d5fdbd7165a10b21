//! The operator conformance set on the CPU backend, and how much of it is excepted.

use doyen::{conformance::DeviceRunner, model};
use doyen_graph::testkit::{Case, Exceptions, Verdict, run};
use std::path::{Path, PathBuf};

fn cases() -> Vec<Case> {
    let root = std::env::var_os("DOYEN_SHARED").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")),
        PathBuf::from,
    );
    let dir = root.join("conformance/cases");
    assert!(dir.is_dir(), "{} is missing: set DOYEN_SHARED to the folder of shared test data", dir.display());
    let cases = Case::find(&dir).unwrap();
    assert!(cases.len() >= 400, "only {} cases", cases.len());
    cases
}

fn exceptions() -> Exceptions {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../conformance-exceptions.json"));
    Exceptions::read(path).unwrap()
}

#[test]
fn every_case_passes_on_the_cpu_or_is_a_visible_exception() {
    let cases = cases();
    let report = run(&cases, &DeviceRunner::new(Box::new(model::cpu(None).unwrap())), &exceptions());
    assert_eq!(report.counts().failed, 0, "\n{report}");
    let passed = report.cases.iter().filter(|o| o.verdict == Verdict::Passed).count();
    assert_eq!(passed, report.counts().passed);
    assert!(passed * 10 > cases.len() * 8, "{}", report.counts());
}

#[test]
fn exceptions_are_few_but_for_operators_that_come_later() {
    let (cases, exceptions) = (cases(), exceptions());
    for backend in ["reference", "cpu"] {
        let (mut later, mut refused) = (0, Vec::new());
        for case in &cases {
            let Some(e) = exceptions.find(&case.name, backend) else { continue };
            if e.reason.contains("comes with") || e.reason.contains("come later") {
                later += 1;
            } else {
                refused.push(&case.name);
            }
        }
        let rest = cases.len() - later;
        assert!(refused.len() * 100 <= rest * 3, "{backend}: {} of {rest}: {refused:?}", refused.len());
    }
}
