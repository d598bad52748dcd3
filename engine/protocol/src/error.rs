//! What went wrong, sorted by what the caller should do about it.
//!
//! Owns: [`ErrorKind`], an error with its causes as one line. Does not own: the error enums of the operations (each beside its operation).

/// What the caller should do. `fuse/errno.rs` and the exit codes of `ckptctl` match on it without a wildcard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request is wrong; repeating it will not help.
    Invalid,
    /// There is no such thing.
    NotFound,
    /// The bytes or the marker are not what they should be, and no good copy is left.
    Corrupt,
    /// Something we need is away; retry later.
    Unavailable,
    /// A newer coordinator or incarnation decides now; stop.
    Fenced,
    /// A budget is exhausted; free something or raise it.
    NoSpace,
}

/// An error with its causes in one line.
pub fn error_text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
