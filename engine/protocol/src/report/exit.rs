//! The end of an answer: exit codes, and errors with an action.
//!
//! Owns: the numbers that scripts see. Does not own: the choice of an answer (the daemon).

use serde::{Deserialize, Serialize};

/// The exit codes of `ckptctl` and `ckptd`. The numbers are a contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExitCode {
    /// Done, or there was nothing to do.
    Done,
    /// Tried and not done; the answer lists the rest.
    Failed,
    /// The command line or the configuration is wrong.
    Usage,
    /// There is no such checkpoint, run or path.
    NotFound,
    /// The bytes are corrupt or gone, and no good copy is left.
    NotRecoverable,
    /// The daemon, the coordinator or Tier-3 is away; the same command may succeed later.
    Unavailable,
    /// A newer coordinator or incarnation decides now.
    Fenced,
}

impl ExitCode {
    /// Returns the process exit status.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::NotFound => 3,
            Self::NotRecoverable => 4,
            Self::Unavailable => 5,
            Self::Fenced => 6,
        }
    }
}

/// An [`ExitCode`] other than done, as the word in an error on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    Usage,
    NotFound,
    NotRecoverable,
    Unavailable,
    Fenced,
    /// Failed; also the reading of a word that this build does not know.
    #[serde(other)]
    Failed,
}

impl From<ErrorCode> for ExitCode {
    fn from(code: ErrorCode) -> Self {
        match code {
            ErrorCode::Failed => Self::Failed,
            ErrorCode::Usage => Self::Usage,
            ErrorCode::NotFound => Self::NotFound,
            ErrorCode::NotRecoverable => Self::NotRecoverable,
            ErrorCode::Unavailable => Self::Unavailable,
            ErrorCode::Fenced => Self::Fenced,
        }
    }
}

/// The reason why a command was not done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{what}{}{action}", if action.is_empty() { "" } else { "; " })]
pub struct ApiError {
    pub code: ErrorCode,
    /// The failure, with its path or key and the numbers that matter.
    pub what: String,
    /// The action for the person; empty if there is nothing to do.
    pub action: String,
}

impl ApiError {
    pub fn new(code: ErrorCode, what: impl Into<String>, action: impl Into<String>) -> Self {
        Self { code, what: what.into(), action: action.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_numbers_are_the_contract() {
        let numbers = [
            (ErrorCode::Failed, 1),
            (ErrorCode::Usage, 2),
            (ErrorCode::NotFound, 3),
            (ErrorCode::NotRecoverable, 4),
            (ErrorCode::Unavailable, 5),
            (ErrorCode::Fenced, 6),
        ];
        for (code, number) in numbers {
            assert_eq!(ExitCode::from(code).number(), number);
        }
        assert_eq!(ExitCode::Done.number(), 0);
    }

    #[test]
    fn an_unknown_error_word_is_a_failure_and_never_a_success() {
        let error: ApiError = serde_json::from_str(r#"{"code":"melted","what":"w","action":""}"#).unwrap();
        assert_eq!(error.code, ErrorCode::Failed);
        assert_eq!(error.to_string(), "w");
    }

    #[test]
    fn an_error_reads_as_one_sentence_with_its_action() {
        let error =
            ApiError::new(ErrorCode::NotFound, "no checkpoint at run@5", "`ckptctl ls run` lists them");
        assert_eq!(error.to_string(), "no checkpoint at run@5; `ckptctl ls run` lists them");
    }
}
