//! Bytes as text that can be read back, and the names of keys that are ours.
//!
//! Owns: which bytes are escaped, in a path and in each part of a key. Does not own: what a path may be (`path`), the object of a key
//! (`key`).

/// Our own directory, at the top of the prefix and inside every attempt.
pub(crate) const OURS: &str = ".tidemark";
pub(crate) const COMMITTED: &str = "_COMMITTED";
pub(crate) const RETIRED: &str = "_RETIRED";

/// Writes `bytes` as text that [`unescape`] reads back: bytes outside UTF-8, control characters and `%` as `%XX`.
#[must_use]
pub fn escape(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            if character == '%' || character.is_control() {
                let mut buffer = [0; 4];
                push_escaped(&mut text, character.encode_utf8(&mut buffer).as_bytes());
            } else {
                text.push(character);
            }
        }
        push_escaped(&mut text, chunk.invalid());
    }
    text
}

/// Appends each byte as `%XX`.
pub(crate) fn push_escaped(text: &mut String, bytes: &[u8]) {
    const DIGITS: [char; 16] =
        ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'A', 'B', 'C', 'D', 'E', 'F'];
    for byte in bytes {
        text.push('%');
        text.push(DIGITS[usize::from(byte >> 4)]);
        text.push(DIGITS[usize::from(byte & 15)]);
    }
}

/// Returns the bytes of an escaped text, whichever bytes were escaped. Capitals only; `None` for a broken escape.
#[must_use]
pub fn unescape(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'A'..=b'F' => Some(byte - b'A' + 10),
        _ => None,
    };
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(if byte == b'%' { digit(rest.next()?)? << 4 | digit(rest.next()?)? } else { byte });
    }
    Some(bytes)
}

/// Escapes a component of a run or checkpoint name. Our own names and the forms that end such a name are escaped by their first byte.
/// The same holds for `_`, which stands for the mount's root, and `.`, which no store keeps as a component.
pub(crate) fn escape_above_version(component: &[u8]) -> String {
    let text = escape(component);
    let reserved = is_our_name(&text)
        || text == "_"
        || text == "."
        || text.starts_with("a-")
        || looks_like_version(&text);
    if reserved { escape_first(&text) } else { text }
}

/// Escapes a component inside an attempt: framework files keep their names, so that a plain copy of the attempt loads.
pub(crate) fn escape_in_attempt(component: &[u8]) -> String {
    let text = escape(component);
    if is_our_name(&text) { escape_first(&text) } else { text }
}

/// Escapes a component of a loose path: on a POSIX store `x/g-1` would be a file and a directory at once.
pub(crate) fn escape_loose(component: &[u8]) -> String {
    let text = escape(component);
    if is_our_name(&text) || text.starts_with("g-") { escape_first(&text) } else { text }
}

pub(crate) fn is_our_name(text: &str) -> bool {
    matches!(text, OURS | COMMITTED | RETIRED)
}

/// Whether the text has the form `v<digits>.<digits>`. The check is wider than the form that we write, so that numbers past 2^64 confuse
/// nothing either.
pub(crate) fn looks_like_version(text: &str) -> bool {
    text.strip_prefix('v').is_some_and(|rest| {
        rest.contains('.') && !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit() || b == b'.')
    })
}

/// Escapes the first character. Only called with a text that begins with an ASCII character.
fn escape_first(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len() + 2);
    let (first, rest) = text.split_at(1);
    push_escaped(&mut escaped, first.as_bytes());
    escaped.push_str(rest);
    escaped
}
