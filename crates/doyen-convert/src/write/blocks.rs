//! A file written in whole blocks, each once.
//!
//! A tensor's codes, scales and zero points lie in different places, and its rows are made chunk by chunk, so bytes come in small pieces
//! for a few places that each move forward. The page cache keeps a file in pages as large as the writes that made it, and kernels read
//! weights from huge pages a third faster (see `docs/performance.md`): hence blocks of a huge page, put together here.
//!
//! Used by `write` for the data file.

use std::{
    collections::BTreeMap,
    io::{self, Seek, SeekFrom, Write},
};

/// Bytes of a block: a huge page of x86-64 and of aarch64 with pages of 4 KiB.
const BLOCK: u64 = 2 << 20;

/// Blocks that are put together at a time; the one begun first is written as it is when another is wanted.
const OPEN: usize = 32;

/// A file of a known size that takes bytes for any place.
#[derive(Debug)]
pub(super) struct Blocks<W> {
    out: W,
    size: u64,
    /// By number; those that are not here are either untouched or written.
    open: BTreeMap<u64, Block>,
    written: Vec<bool>,
    begun: u64,
}

#[derive(Debug)]
struct Block {
    bytes: Vec<u8>,
    filled: u64,
    /// Order of beginning.
    age: u64,
}

impl<W: Write + Seek> Blocks<W> {
    /// A file of `size` bytes in `out`, zeros until something is put.
    pub(super) fn new(out: W, size: u64) -> Self {
        let blocks = size.div_ceil(BLOCK);
        Self { out, size, open: BTreeMap::new(), written: vec![false; blocks as usize], begun: 0 }
    }

    /// Puts bytes at a place, every place at most once.
    ///
    /// # Errors
    /// When the file cannot be written.
    ///
    /// # Panics
    /// When the bytes go beyond the file's size.
    pub(super) fn put(&mut self, mut at: u64, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (number, offset) = (at / BLOCK, at % BLOCK);
            let (now, rest) = bytes.split_at(bytes.len().min((BLOCK - offset) as usize));
            if self.written[number as usize] {
                write_at(&mut self.out, at, now)?;
            } else {
                self.fill(number, offset as usize, now)?;
            }
            at += now.len() as u64;
            bytes = rest;
        }
        Ok(())
    }

    /// Copies into an open block, and writes it if it is whole.
    fn fill(&mut self, number: u64, offset: usize, bytes: &[u8]) -> io::Result<()> {
        if !self.open.contains_key(&number) {
            if self.open.len() == OPEN
                && let Some(oldest) = self.open.iter().min_by_key(|(_, b)| b.age).map(|(n, _)| *n)
            {
                self.write(oldest)?;
            }
            self.begun += 1;
            let len = BLOCK.min(self.size - number * BLOCK) as usize;
            self.open.insert(number, Block { bytes: vec![0; len], filled: 0, age: self.begun });
        }
        let Some(block) = self.open.get_mut(&number) else { return Ok(()) };
        block.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
        block.filled += bytes.len() as u64;
        if block.filled >= block.bytes.len() as u64 { self.write(number) } else { Ok(()) }
    }

    fn write(&mut self, number: u64) -> io::Result<()> {
        let Some(block) = self.open.remove(&number) else { return Ok(()) };
        self.written[number as usize] = true;
        write_at(&mut self.out, number * BLOCK, &block.bytes)
    }

    /// Writes what is left and gives the file back.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(super) fn finish(mut self) -> io::Result<W> {
        while let Some((&number, _)) = self.open.first_key_value() {
            self.write(number)?;
        }
        Ok(self.out)
    }
}

fn write_at<W: Write + Seek>(out: &mut W, at: u64, bytes: &[u8]) -> io::Result<()> {
    out.seek(SeekFrom::Start(at))?;
    out.write_all(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    /// Counts writes.
    #[derive(Default)]
    struct Counted {
        inner: Cursor<Vec<u8>>,
        writes: usize,
    }

    impl Write for Counted {
        fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
            self.writes += 1;
            self.inner.write(buf)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Seek for Counted {
        fn seek(&mut self, pos: SeekFrom) -> io::Result<u64> {
            self.inner.seek(pos)
        }
    }

    fn byte(at: u64) -> u8 {
        (at % 251) as u8
    }

    #[test]
    fn streams_that_advance_together_write_every_block_once() {
        let (streams, len, step) = (5, 3 * BLOCK + 77, 65_537);
        let mut blocks = Blocks::new(Counted::default(), streams * len);
        for from in (0..len).step_by(step) {
            for stream in 0..streams {
                let at = stream * len + from;
                let bytes: Vec<u8> = (at..at + (len - from).min(step as u64)).map(byte).collect();
                blocks.put(at, &bytes).unwrap();
            }
        }
        let out = blocks.finish().unwrap();
        assert_eq!(out.writes as u64, (streams * len).div_ceil(BLOCK));
        let bytes = out.inner.into_inner();
        assert_eq!(bytes.len() as u64, streams * len);
        assert!(bytes.iter().zip(0..).all(|(b, at)| *b == byte(at)));
    }

    #[test]
    fn more_places_than_are_kept_open_and_gaps() {
        let size = (OPEN as u64 + 9) * BLOCK;
        let mut blocks = Blocks::new(Counted::default(), size);
        let places = |round: u64| (0..size / BLOCK).map(move |n| n * BLOCK + round * 1000 + 5);
        for round in 0..3 {
            for at in places(round) {
                blocks.put(at, &[byte(at), 7]).unwrap();
            }
        }
        let bytes = blocks.finish().unwrap().inner.into_inner();
        let mut expected = vec![0; size as usize];
        for at in (0..3).flat_map(places) {
            expected[at as usize] = byte(at);
            expected[at as usize + 1] = 7;
        }
        expected.truncate(bytes.len());
        assert!(bytes == expected && bytes.len() as u64 > places(0).next_back().unwrap());
    }
}
