//! States of fixed size on the card: for each of the graph's, a slot after the other.

use crate::{
    driver::{Addr, Buffer, Gpu},
    error::CudaError,
};
use doyen_graph::{
    device::{DeviceError, Program, StateSlot},
    lowered::{State, StateId},
};
use doyen_tensor::{DType, Tensor};

/// All slots of one state.
struct Store {
    state: State,
    slots: usize,
    memory: Buffer,
}

/// All states of a session.
pub(crate) struct States {
    stores: Vec<Store>,
}

impl Store {
    /// First byte and bytes of a slot.
    fn place(&self, slot: StateSlot) -> Result<(usize, usize), DeviceError> {
        if slot.index() >= self.slots {
            return Err(DeviceError::Step(format!("state slot {} of {}", slot.0, self.slots)));
        }
        let bytes = self.state.numel() * size_of::<f32>();
        Ok((slot.index() * bytes, bytes))
    }
}

impl States {
    pub(crate) fn new(gpu: &Gpu, program: &Program) -> Result<Self, DeviceError> {
        let store = |state: &State| {
            let bytes = usize::try_from(state.bytes().0).ok();
            let bytes = bytes.and_then(|b| b.checked_mul(program.state_slots));
            let bytes =
                bytes.ok_or_else(|| DeviceError::Step("the states overflow the address space".into()))?;
            let memory = Buffer::new(gpu, bytes, "recurrent states")?;
            Ok(Store { state: state.clone(), slots: program.state_slots, memory })
        };
        let stores = program.graph.states.iter().map(store).collect::<Result<_, DeviceError>>()?;
        Ok(Self { stores })
    }

    fn store(&self, id: StateId) -> Option<&Store> {
        self.stores.get(id.index())
    }

    /// The slots of a state, and the numbers of one.
    pub(crate) fn all(&self, id: StateId) -> Result<(Addr, usize), CudaError> {
        let store = self.store(id).ok_or_else(|| CudaError::Driver {
            what: "recurrent states".into(),
            reason: format!("there is no state {}", id.0),
        })?;
        Ok((store.memory.start(), store.state.numel()))
    }

    pub(crate) fn read(&self, gpu: &Gpu, id: StateId, slot: StateSlot) -> Result<Tensor, DeviceError> {
        let store = self.store(id).ok_or_else(|| DeviceError::Step(format!("no state {}", id.0)))?;
        let (first, len) = store.place(slot)?;
        let mut bytes = vec![0; len];
        store.memory.read(gpu, first, &mut bytes)?;
        Tensor::from_bytes(DType::F32, store.state.dims.clone(), bytes.into())
            .map_err(|e| DeviceError::Step(e.to_string()))
    }

    pub(crate) fn write(
        &mut self,
        gpu: &Gpu,
        id: StateId,
        slot: StateSlot,
        state: &Tensor,
    ) -> Result<(), DeviceError> {
        let store = self.stores.get_mut(id.index());
        let store = store.ok_or_else(|| DeviceError::Step(format!("no state {}", id.0)))?;
        let (first, len) = store.place(slot)?;
        let expected = &store.state.dims;
        if state.shape().dims() != expected.as_slice() || state.bytes().len() != len {
            return Err(DeviceError::Step(format!("the state is float32{expected:?}, given {state:?}")));
        }
        Ok(store.memory.write(gpu, first, state.bytes())?)
    }
}
