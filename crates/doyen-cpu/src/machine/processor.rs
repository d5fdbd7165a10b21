//! The processor's name and features.

/// What the processor calls itself, from the text of `/proc/cpuinfo`.
pub(super) fn name(cpuinfo: &str) -> String {
    let field = |key: &str| {
        let line = cpuinfo.lines().find(|l| l.split(':').next().is_some_and(|k| k.trim() == key))?;
        Some(line.split_once(':')?.1.trim().to_owned()).filter(|v| !v.is_empty())
    };
    // arm64 kernels give numbers of implementer and part instead of a name.
    let arm = || Some(format!("implementer {} part {}", field("CPU implementer")?, field("CPU part")?));
    field("model name").or_else(arm).unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Whether the processor says that a hypervisor is below, from the text of `/proc/cpuinfo`.
pub(super) fn is_virtual(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().find(|l| l.starts_with("flags"));
    flags.is_some_and(|l| l.split_whitespace().any(|f| f == "hypervisor"))
}

/// The features of the processor, and of the operating system's support for them, that matter to kernels.
#[cfg(target_arch = "x86_64")]
pub(super) fn features() -> Vec<&'static str> {
    macro_rules! found {
        ($($name:tt),* $(,)?) => { [$(($name, is_x86_feature_detected!($name))),*] };
    }
    let all = found![
        "avx2",
        "fma",
        "f16c",
        "avxvnni",
        "avx512f",
        "avx512bw",
        "avx512dq",
        "avx512vl",
        "avx512vnni",
        "avx512vbmi",
        "avx512bf16",
        "avx512fp16",
    ];
    all.into_iter().filter_map(|(name, there)| there.then_some(name)).collect()
}

/// The features of the processor, and of the operating system's support for them, that matter to kernels.
#[cfg(target_arch = "aarch64")]
pub(super) fn features() -> Vec<&'static str> {
    macro_rules! found {
        ($($name:tt),* $(,)?) => { [$(($name, std::arch::is_aarch64_feature_detected!($name))),*] };
    }
    let all = found!["neon", "fp16", "dotprod", "i8mm", "bf16", "sve", "sve2"];
    all.into_iter().filter_map(|(name, there)| there.then_some(name)).collect()
}

/// None that kernels are written for.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) fn features() -> Vec<&'static str> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_both_kinds() {
        let x86 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu hypervisor avx\n";
        assert_eq!(name(x86), "AMD EPYC");
        assert!(is_virtual(x86));
        let arm = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n";
        assert_eq!(name(arm), "implementer 0x41 part 0xd40");
        assert!(!is_virtual(arm));
        assert_eq!(name(""), std::env::consts::ARCH);
    }
}
