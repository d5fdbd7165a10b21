//! Compiles every module for every supported card with the NVRTC that the loader finds, and prints what the kernels take.
//! Needs no card. `scripts/cuda-compile.sh` runs it with the oldest and the newest NVRTC.
//!
//! Usage: compile [--jobs N] [--cards 80,90,120] [--package FOLDER] [FOLDER]: cubins are also written to FOLDER; with `--package`,
//! cubins and PTX under the names by which a release finds them (`scripts/package.sh`).

use doyen_cuda::{
    compile::{Compiler, PTX_ARCH, Packaged},
    module::{Arch, Module},
};
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let (mut jobs, mut folder) = (std::thread::available_parallelism().map_or(1, usize::from), None);
    let (mut cards, mut package) = (Arch::SUPPORTED.to_vec(), None);
    while let Some(arg) = args.next() {
        if arg == "--jobs" {
            jobs = args.next().and_then(|n| n.parse().ok()).unwrap_or(1);
        } else if arg == "--cards" {
            let wanted = args.next().unwrap_or_default();
            cards.retain(|a| wanted.split(',').any(|w| w == format!("{}{}", a.major, a.minor)));
        } else if arg == "--package" {
            package = args.next().map(Packaged::new);
        } else {
            folder = Some(PathBuf::from(arg));
        }
    }
    let compiler = match Compiler::load() {
        Ok(compiler) => compiler,
        Err(e) => {
            eprintln!("error: {e}");
            return ExitCode::FAILURE;
        }
    };
    let work: Vec<(Module, Arch)> = cards
        .iter()
        .flat_map(|&a| Module::all().into_iter().filter(move |m| m.is_for(a)).map(move |m| (m, a)))
        .collect();
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let lines = Mutex::new(vec![Vec::new(); work.len()]);
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(&(module, arch)) = work.get(at) else { return };
                    let result = one(compiler, module, arch, (folder.as_ref(), package.as_ref()));
                    match result {
                        Ok(text) => {
                            lines.lock().unwrap_or_else(std::sync::PoisonError::into_inner)[at] = text;
                        }
                        Err(e) => failures.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(e),
                    }
                }
            });
        }
    });
    let (major, minor) = compiler.version();
    println!(
        "NVRTC {major}.{minor}\n{:<12} {:<8} {:<18} registers stack spills shared",
        "module", "card", "kernel"
    );
    for line in lines.into_inner().unwrap_or_default().iter().flatten() {
        println!("{line}");
    }
    let failures = failures.into_inner().unwrap_or_default();
    for failure in &failures {
        eprintln!("error: {failure}");
    }
    println!("{} of {} compiled", work.len() - failures.len(), work.len());
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Compiles one module; a line for each kernel.
fn one(
    compiler: Compiler,
    module: Module,
    arch: Arch,
    (folder, package): (Option<&PathBuf>, Option<&Packaged>),
) -> Result<Vec<String>, String> {
    let compiled = compiler.compile(module, arch).map_err(|e| e.to_string())?;
    for entry in module.entries() {
        if !compiled.resources.iter().any(|r| r.entry == *entry) {
            return Err(format!("{module} for {arch} has no kernel {entry}"));
        }
    }
    if let Some(folder) = folder {
        write(&folder.join(format!("{module}-{arch}.cubin")), &compiled.cubin)?;
    }
    if let Some(package) = package {
        write(&package.cubin(module, arch), &compiled.cubin)?;
        if arch == PTX_ARCH {
            write(&package.ptx(module), &compiler.ptx(module, arch).map_err(|e| e.to_string())?)?;
        }
    }
    let line = |r: &doyen_cuda::compile::Resources| {
        format!(
            "{module:<12} {arch:<8} {:<18} {:>9} {:>5} {:>6} {:>6}",
            r.entry, r.registers, r.stack, r.spills, r.shared
        )
    };
    Ok(compiled.resources.iter().map(line).collect())
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    path.parent()
        .map_or(Ok(()), std::fs::create_dir_all)
        .and_then(|()| std::fs::write(path, bytes))
        .map_err(|e| format!("cannot write {}: {e}", path.display()))
}
