//! The machine in words and in JSON.

use doyen_cpu::{detect::Isa, machine::Machine};
use doyen_tensor::ByteCount;
use serde_json::{Value, json};
use std::fmt::Write;

/// A few lines on the machine.
pub fn text(machine: &Machine) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "cpu             {}{}",
        machine.cpu,
        if machine.virtual_machine { " (virtual)" } else { "" }
    );
    let _ = writeln!(out, "features        {}", machine.features.join(" "));
    let _ = writeln!(out, "cores           {}", cores(machine));
    if !machine.caches.is_empty() {
        let one = |c: &doyen_cpu::machine::Cache| {
            format!("L{} {} x {}", c.level, c.instances, ByteCount((c.bytes / c.instances.max(1)) as u64))
        };
        let _ = writeln!(
            out,
            "caches          {}",
            machine.caches.iter().map(one).collect::<Vec<_>>().join(", ")
        );
    }
    let bytes = |b: Option<u64>| b.map_or_else(|| "?".to_owned(), |b| ByteCount(b).to_string());
    let _ = writeln!(
        out,
        "memory          {}, {} available, {} node{}",
        bytes(machine.memory.total),
        bytes(machine.memory.available),
        machine.numa_nodes,
        if machine.numa_nodes == 1 { "" } else { "s" }
    );
    let _ = write!(out, "kernel          {} {}", std::env::consts::OS, machine.kernel);
    out
}

/// How many CPUs may be used, and what limits them.
pub fn cores(machine: &Machine) -> String {
    let Machine { online, affinity, quota, .. } = machine;
    let mut out = format!("{} of {online}", machine.threads());
    if affinity < online {
        let _ = write!(out, ", affinity mask of {affinity}");
    }
    if let Some(q) = quota {
        let _ = write!(out, ", control group quota of {q:.1}");
    }
    out
}

/// The machine as JSON.
pub fn json(machine: &Machine) -> Value {
    let caches: Vec<_> = machine
        .caches
        .iter()
        .map(|c| json!({"level": c.level, "bytes": c.bytes, "instances": c.instances}))
        .collect();
    let m = &machine.memory;
    json!({
        "cpu": machine.cpu, "arch": std::env::consts::ARCH, "features": machine.features,
        "isa": Isa::all().map(Isa::name).collect::<Vec<_>>(), "virtual": machine.virtual_machine,
        "cores_online": machine.online, "cores_affinity": machine.affinity, "cores_quota": machine.quota,
        "cores_allowed": machine.threads(), "caches": caches, "numa_nodes": machine.numa_nodes,
        "os": std::env::consts::OS, "kernel": machine.kernel,
        "memory": {
            "total_bytes": m.total, "available_bytes": m.available, "page_cache_bytes": m.page_cache,
            "huge_pages": m.huge_pages, "huge_page_bytes": m.huge_page_size,
        },
    })
}
