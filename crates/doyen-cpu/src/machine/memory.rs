//! Memory, the page cache and huge pages.

use doyen_tensor::ByteCount;
use std::fs;

/// What of this process's memory lies in huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HugePages {
    /// Mapped files.
    pub files: ByteCount,
    /// All other memory.
    pub anonymous: ByteCount,
}

impl HugePages {
    /// Asks the system; `None` where it does not say.
    pub fn of_this_process() -> Option<Self> {
        Self::of(&fs::read_to_string("/proc/self/smaps_rollup").ok()?)
    }

    fn of(smaps: &str) -> Option<Self> {
        let bytes = |key| kib_field(smaps, key).map(ByteCount);
        Some(Self { files: bytes("FilePmdMapped")?, anonymous: bytes("AnonHugePages")? })
    }
}

/// A line `key: n kB` as bytes.
fn kib_field(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Memory as the system counts it, in bytes; `None` where it does not say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryState {
    /// All there is.
    pub total: Option<u64>,
    /// What can be allocated without swapping, within the limits of control groups.
    pub available: Option<u64>,
    /// Pages of files that are in memory.
    pub page_cache: Option<u64>,
    /// The setting of transparent huge pages: `always`, `madvise` or `never`.
    pub huge_pages: Option<String>,
    /// Bytes of a huge page.
    pub huge_page_size: Option<u64>,
}

impl MemoryState {
    /// Asks the system; `left` is what control groups allow to be taken still.
    pub(super) fn read(left: Option<u64>) -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let setting = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
        Self::of(&meminfo, &setting, left)
    }

    fn of(meminfo: &str, setting: &str, left: Option<u64>) -> Self {
        let field = |key| kib_field(meminfo, key);
        let available = match (field("MemAvailable"), left) {
            (Some(a), Some(l)) => Some(a.min(l)),
            (a, l) => a.or(l),
        };
        Self {
            total: field("MemTotal"),
            available,
            page_cache: field("Cached"),
            huge_pages: chosen(setting),
            huge_page_size: field("Hugepagesize"),
        }
    }
}

/// The word in brackets.
fn chosen(setting: &str) -> Option<String> {
    let (_, rest) = setting.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_the_kernel() {
        let meminfo = "MemTotal:       24 kB\nMemAvailable:   20 kB\nCached:  3 kB\nHugepagesize:  2048 kB\n";
        let state = MemoryState::of(meminfo, "always [madvise] never\n", None);
        assert_eq!((state.total, state.available, state.page_cache), (Some(24576), Some(20480), Some(3072)));
        assert_eq!((state.huge_pages.as_deref(), state.huge_page_size), (Some("madvise"), Some(2 << 20)));
        assert_eq!(MemoryState::of(meminfo, "", Some(5)).available, Some(5));
        assert_eq!(MemoryState::of("", "", None), MemoryState::default());
        let smaps = "Rss: 9 kB\nAnonHugePages:   2048 kB\nShmemPmdMapped: 0 kB\nFilePmdMapped:  4096 kB\n";
        let found = HugePages { files: ByteCount(4 << 20), anonymous: ByteCount(2 << 20) };
        assert_eq!(HugePages::of(smaps), Some(found));
        assert_eq!(HugePages::of(meminfo), None);
    }
}
