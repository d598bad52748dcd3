//! Files of `torch.save`: an archive with a pickle and one member for each storage.
//!
//! Owns: the check that each storage that the pickle names exists with its bytes. Does not own: the archive (`zip`), the opcodes
//! (`pickle`). Sources: `torch/serialization.py` and `caffe2/serialize/inline_container.cc` of PyTorch.
//!
//! The end record proves little: after an exception it is written, too, with the members that exist by then. The pickle is the
//! first member, and names the storages that must follow.

use crate::Read;
use crate::pickle::{self, Storage, key};
use crate::source::{Source, Stop};
use crate::zip::{self, Directory, Entry};
use std::collections::BTreeMap;

/// The part of a member in the archive, by its name below the archive's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Pickle,
    Storage(u64),
    /// A member that the writer adds by itself.
    Own,
    /// Code of TorchScript, and other things of `torch.package`: their pickles follow other rules.
    Foreign,
}

/// Whether an archive whose first member has this name is one of torch.
pub(crate) fn is_member(name: &[u8]) -> bool {
    below(name).is_some_and(|name| part(name) != Part::Foreign)
}

/// Returns the name without the archive's own, which is that of the file.
fn below(name: &[u8]) -> Option<&[u8]> {
    let slash = name.iter().position(|byte| *byte == b'/')?;
    name.get(slash + 1..)
}

fn part(name: &[u8]) -> Part {
    match name {
        b"data.pkl" => Part::Pickle,
        b"version" | b".format_version" | b".storage_alignment" | b"byteorder" => Part::Own,
        b".data/version" | b".data/serialization_id" => Part::Own,
        _ => name.strip_prefix(b"data/").and_then(key).map_or(Part::Foreign, Part::Storage),
    }
}

pub(crate) fn read(source: &mut Source<'_>, directory: Directory) -> Read {
    let mut pickle: Option<Entry> = None;
    let mut stored: BTreeMap<u64, u64> = BTreeMap::new();
    let mut foreign: Option<String> = None;
    zip::members(source, directory, &mut |_, name, entry| {
        match below(name).map(part) {
            Some(Part::Pickle) => pickle = Some(entry),
            Some(Part::Storage(key)) => drop(stored.insert(key, entry.size_bytes)),
            Some(Part::Own) => {}
            Some(Part::Foreign) | None if foreign.is_none() => {
                foreign = Some(String::from_utf8_lossy(name).into_owned());
            }
            Some(Part::Foreign) | None => {}
        }
        Ok(())
    })?;
    if let Some(name) = foreign {
        return Err(Stop::unknown(format!("it has a member {name:?}, which torch.save does not write")));
    }
    let Some(pickle) = pickle else {
        return Err(Stop::broken(format!(
            "its {} entries are those of torch.save, and data.pkl is not among them",
            directory.entries
        )));
    };
    if !pickle.is_plain() {
        return Err(Stop::unknown("its data.pkl is compressed, which torch.save never does"));
    }
    let walked = pickle::walk(source, pickle.at, pickle.at + pickle.size_bytes)
        .map_err(|stop| stop.early_is_broken("data.pkl"))?;
    for (key, storage) in &walked.storages {
        compare(*key, *storage, stored.get(key).copied())?;
    }
    if walked.foreign_ids {
        return Err(Stop::unknown("its pickle names things by ids that are not those of torch.save"));
    }
    Ok(format!(
        "its directory has {} entries, and each of the {} storages of its pickle is there with its bytes",
        directory.entries,
        walked.storages.len()
    ))
}

/// Compares the pickle's count with the member's bytes.
fn compare(key: u64, storage: Storage, stored_bytes: Option<u64>) -> Result<(), Stop> {
    let Storage { count, item_bytes, bytes } = storage;
    let Some(stored_bytes) = stored_bytes else {
        return Err(Stop::broken(format!(
            "its pickle names a storage {key} of {bytes} bytes, and the archive has no data/{key}"
        )));
    };
    if stored_bytes < bytes {
        return Err(Stop::broken(format!(
            "data/{key} has {stored_bytes} bytes, and its pickle counts {count} items of {item_bytes}: {bytes} bytes"
        )));
    }
    // A storage may end with a part of an item, which its count leaves out.
    if stored_bytes - bytes >= u64::from(item_bytes).max(1) {
        return Err(Stop::unknown(format!(
            "data/{key} has {stored_bytes} bytes, more than the {bytes} of its pickle"
        )));
    }
    Ok(())
}
