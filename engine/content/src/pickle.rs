//! Pickles: whether they end, and which storages torch's pickles name by persistent id.
//!
//! Owns: walking opcodes. Nothing is imported, called or built: of values it keeps only the parts of torch's persistent ids. Does not
//! own: the place of the storages (`torch_zip`, `torch_legacy`). Sources: `pickletools` of CPython for the opcodes;
//! `torch/serialization.py` and `torch/storage.py` for the ids.

use crate::Read;
use crate::source::{Source, Stop, Window};
use std::collections::BTreeMap;

/// The newest supported protocol.
const MAX_PROTOCOL: u8 = 5;
/// Maximum number of values on the stack. Pickle fills containers a thousand items at a time, so that it stays shallow.
const MAX_STACK: usize = 1 << 18;
/// Maximum number of values in the memo: a state of 100,000 tensors has some ten for each.
const MAX_MEMO: usize = 1 << 20;
/// Maximum number of storages of one file.
const MAX_STORAGES: usize = 1 << 18;
/// Longest string that is examined; longer ones are skipped.
const MAX_TEXT_BYTES: usize = 256;
/// Longest line of the text opcodes. No checkpoint holds a number of so many digits.
const MAX_LINE_BYTES: u64 = 64 << 10;
/// Opcodes in their order after which the file can only be a pickle. The first two bytes alone may begin other things.
const CERTAIN_OPCODES: u64 = 8;
/// Longest frame. No frame of a pickle is longer; a larger number belongs to some other file.
const MAX_FRAME_BYTES: u64 = 1 << 40;

/// The part of a value that the walk keeps.
#[derive(Debug, Clone, Copy)]
enum Value {
    Mark,
    Other,
    Number(u64),
    /// A text that is a decimal number as torch writes its keys.
    Key(u64),
    Word(Word),
    /// A storage class, with the bytes of one item.
    Class(u8),
    Storage {
        key: u64,
        count: u64,
        item_bytes: u8,
    },
    /// The persistent id of a module's source code, which older torch keeps.
    Module,
}

/// Texts that matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    Storage,
    Module,
    /// The name of a torch module.
    Torch,
    /// A storage class, with the bytes of its item.
    Class(u8),
}

/// A storage that a persistent id names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Storage {
    /// Number of items in the first id that names the storage.
    pub(crate) count: u64,
    pub(crate) item_bytes: u8,
    /// Largest size that an id gives the storage, in bytes.
    pub(crate) bytes: u64,
}

/// The content of a pickle before its STOP.
#[derive(Debug, Default)]
pub(crate) struct Walked {
    /// Offset of the byte after STOP.
    pub(crate) end: u64,
    pub(crate) opcodes: u64,
    /// Storages by key.
    pub(crate) storages: BTreeMap<u64, Storage>,
    /// Whether there are persistent ids that are not torch's.
    pub(crate) foreign_ids: bool,
    /// All texts that are keys, in order.
    pub(crate) keys: Vec<u64>,
    pub(crate) other_texts: bool,
}

/// Whether the file begins as a pickle of protocol 2 or newer. Older ones cannot be recognised.
pub(crate) fn begins(head: &[u8]) -> bool {
    matches!(head, [0x80, 2..=MAX_PROTOCOL, _, ..])
}

/// Reads pickles, one after the other, to the end of the file.
pub(crate) fn read(source: &mut Source<'_>) -> Read {
    let size_bytes = source.size_bytes();
    let (mut at, mut pickles, mut opcodes) = (0, 0_u64, 0);
    while at < size_bytes {
        if pickles > 0 && !matches!(source.array::<2>(at), Ok([0x80, 2..=MAX_PROTOCOL])) {
            return Err(Stop::unknown(format!(
                "its pickle ends at {at}, and {} other bytes follow",
                size_bytes - at
            )));
        }
        let mut walk = Walk::new(source, at, size_bytes);
        match walk.run() {
            Ok(()) => {}
            Err(Stop::Early(early)) if walk.is_certain() => {
                return Err(Stop::broken(format!("its pickle does not end: {early}")));
            }
            Err(stop) => return Err(stop),
        }
        (at, pickles, opcodes) = (walk.found.end, pickles + 1, opcodes + walk.found.opcodes);
    }
    Ok(format!("{pickles} pickle(s) of {opcodes} opcodes end with the file at {size_bytes}"))
}

/// Walks one pickle that begins at `at`.
pub(crate) fn walk(source: &mut Source<'_>, at: u64, end: u64) -> Result<Walked, Stop> {
    let mut walk = Walk::new(source, at, end);
    walk.run()?;
    Ok(walk.found)
}

struct Walk<'s, 'a> {
    input: Window<'s, 'a>,
    stack: Vec<Value>,
    memo: Vec<Value>,
    found: Walked,
    framed: bool,
    /// Whether the writer puts bytes between the opcodes.
    mixed: bool,
}

impl<'s, 'a> Walk<'s, 'a> {
    fn new(source: &'s mut Source<'a>, at: u64, end: u64) -> Self {
        let input = Window::new(source, at, end);
        Self { input, stack: vec![], memo: vec![], found: Walked::default(), framed: false, mixed: false }
    }

    /// Whether the opcodes so far can only be a pickle's.
    fn is_certain(&self) -> bool {
        self.framed || self.found.opcodes >= CERTAIN_OPCODES
    }

    fn run(&mut self) -> Result<(), Stop> {
        loop {
            self.input.step()?;
            let at = self.input.at();
            let opcode = self.input.byte()?;
            if opcode == b'.' {
                self.found.end = self.input.at();
                return Ok(());
            }
            self.one(at, opcode)?;
            self.found.opcodes += 1;
            if self.mixed {
                return Err(Stop::unknown("joblib puts arrays between its opcodes"));
            }
        }
    }

    fn one(&mut self, at: u64, opcode: u8) -> Result<(), Stop> {
        match opcode {
            // PROTO, FRAME: how the rest is written.
            0x80 => self.protocol(),
            0x95 => self.frame(at),
            // SHORT_BINUNICODE, BINUNICODE, BINUNICODE8, and the byte strings alike: those of Python 2 were texts.
            0x8c | b'U' | b'C' => self.text(1),
            b'X' | b'T' | b'B' => self.text(4),
            0x8d | 0x8e | 0x96 => self.text(8),
            // BININT1, BININT2, BININT; LONG1, LONG4.
            b'K' => self.unsigned::<1>(),
            b'M' => self.unsigned::<2>(),
            b'J' => self.signed(4),
            0x8a => {
                let length = self.length(1)?;
                self.signed(length)
            }
            0x8b => {
                let length = self.length(4)?;
                self.signed(length)
            }
            // BINFLOAT; EXT1, EXT2, EXT4: registered objects.
            b'G' => self.opaque(8),
            0x82 => self.opaque(1),
            0x83 => self.opaque(2),
            0x84 => self.opaque(4),
            b'(' => self.push(Value::Mark),
            // NONE, NEWTRUE, NEWFALSE; the empty list, tuple, dictionary, set; NEXT_BUFFER.
            b'N' | 0x88 | 0x89 | b']' | b')' | b'}' | 0x8f | 0x97 => self.push(Value::Other),
            // READONLY_BUFFER changes only the value on top.
            0x98 => Ok(()),
            b't' => self.tuple(),
            // LIST, DICT, FROZENSET, OBJ take to the mark.
            b'l' | b'd' | 0x91 | b'o' => {
                self.pop_to_mark()?;
                self.push(Value::Other)
            }
            // APPENDS, ADDITEMS, SETITEMS, POP_MARK.
            b'e' | 0x90 | b'u' | b'1' => self.pop_to_mark(),
            // SETITEM; APPEND, POP, BUILD.
            b's' => self.pop().and_then(|_| self.pop()).map(drop),
            b'a' | b'0' | b'b' => self.pop().map(drop),
            b'2' => {
                let top = self.top()?;
                self.push(top)
            }
            // TUPLE1 to TUPLE3; REDUCE, NEWOBJ, NEWOBJ_EX: objects are opaque.
            0x85 => self.replace(1),
            0x86 | b'R' | 0x81 => self.replace(2),
            0x87 | 0x92 => self.replace(3),
            // GLOBAL, INST, STACK_GLOBAL.
            b'c' => {
                let (module, name) = (self.word_line()?, self.word_line()?);
                self.push(class(module, name))
            }
            b'i' => {
                let _ = (self.word_line()?, self.word_line()?);
                self.pop_to_mark()?;
                self.push(Value::Other)
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                self.push(class(module, name))
            }
            // PERSID, BINPERSID.
            b'P' => {
                self.found.foreign_ids = true;
                self.opaque_line()
            }
            b'Q' => self.persistent(),
            // MEMOIZE, PUT, BINPUT, LONG_BINPUT; GET, BINGET, LONG_BINGET.
            0x94 => self.remember(self.memo.len() as u64),
            b'p' => self.number_line().and_then(|index| self.remember(index)),
            b'q' => self.length(1).and_then(|index| self.remember(index)),
            b'r' => self.length(4).and_then(|index| self.remember(index)),
            b'g' => self.number_line().and_then(|index| self.recall(index)),
            b'h' => self.length(1).and_then(|index| self.recall(index)),
            b'j' => self.length(4).and_then(|index| self.recall(index)),
            // INT, LONG, FLOAT, STRING, UNICODE as text.
            b'I' | b'L' | b'F' | b'S' | b'V' => self.opaque_line(),
            _ => Err(self.unknown(&format!("the opcode {opcode:#04x} is not known here"))),
        }
    }

    fn protocol(&mut self) -> Result<(), Stop> {
        let protocol = self.input.byte()?;
        if protocol <= MAX_PROTOCOL {
            return Ok(());
        }
        Err(self.unknown(&format!(
            "its protocol is {protocol}, and the newest that is known here {MAX_PROTOCOL}"
        )))
    }

    /// Reads a frame's length, which shows a cut frame at its beginning.
    fn frame(&mut self, at: u64) -> Result<(), Stop> {
        let length = u64::from_le_bytes(self.input.array()?);
        if length > MAX_FRAME_BYTES {
            return Err(self.unknown(&format!("the frame at {at} would have {length} bytes")));
        }
        self.framed = true;
        self.input.expect(length)
    }

    /// Reads a text, or bytes, whose length has this width.
    fn text(&mut self, width: usize) -> Result<(), Stop> {
        let length = self.length(width)?;
        let mut buffer = [0; MAX_TEXT_BYTES];
        let buffer = usize::try_from(length).ok().and_then(|length| buffer.get_mut(..length));
        let value = match buffer {
            Some(text) => {
                self.input.fill(text)?;
                self.word(text)
            }
            None => {
                self.input.skip(length)?;
                Value::Other
            }
        };
        match value {
            Value::Key(key) if self.found.keys.len() < MAX_STORAGES => self.found.keys.push(key),
            _ => self.found.other_texts = true,
        }
        self.push(value)
    }

    fn word(&mut self, text: &[u8]) -> Value {
        if text == b"NumpyArrayWrapper" || text.windows(6).any(|part| part == b"joblib") {
            self.mixed = true;
        }
        match text {
            b"storage" => Value::Word(Word::Storage),
            b"module" => Value::Word(Word::Module),
            _ if text.starts_with(b"torch") => Value::Word(Word::Torch),
            _ => match (key(text), item_bytes(text)) {
                (Some(key), _) => Value::Key(key),
                (None, Some(bytes)) => Value::Word(Word::Class(bytes)),
                (None, None) => Value::Other,
            },
        }
    }

    fn word_line(&mut self) -> Result<Value, Stop> {
        let mut buffer = [0; MAX_TEXT_BYTES];
        let length = self.line(&mut buffer)?;
        Ok(buffer.get(..length).map_or(Value::Other, |text| self.word(text)))
    }

    fn number_line(&mut self) -> Result<u64, Stop> {
        let mut buffer = [0; MAX_TEXT_BYTES];
        let length = self.line(&mut buffer)?;
        let number = buffer.get(..length).and_then(|text| std::str::from_utf8(text).ok()?.parse().ok());
        number.ok_or_else(|| self.unknown("a memo slot is no number"))
    }

    fn opaque_line(&mut self) -> Result<(), Stop> {
        self.line(&mut [0; MAX_TEXT_BYTES])?;
        self.push(Value::Other)
    }

    /// Reads to the end of a line. Keeps the part that fits into `buffer`, and returns the whole length.
    fn line(&mut self, buffer: &mut [u8]) -> Result<usize, Stop> {
        let begun = self.input.at();
        let mut length = 0;
        loop {
            let byte = self.input.byte()?;
            if byte == b'\n' {
                return Ok(length);
            }
            if self.input.at() - begun > MAX_LINE_BYTES {
                return Err(self.unknown(&format!("a line has more than {MAX_LINE_BYTES} bytes")));
            }
            if let Some(place) = buffer.get_mut(length) {
                *place = byte;
            }
            length += 1;
        }
    }

    /// Reads a little-endian number of at most eight bytes.
    fn length(&mut self, width: usize) -> Result<u64, Stop> {
        let mut bytes = [0; 8];
        self.input.fill(&mut bytes[..width])?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn unsigned<const WIDTH: usize>(&mut self) -> Result<(), Stop> {
        let number = self.length(WIDTH)?;
        self.push(Value::Number(number))
    }

    /// Reads two's complement. A negative number is no count, and one beyond 2^64 is no stored size.
    fn signed(&mut self, length: u64) -> Result<(), Stop> {
        let mut bytes = [0; 9];
        let used = usize::try_from(length).ok().and_then(|length| bytes.get_mut(..length));
        let Some(used) = used else { return self.opaque(length) };
        self.input.fill(used)?;
        let negative = used.last().is_some_and(|last| last & 0x80 != 0);
        let [low @ .., high] = bytes;
        let fits = !negative && high == 0;
        self.push(if fits { Value::Number(u64::from_le_bytes(low)) } else { Value::Other })
    }

    fn opaque(&mut self, length: u64) -> Result<(), Stop> {
        self.input.skip(length)?;
        self.push(Value::Other)
    }

    /// Makes a tuple. The ids of torch are tuples: `("storage", class, key, location, count)`, with a view in older files.
    fn tuple(&mut self) -> Result<(), Stop> {
        use Value::{Class, Key, Number, Word as Text};
        let mark = self.mark()?;
        let value = match self.stack[mark + 1..] {
            [Text(Word::Storage), Class(item_bytes), Key(key), _, Number(count)]
            | [Text(Word::Storage), Class(item_bytes), Key(key), _, Number(count), _] => {
                Value::Storage { key, count, item_bytes }
            }
            [Text(Word::Module), _, _, _] => Value::Module,
            _ => Value::Other,
        };
        self.stack.truncate(mark);
        self.push(value)
    }

    fn persistent(&mut self) -> Result<(), Stop> {
        match self.pop()? {
            Value::Storage { key, count, item_bytes } => {
                let bytes = count.saturating_mul(u64::from(item_bytes));
                let storages = &mut self.found.storages;
                if storages.len() >= MAX_STORAGES && !storages.contains_key(&key) {
                    return Err(Stop::unknown(format!("it names more than {MAX_STORAGES} storages")));
                }
                let known = storages.entry(key).or_insert(Storage { count, item_bytes, bytes });
                known.bytes = known.bytes.max(bytes);
            }
            Value::Module => {}
            _ => self.found.foreign_ids = true,
        }
        self.push(Value::Other)
    }

    fn push(&mut self, value: Value) -> Result<(), Stop> {
        if self.stack.len() >= MAX_STACK {
            return Err(self.unknown(&format!("its stack has more than {MAX_STACK} values")));
        }
        self.stack.push(value);
        Ok(())
    }

    fn top(&self) -> Result<Value, Stop> {
        self.stack.last().copied().ok_or_else(|| self.unknown("its stack is empty where a value is taken"))
    }

    fn pop(&mut self) -> Result<Value, Stop> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn replace(&mut self, count: usize) -> Result<(), Stop> {
        for _ in 0..count {
            self.pop()?;
        }
        self.push(Value::Other)
    }

    /// Returns the place of the last mark.
    fn mark(&self) -> Result<usize, Stop> {
        let mark = self.stack.iter().rposition(|value| matches!(value, Value::Mark));
        mark.ok_or_else(|| self.unknown("its stack has no mark where one is taken"))
    }

    fn pop_to_mark(&mut self) -> Result<(), Stop> {
        let mark = self.mark()?;
        self.stack.truncate(mark);
        Ok(())
    }

    /// Stores a value in the memo. Slots are assigned in order, by Python 2 from 1 on; a slot far beyond is refused rather than
    /// filled up to.
    fn remember(&mut self, index: u64) -> Result<(), Stop> {
        let top = self.top()?;
        if self.memo.is_empty() && index == 1 {
            self.memo.push(Value::Other);
        }
        let known = self.memo.len();
        match usize::try_from(index).ok().filter(|index| *index <= known && known < MAX_MEMO) {
            Some(index) if index == known => self.memo.push(top),
            Some(index) => self.memo[index] = top,
            None => {
                let problem = format!("memo slot {index} follows {known}, of at most {MAX_MEMO} in order");
                return Err(self.unknown(&problem));
            }
        }
        Ok(())
    }

    fn recall(&mut self, index: u64) -> Result<(), Stop> {
        let value = usize::try_from(index).ok().and_then(|index| self.memo.get(index)).copied();
        match value {
            Some(value) => self.push(value),
            None => Err(self.unknown(&format!("memo slot {index} is read before it is filled"))),
        }
    }

    fn unknown(&self, problem: &str) -> Stop {
        Stop::Unknown(format!("before byte {} of its pickle {problem}", self.input.at()))
    }
}

fn class(module: Value, name: Value) -> Value {
    match (module, name) {
        (Value::Word(Word::Torch), Value::Word(Word::Class(item_bytes))) => Value::Class(item_bytes),
        _ => Value::Other,
    }
}

/// Parses a key as torch writes it: decimal, without leading zeros.
pub(crate) fn key(text: &[u8]) -> Option<u64> {
    match text {
        [b'0'] => Some(0),
        [b'1'..=b'9', rest @ ..] if rest.iter().all(u8::is_ascii_digit) => {
            std::str::from_utf8(text).ok()?.parse().ok()
        }
        _ => None,
    }
}

/// Returns the bytes of one item of a storage class. torch adds no class: newer types are untyped storages.
fn item_bytes(name: &[u8]) -> Option<u8> {
    Some(match name {
        b"UntypedStorage" | b"ByteStorage" | b"CharStorage" | b"BoolStorage" => 1,
        b"QInt8Storage" | b"QUInt8Storage" | b"QUInt4x2Storage" | b"QUInt2x4Storage" => 1,
        b"HalfStorage" | b"BFloat16Storage" | b"ShortStorage" => 2,
        b"FloatStorage" | b"IntStorage" | b"QInt32Storage" => 4,
        b"DoubleStorage" | b"LongStorage" | b"ComplexFloatStorage" => 8,
        b"ComplexDoubleStorage" => 16,
        _ => return None,
    })
}
