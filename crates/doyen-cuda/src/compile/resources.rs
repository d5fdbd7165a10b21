//! What a kernel takes, from the messages of ptxas.

/// Registers, stack and spills of one kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resources {
    /// The kernel.
    pub entry: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of stack frame.
    pub stack: u32,
    /// Bytes of registers stored to and loaded from memory because there were too few.
    pub spills: u32,
    /// Bytes of static shared memory.
    pub shared: u32,
}

/// The kernels that a log speaks of, in its order: a line that names the kernel, one with stack and spills, one with
/// registers.
pub(super) fn parse(log: &str) -> Vec<Resources> {
    let mut found: Vec<Resources> = Vec::new();
    for line in log.lines() {
        if let Some(entry) = between(line, "entry function '", "'") {
            found.push(Resources { entry: entry.to_owned(), registers: 0, stack: 0, spills: 0, shared: 0 });
        }
        let Some(last) = found.last_mut() else { continue };
        if line.contains("bytes stack frame") {
            last.stack = number_before(line, " bytes stack frame");
            last.spills =
                number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
        }
        if line.contains("Used ") {
            last.registers = number_before(line, " registers");
            last.shared = number_before(line, " bytes smem");
        }
    }
    found
}

fn between<'a>(line: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let rest = &line[line.find(before)? + before.len()..];
    rest.split(after).next()
}

/// The number right before `what`, 0 where there is none.
fn number_before(line: &str, what: &str) -> u32 {
    let Some(end) = line.find(what) else { return 0 };
    let digits = line[..end].rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    digits.parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptxas_messages() {
        let log = "ptxas info    : Compiling entry function 'gemv_1' for 'sm_90a'\n\
                   ptxas info    : Function properties for gemv_1\n\
                   ptxas         .     32 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n\
                   ptxas info    : Used 48 registers, used 1 barriers, 256 bytes smem\n\
                   ptxas info    : Compiling entry function 'b' for 'sm_90a'\n\
                   ptxas info    : Used 20 registers\n";
        let found = parse(log);
        let first = Resources { entry: "gemv_1".into(), registers: 48, stack: 32, spills: 12, shared: 256 };
        assert_eq!(found[0], first);
        assert_eq!((found[1].registers, found[1].spills), (20, 0));
    }
}
