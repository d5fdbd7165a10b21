//! The caches of the allowed CPUs.

use std::{collections::BTreeMap, collections::BTreeSet, fs, path::Path};

/// A level of data cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cache {
    /// Level, 1 the nearest.
    pub level: usize,
    /// Bytes of all instances that the allowed CPUs reach.
    pub bytes: usize,
    /// How many instances that is.
    pub instances: usize,
}

/// Reads `cpu*/cache/index*` below `root` for the given CPUs; an instance that several of them share counts once.
pub(super) fn read(root: &Path, cpus: &[usize]) -> Vec<Cache> {
    let mut seen = BTreeSet::new();
    let mut levels: BTreeMap<usize, Cache> = BTreeMap::new();
    for cpu in cpus {
        for index in 0..8 {
            let folder = root.join(format!("cpu{cpu}/cache/index{index}"));
            let text = |name: &str| {
                fs::read_to_string(folder.join(name)).map(|t| t.trim().to_owned()).unwrap_or_default()
            };
            let (Ok(level), Some(bytes)) = (text("level").parse::<usize>(), size(&text("size"))) else {
                continue;
            };
            if text("type") == "Instruction" || !seen.insert((level, text("shared_cpu_list"))) {
                continue;
            }
            let cache = levels.entry(level).or_insert(Cache { level, bytes: 0, instances: 0 });
            cache.bytes = cache.bytes.saturating_add(bytes);
            cache.instances += 1;
        }
    }
    levels.into_values().collect()
}

/// Bytes of a text such as `32768K`.
fn size(text: &str) -> Option<usize> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        _ => return None,
    };
    digits.parse::<usize>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(size("32K"), Some(32 << 10));
        assert_eq!(size("1M"), Some(1 << 20));
        assert_eq!(size("12"), Some(12));
        assert_eq!(size(""), None);
        assert_eq!(size("3X"), None);
    }
}
