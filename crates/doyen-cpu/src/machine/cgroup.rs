//! Limits of the control groups this process is in, version 1 or 2.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// What they allow; `None` is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Limits {
    /// Cores' worth of CPU time.
    pub(super) cpus: Option<f64>,
    /// Bytes that can still be taken.
    pub(super) memory_left: Option<u64>,
}

impl Limits {
    /// The tightest limits of the groups named by the text of `/proc/self/cgroup` and their ancestors, below `root`.
    pub(super) fn read(root: &Path, groups: &str) -> Self {
        let mut limits = Self::default();
        for line in groups.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
            let base = if controllers.is_empty() { root.to_owned() } else { root.join(controllers) };
            for folder in ancestors(&base, path) {
                let number = |name: &str| first_number(&folder.join(name), 0);
                let (quota, period) = if controllers.is_empty() {
                    let file = folder.join("cpu.max");
                    (first_number(&file, 0), first_number(&file, 1))
                } else {
                    (number("cpu.cfs_quota_us"), number("cpu.cfs_period_us"))
                };
                if let (Some(q), Some(p)) = (quota, period.filter(|&p| p > 0)) {
                    limits.cpus = tighter(limits.cpus, Some(q as f64 / p as f64));
                }
                let (most, used) = if controllers.is_empty() {
                    (number("memory.max"), number("memory.current"))
                } else {
                    (number("memory.limit_in_bytes"), number("memory.usage_in_bytes"))
                };
                // Version 1 writes a number near 2^63 for no limit.
                if let Some(most) = most.filter(|&m| m < 1 << 60) {
                    let left = most.saturating_sub(used.unwrap_or(0));
                    limits.memory_left = Some(limits.memory_left.map_or(left, |l| l.min(left)));
                }
            }
        }
        limits
    }
}

/// The folder of a group and those above it. In a container the path may name folders that only the host sees; the
/// root then stands for the group.
fn ancestors(base: &Path, group: &str) -> Vec<PathBuf> {
    let relative = Path::new(group.trim_start_matches('/'));
    relative.ancestors().map(|a| base.join(a)).collect()
}

/// Word `i` of a file's first line as a number; `max`, negative numbers and missing files are none.
fn first_number(file: &Path, i: usize) -> Option<u64> {
    fs::read_to_string(file).ok()?.split_whitespace().nth(i)?.parse().ok()
}

fn tighter(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("doyen-cgroup-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn version_2_takes_the_tightest_ancestor() {
        let root = folder("v2");
        let inner = root.join("a/b");
        fs::create_dir_all(&inner).unwrap();
        fs::write(root.join("a/cpu.max"), "150000 100000\n").unwrap();
        fs::write(inner.join("cpu.max"), "max 100000\n").unwrap();
        fs::write(inner.join("memory.max"), "1000\n").unwrap();
        fs::write(inner.join("memory.current"), "400\n").unwrap();
        let limits = Limits::read(&root, "0::/a/b\n");
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(limits, Limits { cpus: Some(1.5), memory_left: Some(600) });
    }

    #[test]
    fn version_1_and_no_limits() {
        let root = folder("v1");
        fs::create_dir_all(root.join("cpu,cpuacct")).unwrap();
        fs::create_dir_all(root.join("memory")).unwrap();
        fs::write(root.join("cpu,cpuacct/cpu.cfs_quota_us"), "-1\n").unwrap();
        fs::write(root.join("cpu,cpuacct/cpu.cfs_period_us"), "100000\n").unwrap();
        fs::write(root.join("memory/memory.limit_in_bytes"), "9223372036854771712\n").unwrap();
        let groups = "5:memory:/host/only\n4:cpu,cpuacct:/\n";
        assert_eq!(Limits::read(&root, groups), Limits::default());
        fs::write(root.join("cpu,cpuacct/cpu.cfs_quota_us"), "200000\n").unwrap();
        fs::write(root.join("memory/memory.limit_in_bytes"), "4096\n").unwrap();
        let limits = Limits::read(&root, groups);
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(limits, Limits { cpus: Some(2.0), memory_left: Some(4096) });
        assert_eq!(Limits::read(Path::new("/nowhere"), "garbage"), Limits::default());
    }
}
