//! Compiles every module for every supported card with the NVRTC that the loader finds, and prints what the kernels take.
//! Needs no card. `scripts/cuda-compile.sh` runs it with the oldest and the newest NVRTC.
//!
//! Usage: compile [--jobs N] [--cards 80,90,ptx] [--package FOLDER] [FOLDER]: cubins are also written to FOLDER; with `--package`,
//! cubins and PTX under the names by which a release finds them (`scripts/package.sh`). What is there already
//! is not compiled again.
//! Usage: compile --check FOLDER [--cards 80,90,ptx]: whether every kernel is in the folder of a release, in machine code for every
//! card and in PTX; what else is there is removed. Needs no NVRTC.

use doyen_cuda::{
    compile::{Compiler, Image, PTX_ARCHS, Packaged},
    module::{Arch, Module},
};
use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

/// What is compiled.
#[derive(Clone, Copy)]
enum Target {
    Card(Arch),
    /// PTX for the cards from one on.
    Ptx(Arch),
}

/// Where it goes.
#[derive(Default)]
struct Out {
    folder: Option<PathBuf>,
    package: Option<Packaged>,
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let mut jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let (mut cards, mut ptx, mut out, mut check) = (Arch::SUPPORTED.to_vec(), true, Out::default(), None);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--jobs" => jobs = args.next().and_then(|n| n.parse().ok()).unwrap_or(1),
            "--cards" => {
                let wanted = args.next().unwrap_or_default();
                cards.retain(|a| wanted.split(',').any(|w| w == format!("{}{}", a.major, a.minor)));
                ptx = wanted.split(',').any(|w| w == "ptx");
            }
            "--package" => out.package = args.next().map(Packaged::new),
            "--check" => check = args.next().map(Packaged::new),
            _ => out.folder = Some(PathBuf::from(arg)),
        }
    }
    let modules = |a: Arch| Module::all().into_iter().filter(move |m| m.is_for(a));
    let mut work: Vec<(Module, Target)> =
        cards.iter().flat_map(|&a| modules(a).map(move |m| (m, Target::Card(a)))).collect();
    if ptx && (out.package.is_some() || check.is_some()) {
        let portable = |a: Arch| modules(a).filter(|m| m.is_portable()).map(move |m| (m, Target::Ptx(a)));
        work.extend(PTX_ARCHS.into_iter().flat_map(portable));
    }
    if let Some(packaged) = &check {
        let mut failures = check_all(packaged, &work);
        failures.extend(remove_others(packaged, &work).err());
        return report(work.len(), &failures);
    }
    let compiler = match Compiler::load() {
        Ok(compiler) => compiler,
        Err(e) => {
            eprintln!("error: {e}");
            return ExitCode::FAILURE;
        }
    };
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let lines = Mutex::new(vec![Vec::new(); work.len()]);
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(&(module, target)) = work.get(at) else { return };
                    match one(compiler, module, target, &out) {
                        Ok(text) => lines.lock().unwrap_or_else(PoisonError::into_inner)[at] = text,
                        Err(e) => failures.lock().unwrap_or_else(PoisonError::into_inner).push(e),
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
    report(work.len(), &failures.into_inner().unwrap_or_default())
}

fn report(all: usize, failures: &[String]) -> ExitCode {
    for failure in failures {
        eprintln!("error: {failure}");
    }
    println!("{} of {all} are there", all - failures.len());
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Compiles one module; a line for each kernel.
fn one(compiler: Compiler, module: Module, target: Target, out: &Out) -> Result<Vec<String>, String> {
    if out.folder.is_none()
        && let Some(package) = &out.package
        && check(package, module, target).is_ok()
    {
        return Ok(Vec::new());
    }
    let arch = match (target, &out.package) {
        (Target::Card(arch), _) => arch,
        (Target::Ptx(arch), Some(package)) => {
            let ptx = compiler.ptx(module, arch).map_err(|e| e.to_string())?;
            write(&package.ptx(module, arch), &ptx)?;
            return check(package, module, target).map(|()| Vec::new());
        }
        (Target::Ptx(_), None) => return Ok(Vec::new()),
    };
    let compiled = compiler.compile(module, arch).map_err(|e| e.to_string())?;
    has_entries(module, arch, &compiled.cubin, b"\0")?;
    if let Some(folder) = &out.folder {
        write(&folder.join(format!("{module}-{arch}.cubin")), &compiled.cubin)?;
    }
    if let Some(package) = &out.package {
        write(&package.cubin(module, arch), &compiled.cubin)?;
        check(package, module, target)?;
    }
    let line = |r: &doyen_cuda::compile::Resources| {
        format!(
            "{module:<12} {arch:<8} {:<18} {:>9} {:>5} {:>6} {:>6}",
            r.entry, r.registers, r.stack, r.spills, r.shared
        )
    };
    Ok(compiled.resources.iter().map(line).collect())
}

fn check_all(packaged: &Packaged, work: &[(Module, Target)]) -> Vec<String> {
    work.iter().filter_map(|&(module, target)| check(packaged, module, target).err()).collect()
}

/// Whether a release has a module as the program looks for it, with all its kernels.
fn check(packaged: &Packaged, module: Module, target: Target) -> Result<(), String> {
    let (Target::Card(arch) | Target::Ptx(arch)) = target;
    for image in packaged.images(module, arch) {
        match (image, target) {
            (Image::Cubin(cubin), Target::Card(_)) => return has_entries(module, arch, &cubin, b"\0"),
            (Image::Ptx(text), Target::Ptx(_)) => return has_entries(module, arch, text.as_bytes(), b"("),
            _ => {}
        }
    }
    Err(format!("{module} for {arch}: {} is not there", file(packaged, module, target).display()))
}

fn file(packaged: &Packaged, module: Module, target: Target) -> PathBuf {
    match target {
        Target::Card(arch) => packaged.cubin(module, arch),
        Target::Ptx(arch) => packaged.ptx(module, arch),
    }
}

/// Removes what a release before this one left: files that the program does not look for.
fn remove_others(packaged: &Packaged, work: &[(Module, Target)]) -> Result<(), String> {
    let known: HashSet<PathBuf> =
        work.iter().map(|&(module, target)| file(packaged, module, target)).collect();
    let failed = |e: std::io::Error| format!("{}: {e}", packaged.folder().display());
    for entry in std::fs::read_dir(packaged.folder()).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if !known.contains(&path) {
            std::fs::remove_file(&path).map_err(failed)?;
        }
    }
    Ok(())
}

/// Whether the names of all kernels are in a compiled module, each with what ends a name there.
fn has_entries(module: Module, arch: Arch, compiled: &[u8], end: &[u8]) -> Result<(), String> {
    for entry in module.entries() {
        let name = [entry.as_bytes(), end].concat();
        if !compiled.windows(name.len()).any(|w| w == name) {
            return Err(format!("{module} for {arch} has no kernel {entry}"));
        }
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    path.parent()
        .map_or(Ok(()), std::fs::create_dir_all)
        .and_then(|()| std::fs::write(path, bytes))
        .map_err(|e| format!("cannot write {}: {e}", path.display()))
}
