//! GGUF: metadata, a list of tensors, and their data.
//!
//! Owns: versions 2 and 3, little-endian. Source: `docs/gguf.md` of ggml, and `ggml.c` for the types' sizes.

use crate::Read;
use crate::source::{Source, Stop, Window};

pub(crate) const MAGIC: &[u8] = b"GGUF";
const ALIGNMENT_KEY: &[u8] = b"general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Maximum number of sides of a tensor. ggml has four; no reader takes more than this.
const MAX_SIDES: u32 = 8;

/// The types of metadata other than numbers of a fixed width.
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const UINT32: u32 = 4;

pub(crate) fn read(source: &mut Source<'_>) -> Read {
    let size_bytes = source.size_bytes();
    let mut window = Window::new(source, MAGIC.len() as u64, size_bytes);
    header(&mut window, size_bytes).map_err(|stop| stop.early_is_broken("its header"))
}

fn header(window: &mut Window<'_, '_>, size_bytes: u64) -> Read {
    let version = number32(window)?;
    if !matches!(version, 2 | 3) {
        return Err(Stop::unknown(format!("its version is {version}, and 2 and 3 are known")));
    }
    let (tensors, pairs) = (number64(window)?, number64(window)?);
    let mut alignment = DEFAULT_ALIGNMENT;
    for _ in 0..pairs {
        window.step()?;
        let is_alignment = text_is(window, ALIGNMENT_KEY)?;
        let kind = number32(window)?;
        if is_alignment && kind == UINT32 {
            alignment = number32(window)?.into();
        } else {
            value(window, kind)?;
        }
    }
    let (mut end, mut strange) = (0_u64, None);
    for _ in 0..tensors {
        window.step()?;
        let name_bytes = number64(window)?;
        window.skip(name_bytes)?;
        let sides = number32(window)?;
        if sides > MAX_SIDES {
            return Err(Stop::unknown(format!("a tensor has {sides} sides")));
        }
        let mut count = Some(1_u64);
        for _ in 0..sides {
            let side = number64(window)?;
            count = count.and_then(|count| count.checked_mul(side));
        }
        let (kind, offset) = (number32(window)?, number64(window)?);
        let bytes = block(kind).and_then(|(items, bytes)| count?.div_ceil(items).checked_mul(bytes));
        match bytes.and_then(|bytes| offset.checked_add(bytes)) {
            Some(next) => end = end.max(next),
            None => strange = Some(kind),
        }
    }
    let list_end = window.at();
    let Some(data_at) = list_end.checked_next_multiple_of(alignment) else {
        return Err(Stop::unknown(format!("its alignment is {alignment}")));
    };
    let needed = if tensors == 0 { list_end } else { data_at.saturating_add(end) };
    if needed > size_bytes {
        return Err(Stop::broken(format!(
            "its {tensors} tensors need {end} bytes after {data_at}, and the file ends at {size_bytes}"
        )));
    }
    match strange {
        Some(kind) => Err(Stop::unknown(format!("a tensor's length is not known here, its type is {kind}"))),
        None => Ok(format!("its {tensors} tensors end at {needed} of {size_bytes} bytes")),
    }
}

fn number32(window: &mut Window<'_, '_>) -> Result<u32, Stop> {
    window.array().map(u32::from_le_bytes)
}

fn number64(window: &mut Window<'_, '_>) -> Result<u64, Stop> {
    window.array().map(u64::from_le_bytes)
}

/// Skips a text, and returns whether it is this one.
fn text_is(window: &mut Window<'_, '_>, expected: &[u8]) -> Result<bool, Stop> {
    let length = number64(window)?;
    if length != expected.len() as u64 {
        window.skip(length)?;
        return Ok(false);
    }
    let mut same = true;
    for byte in expected {
        same &= window.byte()? == *byte;
    }
    Ok(same)
}

/// Skips a value.
fn value(window: &mut Window<'_, '_>, kind: u32) -> Result<(), Stop> {
    if kind != ARRAY {
        return one(window, kind);
    }
    let (kind, count) = (number32(window)?, number64(window)?);
    if let Some(width) = width(kind) {
        return window.skip(count.saturating_mul(width));
    }
    for _ in 0..count {
        window.step()?;
        one(window, kind)?;
    }
    Ok(())
}

fn one(window: &mut Window<'_, '_>, kind: u32) -> Result<(), Stop> {
    match (width(kind), kind) {
        (Some(width), _) => window.skip(width),
        (None, STRING) => {
            let length = number64(window)?;
            window.skip(length)
        }
        _ => Err(Stop::unknown(format!("a value of its metadata has the type {kind}"))),
    }
}

/// Returns the bytes of a number.
fn width(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

/// Returns items and bytes of one block of a tensor's type; `None` for unknown types.
fn block(kind: u32) -> Option<(u64, u64)> {
    Some(match kind {
        // F32, F16, BF16, F64, and the integers.
        0 | 26 => (1, 4),
        1 | 25 | 30 => (1, 2),
        24 => (1, 1),
        27 | 28 => (1, 8),
        // Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4.
        2 | 20 => (32, 18),
        3 => (32, 20),
        6 => (32, 22),
        7 => (32, 24),
        8 => (32, 34),
        39 => (32, 17),
        // Q2_K to Q6_K.
        10 => (256, 84),
        11 | 21 => (256, 110),
        12 => (256, 144),
        13 => (256, 176),
        14 => (256, 210),
        // IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ2_S, IQ4_XS, IQ1_M, TQ1_0, TQ2_0; IQ3_S is above.
        16 | 35 => (256, 66),
        17 => (256, 74),
        18 => (256, 98),
        19 => (256, 50),
        22 => (256, 82),
        23 => (256, 136),
        29 => (256, 56),
        34 => (256, 54),
        _ => return None,
    })
}
