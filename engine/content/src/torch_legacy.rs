//! Files of `torch.save` before 1.6: pickles, and after them the storages in the order of the last pickle.
//!
//! Owns: that the storages end with the file. Does not own: the opcodes (`pickle`).
//! Source: `_legacy_save` in `torch/serialization.py`.

use crate::Read;
use crate::pickle::{self, Walked};
use crate::source::{Early, Source, Stop};

/// The first pickle: one number, in which Python's own format and the length do not matter.
const MAGIC: [u8; 12] = [0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];
/// Bytes of the item count before each storage.
const COUNT_BYTES: u64 = 8;

pub(crate) fn begins(head: &[u8]) -> bool {
    let [0x80, 2..=5, rest @ ..] = head else { return false };
    // Protocol 4 puts the number into a frame.
    let framed = rest.strip_prefix(&[0x95]).and_then(|rest| rest.get(8..));
    framed.unwrap_or(rest).starts_with(&MAGIC)
}

pub(crate) fn read(source: &mut Source<'_>) -> Read {
    let size_bytes = source.size_bytes();
    let mut at = 0;
    let mut next = |source: &mut Source<'_>, what: &str| -> Result<Walked, Stop> {
        let walked = pickle::walk(source, at, size_bytes).map_err(|stop| stop.early_is_broken(what))?;
        at = walked.end;
        Ok(walked)
    };
    for what in ["its magic number", "its version", "its description of the system"] {
        next(source, what)?;
    }
    let object = next(source, "the pickle of its object")?;
    let order = next(source, "the list of its storages")?;
    if object.foreign_ids || order.other_texts {
        return Err(Stop::unknown("its pickle names things by ids that are not those of torch.save"));
    }
    for key in &order.keys {
        source.step()?;
        let Some(storage) = object.storages.get(key) else {
            return Err(Stop::unknown(format!("its pickle does not say of what type the storage {key} is")));
        };
        let what = format!("the storage {key}");
        let count = source.array(at).map(u64::from_le_bytes).map_err(|stop| stop.early_is_broken(&what))?;
        if count != storage.count {
            return Err(Stop::unknown(format!(
                "{what} has {count} items, and its pickle counts {}",
                storage.count
            )));
        }
        let wants_bytes = count.saturating_mul(u64::from(storage.item_bytes));
        let data_at = at + COUNT_BYTES;
        if wants_bytes > size_bytes - data_at {
            let early = Early { at: data_at, wants_bytes, end: size_bytes };
            return Err(Stop::Early(early).early_is_broken(&what));
        }
        at = data_at + wants_bytes;
    }
    let count = order.keys.len();
    if at < size_bytes {
        return Err(Stop::unknown(format!("its {count} storages end at {at}, and the file at {size_bytes}")));
    }
    Ok(format!("its {count} storages end with the file at {size_bytes}"))
}
