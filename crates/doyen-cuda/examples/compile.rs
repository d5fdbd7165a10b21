//! Compiles every module for every supported card with the NVRTC that the loader finds, and prints what the kernels take.
//! Needs no card. `scripts/cuda-compile.sh` runs it with the oldest and the newest NVRTC.
//!
//! Usage: compile [--jobs N] [--cards 80,90,ptx] [--package FILE] [FOLDER]: cubins are also written to FOLDER. With `--package`, cubins and
//! PTX are put into FILE, which a release is built with (`scripts/package.sh`); they lie in FOLDER under names that change with the
//! sources then, and what is there already is not compiled again.

use doyen_cuda::{
    compile::{Compiler, Image, PTX_ARCHS, Packaged, Resources},
    module::{Arch, Module},
};
use std::{
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

/// A module for a target, and its name in a folder or a release.
struct Work {
    module: Module,
    target: Target,
    name: String,
}

/// What became of it: the compiled module, and a line for each of its kernels.
type Made = Result<(Vec<u8>, Vec<String>), String>;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let mut jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let (mut cards, mut ptx, mut folder, mut package) = (Arch::SUPPORTED.to_vec(), true, None, None);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--jobs" => jobs = args.next().and_then(|n| n.parse().ok()).unwrap_or(1),
            "--cards" => {
                let wanted = args.next().unwrap_or_default();
                cards.retain(|a| wanted.split(',').any(|w| w == format!("{}{}", a.major, a.minor)));
                ptx = wanted.split(',').any(|w| w == "ptx");
            }
            "--package" => package = args.next().map(PathBuf::from),
            _ => folder = Some(PathBuf::from(arg)),
        }
    }
    let work = work(&cards, ptx, package.is_some());
    match run(&work, jobs, folder.as_deref(), package.as_deref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Every module for every card; of a release, in PTX as well.
fn work(cards: &[Arch], ptx: bool, release: bool) -> Vec<Work> {
    let modules = |a: Arch| Module::all().into_iter().filter(move |m| m.is_for(a));
    let machine_code = |&arch| {
        modules(arch).map(move |module| {
            let name = if release { Packaged::cubin(module, arch) } else { format!("{module}-{arch}.cubin") };
            Work { module, target: Target::Card(arch), name }
        })
    };
    let portable = |arch| {
        modules(arch).filter(|m| m.is_portable()).map(move |module| Work {
            module,
            target: Target::Ptx(arch),
            name: Packaged::ptx(module, arch),
        })
    };
    let ptx = PTX_ARCHS.into_iter().filter(|_| ptx && release).flat_map(portable);
    cards.iter().flat_map(machine_code).chain(ptx).collect()
}

fn run(work: &[Work], jobs: usize, folder: Option<&Path>, package: Option<&Path>) -> Result<(), String> {
    let compiler = Compiler::load().map_err(|e| e.to_string())?;
    let next = AtomicUsize::new(0);
    let made: Vec<Mutex<Made>> = work.iter().map(|_| Mutex::new(Err("not compiled".into()))).collect();
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                while let Some(i) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&i| i < work.len()) {
                    *made[i].lock().unwrap_or_else(PoisonError::into_inner) =
                        one(compiler, &work[i], folder, package.is_some());
                }
            });
        }
    });
    let made: Vec<Made> =
        made.into_iter().map(|m| m.into_inner().unwrap_or_else(PoisonError::into_inner)).collect();
    let (major, minor) = compiler.version();
    println!(
        "NVRTC {major}.{minor}\n{:<12} {:<8} {:<18} registers stack spills shared",
        "module", "card", "kernel"
    );
    for line in made.iter().flatten().flat_map(|(_, lines)| lines) {
        println!("{line}");
    }
    for failure in made.iter().filter_map(|m| m.as_ref().err()) {
        eprintln!("error: {failure}");
    }
    let there: Vec<_> = work.iter().zip(&made).filter_map(|(w, m)| Some((w, &m.as_ref().ok()?.0))).collect();
    println!("{} of {} are there", there.len(), work.len());
    if there.len() < work.len() {
        return Err("some do not compile".into());
    }
    let Some(package) = package else { return Ok(()) };
    let packed = Packaged::pack(there.iter().map(|(w, image)| (w.name.as_str(), image.as_slice())));
    write(package, &packed)?;
    check(&Packaged::new(packed).map_err(|e| e.to_string())?, work)
}

/// Compiles one module into `folder`; with `kept`, unless it is there.
fn one(compiler: Compiler, work: &Work, folder: Option<&Path>, kept: bool) -> Made {
    let file = folder.map(|f| f.join(&work.name));
    if let Some(image) = file.as_ref().filter(|_| kept).and_then(|f| std::fs::read(f).ok())
        && has_entries(work, &image).is_ok()
    {
        return Ok((image, Vec::new()));
    }
    let module = work.module;
    let (image, resources) = match work.target {
        Target::Card(arch) => {
            let compiled = compiler.compile(module, arch).map_err(|e| e.to_string())?;
            (compiled.cubin, compiled.resources)
        }
        Target::Ptx(arch) => (compiler.ptx(module, arch).map_err(|e| e.to_string())?, Vec::new()),
    };
    has_entries(work, &image)?;
    if let Some(file) = &file {
        write(file, &image)?;
    }
    let (Target::Card(arch) | Target::Ptx(arch)) = work.target;
    let line = |r: &Resources| {
        format!(
            "{module:<12} {arch:<8} {:<18} {:>9} {:>5} {:>6} {:>6}",
            r.entry, r.registers, r.stack, r.spills, r.shared
        )
    };
    Ok((image, resources.iter().map(line).collect()))
}

/// Whether a release has every module as the program looks for it.
fn check(packaged: &Packaged, work: &[Work]) -> Result<(), String> {
    for w in work {
        let (Target::Card(arch) | Target::Ptx(arch)) = w.target;
        let image = packaged.images(w.module, arch).find_map(|image| match (image, w.target) {
            (Image::Cubin(cubin), Target::Card(_)) => Some(cubin),
            (Image::Ptx(text), Target::Ptx(_)) => Some(text.into_bytes()),
            _ => None,
        });
        has_entries(w, &image.ok_or_else(|| format!("{} is not there", w.name))?)?;
    }
    Ok(())
}

/// Whether the names of all kernels are in a compiled module, each with what ends a name there.
fn has_entries(work: &Work, compiled: &[u8]) -> Result<(), String> {
    let end: &[u8] = match work.target {
        Target::Card(_) => b"\0",
        Target::Ptx(_) => b"(",
    };
    for entry in work.module.entries() {
        let name = [entry.as_bytes(), end].concat();
        if !compiled.windows(name.len()).any(|w| w == name) {
            return Err(format!("{} has no kernel {entry}", work.name));
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
