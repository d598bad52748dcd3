//! Verdicts on files: whether a file's bytes show that it is whole.
//!
//! Owns: the readers of each format and their bounds. Does not own: the place of the bytes, the consequences of a verdict.
//!
//! A file is broken only if it begins as a format and the format's own structure contradicts it. A file that a reader does not
//! understand is unknown, never broken: a false "broken" may hide a healthy file, while a false "unknown" hides nothing.
//!
//! Every file is treated as hostile. A reader keeps to [`Limits`], makes no allocation from a length that it has not compared with
//! the file's, and never calls itself. No verdict says that all names of a checkpoint exist.

mod archive;
mod gguf;
mod hdf5;
mod keras;
mod npy;
mod pickle;
mod safetensors;
mod source;
mod tar;
mod torch_legacy;
mod torch_zip;
mod zip;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};
use source::{Source, Stop};
use std::fmt;
use std::io;
use std::time::Duration;

/// The version of the readers. Raised with every change that may give the same bytes another verdict, so that a stored verdict can be
/// told from one of today's readers.
pub const READERS: u32 = 2;

/// Number of first bytes of a file, by which its format is recognised. The last ones that a format needs are those of tar, at 257.
const HEAD_BYTES: usize = 512;

/// Reads ranges of a file that does not change meanwhile.
pub trait Bytes {
    /// Fills `into` with the bytes from `offset` on.
    ///
    /// # Errors
    /// Every error makes the verdict unknown.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;
}

impl Bytes for &[u8] {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let from = usize::try_from(offset).ok().and_then(|offset| self.get(offset..));
        let range = from.and_then(|from| from.get(..into.len()));
        into.copy_from_slice(range.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Limits on the cost of one verdict. Beyond them, the verdict is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of bytes that are read.
    pub read_bytes: u64,
    /// Maximum number of opcodes, directory entries, headers and tensors that are examined.
    pub steps: u64,
    /// Longest time by the clock. The search for the end of an archive is limited by its bytes alone.
    pub cpu: Duration,
}

impl Default for Limits {
    /// Returns limits that add at most a tenth to sealing a file of a gigabyte, because a seal hashes some gigabytes a second. For
    /// other files the addition is not noticeable.
    fn default() -> Self {
        Self { read_bytes: 64 << 20, steps: 4 << 20, cpu: Duration::from_millis(50) }
    }
}

/// The result of reading a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The format's structure accounts for the file to its end.
    Whole,
    /// The file begins as the format, but the format's structure contradicts the file.
    Broken,
    /// No known format, a format that cannot tell, or more cost than the limits allow.
    Unknown,
}

/// The formats that have a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// Files of `torch.save`, TorchScript and `torch.package`.
    TorchZip,
    Safetensors,
    /// Files of `torch.save` before 1.6, and of later versions on request.
    TorchLegacy,
    Hdf5,
    Pickle,
    Npz,
    Npy,
    Keras,
    Gguf,
    Tar,
    /// Any other zip archive.
    Zip,
}

impl Format {
    /// Whether a format's writers may set the file's size first and fill it afterwards. If the writer of such a file was killed, the
    /// verdict whole proves nothing: the header may exist, and the rest be zeros.
    #[must_use]
    pub fn is_sized_in_advance(self) -> bool {
        match self {
            Self::Safetensors | Self::Gguf | Self::Npy => true,
            // The writer of HDF5 allocates before it writes.
            Self::Hdf5 => true,
            // The end of these files is written last, or each part after the one before it.
            Self::TorchZip | Self::Npz | Self::Keras | Self::Zip => false,
            Self::TorchLegacy | Self::Pickle | Self::Tar => false,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TorchZip => "torch zip",
            Self::Safetensors => "safetensors",
            Self::TorchLegacy => "legacy torch",
            Self::Hdf5 => "HDF5",
            Self::Pickle => "pickle",
            Self::Npz => "npz",
            Self::Npy => "npy",
            Self::Keras => ".keras",
            Self::Gguf => "GGUF",
            Self::Tar => "tar",
            Self::Zip => "zip",
        })
    }
}

/// A verdict with its reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Judgement {
    pub verdict: Verdict,
    /// The format as which the file begins; `None` if it begins as no known format.
    pub format: Option<Format>,
    /// A sentence without its full stop. If two values contradict each other, it has both.
    pub reason: String,
    /// [`READERS`] of the build that read the file.
    pub readers: u32,
}

/// Judges one file. `clock` returns how much time was used until now, best the thread's CPU time; its zero does not matter.
///
/// Costs at most `limits`, and memory for [`READS_AT_ONCE`](source::READS_AT_ONCE) and the reader's state of each part: some 40 MiB
/// for the worst hostile file, some kilobytes for a checkpoint.
#[must_use]
pub fn judge(bytes: &dyn Bytes, size_bytes: u64, limits: &Limits, clock: &dyn Fn() -> Duration) -> Judgement {
    let mut source = Source::new(bytes, size_bytes, limits, clock);
    let mut head = [0; HEAD_BYTES];
    let length = usize::try_from(size_bytes).unwrap_or(HEAD_BYTES).min(HEAD_BYTES);
    let head = &mut head[..length];
    let (format, read) = match source.read(0, head) {
        Ok(()) => recognised(&mut source, head),
        Err(stop) => (None, Err(stop)),
    };
    let (verdict, reason) = match read {
        Ok(reason) => (Verdict::Whole, reason),
        Err(Stop::Broken(reason)) => (Verdict::Broken, reason),
        Err(Stop::Unknown(reason)) => (Verdict::Unknown, reason),
        // Each reader decides what an early end means in its format; otherwise nothing is proved.
        Err(Stop::Early(early)) => (Verdict::Unknown, early.to_string()),
    };
    Judgement { verdict, format, reason, readers: READERS }
}

/// A reader's result: the reason why a file is whole, or why the reader stopped.
type Read = Result<String, Stop>;

/// Returns the format that the first bytes show, and its reader's result.
fn recognised(source: &mut Source<'_>, head: &[u8]) -> (Option<Format>, Read) {
    if head.starts_with(zip::LOCAL) {
        return archive::read(source);
    }
    let (format, reader): (_, fn(&mut Source<'_>, &[u8]) -> Read) = if head.starts_with(hdf5::SIGNATURE) {
        (Format::Hdf5, |source, _| hdf5::read(source, 0, source.size_bytes()))
    } else if head.starts_with(gguf::MAGIC) {
        (Format::Gguf, |source, _| gguf::read(source))
    } else if head.starts_with(npy::MAGIC) {
        (Format::Npy, |source, _| npy::read(source, 0, source.size_bytes()))
    } else if torch_legacy::begins(head) {
        (Format::TorchLegacy, |source, _| torch_legacy::read(source))
    } else if pickle::begins(head) {
        (Format::Pickle, |source, _| pickle::read(source))
    } else if safetensors::begins(head) {
        (Format::Safetensors, safetensors::read)
    } else if tar::begins(head) {
        (Format::Tar, |source, _| tar::read(source))
    } else {
        return (None, Err(Stop::unknown("it begins as no format that is known here")));
    };
    (Some(format), reader(source, head))
}
