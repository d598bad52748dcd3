//! An archive of any kind: finding out the kind, and choosing its reader.
//!
//! Owns: the choice. Does not own: the archive itself (`zip`), the meaning of members (`torch_zip`, `npy`,
//! `keras`).

use crate::source::{Source, Stop};
use crate::zip::{self, LOCAL_BYTES, u16_at};
use crate::{Format, Read, keras, npy, torch_zip};

/// Longest first name that is read; the kind follows from that name, and no known kind has a longer one.
const MAX_FIRST_NAME_BYTES: usize = 1024;

/// Reads a file that begins as an archive.
pub(crate) fn read(source: &mut Source<'_>) -> (Option<Format>, Read) {
    let format = kind(source).unwrap_or(Format::Zip);
    let read = zip::open(source).and_then(|directory| match format {
        Format::TorchZip => torch_zip::read(source, directory),
        Format::Npz => npy::read_archive(source, directory),
        Format::Keras => keras::read(source, directory),
        _ => {
            zip::members(source, directory, &mut |_, _, _| Ok(()))?;
            Err(Stop::unknown(format!(
                "its directory of {} entries is in order; what they must be is not known here",
                directory.entries
            )))
        }
    });
    (Some(format), read.map_err(|stop| stop.early_is_broken("the archive")))
}

/// Returns the kind by the first member, which exists even if the archive has no end.
fn kind(source: &mut Source<'_>) -> Option<Format> {
    let header: [u8; LOCAL_BYTES] = source.array(0).ok()?;
    let (name_bytes, extra_bytes) = (u16_at(&header, 26), u16_at(&header, 28));
    let mut name = [0; MAX_FIRST_NAME_BYTES];
    let name = name.get_mut(..usize::from(name_bytes))?;
    source.read(LOCAL_BYTES as u64, name).ok()?;
    let padding = extra_bytes >= 4
        && source.array(LOCAL_BYTES as u64 + u64::from(name_bytes)).is_ok_and(|id: [u8; 2]| id == *b"FB");
    if padding || torch_zip::is_member(name) {
        Some(Format::TorchZip)
    } else if name.ends_with(b".npy") {
        Some(Format::Npz)
    } else if keras::is_member(name) {
        Some(Format::Keras)
    } else {
        None
    }
}
