//! The `.metadata` of torch.distributed.checkpoint, read without Python: the files that it needs and the length of
//! each.
//!
//! Owns: walking pickle opcodes for `_StorageInfo(relative_path, offset, length)`. Nothing is imported, called or
//! built: an object is the names and values that its state sets. Does not own: the verdict (`super`). Sources:
//! `pickletools` of CPython for the opcodes; `torch/distributed/checkpoint/filesystem.py` for `_StorageInfo`, a
//! dataclass whose state is the dictionary of its three fields.

use super::{Covered, IndexError};
use crate::path::RelPath;

/// The most values on the stack: pickle fills containers a thousand items at a time, so that it stays shallow.
const MAX_STACK: usize = 1 << 20;
/// The most values in the memo, where every object of a state of 100,000 ranks has some.
const MAX_MEMO: usize = 1 << 24;
/// The longest string that is kept; longer ones cannot be a path.
const MAX_STRING_BYTES: usize = crate::path::MAX_PATH_BYTES;

/// The part of a value that the walk keeps.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Value<'a> {
    Mark,
    Text(&'a [u8]),
    Number(u64),
    /// Anything else. A `_StorageInfo` is found when its state is set; until then nothing about objects matters.
    Other,
    /// A dictionary with the fields of a `_StorageInfo` seen so far.
    Fields(Fields<'a>),
}

/// The part of a value that the memo keeps. A dictionary is memoized when it is made, and so is empty.
#[derive(Debug, Clone, Copy)]
enum Slot {
    Text { at: u32, length: u16 },
    Number(u64),
    Other,
    Dictionary,
}

// Bounds the cost of a hostile index, which fills the memo with one byte a slot.
const _: () = assert!(size_of::<Slot>() * MAX_MEMO <= 256 << 20);
const _: () = assert!(super::MAX_INDEX_BYTES <= u32::MAX as usize && MAX_STRING_BYTES <= u16::MAX as usize);

#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Fields<'a> {
    relative_path: Option<&'a [u8]>,
    offset: Option<u64>,
    length: Option<u64>,
}

/// Returns, for each file, the end of its last extent: its exact size.
///
/// # Errors
/// When the bytes are not a pickle that this reader knows, or list no file.
pub(super) fn parse(bytes: &[u8]) -> Result<Covered, IndexError> {
    let mut walk = Walk { input: bytes, at: 0, stack: Vec::new(), memo: Vec::new(), covered: Covered::new() };
    walk.run()?;
    if walk.covered.is_empty() { Err(IndexError::Empty) } else { Ok(walk.covered) }
}

struct Walk<'a> {
    input: &'a [u8],
    at: usize,
    stack: Vec<Value<'a>>,
    memo: Vec<Slot>,
    covered: Covered,
}

impl<'a> Walk<'a> {
    fn run(&mut self) -> Result<(), IndexError> {
        loop {
            let at = self.at;
            let opcode = self.take(1)?[0];
            match opcode {
                b'.' => return Ok(()),
                // PROTO, FRAME: how the rest is written.
                0x80 => drop(self.take(1)?),
                0x95 => drop(self.take(8)?),
                // Strings: SHORT_BINUNICODE, BINUNICODE, BINUNICODE8, and the byte strings alike.
                0x8c | b'U' | b'C' => self.text(1, opcode == 0x8c)?,
                b'X' | b'T' | b'B' => self.text(4, opcode == b'X')?,
                0x8d | 0x8e | 0x96 => self.text(8, opcode == 0x8d)?,
                b'K' => self.unsigned(1)?,
                b'M' => self.unsigned(2)?,
                b'J' => self.signed(4)?,
                0x8a => {
                    let length = self.length(1)?;
                    self.signed(length)?;
                }
                0x8b => {
                    let length = self.length(4)?;
                    self.signed(length)?;
                }
                b'G' => {
                    self.take(8)?;
                    self.push(Value::Other)?;
                }
                b'(' => self.push(Value::Mark)?,
                // NONE, NEWTRUE, NEWFALSE, EMPTY_LIST, EMPTY_TUPLE, EMPTY_SET.
                b'N' | 0x88 | 0x89 | b']' | b')' | 0x8f => self.push(Value::Other)?,
                b'}' => self.push(Value::Fields(Fields::default()))?,
                // TUPLE, LIST, FROZENSET take to the mark; DICT too, with its fields.
                b't' | b'l' | 0x91 => {
                    self.pop_to_mark()?;
                    self.push(Value::Other)?;
                }
                b'd' => {
                    let items = self.pop_to_mark()?;
                    let mut fields = Fields::default();
                    items.chunks_exact(2).for_each(|pair| set_field(&mut fields, pair[0], pair[1]));
                    self.push(Value::Fields(fields))?;
                }
                // APPENDS, ADDITEMS; SETITEMS with its fields.
                b'e' | 0x90 => drop(self.pop_to_mark()?),
                b'u' => {
                    let items = self.pop_to_mark()?;
                    self.set_items(&items)?;
                }
                b's' => {
                    let (value, key) = (self.pop()?, self.pop()?);
                    self.set_items(&[key, value])?;
                }
                b'a' | b'0' => drop(self.pop()?),
                b'1' => drop(self.pop_to_mark()?),
                b'2' => {
                    let top =
                        *self.stack.last().ok_or(IndexError::Pickle { at, problem: "an empty stack" })?;
                    self.push(top)?;
                }
                // TUPLE1 to TUPLE3; STACK_GLOBAL, REDUCE, NEWOBJ, NEWOBJ_EX: objects are opaque.
                0x85 => self.replace(1)?,
                0x86 | 0x93 | b'R' | 0x81 => self.replace(2)?,
                0x87 | 0x92 => self.replace(3)?,
                b'c' => {
                    self.line()?;
                    self.line()?;
                    self.push(Value::Other)?;
                }
                b'b' => self.build()?,
                // MEMOIZE, BINPUT, LONG_BINPUT; BINGET, LONG_BINGET.
                0x94 => self.remember(self.memo.len())?,
                b'q' => {
                    let index = self.length(1)?;
                    self.remember(index)?;
                }
                b'r' => {
                    let index = self.length(4)?;
                    self.remember(index)?;
                }
                b'h' => self.recall(1)?,
                b'j' => self.recall(4)?,
                _ => return Err(IndexError::Opcode { at, opcode }),
            }
        }
    }

    fn build(&mut self) -> Result<(), IndexError> {
        let state = self.pop()?;
        // The object itself stays on the stack.
        if let Value::Fields(Fields {
            relative_path: Some(path),
            offset: Some(offset),
            length: Some(length),
        }) = state
        {
            let path = RelPath::new(path).map_err(|problem| IndexError::Path { problem })?;
            let end = offset.checked_add(length).ok_or(IndexError::Extent { offset, length })?;
            let known = self.covered.entry(path).or_insert(Some(0));
            *known = (*known).max(Some(end));
            if self.covered.len() > super::MAX_INDEX_FILES {
                return Err(IndexError::Files);
            }
        }
        Ok(())
    }

    fn set_items(&mut self, items: &[Value<'a>]) -> Result<(), IndexError> {
        let at = self.at;
        match self.stack.last_mut() {
            Some(Value::Fields(fields)) => {
                items.chunks_exact(2).for_each(|pair| set_field(fields, pair[0], pair[1]));
                Ok(())
            }
            Some(_) => Ok(()),
            None => Err(IndexError::Pickle { at, problem: "items for nothing" }),
        }
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], IndexError> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.input.len());
        let end = end.ok_or(IndexError::Pickle { at: self.at, problem: "an early end" })?;
        let bytes = &self.input[self.at..end];
        self.at = end;
        Ok(bytes)
    }

    fn line(&mut self) -> Result<&'a [u8], IndexError> {
        let rest = &self.input[self.at..];
        let end = rest.iter().position(|b| *b == b'\n');
        let end = end.ok_or(IndexError::Pickle { at: self.at, problem: "an early end" })?;
        self.take(end + 1)
    }

    /// Reads a little-endian length of `width` bytes.
    fn length(&mut self, width: usize) -> Result<usize, IndexError> {
        let at = self.at;
        let value = little_endian(self.take(width)?);
        let value = value.and_then(|value| usize::try_from(value).ok());
        value.ok_or(IndexError::Pickle { at, problem: "a length beyond memory" })
    }

    fn text(&mut self, width: usize, unicode: bool) -> Result<(), IndexError> {
        let length = self.length(width)?;
        let bytes = self.take(length)?;
        let kept = unicode && bytes.len() <= MAX_STRING_BYTES;
        self.push(if kept { Value::Text(bytes) } else { Value::Other })
    }

    fn unsigned(&mut self, width: usize) -> Result<(), IndexError> {
        let value = little_endian(self.take(width)?);
        self.push(value.map_or(Value::Other, Value::Number))
    }

    /// Reads two's complement; a negative number is no offset and no length.
    fn signed(&mut self, width: usize) -> Result<(), IndexError> {
        let bytes = self.take(width)?;
        let negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
        let value = if negative { None } else { little_endian(bytes) };
        self.push(value.map_or(Value::Other, Value::Number))
    }

    fn push(&mut self, value: Value<'a>) -> Result<(), IndexError> {
        if self.stack.len() >= MAX_STACK {
            return Err(IndexError::Pickle { at: self.at, problem: "more values than are read" });
        }
        self.stack.push(value);
        Ok(())
    }

    fn pop(&mut self) -> Result<Value<'a>, IndexError> {
        self.stack.pop().ok_or(IndexError::Pickle { at: self.at, problem: "an empty stack" })
    }

    fn pop_to_mark(&mut self) -> Result<Vec<Value<'a>>, IndexError> {
        let mark = self.stack.iter().rposition(|value| *value == Value::Mark);
        let mark = mark.ok_or(IndexError::Pickle { at: self.at, problem: "no mark" })?;
        let items = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(items)
    }

    fn replace(&mut self, count: usize) -> Result<(), IndexError> {
        for _ in 0..count {
            self.pop()?;
        }
        self.push(Value::Other)
    }

    /// Stores the top value in a memo slot. Slots are assigned in order; a slot far beyond is refused rather than
    /// filled up to.
    fn remember(&mut self, index: usize) -> Result<(), IndexError> {
        let at = self.at;
        let top = *self.stack.last().ok_or(IndexError::Pickle { at, problem: "an empty stack" })?;
        if index >= MAX_MEMO || index > self.memo.len() {
            return Err(IndexError::Pickle {
                at,
                problem: "a memo slot out of order, or more than are kept",
            });
        }
        let new = match top {
            Value::Text(text) => self.place_of(text),
            Value::Number(number) => Slot::Number(number),
            Value::Fields(_) => Slot::Dictionary,
            Value::Mark | Value::Other => Slot::Other,
        };
        match self.memo.get_mut(index) {
            Some(slot) => *slot = new,
            None => self.memo.push(new),
        }
        Ok(())
    }

    /// Returns the place of a text, which is always a part of the input.
    fn place_of(&self, text: &[u8]) -> Slot {
        let at = text.as_ptr().addr().wrapping_sub(self.input.as_ptr().addr());
        match (u32::try_from(at), u16::try_from(text.len())) {
            (Ok(at), Ok(length)) => Slot::Text { at, length },
            _ => Slot::Other,
        }
    }

    fn recall(&mut self, width: usize) -> Result<(), IndexError> {
        let at = self.at;
        let index = self.length(width)?;
        let slot = self.memo.get(index).copied();
        let slot = slot.ok_or(IndexError::Pickle { at, problem: "a memo slot that was never filled" })?;
        self.push(match slot {
            Slot::Text { at, length } => {
                let at = at as usize;
                Value::Text(&self.input[at..at + usize::from(length)])
            }
            Slot::Number(number) => Value::Number(number),
            Slot::Dictionary => Value::Fields(Fields::default()),
            Slot::Other => Value::Other,
        })
    }
}

fn set_field<'a>(fields: &mut Fields<'a>, key: Value<'a>, value: Value<'a>) {
    match (key, value) {
        (Value::Text(b"relative_path"), Value::Text(path)) => fields.relative_path = Some(path),
        (Value::Text(b"offset"), Value::Number(offset)) => fields.offset = Some(offset),
        (Value::Text(b"length"), Value::Number(length)) => fields.length = Some(length),
        _ => {}
    }
}

/// Returns `None` past 2^64.
fn little_endian(bytes: &[u8]) -> Option<u64> {
    let (low, high) = bytes.split_at(bytes.len().min(8));
    if high.iter().any(|b| *b != 0) {
        return None;
    }
    Some(low.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn short(text: &str) -> Vec<u8> {
        [&[0x8c, u8::try_from(text.len()).unwrap()], text.as_bytes()].concat()
    }

    fn long(text: &str) -> Vec<u8> {
        [b"X", &u32::try_from(text.len()).unwrap().to_le_bytes()[..], text.as_bytes()].concat()
    }

    fn covered(bytes: &[u8]) -> Vec<(String, Option<u64>)> {
        parse(bytes).unwrap().into_iter().map(|(path, end)| (path.to_string(), end)).collect()
    }

    /// Protocol 4, as today's torch writes it: two extents of one file, the second by memo.
    #[test]
    fn protocol_4_extents_end_where_the_file_ends() {
        let pickle = [
            &[0x80, 4, 0x95, 0, 0, 0, 0, 0, 0, 0, 0, b'}', 0x94, b'('][..],
            &short("torch.distributed.checkpoint.filesystem"),
            &[0x94],
            &short("_StorageInfo"),
            &[0x94, 0x93, 0x94, b')', 0x81, 0x94, b'}', 0x94, b'('],
            &short("relative_path"),
            &[0x94],
            &short("__0_0.distcp"),
            &[0x94],
            &short("offset"),
            &[0x94, b'K', 0],
            &short("length"),
            &[0x94, b'M', 0, 2, b'u', b'b'],
            // The second object takes class, keys and path from the memo: 3, 6, 7, 8, 9.
            &[b'h', 3, b')', 0x81, b'}', b'(', b'h', 6, b'h', 7, b'h', 8, b'M', 0, 2, b'h', 9],
            &[0x8a, 5, 0, 0, 0, 0, 1, b'u', b'b', b'u', b'.'],
        ]
        .concat();
        assert_eq!(covered(&pickle), [("__0_0.distcp".into(), Some((1 << 32) + 512))]);
    }

    /// Protocol 2: GLOBAL, BINUNICODE, BINPUT, BININT.
    #[test]
    fn protocol_2_is_read_too() {
        let pickle = [
            &b"\x80\x02ctorch.distributed.checkpoint.filesystem\n_StorageInfo\nq\x00)\x81}q\x01("[..],
            &long("relative_path"),
            b"q\x02",
            &long("__3_0.distcp"),
            &long("offset"),
            b"J\x10\x00\x00\x00",
            &long("length"),
            b"K\x05ub.",
        ]
        .concat();
        assert_eq!(covered(&pickle), [("__3_0.distcp".into(), Some(21))]);
    }

    /// Written by `torch.distributed.checkpoint.save` of PyTorch 2.15.0; the shard beside it had 9,960 bytes.
    #[test]
    fn what_torch_writes_gives_the_exact_size_of_its_shard() {
        let bytes = include_bytes!("../../testdata/torch-2.15-two-tensors.metadata");
        assert_eq!(covered(bytes), [("__0_0.distcp".into(), Some(9960))]);
        for end in 0..bytes.len() {
            assert!(parse(&bytes[..end]).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn a_name_that_leaves_its_directory_is_refused() {
        let object = |path: &str, length: &[u8]| {
            let fields = [&short("relative_path")[..], &short(path), &short("offset"), &[b'K', 1]].concat();
            [b"N}(", &fields[..], &short("length"), length, b"ub."].concat()
        };
        assert!(parse(&object("a/b", &[b'K', 1])).is_ok());
        assert!(matches!(parse(&object("../b", &[b'K', 1])), Err(IndexError::Path { .. })));
        let huge = [&[0x8a, 9][..], &[0xff; 8], &[0]].concat();
        assert!(matches!(parse(&object("a", &huge)), Err(IndexError::Extent { .. })));
        let negative = [0x8a, 1, 0xff];
        assert!(matches!(parse(&object("a", &negative)), Err(IndexError::Empty)));
    }

    #[test]
    fn an_index_that_is_a_bomb_ends_where_its_bounds_are() {
        for bomb in [vec![b'}'; MAX_STACK + 1], [&b"N"[..], &vec![0x94; MAX_MEMO + 1]].concat()] {
            assert!(matches!(parse(&bomb), Err(IndexError::Pickle { .. })));
        }
        let far = b"Nr\xff\xff\xff\x7f.";
        assert!(
            matches!(parse(far), Err(IndexError::Pickle { problem, .. }) if problem.contains("out of order"))
        );
        let long = [&b"X\xff\xff\xff\xff"[..], &[b'x'; 100]].concat();
        assert!(matches!(parse(&long), Err(IndexError::Pickle { problem: "an early end", .. })));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn no_opcodes_make_the_reader_panic(
            bytes in prop::collection::vec(prop::sample::select(b"(}{)u.bKh\x94\x8c\x81N\x85ts2q\x00\x01".to_vec()), 0..80),
        ) {
            let _ = parse(&bytes);
        }
    }
}
