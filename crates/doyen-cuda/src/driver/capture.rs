//! Launches of a step recorded once and replayed: one call to the driver instead of one a kernel.

use super::{Gpu, failed};
use crate::error::CudaError;
use cudarc::driver::{CudaGraph, sys};

/// Recorded launches.
pub(crate) struct Capture(CudaGraph);

// SAFETY: a graph may be used by any thread, one at a time; it is used through the session that owns it, exclusively.
unsafe impl Send for Capture {}

impl Capture {
    /// Records what `launches` launches, running nothing. Nothing is recorded where the card has no memory to keep it.
    ///
    /// # Errors
    /// The error of `launches`, or the driver's.
    pub(crate) fn record<E: From<CudaError>>(
        gpu: &Gpu,
        launches: impl FnOnce() -> Result<(), E>,
    ) -> Result<Option<Self>, E> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        gpu.stream().begin_capture(mode).map_err(failed("cannot record a step"))?;
        let launched = launches();
        // Ended whatever happened: the stream takes no other work before.
        let graph = gpu
            .stream()
            .end_capture(sys::CUgraphInstantiate_flags(0))
            .map_err(failed("cannot record a step"));
        launched?;
        match graph {
            Ok(Some(graph)) => Ok(Some(Self(graph))),
            Err(CudaError::Memory { .. }) => Ok(None),
            Ok(None) => {
                let reason = "the driver recorded nothing".to_owned();
                Err(CudaError::Driver { what: "cannot record a step".into(), reason }.into())
            }
            Err(e) => Err(e.into()),
        }
    }

    /// Launches everything recorded; false where the card has no memory to, and nothing ran.
    pub(crate) fn replay(&self) -> Result<bool, CudaError> {
        match self.0.launch().map_err(failed("cannot replay a step")) {
            Ok(()) => Ok(true),
            Err(CudaError::Memory { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }
}
