//! Runs the jobs of a store and puts their bytes where the store placed them.

use super::blocks::Blocks;
use crate::{
    ConvertError, Progress, Step,
    job::{Chunk, Job},
    report::Fates,
    source::Weight,
    store::Store,
};
use rayon::prelude::*;
use std::{
    io::{self, Seek, Write},
    ops::Range,
};

/// Why the data could not be written.
#[derive(Debug)]
pub(super) enum Failure {
    Convert(ConvertError),
    Io(io::Error),
}

/// Chunks in flight per thread: enough that a slow one does not hold up the others, few enough to keep memory small.
const CHUNKS_PER_THREAD: usize = 4;

/// Writes all tensors, chunk by chunk: while a batch of chunks is made in parallel, the one before it is written in order.
/// Returns what became of the source's tensors.
pub(super) fn write<W: Write + Seek + Send>(
    store: &Store,
    out: W,
    progress: &mut dyn Progress,
) -> Result<Fates, Failure> {
    let total = store.jobs.iter().map(|j| j.rows.source_bytes()).sum();
    let mut chunks = store.jobs.iter().flat_map(|job| job.chunks().map(move |rows| (job, rows)));
    let batch_len = rayon::current_num_threads() * CHUNKS_PER_THREAD;
    let mut out = Blocks::new(out, store.file_bytes());
    let (mut made, mut done, mut fates) = (Vec::new(), 0, Fates::default());
    loop {
        let batch: Vec<_> = chunks.by_ref().take(batch_len).collect();
        if batch.is_empty() && made.is_empty() {
            break;
        }
        let (written, next) = rayon::join(|| put(&mut out, &mut made), || make(&batch));
        written.map_err(Failure::Io)?;
        made = next.map_err(Failure::Convert)?;
        for (chunk, (job, _)) in made.iter().zip(&batch) {
            if let Some(origin) = job.origin() {
                fates.add(origin, job.rows.weights().map(Weight::name), chunk.deviation);
            }
        }
        if let Some((last, _)) = batch.last() {
            done += batch.iter().map(|(job, rows)| source_bytes(job, rows)).sum::<u64>();
            progress.step(Step { done, total, tensor: last.rows.name() });
        }
        if progress.is_interrupted() {
            return Err(Failure::Convert(ConvertError::Interrupted));
        }
    }
    out.finish().map_err(Failure::Io)?;
    Ok(fates)
}

fn make(batch: &[(&Job, Range<usize>)]) -> Result<Vec<Chunk>, ConvertError> {
    batch.par_iter().map(|(job, rows)| job.run(rows.clone())).collect()
}

/// Writes chunks and forgets them.
fn put<W: Write + Seek>(out: &mut Blocks<W>, made: &mut Vec<Chunk>) -> io::Result<()> {
    made.drain(..).flat_map(|chunk| chunk.placed).try_for_each(|(at, bytes)| out.put(at, &bytes))
}

/// A chunk's share of its job's source bytes.
fn source_bytes(job: &Job, rows: &Range<usize>) -> u64 {
    let all = job.rows.rows().max(1) as u64;
    job.rows.source_bytes() / all * rows.len() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        job::{Rows, Sink},
        report::Silent,
    };
    use doyen_tensor::FloatType;
    use std::io::{Cursor, SeekFrom};

    /// A device with room for `room` bytes.
    struct Small {
        inner: Cursor<Vec<u8>>,
        room: u64,
    }

    impl Write for Small {
        fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
            if self.inner.position() + buf.len() as u64 > self.room {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.inner.write(buf)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Seek for Small {
        fn seek(&mut self, pos: SeekFrom) -> io::Result<u64> {
            self.inner.seek(pos)
        }
    }

    fn store() -> Store {
        let rows = Rows::Rotary { frequencies: [0.5].into(), factor: 2.0, positions: 3, sine: false };
        let mut store = Store::reporting(false);
        store.end = 20;
        store.jobs.push(Job { rows, sink: Sink::Float { ty: FloatType::F32, at: 8 }, reported: None });
        store
    }

    #[test]
    fn bytes_go_where_they_were_placed() {
        let mut out = Cursor::new(Vec::new());
        write(&store(), &mut out, &mut Silent).unwrap();
        let expected: Vec<u8> =
            [0f64, 0.5, 1.0].iter().flat_map(|a| (a.cos() as f32 * 2.0).to_le_bytes()).collect();
        assert_eq!(out.into_inner(), [[0u8; 8].as_slice(), &expected].concat());
    }

    #[test]
    fn a_full_device_is_an_io_failure() {
        let mut out = Small { inner: Cursor::default(), room: 10 };
        match write(&store(), &mut out, &mut Silent) {
            Err(Failure::Io(e)) => assert_eq!(e.kind(), io::ErrorKind::StorageFull),
            other => panic!("{other:?}"),
        }
    }
}
