//! Labels: an administrator's description of where a node stands, such as `rack=r7`.
//!
//! Owns: their text form and bounds. Does not own: their consequences (`placement`).

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Maximum number of labels of a node: more than a rack, a switch, a row, a room and some of the user's
/// own. Bounded because each join sends all labels.
pub const LABELS_MAX: usize = 16;
/// Maximum number of bytes of a key or a value; as for a node's name.
pub const LABEL_BYTES_MAX: usize = 64;

/// The labels of one node; at most [`LABELS_MAX`], each checked.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, String>", into = "BTreeMap<String, String>")]
pub struct Labels(BTreeMap<String, String>);

/// The reason why something is no label.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    #[error("{text:?} is no label; write key=value, such as rack=r7")]
    Form { text: String },
    #[error(
        "{text:?} in a label is not 1 to {LABEL_BYTES_MAX} letters, digits, '.', '_', '-' or '/'; choose a shorter or plainer one"
    )]
    Word { text: String },
    #[error("label {key} is given twice, as {first:?} and {second:?}; give it once")]
    Twice { key: String, first: String, second: String },
    #[error("{found} labels, and {LABELS_MAX} are taken at most; leave some out")]
    TooMany { found: usize },
}

/// A single `key=value`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    pub key: String,
    pub value: String,
}

impl FromStr for Label {
    type Err = LabelError;

    fn from_str(text: &str) -> Result<Self, LabelError> {
        let (key, value) = text.split_once('=').ok_or_else(|| LabelError::Form { text: shown(text) })?;
        check(key)?;
        check(value)?;
        Ok(Self { key: key.to_owned(), value: value.to_owned() })
    }
}

impl Labels {
    /// # Errors
    /// When a key is given twice with two values, or there are more than [`LABELS_MAX`].
    pub fn of(labels: impl IntoIterator<Item = Label>) -> Result<Self, LabelError> {
        let mut all: BTreeMap<String, String> = BTreeMap::new();
        for Label { key, value } in labels {
            match all.get(&key) {
                Some(first) if *first != value => {
                    return Err(LabelError::Twice { key, first: first.clone(), second: value });
                }
                _ => all.insert(key, value),
            };
        }
        Self::try_from(all)
    }

    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }
}

impl TryFrom<BTreeMap<String, String>> for Labels {
    type Error = LabelError;

    fn try_from(all: BTreeMap<String, String>) -> Result<Self, LabelError> {
        if all.len() > LABELS_MAX {
            return Err(LabelError::TooMany { found: all.len() });
        }
        all.iter().try_for_each(|(key, value)| check(key).and_then(|()| check(value)))?;
        Ok(Self(all))
    }
}

impl From<Labels> for BTreeMap<String, String> {
    fn from(labels: Labels) -> Self {
        labels.0
    }
}

impl fmt::Display for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (key, value)) in self.iter().enumerate() {
            write!(f, "{}{key}={value}", if index > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}

fn check(word: &str) -> Result<(), LabelError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'/');
    if word.is_empty() || word.len() > LABEL_BYTES_MAX || !word.bytes().all(allowed) {
        return Err(LabelError::Word { text: shown(word) });
    }
    Ok(())
}

/// Shortens a text of any length for an error.
fn shown(text: &str) -> String {
    text.chars().take(LABEL_BYTES_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_a_key_and_a_value() {
        let label: Label = "rack=r7".parse().unwrap();
        assert_eq!((label.key.as_str(), label.value.as_str()), ("rack", "r7"));
        for text in ["rack", "=r7", "rack=", "rack=r 7", "rack=a=b", &format!("a={}", "x".repeat(65))] {
            assert!(text.parse::<Label>().is_err(), "{text}");
        }
    }

    #[test]
    fn labels_from_outside_are_checked_and_bounded() {
        let labels: Labels = serde_json::from_str(r#"{"rack":"r7","switch":"s1"}"#).unwrap();
        assert_eq!(labels.get("switch"), Some("s1"));
        assert_eq!(labels.to_string(), "rack=r7,switch=s1");
        assert!(serde_json::from_str::<Labels>(r#"{"rack":"a b"}"#).is_err());
        let many: BTreeMap<_, _> = (0..=LABELS_MAX).map(|at| (format!("k{at}"), "v".to_owned())).collect();
        assert_eq!(Labels::try_from(many), Err(LabelError::TooMany { found: LABELS_MAX + 1 }));
        let one = |text: &str| text.parse::<Label>().unwrap();
        assert!(matches!(Labels::of([one("a=b"), one("a=c")]), Err(LabelError::Twice { .. })));
        assert!(Labels::of([one("a=b"), one("a=b")]).is_ok());
    }
}
