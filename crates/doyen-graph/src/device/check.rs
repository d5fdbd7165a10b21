//! A batch against the limits of its program, so that kernels need not look. Sessions ask once a step.

use super::{DeviceError, Program, RaggedBatch};

impl RaggedBatch<'_> {
    /// Checks that the batch is one that the program was planned for.
    ///
    /// # Errors
    /// Says what does not fit.
    pub fn check(&self, program: &Program) -> Result<(), DeviceError> {
        let limits = &program.limits;
        let fits = |what: &str, found: usize, most: usize| {
            if found <= most {
                Ok(())
            } else {
                Err(DeviceError::Step(format!("a step of {found} {what}, planned for {most}")))
            }
        };
        fits("tokens", self.tokens.len(), limits.tokens)?;
        fits("logit rows", self.rows.len(), limits.rows)?;
        fits("sequences", self.sequences.len(), limits.sequences)?;
        let mut next = 0;
        for s in self.sequences {
            if s.first != next {
                return Err(DeviceError::Step("the sequences do not tile the tokens".into()));
            }
            next += s.len;
            fits("positions", s.past.saturating_add(s.len), limits.context)?;
        }
        let alone =
            self.sequences.is_empty() && program.graph.groups.is_empty() && program.graph.states.is_empty();
        if !alone && next != self.tokens.len() {
            return Err(DeviceError::Step("the sequences do not tile the tokens".into()));
        }
        if let Some(&r) = self.rows.iter().find(|&&r| r as usize >= self.tokens.len()) {
            return Err(DeviceError::Step(format!("logits of token {r} of {}", self.tokens.len())));
        }
        if self.tables.len() < program.graph.groups.len() {
            return Err(DeviceError::Step("a cache group has no block tables".into()));
        }
        for (g, (table, group)) in self.tables.iter().zip(&program.pages).enumerate() {
            if table.len() < self.sequences.len() {
                return Err(DeviceError::Step(format!("cache group {g} has no table for every sequence")));
            }
            for (i, s) in self.sequences.iter().enumerate() {
                let pages = table.sequence(i);
                let positions = s.past + s.len;
                let need = positions.div_ceil(limits.page_size);
                if pages.len() < need || pages[..need].iter().any(|p| p.index() >= group.pages) {
                    return Err(DeviceError::Step(format!(
                        "sequence {i} has no pages for {positions} positions"
                    )));
                }
            }
        }
        self.check_states(program)
    }

    /// That every sequence has slots of its own for its states of fixed size.
    fn check_states(&self, program: &Program) -> Result<(), DeviceError> {
        if program.graph.states.is_empty() {
            return Ok(());
        }
        let slots = |i: usize| self.states.get(i).map(|s| (s.read, s.write));
        for i in 0..self.sequences.len() {
            let Some((read, write)) = slots(i) else {
                return Err(DeviceError::Step(format!("sequence {i} has no state slots")));
            };
            let inside = read.into_iter().chain([write]).all(|s| s.index() < program.state_slots);
            let taken = (0..self.sequences.len())
                .filter_map(|j| slots(j).map(|s| (j, s)))
                .any(|(j, (other, out))| other == Some(write) || (j != i && out == write));
            if !inside || taken {
                return Err(DeviceError::Step(format!(
                    "sequence {i} writes its state to slot {} of {}, which is not its own",
                    write.0, program.state_slots
                )));
            }
        }
        Ok(())
    }
}
