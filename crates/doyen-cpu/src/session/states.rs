//! States of fixed size: for each of the graph's, a slot after the other.

use super::{cast, cast_mut, memory::Memory};
use doyen_graph::{
    device::{DeviceError, Program, StateSlot},
    lowered::{State, StateId},
};
use doyen_tensor::Tensor;
use std::ops::Range;

/// All slots of one state.
struct Store {
    state: State,
    slots: usize,
    memory: Memory,
}

/// All states of a session.
pub(crate) struct States {
    stores: Vec<Store>,
}

impl Store {
    fn range(&self, slot: StateSlot) -> Result<Range<usize>, DeviceError> {
        if slot.index() >= self.slots {
            return Err(DeviceError::Step(format!("state slot {} of {}", slot.0, self.slots)));
        }
        let bytes = self.state.numel() * 4;
        Ok(slot.index() * bytes..(slot.index() + 1) * bytes)
    }
}

impl States {
    pub(crate) fn new(program: &Program) -> Result<Self, DeviceError> {
        let store = |state: &State| {
            let bytes = usize::try_from(state.bytes().0).ok();
            let bytes = bytes.and_then(|b| b.checked_mul(program.state_slots));
            let bytes =
                bytes.ok_or_else(|| DeviceError::Step("the states overflow the address space".into()))?;
            let memory = Memory::new(bytes, "recurrent states")?;
            Ok(Store { state: state.clone(), slots: program.state_slots, memory })
        };
        let stores = program.graph.states.iter().map(store).collect::<Result<_, DeviceError>>()?;
        Ok(Self { stores })
    }

    /// All slots of a state as numbers, and the elements of one.
    pub(crate) fn all(&mut self, id: StateId) -> Result<(&mut [f32], usize), String> {
        let store = self.stores.get_mut(id.index()).ok_or_else(|| format!("no state {}", id.0))?;
        Ok((cast_mut(&mut store.memory), store.state.numel()))
    }

    pub(crate) fn read(&self, id: StateId, slot: StateSlot) -> Result<Tensor, DeviceError> {
        let store = self.stores.get(id.index());
        let store = store.ok_or_else(|| DeviceError::Step(format!("no state {}", id.0)))?;
        let values: &[f32] = cast(&store.memory[store.range(slot)?]);
        Tensor::from_slice(store.state.dims.clone(), values).map_err(|e| DeviceError::Step(e.to_string()))
    }

    pub(crate) fn write(&mut self, id: StateId, slot: StateSlot, state: &Tensor) -> Result<(), DeviceError> {
        let store = self.stores.get_mut(id.index());
        let store = store.ok_or_else(|| DeviceError::Step(format!("no state {}", id.0)))?;
        let range = store.range(slot)?;
        let expected = &store.state.dims;
        if state.shape().dims() != expected.as_slice() || state.bytes().len() != range.len() {
            return Err(DeviceError::Step(format!("the state is float32{expected:?}, given {state:?}")));
        }
        store.memory[range].copy_from_slice(state.bytes());
        Ok(())
    }
}
