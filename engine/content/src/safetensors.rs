//! safetensors: a length, a JSON header, and tensors to the end of the file.
//!
//! Owns: reading the header without keeping its names. Does not own: JSON. Source: the format's README, and its own reader in
//! Rust, which refuses the same files.

use crate::Read;
use crate::source::{Source, Stop, Window};
use crate::zip::u64_at;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

const LENGTH_BYTES: u64 = 8;
/// The format's own limit of a header.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Longest header that is read: of a hundred thousand tensors. A single name in it may take all of its bytes, and is held
/// whole.
const MAX_READ_BYTES: u64 = 16 << 20;
/// Maximum number of tensors of one file.
const MAX_TENSORS: usize = 1 << 20;

/// Whether the file begins with eight bytes of length and the beginning of a JSON object.
pub(crate) fn begins(head: &[u8]) -> bool {
    let length = u64_at(head, 0);
    let object = head.get(8..).and_then(|rest| rest.strip_prefix(b"{"));
    let first = object.and_then(|rest| rest.iter().find(|byte| !byte.is_ascii_whitespace()));
    (2..=MAX_HEADER_BYTES).contains(&length) && matches!(first, Some(b'"' | b'}'))
}

/// Whether the first entry can only be this format's.
fn is_certain(head: &[u8]) -> bool {
    let has = |word: &[u8]| head.windows(word.len()).any(|part| part == word);
    has(b"\"__metadata__\"") || has(b"\"dtype\"") || has(b"\"data_offsets\"")
}

pub(crate) fn read(source: &mut Source<'_>, head: &[u8]) -> Read {
    let size_bytes = source.size_bytes();
    let header_bytes = u64_at(head, 0);
    let data_at = LENGTH_BYTES + header_bytes;
    if !is_certain(head) {
        return Err(Stop::unknown("its header does not begin with a tensor or with metadata"));
    }
    if data_at > size_bytes {
        return Err(Stop::broken(format!("its header ends at {data_at}, and the file at {size_bytes}")));
    }
    let mut tensors = tensors(source, data_at)?;
    tensors.sort_unstable();
    let mut end = 0;
    for &Extent { begin, end: next } in &tensors {
        if begin != end {
            return Err(Stop::unknown(format!(
                "a tensor begins at {begin} of the data, and the one before ends at {end}"
            )));
        }
        end = next;
    }
    let (count, needed) = (tensors.len(), data_at.checked_add(end));
    match needed {
        Some(needed) if needed == size_bytes => {
            Ok(format!("its {count} tensors end with the file at {size_bytes}"))
        }
        Some(needed) if needed < size_bytes => {
            Err(Stop::unknown(format!("its {count} tensors end at {needed}, and the file at {size_bytes}")))
        }
        _ => Err(Stop::broken(format!(
            "its {count} tensors need {end} bytes after {data_at}, and the file ends at {size_bytes}"
        ))),
    }
}

/// A tensor's place in the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Extent {
    begin: u64,
    end: u64,
}

fn tensors(source: &mut Source<'_>, data_at: u64) -> Result<Vec<Extent>, Stop> {
    let header_bytes = data_at - LENGTH_BYTES;
    if header_bytes > MAX_READ_BYTES {
        return Err(Stop::unknown(format!(
            "its header has {header_bytes} bytes, more than {MAX_READ_BYTES}"
        )));
    }
    let mut window = Window::new(source, LENGTH_BYTES, data_at);
    let mut stop = None;
    let mut extents = vec![];
    let header = Header { extents: &mut extents, stop: &mut stop };
    let mut json = serde_json::Deserializer::from_reader(&mut window);
    let read = header.deserialize(&mut json).and_then(|()| json.end());
    if let Some(stop) = stop.or_else(|| window.take_stop()) {
        return Err(stop);
    }
    match read {
        Ok(()) => Ok(extents),
        // A field is missing or differs: another version of the format.
        Err(error) if error.is_data() => Err(Stop::unknown(format!("its header is not understood: {error}"))),
        Err(error) => Err(Stop::broken(format!("its header is no JSON: {error}"))),
    }
}

/// The header, of which only each tensor's extent is kept.
struct Header<'e> {
    extents: &'e mut Vec<Extent>,
    /// The reason why reading stopped, if it is none of JSON's.
    stop: &'e mut Option<Stop>,
}

impl<'de> DeserializeSeed<'de> for Header<'_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Header<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<Name>()? {
            if name.is_metadata {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let Tensor { dtype, shape, data_offsets: (begin, end) } = map.next_value()?;
            let length = end.checked_sub(begin);
            let stop = match (length, dtype.item_bytes, shape.count) {
                (None, ..) => Some(Stop::broken(format!("a tensor begins at {begin} and ends at {end}"))),
                (_, None, _) => Some(Stop::unknown("a tensor's type is not known here")),
                (Some(length), Some(item), count)
                    if count.and_then(|count| count.checked_mul(item)) != Some(length) =>
                {
                    let count = count.map_or_else(|| "more than 2^64".to_owned(), |count| count.to_string());
                    let has = format!("a tensor of {count} items of {item} bytes has {length} bytes");
                    Some(Stop::broken(has))
                }
                _ if self.extents.len() >= MAX_TENSORS => {
                    Some(Stop::unknown(format!("it has more than {MAX_TENSORS} tensors")))
                }
                _ => None,
            };
            if stop.is_some() {
                *self.stop = stop;
                return Err(A::Error::custom("stopped"));
            }
            self.extents.push(Extent { begin, end });
        }
        Ok(())
    }
}

/// A key of the header.
struct Name {
    is_metadata: bool,
}

/// The description of a tensor. Fields that later versions may add are skipped.
#[derive(Deserialize)]
struct Tensor {
    dtype: Dtype,
    shape: Shape,
    data_offsets: (u64, u64),
}

/// The bytes of one item; `None` if a type is unknown, or smaller than a byte.
struct Dtype {
    item_bytes: Option<u64>,
}

/// The number of items of a shape; `None` past 2^64.
struct Shape {
    count: Option<u64>,
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Name;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name")
            }

            fn visit_str<E>(self, text: &str) -> Result<Name, E> {
                Ok(Name { is_metadata: text == "__metadata__" })
            }
        }
        deserializer.deserialize_str(Text)
    }
}

impl<'de> Deserialize<'de> for Dtype {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Dtype;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a type's name")
            }

            fn visit_str<E>(self, text: &str) -> Result<Dtype, E> {
                let item_bytes = match text {
                    "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ"
                    | "F8_E5M2FNUZ" => 1,
                    "U16" | "I16" | "F16" | "BF16" => 2,
                    "U32" | "I32" | "F32" => 4,
                    "U64" | "I64" | "F64" | "C64" => 8,
                    _ => return Ok(Dtype { item_bytes: None }),
                };
                Ok(Dtype { item_bytes: Some(item_bytes) })
            }
        }
        deserializer.deserialize_str(Text)
    }
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sides;
        impl<'de> Visitor<'de> for Sides {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of sides")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut sides: A) -> Result<Shape, A::Error> {
                // A side of zero makes any others harmless.
                let (mut count, mut empty) = (Some(1_u64), false);
                while let Some(side) = sides.next_element::<u64>()? {
                    empty |= side == 0;
                    count = count.and_then(|count| count.checked_mul(side));
                }
                Ok(Shape { count: if empty { Some(0) } else { count } })
            }
        }
        deserializer.deserialize_seq(Sides)
    }
}
