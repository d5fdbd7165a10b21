//! `doyen doctor --device cuda`: what computing on a card takes, what there is of it, how to get the rest, and how fast the card
//! is.

use super::Outcome;
use crate::{
    console,
    device::{cubins, packaged},
};
use anyhow::{Result, bail};
use doyen_cuda::{
    CudaError,
    compile::Packaged,
    survey::{self, Card, Driver, Found, Origin, Peak},
};
use serde_json::{Value, json};
use std::{fmt::Write, path::PathBuf};

/// What was found.
struct Report {
    ordinal: usize,
    driver: Result<Driver, CudaError>,
    nvrtc: Result<((i32, i32), Option<PathBuf>), CudaError>,
    /// What the program carries.
    packaged: Result<Option<Packaged>, CudaError>,
    peak: Option<Result<Peak, String>>,
}

/// Reports on a card.
///
/// # Errors
/// When it cannot be used, with everything that is missing.
pub(super) fn run(ordinal: usize, json: bool) -> Result<Outcome> {
    let bar = console::spinner("looking for cards");
    let report = Report::read(ordinal);
    bar.finish_and_clear();
    let text = if json { format!("{:#}\n", report.json()) } else { report.text() };
    console::print(&text)?;
    let missing = report.missing();
    if !missing.is_empty() {
        bail!("cannot compute on cuda:{ordinal}: {}", missing.join("; "));
    }
    Ok(Outcome::Done)
}

impl Report {
    fn read(ordinal: usize) -> Self {
        let driver = survey::driver();
        let mut report = Self { ordinal, nvrtc: survey::nvrtc(), packaged: packaged(), driver, peak: None };
        if report.missing().is_empty() {
            let kernels = report.packaged.as_ref().ok().cloned().flatten();
            let measured = survey::measure(ordinal, cubins(), kernels);
            report.peak = Some(measured.map_err(|e| e.to_string()));
        }
        report
    }

    fn card(&self) -> Option<&Card> {
        self.driver.as_ref().ok()?.cards.get(self.ordinal)
    }

    /// What the program carries for the card.
    fn found(&self) -> Option<Found> {
        Some(self.packaged.as_ref().ok()?.as_ref()?.found(self.card()?.arch))
    }

    /// What keeps the card from being used, with what would help.
    fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        match (&self.driver, self.card()) {
            (Err(e), _) => missing.push(e.to_string()),
            (Ok(d), None) => {
                missing.push(CudaError::NoDevice { ordinal: self.ordinal, found: d.cards.len() }.to_string());
            }
            (_, Some(card)) if card.arch.major < 8 => missing.push(
                CudaError::Capability {
                    name: card.name.clone(),
                    major: card.arch.major,
                    minor: card.arch.minor,
                }
                .to_string(),
            ),
            _ => {}
        }
        // Without a card nobody knows that the kernels inside are not enough.
        let carries = matches!(self.packaged, Ok(Some(_)));
        let enough = self.found().map_or(carries, |found| found.missing == 0);
        if let (Err(e), false) = (&self.nvrtc, enough) {
            missing.push(e.to_string());
        }
        if let Err(e) = &self.packaged {
            missing.push(e.to_string());
        }
        if let Some(Err(e)) = &self.peak {
            missing.push(e.clone());
        }
        missing
    }

    fn kernels(&self) -> String {
        let found = match (&self.packaged, self.found()) {
            (_, Some(found)) => found,
            (Ok(Some(_)), None) => return "of this program; a card decides which".into(),
            (Ok(None), None) => {
                let kept = cubins();
                let kept = kept.map_or_else(|| "kept nowhere".into(), |c| format!("kept in {}", c.display()));
                return format!("compiled by NVRTC when they are first needed, {kept}");
            }
            (Err(e), None) => return e.to_string(),
        };
        let all = [
            (found.cubins, "in machine code"),
            (found.ptx, "in PTX that the driver compiles"),
            (found.missing, "left to NVRTC"),
        ];
        let there = all.iter().filter(|(n, _)| *n > 0).map(|(n, form)| format!("{n} {form}"));
        format!("of this program: {}", there.collect::<Vec<_>>().join(", "))
    }

    fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let mut line = |name: &str, text: &str| {
            let _ = writeln!(out, "{name:<16}{text}");
        };
        match &self.driver {
            Err(e) => line("driver", &e.to_string()),
            Ok(d) => {
                line("driver", &format!("CUDA {}.{}", d.version.0, d.version.1));
                for (i, c) in d.cards.iter().enumerate() {
                    let (name, arch, memory, count) = (&c.name, c.arch, c.memory, c.multiprocessors);
                    line(&format!("cuda:{i}"), &format!("{name}, {arch}, {memory}, {count} multiprocessors"));
                }
            }
        }
        match &self.nvrtc {
            Err(e) => line("NVRTC", &e.to_string()),
            Ok(((major, minor), path)) => {
                let path = path.as_ref().map_or_else(String::new, |p| format!(", {}", p.display()));
                line("NVRTC", &format!("{major}.{minor}{path}"));
            }
        }
        line("kernels", &self.kernels());
        line("cuBLASLt", "not needed: all products have kernels of their own");
        if let Some(Ok(p)) = &self.peak {
            if let Some(origin) = p.origin {
                line("used", &format!("{} for the measurement below", from(origin)));
            }
            line("memory free", &p.free.to_string());
            line("copy", &format!("{:.0} GB/s, bytes read and written", p.copy / 1e9));
            line("bf16 products", &format!("{:.0} TFLOP/s through mma", p.products / 1e12));
        }
        let missing = self.missing();
        if missing.is_empty() {
            line("usable", &format!("yes: --device cuda:{}", self.ordinal));
        } else {
            line("usable", "no");
        }
        out
    }

    fn json(&self) -> Value {
        let driver = match &self.driver {
            Err(e) => json!({"error": e.to_string()}),
            Ok(d) => {
                let card = |c: &Card| {
                    json!({
                        "name": c.name, "arch": c.arch.to_string(), "memory_bytes": c.memory.0,
                        "multiprocessors": c.multiprocessors,
                    })
                };
                let cards: Vec<_> = d.cards.iter().map(card).collect();
                json!({"cuda": format!("{}.{}", d.version.0, d.version.1), "cards": cards})
            }
        };
        let nvrtc = match &self.nvrtc {
            Err(e) => json!({"error": e.to_string()}),
            Ok(((major, minor), path)) => json!({"version": format!("{major}.{minor}"), "path": path}),
        };
        let packaged = self.found().map(|found| {
            let Found { cubins, ptx, missing } = found;
            json!({"machine_code": cubins, "ptx": ptx, "missing": missing})
        });
        let peak = self.peak.as_ref().and_then(|p| p.as_ref().ok()).map(|p| {
            json!({
                "free_bytes": p.free.0, "copy_gb_s": p.copy / 1e9, "mma_tflop_s": p.products / 1e12,
                "kernel": p.origin.map(from),
            })
        });
        json!({
            "device": format!("cuda:{}", self.ordinal), "driver": driver, "nvrtc": nvrtc,
            "packaged_kernels": packaged, "measured": peak, "missing": self.missing(),
        })
    }
}

const fn from(origin: Origin) -> &'static str {
    match origin {
        Origin::MachineCode => "machine code of the release",
        Origin::Ptx => "PTX of the release, compiled by the driver",
        Origin::Nvrtc => "what NVRTC compiled",
    }
}
