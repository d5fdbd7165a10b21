//! `doyen doctor`: what this machine has, what is chosen for it, and what limits it.

#[cfg(feature = "cuda")]
mod card;

use super::Outcome;
use crate::{
    bench::{fingerprint, spread},
    console,
    device::DeviceName,
};
use anyhow::Result;
use doyen_cpu::{
    bench::{ReadLoop, Spread},
    detect::{Isa, VARIABLE},
    kernel::linear::{Format, Linear, Mode},
    machine::Machine,
    pool::Pool,
};
use doyen_tensor::{ByteCount, format::Bits};
use serde_json::{Value, json};
use std::{fmt::Write, num::NonZeroUsize};

/// Samples of the read loop for each number of threads.
const SAMPLES: usize = 12;

/// Say what this machine has and what limits it
///
/// CPU features and the instruction set and kernels chosen, the bandwidth of a plain read loop for 1 thread up to all that
/// may be used, caches, memory, huge pages, the limits of affinity and control groups; and in words what limits models here. For a
/// card: driver, compiler and kernels there are and how to get what is missing, free memory, the rates of copies and products.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  doyen doctor
  doyen doctor --json | jq .bandwidth
  doyen doctor --device cuda
  DOYEN_CPU=avx2 doyen doctor")]
pub struct Args {
    /// What to look at: cpu, cuda, or cuda:N for a certain card
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: DeviceName,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What was found.
struct Report {
    machine: Machine,
    isa: Isa,
    /// Threads and bytes a second.
    bandwidth: Vec<(usize, Spread)>,
    /// Processes that want to run, over the last minute.
    load: Option<f64>,
}

impl Args {
    pub(super) fn run(self) -> Result<Outcome> {
        if let DeviceName::Cuda(ordinal) = self.device {
            return card(ordinal, self.json);
        }
        let isa = Isa::chosen()?;
        let machine = Machine::read();
        let load = load();
        let bar = console::spinner("measuring the memory");
        let bandwidth = bandwidth(&machine)?;
        bar.finish_and_clear();
        let report = Report { machine, isa, bandwidth, load };
        let text = if self.json { format!("{:#}\n", report.json()) } else { report.text() };
        console::print(&text)?;
        Ok(Outcome::Done)
    }
}

#[cfg(feature = "cuda")]
fn card(ordinal: usize, json: bool) -> Result<Outcome> {
    card::run(ordinal, json)
}

#[cfg(not(feature = "cuda"))]
fn card(_: usize, _: bool) -> Result<Outcome> {
    anyhow::bail!("this build has no CUDA: build with --features cuda")
}

/// The read loop over more than the caches hold, with each number of threads.
fn bandwidth(machine: &Machine) -> Result<Vec<(usize, Spread)>> {
    let all = machine.threads();
    let spare = machine.memory.available.map_or(usize::MAX, |m| (m / 4) as usize);
    let bytes = machine.last_level_cache().saturating_mul(4).max(256 << 20).min(spare);
    let mut read = ReadLoop::new(bytes, all)?;
    let mut out = Vec::new();
    for n in counts(all) {
        let pool = Pool::new(NonZeroUsize::new(n).unwrap_or(NonZeroUsize::MIN), true)?;
        read.sample(&pool);
        let rates = (0..SAMPLES).map(|_| {
            let (bytes, seconds) = read.sample(&pool);
            bytes as f64 / seconds
        });
        out.push((n, Spread::of(rates.collect())));
    }
    Ok(out)
}

/// Numbers of threads to measure: every one up to 8, then in steps of half as many again, and all.
fn counts(all: usize) -> Vec<usize> {
    let mut counts = Vec::new();
    let mut n = 1;
    while n < all {
        counts.push(n);
        n = (n + 1).max(if n < 8 { 0 } else { n * 3 / 2 });
    }
    counts.push(all.max(1));
    counts
}

/// The load average of the last minute.
fn load() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

/// The kernel of each kind of product.
fn kernels(isa: Isa) -> Vec<(String, String)> {
    let mut out = Vec::new();
    for bits in Bits::ALL {
        for (mode, name) in [(Mode::Fast, "fast"), (Mode::Exact, "exact")] {
            let linear = Linear::new(Format::Int { bits, block: 32, cols: 2048 }, mode, isa);
            out.push((format!("int{} {name}", bits.get()), linear.kernel().to_string()));
        }
    }
    out
}

impl Report {
    fn best(&self) -> (usize, f64) {
        let rates = self.bandwidth.iter().map(|(n, s)| (*n, s.median));
        rates.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((1, f64::NAN))
    }

    fn text(&self) -> String {
        let mut out = fingerprint::text(&self.machine);
        let there: Vec<&str> = Isa::all().map(Isa::name).collect();
        let forced = if self.isa == Isa::detect() { String::new() } else { format!(" (by {VARIABLE})") };
        let memory = &self.machine.memory;
        // Writing to a String cannot fail.
        let _ = writeln!(out, "\nkernels         {}{forced} out of {}", self.isa, there.join(", "));
        for (what, kernel) in kernels(self.isa) {
            let _ = writeln!(out, "  {what:<14}{kernel}");
        }
        let huge = memory.huge_pages.as_deref().unwrap_or("unknown");
        let size = memory.huge_page_size.map_or_else(String::new, |s| format!(", pages of {}", ByteCount(s)));
        let _ = writeln!(out, "huge pages      {huge}{size}");
        let cached = memory.page_cache.map_or_else(|| "unknown".to_owned(), |c| ByteCount(c).to_string());
        let _ = writeln!(out, "page cache      {cached} of files in memory");
        let _ = writeln!(out, "\nread loop       threads  median GB/s  (min to max)");
        for (n, s) in &self.bandwidth {
            let (min, median, max) = (s.min / 1e9, s.median / 1e9, s.max / 1e9);
            let _ = writeln!(out, "{n:>23}  {median:>11.1}  ({min:.1} to {max:.1})");
        }
        let _ = writeln!(out, "\nwhat limits this machine");
        for note in self.notes() {
            let _ = writeln!(out, "- {note}");
        }
        out
    }

    fn json(&self) -> Value {
        let bandwidth: Vec<_> =
            self.bandwidth.iter().map(|(n, s)| json!({"threads": n, "gb_s": spread(s, 1e-9)})).collect();
        let kernels: serde_json::Map<_, _> =
            kernels(self.isa).into_iter().map(|(k, v)| (k, Value::from(v))).collect();
        json!({
            "machine": fingerprint::json(&self.machine), "isa": self.isa.name(), "isa_best": Isa::detect().name(),
            "kernels": kernels, "bandwidth": bandwidth, "load": self.load, "notes": self.notes(),
        })
    }

    /// What limits this machine, the most general first.
    fn notes(&self) -> Vec<String> {
        let mut notes: Vec<String> = self.busy().map(busy_note).into_iter().collect();
        notes.extend(self.memory_notes());
        notes.extend(self.core_notes());
        if self.isa == Isa::Scalar {
            notes.push(
                "scalar kernels run: both decode and prefill are limited by arithmetic, many times over"
                    .into(),
            );
        } else {
            notes.push(format!(
                "prefill, and decode of large batches, is limited by arithmetic: by {} kernels on {} thread{}",
                self.isa,
                self.machine.threads(),
                if self.machine.threads() == 1 { "" } else { "s" }
            ));
        }
        if self.isa != Isa::detect() {
            notes.push(format!("{VARIABLE} keeps {} from being used", Isa::detect()));
        }
        notes
    }

    fn memory_notes(&self) -> Vec<String> {
        let (threads, best) = self.best();
        let decode = if self.isa == Isa::Scalar {
            "memory would limit decode to"
        } else {
            "decode is limited by memory:"
        };
        let mut notes = vec![format!(
            "{decode} {:.1} GB/s with {threads} thread{}, so a token that moves 1 GB takes at least {:.1} ms",
            best / 1e9,
            if threads == 1 { "" } else { "s" },
            1e12 / best
        )];
        // With others in the way this says who they are, not what a second thread is good for.
        let several = self.bandwidth.len() > 1 && self.busy().is_none();
        if let (Some((_, one)), true) = (self.bandwidth.first(), several) {
            let share = 100.0 * one.median / best;
            notes.push(if share > 85.0 {
                format!("one thread gets {share:.0} % of that: more threads help prefill, hardly decode")
            } else {
                format!("one thread gets {share:.0} % of that: decode wants the threads too")
            });
        }
        if self.machine.numa_nodes > 1 {
            notes.push(format!(
                "memory lies on {} nodes: threads of one node read another's more slowly; bind the process to one node \
                 (numactl) when the model fits it",
                self.machine.numa_nodes
            ));
        }
        if let Some(available) = self.machine.memory.available {
            notes.push(format!(
                "packages of up to about {} stay in memory; of larger ones every token reads from the disk",
                ByteCount(available)
            ));
        }
        if self.machine.virtual_machine {
            notes.push(
                "this is a virtual machine: its neighbours may take bandwidth and cores at any time".into(),
            );
        }
        notes
    }

    fn core_notes(&self) -> Vec<String> {
        let Machine { online, affinity, quota, .. } = self.machine;
        let mut notes = Vec::new();
        if affinity < online {
            notes.push(format!("the affinity mask allows {affinity} of {online} CPUs"));
        }
        if let Some(q) = quota.filter(|&q| q < affinity as f64) {
            notes.push(format!(
                "the control group's quota is {q:.1} CPUs: more threads are stopped for parts of every period"
            ));
        }
        notes
    }

    /// The load and the CPUs, where more than half of them have had something to do.
    fn busy(&self) -> Option<(f64, usize)> {
        let online = self.machine.online;
        self.load.filter(|&load| load > 0.5 * online as f64).map(|load| (load, online))
    }
}

fn busy_note((load, online): (f64, usize)) -> String {
    format!(
        "others are busy here (load {load:.1} on {online} CPUs over the last minute): the figures above and below are too low; \
         run this again when they are done"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(rates: &[f64], load: f64) -> Report {
        let bandwidth = rates.iter().enumerate().map(|(i, &r)| (i + 1, Spread::of(vec![r * 1e9]))).collect();
        let machine =
            Machine { online: 8, affinity: 2, quota: Some(1.5), virtual_machine: false, ..Machine::read() };
        Report { machine, isa: Isa::Scalar, bandwidth, load: Some(load) }
    }

    #[test]
    fn counts_end_with_all() {
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(4), [1, 2, 3, 4]);
        assert_eq!(counts(16), [1, 2, 3, 4, 5, 6, 7, 8, 12, 16]);
        assert!(counts(1024).len() < 24);
    }

    #[test]
    fn notes_follow_the_figures() {
        let notes = report(&[20.0, 40.0], 0.5).notes().join("\n");
        for words in [
            "40.0 GB/s with 2 threads",
            "at least 25.0 ms",
            "one thread gets 50 %",
            "allows 2 of 8 CPUs",
            "quota is 1.5",
            "scalar kernels run",
        ] {
            assert!(notes.contains(words), "{words}: {notes}");
        }
        assert!(!notes.contains("busy"), "{notes}");
        let notes = report(&[39.0, 40.0], 0.5).notes().join("\n");
        assert!(notes.contains("hardly decode"), "{notes}");
        assert!(!report(&[39.0], 0.5).notes().join("\n").contains("one thread gets"));
    }

    #[test]
    fn a_busy_machine_is_said_first_and_not_advised_on_threads() {
        let notes = report(&[39.0, 40.0], 7.5).notes();
        assert!(notes[0].contains("load 7.5 on 8") && notes[0].contains("again"), "{notes:?}");
        assert!(!notes.join("\n").contains("one thread gets"), "{notes:?}");
    }
}
