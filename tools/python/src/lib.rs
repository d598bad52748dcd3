//! The native half of the Python package: everything that touches every byte, with the interpreter's lock released.
//!
//! Owns: what Python sees of [`archive`] and [`copy`]. Does not own: when something is accelerated, which files are opened, what is
//! left behind after an error; the Python half does.

mod archive;
mod copy;
mod mapping;

use std::collections::BTreeMap;
use std::io;

use crc32fast::Hasher;
use pyo3::exceptions::{PyIndexError, PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::archive::{Layout, Record, START_BYTES};
use crate::copy::{BLOCK_BYTES, Block, File, Memory, Stop};
use crate::mapping::Mapping;

/// Records below this size are gathered with the headers around them.
const GATHERED_BYTES: u64 = 128 << 10;
/// The record that torch adds last, two numbers of 20 digits.
const ID: &str = ".data/serialization_id";
const ID_BYTES: u64 = 40;
/// `FUSE_SUPER_MAGIC` of Linux.
const FUSE: u64 = 0x6573_5546;

/// Where a record's bytes are.
#[derive(Debug)]
enum Source {
    /// Here.
    Own(Vec<u8>),
    /// In memory of a tensor; true once `copy` has brought them into the file.
    Tensor(Memory, bool),
    /// Given piece by piece: the number of bytes so far, their checksum, the first of them.
    Pieces(u64, Hasher, Vec<u8>),
}

/// An archive that is being written into an open file.
///
/// `add_bytes`, `add_memory` and `add_pieces` say what is in it, in order; `total` its length. Then `copy` moves the large records,
/// `put` what only comes now, and `finish` all that is left.
#[pyclass(module = "tidemark._native")]
#[derive(Debug)]
struct Archive {
    file: File,
    base: u64,
    threads: usize,
    mapped: bool,
    /// Holds the places of the records that are given in pieces. The mapping ends before the file is closed.
    mapping: Option<Mapping>,
    layout: Layout,
    sources: Vec<Source>,
}

#[pymethods]
impl Archive {
    #[new]
    fn new(fd: i32, base: u64, name: String, alignment: u64, threads: usize, mapped: bool) -> PyResult<Self> {
        let layout = Layout::new(name, alignment).map_err(PyValueError::new_err)?;
        let file = File::new(fd).map_err(PyValueError::new_err)?;
        Ok(Self { file, base, threads: threads.max(1), mapped, mapping: None, layout, sources: vec![] })
    }

    /// Adds a record with these bytes.
    fn add_bytes(&mut self, name: &str, data: &[u8]) -> PyResult<usize> {
        self.add_own(name, data.to_vec()).map_err(PyValueError::new_err)
    }

    /// Adds a record with `size` bytes at `address`, which stay where they are until `finish` has returned.
    fn add_memory(&mut self, name: &str, address: usize, size: usize) -> PyResult<usize> {
        let memory = Memory::new(address, size).map_err(PyValueError::new_err)?;
        let index = self.layout.add(name, size as u64).map_err(PyValueError::new_err)?;
        self.sources.push(Source::Tensor(memory, false));
        Ok(index)
    }

    /// Adds a record with `size` bytes, which `put` gives.
    fn add_pieces(&mut self, name: &str, size: u64) -> PyResult<usize> {
        let index = self.layout.add(name, size).map_err(PyValueError::new_err)?;
        self.sources.push(Source::Pieces(0, Hasher::new(), vec![]));
        Ok(index)
    }

    /// The length of the archive, once it is finished with records of these names and sizes behind the others.
    fn total(&mut self, tail: Vec<(String, u64)>) -> PyResult<u64> {
        let count = self.layout.records().len();
        let id = (ID.to_owned(), ID_BYTES);
        let added =
            tail.into_iter().chain([id]).try_for_each(|(name, size)| self.layout.add(&name, size).map(drop));
        let total = self.layout.total();
        self.layout.cut(count);
        added.map_err(PyValueError::new_err)?;
        Ok(total)
    }

    /// The number of records, from the first on, whose bytes are in the file or come with `finish`.
    fn complete(&self) -> usize {
        let is_complete = |(record, source): &(&Record, &Source)| match source {
            Source::Own(_) => true,
            Source::Tensor(_, copied) => *copied || record.size < GATHERED_BYTES,
            Source::Pieces(given, ..) => *given == record.size,
        };
        self.layout.records().iter().zip(&self.sources).take_while(is_complete).count()
    }

    /// Forgets all records from `count` on.
    fn cut(&mut self, count: usize) {
        self.layout.cut(count);
        self.sources.truncate(count);
    }

    /// Copies the large records that are in memory, after the records in front of them: a file whose writer is killed then says at
    /// its beginning what it was to be.
    fn copy(&mut self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.begin()).map_err(os_error)?;
        let mut blocks = vec![];
        let mut large = vec![];
        for (index, (record, source)) in self.layout.records().iter().zip(&self.sources).enumerate() {
            if let (Source::Tensor(memory, false), true) = (source, record.size >= GATHERED_BYTES) {
                let first = blocks.len();
                blocks.extend(Block::all(*memory, self.base + record.data_at));
                large.push((index, first..blocks.len()));
            }
        }
        let map = |blocks: &[Block]| self.mapped.then(|| copy::mapping_of(self.file, blocks)).flatten();
        let copied = py.detach(|| self.copy_blocks(&blocks, map(&blocks).as_ref())).map_err(error);
        for (index, of_record) in large {
            let mut crc = Hasher::new();
            let whole = blocks[of_record].iter().all(|block| block.append_to(&mut crc));
            if let (true, Source::Tensor(memory, copied)) = (whole, &mut self.sources[index]) {
                *copied = true;
                self.layout.set_start(index, memory.bytes());
                self.layout.set_crc(index, crc.finalize());
            }
        }
        copied
    }

    /// Copies the next bytes of records that `add_pieces` added: each piece says the record's index, an address and a size.
    fn put(&mut self, py: Python<'_>, pieces: Vec<(usize, usize, usize)>) -> PyResult<()> {
        let mut blocks = vec![];
        let mut of_pieces = vec![];
        let mut ends: BTreeMap<usize, u64> = BTreeMap::new();
        for (index, address, size) in pieces {
            let memory = Memory::new(address, size).map_err(PyValueError::new_err)?;
            let (Some(record), Some(Source::Pieces(given, ..))) =
                (self.layout.records().get(index), self.sources.get(index))
            else {
                return Err(PyIndexError::new_err(format!("record {index} is not given in pieces")));
            };
            let end = ends.entry(index).or_insert(*given);
            let room = record.size - *end;
            if size as u64 > room {
                return Err(PyValueError::new_err(format!(
                    "{size} bytes after {end} do not fit into {room}"
                )));
            }
            let first = blocks.len();
            blocks.extend(Block::all(memory, self.base + record.data_at + *end));
            of_pieces.push((index, memory, first..blocks.len()));
            *end += size as u64;
        }
        py.detach(|| {
            if self.mapped && self.mapping.is_none() {
                self.mapping = self.mapping_of_pieces();
            }
            self.copy_blocks(&blocks, self.mapping.as_ref())
        })
        .map_err(error)?;
        for (index, memory, of_piece) in of_pieces {
            if let Source::Pieces(_, crc, start) = &mut self.sources[index] {
                let missing = START_BYTES - start.len();
                start.extend(memory.bytes().iter().take(missing));
                for block in &blocks[of_piece] {
                    let copied = block.append_to(crc);
                    debug_assert!(copied, "the copy ended well");
                }
            }
        }
        for (index, end) in ends {
            if let Source::Pieces(given, crc, start) = &mut self.sources[index] {
                *given = end;
                let crc = crc.clone().finalize();
                self.layout.set_start(index, start);
                self.layout.set_crc(index, crc);
            }
        }
        Ok(())
    }

    /// Ends the mapping of an archive that nobody goes on with. The file is not whole for the mount while it is mapped.
    fn unmap(&mut self, py: Python<'_>) {
        py.detach(|| self.mapping = None);
    }

    /// Writes what is left of the records, and neither an id nor a directory. Returns the length.
    fn prefix(&mut self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| {
            self.mapping = None;
            let mut gathered = self.gathered();
            self.gather_all(&mut gathered)?;
            gathered.flush()
        })
        .map_err(os_error)
    }

    /// Writes what is left: small records, headers, the records `tail`, the id that begins with `names`, the directory. Returns the
    /// archive's length.
    fn finish(&mut self, py: Python<'_>, tail: Vec<(String, Vec<u8>)>, names: &str) -> PyResult<u64> {
        py.detach(|| {
            self.mapping = None;
            let mut gathered = self.gathered();
            self.gather_all(&mut gathered)?;
            for (name, data) in tail {
                let index = self.add_own(&name, data).map_err(io::Error::other)?;
                self.gather(index, &mut gathered)?;
            }
            let id = format!("{names}{:020}", self.layout.combined()).into_bytes();
            let index = self.add_own(ID, id).map_err(io::Error::other)?;
            self.gather(index, &mut gathered)?;
            gathered.add(&self.layout.directory())?;
            gathered.flush()
        })
        .map_err(os_error)
    }
}

impl Archive {
    fn add_own(&mut self, name: &str, data: Vec<u8>) -> Result<usize, String> {
        let index = self.layout.add(name, data.len() as u64)?;
        self.layout.set_crc(index, crc32fast::hash(&data));
        self.layout.set_start(index, &data);
        self.sources.push(Source::Own(data));
        Ok(index)
    }

    fn begin(&mut self) -> io::Result<()> {
        let mut gathered = self.gathered();
        let own = self.sources.iter().take_while(|source| matches!(source, Source::Own(_))).count();
        (0..own).try_for_each(|index| self.gather(index, &mut gathered))?;
        gathered.flush().map(drop)
    }

    /// To be called without the interpreter's lock. Making and ending a mapping takes long, too.
    fn copy_blocks(&self, blocks: &[Block], mapping: Option<&Mapping>) -> Result<(), Stop<PyErr>> {
        copy::copy(self.file, blocks, self.threads, mapping, check_signals)
    }

    /// The part of the file with the records that are given in pieces.
    fn mapping_of_pieces(&self) -> Option<Mapping> {
        let all = self.layout.records().iter().zip(&self.sources);
        let mut given =
            all.filter(|(_, source)| matches!(source, Source::Pieces(..))).map(|(record, _)| record);
        let first = given.next()?;
        let last = given.next_back().unwrap_or(first);
        copy::mapping_between(self.file, self.base + first.data_at, self.base + last.data_at + last.size)
    }

    fn gathered(&self) -> Gathered {
        Gathered { file: self.file, base: self.base, at: 0, bytes: vec![] }
    }

    fn gather_all(&mut self, gathered: &mut Gathered) -> io::Result<()> {
        (0..self.sources.len()).try_for_each(|index| self.gather(index, gathered))
    }

    /// Writes a record's header, its bytes where `copy` and `put` have not, and its descriptor.
    fn gather(&mut self, index: usize, gathered: &mut Gathered) -> io::Result<()> {
        gathered.add(&self.layout.records()[index].header())?;
        let size = self.layout.records()[index].size;
        match &self.sources[index] {
            Source::Own(bytes) => gathered.add(bytes)?,
            Source::Tensor(memory, _) if size < GATHERED_BYTES => {
                // The checksum is of the copy, so that it is right whatever another thread stores meanwhile.
                let start = gathered.bytes.len();
                gathered.bytes.extend_from_slice(memory.bytes());
                let copy = &gathered.bytes[start..];
                self.layout.set_crc(index, crc32fast::hash(copy));
                self.layout.set_start(index, copy);
            }
            Source::Tensor(..) | Source::Pieces(..) => gathered.skip(size)?,
        }
        gathered.add(&self.layout.records()[index].descriptor())
    }
}

/// Neighbouring small pieces of the file, which become one write.
#[derive(Debug)]
struct Gathered {
    file: File,
    base: u64,
    /// Where `bytes` begins in the archive.
    at: u64,
    bytes: Vec<u8>,
}

impl Gathered {
    fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.bytes.extend_from_slice(bytes);
        if self.bytes.len() >= BLOCK_BYTES { self.flush().map(drop) } else { Ok(()) }
    }

    fn skip(&mut self, count: u64) -> io::Result<()> {
        self.flush()?;
        self.at += count;
        Ok(())
    }

    /// Writes what is gathered. Returns where it ends in the archive.
    fn flush(&mut self) -> io::Result<u64> {
        self.file.write(&self.bytes, self.base + self.at)?;
        self.at += self.bytes.len() as u64;
        self.bytes.clear();
        Ok(self.at)
    }
}

/// Whether a path lies on a FUSE mount.
#[pyfunction]
fn is_fuse(path: &str) -> PyResult<bool> {
    let found = rustix::fs::statfs(path).map_err(|error| os_error(error.into()))?;
    Ok(u64::try_from(found.f_type).is_ok_and(|kind| kind == FUSE))
}

/// Copies `(address, size)` pieces one after the other to `offset` of a file.
#[pyfunction]
fn copy_all(
    py: Python<'_>,
    fd: i32,
    offset: u64,
    pieces: Vec<(usize, usize)>,
    threads: usize,
    mapped: bool,
) -> PyResult<()> {
    let file = File::new(fd).map_err(PyValueError::new_err)?;
    let mut blocks = vec![];
    let mut at = offset;
    for (address, size) in pieces {
        blocks.extend(Block::all(Memory::new(address, size).map_err(PyValueError::new_err)?, at));
        at += size as u64;
    }
    py.detach(|| {
        let mapping = mapped.then(|| copy::mapping_of(file, &blocks)).flatten();
        copy::copy(file, &blocks, threads, mapping.as_ref(), check_signals)
    })
    .map_err(error)
}

fn check_signals() -> PyResult<()> {
    Python::attach(|py| py.check_signals())
}

fn error(stop: Stop<PyErr>) -> PyErr {
    match stop {
        Stop::Io(error) => os_error(error),
        Stop::Interrupted(error) => error,
    }
}

/// With its number, so that Python makes the right class of it.
fn os_error(error: io::Error) -> PyErr {
    match error.raw_os_error() {
        Some(number) => {
            let words = io::Error::from_raw_os_error(number).to_string();
            let words = words.rsplit_once(" (os error").map_or(words.as_str(), |(words, _)| words).to_owned();
            PyOSError::new_err((number, words))
        }
        None => PyOSError::new_err(error.to_string()),
    }
}

#[pymodule]
mod _native {
    #[pymodule_export]
    const MAPPED_BYTES: u64 = crate::copy::MAPPED_BYTES;

    #[pymodule_export]
    use super::{Archive, copy_all, is_fuse};
}
