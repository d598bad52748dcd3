//! Encodes one chunk to fewer bytes, and decodes it.
//!
//! Owns: the bytes of an encoded chunk, the choice of its form, and decoding without trusting a length in them. Does not own: how elements
//! become planes (`planes`), which files are encoded, where encoded chunks lie, or whether the decoded bytes are the right ones (the caller
//! has the chunk's checksum).
//!
//! ```text
//! byte 0   0: the chunk as it is follows    1: one zstd frame follows    2, 4: planes of elements of so many bytes
//!
//! planes   1..1+4w      for each plane, least significant first: its length here, 32 bits little-endian, and in
//!                       bit 31 whether it is as it is; else it is one zstd frame
//!          then         the planes
//!          then         the chunk's last bytes, fewer than an element, as they are
//! ```

pub mod planes;

use planes::Width;
use std::fmt;
use std::io;
use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::{CParameter, Strategy};

/// The codec for chunks. Each chunk itself names the form that was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    /// zstd over the bytes as they are.
    Zstd,
    /// Exponents and mantissas apart, each plane by zstd if that helps; plain zstd if elements are not numbers.
    Planes,
}

/// zstd's level for bytes that are not in planes. `benches/encode.rs` measures 1 and 3: on weights 3 gains nothing, on optimizer states up
/// to three parts in a hundred, and it takes up to twice as long.
pub const LEVEL: i32 = 1;

/// Divisor of a chunk for the least gain: a chunk that shrinks by less stays as it is, because decoding would cost more than the bytes it
/// saves.
pub const LEAST_GAIN: usize = 32;

/// Most bytes by which an encoded chunk may exceed the chunk: its first byte.
pub const OVERHEAD_BYTES: usize = 1;

/// Pieces of a chunk that are tried before it is encoded, and their size: 64 KiB of 8 MiB cost 1 % of the work. Eight places see both
/// halves of a chunk in which one tensor ends and another begins.
const SAMPLE_PIECES: usize = 8;
const SAMPLE_PIECE_BYTES: usize = 8 << 10;

const AS_IT_IS: u8 = 0;
const ZSTD: u8 = 1;

/// The shortest repetition that zstd looks for in a plane, and the size of its table: zstd's longest and smallest. Exponents have few
/// values, so short sequences often repeat, and encoding the reference costs more than encoding the sequence. By the usual search BF16
/// weights came to 0.70 of their size at level 3 and to 0.68 at level 1; by this to 0.66, the limit of their exponents' entropy, in less
/// time.
const PLANE_MATCH_BYTES_MIN: u32 = 7;
const PLANE_TABLE_LOG: u32 = 6;

/// Bit that is set in a plane's length if the plane is not compressed.
const PLANE_AS_IT_IS: u32 = 1 << 31;
const PLANE_HEAD_BYTES: usize = 4;

/// Encodes chunks, one after the other; keeps zstd's state between them (1 MiB at level 1) and room for planes.
pub struct Encoder {
    zstd: Compressor<'static>,
    /// The compressor for planes.
    plane_zstd: Compressor<'static>,
    planes: Vec<u8>,
    sample: Vec<u8>,
    tried: Vec<u8>,
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder").field("planes_bytes", &self.planes.capacity()).finish_non_exhaustive()
    }
}

impl Encoder {
    /// Makes an encoder of level [`LEVEL`].
    ///
    /// # Errors
    /// zstd has no memory for its tables.
    pub fn new() -> io::Result<Self> {
        Self::with_level(LEVEL)
    }

    /// Makes an encoder of this level of zstd.
    ///
    /// # Errors
    /// zstd has no memory for its tables, or no such level.
    pub fn with_level(level: i32) -> io::Result<Self> {
        let (zstd, mut plane_zstd) = (Compressor::new(level)?, Compressor::new(level)?);
        plane_zstd.set_parameter(CParameter::Strategy(Strategy::ZSTD_fast))?;
        plane_zstd.set_parameter(CParameter::MinMatch(PLANE_MATCH_BYTES_MIN))?;
        plane_zstd.set_parameter(CParameter::HashLog(PLANE_TABLE_LOG))?;
        Ok(Self { zstd, plane_zstd, planes: Vec::new(), sample: Vec::new(), tried: Vec::new() })
    }

    /// Replaces the content of `out` by `chunk`, encoded; at most [`OVERHEAD_BYTES`] longer than `chunk`. The same chunk always becomes the
    /// same bytes.
    ///
    /// # Errors
    /// zstd has no memory.
    pub fn encode(&mut self, codec: Codec, chunk: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        out.clear();
        if let Some(form) = self.choose(codec, chunk)? {
            self.write(form, chunk, out)?;
            if gains(out.len(), chunk.len()) {
                return Ok(());
            }
            out.clear();
        }
        out.reserve_exact(chunk.len() + OVERHEAD_BYTES);
        out.push(AS_IT_IS);
        out.extend_from_slice(chunk);
        Ok(())
    }

    /// Returns the form in which a sample of the chunk is smallest; `None` if no form gains.
    fn choose(&mut self, codec: Codec, chunk: &[u8]) -> io::Result<Option<Form>> {
        let forms: &[Form] = match codec {
            Codec::Zstd => &[Form::Zstd],
            Codec::Planes => &[Form::Zstd, Form::Planes(Width::Two), Form::Planes(Width::Four)],
        };
        let (mut sample, mut tried) = (std::mem::take(&mut self.sample), std::mem::take(&mut self.tried));
        take_sample(chunk, &mut sample);
        let mut best = None;
        for form in forms {
            tried.clear();
            self.write(*form, &sample, &mut tried)?;
            // Must be clearly smaller than the form before: over a whole chunk zstd finds more repetitions than in a sample, and two BF16
            // in planes of four are as small as in planes of two.
            let least = best.map_or(sample.len(), |(_, length)| length);
            if tried.len() < least.saturating_sub(sample.len() / LEAST_GAIN) {
                best = Some((*form, tried.len()));
            }
        }
        (self.sample, self.tried) = (sample, tried);
        Ok(best.map(|(form, _)| form))
    }

    fn write(&mut self, form: Form, chunk: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        match form {
            Form::Zstd => {
                out.push(ZSTD);
                frame_of(&mut self.zstd, chunk, out).map(drop)
            }
            Form::Planes(width) => self.write_planes(width, chunk, out),
        }
    }

    fn write_planes(&mut self, width: Width, chunk: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        let mut planes = std::mem::take(&mut self.planes);
        let whole = chunk.len() - chunk.len() % width.bytes();
        let (elements, rest) = chunk.split_at(whole);
        planes.resize(whole, 0);
        planes::split(width, elements, &mut planes);
        out.push(width.form());
        let heads = out.len();
        out.resize(heads + width.bytes() * PLANE_HEAD_BYTES, 0);
        for (index, plane) in planes.chunks_exact((whole / width.bytes()).max(1)).enumerate() {
            let at = out.len();
            let kept =
                self.plane_shrinks(plane)? && gains(frame_of(&mut self.plane_zstd, plane, out)?, plane.len());
            if !kept {
                out.truncate(at);
                out.extend_from_slice(plane);
            }
            let length = u32::try_from(out.len() - at).map_err(io::Error::other)?;
            assert!(length < PLANE_AS_IT_IS, "a chunk has far fewer than 2 GiB");
            let head = if kept { length } else { length | PLANE_AS_IT_IS };
            let head_at = heads + index * PLANE_HEAD_BYTES;
            out[head_at..head_at + PLANE_HEAD_BYTES].copy_from_slice(&head.to_le_bytes());
        }
        out.extend_from_slice(rest);
        self.planes = planes;
        Ok(())
    }

    /// Returns whether a sample of a plane gains; a plane of mantissas does not, and is not worth a full try.
    fn plane_shrinks(&mut self, plane: &[u8]) -> io::Result<bool> {
        if plane.len() <= SAMPLE_PIECES * SAMPLE_PIECE_BYTES {
            return Ok(true);
        }
        let mut sample = Vec::new();
        take_sample(plane, &mut sample);
        let mut tried = Vec::new();
        Ok(gains(frame_of(&mut self.plane_zstd, &sample, &mut tried)?, sample.len()))
    }
}

/// Appends one zstd frame of `bytes`; returns its length.
fn frame_of(zstd: &mut Compressor<'_>, bytes: &[u8], out: &mut Vec<u8>) -> io::Result<usize> {
    let at = out.len();
    out.resize(at + zstd::zstd_safe::compress_bound(bytes.len()), 0);
    let length = zstd.compress_to_buffer(bytes, &mut out[at..])?;
    out.truncate(at + length);
    Ok(length)
}

/// The form of a chunk that was made smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Zstd,
    Planes(Width),
}

impl Width {
    /// Returns the first byte of a chunk in planes.
    fn form(self) -> u8 {
        match self {
            Self::Two => 2,
            Self::Four => 4,
        }
    }

    fn of_form(byte: u8) -> Option<Self> {
        [Self::Two, Self::Four].into_iter().find(|width| width.form() == byte)
    }
}

fn gains(encoded: usize, plain: usize) -> bool {
    encoded < plain - plain / LEAST_GAIN
}

/// Takes even pieces of `bytes`, each beginning with an element; all of `bytes` if it is small.
fn take_sample(bytes: &[u8], sample: &mut Vec<u8>) {
    sample.clear();
    if bytes.len() <= SAMPLE_PIECES * SAMPLE_PIECE_BYTES {
        sample.extend_from_slice(bytes);
        return;
    }
    let stride = (bytes.len() - SAMPLE_PIECE_BYTES) / (SAMPLE_PIECES - 1);
    for piece in 0..SAMPLE_PIECES {
        let from = (piece * stride) & !(Width::Four.bytes() - 1);
        sample.extend_from_slice(&bytes[from..from + SAMPLE_PIECE_BYTES]);
    }
}

/// Why bytes are not an encoded chunk of the expected length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodeError {
    Empty,
    /// The first byte is unknown.
    Form(u8),
    /// The decoded length differs from the chunk's.
    Length {
        found: usize,
        expected: usize,
    },
    /// The bytes end before the sum of their lengths.
    Short {
        found: usize,
        expected: usize,
    },
    /// zstd's error message.
    Frame(String),
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => write!(f, "it is empty"),
            Self::Form(byte) => write!(f, "its form is {byte}, and this build reads 0, 1, 2 and 4"),
            Self::Length { found, expected } => write!(f, "it makes {found} bytes, expected {expected}"),
            Self::Short { found, expected } => write!(f, "it has {found} bytes, and says {expected}"),
            Self::Frame(why) => write!(f, "zstd refuses it: {why}"),
        }
    }
}

impl std::error::Error for DecodeError {}

/// Decodes chunks, one after the other; keeps zstd's tables and room for planes between them.
pub struct Decoder {
    zstd: Decompressor<'static>,
    planes: Vec<u8>,
}

impl fmt::Debug for Decoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decoder").field("planes_bytes", &self.planes.capacity()).finish_non_exhaustive()
    }
}

impl Decoder {
    /// Makes a decoder.
    ///
    /// # Errors
    /// zstd has no memory for its tables.
    pub fn new() -> io::Result<Self> {
        Ok(Self { zstd: Decompressor::new()?, planes: Vec::new() })
    }

    /// Fills `chunk` with the decoded bytes, or refuses; then the content of `chunk` is undefined. Writes nothing beyond `chunk`, and
    /// allocates by its length alone, never by a length in `encoded`.
    ///
    /// # Errors
    /// The bytes are no encoded chunk of that length. A checksum must show that the decoded bytes are the right ones.
    pub fn decode(&mut self, encoded: &[u8], chunk: &mut [u8]) -> Result<(), DecodeError> {
        let (form, body) = encoded.split_first().ok_or(DecodeError::Empty)?;
        match *form {
            AS_IT_IS => copy(body, chunk),
            ZSTD => frame(&mut self.zstd, body, chunk),
            other => match Width::of_form(other) {
                Some(width) => self.decode_planes(width, body, chunk),
                None => Err(DecodeError::Form(other)),
            },
        }
    }

    fn decode_planes(&mut self, width: Width, body: &[u8], chunk: &mut [u8]) -> Result<(), DecodeError> {
        let whole = chunk.len() - chunk.len() % width.bytes();
        let (elements, rest) = chunk.split_at_mut(whole);
        let heads_bytes = width.bytes() * PLANE_HEAD_BYTES;
        let short = |expected| DecodeError::Short { found: body.len(), expected };
        let (heads, mut bytes) = body.split_at_checked(heads_bytes).ok_or_else(|| short(heads_bytes))?;
        self.planes.resize(whole, 0);
        let plane_bytes = whole / width.bytes();
        for (index, head) in heads.chunks_exact(PLANE_HEAD_BYTES).enumerate() {
            let head = u32::from_le_bytes(head.try_into().expect("pieces of four"));
            let length = usize::try_from(head & !PLANE_AS_IT_IS).expect("31 bits fit an address space");
            let said = body.len() - bytes.len() + length;
            let (here, after) = bytes.split_at_checked(length).ok_or_else(|| short(said))?;
            let plane = &mut self.planes[index * plane_bytes..(index + 1) * plane_bytes];
            if head & PLANE_AS_IT_IS != 0 {
                copy(here, plane)?
            } else {
                frame(&mut self.zstd, here, plane)?
            }
            bytes = after;
        }
        copy(bytes, rest)?;
        planes::join(width, &self.planes, elements);
        Ok(())
    }
}

fn copy(from: &[u8], to: &mut [u8]) -> Result<(), DecodeError> {
    if from.len() != to.len() {
        return Err(DecodeError::Length { found: from.len(), expected: to.len() });
    }
    to.copy_from_slice(from);
    Ok(())
}

fn frame(zstd: &mut Decompressor<'_>, from: &[u8], to: &mut [u8]) -> Result<(), DecodeError> {
    // zstd writes into the slice and no further, whatever length the frame claims.
    let found = zstd.decompress_to_buffer(from, to).map_err(|why| DecodeError::Frame(why.to_string()))?;
    if found != to.len() {
        return Err(DecodeError::Length { found, expected: to.len() });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
