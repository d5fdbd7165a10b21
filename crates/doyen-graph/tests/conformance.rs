//! The operator conformance set on the reference interpreter: every case passes or stands in the exceptions file.

mod common;

use doyen_graph::testkit::{Case, Exceptions, Reference, run};
use std::path::Path;

#[test]
fn every_case_passes_or_is_a_visible_exception() {
    let cases = Case::find(&common::shared("conformance").join("cases")).unwrap();
    assert!(cases.len() >= 400, "only {} cases", cases.len());
    let exceptions = Exceptions::read(Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../conformance-exceptions.json"
    )))
    .unwrap();
    let report = run(&cases, &Reference, &exceptions);
    println!("{report}");
    assert_eq!(report.counts().failed, 0, "\n{report}");
}
