//! Kinds of errors, sorted by the caller's reaction.
//!
//! Owns: [`ErrorKind`], an error with its causes as one line. Does not own: the error enums of the operations (each beside its operation).

/// The reaction expected of the caller. `fuse/errno.rs` and the exit codes of `ckptctl` match on it without a wildcard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request is wrong; repeating it will not help.
    Invalid,
    /// There is no such thing.
    NotFound,
    /// The bytes or the marker are wrong, and no good copy is left.
    Corrupt,
    /// A needed service is away; retry later.
    Unavailable,
    /// A newer coordinator or incarnation decides now; stop.
    Fenced,
    /// A budget is exhausted; free something or raise it.
    NoSpace,
}

/// Formats an error with its causes in one line.
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
