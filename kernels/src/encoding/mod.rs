//! One chunk made smaller, and made itself again.
//!
//! Owns: the bytes of an encoded chunk, which way a chunk is encoded, and reading them back without trusting a length in
//! them. Does not own: how elements become planes (`planes`), which files are encoded, where encoded chunks lie, or that
//! what came back is what was meant (the caller has the chunk's checksum).
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

/// How a chunk may be made smaller. Each chunk says for itself what became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    /// zstd over the bytes as they are.
    Zstd,
    /// Exponents and mantissas apart, each plane by zstd where that helps; plain zstd where elements are not numbers.
    Planes,
}

/// How hard zstd tries where bytes are not in planes. `benches/encode.rs` measures 1 and 3: on weights 3 gains nothing, on
/// optimizer states up to three parts in a hundred, and it takes up to twice as long.
pub const LEVEL: i32 = 1;

/// What is not made smaller by at least one part in so many stays as it is: reading it back would cost more than the
/// room it takes.
pub const LEAST_GAIN: usize = 32;

/// What an encoded chunk may have beyond the chunk itself: its first byte.
pub const OVERHEAD_BYTES: usize = 1;

/// Pieces of a chunk that are tried before it is encoded, and their size: 64 KiB of 8 MiB cost 1 % of the work, and
/// eight places see both halves of a chunk in which one tensor ends and another begins.
const SAMPLE_PIECES: usize = 8;
const SAMPLE_PIECE_BYTES: usize = 8 << 10;

const AS_IT_IS: u8 = 0;
const ZSTD: u8 = 1;

/// The shortest repetition that is looked for in a plane, and the size of the table it is looked for in: zstd's longest and
/// smallest. Exponents have few values, so some in a row are often seen again, and saying where costs more than saying them.
/// By the usual search BF16 weights came to 0.70 of their size at level 3 and to 0.68 at level 1; by this to 0.66, which is
/// what their exponents' entropy allows, in less time.
const PLANE_MATCH_BYTES_MIN: u32 = 7;
const PLANE_TABLE_LOG: u32 = 6;

/// Set in a plane's length where the plane is as it is.
const PLANE_AS_IT_IS: u32 = 1 << 31;
const PLANE_HEAD_BYTES: usize = 4;

/// Encodes chunks, one after the other; keeps what zstd needs between them (1 MiB at level 1) and room for planes.
pub struct Encoder {
    zstd: Compressor<'static>,
    /// For planes.
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
    /// # Errors
    /// zstd has no memory for its tables.
    pub fn new() -> io::Result<Self> {
        Self::with_level(LEVEL)
    }

    /// As [`Self::new`], trying as hard as `level` says.
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

    /// Replaces what is in `out` by `chunk`, encoded; at most [`OVERHEAD_BYTES`] longer than it. The same chunk always
    /// becomes the same bytes.
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

    /// The form in which a sample of the chunk is smallest; none where no form gains.
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
            // Clearly smaller than the one before: over a whole chunk zstd finds more that repeats than in a sample, and
            // two BF16 in planes of four are as small as in planes of two.
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

    /// Whether a sample of a plane gains; a plane of mantissas does not, and is not worth the whole try.
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

/// Appends one zstd frame of `bytes`; gives its length.
fn frame_of(zstd: &mut Compressor<'_>, bytes: &[u8], out: &mut Vec<u8>) -> io::Result<usize> {
    let at = out.len();
    out.resize(at + zstd::zstd_safe::compress_bound(bytes.len()), 0);
    let length = zstd.compress_to_buffer(bytes, &mut out[at..])?;
    out.truncate(at + length);
    Ok(length)
}

/// How a chunk that is not as it is was made smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Zstd,
    Planes(Width),
}

impl Width {
    /// The first byte of a chunk in planes.
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

/// Even pieces of `bytes`, each beginning with an element; all of it where it is small.
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

/// Why some bytes are no encoded chunk of the length that is expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodeError {
    Empty,
    /// The first byte is none of ours.
    Form(u8),
    /// So many bytes came of it, and the chunk has others.
    Length {
        found: usize,
        expected: usize,
    },
    /// It ends before what its lengths say.
    Short {
        found: usize,
        expected: usize,
    },
    /// zstd's words.
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
    /// # Errors
    /// zstd has no memory for its tables.
    pub fn new() -> io::Result<Self> {
        Ok(Self { zstd: Decompressor::new()?, planes: Vec::new() })
    }

    /// Fills `chunk` with what `encoded` says, or refuses; what is in `chunk` then means nothing. Writes nothing beyond
    /// it, and takes memory by its length alone, never by one that `encoded` says.
    ///
    /// # Errors
    /// The bytes are no encoded chunk of that length. That they are the right ones is for a checksum to say.
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
